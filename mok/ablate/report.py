"""`report.html` in a study's folder: one page without a script that opens offline and links to every run's notebook and trace."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mok.ablate.conclude import Findings, Row, findings, level_text, levels_text
from mok.ablate.looks import Looks
from mok.ablate.sentence import sentence
from mok.errors import MokError
from mok.notebook_html import external_sources
from mok.parquet import replacing
from mok.views import study as view
from mok.views.study import Line

if TYPE_CHECKING:
    from mok.ablate.record import Run
    from mok.ablate.study import Study

FILES = ("notebook", "trace", "samples", "guards")  # of a run that a reader may want to open


def write(study: Study) -> Path:
    """Write the report and return its path; the old one is replaced whole. Raises InputError where the folder refuses."""
    path = study.folder / "report.html"
    text = render(findings(study))
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def render(found: Findings) -> str:
    """The page of what a study found."""
    study = found.study
    body = [f"<h1>Study {html.escape(study.name)}</h1>", f'<p class="sentence">{html.escape(sentence(found))}</p>']
    if not found.simulated:
        body.append(_remark(found.health.sentences()[0], found.health.drifted))
    body += [_remark(text, True) for text in _drifted(found)]
    body += _verdicts(found) if study.paired else _values(found)
    body += _best(found) + _main_effects(found) + _failures(found) + _machine(found) + _method(found) + _definition(found)
    page = view.page(f"Study {study.name}", "\n".join(body))
    loads = external_sources(page)
    if loads:  # a level or message that became markup would be a fault of this module
        raise MokError(f"the report would load {', '.join(loads[:3])}; please report this with the study's folder.")
    return page


def _remark(text: str, alarm: bool) -> str:
    return f'<p class="{"alarm" if alarm else "quiet"}">{html.escape(text)}</p>'


def line(row: Row, names: Sequence[str], folder: Path | None = None, said: Sequence[str] = ()) -> Line:
    """A finished comparison as a row of the table; links only with the study's `folder`; without notes that were `said`."""
    effect = row.effect
    cells = tuple(row.levels.get(name, "") for name in names)
    links = _links(row.run, folder) if folder is not None else ()
    notes = [note for note in row.run.notes if note not in said]
    if row.run.control:
        notes.insert(0, "control: the baseline against itself")
    if effect is None:
        return Line(cells, math.nan, 0.0, math.inf, "", (row.bits, "", ""), "; ".join(notes), links)
    if effect.note and effect.note not in said:
        notes.append(effect.note)
    if effect.blocks_to_decide is not None and not row.run.control:
        notes.append(f"about {effect.blocks_to_decide} blocks would decide it")
    after = (row.bits, str(effect.num_blocks), f"{effect.p_holm:.2g}")
    return Line(cells, effect.ratio, effect.low, effect.high, effect.verdict, after, "; ".join(notes), links)


def _drifted(found: Findings) -> list[str]:
    if not found.drifted:
        return []
    number = len(found.rows) + len(found.controls)
    return [f"The canary drifted within {len(found.drifted)} of {number} comparisons; their rows say so."]


AFTER = ("bits", "blocks", "p (Holm)")


def _verdicts(found: Findings) -> list[str]:
    everything = (*found.controls, *found.rows)
    said = _common(everything)
    rows = [_warned(found, row, line(row, found.names, found.study.folder, said)) for row in everything]
    table = view.ratio_table(found.names, AFTER, rows, found.study.resolution)
    baselines = dict.fromkeys(
        levels_text(row.run.baseline) or "the notebook's defaults" for row in (*found.rows, *found.controls)
    )
    note = (
        f"Cost is {found.metric}{'' if found.study.lower_is_better else ' turned upside down'}, against "
        f"{'; '.join(baselines) or 'the baseline'} in the same process. The grey band is the resolution, "
        f"{100 * found.study.resolution:.3g} %."
    )
    remarks = [f'<p class="quiet">{html.escape(text)}</p>' for text in (note, *said)]
    return ["<h2>Verdicts</h2>", *remarks, table]


def _common(rows: Sequence[Row]) -> list[str]:
    """Notes that every run carries: said once, above the table."""
    if len(rows) < 2:
        return []
    notes = [[*row.run.notes, *([row.effect.note] if row.effect is not None and row.effect.note else [])] for row in rows]
    return [note for note in notes[0] if all(note in others for others in notes)]


def _warned(found: Findings, row: Row, shown: Line) -> Line:
    if row.run.key not in found.drifted:
        return shown
    warning = f"canary drifted {100 * found.drifted[row.run.key]:.1f} %"
    return dataclasses.replace(shown, note=f"{shown.note}; {warning}" if shown.note else warning)


def _values(found: Findings) -> list[str]:
    metrics = found.study.metrics
    head = (*found.names, *metrics, "files")
    rows = []
    for row in found.rows or found.controls:
        cells = [html.escape(row.levels.get(name, "")) for name in found.names]
        cells += [f"{row.run.metrics.get(metric, math.nan):.5g}" for metric in metrics]
        rows.append("".join(f"<td>{cell}</td>" for cell in (*cells, view.anchors(_links(row.run, found.study.folder)))))
    lines = ["".join(f'<th scope="col">{html.escape(name)}</th>' for name in head), *rows]
    return ["<h2>Runs</h2>", "<table>" + "".join(f"<tr>{text}</tr>" for text in lines) + "</table>"]


