"""What profiles/benchmarks/README.md says of the record is in the record: commit, tables, and what misses its aim."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "profiles" / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
RECORD = json.loads((FOLDER / "h200_forward.json").read_text(encoding="utf-8"))
ROWS: dict[tuple[str, str], dict[str, Any]] = {(row["case"], row["metric"]): row for row in RECORD["rows"]}
BASES = ("dsv3-ep8-t8192", "dsv3-ep8-t2048", "qwen3-235b-ep8-t8192", "qwen3-30b-ep4-t8192")


def lines(pattern: str) -> list[list[str]]:
    """Cells of the table lines whose first cell matches."""
    found = [line.strip("| ").split(" | ") for line in README.splitlines() if re.match(rf"\| (?:{pattern}) \|", line)]
    assert found
    return found


def told(text: str, value: float) -> None:
    """`text` is `value`, rounded to the digits it shows."""
    digits = len(text.partition(".")[2])
    assert abs(float(text) - value) <= 0.5 * 10**-digits + 1e-9, f"README says {text}, the record {value}"


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d+\.\d+", cell)


def test_the_commit_of_the_record_is_named() -> None:
    assert f"The record is of commit {RECORD['commit'][:7]}." in README


def test_what_is_said_of_agreement_and_of_unexplained_time_is_in_the_record() -> None:
    forward = [row for row in RECORD["rows"] if row["metric"] == "forward_ms"]
    assert all((row["config"]["unequal"] == 0) == (not row["case"].endswith("+mxfp8")) for row in forward)
    most = max(row["ours"] for row in RECORD["rows"] if row["metric"] == "sm_other_pct")
    assert most <= 5
    told(re.search(r"is at most (\d+\.\d+) % in every case", README)[1], most)  # type: ignore[index]


def test_the_table_is_the_record() -> None:
    rows = lines("|".join(map(re.escape, BASES)))
    assert [row[0] for row in rows] == list(BASES)
    for case, ours, torch, tile, dense, exposed, cost, efficiency, overhead in rows:
        forward = ROWS[case, "forward_ms"]
        told(ours, forward["ours"])
        for name, cell in (("torch", torch), ("tile_floor", tile), ("dense_floor", dense)):
            told(numbers(cell)[0], forward["config"]["ratio"][name][1])
        assert ("level" in torch) == (abs(forward["config"]["ratio"]["torch"][1] - 1) < 0.03)
        told(numbers(exposed)[0], ROWS[case, "exposed_comm_pct"]["ours"])
        told(numbers(cost)[0], ROWS[case, "cost_of_comm_pct"]["ours"])
        told(numbers(overhead)[0], ROWS[case, "trace_overhead_pct"]["ours"])
        on, off = numbers(efficiency)
        told(on, ROWS[case, "overlap_efficiency"]["ours"])
        told(off, ROWS[case, "overlap_efficiency"]["baselines"]["overlap_off"])


def test_the_mxfp8_table_is_the_record() -> None:
    rows = lines(r"\S+\+mxfp8")
    assert [row[0] for row in rows] == [f"{base}+mxfp8" for base in BASES]
    for case, times, torch, sms, exposed, off in rows:
        ours, bf16 = numbers(times)
        told(torch, ROWS[case, "forward_ms"]["config"]["ratio"]["torch"][1])
        assert int(sms) == ROWS[case, "forward_ms"]["config"]["comm_sms"]
        told(ours, ROWS[case, "forward_ms"]["ours"])
        told(bf16, ROWS[case.removesuffix("+mxfp8"), "forward_ms"]["ours"])
        told(numbers(exposed)[0], ROWS[case, "exposed_comm_pct"]["ours"])
        told(numbers(off)[0], ROWS[case, "exposed_comm_pct"]["baselines"]["overlap_off"])


def test_every_trace_overhead_beyond_two_per_cent_is_named() -> None:
    missed = {case: row["ours"] for (case, metric), row in ROWS.items() if metric == "trace_overhead_pct" and row["ours"] > 2}
    assert missed
    said = README[README.index("What misses its aim") :].partition("\n\n")[0]
    for case, value in missed.items():
        base, plus, suffix = case.partition("+")
        assert base in said
        assert plus + suffix in said
        assert f"{value:.2f}" in said.replace(" %", "")


@pytest.mark.parametrize("digits, value, ok", [("1.02", 1.0249, True), ("1.02", 1.0251, False), ("0.8", 0.76, True)])
def test_the_comparison_can_fail(digits: str, value: float, ok: bool) -> None:
    if ok:
        told(digits, value)
    else:
        with pytest.raises(AssertionError, match="README says"):
            told(digits, value)
