#!/bin/bash
# Everything that needs a Hopper GPU, from the repository root: correctness, bits, faults, the functional step, then
# compute-sanitizer on a tiny step (driver look-ups of newer symbols are not errors of ours: no API errors).
set -uo pipefail
out=${1:-/tmp/mok-gpu}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 MOK_TIMEOUT_LOCAL=${MOK_TIMEOUT_LOCAL:-2}
status=0
check() {  # name, seconds, command...
  local name=$1 limit=$2
  shift 2
  timeout -s KILL "$limit" "$@" >"$out/$name.log" 2>&1
  local code=$?
  [ $code -eq 0 ] || status=1
  printf '%-14s rc %d  %s\n' "$name" $code "$(tail -n 1 "$out/$name.log" | cut -c1-150)"
}
check correct 60 python3 tests/gpu/forward_check.py correct
for part in schedule quantize epilogue meeting contract faults bits trace big; do
  check "$part" 60 python3 tests/gpu/engine_check.py "$part"
done
check functional 90 python3 tests/gpu/functional_check.py
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
  check memcheck 60 "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 python3 tests/gpu/tiny.py
  check synccheck 60 "$sanitizer" --tool synccheck --error-exitcode 9 python3 tests/gpu/tiny.py
  check racecheck 60 "$sanitizer" --tool racecheck --racecheck-report all --print-limit 40 --error-exitcode 9 python3 tests/gpu/tiny.py
  grep -hE "hazard|Race reported|and Write|and Read|at .*\.cu" "$out/racecheck.log" | sed 's/0x[0-9a-f]*/ADDR/g' | sort | uniq -c | sort -rn | head -30
fi
exit $status
