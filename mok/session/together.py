"""One Measurement from the answers of all ranks: the slowest rank's time per repeat, everyone's bits, one timeline.

A step is over when its last rank is, so a sample is the largest of the ranks' times; FLOPs are those of all ranks, and the
bound is the busiest rank's. Digests are of the packed results, as a `VirtualGroup` returns them, so they compare with its.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mok import routing
from mok.bounds import Rates, bound
from mok.errors import require
from mok.measurement import Measurement, Timing
from mok.trace.model import Trace
from mok.trace.ranks import merged
from mok.workload import Workload


def combine(
    workload: Workload,
    answers: Sequence[dict[str, Any]],
    traces: Sequence[bytes],
    offsets_ns: Sequence[int],
    uncertainty_ns: int,
) -> Measurement:
    """The Measurement of one run of `workload.ep` ranks.

    answers: what every rank said, in rank order (`mok.measure_rank.answer`). traces: Parquet of every rank's Trace, or
    none. offsets_ns: each rank's host clock minus this one's, known to +-uncertainty_ns.
    """
    first = answers[0]
    samples = {
        phase: np.max([np.asarray(answer["samples"][phase], dtype=np.int64) for answer in answers], axis=0)
        for phase in first["samples"]
    }
    shape, counts = workload.shape, workload.token_counts
    routes = routing.generate(workload.routing, sum(counts), shape.num_experts, shape.top_k, seed=workload.seed)
    statistics = routing.stats(
        routes, shape.num_experts, workload.ep, workload.config.row_block, token_counts=counts, hidden=shape.hidden
    )
    forward = shape.forward_flops(statistics.num_routes, statistics.num_tokens)
    flops = {"forward": forward, "backward": 2 * forward, "step": 3 * forward}
    rates = Rates(mma=min(a["rates"][0] for a in answers), hbm=min(a["rates"][1] for a in answers), link=math.inf)
    rows = statistics.padded_rows_per_rank
    busiest = int(rows.argmax())
    per_rank = shape.num_experts // workload.ep
    mine = statistics.load_per_expert[busiest * per_rank : (busiest + 1) * per_rank]
    bounds = {
        phase: bound(
            phase,
            shape,
            rates,
            rows=int(rows[busiest]),
            num_local_experts=int((mine > 0).sum()),
            tokens=int(statistics.token_counts[busiest]),
            ep=workload.ep,
            save_context=workload.direction == "step" and not workload.recompute,
            precision=workload.precision,
        )
        for phase in ("forward", "backward", "step")
        if phase in samples
    }
    notes = [
        f"{workload.ep} ranks, one process each: times are the slowest rank's, the bound is the busiest rank's and has no link"
    ]
    notes += [note for answer in answers for note in answer["notes"]]
    repetition = routing.repetition(workload.routing, statistics.num_tokens)
    labels = list(dict.fromkeys(answer["label"] for answer in answers))
    return Measurement(
        workload=workload,
        engine=first["engine"],
        device_label=f"{len(answers)} x {labels[0]}" if len(labels) == 1 else f"{len(answers)} ranks on {', '.join(labels)}",
        timings={phase: Timing(values) for phase, values in samples.items()},
        flops={phase: value for phase, value in flops.items() if phase in samples},
        bounds=bounds,
        digests=first["digests"],
        same_bits=all(answer["same"] for answer in answers),
        routing=statistics,
        device=first["device"],
        trace=_together(traces, offsets_ns, uncertainty_ns, first["engine"]) if traces else None,
        precision_label=first["precision_label"],
        verified=first["verified"],
        notes=(*dict.fromkeys(notes), *((repetition,) if repetition else ())),
    )


def _together(parts: Sequence[bytes], offsets_ns: Sequence[int], uncertainty_ns: int, engine: str) -> Trace:
    """All ranks' traces on one clock: the hosts' where the ranks recorded it, else from each rank's first record on."""
    with tempfile.TemporaryDirectory(prefix="mok-ranks-") as folder:
        traces = []
        for rank, data in enumerate(parts):
            path = Path(folder) / f"{rank}.parquet"
            path.write_bytes(data)
            traces.append(Trace.read(path))
    require(all(len(trace.spans) for trace in traces), "a rank recorded nothing; run the Workload again with trace=True.")
    if engine != "cuda":
        return merged(traces, offsets_ns=offsets_ns, uncertainty_ns=uncertainty_ns, clock="this host's monotonic clock")
    # GPUs do not share a clock: the kernels' first records follow a meeting that all ranks leave together
    starts = [trace.window_ns[0] for trace in traces]
    found = merged(traces, offsets_ns=starts, uncertainty_ns=0, clock="each rank's time since its kernel's first record")
    said = (
        "each rank's time starts at its kernel's first record: ranks leave the meeting before it together, by how much is not "
        "measured"
    )
    return replace(found, meta=replace(found.meta, diagnostics=(*found.meta.diagnostics, said)))
