"""The project's frame: what is packaged, what installs where, and the rules every file keeps."""

import ast
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CARD = {"jupyterlab", "torch", "ipywidgets", "plotly", "nsight-python", "papermill"}
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
MAX_LINES = 400
IMPORT_LIMIT_S = 0.3


def requirements(*extras: str) -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    lines = PROJECT["project"]["dependencies"] + [line for extra in extras for line in optional[extra]]
    return [Requirement(line) for line in lines]


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name and (ROOT / os.fsdecode(name)).is_file()]


# Packaging


def test_the_card_packages_are_ordinary_dependencies() -> None:
    assert {requirement.name for requirement in requirements()} >= CARD
    assert set(PROJECT["project"]["optional-dependencies"]) == {"slurm", "png", "dev"}


def test_gpu_packages_are_asked_for_on_linux_only() -> None:
    for requirement in requirements("dev"):
        gpu = requirement.name.startswith(("nsight", "cuda-", "nvidia-cuda", "nvidia-nv"))
        on_mac = requirement.marker is None or requirement.marker.evaluate({"sys_platform": "darwin"})
        on_linux = requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"})
        assert on_linux, requirement
        assert on_mac is not gpu, requirement


def test_constraints_pin_every_direct_dependency_inside_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for requirement in requirements("dev"):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: pinned to {version}"


def test_environment_yml_adds_nothing_to_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["project"]["name"]
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    names = {re.split(r"[<>=!~ ]", entry, maxsplit=1)[0]: entry for entry in plain}
    assert names.pop("python").removeprefix("python") == PROJECT["project"]["requires-python"]
    names.pop("pip")
    assert "-e ." in pip
    known = {canonicalize_name(requirement.name) for requirement in requirements("slurm", "png", "dev")}
    extra = set(names) | {Requirement(entry).name for entry in pip if not entry.startswith("-e .")}
    assert extra <= known


def compile_for(platform: str, tmp_path: Path, *arguments: str) -> str:
    target = tmp_path / f"{platform}.txt"
    command = ["uv", "pip", "compile", "--quiet", "--python-platform", platform, "--only-binary", ":all:", "pyproject.toml"]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, *arguments, "-o", str(target)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target.read_text()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_run_time_dependencies_resolve_from_wheels_alone(platform: str, tmp_path: Path) -> None:
    text = compile_for(platform, tmp_path, "--python-version", "3.11")
    found = {line.split("==")[0] for line in text.splitlines() if "==" in line and not line.startswith((" ", "#"))}
    linux = "linux" in platform
    assert CARD - found == (set() if linux else {"nsight-python"})
    assert ("nvidia-cuda-nvrtc" in found) is linux


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_pinned_set_resolves_for_the_oldest_python(platform: str, tmp_path: Path) -> None:
    # 3.11.0: Debian 12 ships 3.11.2, and some packages have dropped it without saying so in their major version.
    text = compile_for(platform, tmp_path, "--python-version", "3.11.0", "--extra", "dev", "-c", "constraints.txt")
    assert "torch==2.13.0" in text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_carries_kernels_notebooks_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    for folder, inside in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        files = {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in tracked(folder)}
        assert files
        assert files <= names
    assert "mok/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata


def test_mok_init_copies_notebooks_out_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    site, target = tmp_path / "site", tmp_path / "mine"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    command = [sys.executable, "-m", "mok", "init", str(target)]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    copied = {path.name: path.read_bytes() for path in target.iterdir()}
    assert copied == {path.name: path.read_bytes() for path in (site / "mok/_notebooks").glob("*.ipynb")}
    again = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, check=False)
    assert again.returncode == 2
    # What the copied notebooks show must be found without a checkout.
    command = [sys.executable, "-c", "from mok import routing; print(routing.shipped('tiny_moe'))"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(site / "mok/_profiles/routing/tiny_moe.parquet"), done.stderr


# Imports


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light() -> None:
    code = "import time; t = time.perf_counter(); import mok; print(time.perf_counter() - t)"
    assert min(float(fresh(code)) for _ in range(3)) < IMPORT_LIMIT_S
    heavy = "torch plotly duckdb numpy IPython papermill pynvml typer"
    code = f"import sys, mok; print([name for name in {heavy.split()!r} if name in sys.modules])"
    assert fresh(code).strip() == "[]"


def test_every_module_stands_on_a_floor_and_in_the_architecture() -> None:
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    named = set(re.findall(r"mok\.[\w.]+", " ".join(contract["layers"])))
    modules = {f"mok.{path.stem}" for path in (ROOT / "mok").glob("*.py") if path.stem[0] != "_"}
    modules |= {f"mok.{path.parent.name}" for path in (ROOT / "mok").glob("*/__init__.py")}
    parts = {f"mok.trace.{path.stem}" for path in (ROOT / "mok/trace").glob("*") if path.stem[0] != "_"}
    assert (modules - {"mok.trace"} | parts) - named == set()
    table = set(re.findall(r"`(mok\.\w+)`", (ROOT / "docs/architecture.md").read_text()))
    assert modules - table == set()


# Files


def test_no_module_is_too_long() -> None:
    long = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in tracked("*.py", "*.cu", "*.cuh", "*.js")}
    assert long
    long.pop("mok/views/timeline/timeline.js", None)  # a widget stores one module; tests/test_timeline_detail.py bounds its bytes
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_files_name_no_machine_and_no_registry() -> None:
    # Written in halves so that this file does not name what it forbids.
    halves = [("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/"), ("pypi", r"\.org"), ("python", r"hosted\.org"), ("npm", r"js\.org")]
    halves += [("pytorch", r"\.org/whl"), ("/tm", r"p/\w")]
    forbidden = re.compile("|".join("".join(half) for half in halves).encode())
    found = {str(path.relative_to(ROOT)): match[0] for path in tracked() if (match := forbidden.search(path.read_bytes()))}
    for path in ("mok/trace/read/private.py", "tests/test_read_ncu.py", "tests/test_redaction.py"):
        found.pop(path, None)  # what a user's folder looks like is their subject
    assert found == {}


