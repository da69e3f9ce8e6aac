"""How a Capture looks, and the small figures of what only a capture shows: two clocks, SM time, exposed waits, GPU counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mok import display
from mok.capture.result import Capture, Counters
from mok.trace.metrics.kernel import CLASSES, SmAccounting
from mok.trace.metrics.value import Unknown
from mok.trace.model import Trace
from mok.views.kernel import nothing
from mok.views.measure import table
from mok.views.style import GREY, colour, figure
from mok.views.text import plain

GPU_METRICS = ("Tensor Active", "SM Issue", "DRAM Read", "DRAM Write")
_FILLS = ("#0072B2", "#56B4E9", "#CC79A7", "#009E73", "#E69F00", "#D9D9D9", "#F5F5F5")
_HATCHES = ("", ".", "x", "/", "\\", "", "")


def counters_table(counters: Counters) -> str:
    """HTML: one column per part, one row per counter."""
    header, rows = counters.table()
    columns = [[f"{cell:,.4g}" if isinstance(cell, float) else str(cell or "") for cell in row] for row in rows]
    lines = [tuple(line) for line in zip(header[1:], *(column[1:] for column in columns), strict=True)]
    return table(lines, ("", *(column[0] for column in columns)))


def facts_table(capture: Capture) -> str:
    """HTML: tool and versions, machine and clocks, command, how far two clocks may be apart, notes."""
    record = capture.record
    gpu = dict(dict(record.get("device", {})).get("gpu") or {})
    versions = ", ".join(f"{name} {version}" for name, version in dict(record.get("versions", {})).items() if version)
    rows = [
        ("capture", f"{capture.name} ({capture.tool})"),
        ("command", str(record.get("command", ""))),
        ("versions", versions),
        ("commit", str(record.get("commit", ""))),
        ("GPU", ", ".join(f"{key} {gpu[key]}" for key in ("name", "sm_clock_mhz", "power_w") if gpu.get(key) is not None)),
    ]
    if capture.trace is not None and "bridge" in capture.trace.meta.coverage:
        bridge = capture.trace.meta.coverage["bridge"]
        rows.append(
            ("clocks", f"host and kernel agree within {bridge['uncertainty_ns']} ns; drift {bridge['drift_ppm']:.2f} ppm")
        )
    rows += [("note", note) for note in capture.notes]
    return table([row for row in rows if row[1]])


def bridge_table(trace: Trace) -> str:
    """HTML: how the GPU's clock was tied to the profiler's, and what of it was tested on what was not fitted."""
    found = trace.meta.coverage.get("bridge")
    if found is None:
        return table([("clocks", "one clock: this trace has no in-kernel records beside a host timeline")])
    rows = [
        (
            "fitted on",
            f"{found['fitted']} of {found['probes']} probe kernels, the tightest brackets (median {found['bracket_ns']} ns)",
        ),
        ("drift", f"{found['drift_ppm']:.3f} ppm"),
        ("stated uncertainty", f"{found['uncertainty_ns']} ns"),
    ]
    for one in found.get("held_out", ()):
        rows.append(
            (
                f"held out: launch {one['launch']}",
                f"first record {one['start_ns']} ns after nsys' start, last {one['end_ns']} ns before nsys' end; "
                f"{one['inside']:.3%} of {one['num_events']:,} records inside",
            )
        )
    if found.get("marker_residuals_ns"):
        said = ", ".join(f"{residual} ns" for residual in found["marker_residuals_ns"])
        rows.append(("held out: markers", f"{said} outside the interval in which the host wrote what the kernel waited for"))
    return table(rows)


def accounting_figure(accounts: Mapping[str, SmAccounting]) -> go.Figure:
    """One bar per launch that adds up to SMs x kernel time, by class."""
    made = figure(
        "Where SM time went", "measured inside the kernel; each bar is SMs x kernel time", height=150 + 46 * len(accounts)
    )
    names = [plain(name) for name in accounts]
    for place, kind in enumerate(CLASSES):
        made.add_trace(
            go.Bar(
                orientation="h",
                y=names,
                x=[100 * found.shares[kind] for found in accounts.values()],
                name=kind,
                marker={"color": _FILLS[place], "pattern": {"shape": _HATCHES[place]}, "line": {"color": GREY, "width": 0.5}},
                hovertemplate=f"%{{y}}: {kind} %{{x:.2f}} %<extra></extra>",
            )
        )
    made.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.35})
    made.update_xaxes(title="% of SM time")
    made.update_yaxes(autorange="reversed")
    return made


def exposed_figure(accounts: Mapping[str, SmAccounting], by: str = "minibatch") -> go.Figure:
    """Exposed communication by "minibatch" or by "expert": SMs that stood empty while their producer waited for rows."""
    made = figure(f"Exposed communication by {by}", "SMs empty while their producer waits for rows, % of SM time", height=330)
    for place, (name, found) in enumerate(accounts.items()):
        shares = found.by_minibatch if by == "minibatch" else found.by_expert
        if not shares:
            continue
        made.add_trace(
            go.Bar(
                x=list(shares),
                y=[100 * value for value in shares.values()],
                name=plain(name),
                marker={"color": colour(place), "line": {"color": GREY, "width": 0.5}},
                hovertemplate=f"{by} %{{x}}: %{{y:.4f}} %<extra></extra>",
            )
        )
    if not made.data:
        return nothing(f"Exposed communication by {by}", Unknown(f"no wait in this trace names its {by}"))
    made.update_xaxes(title=by)
    made.update_yaxes(title="% of SM time")
    return made


def gpu_metrics_figure(trace: Trace, names: Sequence[str] = GPU_METRICS) -> go.Figure:
    """nsys' own samples of the GPU over the capture; `names` are looked for in the lanes' labels."""
    title = "What the GPU's own counters say"
    labels, kinds = trace.lanes.label.decode().tolist(), trace.lanes.kind.decode().tolist()
    chosen = [
        lane
        for lane, label in enumerate(labels)
        if kinds[lane] == "counter" and any(name.lower() in label.lower() for name in names)
    ]
    if not chosen or not len(trace.counters):
        said = next((text for text in trace.meta.diagnostics if "GPU metrics" in text), "they were not asked for")
        return nothing(title, Unknown(f"no GPU metrics in this capture: {said}"))
    made = figure(title, "sampled by nsys over the whole GPU, both kernels and the gaps between them", height=360)
    begin = trace.window_ns[0]
    for place, lane in enumerate(chosen):
        mine = np.flatnonzero(trace.counters.lane == lane)
        made.add_trace(
            go.Scatter(
                x=(trace.counters.t_ns[mine] - begin) / 1e6,
                y=trace.counters.value[mine],
                mode="lines",
                line={"color": colour(place), "width": 1.2, "shape": "hv"},
                name=plain(labels[lane]),
            )
        )
    made.update_xaxes(title="ms")
    made.update_yaxes(title="% of peak")
    return made


def _bundle(capture: Capture) -> dict[str, Any]:
    data: dict[str, Any] = {}
    page = facts_table(capture)
    if capture.counters is not None:
        page += counters_table(capture.counters)
    if capture.trace is not None:
        shown = display.bundle(capture.trace)
        page += str(shown.pop("text/html", ""))
        shown.pop("text/plain", None)
        data |= shown
    return {**data, "text/html": page}


display.register(Capture, _bundle)
