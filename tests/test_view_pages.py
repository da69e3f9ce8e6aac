"""Pages that hold everything: a packed trace reads back, nothing is fetched, names stay text, the server knows its reader."""

from __future__ import annotations

import base64
import json
import signal
import struct
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import HOSTILE, dense, hostile, launch, trace_of

from mok import routing
from mok.cli import main
from mok.errors import InputError
from mok.notebook_html import external_sources
from mok.trace.model import Trace
from mok.views.analysis import tables_of
from mok.views.report import Table, report, write
from mok.views.serve import TraceServer
from mok.views.timeline import Answers
from mok.views.timeline.pack import pack
from mok.workload import RoutingSpec


def unpacked(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What page.js does, once more and independently."""
    data = zlib.decompress(base64.b64decode(text))
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    at, columns = 4 + length, {}
    for column in header["columns"]:
        part = np.frombuffer(data, np.uint8, column["bytes"], at)
        at += column["bytes"]
        if column.get("raw"):
            columns[column["name"]] = part.view({"f64": "<f8"}[column["type"]])
            continue
        zigzag = np.zeros(column["length"], object)
        for plane, bytes_ in enumerate(part.reshape(column["planes"], -1)):
            zigzag = zigzag + bytes_.astype(object) * 256**plane
        values = np.array([-(n + 1) // 2 if n % 2 else n // 2 for n in zigzag.tolist()], np.int64)
        columns[column["name"]] = values.cumsum() if column["delta"] else values
    assert at == len(data)
    return header, columns


SOME = {"launch": launch(2**53 + 1), "dense": dense(3000, 5), "hostile": hostile(), "empty": trace_of([], [])}


@pytest.mark.parametrize("trace", SOME.values(), ids=SOME)
def test_a_packed_trace_reads_back(trace: Trace) -> None:
    answers = Answers(trace)
    text, notes = pack(answers)
    header, columns = unpacked(text)
    assert notes == ()
    for name, column in (answers.wire | answers.wire_arguments).items():
        if name != "id":
            assert np.array_equal(columns[name].astype(float), column.values.astype(float), equal_nan=True), name
    assert header["mode"] == "inline"


def test_arguments_are_left_out_rather_than_the_limit_passed_and_it_is_said() -> None:
    answers = Answers(dense(40_000, 5))
    whole, _ = pack(answers)
    budget = len(whole) * 3 // 4 - 20_000
    text, notes = pack(answers, budget_bytes=budget)
    header, columns = unpacked(text)
    assert "arg:row" not in columns or "arg:expert" not in columns
    assert len(text) < budget * 4 / 3 + 4000
    assert header["unsent"]
    assert f"left out to keep the page small: {', '.join(header['unsent'])}" in notes[0]


def test_a_trace_too_large_for_a_page_travels_as_a_picture() -> None:
    trace = dense(60_000, 12)
    answers = Answers(trace, inline_limit=50_000)
    text, notes = pack(answers)
    header, columns = unpacked(text)
    tile = answers.index.tile(range(12), 0, trace.duration_ns + 1, header["tile"]["width"])
    assert (columns["tile_key"].reshape(12, -1) == tile.key).all()
    assert (columns["tile_share"].reshape(12, -1) == tile.share).all()
    assert "nothing finer" in notes[0]


@pytest.mark.slow
def test_a_report_of_a_million_spans_stays_under_ten_megabytes() -> None:
    page = report(trace=dense(1_000_000), title="large")
    assert len(page.encode()) < 10_000_000


def test_a_report_loads_nothing_and_shows_names_as_text() -> None:
    table = Table(HOSTILE, (HOSTILE, "b"), ((HOSTILE, HOSTILE), ("only", "")))
    page = report(trace=hostile(), tables=(table,), title=HOSTILE, routing=routing.load(routing.shipped("tiny_moe")), ep=8)
    assert external_sources(page) == []
    assert "<img" not in page.replace("&lt;img", "")
    assert "alert(2)</script>" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page
    assert 'colspan="2">only' in page


def test_experts_of_the_traced_rank_light_their_tiles_by_the_number_they_have_there() -> None:
    stats = routing.stats(routing.generate(RoutingSpec("uniform"), 64, 16, 2), 16, 4)
    lanes = [(2, 0, 2, "sm", "SM 0")]
    trace = trace_of([(0, 5, 0, "gate_up", "compute", -1)], lanes, expert=[1])
    page = report(trace=trace, routing=stats)
    assert page.count('data-expert="') == 4
    assert "<td>9 <button" in page  # expert 9 is number 1 of rank 2
    assert '<td>9 <button type="button" data-expert="1"' in page
    assert 'data-expert="' not in report(routing=stats)


def test_a_report_needs_something_and_replaces_only_reports(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a trace, a routing or a table"):
        report()
    target = tmp_path / "r.html"
    page = report(trace=launch())
    assert write(target, page) == target
    assert write(target, page).read_text() == page
    target.write_text("my own page")
    with pytest.raises(InputError, match="left alone"):
        write(target, page)
    assert target.read_text() == "my own page"
    with pytest.raises(InputError, match="cannot write"):
        write(target / "r.html", page)


def test_tables_say_what_they_do_not_know() -> None:
    tables = {table.caption: table for table in tables_of(launch())}
    overlaps = tables["Communication beside computation, by whole kernels"].rows
    assert all("unknown: no communication kernel by name" in row[-1] for row in overlaps)
    waits = tables["Waits inside the kernel"].rows
    assert waits == [("wait x_ready", "1", "0.1", "0.10")]
    assert tables_of(trace_of([], [])) == ()


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = launch().write(tmp_path / "t.parquet")
    out = tmp_path / "out.html"
    assert main(["report", str(out), "--trace", str(trace), "--routing", "tiny_moe", "--ep", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"report": str(out), "bytes": out.stat().st_size}
    assert main(["report", str(tmp_path / "x.html")]) == 2
    assert "give --trace, --routing, or both" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "x.html"), "--trace", str(trace), "--ep", "2"]) == 2
    assert main(["report", str(tmp_path / "x.html"), "--trace", str(trace), "--by", "colour"]) == 2
    assert main(["open", str(tmp_path / "none.parquet")]) == 2
    assert not (tmp_path / "x.html").exists()


# The local server


def fetch(address: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(address, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server_answers_its_reader_and_nobody_else() -> None:
    with TraceServer(Answers(launch())) as server:
        base = f"http://127.0.0.1:{server.port}"
        assert server.address == f"{base}/?token={server.token}"
        assert len(server.token) >= 32
        status, page = fetch(server.address)
        assert status == 200
        assert server.token.encode() not in page
        assert b"connect-src 'self'" in page
        assert fetch(f"{base}/")[0] == 403
        assert fetch(f"{base}/?token=wrong")[0] == 403
        assert fetch(server.address, Host="evil.example")[0] == 403
        question = json.dumps({"ask": "hello"}).encode()
        assert fetch(f"{base}/ask", question)[0] == 403
        assert fetch(f"{base}/ask?token={server.token}", question)[0] == 403  # a form of another site could send that
        status, answer = fetch(f"{base}/ask", question, **{"X-Token": server.token})
        assert status == 200
        (length,) = struct.unpack_from("<I", answer)
        assert json.loads(answer[4 : 4 + length])["spans"] == 8
        assert fetch(f"{base}/ask", b"[1]", **{"X-Token": server.token})[0] == 400
        assert fetch(f"{base}/ask", b"{" * 100_000, **{"X-Token": server.token})[0] == 400
        assert fetch(f"{base}/other?token={server.token}")[0] == 404
        with pytest.raises(InputError, match="cannot be used"):
            TraceServer(Answers(launch()), server.port)
    with pytest.raises(urllib.error.URLError):
        fetch(f"{base}/")


def test_two_servers_have_two_tokens() -> None:
    with TraceServer(Answers(launch())) as one, TraceServer(Answers(launch())) as other:
        assert one.token != other.token
        assert fetch(f"http://127.0.0.1:{other.port}/?token={one.token}")[0] == 403


def test_open_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    trace = launch().write(tmp_path / "t.parquet")
    command = [sys.executable, "-m", "mok", "open", str(trace), "--other", str(trace), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0].startswith("A: made by hand; B: made by hand: 16 spans")
    assert fetch(lines[1].strip())[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    with pytest.raises(urllib.error.URLError):
        fetch(lines[1].strip())
