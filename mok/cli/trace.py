"""`mok trace`: what a profile says, without opening a viewer, and as exit codes for continuous integration.

Every question may end in "unknown, because ...": that is an answer, printed as one and with exit code 0; `--json` gives
`{"value": null, "reason": ...}`. Only `check` turns answers into exit codes: 0 holds, 1 does not, 3 cannot be told.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok.cli.output import AsJson
from mok.cli.trace_files import Files, export, info, open_files, redact, say
from mok.errors import InputError, require

if TYPE_CHECKING:
    from mok.trace.metrics.kernel import SmAccounting
    from mok.trace.metrics.value import Answer, Unknown
    from mok.trace.model import Trace

EXIT_BROKEN = 1
EXIT_UNKNOWN = 3

trace_app = typer.Typer(rich_markup_mode=None)

Limit = Annotated[int, typer.Option(min=1, help="Rows to list.")]


@trace_app.callback(invoke_without_command=True)
def trace_root(context: typer.Context) -> None:
    """Read profiles of Nsight Systems, torch.profiler, Nsight Compute and our kernels; measure, compare, convert."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


trace_app.command()(info)
trace_app.command()(export)
trace_app.command()(redact)


def _abstain(answer: Unknown, as_json: bool) -> None:
    say([("unknown", answer.reason)], answer.to_dict(), as_json)


@trace_app.command()
def summary(files: Files, limit: Limit = 10, as_json: AsJson = False) -> None:
    """Busy and idle time, launches, what held the run up; kernels, calls and annotated ranges that took longest.

    \b
    Examples:
      mok trace summary run.sqlite
      mok trace summary profile.json.gz --limit 20 --json
    """
    from mok.trace.metrics import Unknown, accounts, critical_path, device_times, launch_stats
    from mok.trace.metrics.compat import api_totals, project
    from mok.trace.metrics.value import shown

    trace = open_files(files)
    times, started, path = device_times(trace), launch_stats(trace), critical_path(trace)
    kernels = _longest(trace, limit)
    inside = accounts(trace)
    rows = _sm_rows(inside)
    if isinstance(times, Unknown) and isinstance(inside, Unknown):
        _abstain(times, as_json)
        return
    for one in () if isinstance(times, Unknown) else times:
        rows += [(f"{one.device}: {name}", str(answer)) for name, answer in one.metrics.items()]
        gaps = f"{one.gaps:,}, {one.gaps_over:,} over 10 us, longest {shown(one.max_gap_ns, 'ns')}"
        rows += [(f"{one.device}: operations", f"{one.num_ops:,}, {one.num_kernels:,} kernels"), (f"{one.device}: gaps", gaps)]
    rows += _named("launch", started if isinstance(started, Unknown) else started.metrics)
    rows += _named("critical path", path if isinstance(path, Unknown) else path.metrics)
    for row in kernels:
        longest = shown(row["max_ns"], "ns")
        rows.append((f"{row['count']:,} x", f"{shown(row['total_ns'], 'ns')} in all, longest {longest}: {row['name'][:90]}"))
    for call in api_totals(trace)[:limit]:
        rows.append((f"{call['count']:,} x", f"{shown(call['total_ns'], 'ns')} in calls of {call['name']}"))
    ranges = project(trace)
    projected = [] if isinstance(ranges, Unknown) else ranges.by_name(trace)[:limit]
    for part in projected:
        device = shown(part["device_ns"], "ns")
        rows.append(
            (f"{part['count']:,} x", f"{device} on the device, {part['num_ops']:,} operations: range {part['name'][:90]}")
        )
    data = {
        "devices": times.to_dict() if isinstance(times, Unknown) else [one.to_dict() for one in times],
        "sm_time": _sm_data(inside),
        "launch": started.to_dict(),
        "critical_path": path.to_dict() if isinstance(path, Unknown) else path.to_dict(trace, limit),
        "kernels": kernels,
        "calls": api_totals(trace)[:limit],
        "ranges": ranges.to_dict() if isinstance(ranges, Unknown) else projected,
    }
    say(rows, data, as_json)


