"""The sentence a study ends in: what may be claimed, of which machine, at which resolution, at what cost, with what doubts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mok.ablate.conclude import Findings, Row, findings, levels_text
from mok.ablate.verdict import FASTER, SAME, UNDECIDED, VERDICTS

if TYPE_CHECKING:
    from mok.ablate.study import Study


def of(study: Study) -> str:
    """The sentence of a study, from its folder. Raises InputError for records that are not whole."""
    return sentence(findings(study))


def sentence(found: Findings) -> str:
    """What was found, in plain words; doubts follow it, warnings come before it."""
    parts = [*_warnings(found), _claim(found), *_remarks(found)]
    return " ".join(part for part in parts if part)


def _warnings(found: Findings) -> list[str]:
    lines = []
    for row in found.controls:
        if row.effect is not None and row.effect.verdict not in (SAME, UNDECIDED):
            lines.append(
                f"THE CONTROL FAILED: the baseline against itself came out {row.effect.verdict} ({row.effect.text()}); "
                "do not trust the verdicts below."
            )
        if row.run.same_bits is False:
            lines.append(f"THE BASELINE GAVE OTHER BITS THAN ITSELF ({row.bits.removeprefix('OTHER BITS: ')}).")
    left = found.counts.get("planned", 0) - found.counts.get("done", 0) - found.counts.get("failed", 0)
    if left > 0:
        lines.append(f"Unfinished: {found.counts.get('done', 0)} of {found.counts['planned']} runs are done.")
    return lines


def _claim(found: Findings) -> str:
    if not found.rows and not found.controls:
        return "Nothing is measured yet."
    if not found.study.paired:
        return _unpaired(found)
    judged = [row for row in found.rows if row.effect is not None]
    if not judged:
        return "No comparison has blocks yet."
    if len(judged) == 1:
        return _single(found, judged[0])
    count = Counter(row.effect.verdict for row in judged if row.effect is not None)
    tally = ", ".join(f"{count[name]} {name}" for name in VERDICTS if count[name])
    holm = "" if found.simulated else f" (Holm over the table, wrong verdicts <= {_percent(found.study.alpha)})"
    clauses = [_best_clause(found, stratum) for stratum in dict.fromkeys(levels_text(row.run.strata) for row in judged)]
    return (
        f"{' '.join(clauses)} Of {len(judged)} comparisons by {found.metric} on {found.device} at a resolution of "
        f"{_percent(found.study.resolution)}: {tally}{holm}."
        f"{_price(judged)}"
    )


def _price(rows: list[Row]) -> str:
    """What deciding the open comparisons would cost, in multiples of the blocks they had."""
    effects = [row.effect for row in rows if row.effect is not None and row.effect.verdict == UNDECIDED]
    open_ = [(effect.blocks_to_decide, effect.num_looked) for effect in effects if effect.blocks_to_decide is not None]
    if not open_:
        return ""
    times = sum(need for need, _ in open_ if need is not None) / sum(had for _, had in open_)
    return f" Deciding {len(open_)} of the undecided would take about {times:.2g} times their blocks."


def _single(found: Findings, row: Row) -> str:
    assert row.effect is not None
    resolution = f" within {_percent(found.study.resolution)}" if row.effect.verdict == SAME else ""
    what = levels_text(row.run.factors) or "the candidate"
    where = f" at {levels_text(row.run.strata)}" if row.run.strata else ""
    text = (
        f"{what} is {row.effect.verdict}{resolution} against {_baseline(row)}{where}: {row.effect.text()} by {found.metric} over "
        f"{row.effect.num_looked} blocks on {found.device}{', ' + row.bits if row.bits else ''}."
    )
    if row.effect.blocks_to_decide is not None:
        times = row.effect.blocks_to_decide / max(1, row.effect.num_looked)
        text += f" About {row.effect.blocks_to_decide} blocks, {times:.1f} times the cost, would decide it."
    return text


def _best_clause(found: Findings, stratum: str) -> str:
    rows = {row.run.key: row for row in found.rows if levels_text(row.run.strata) == stratum and row.effect is not None}
    place = f"At {stratum}, " if stratum else ""
    winners = [row for row in rows.values() if row.effect is not None and row.effect.verdict == FASTER]
    if not winners:
        text = f"{place}no configuration is FASTER than {_baseline(next(iter(rows.values())))}."
        return text[0].upper() + text[1:]
    best = found.best.get(stratum)
    row = rows[best.candidate] if best is not None else min(winners, key=lambda item: item.effect.ratio if item.effect else 1.0)
    assert row.effect is not None
    if row.effect.verdict != FASTER:  # its lead is larger but less sure than another's
        row = min(winners, key=lambda item: item.effect.ratio if item.effect else 1.0)
    assert row.effect is not None
    span, rest = row.effect.text(), ""
    if best is not None and best.candidate == row.run.key and best.low > 0:
        span = f"{100 * (1 - best.ratio):.1f} % faster [{100 * (1 - best.high):.1f}, {100 * (1 - best.low):.1f}]"
        rest = f"; {len(best.rivals)} of the others may be as good" if best.rivals else "; no other may be as good"
    bits = f", {row.bits}" if row.bits else ""
    text = f"{place}{levels_text(row.run.factors)} is best: {span} than {_baseline(row)}{bits}{rest}."
    return text[0].upper() + text[1:] if place else text


def _unpaired(found: Findings) -> str:
    rows = found.rows or found.controls
    lower = found.study.lower_is_better
    row = (min if lower else max)(rows, key=lambda item: item.cost)
    return (
        f"The {'lowest' if lower else 'highest'} {found.metric} of {len(rows)} runs on {found.device} is {row.cost:.4g}, at "
        f"{levels_text({**row.run.strata, **row.run.factors})}. Runs were not paired, so this is no verdict: a paired study of "
        "this point against a baseline gives one."
    )


def _remarks(found: Findings) -> list[str]:
    lines = []
    if found.failures:
        kinds = Counter(run.failure.kind if run.failure else run.status for run in found.failures)
        runs = "run" if len(found.failures) == 1 else "runs"
        lines.append(f"{len(found.failures)} {runs} failed ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}).")
    other = sum(row.run.same_bits is False for row in found.rows)
    if other:
        lines.append(f"{other} of {len(found.rows)} gave other bits than the baseline.")
    if found.health.drifted and found.health.canary_change is not None:
        lines.append(
            f"The canary drifted by {_percent(found.health.canary_change)} while the study ran; ratios within blocks stand, "
            "times across blocks do not."
        )
    elif found.drifted:
        lines.append(f"The canary drifted within {len(found.drifted)} of {len(found.rows) + len(found.controls)} comparisons.")
    if found.simulated:
        lines.append("Times are simulated, not measured.")
    elif found.on_cpu and found.rows:
        lines.append("Measured on a CPU: nothing is said about a GPU.")
    cost = f"{found.device_s:.0f} s of GPU" if found.device_s else f"{found.wall_s:.0f} s"
    lines.append(f"Cost: {cost}.")
    return lines


def _baseline(row: Row) -> str:
    return levels_text(row.run.baseline) or "the baseline"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
