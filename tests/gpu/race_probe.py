"""The patterns of race_probe.cu, all or by name: what racecheck says about each.

compute-sanitizer --tool racecheck --racecheck-report analysis python3 tests/gpu/race_probe.py queue
"""

from __future__ import annotations

import ctypes
import pathlib
import sys
import tempfile

import torch
from checks import HERE

from mok.engines.cuda import build, driver

# What racecheck must say: nothing about patterns our kernels use, something about planted faults. "tool": right by the
# memory model and reported all the same, because racecheck does not count __syncwarp between the lanes that read and
# the lane that arrives on the mbarrier; our kernels do not use those.
EXPECTED = {
    "queue": "clean", "queue_whole_warp": "tool", "queue_planted": "reported", "role": "clean", "role_planted": "reported",
    "stages": "clean", "stages_whole_warp": "tool", "ticket": "clean", "ticket_planted": "reported", "patches": "clean",
    "moves": "clean",
}  # fmt: skip
GRID, THREADS, SHARED_BYTES = 4, 256, 40 * 1024


def compiled() -> bytes:
    """Machine code of the probes with the kernels' own headers."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "race_probe.cu").write_text((HERE / "race_probe.cu").read_text())
        (folder / "include").symlink_to(build.source_folder() / "include")
        return build.compile_source(folder, "race_probe.cu", {})[0]


def main() -> int:
    code = compiled()
    out = torch.zeros(GRID * 8, dtype=torch.int32, device="cuda")
    rows = torch.randint(0, 255, (GRID * 8 * 1024,), dtype=torch.uint8, device="cuda")
    copy = torch.zeros_like(rows)
    for name in sys.argv[1:] or EXPECTED:
        kernel = driver.Kernel(code, f"probe_{name}", SHARED_BYTES)
        addresses = [ctypes.c_uint64(t.data_ptr()) for t in (out, rows, copy)]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(a) for a in addresses))
        threads = THREADS + 32 if name.startswith("ticket") else THREADS
        stream = torch.cuda.current_stream().cuda_stream
        driver.call(
            "cuLaunchKernel", kernel.function, GRID, 1, 1, threads, 1, 1, SHARED_BYTES, stream, ctypes.addressof(pointers), 0
        )
        torch.cuda.synchronize()
        print(f"probe {name}:", out.tolist()[:16], "copied" if torch.equal(rows, copy) else "", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
