"""What a study says in the end: the sentence, the page, the difference of two studies, the live table."""

import asyncio
import math
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
import pytest
from support.planted import GPU, account, plant

from mok.ablate import compare, diff, live, report
from mok.ablate.conclude import findings
from mok.ablate.ledger import Ledger
from mok.ablate.looks import Looks
from mok.ablate.sentence import sentence
from mok.ablate.study import Study
from mok.ablate.verdict import boundary, bounds
from mok.errors import InputError
from mok.notebook_html import external_sources
from mok.views import study as view

EFFECTS = {1024: 0.06, 2048: 0.0, 4096: -0.05}


def planted(folder: Path, name: str = "demo", effects=EFFECTS, **settings) -> Study:
    return plant(folder, name, lambda levels: effects[levels["minibatch"]], **settings)


def said(study: Study) -> str:
    return sentence(findings(study))


def test_the_sentence_names_the_best_and_its_limits(tmp_path: Path) -> None:
    text = said(planted(tmp_path))
    assert text.startswith("minibatch=4096 is best: 5.")
    assert "than minibatch=2048, same bits; no other may be as good." in text
    assert "Of 2 comparisons by forward_ms on NVIDIA H200 at a resolution of 2 %: 1 FASTER, 1 SLOWER" in text
    assert "Cost: 4 s of GPU." in text
    assert "CPU" not in text


def test_the_control_stays_outside_the_table(tmp_path: Path) -> None:
    found = findings(planted(tmp_path))
    assert [row.run.factors["minibatch"] for row in found.rows] == [1024, 4096]
    (control,) = found.controls
    assert control.effect is not None
    assert control.effect.verdict == "SAME"
    assert found.health.reasons == {"software power cap": 120}


def test_a_control_that_fails_is_said_first(tmp_path: Path) -> None:
    assert said(planted(tmp_path, effects=EFFECTS | {2048: 0.05})).startswith("THE CONTROL FAILED: the baseline against itself")


def test_no_winner_drift_failures_and_other_bits_are_said(tmp_path: Path) -> None:
    place = {"tensor": "out", "row": 17, "num_rows": 3, "total_rows": 512}
    found = findings(planted(tmp_path, effects={1024: 0.0, 2048: 0.0, 4096: "fail"}, drift=0.05, different=place))
    text = sentence(found)
    assert "minibatch=1024 is SAME within 2 % against minibatch=2048" in text
    assert "OTHER BITS: out row 17 (3 of 512 rows)" in text
    assert "1 run failed (1 hang)." in text
    assert "1 of 1 gave other bits than the baseline." in text
    assert "The canary drifted by " in text
    page = report.render(found)
    assert "THE CANARY DRIFTED" in page
    assert "no &lt;answer&gt; in 30 s" in page
    assert "SM 3 waits" in page


def test_a_canary_that_drifts_within_comparisons_only_is_said(tmp_path: Path) -> None:
    """Every comparison starts cold and warms up: over the whole study a saw-tooth, within each a drift."""
    found = findings(planted(tmp_path, drift=0.05))
    assert not found.health.drifted
    assert len(found.drifted) == 3
    assert "The canary drifted within 3 of 3 comparisons." in sentence(found)
    assert report.render(found).count("; canary drifted 3.") + report.render(found).count(">canary drifted 3.") == 3


def test_undecided_says_what_deciding_costs(tmp_path: Path) -> None:
    text = said(planted(tmp_path, effects={1024: 0.035, 2048: 0.0, 4096: "fail"}, noise=0.06, blocks=16))
    assert "minibatch=1024 is UNDECIDED" in text
    assert "times the cost, would decide it." in text


def test_strata_are_concluded_one_by_one(tmp_path: Path) -> None:
    def effect(levels):
        return EFFECTS[levels["minibatch"]] if levels["skew"] == "zipf:1.2" else 0.0

    study = plant(tmp_path, "demo", effect, strata={"skew": ["uniform", "zipf:1.2"]})
    text = said(study)
    assert "At skew=uniform, no configuration is FASTER than minibatch=2048." in text
    assert "At skew=zipf:1.2, minibatch=4096 is best: " in text
    main = findings(study).main
    assert {effect.factor for effect in main} == {"minibatch"}
    assert {effect.num_pairs for effect in main} == {2}


def test_simulated_and_cpu_times_say_so(tmp_path: Path) -> None:
    text = said(planted(tmp_path, blocks=1, noise=0.0, notes=("simulated: h200", "rank 2 of 8")))
    assert "Times are simulated, not measured." in text
    assert "minibatch=4096 is best: 5.0 % faster than minibatch=2048" in text
    assert "on h200 (simulated)" in text
    assert "Holm" not in text
    page = report.render(findings(Study.load(tmp_path / "demo")))
    assert page.count("rank 2 of 8") == 1  # what every run says is said once
    on_cpu = planted(tmp_path, "cpu", provenance={"device": {"cpu": "a processor"}})
    assert "Measured on a CPU: nothing is said about a GPU." in said(on_cpu)


