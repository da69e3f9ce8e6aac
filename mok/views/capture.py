"""How a Capture looks: what was captured and under which conditions, then its timeline or its table of counters."""

from __future__ import annotations

from typing import Any

from mok import display
from mok.capture.result import Capture, Counters
from mok.views.measure import table


def counters_table(counters: Counters) -> str:
    """HTML: one row per part, one column per counter."""
    header, rows = counters.table()
    text = [
        tuple(f"{cell:,.4g}" if isinstance(cell, float) else str(cell if cell is not None else "") for cell in row)
        for row in rows
    ]
    return table(text, tuple(header))


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
