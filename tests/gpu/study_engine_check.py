"""The study engine on this GPU: warm kernels that come back clean, graphs of two source trees in one process, failures.

`python tests/gpu/study_engine_check.py [FOLDER]`; about half a minute on an H200.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
import time

from checks import Checks

from mok.ablate import Study, sentence

STEP = {"shape": "qwen3-30b-a3b", "tokens": 2048, "ep": 4, "ranks": "closed", "engine": "cuda"}


def study(root: str, name: str, **fields: object) -> Study:
    given = {"parameters": STEP, "paired": True, "root": root, "max_blocks": 8, "burst": 3, "cold_checks": 0} | fields
    return Study.from_dict({"name": name, **given})


def main() -> None:
    checks = Checks("study engine")
    root = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    begin = time.perf_counter()
    made = study(
        root, "knobs", factors={"minibatch_size": [1024, 4096], "fwd_num_comm_sms": [4, 8]}, bits="equal", cold_checks=1,
        strata={"routing": ["uniform", "zipf:1.2"]}, baseline={"minibatch_size": 4096, "fwd_num_comm_sms": 8},
    )  # fmt: skip
    result = made.run()
    runs = made.runs()
    print(result, f"{time.perf_counter() - begin:.1f} s")
    for run in runs:
        print(run.key, run.status, run.strata, run.factors, f"{run.wall_s:.2f} s", run.metrics, run.kernel, run.failure)
    checks.check(result.state == "done", "every run of eight is done")
    checks.check(all(run.same_bits is True for run in runs), "no setting changes a bit")
    checks.check(all(run.kernel["dirty"] == [] for run in runs), "kernels come back clean")
    checks.check(sum(run.kernel["warm"] for run in runs) >= 6, "runs share a warm kernel")
    checks.check(any((run.cold_check or {}).get("same_bits") is True for run in runs), "a fresh kernel gives the same bits")
    checks.check(all(len(made.log_ratios(run)) == run.num_blocks == 8 for run in runs), "every block is whole")
    guards = runs[0].guards(made.folder)
    checks.check(bool((guards["canary_ns"] > 0).all() and (guards["sm_clock_mhz"] > 0).all()), "guards of every block are there")
    print(sentence.of(made))

    other = pathlib.Path(root) / "csrc"
    shutil.copytree(pathlib.Path(__file__).parents[2] / "csrc", other)
    text = (other / "forward.cu").read_text()
    (other / "forward.cu").write_text(text + "\n// the same kernel in another tree\n")
    trees = study(root, "trees", factors={"csrc": [str(other)]}, baseline={"csrc": None})
    (run,) = (trees.run(), trees.runs())[1]
    print(run.status, run.metrics, run.baseline_metrics, run.failure)
    checks.check(run.done and run.same_bits is True, "two source trees are compared in one process, bits included")
    checks.check(run.provenance["csrc"] != run.provenance["csrc_baseline"], "the record tells the trees apart")
    ratio = run.metrics["forward_ms"] / run.baseline_metrics["forward_ms"]
    checks.check(0.97 < ratio < 1.03, f"the same kernel is as fast in both trees ({ratio:.4f})")
    sys.exit(checks.finish())


if __name__ == "__main__":
    main()