def test_higher_is_better_turns_the_ratio(tmp_path: Path) -> None:
    study = plant(tmp_path, "rate", lambda levels: EFFECTS[levels["minibatch"]], lower_is_better=False, metrics=("tflops",))
    verdicts = {row.run.factors["minibatch"]: row.effect.verdict for row in findings(study).rows}
    assert verdicts == {1024: "SLOWER", 4096: "FASTER"}


def test_unpaired_runs_get_no_verdict(tmp_path: Path) -> None:
    study = planted(tmp_path, design="grid", baseline={})
    text = said(study)
    assert "this is no verdict" in text
    assert "minibatch=4096" in text
    page = report.render(findings(study))
    assert "Main effects" in page
    assert "Verdicts" not in page


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name == "href"]


def test_the_page_opens_offline_and_its_links_lead_to_files(tmp_path: Path) -> None:
    study = planted(tmp_path)
    path = report.write(study)
    page = path.read_text()
    assert external_sources(page) == []
    parser = Links()
    parser.feed(page)
    assert "script" not in parser.tags
    assert len(parser.found) == 9  # notebook, samples, guards of three runs
    assert all((path.parent / link).is_file() for link in parser.found)
    for text in (
        "FASTER",
        "SLOWER",
        "control: the baseline against itself",
        "Best configuration",
        "Main effects",
        "canary kernel",
        "Holm",
    ):
        assert text in page
    assert str(tmp_path) not in page
    assert len(page) < 100_000


