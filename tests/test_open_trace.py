"""One entry point: files are known by their content, reports go through nsys, strangers are refused by name."""

import shutil

import pytest

from mok.errors import CapabilityError, InputError
from mok.trace import Trace
from mok.trace.read import open_trace
from tests.support import trace_fuzz
from tests.support.trace_builders import Nsys


def test_every_kind_is_known_without_its_name(tmp_path):
    """The name says nothing: the same bytes under another name open the same."""
    for path in trace_fuzz.originals(tmp_path):
        plain = tmp_path / "nameless"
        plain.write_bytes(path.read_bytes())
        one, two = open_trace(path), open_trace(plain)
        assert isinstance(one, Trace)
        assert len(one.spans) == len(two.spans) > 0, path
        assert one.meta.tool == two.meta.tool


def fake_nsys(folder, script):
    tool = folder / "nsys"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_a_report_goes_through_nsys_export(tmp_path, monkeypatch):
    report, export = tmp_path / "a.nsys-rep", Nsys().kernel(0, 7).write(tmp_path / "made.sqlite")
    report.write_bytes(b"\x01binary")
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(CapabilityError, match=r"needs nsys .*nsys export --type=sqlite"):
        open_trace(report)
    copy = shutil.which("cp", path="/bin:/usr/bin")
    fake_nsys(tools, f'for each; do case "$each" in --output=*) {copy} {export} "${{each#--output=}}";; esac; done')
    assert open_trace(report).meta.coverage["kernels"] == 1
    monkeypatch.setenv("MOK_NSYS", str(tools / "nsys"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert open_trace(report).meta.coverage["kernels"] == 1
    fake_nsys(tools, "echo unsupported report version >&2; exit 3")
    with pytest.raises(InputError, match=r"exit status 3\): unsupported report version"):
        open_trace(report)


def test_what_is_no_trace_is_refused_by_name(tmp_path):
    for content, message in (
        (b"", "is empty"),
        (b"\x7fELF....", "no trace this reader knows"),
        (b"hello world", "no trace this reader knows"),
    ):
        file = tmp_path / "file"
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            open_trace(file)
    with pytest.raises(InputError, match="no file or folder at"):
        open_trace(tmp_path / "absent")
    with pytest.raises(InputError, match="no trace was given"):
        open_trace([])
