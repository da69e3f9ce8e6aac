"""Where a capture lies on disk, so that no name ever stands for two things.

A capture is a folder. While it is made the folder is called `NAME.partial`, and only a whole capture gets its name, by
one rename; what failed stays under the partial name, beside the next attempt. Inside Slurm or torchrun every rank
makes its own, `NAME.rank0003`, with the number of ranks written in it, so that whoever collects them knows who is missing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError, InputError, require

DEFAULT_OUT = "captures"
RECORD = "capture.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_RANK = re.compile(r"(?P<name>.+)\.rank(?P<rank>\d{4,})(?P<partial>\.partial(-\d+)?)?")
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True, slots=True)
class Rank:
    """A process among those of its job: index of `size`; `launcher` is the variable it was read from."""

    index: int = 0
    size: int = 1
    launcher: str = ""


def here(environment: Mapping[str, str] | None = None) -> Rank:
    """The rank a launcher gave this process; Rank(0, 1) without one. Raises InputError for numbers that make no sense."""
    given = os.environ if environment is None else environment
    for index, size in _VARIABLES:
        if given.get(index, "") and given.get(size, ""):
            if not (given[index].isdecimal() and given[size].isdecimal() and int(given[index]) < int(given[size])):
                raise InputError(
                    f"{index}={given[index]!r} and {size}={given[size]!r} name no rank; both must be whole, rank < size."
                )
            return Rank(int(given[index]), int(given[size]), index)
    return Rank()


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of one capture: `work` while it is made, `final` when it is whole."""

    work: Path
    final: Path
    rank: Rank

    @classmethod
    def make(cls, tool: str, out: str | os.PathLike[str] | None, name: str | None) -> Place:
        """A fresh folder `OUT/NAME[.rankNNNN].partial`. Default name: tool and time.

        Raises InputError: a name that is no file name or is taken; CapabilityError: a folder that cannot be made.
        """
        rank = here()
        folder = Path(DEFAULT_OUT if out is None else out)
        name = f"{tool}-{time.strftime('%Y%m%d-%H%M%S')}" if name is None else name
        require(
            _NAME.fullmatch(name) is not None and ".partial" not in name,
            f"capture name {name!r} must be letters, digits, '.', '_', '+' or '-', at most 100, without '.partial'.",
        )
        if rank.size > 1:
            name = f"{name}.rank{rank.index:04d}"
        final = folder / name
        require(not final.exists(), f"{final} exists already and is left alone; choose another name.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            work = _fresh(folder, f"{name}.partial")
        except OSError as error:
            raise CapabilityError(
                f"cannot make a folder in {folder}: {error.strerror or error}; choose another with out= (or --out)."
            ) from None
        return cls(work, final, rank)

    def finish(self) -> Path:
        """Give the folder its name. Raises InputError if somebody took it meanwhile; the partial folder stays then."""
        try:
            os.rename(self.work, self.final)  # refuses a non-empty folder of that name
        except OSError as error:
            raise InputError(f"{self.final} cannot be made ({error.strerror}); the capture is whole in {self.work}.") from None
        return self.final


def _fresh(folder: Path, name: str) -> Path:
    for number in range(1, 10_000):
        path = folder / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise OSError(f"{folder} holds thousands of partial captures called {name}")


def write_record(folder: Path, data: Mapping[str, Any]) -> None:
    """capture.json: what the capture is, for people and for `collect`."""
    temporary = folder / f".{RECORD}.tmp"
    temporary.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, folder / RECORD)


@dataclass(frozen=True, slots=True)
class RankCaptures:
    """What the ranks of one capture left: folders by rank, and the ranks that have none or only a partial one."""

    name: str
    size: int
    folders: dict[int, Path]
    partial: dict[int, Path]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        """One line: how many ranks of how many, who is missing."""
        text = f"{self.name}: {len(self.folders)} of {self.size} ranks"
        if self.partial:
            text += f"; partial: {', '.join(map(str, self.partial))}"
        return text + (f"; missing: {', '.join(map(str, self.missing))}" if self.missing else "")


def collect(out: str | os.PathLike[str], name: str) -> RankCaptures:
    """The captures that the ranks of a job left in `out` under `name`. Raises InputError when there is none at all."""
    whole: dict[int, Path] = {}
    partial: dict[int, Path] = {}
    sizes = []
    for path in sorted(Path(out).glob(f"{name}.rank*")):
        match = _RANK.fullmatch(path.name)
        if match is None or match["name"] != name or not path.is_dir():
            continue
        (partial if match["partial"] else whole)[int(match["rank"])] = path
        try:
            sizes.append(int(json.loads((path / "rank.json").read_text())["size"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # stopped before it wrote down who it is; the others know the size
    require(bool(whole or partial), f"no capture of ranks called {name!r} in {out}; captures of one process carry no rank.")
    size = max([*sizes, max([*whole, *partial]) + 1])
    partial = {rank: path for rank, path in partial.items() if rank not in whole}
    missing = tuple(rank for rank in range(size) if rank not in whole and rank not in partial)
    return RankCaptures(name, size, dict(sorted(whole.items())), dict(sorted(partial.items())), missing)