def test_levels_and_messages_never_become_markup(tmp_path: Path) -> None:
    bad = '<img src=x onerror="alert(1)">'
    settings = {"factors": {"mode": [bad, "b", "c"]}, "baseline": {"mode": "b"}}
    one, two = (
        plant(tmp_path, name, lambda levels: "fail" if levels["mode"] == "c" else 0.0, noise_seed=seed, **settings)
        for seed, name in enumerate(("one", "two"))
    )
    page = report.render(findings(one))
    assert bad not in page
    assert "&lt;img src=x" in page
    notebook = nbformat.read(diff.write(one, two, tmp_path / "d.ipynb"), as_version=4)
    assert all(bad not in cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert all(bad not in output["data"]["text/html"] for cell in notebook.cells for output in cell.get("outputs", []))


def test_difference_of_two_studies(tmp_path: Path) -> None:
    before = planted(tmp_path, "before")
    changed = {"csrc": "c2", "device": GPU | {"driver": "590.2"}}
    after = planted(tmp_path, "after", effects={1024: 0.06, 2048: 0.0, 4096: -0.12}, noise_seed=5, provenance=changed)
    found = compare.compare(before, after)
    assert {shift.levels: shift.verdict for shift in found.shifts} == {"minibatch=1024": "SAME", "minibatch=4096": "FASTER"}
    moved = next(shift for shift in found.shifts if shift.verdict == "FASTER")
    assert moved.low < 0.88 / 0.95 < moved.high
    assert moved.absolute == pytest.approx(0.88 / 0.95, rel=0.01)  # the canary stood still
    assert moved.same_bits is True
    assert [(change.kind, change.what) for change in found.changes] == [("code", "kernel sources"), ("machine", "driver")]
    path = diff.write(before, after, tmp_path / "diff.ipynb")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = notebook.cells[0].source
    assert "1 of 2 effects changed. Most: minibatch=4096 gained on its baseline by 7." in text
    assert "What differs in the code: kernel sources." in text
    assert "Study.load('before')" in notebook.cells[1].source
    assert str(tmp_path) not in path.read_text()
    with pytest.raises(InputError, match="nothing is overwritten"):
        diff.write(before, after, path)


@pytest.mark.slow
def test_the_difference_notebook_computes_what_it_shows(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    one, two = planted(tmp_path, "one"), planted(tmp_path, "two", noise_seed=3)
    shown = nbformat.read(diff.write(one, two, tmp_path / "d.ipynb"), as_version=4)
    again = nbformat.read(tmp_path / "d.ipynb", as_version=4)
    NotebookClient(again, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pairs = [(a, b) for a, b in zip(shown.cells, again.cells, strict=True) if a.get("outputs")]
    assert len(pairs) == 3
    assert all(a.outputs[0]["data"]["text/html"] == b.outputs[0]["data"]["text/html"] for a, b in pairs)


def test_equal_studies_differ_in_nothing(tmp_path: Path) -> None:
    found = compare.compare(planted(tmp_path, "one"), planted(tmp_path, "two", noise_seed=9))
    assert found.changes == ()
    assert {shift.verdict for shift in found.shifts} == {"SAME"}
    notebook = nbformat.read(diff.write(found.before.study, found.after.study, tmp_path / "same.ipynb"), as_version=4)
    assert "No effect changed that can be told: 2 of 2 are the same" in notebook.cells[0].source


def test_a_slower_machine_is_no_effect(tmp_path: Path) -> None:
    """The second day everything takes 10 % longer, canary included: effects stand, absolute times cancel."""
    found = compare.compare(planted(tmp_path, "one"), planted(tmp_path, "two", noise_seed=9, slower=1.1))
    assert {shift.verdict for shift in found.shifts} == {"SAME"}
    assert all(shift.absolute == pytest.approx(1, rel=0.01) for shift in found.shifts)
    assert [change.what for change in found.changes] == ["canary kernel, µs"]


def test_differences_are_rarely_called_real_when_nothing_changed(tmp_path: Path) -> None:
    """60 pairs of equal effects on the edge of what can be told, each from its own noise: at most 5 % of tables err."""
    rng = np.random.default_rng(4)
    wrong = 0
    looks = Looks.between(8, 24)
    for _ in range(60):
        one, other = rng.standard_t(3, (2, 24)) * 0.01
        other = other + boundary(0.02)

        def reader(values):
            return lambda alpha: tuple(float(end) for end in bounds(values, looks, alpha))

        p, verdict = compare._p(compare._difference(reader(one), reader(other)), boundary(0.02))
        wrong += verdict != "UNDECIDED" and p <= 0.05
    assert wrong <= 4


def test_studies_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    one = planted(tmp_path, "one")
    with pytest.raises(InputError, match="one metric"):
        compare.compare(one, planted(tmp_path, "two", metrics=("step_ms",)))
    with pytest.raises(InputError, match="four is not paired"):
        compare.compare(one, planted(tmp_path, "four", design="grid", baseline={}))
    with pytest.raises(InputError, match="ipynb"):
        diff.write(one, one, tmp_path / "x.html")
    with pytest.raises(InputError, match="holds no study"):
        diff.write(one, one.replace(name="three"), tmp_path / "x.ipynb")


def test_the_live_table_fills(tmp_path: Path) -> None:
    study = planted(tmp_path)
    later = [Ledger(study.folder).load(f"{index:016x}")[0] for index in (1, 2)]
    for run in later:
        (study.folder / run.key / "run.json").unlink()
    account(study, "running")
    looker = live.Looker(study)
    early = looker.look()
    assert early.share == pytest.approx(1 / 3)
    assert early.line == "1 of 3 runs, 2 s spent (2 s of GPU), interrupted"
    assert not early.running  # its driver is gone
    assert not early.finished
    assert "SLOWER" in early.body
    assert early.body.count("no blocks yet") == 2 * 2  # two rows, each with a picture and its text
    for run in later:
        Ledger(study.folder).write(run)
    account(study)
    late = looker.look()
    assert late.finished
    assert (late.share, late.colour) == (1.0, "success")
    assert "FASTER" in late.body


def test_the_live_table_shows_failures(tmp_path: Path) -> None:
    seen = live.Looker(planted(tmp_path, effects=EFFECTS | {4096: "fail"})).look()
    assert seen.colour == "warning"
    assert "<b>hang</b> at minibatch=4096: no &lt;answer&gt; in 30 s" in seen.body


def test_pictures_say_what_they_show() -> None:
    lines = [view.Line(("a",), 0.95, 0.94, 0.96, "FASTER"), view.Line(("b",), math.nan, 0.0, math.inf, "")]
    table = view.ratio_table(("factor",), (), lines, 0.02)
    assert 'aria-label="-5.0 % [-6.0, -4.0] FASTER"' in table
    assert 'aria-label="no blocks yet"' in table
    assert view.change_text(1.01, 0.0, math.inf) == "+1.0 % [open]"
    assert view.series_svg([math.nan], "x", "s") == ""
    assert "3 readings, lowest 1, median 2, highest 3 ms" in view.series_svg([1.0, math.nan, 3.0, 2.0], "x", "ms")
    assert "1 readings" in view.series_svg([7.0], "x", "ms")


def test_waiting_for_a_study_ends_when_nobody_works_on_it(tmp_path: Path) -> None:
    study = planted(tmp_path)
    assert asyncio.run(live.finished(study))["state"] == "done"
    account(study, "running")  # but no driver holds the lock: it died
    assert asyncio.run(live.finished(study))["state"] == "interrupted"
    with pytest.raises(InputError, match="never started"):
        asyncio.run(live.finished(study.replace(name="other")))
