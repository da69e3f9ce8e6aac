"""nsys as it behaves on the command line, without a GPU: `MOK_FAKE_NSYS` says what goes wrong this time.

ok: runs the program, then writes a report. gpu: no program, the files of a fake GPU instead. hang, crash, noreport, half,
damaged, nodisk, nolib, nopermission, daemon: as their names say; each prints what the real one prints then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MODE = os.environ.get("MOK_FAKE_NSYS", "ok")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def option(name: str, given: list[str]) -> str | None:
    return next((word.partition("=")[2] for word in given if word.startswith(f"--{name}=")), None)


def profile(given: list[str]) -> int:
    base = Path(option("output", given) or "report")
    program = given[next(at for at, word in enumerate(given) if not word.startswith("--")) :]
    report = base.with_suffix(".nsys-rep")
    if option("gpu-metrics-devices", given) and MODE == "nopermission":
        say(
            "Illegal --gpu-metrics-devices argument: all.\nInsufficient privilege, see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
        return 1
    if MODE == "nolib":
        say("/opt/nsys: error while loading shared libraries: libdw.so.1: cannot open shared object file")
        return 127
    if MODE == "gpu":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.support import fake_gpu

        gpu = fake_gpu.typical()
        gpu.write_job(base.parent)
        gpu.write_sqlite(base.parent / "tables.bin")
        (base.parent / "tables.bin").replace(report)
        return 0
    if MODE == "daemon":  # nsys' own helpers leave the process group
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    code = 0 if os.environ.get("MOK_FAKE_NSYS_SKIP") else subprocess.run(program, check=False).returncode
    say(f"Generating '{base}.qdstrm'")
    if MODE in ("hang", "daemon"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if MODE == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if MODE == "nodisk":
        report.write_bytes(b"\0" * 100)
        say(f"Failed to write {report}: No space left on device")
        return 1
    if MODE == "noreport":
        base.with_suffix(".qdstrm").write_bytes(b"\0" * 100)
        return 0
    report.write_bytes(b"fake report " * (1 if MODE == "half" else 100))
    say(f"[1/1] [========================100%] {report.name}\nGenerated:\n    {report}")
    return code


def export(given: list[str]) -> int:
    target = Path(option("output", given) or "report.sqlite")
    source = Path(given[-1])
    head = source.read_bytes()[:16]
    if head.startswith(b"SQLite"):
        target.write_bytes(source.read_bytes())
        return 0
    if source.stat().st_size < 100:
        say(f"Importer error status: Importation failed.\n{source} is corrupted or incomplete")
        return 1
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.support import fake_gpu

    gpu = fake_gpu.typical()
    gpu.write_sqlite(target)
    if MODE == "damaged":
        content = target.read_bytes()
        target.write_bytes(content[:4096] + b"\xff" * 2000)
    return 0


def main() -> int:
    given = sys.argv[1:]
    if given == ["--version"]:
        say("NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0")
        return 0
    return {"profile": profile, "export": export}[given[0]](given[1:])


if __name__ == "__main__":
    sys.exit(main())