def _best(found: Findings) -> list[str]:
    rows = {row.run.key: row for row in found.rows}
    if not found.best or len(rows) < 2:
        return []
    lines = []
    for stratum, best in found.best.items():
        row = rows[best.candidate]
        names = ["the baseline"] if best.high >= 1 else []
        names += [levels_text(rows[name].run.factors) for name in best.rivals[:6]]
        rivals = "; ".join(names) or "none"
        more = f" and {len(best.rivals) - 6} more" if len(best.rivals) > 6 else ""
        cells = (stratum or "all", levels_text(row.run.factors))
        verdict = row.effect.verdict if row.effect is not None else ""
        lines.append(Line(cells, best.ratio, best.low, best.high, verdict, (), f"may be as good: {rivals}{more}"))
    note = (
        f"The interval is widened for having picked one of many (Bonferroni over {max(b.num_rows for b in found.best.values())})."
    )
    head = ("where", "best configuration")
    return [
        "<h2>Best configuration</h2>",
        view.ratio_table(head, (), lines, found.study.resolution),
        f'<p class="quiet">{note}</p>',
    ]


def _main_effects(found: Findings) -> list[str]:
    if not found.main:
        return []
    lines = []
    for effect in found.main:
        spread = f"{100 * (effect.lowest - 1):+.1f} to {100 * (effect.highest - 1):+.1f} %"
        depends = effect.lowest < 1 / (1 + found.study.resolution) and effect.highest > 1 + found.study.resolution
        note = "depends on the other factors" if depends else ""
        cells = (effect.factor, level_text(effect.level), level_text(effect.reference), str(effect.num_pairs))
        lines.append(Line(cells, effect.ratio, effect.low, effect.high, "", (spread,), note))
    head = ("factor", "level", "against", "pairs")
    note = "Over all pairs of rows that differ in that factor alone; the spread is that of the single pairs."
    if not found.study.paired:
        note += " Runs were not paired: a drift of the machine is inside these intervals' errors, not in their width."
    table = view.ratio_table(head, ("single pairs",), lines, found.study.resolution, verdicts=False)
    return ["<h2>Main effects</h2>", f'<p class="quiet">{note}</p>', table]


def _failures(found: Findings) -> list[str]:
    if not found.failures:
        return []
    body = ["<h2>Failures</h2>"]
    for run in found.failures:
        kind = run.failure.kind if run.failure else run.status
        message = run.failure.message if run.failure else ""
        what = levels_text({**run.strata, **run.factors})
        body.append(f"<p><b>{html.escape(kind)}</b> at {html.escape(what)}, attempt {run.attempt}: {html.escape(message)}</p>")
        if run.failure and run.failure.last_lines:
            body.append(f"<pre>{html.escape(chr(10).join(run.failure.last_lines))}</pre>")
        body.append(f"<p>{view.anchors(_links(run, found.study.folder))}</p>")
    return body


def _machine(found: Findings) -> list[str]:
    if not any(values.size for values in found.guards.values()):
        return []
    parts = ["<h2>The machine while it ran</h2>"]
    parts += [f"<p>{html.escape(text)}</p>" for text in found.health.sentences()]
    for name, label, scale, unit in (
        ("canary_ns", "canary kernel", 1e-3, "µs"),
        ("sm_clock_mhz", "SM clock", 1.0, "MHz"),
        ("temperature_c", "temperature", 1.0, "°C"),
        ("power_w", "power", 1.0, "W"),
    ):
        picture = view.series_svg([float(value) * scale for value in found.guards[name]], label, unit)
        parts += [f"<div>{picture}</div>"] if picture else []
    return parts


def _method(found: Findings) -> list[str]:
    study = found.study
    if not study.paired or found.simulated:
        return []
    looks = Looks.between(study.min_blocks, study.max_blocks)
    text = (
        f"Each block runs baseline A and candidate B as ABBA or BAAB, by a coin tossed per block from seed {study.seed}, in one "
        f"warm process, {study.burst} samples per position; its value is the log ratio of the medians. Shown are the median over "
        "blocks and the permutation interval (signed rank, Walsh averages), which needs no assumption about the noise but the "
        f"coin. The rule looked after {', '.join(map(str, looks.planned))} blocks and spent an equal share of "
        f"alpha = {study.alpha:g} per block at each look, so the intervals hold although the study stopped itself. FASTER and "
        "SLOWER mean that the whole interval lies beyond the resolution, SAME that it lies within; Holm's correction is over "
        f"{len(found.rows)} comparisons."
    )
    return ["<h2>How the verdicts were reached</h2>", f"<p>{html.escape(text)}</p>"]


def _definition(found: Findings) -> list[str]:
    done = [row.run for row in (*found.rows, *found.controls)]
    facts = {"device": found.device}
    for name in ("commit", "package", "csrc", "notebook"):
        values = dict.fromkeys(level_text(run.provenance[name]) for run in done if run.provenance.get(name) is not None)
        if values:
            facts[name] = ", ".join(values)
    facts["runs"] = ", ".join(f"{count} {name}" for name, count in found.counts.items() if count)
    plain = found.study.to_dict()
    for name in ("root", "notebook"):  # where it lies on this machine is nobody's business
        plain[name] = Path(str(plain[name])).name
    text = json.dumps(plain, indent=1, ensure_ascii=False)
    return [
        "<h2>What was asked</h2>",
        view.definitions(facts),
        f"<details><summary>study.json</summary><pre>{html.escape(text)}</pre></details>",
    ]


def _links(run: Run, folder: Path) -> tuple[tuple[str, str], ...]:
    found = []
    for what in FILES:
        path = run.file(folder, what)
        if path is not None:
            found.append((what, path.relative_to(folder).as_posix()))
    return tuple(found)
