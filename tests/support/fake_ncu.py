"""ncu as it behaves on the command line, without a GPU: `MOK_FAKE_NCU` says what goes wrong this time.

ok; hang: never ends; nopermission: ERR_NVGPUCTRPERM in its log and status 1; nokernel: a report without kernels.
`MOK_FAKE_NCU_VERSION` is its version, `MOK_FAKE_NCU_PARTS` the annotations it saw, `MOK_FAKE_NCU_RUNS` how many kernels in each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

MODE = os.environ.get("MOK_FAKE_NCU", "ok")
WITH_VALUE = (
    "--log-file", "--cache-control", "--clock-control", "--replay-mode", "--nvtx-include", "--metrics", "-o", "--mode",
    "--process-id",
)  # fmt: skip


def main() -> int:
    given = sys.argv[1:]
    if given == ["--version"]:
        version = os.environ.get("MOK_FAKE_NCU_VERSION", "2025.3.1.0")
        sys.stdout.write(
            f"NVIDIA (R) Nsight Compute Command Line Profiler\nVersion {version} (build 36398880) (public-release)\n"
        )
        return 0
    if given == ["--list-injection-path-64"]:
        sys.stdout.write(os.environ["MOK_FAKE_NCU_INJECTION"] + "\n")
        return 0
    options: dict[str, str] = {}
    at = 0
    while at < len(given) and given[at].startswith("-"):
        value = given[at] in WITH_VALUE
        options[given[at]] = given[at + 1] if value else ""
        at += 2 if value else 1
    Path(options["--log-file"]).write_text("==PROF== Connected to process 1\n")
    (Path(options["-o"]).parent / "ncu_command.json").write_text(json.dumps(given))
    if MODE == "hang":
        time.sleep(600)
    if MODE == "nopermission":
        Path(options["--log-file"]).write_text(
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
            "target device 0.\n"
        )
        return 1
    code = subprocess.run(given[at:], check=False).returncode if given[at:] else 0
    if code:
        return code
    actions = []
    for part in os.environ.get("MOK_FAKE_NCU_PARTS", "").split(",") if MODE != "nokernel" else []:
        for number in range(int(os.environ.get("MOK_FAKE_NCU_RUNS", "1"))):
            metrics = {name: 10.0 + index - 5 * number for index, name in enumerate(options["--metrics"].split(","))}
            actions.append({"kernel": f"kernel_of_{part}", "part": part, "metrics": metrics})
    Path(options["-o"]).write_text(json.dumps({"actions": actions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
