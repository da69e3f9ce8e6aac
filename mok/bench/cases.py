"""The cases a kernel is judged on: one slice of a public model each, named so that a number can be asked for again.

`dsv3-ep8-t8192` is the closed slice of DeepSeek-V3 at EP 8: one rank, E/EP experts, 8192 tokens that each go to K
distinct experts of them, context saved. It does a rank's work without a link, its output is complete and can be
checked, and every other kernel can run it, so it is the bar. A suffix changes one thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mok.errors import InputError, require, unknown_name
from mok.shapes import MoEShape
from mok.workload import RoutingSpec, Workload

BASES: dict[str, tuple[str, int, int]] = {  # name -> (shape preset, EP, tokens per rank)
    "dsv3-ep8-t8192": ("deepseek-v3", 8, 8192),
    "dsv3-ep8-t2048": ("deepseek-v3", 8, 2048),
    "qwen3-235b-ep8-t8192": ("qwen3-235b-a22b", 8, 8192),
    "qwen3-30b-ep4-t8192": ("qwen3-30b-a3b", 4, 8192),
}
SUFFIXES = ("shared", "zipf", "mxfp8", "open")
DEFAULT_SUFFIXES = ("", "+shared", "+zipf1.2", "+mxfp8", "+open")


@dataclass(frozen=True, slots=True)
class Case:
    """A named Workload. `base` is the name without suffixes; cases of one base share their expert weights."""

    name: str
    base: str
    workload: Workload

    @property
    def is_open(self) -> bool:
        """Rank 0 with the tokens of all EP ranks resident: reported, never a bar."""
        return self.workload.open_rank is not None


def parse(text: str) -> Case:
    """`NAME[+shared][+zipfS][+mxfp8][+open]`, suffixes in any order; the case's name has them in this one.

    shared: a shared expert. zipfS: experts drawn with p ~ 1/rank^S. mxfp8: precision. open: rank 0 of EP, with all
    EP*T tokens resident and routes over all E experts. Raises InputError with the nearest name.
    """
    base, *given = text.split("+")
    if base not in BASES:
        raise unknown_name("benchmark case", base, BASES)
    preset, ep, tokens = BASES[base]
    found: dict[str, str] = {}
    for suffix in given:
        kind = "zipf" if suffix.startswith("zipf") else suffix
        if kind not in SUFFIXES:
            raise unknown_name(f"suffix of {text!r}", suffix, ("shared", "zipf1.2", "mxfp8", "open"))
        require(kind not in found, f"case {text!r} names the suffix {kind!r} twice.")
        found[kind] = suffix
    shape = MoEShape.preset(preset)
    workload = Workload(
        shape=replace(shape, shared="shared" in found),
        tokens=tokens,
        ep=ep,
        routing=RoutingSpec("zipf", (_skew(text, found["zipf"]),)) if "zipf" in found else RoutingSpec(),
        precision="mxfp8" if "mxfp8" in found else "bf16",
        ranks="open(0)" if "open" in found else "closed",
        engine="cuda",
    )
    if "zipf" in found:
        found["zipf"] = f"zipf{workload.routing.values[0]:g}"
    return Case("+".join([base, *(found[kind] for kind in SUFFIXES if kind in found)]), base, workload)


def _skew(text: str, suffix: str) -> float:
    try:
        return float(suffix.removeprefix("zipf"))
    except ValueError:
        raise InputError(f"case {text!r}: 'zipf' needs its exponent, as in '+zipf1.2', got {suffix!r}.") from None


def suite(names: Sequence[str] = (), *, training: bool = False) -> tuple[Case, ...]:
    """The named cases, each once, those of one base next to each other; without names every base with every suffix.

    training: cases with a backward, that is closed ones: an open slice returns no gradient of its own. Raises InputError.
    """
    suffixes = [suffix for suffix in DEFAULT_SUFFIXES if not (training and suffix == "+open")]
    chosen = [parse(name) for name in names or [base + suffix for base in BASES for suffix in suffixes]]
    opened = [case.name for case in chosen if case.is_open]
    require(not (training and opened), f"{', '.join(opened)}: open cases have no complete gradient; leave out '+open'.")
    once = dict.fromkeys(chosen)
    order = list(dict.fromkeys(case.base for case in once))
    return tuple(sorted(once, key=lambda case: order.index(case.base)))
