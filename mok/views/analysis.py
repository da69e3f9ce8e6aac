"""Every table that can be made of a trace, for pages and notebooks: what cannot be said is unknown, with the reason."""

from __future__ import annotations

from mok.trace.metrics import device_times, host_syncs, overlap
from mok.trace.metrics.kernel import account
from mok.trace.metrics.pipeline import waits
from mok.trace.metrics.value import Unknown
from mok.trace.model import Trace
from mok.views.overlap import DEVICE_HEAD, OVERLAP_HEAD, device_rows, overlap_rows
from mok.views.report import Table
from mok.views.syncs import HEAD, syncs_rows


def tables_of(trace: Trace) -> tuple[Table, ...]:
    """Where device time went, overlap by our definition and two public ones, blocking calls, waits and SM time."""
    if not len(trace.spans):
        return ()
    made = [Table("Devices: busy and idle", DEVICE_HEAD, device_rows(device_times(trace)))]
    rows = [row for mode in ("mok", "hta", "nsys") for row in overlap_rows(overlap(trace, mode))]
    made.append(Table("Communication beside computation, by whole kernels", OVERLAP_HEAD, list(dict.fromkeys(rows))))
    made.append(Table("Host calls that block, most harm first", HEAD, syncs_rows(host_syncs(trace), trace)))
    found = waits(trace)
    if not isinstance(found, Unknown):
        cells = zip(found.name, found.count.tolist(), found.total_ns.tolist(), found.longest_ns.tolist(), strict=True)
        waited = [(name, f"{count:,}", f"{total / 1e3:,.1f}", f"{most / 1e3:,.2f}") for name, count, total, most in cells]
        made.append(Table("Waits inside the kernel", ("for", "waits", "lane-µs", "longest µs"), waited))
    if bool((trace.spans.name.decode() == "compute CTA").any()):
        sm = account(trace)
        shares = [(name, f"{share:.2%}") for name, share in sm.shares.items()]
        shares.append(
            ("cost of communication", f"{sm.cost_of_communication:.2%} = exposed {sm.exposed:.2%} + SMs {sm.comm_sm_share:.2%}")
        )
        made.append(Table(f"SM time of one launch, {sm.num_sms} SMs x {sm.kernel_ns / 1e6:.3f} ms", ("class", "share"), shares))
    return tuple(made)
