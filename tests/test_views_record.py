"""profiles/benchmarks/views.json keeps the promises of docs/views.md, and the README says what is in it."""

from __future__ import annotations

import re
from pathlib import Path

from mok.bench.record import read

FOLDER = Path(__file__).resolve().parent.parent / "profiles" / "benchmarks"
BARS = {
    ("inline-1m", "first_draw_ms"): 1000,
    ("inline-1m", "frame_p95_ms"): 50,
    ("tiled-10m", "tile_p95_ms"): 150,
    ("tiled-10m", "tile_largest_kb"): 1000,
    ("tiled-10m", "peak_rss_mib"): 1536,
    ("tiled-10m", "notebook_kb"): 1000,
    ("report-1m", "html_mb"): 10,
}


def test_the_record_is_below_every_bar_and_the_readme_agrees() -> None:
    rows = {(row["case"], row["metric"]): row for row in read(FOLDER / "views.json")["rows"]}
    section = (FOLDER / "README.md").read_text().partition("## views.json")[2].partition("\n## ")[0]
    told = re.findall(r"^\| (\S+) \| (\w+)[^|]* \| ([\d.]+) \| (\d+) \|$", section, re.MULTILINE)
    assert {(case, metric): float(bar) for case, metric, _, bar in told} == BARS
    for case, metric, value, bar in told:
        measured = rows[case, metric]["ours"]
        assert measured < float(bar)
        assert abs(measured - float(value)) <= 0.006 * measured, (case, metric, measured, value)
    assert rows["inline-1m", "first_draw_ms"]["samples"] >= 20
    assert rows["tiled-10m", "tile_p95_ms"]["samples"] >= 20
