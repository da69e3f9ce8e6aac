"""A benchmark case small enough for a CPU."""

from mok.bench.cases import Case
from mok.shapes import MoEShape
from mok.workload import RoutingSpec, Workload


def tiny(shared=False, precision="bf16", ranks="closed", routing="uniform", tokens=48):
    shape = MoEShape(128, 128, 16, 2, shared)
    work = Workload(shape, tokens, 2, RoutingSpec.parse(routing), precision=precision, ranks=ranks)
    return Case("tiny", "tiny", work)