def _sm_rows(found: Mapping[str, SmAccounting] | Unknown) -> list[tuple[str, str]]:
    """SM time of every launch; nothing where the trace has no in-kernel lanes."""
    if not isinstance(found, Mapping):
        return []
    rows = []
    for name, one in found.items():
        parts = ", ".join(f"{kind} {share:.1%}" for kind, share in one.shares.items())
        rows.append((f"{name}: SM time", f"{one.num_sms} SMs x {one.kernel_ns / 1e6:.3f} ms: {parts}"))
        cost = f"{one.cost_of_communication:.2%} = exposed {one.exposed:.2%} + communication SMs {one.comm_sm_share:.2%}"
        rows.append((f"{name}: cost of communication", cost))
    return rows


def _sm_data(found: Mapping[str, SmAccounting] | Unknown) -> dict[str, Any]:
    from mok.trace.metrics.inside import answers

    if not isinstance(found, Mapping):
        return found.to_dict()
    return {
        name: {"shares": one.shares, "kernel_ns": one.kernel_ns, "num_sms": one.num_sms}
        | {key: answer.to_dict() for key, answer in answers(one).items()}
        for name, one in found.items()
    }


def _named(what: str, answers: Mapping[str, Answer] | Unknown) -> list[tuple[str, str]]:
    if not isinstance(answers, Mapping):
        return [(what, str(answers))]
    return [(f"{what}: {name}", str(answer)) for name, answer in answers.items()]


def _longest(trace: Trace, limit: int) -> list[dict[str, Any]]:
    import numpy as np

    from mok.trace.metrics import activity

    rows = activity(trace).rows
    codes, dur = trace.spans.name.codes[rows] + 1, trace.spans.dur_ns[rows]
    size = len(trace.spans.name.table) + 1
    total, most = np.zeros(size, np.int64), np.zeros(size, np.int64)
    np.add.at(total, codes, dur)
    np.maximum.at(most, codes, dur)
    count = np.bincount(codes, minlength=size)
    chosen = [code for code in np.argsort(-total, kind="stable")[:limit].tolist() if count[code]]
    names = ("", *trace.spans.name.table)
    return [
        {"name": names[code], "count": int(count[code]), "total_ns": int(total[code]), "max_ns": int(most[code])}
        for code in chosen
    ]


@trace_app.command()
def overlap(
    files: Files,
    mode: Annotated[str, typer.Option(help="mok, hta or nsys: whose definition.")] = "mok",
    as_json: AsJson = False,
) -> None:
    """Communication beside computation: by whole kernels, as we, HolisticTraceAnalysis or nsys define it, and inside ours.

    \b
    Examples:
      mok trace overlap run.sqlite
      mok trace overlap rank0.json.gz rank1.json.gz --mode hta --json
    """
    from mok.trace.metrics import Unknown, accounts
    from mok.trace.metrics import overlap as measured
    from mok.trace.metrics.overlap import explain
    from mok.trace.metrics.value import shown

    trace = open_files(files)
    found, inside = measured(trace, mode), accounts(trace)
    if isinstance(found, Unknown):
        rows = [("by whole kernels", str(found)), *_sm_rows(inside)]
        say(rows, found.to_dict() | {"sm_time": _sm_data(inside)}, as_json)
        return
    rows = []
    for one in found:
        parts = {"communication": one.comm_ns, "computation": one.compute_ns, "both": one.overlap_ns}
        text = ", ".join(f"{name} {shown(value, 'ns')}" for name, value in parts.items())
        rows.append((str(one.device), f"{one.ratio} ({text})"))
    whole = explain(found)
    rows += [("all devices", str(whole)), ("definition", whole.definition), *_sm_rows(inside)]
    data = {"overall": whole.to_dict(), "devices": [one.to_dict() for one in found], "sm_time": _sm_data(inside)}
    say(rows, data | _value(whole), as_json)


