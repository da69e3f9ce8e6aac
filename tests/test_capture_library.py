"""The shipped captures: whole, small, free of anything private, and what they show is what the documents say."""

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path

import duckdb
import numpy as np
import pytest

from mok.capture import Capture, bridge, in_kernel, library
from mok.errors import InputError
from mok.trace.metrics.delay import launch_delay
from mok.trace.metrics.kernel import account
from mok.trace.metrics.overlap import overlap
from mok.trace.metrics.syncs import HostSyncs, host_syncs
from mok.trace.metrics.tensor import sampled, tensor_pipe
from mok.trace.metrics.value import Unknown
from mok.trace.metrics.whatif import host_what_if
from mok.trace.read import open_trace

FOLDER = Path(__file__).resolve().parent.parent / "profiles" / "captures"
PROFILES = FOLDER.parent
MAX_BYTES = 30 << 20
MERGED = ("dsv3-uniform-on", "dsv3-uniform-off", "dsv3-zipf-on", "dsv3-zipf-off", "qwen3-30b-on")
NAMES = {
    *MERGED,
    "torch-pipeline",
    "eager-loop",
    "eager-fixed",
    "launches-0us",
    "launches-20us",
    "counters-dsv3",
    "counters-torch",
}
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
# In halves, so that this file does not hold what it looks for. Environment variables are looked for as NAME=value.
PRIVATE = re.compile("|".join(a + b for a, b in (
    ("/ho", "me/"), ("/ro", "ot/"), ("/wo", "rk/"), ("/tm", "p/"), ("/Us", "ers/"),
    (r"\b(?:PATH|HOME|USER|LOGNAME|HOSTNAME|SHELL|PWD|LD_LIBRARY_PATH|PYTHONPATH|TOKEN|SECRET|LANG|TERM)\w*", "="),
    ("ENVIRONMENT_", "VARIABLE"), (r"\b(?:\d{1,3}\.){3}\d", r"{1,3}:\d"),
)).encode())  # fmt: skip


@pytest.fixture(scope="module")
def shipped() -> dict[str, Capture]:
    return {name: library.shipped(name) for name in library.names()}


def test_the_library_is_whole_and_small(shipped: dict[str, Capture]) -> None:
    assert set(shipped) == NAMES
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < MAX_BYTES
    readme = (FOLDER / "README.md").read_text()
    for name, made in shipped.items():
        assert f"`{name}`" in readme
        for key in ("command", "commit", "date", "versions", "device", "seconds"):
            assert made.record.get(key), (name, key)
        assert re.fullmatch(r"[0-9a-f]{40}", made.record["commit"]), name
        assert made.record["device"]["gpu"]["name"] == "NVIDIA H200"
        assert made.record["device"]["gpu"]["sm_clock_mhz"] > 0
        assert made.record["ended"] == "whole"


@pytest.mark.parametrize(
    "path", sorted(path for path in PROFILES.rglob("*") if path.is_file()), ids=lambda path: str(path.relative_to(PROFILES))
)
def test_nothing_private_in_raw_bytes_and_tables(path: Path) -> None:
    contents = [path.read_bytes()]
    if path.suffix == ".parquet":  # compressed: what the columns and the file's own notes say
        file = str(path)
        columns = [name for name, kind, *_ in duckdb.execute("DESCRIBE SELECT * FROM read_parquet(?)", [file]).fetchall()
                   if "VARCHAR" in kind or "BLOB" in kind]  # fmt: skip
        for column in columns:
            texts = duckdb.execute(f'SELECT DISTINCT CAST("{column}" AS VARCHAR) FROM read_parquet(?)', [file]).fetchall()
            contents += [str(text).encode() for (text,) in texts]
        contents += [
            b for pair in duckdb.execute("SELECT key, value FROM parquet_kv_metadata(?)", [file]).fetchall() for b in pair
        ]
    for content in contents:
        found = PRIVATE.search(content)
        assert found is None, content[max(0, found.start() - 40) : found.end() + 40]
        for word in (socket.gethostname(), getpass.getuser()):
            assert len(word) < 5 or word.encode() not in content


def test_nothing_private_in_decoded_texts(shipped: dict[str, Capture]) -> None:
    for name, made in shipped.items():
        texts = [json.dumps(dict(made.record))]
        if made.trace is not None:
            spans, meta = made.trace.spans, made.trace.meta
            texts += [*spans.name.table, *made.trace.lanes.label.table, *meta.diagnostics]
            texts += [json.dumps(dict(meta.provenance)), json.dumps(dict(meta.coverage))]
            for column in spans.args.values():
                texts += column.table if hasattr(column, "table") else ()
        for text in texts:
            found = PRIVATE.search(text.encode())
            assert found is None, (name, text[:200])