def test_the_library_prints_nothing() -> None:
    for path in tracked("mok/*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not any(isinstance(func, ast.Name) and func.id == "print" for func in calls), path


def test_notebooks_are_clean() -> None:
    notebooks = tracked("notebooks/*.ipynb")
    assert notebooks
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert notebook.metadata.kernelspec.name == "python3", path.name
        assert "widgets" not in notebook.metadata, path.name
        assert all(not cell.outputs and cell.execution_count is None for cell in code), path.name
        assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1, path.name
        assert "record_summary(" in code[-1].source, path.name


# Makefile


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH_INDEX_URL"))}
    tool = shutil.which("make")
    assert tool
    return subprocess.run(
        [tool, *arguments], cwd=folder, env=clean | environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_make_targets(checkout: Path) -> None:
    runs = {
        "demo": "-m mok.demo",
        "test": '-m "not slow" tests',
        "test-slow": "-m slow tests",
        "check": "lint-imports",
        "lab": "jupyter lab",
    }
    for target, command in runs.items():
        done = make(checkout, "-n", target)
        assert done.returncode == 0, done.stderr
        assert "pip install --quiet -c constraints.txt -e '.[dev]'" in done.stdout
        assert command in done.stdout
    assert "extra-index-url" not in make(checkout, "-n", "demo").stdout
    torch = make(checkout, "-n", "demo", TORCH_INDEX_URL="file:///wheels").stdout
    assert '--extra-index-url "file:///wheels" "torch==' in torch


def test_make_names_the_apt_line_for_what_is_missing(checkout: Path) -> None:
    tools = checkout / "bin"
    tools.mkdir()
    for name in ("sh", "sed"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = make(checkout, "prerequisites", PATH=str(tools))
    assert done.returncode != 0
    assert "missing: git python3 python3-venv" in done.stderr
    assert "apt-get install -y git make python3 python3-venv" in done.stderr


def test_make_clean_keeps_runs_and_environment(checkout: Path) -> None:
    for name in ("runs/one/a.ipynb", ".venv/bin/python", "build/x", ".mypy_cache/x", "mok/__pycache__/x"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert make(checkout, "clean").returncode == 0
    left = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    assert left == {"Makefile", "pyproject.toml", "constraints.txt", "runs/one/a.ipynb", ".venv/bin/python"}


@pytest.mark.parametrize("broken", ["", "demo", "check", "test"])
def test_ci_runs_everything_and_ends_with_pytests_closing_line(tmp_path: Path, broken: str) -> None:
    """The real script beside a `make` that writes down what it is asked for and fails where it is told to."""
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    tools = tmp_path / "bin"
    tools.mkdir()
    lines = ["#!/bin/bash", 'echo "$1" >>asked', '[ "$1" != test ] || echo "=== 3 passed in 1.00s ==="']
    lines += [f'[ "$1" != "{broken}" ] || {{ echo "make: *** Error 1" >&2; exit 2; }}']
    (tools / "make").write_text("\n".join(lines) + "\n")
    (tools / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([script], cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "asked").read_text().split() == ["demo", "check", "test"]
    assert done.stdout.splitlines()[-1] == "=== 3 passed in 1.00s ==="
    assert done.returncode == (1 if broken else 0), done.stderr


def imports_of(name: str, path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that `path` imports when it runs, anywhere in it; imports for type checkers alone do not count."""
    tree = ast.parse(path.read_text())
    conditional = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {id(inner) for node in conditional for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in skipped:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= below if len(below) == len(node.names) else below | {str(node.module)}
    return (found & modules) - {name}


def test_no_modules_import_each_other_in_a_circle() -> None:
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in tracked("mok/*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in dotted.items()}
    graph = {name: imports_of(name, path, set(paths)) for name, path in paths.items()}
    assert graph["mok.trace.model"] >= {"mok.trace.store", "mok.trace.columns"}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph | {"mok.errors": {"mok.trace.model"}}).static_order())


def test_ruff_exceptions_carry_their_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    rules = [line for line in lines if re.match(r'\s+"[A-Z]+\d+",', line)]
    assert len(rules) == len(PROJECT["tool"]["ruff"]["lint"]["ignore"])
    assert all("#" in line for line in rules)
    assert json.dumps(PROJECT["tool"]["pytest"]["ini_options"]["xfail_strict"]) == "true"
