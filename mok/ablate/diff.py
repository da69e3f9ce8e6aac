"""`mok study diff A B`: a notebook that already holds the answer, and the three lines that compute it again.

Text first: what changed, which effects are real, what shifted between the studies. The tables are outputs of the code
cells, made by the same calls, so a reader who runs the notebook gets them anew from the studies' folders.
"""

from __future__ import annotations

import html
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok.ablate.compare import Comparison, Shift, compare, largest
from mok.ablate.conclude import Findings, levels_text
from mok.ablate.sentence import sentence
from mok.ablate.verdict import FASTER, SAME, SLOWER, UNDECIDED
from mok.errors import require
from mok.parquet import replacing
from mok.views import study as view
from mok.views.study import Line

if TYPE_CHECKING:
    from mok.ablate.study import Study


def write(a: Study, b: Study, target: Path) -> Path:
    """Write the notebook that compares study `b` with the earlier `a` to `target` and return its path.

    Raises InputError: `target` exists or is no .ipynb, the studies cannot be compared, records are not whole.
    """
    import nbformat

    target = Path(target)
    require(target.suffix == ".ipynb", f"{target} must end in .ipynb: the difference is a notebook.")
    require(not target.exists(), f"{target} exists already; choose another name, nothing is overwritten.")
    for study in (a, b):
        require((study.folder / "study.json").is_file(), f"{study.folder} holds no study; run it first.")
    found = compare(a, b)
    new = nbformat.v4
    setup = (
        "from mok.ablate import Study\nfrom mok.ablate.compare import compare\n"
        f"from mok.ablate.diff import changes_html, effects_html, shifts_html\nfrom IPython.display import HTML\n\n"
        f"found = compare(Study.load({_from(target, a.folder)!r}), Study.load({_from(target, b.folder)!r}))"
    )
    cells: list[Any] = [
        new.new_markdown_cell(f"# {a.name} and {b.name}\n\n{_answer(found)}"),  # type: ignore[no-untyped-call]
        _code(setup, None),
        new.new_markdown_cell(f"## What changed\n\n{_changed(found)}"),  # type: ignore[no-untyped-call]
        _code("HTML(changes_html(found))", changes_html(found)),
        new.new_markdown_cell(f"## Which effects are real\n\n{_real(found)}"),  # type: ignore[no-untyped-call]
        _code("HTML(effects_html(found))", effects_html(found)),
        new.new_markdown_cell(f"## What shifted from one to the other\n\n{_shifted(found)}"),  # type: ignore[no-untyped-call]
        _code("HTML(shifts_html(found))", shifts_html(found)),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = new.new_notebook(cells=cells, metadata=metadata)  # type: ignore[no-untyped-call]
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return target


def changes_html(found: Comparison) -> str:
    """What differs between the studies as a table: code first, then the machine, then the question."""
    rows = [(change.kind, change.what, change.before, change.after) for change in found.changes]
    names = (found.before.study.name, found.after.study.name)
    return view.fragment(view.plain_table(("kind", "what", *names), rows) if rows else "<p>Nothing.</p>")


def effects_html(found: Comparison) -> str:
    """The five largest real effects of either study as a table."""
    lines = [
        Line(
            (side.study.name, levels_text({**row.run.strata, **row.run.factors}), levels_text(row.run.baseline)),
            row.effect.ratio,
            row.effect.low,
            row.effect.high,
            row.effect.verdict,
            (row.bits,),
        )
        for side in (found.before, found.after)
        for row in largest(side.rows)
        if row.effect is not None
    ]
    return view.fragment(view.ratio_table(("study", "candidate", "against"), ("bits",), lines, found.resolution))


def shifts_html(found: Comparison) -> str:
    """Every comparison that both studies made: how its effect moved, and the candidate's own cost over the canary's."""
    lines = [_shift_line(shift) for shift in found.shifts]
    head = ("candidate", f"in {found.before.study.name}", f"in {found.after.study.name}")
    after = ("p (Holm)", "own cost / canary", "bits, one study to the other")
    table = view.ratio_table(head, after, lines, found.resolution, unity="no change")
    rest = ""
    for study, levels in ((found.before.study.name, found.only_before), (found.after.study.name, found.only_after)):
        if levels:
            rest += (
                f"<p>Only in {html.escape(study)}: {html.escape('; '.join(levels[:20]))}{' ...' if len(levels) > 20 else ''}</p>"
            )
    return view.fragment(table + rest)


def _shift_line(shift: Shift) -> Line:
    texts = tuple(row.effect.text() if row.effect is not None else "" for row in (shift.before, shift.after))
    own = f"{100 * (shift.absolute - 1):+.1f} %" if math.isfinite(shift.absolute) else "no canary"
    bits = {True: "same bits", False: "OTHER BITS", None: ""}[shift.same_bits]
    return Line((shift.levels, *texts), shift.ratio, shift.low, shift.high, shift.verdict, (f"{shift.p_holm:.2g}", own, bits))


def _answer(found: Comparison) -> str:
    moved = [shift for shift in found.shifts if shift.verdict in (FASTER, SLOWER)]
    same = sum(shift.verdict == SAME for shift in found.shifts)
    open_ = sum(shift.verdict == UNDECIDED for shift in found.shifts)
    code = [change.what for change in found.changes if change.kind == "code" and change.what != "commit"]
    if not found.shifts:
        first = "The studies share no comparison, so nothing can be said about a change."
    elif moved:
        worst = max(moved, key=lambda shift: abs(math.log(shift.ratio)))
        word = "gained on" if worst.verdict == FASTER else "lost against"
        first = (
            f"{len(moved)} of {len(found.shifts)} effects changed. Most: {_text(worst.levels)} {word} its baseline by "
            f"{100 * abs(worst.ratio - 1):.1f} %."
        )
    else:
        first = f"No effect changed that can be told: {same} of {len(found.shifts)} are the same, {open_} undecided."
    cause = f" What differs in the code: {_text(', '.join(code))}." if code else " The code is the same."
    return f"{first}{cause}\n\n" + "\n".join(_ended(side) for side in (found.before, found.after))


def _ended(found: Findings) -> str:
    return f"- *{_text(found.study.name)}*: {_text(sentence(found))}"


def _changed(found: Comparison) -> str:
    if not found.changes:
        return "Nothing that was recorded: same code, same device, same question."
    order = [change.what for kind in ("code", "machine", "question") for change in found.changes if change.kind == kind]
    return f"Ranked by what usually explains a change: {_text(', '.join(order))}."


def _real(found: Comparison) -> str:
    count = [len(largest(side.rows, len(side.rows))) for side in (found.before, found.after)]
    names = (found.before.study.name, found.after.study.name)
    told = " and ".join(f"{number} in {_text(name)}" for number, name in zip(count, names, strict=True))
    return f"FASTER or SLOWER after Holm: {told}. The five largest of each:"


def _shifted(found: Comparison) -> str:
    return (
        "The picture shows the candidate's relative cost in the second study over that in the first: left of the band it "
        "gained on its baseline. The last columns are no verdict: two sessions cannot be paired, so the candidate's own cost "
        "is given over the canary's, a fixed kernel timed in both."
    )


def _code(source: str, output: str | None) -> Any:
    import nbformat

    outputs = []
    if output is not None:
        data = {"text/html": output, "text/plain": "<IPython.core.display.HTML object>"}
        outputs = [nbformat.v4.new_output("execute_result", data=data, execution_count=1)]  # type: ignore[no-untyped-call]
    return nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=1 if outputs else None)  # type: ignore[no-untyped-call]


def _from(target: Path, folder: Path) -> str:
    """`folder` as the notebook at `target` finds it: relative where it lies below or beside, so that both can be moved."""
    return Path(os.path.relpath(folder.resolve(), target.resolve().parent)).as_posix()


def _text(text: str) -> str:
    """`text` inside Markdown: what could be markup is escaped."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|!$" else letter for letter in text)