def test_the_redacted_nsys_tables_read_as_the_capture_does(shipped: dict[str, Capture]) -> None:
    made = shipped["eager-loop"]
    whole = open_trace(made.folder / "nsys.sqlite")
    low, high = made.trace.meta.coverage["trimmed_to_ns"]
    kernels = whole.spans.category.where("kernel") & (whole.spans.start_ns <= high) & (whole.spans.end_ns >= low)
    mine = made.trace.spans.category.where("kernel")
    assert kernels.sum() == mine.sum() > 100
    assert (whole.spans.start_ns[kernels] == made.trace.spans.start_ns[mine]).all()


@pytest.mark.parametrize("name", MERGED)
def test_two_clocks_within_five_microseconds(shipped: dict[str, Capture], name: str) -> None:
    found = shipped[name].trace.meta.coverage["bridge"]
    assert found["uncertainty_ns"] <= 5_000
    assert found["probes"] >= 100
    assert len(found["held_out"]) >= 2
    for one in found["held_out"]:
        assert one["inside"] >= 0.999
        assert one["num_events"] > 10_000
    assert len(found["marker_residuals_ns"]) == 3
    # between the host's two time stamps, or nearer to them than the stated uncertainty
    assert all(abs(residual) <= found["uncertainty_ns"] for residual in found["marker_residuals_ns"])
    spans = shipped[name].trace.spans
    stamps = [
        int(spans.dur_ns[row])
        for row in np.flatnonzero(spans.category.where("nvtx"))
        if re.fullmatch(r"mok marker \d+", str(spans.name[int(row)]))
    ]
    assert len(stamps) == 3
    assert 1_400 < min(stamps) <= max(stamps) < 9_550  # how well the host knows a marker's time, as the README says


@pytest.mark.parametrize("name", MERGED)
def test_the_shipped_readings_fit_again_and_find_what_is_planted(shipped: dict[str, Capture], name: str) -> None:
    kept = shipped[name].trace.meta.coverage["bridge"]
    first, last, start, end = (np.array(kept["readings"][key], np.int64) for key in ("first_ns", "last_ns", "start_ns", "end_ns"))
    again = bridge.fit(first, last, start, end)
    assert again.uncertainty_ns == kept["uncertainty_ns"]
    assert abs(again.drift_ppm - kept["drift_ppm"]) < 1e-3
    # the profiler's clock 350 us later and 20 ppm faster
    moved = [t + 350_000 + np.rint(20e-6 * t).astype(np.int64) for t in (start, end)]
    planted = bridge.fit(first, last, *moved)
    at = np.array([first[0], last[-1]], np.int64)
    truth = again.map(at)
    error = planted.map(at) - (truth + 350_000 + np.rint(20e-6 * truth).astype(np.int64))
    assert np.abs(error).max() <= planted.uncertainty_ns <= 5_000
    spread_ms = (last[-1] - first[0]) / 1e6
    assert abs(planted.drift_ppm - again.drift_ppm - 20) < 3 + 50 / spread_ms


@pytest.mark.parametrize("name", MERGED)
def test_accounting_closes(shipped: dict[str, Capture], name: str) -> None:
    found = account(in_kernel(shipped[name].trace, 0))
    assert abs(sum(found.shares.values()) - 1) < 1e-6
    assert found.shares["other"] <= 0.05
    assert found.num_sms == 132
    assert found.coverage == 1.0


def test_tensor_time_agrees_with_ncu(shipped: dict[str, Capture]) -> None:
    inside = in_kernel(shipped["dsv3-uniform-on"].trace, 0)
    counters = shipped["counters-dsv3"].counters
    assert counters.clock_control == "none"
    by_ncu = counters.of("mok_forward", TENSOR)
    assert abs(100 * tensor_pipe(inside).value - by_ncu) <= 5
    seen = sampled(shipped["dsv3-uniform-on"].trace, "Tensor Active", *inside.window_ns)
    assert abs(seen.value - by_ncu) <= 5
    assert isinstance(sampled(shipped["dsv3-zipf-on"].trace, "Tensor Active", *inside.window_ns), Unknown)
    # the mean of the warpgroups lies below: one's wait is hidden by the other's multiplication
    assert 100 * account(inside).shares["tensor"] < by_ncu


def test_counters_cover_what_the_issue_asks_for(shipped: dict[str, Capture]) -> None:
    for name, parts in (
        ("counters-dsv3", {"mok_forward"}),
        ("counters-torch", {"gather", "gate_up", "swiglu", "down", "combine"}),
    ):
        counters = shipped[name].counters
        assert set(counters.part) == parts
        for word in ("pipe_tensor", "dram__", "lts__", "warps_active"):
            assert any(word in metric for metric in counters.metric), (name, word)


