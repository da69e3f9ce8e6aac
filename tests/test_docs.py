"""Documentation that cannot rot: its code runs, its commands run, its links lead somewhere, its tables match the source.

A block that cannot run here says why on the line before it: `<!-- skip: needs a GPU -->`.
"""

import ast
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mok import cli

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"(?:<!-- skip: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"MOK_[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    body: str
    skip: str | None


def blocks(path: Path, text: str | None = None) -> list[Block]:
    text = path.read_text() if text is None else text
    return [
        Block(path.name, text.count("\n", 0, match.start()) + 1, match["language"], match["body"], match["reason"])
        for match in FENCE.finditer(text)
    ]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_commands(block: Block, capsys: pytest.CaptureFixture[str]) -> int:
    """Run the `mok` lines of a shell block, joined over backslashes; returns how many ran. Other lines must be known commands."""
    ran = 0
    for line in block.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "mok":
            code = cli.main(words[1:])
            assert code == 0, f"{block.document}:{block.line}: {line}: {capsys.readouterr().err}"
            ran += 1
        elif words[0] == "make":
            (target,) = [word for word in words[1:] if "=" not in word]
            assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False).returncode == 0, line
        else:
            assert words[0] in ("git", "cd", "pip", "apt-get", "conda", "python", "torchrun", "bash"), line
    return ran


def test_the_checker_sees_blocks_commands_and_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\n```python\nx = 1\n```\n<!-- skip: why -->\n```bash\nmok nothing\n```\n```bash\nmok run --ep \\\n  3  # no\n```\n"
    python, skipped, bad = blocks(tmp_path / "x.md", text)
    assert (python.language, python.body, python.skip, python.line) == ("python", "x = 1\n", None, 2)
    assert skipped.skip == "why"
    with pytest.raises(AssertionError, match="ep=3 must divide"):
        run_commands(bad, capsys)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    for block in blocks(path):
        if block.language == "python" and block.skip is None:
            # Padded so that a traceback names the document's own line.
            code = compile("\n" * block.line + block.body, str(path), "exec")
            exec(code, namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("profiles", "notebooks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    for block in blocks(path):
        if block.language == "bash" and block.skip is None:
            run_commands(block, capsys)


def test_the_readme_shows_something_that_runs() -> None:
    found = [block for block in blocks(ROOT / "README.md") if block.skip is None]
    assert any(block.language == "python" for block in found)
    text = "".join(block.body for block in found if block.language == "bash")
    assert {"make demo", "make test"} <= set(text.splitlines())
    assert re.search(r"^mok run ", text, re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_fence_is_closed_and_named(path: Path) -> None:
    assert path.read_text().count("\n```") == 2 * len(blocks(path))
    assert all(block.language for block in blocks(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    prose = FENCE.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("http://", "https://", "#")):
            assert (path.parent / target.partition("#")[0]).exists(), f"{name(path)} links to {target}"
    # Paths written as code are promises too.
    for target in re.findall(r"`((?:docs|mok|csrc|notebooks|profiles|tests|examples)/[\w./-]+)`", prose):
        assert (ROOT / target).exists(), f"{name(path)} names {target}"


def environment_names(source: str) -> set[str]:
    """Names a Python source asks the environment for: get, getenv, subscripts and `in`, directly or through a constant."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    asked: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and re.search(r"(environ\.\w+|getenv)$", ast.unparse(node.func)):
            asked.append(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            asked.append(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            asked.append(node.left)
    values = [constants.get(node.id, node) if isinstance(node, ast.Name) else node for node in asked]
    return {node.value for node in values if isinstance(node, ast.Constant) and VARIABLE.fullmatch(str(node.value))}


def variables_read() -> set[str]:
    """The MOK_ environment variables that Python or C++ sources read."""
    found: set[str] = set()
    for path in (ROOT / "mok").rglob("*.py"):
        found |= environment_names(path.read_text())
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file():
            found |= set(re.findall(r'getenv\("(MOK_[A-Z0-9_]+)"\)', path.read_text()))
    return found


def test_the_checker_sees_environment_reads() -> None:
    source = (
        "N = 'MOK_A'\nos.environ.get(N)\nos.getenv('MOK_B', '')\nenviron['MOK_C']\nif 'MOK_D' in os.environ: pass\nf('MOK_E')"
    )
    assert environment_names(source) == {"MOK_A", "MOK_B", "MOK_C", "MOK_D"}


def test_the_table_of_environment_variables_is_complete() -> None:
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert variables_read()
    assert table == variables_read() | {"TORCH_INDEX_URL"}
