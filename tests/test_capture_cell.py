"""Cells as scripts, lines as ranges, the notebook command and the shell command."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from IPython.testing.globalipapp import start_ipython

import mok
from mok import cli
from mok.capture import Capture, Script, lines, place, torch_profile
from mok.capture import script as scripts
from mok.errors import InputError
from mok.trace.metrics.activity import innermost, text_of
from tests.support import capture as support


@pytest.fixture(scope="module")
def shell():
    found = start_ipython()
    mok.load_ipython_extension(found)
    return found


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    support.install(tmp_path / "bin", "nsys", "fake_nsys.py")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("MOK_FAKE_NSYS_SKIP", "1")
    for index, _ in place._VARIABLES:
        monkeypatch.delenv(index, raising=False)
    monkeypatch.setenv(support.TEST, str(tmp_path))
    yield
    assert support.nobody_left(tmp_path), support.marked(tmp_path)


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("x = 1\nprint(x)", ()),
        ("print(x, y)", ("x", "y")),
        ("def f():\n    return later\nlater = 2\nf()", ()),
        ("def f(a):\n    return a + model\nf(1)", ("model",)),
        ("import torch\ny = [torch.ones(n) for n in range(3)]", ()),
        ("total = sum(t for t in table)", ("table",)),
        ("class A:\n    size = 3\n    def f(self):\n        return __name__, size2", ("size2",)),
        ("def f():\n    global made\n    made = 1\nf()\nprint(made)", ()),
        ("from math import *\nprint(sqrt(2))", ()),
        ("for i in range(3):\n    pass\nelse:\n    print(i)\nwith open('a') as h:\n    print(h)", ()),
        ("x: int = 3\n(lambda q: q + x + z)(1)", ("z",)),
        ("try:\n    pass\nexcept ValueError as e:\n    print(e)", ()),
    ],
)
def test_names_a_cell_does_not_define(source: str, missing: tuple[str, ...]) -> None:
    assert scripts.undefined(source) == missing
    if missing:
        with pytest.raises(InputError, match=", ".join(missing)):
            scripts.cell(source)
    else:
        assert scripts.cell(source).source == source


def test_cells_that_are_no_scripts_are_refused() -> None:
    with pytest.raises(InputError, match="line 2 of the cell is a notebook command"):
        scripts.cell("x = 1\n%matplotlib inline\n")
    with pytest.raises(InputError, match="line 1 of the cell is not Python"):
        scripts.cell("x = = 1")
    with pytest.raises(InputError, match="needs Python source"):
        Script("   ")
    with pytest.raises(InputError, match="cannot read"):
        Script.file("nowhere.py")


PROGRAM = '''"""Docstring."""
from __future__ import annotations
log = []
def collatz(n):
    """How many steps."""
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n //= 2
        elif n % 3 == 0:
            n = 3 * n + 1
        else:
            n = 3 * n + 1
        steps += 1
        if steps > 900:
            break
    else:
        steps = steps
    return steps
def numbers():
    for i in range(3):
        got = yield i
        log.append(got)
class Box:
    """A box."""
    size: int = 3
    def __enter__(self):
        return self
    def __exit__(self, *a):
        return True
with Box() as box:
    log.append(box.size)
    raise ValueError("inside")
for i, value in enumerate([collatz(27), collatz(9)]):
    if i > 5:
        continue
    log.append(value)
generator = numbers()
log.append([next(generator), generator.send("a"), generator.send("b")])
try:
    assert log[0] == 4, "no"
except AssertionError as error:
    log.append(str(error))
finally:
    log.append("end")
match log[0]:
    case 3:
        log.append("three")
    case _:
        log.append("other")
log.append([y for x in range(3) if (y := x * x) > 0])
'''


def test_ranges_around_lines_change_nothing_but_are_there() -> None:
    plain: dict[str, object] = {}
    exec(lines.compiled(PROGRAM, "program.py", ranges=False), plain)
    seen: list[int] = []
    depth = [0]

    @contextlib.contextmanager
    def line(number: int):
        seen.append(number)
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    ranged: dict[str, object] = {lines.HOOK: line}
    exec(lines.compiled(PROGRAM, "program.py"), ranged)
    assert ranged["log"] == plain["log"]
    assert depth == [0]
    text = PROGRAM.splitlines()
    assert {text[number - 1].strip() for number in seen} >= {
        "n //= 2",
        "return steps",
        "log.append(value)",
        "if n % 2 == 0:",
        "elif n % 3 == 0:",
    }
    assert lines.label(PROGRAM, "a/program.py")(9) == "program.py:9 n //= 2"


def test_tracebacks_keep_their_lines() -> None:
    source = "x = 1\nif x:\n    for i in [1]:\n        y = 1 / 0\n"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(lines.compiled(source, "mine.py"), {lines.HOOK: lambda number: contextlib.nullcontext()})
    assert caught.traceback[-1].lineno == 3
    with pytest.raises(InputError, match=r"mine.py, line 2"):
        lines.compiled("x = 1\nif x\n", "mine.py")


def test_torch_profile_blames_the_line(tmp_path: Path) -> None:
    from mok.capture.inside import profile_lines

    source = "import torch\nw = torch.ones(64, 64)\nfor _ in range(2):\n    w = w @ w\n    v = w.sum().item()\n"
    made = torch_profile(profile_lines(source, {}, "cell.py"), out=tmp_path, name="t1", with_stack=False)
    trace = Capture.open(made.folder).trace
    (first, *_) = [row for row in range(len(trace.spans)) if trace.spans.name[row] == "aten::item"]
    lane, start = trace.spans.lane[first : first + 1], trace.spans.start_ns[first : first + 1]
    assert text_of(trace, innermost(trace, ("user_annotation",), lane, start)) == ["cell.py:5 v = w.sum().item()"]
    assert made.record["command"] == "mok.capture.torch_profile(function)"
    with pytest.raises(ZeroDivisionError):
        torch_profile(lambda: 1 / 0, out=tmp_path, name="t2")
    assert (tmp_path / "t2.partial").is_dir()
    with pytest.raises(InputError, match="takes a function"):
        torch_profile(3)  # type: ignore[arg-type]


def test_the_notebook_command(shell, tmp_path: Path) -> None:
    made = shell.run_cell_magic("mok_capture", f"--tool nsys --name r1 --out {tmp_path}", "import math\nprint(math.pi)\n")
    assert shell.user_ns["r1"] is made
    assert made.folder == tmp_path / "r1"
    shell.user_ns["model"] = torch.ones(3)
    with pytest.raises(InputError, match="model"):
        shell.run_cell_magic("mok_capture", f"--tool nsys --name r2 --out {tmp_path}", "print(model)\n")
    assert not (tmp_path / "r2.partial").exists()
    made = shell.run_cell_magic("mok_capture", f"--tool torch --name r3 --out {tmp_path}", "double = model * 2\n")
    assert shell.user_ns["double"].sum() == 6  # live state, both ways
    assert any(str(name).startswith("cell.py:1") for name in made.trace.spans.name.table)
    assert lines.HOOK not in shell.user_ns
    with pytest.raises(InputError, match="did you mean 'merged'"):
        shell.run_cell_magic("mok_capture", "--tool merge", "x = 1\n")


def test_stop_in_a_notebook(shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_FAKE_NSYS", "hang")
    support.interrupt_when_written(tmp_path / "r9.partial/log.txt")
    with pytest.raises(KeyboardInterrupt):
        shell.run_cell_magic("mok_capture", f"--name r9 --out {tmp_path}", "x = 1\n")
    assert (tmp_path / "r9.partial").is_dir()


def test_the_shell_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work.json"
    work.write_text(json.dumps(mok.Workload(tokens=8).to_dict()))
    assert cli.main(["capture", "nsys", "--workload", str(work), "--out", str(tmp_path), "--name", "c1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["folder"] == str(tmp_path / "c1")
    assert said["record"]["workload"]["tokens"] == 8
    script = tmp_path / "mine.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['20', 'a b'], sys.argv\n")
    given = ["--script", str(script), "--argument", "20", "--argument", "a b", "--out", str(tmp_path), "--name", "s1", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MOK_FAKE_NSYS_SKIP")
        assert cli.main(["capture", "nsys", *given]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["record"]["command"] == "mok capture nsys --script mine.py --argument 20 --argument 'a b' --name s1"
    assert cli.main(["capture", "nsys", "--workload", str(work), "--argument", "x", "--out", str(tmp_path)]) == 2
    assert "--argument is for --script" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert cli.main(["capture", "nsys", "--workload", str(work), "--out", str(tmp_path), "--name", "r"]) == 0
    capsys.readouterr()
    assert cli.main(["capture", "ranks", str(tmp_path), "r"]) == 1
    assert capsys.readouterr().out == "r: 1 of 2 ranks; missing: 0\n"
    assert cli.main(["capture", "nsys", "--out", str(tmp_path)]) == 2
    assert "either --workload FILE or --script FILE" in capsys.readouterr().err
    assert cli.main(["capture", "nsys", "--workload", str(work), "--out", str(tmp_path), "--name", "c1"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["capture", "merged", "--workload", str(work), "--out", str(tmp_path), "--name", "c2"]) == 2
    assert "no kernel of mok was launched" in capsys.readouterr().err
