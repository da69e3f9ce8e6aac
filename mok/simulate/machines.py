"""The machines the simulator knows: one table, every number with its origin.

A prediction is only as good as its constants, so each carries one of four words: `specification` (the vendor's
data sheet), `measured` (public measurement, cited), `fitted` (chosen so that the model meets the cited measurement;
`mok.simulate.calibration` shows the residuals) or `assumed` (nobody published it; the reason is given).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from mok.bounds import Rates
from mok.errors import require, unknown_name

ORIGINS = ("specification", "measured", "fitted", "assumed")


@dataclass(frozen=True, slots=True)
class Fact:
    """Where one number of a machine comes from."""

    origin: str
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU and the fabric around it. TFLOP/s are 1e12, GB/s are 1e9 bytes per second (= bytes per nanosecond).

    num_sms; domain: GPUs in one NVLink domain. mma_*: dense tensor-core rate for BF16 and MXFP8 operands: `_spec` of
    the data sheet, `_tflops` inside a tile's K loop, hot; mma_best: the best rate seen over that. hbm_spec_gbps,
    hbm_gbps: data sheet, and what a copy reaches. l2_bytes decides which operands are read again; l2_gbps limits operand
    reads of all SMs together. link_spec_gbps, link_gbps: NVLink per direction. copy_gbps: what one communication SM moves
    alone; copy_knee: how sharply copies saturate, rate = alone * (1 + load^knee)^(-1/knee) with load = demand / capacity.
    link_latency_ns: from the end of a communication unit until its last byte counts, remote or not. flag_latency_ns: from
    the raise of a flag to its waiter's start. tile_ns: fixed cost of a tile (ticket, pipeline fill and drain);
    epilogue_gbps: one SM's epilogue traffic, not overlapped with the K loop (infinite where it is hidden behind it).
    narrow: MMA rate of the SwiGLU-backward GEMM over the others. launch_ns: host time per launch, times host_factor;
    start_ns: from launch to first CTA; gap_ns: between dependent kernels of one stream; barrier_ns: the tiny kernel in
    which all ranks meet.
    """

    name: str
    title: str
    num_sms: int
    domain: int
    mma_bf16_spec_tflops: float
    mma_bf16_tflops: float
    mma_mxfp8_spec_tflops: float
    mma_mxfp8_tflops: float
    mma_best: float
    hbm_spec_gbps: float
    hbm_gbps: float
    l2_bytes: float
    l2_gbps: float
    link_spec_gbps: float
    link_gbps: float
    copy_gbps: float
    copy_knee: float
    link_latency_ns: float
    flag_latency_ns: float
    tile_ns: float
    epilogue_gbps: float
    narrow: float
    launch_ns: float
    start_ns: float
    gap_ns: float
    barrier_ns: float
    host_factor: float = 1.0
    facts: dict[str, Fact] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Raises InputError: fewer than 4 SMs, or a rate that is not positive, or a negative time."""
        require(self.num_sms >= 4, f"Machine.num_sms must be >= 4, got {self.num_sms!r}.")
        for name in _NUMBERS:
            value = getattr(self, name)
            least = "must be >= 0" if name.endswith("_ns") else "must be > 0"
            ok = value >= 0 if name.endswith("_ns") else value > 0
            require(ok and not math.isnan(value), f"Machine.{name} {least}, got {value!r}.")

    @classmethod
    def named(cls, name: str) -> Machine:
        """A machine of the table. Raises InputError with the nearest name."""
        if name not in MACHINES:
            raise unknown_name("machine", name, MACHINES)
        return MACHINES[name]

    def replace(self, **changes: Any) -> Machine:
        """A what-if copy; its name says so. Raises InputError for a field that does not exist."""
        for key in changes:
            if key not in _NUMBERS and key not in ("num_sms", "domain", "name", "title"):
                raise unknown_name("Machine field", key, (*_NUMBERS, "num_sms", "domain", "name", "title"))
        if all(getattr(self, key) == value for key, value in changes.items()):
            return self
        changed = ", ".join(f"{key}={value:g}" for key, value in changes.items() if isinstance(value, int | float))
        facts = self.facts | {key: Fact("assumed", "what-if value of the caller") for key in changes}
        return dataclasses.replace(self, **{"name": f"{self.name} with {changed}", "facts": facts} | changes)

    @property
    def calibrated(self) -> bool:
        """Whether most of its rates and times are specified, measured or fitted; a number without a fact counts as assumed."""
        assumed = [name for name in _NUMBERS if name not in self.facts or self.facts[name].origin == "assumed"]
        return 2 * len(assumed) <= len(_NUMBERS)

    def mma_tflops(self, precision: str) -> float:
        """Rate inside the K loop for "bf16" or "mxfp8" operands."""
        return self.mma_bf16_tflops if precision == "bf16" else self.mma_mxfp8_tflops

    def rates(self, precision: str = "bf16") -> Rates:
        """Rates for roofline bounds: the best this machine was seen to do (the link: its data sheet), so that a bound is one."""
        return Rates(self.mma_tflops(precision) * self.mma_best * 1e12, self.hbm_gbps * 1e9, self.link_spec_gbps * 1e9)

    def __repr__(self) -> str:
        """Name and the numbers that decide most predictions."""
        return (
            f"Machine({self.name}: {self.num_sms} SMs, BF16 {self.mma_bf16_tflops:g} TFLOP/s, HBM {self.hbm_gbps:g} GB/s, "
            f"NVLink {self.link_gbps:g} GB/s per direction, {self.domain} GPUs)"
        )


_NUMBERS = tuple(f.name for f in dataclasses.fields(Machine) if f.type == "float")

_FACTS = "docs/simulator.md, measurements on one H200"
_SPEC, _AZURE = "vendor data sheet", "public Azure ND GB200 v6 results (samuel-bohman/AI-benchmarking-guide)"
_TRITON = "torch matmul 8192 x 8192 x K on a GB300, facebookexperimental/triton pull 740"
_AO = "torch matmul on a B200, pytorch/ao pull 2427"
_SAME = "as fitted on the H200; no public measurement"

_COMMON = {
    "copy_gbps": Fact("fitted", f"row copies by 4 to 132 SMs, one thread with 32 KB in flight; {_FACTS}"),
    "copy_knee": Fact("fitted", f"the same row copies; {_FACTS}"),
    "link_latency_ns": Fact("assumed", "about 1 us per row round trip inside one H200, twice that across a switch"),
    "flag_latency_ns": Fact("assumed", "one L2 atomic, one poll, one acquire"),
    "launch_ns": Fact("measured", f"5.4 us per launch through cuda.core; {_FACTS}"),
    "start_ns": Fact("assumed", "launch to first CTA"),
    "gap_ns": Fact("assumed", "kernel to kernel inside a CUDA graph"),
    "barrier_ns": Fact("assumed", "a one-CTA kernel, one multicast reduction and a spin"),
    "host_factor": Fact("assumed", "1 is the host of the launch measurement"),
    "domain": Fact("specification", _SPEC),
    "hbm_spec_gbps": Fact("specification", _SPEC),
    "link_spec_gbps": Fact("specification", _SPEC),
    "mma_bf16_spec_tflops": Fact("specification", f"{_SPEC}, dense"),
    "mma_mxfp8_spec_tflops": Fact("specification", f"{_SPEC}, dense"),
}
_BLACKWELL = _COMMON | {
    "copy_gbps": Fact("assumed", _SAME),
    "copy_knee": Fact("assumed", _SAME),
    "l2_bytes": Fact("measured", "126.5 MB reported by the driver, pytorch/ao pull 4002"),
    "l2_gbps": Fact("assumed", "above the 13 TB/s that 256 x 256 pair tiles draw at the measured MMA rate"),
    "link_gbps": Fact("measured", f"1530 GB/s both directions device to device; {_AZURE}"),
    "tile_ns": Fact("assumed", "as fitted on a GB300"),
    "epilogue_gbps": Fact("assumed", "hidden: the accumulator is double-buffered in tensor memory"),
    "narrow": Fact("assumed", "as fitted on the H200"),
    "launch_ns": Fact("assumed", "as measured on the H200's host"),
}

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "h200",
            "H200 SXM, HGX with 8",
            num_sms=132,
            domain=8,
            mma_bf16_spec_tflops=989.5,
            mma_bf16_tflops=720,
            mma_mxfp8_spec_tflops=989.5,
            mma_mxfp8_tflops=720,
            mma_best=1.097,
            hbm_spec_gbps=4800,
            hbm_gbps=4300,
            l2_bytes=60e6,
            l2_gbps=7000,
            link_spec_gbps=450,
            link_gbps=380,
            copy_gbps=31.75,
            copy_knee=3.0,
            link_latency_ns=2000,
            flag_latency_ns=800,
            tile_ns=500,
            epilogue_gbps=60,
            narrow=0.87,
            launch_ns=5400,
            start_ns=2500,
            gap_ns=1000,
            barrier_ns=4000,
            facts=_COMMON
            | {
                "num_sms": Fact("specification", _SPEC),
                "mma_bf16_tflops": Fact("fitted", f"dense and grouped GEMMs at the power limit; {_FACTS}"),
                "mma_best": Fact("measured", f"790 TFLOP/s, cuBLAS 8192^3 on a cool chip; {_FACTS}"),
                "mma_mxfp8_spec_tflops": Fact("specification", "no block-scaled MMA on SM90: emulated by BF16"),
                "mma_mxfp8_tflops": Fact("fitted", "emulated by BF16, so BF16's rate"),
                "hbm_gbps": Fact("measured", f"device copy, 4.3 TB/s; {_FACTS}"),
                "l2_bytes": Fact("specification", "60 MB"),
                "l2_gbps": Fact("assumed", "between what multicast pairs draw (6 TB/s at 790 TFLOP/s) and single tiles (9)"),
                "link_gbps": Fact("measured", "380 GB/s peer to peer, one direction, H100 SXM; NVIDIA/nccl issue 1264"),
                "tile_ns": Fact("fitted", f"dense and grouped GEMMs with K from 768 to 7168; {_FACTS}"),
                "epilogue_gbps": Fact("fitted", f"the same GEMMs; {_FACTS}"),
                "narrow": Fact("fitted", f"one SwiGLU-backward GEMM; {_FACTS}"),
            },
        ),
        Machine(
            "hgx-b200",
            "B200, HGX with 8",
            num_sms=148,
            domain=8,
            mma_bf16_spec_tflops=2250,
            mma_bf16_tflops=1443,
            mma_mxfp8_spec_tflops=4500,
            mma_mxfp8_tflops=2470,
            mma_best=1.046,
            hbm_spec_gbps=7672,
            hbm_gbps=6870,
            l2_bytes=126.5e6,
            l2_gbps=20000,
            link_spec_gbps=900,
            link_gbps=765,
            copy_gbps=31.75,
            copy_knee=3.0,
            link_latency_ns=2000,
            flag_latency_ns=800,
            tile_ns=250,
            epilogue_gbps=math.inf,
            narrow=0.87,
            launch_ns=5400,
            start_ns=2500,
            gap_ns=1000,
            barrier_ns=4000,
            facts=_BLACKWELL
            | {
                "num_sms": Fact("measured", "148 reported by the driver, pytorch/ao pull 4002"),
                "mma_bf16_tflops": Fact("fitted", f"1.42 PFLOP/s at 8192^3, 14 waves of 256 x 256 tiles; {_AO}"),
                "mma_best": Fact("measured", f"1.51 PFLOP/s at 3072^3; {_AO}"),
                "mma_mxfp8_tflops": Fact("fitted", "2.38 PFLOP/s FP8 at 8192^3, NVIDIA/TransformerEngine issue 1747"),
                "hbm_spec_gbps": Fact("measured", "bus width x clock reported by the driver, pytorch/ao pull 4002"),
                "hbm_gbps": Fact("assumed", "the H200's share of its data sheet, 0.896"),
                "link_gbps": Fact("assumed", f"as a GB200: {_AZURE}"),
            },
        ),
        Machine(
            "gb200-nvl72",
            "GB200 NVL72",
            num_sms=152,
            domain=72,
            mma_bf16_spec_tflops=2500,
            mma_bf16_tflops=1590,
            mma_mxfp8_spec_tflops=5000,
            mma_mxfp8_tflops=2730,
            mma_best=1.046,
            hbm_spec_gbps=8000,
            hbm_gbps=7160,
            l2_bytes=126.5e6,
            l2_gbps=20000,
            link_spec_gbps=900,
            link_gbps=765,
            copy_gbps=31.75,
            copy_knee=3.0,
            link_latency_ns=2000,
            flag_latency_ns=800,
            tile_ns=250,
            epilogue_gbps=math.inf,
            narrow=0.87,
            launch_ns=5400,
            start_ns=2500,
            gap_ns=1000,
            barrier_ns=6000,
            facts=_BLACKWELL
            | {
                "num_sms": Fact("measured", "152 reported by the driver in public device dumps"),
                "mma_bf16_tflops": Fact("assumed", "B200's rate times the two's FP8 ratio"),
                "mma_best": Fact("assumed", "as a B200"),
                "mma_mxfp8_tflops": Fact("fitted", f"2.62 PFLOP/s FP8 at 8192^3, 14 waves; {_AZURE}; block scales free"),
                "hbm_gbps": Fact("assumed", "the H200's share of its data sheet, 0.896"),
                "barrier_ns": Fact("assumed", "as above, with 72 ranks"),
            },
        ),
        Machine(
            "gb300-nvl72",
            "GB300 NVL72",
            num_sms=152,
            domain=72,
            mma_bf16_spec_tflops=2500,
            mma_bf16_tflops=1825,
            mma_mxfp8_spec_tflops=5000,
            mma_mxfp8_tflops=3130,
            mma_best=1.031,
            hbm_spec_gbps=8000,
            hbm_gbps=7160,
            l2_bytes=126.5e6,
            l2_gbps=20000,
            link_spec_gbps=900,
            link_gbps=765,
            copy_gbps=31.75,
            copy_knee=3.0,
            link_latency_ns=2000,
            flag_latency_ns=800,
            tile_ns=250,
            epilogue_gbps=math.inf,
            narrow=0.87,
            launch_ns=5400,
            start_ns=2500,
            gap_ns=1000,
            barrier_ns=6000,
            facts=_BLACKWELL
            | {
                "num_sms": Fact("measured", "152 reported by the driver in public device dumps"),
                "mma_bf16_tflops": Fact("fitted", f"K from 512 to 16384, 14 waves of 256 x 256 tiles; {_TRITON}"),
                "mma_best": Fact("measured", f"K = 16384, 14 waves of 256 x 256 tiles; {_TRITON}"),
                "tile_ns": Fact("fitted", f"K from 512 to 16384; {_TRITON}"),
                "mma_mxfp8_tflops": Fact("assumed", "GB200's FP8 rate times the two's BF16 ratio"),
                "hbm_gbps": Fact("assumed", "the H200's share of its data sheet, 0.896"),
                "link_gbps": Fact("assumed", f"as a GB200: {_AZURE}"),
                "barrier_ns": Fact("assumed", "as above, with 72 ranks"),
            },
        ),
    )
}


def table() -> list[tuple[str, dict[str, float], dict[str, Fact]]]:
    """(machine name, numbers, facts) rows for documents and views; every number has a fact."""
    names = ("num_sms", "domain", *_NUMBERS)
    return [(m.name, {n: getattr(m, n) for n in names}, {n: m.facts[n] for n in names}) for m in MACHINES.values()]