def _value(answer: Answer) -> dict[str, Any]:
    """The keys a script looks for first: value, and reason where there is none."""
    said = answer.to_dict()
    return {key: said[key] for key in ("value", "reason") if key in said}


@trace_app.command()
def syncs(files: Files, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Host calls that block, each blamed once, most harm first: device time lost until the thread's next operation began.

    \b
    Examples:
      mok trace syncs run.sqlite
      mok trace syncs profile.json.gz --limit 5 --json
    """
    from mok.trace.metrics import Unknown, host_syncs
    from mok.trace.metrics.value import shown

    trace = open_files(files)
    found = host_syncs(trace)
    if isinstance(found, Unknown):
        _abstain(found, as_json)
        return
    rows = [("harm", str(found.harm)), ("of device time", str(found.harm_share))]
    for name, part in found.by_class().items():
        rows.append((name, f"{part['count']:,}, {shown(part['blocked_ns'], 'ns')}, harm {shown(part['harm_ns'], 'ns')}"))
    for row in found.rows(trace, limit):
        harm = "unknown" if row["harm_ns"] is None else shown(row["harm_ns"], "ns")
        inside = " < ".join(dict.fromkeys(row[key] for key in ("operator", "range", "frame") if row[key]))
        guess = ", guessed" if row["guessed"] else ""
        text = f"{row['call']} ({row['class']}{guess}), {shown(row['dur_ns'], 'ns')} long"
        rows.append((harm, f"{text}{', in ' + inside if inside else ''}"))
    say(rows, found.to_dict(trace, limit) | _value(found.harm), as_json)


@trace_app.command()
def gaps(
    files: Files,
    min_us: Annotated[float, typer.Option(min=0, max=1e12, help="Leave shorter idle times out.")] = 10.0,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Idle times of each device and their causes: the host was late, the operation waited, the profiler, or unknown.

    \b
    Examples:
      mok trace gaps run.sqlite
      mok trace gaps profile.json.gz --min-us 100 --json
    """
    from mok.trace.metrics import Unknown
    from mok.trace.metrics import gaps as measured
    from mok.trace.metrics.value import shown

    trace = open_files(files)
    found = measured(trace, min_ns=round(min_us * 1000))
    if isinstance(found, Unknown):
        _abstain(found, as_json)
        return
    rows = [(name, str(answer)) for name, answer in found.metrics.items()]
    for row in found.rows(trace, limit):
        text = f"{row['cause']}, {row['device']}, after {row['before'][:50]}, before {row['after'][:50]}"
        rows.append((shown(row["dur_ns"], "ns"), text + (f", in {row['range']}" if row["range"] else "")))
    say(rows, found.to_dict(trace, limit) | _value(found.metrics["listed"]), as_json)


@trace_app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="The trace to compare with.")],
    b: Annotated[Path, typer.Argument(help="The trace that may differ.")],
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Two runs event by event: what is new, gone, slower or faster, largest change of time first.

    \b
    Examples:
      mok trace diff before.sqlite after.sqlite
      mok trace diff before.json.gz after.json.gz --limit 50 --json
    """
    from mok.trace.metrics import diff as compare
    from mok.trace.metrics.value import shown

    found = compare(open_files([a]), open_files([b]))
    rows = [(name, f"{one} -> {two}") for name, (one, two) in found.metrics.items()]
    rows.append(("events", f"{len(found.changes):,} kinds changed, {found.same:,} did not"))
    for change in found.changes[:limit]:
        sign = "+" if change.delta_ns >= 0 else "-"
        count = f"{change.count_a} -> {change.count_b}" if change.count_a != change.count_b else f"{change.count_a}"
        text = f"{count} x {change.category} {change.name[:70]}{' [' + change.shape + ']' if change.shape else ''}"
        rows.append((f"{sign}{shown(abs(change.delta_ns), 'ns')}", text))
    say(rows, found.to_dict(limit), as_json)


@trace_app.command()
def whatif(
    files: Files,
    host: Annotated[str, typer.Option(help="Factors of host time, as in 0.5,2,4: 2 is a host half as fast.")] = "0.5,1,2,4,8",
    as_json: AsJson = False,
) -> None:
    """The recorded launches and waits replayed with a slower or faster host: step time, and the calls that begin to hurt.

    \b
    Examples:
      mok trace whatif run.sqlite
      mok trace whatif profile.json.gz --host 1.5,2,3 --json
    """
    from mok.trace.metrics import Unknown, host_what_if
    from mok.trace.metrics.value import shown

    try:
        factors = [float(text) for text in host.split(",")]
    except ValueError:
        raise InputError(f"--host {host!r} must be numbers, as in 0.5,2,4.") from None
    found = host_what_if(open_files(files), factors)
    if isinstance(found, Unknown):
        _abstain(found, as_json)
        return
    rows = [
        ("recorded", f"{shown(found.recorded_ns, 'ns')}; replayed at factor 1 within {found.error:.2%}"),
        ("slack", f"{found.slack}: largest factor of host time with a step at most 1 % longer"),
    ]
    for case in found.cases:
        harm = "unknown" if case.harm_ns is None else shown(case.harm_ns, "ns")
        over = case.step_ns / max(found.recorded_ns, 1)
        rows.append((f"host x {case.factor:g}", f"{shown(case.step_ns, 'ns')}, {over:.2f} x; sync harm {harm}"))
        for row in case.growing[:3]:
            inside = f" in {row['range']}" if row["range"] else ""
            rows.append(("", f"+{shown(row['more_ns'], 'ns')} harm: {row['call']}{inside}"))
    say(rows, found.to_dict(), as_json)


@trace_app.command()
def check(
    files: Files,
    max_sync_harm: Annotated[str | None, typer.Option(help="Largest share of device time lost to host syncs, as in 1%.")] = None,
    max_idle: Annotated[str | None, typer.Option(help="Largest share of the devices' spans that may be idle.")] = None,
    min_overlap: Annotated[str | None, typer.Option(help="Least share of communication hidden behind computation.")] = None,
    allow_unknown: Annotated[bool, typer.Option("--allow-unknown", help="Exit 0 where the trace cannot tell.")] = False,
    as_json: AsJson = False,
) -> None:
    """Hold a trace against limits: exit 0 if all hold, 1 if one does not, 3 if the trace cannot tell.

    \b
    Examples:
      mok trace check run.sqlite --max-sync-harm 1%
      mok trace check run.sqlite --max-sync-harm 0.5% --max-idle 20%
    """
    from mok.trace.metrics import Metric
    from mok.trace.metrics.limits import LIMITS

    given = {"sync_harm": max_sync_harm, "idle": max_idle, "overlap": min_overlap}
    asked = {name: _share(name, text) for name, text in given.items() if text is not None}
    require(bool(asked), "nothing to check: give --max-sync-harm, --max-idle or --min-overlap.")
    trace = open_files(files)
    rows, data, verdicts = [], [], []
    for name, limit in asked.items():
        measured, most = LIMITS[name]
        answer = measured(trace)
        verdict = "unknown"
        if isinstance(answer, Metric):
            verdict = "holds" if (answer.value <= limit if most else answer.value >= limit) else "broken"
        verdicts.append(verdict)
        rows.append((f"{name} {verdict}", f"{answer}; {'at most' if most else 'at least'} {limit:.4g}"))
        data.append({"limit": name, "bound": limit, "verdict": verdict, "answer": answer.to_dict()})
    say(rows, {"ok": "broken" not in verdicts and (allow_unknown or "unknown" not in verdicts), "checks": data}, as_json)
    if "broken" in verdicts:
        raise typer.Exit(EXIT_BROKEN)
    if "unknown" in verdicts and not allow_unknown:
        raise typer.Exit(EXIT_UNKNOWN)


def _share(name: str, text: str) -> float:
    """`1%` or `0.01` as 0.01."""
    option = f"--{'min' if name == 'overlap' else 'max'}-{name.replace('_', '-')}"
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    require(0 <= value <= 1, f"{option} {text!r} must be a share between 0% and 100%, as in 1% or 0.01.")
    return value