@pytest.mark.parametrize("name", MERGED)
def test_the_name_based_metric_sees_no_communication(shipped: dict[str, Capture], name: str) -> None:
    trace = shipped[name].trace
    result = overlap(trace)
    assert not isinstance(result, Unknown)
    assert all(isinstance(one.ratio, Unknown) and "no communication kernel by name" in one.ratio.reason for one in result)
    found = account(in_kernel(trace, 0))
    assert found.shares["communication"] > 0.01  # and there it is


def test_overlap_off_waits_for_rows(shipped: dict[str, Capture]) -> None:
    on, off = (account(in_kernel(shipped[f"dsv3-uniform-{which}"].trace, 0)) for which in ("on", "off"))
    assert off.exposed > 2 * on.exposed


def blamed(made: Capture) -> tuple[HostSyncs, list[dict[str, object]]]:
    found = host_syncs(made.trace)
    assert isinstance(found, HostSyncs)
    return found, found.rows(made.trace, 1000)


def test_planted_items_are_found_ranked_and_blamed(shipped: dict[str, Capture]) -> None:
    _, rows = blamed(shipped["eager-loop"])
    source = (FOLDER.parents[1] / "examples/captures/eager_loop.py").read_text().splitlines()
    worse = next(number for number, line in enumerate(source, 1) if "planted: the worse one" in line)
    lesser = next(number for number, line in enumerate(source, 1) if "planted: the lesser one" in line)
    harm = {
        number: [row["harm_ns"] for row in rows if str(row["range"]).startswith(f"eager_loop.py:{number} ")]
        for number in (worse, lesser)
    }
    assert len(harm[worse]) == len(harm[lesser]) == 12
    assert sum(harm[worse]) > sum(harm[lesser]) > 0
    assert min(harm[worse]) > 900_000
    top = [str(row["range"]).split()[0] for row in rows[:12]]
    assert set(top) == {f"eager_loop.py:{worse}"}


def test_the_fix_leaves_no_harm(shipped: dict[str, Capture]) -> None:
    found, rows = blamed(shipped["eager-fixed"])
    assert not any(".item()" in str(row["range"]) for row in rows)
    before, _ = blamed(shipped["eager-loop"])
    assert found.harm_ns.sum() < 0.02 * before.harm_ns.sum()


def test_a_slower_host_is_predicted_within_ten_percent(shipped: dict[str, Capture]) -> None:
    base, slower = shipped["launches-0us"].trace, shipped["launches-20us"].trace
    predicted = launch_delay(base, 20_000)
    measured = host_what_if(slower, (1.0,))
    assert not isinstance(predicted, Unknown)
    assert not isinstance(measured, Unknown)
    assert predicted.recorded_ns < 0.8 * measured.recorded_ns  # or there would be nothing to predict
    assert abs(predicted.predicted_ns / measured.recorded_ns - 1) <= 0.10


def test_gpu_metrics_are_counter_lanes(shipped: dict[str, Capture]) -> None:
    for name in ("dsv3-uniform-on", "torch-pipeline"):
        labels = [
            label
            for label, kind in zip(shipped[name].trace.lanes.label.decode(), shipped[name].trace.lanes.kind.decode(), strict=True)
            if kind == "counter"
        ]
        assert any("Tensor" in label for label in labels)
        assert len(shipped[name].trace.counters) > 100


def test_the_readme_says_what_the_files_say(shipped: dict[str, Capture]) -> None:
    text = (FOLDER / "README.md").read_text()
    for name in MERGED:
        trace = shipped[name].trace
        bridge, found = trace.meta.coverage["bridge"], account(in_kernel(trace, 0))
        records = sum(one["num_events"] for one in bridge["held_out"])
        assert f"| `{name}` | {bridge['uncertainty_ns']} ns | 100 % of {records:,} |" in text
        shares = found.shares
        row = [f"{found.kernel_ns / 1e6:.2f}", *(f"{100 * shares[key]:.1f}" for key in ("tensor", "stall"))]
        row.append(f"{100 * shares['exposed communication']:.2f}")
        row += [f"{100 * shares[key]:.1f}" for key in ("epilogue", "communication", "other", "idle")]
        assert f"| `{name}` | {' | '.join(row)} |" in text
    pipe = tensor_pipe(in_kernel(shipped["dsv3-uniform-on"].trace, 0)).value
    assert f"{100 * pipe:.1f} % of the time" in text
    assert f"{shipped['counters-dsv3'].counters.of('mok_forward', TENSOR):.1f} % by ncu" in text


def test_the_checks_of_the_gpu_passed() -> None:
    found = json.loads((FOLDER / "checks.json").read_text())
    assert {row["name"] for row in found["rows"]} == NAMES | {"check-cell", "check-kernel", "check-sigterm", "check-torch"}
    assert all(row["ok"] for row in found["rows"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'eager-loop'"):
        library.shipped("eager-lop")
