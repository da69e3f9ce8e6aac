"""One rank per process over gloo: the bits of one process, and an end to every wait.

Each world starts once and runs all its checks (`support/rank_worker.py`); the tests here judge what its ranks saw.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_worker
from support.cases import make_case
from support.rank_worker import EXPERTS, LAYER_COUNTS, STEPS, WIDE, WORLDS, counts_of, experts_of, names_of
from support.steps import SHARED_WEIGHT_GRADIENTS, bits, run_step

from mok import VirtualGroup
from mok.errors import InputError
from mok.groups import peer_timeout_s
from mok.step import summed

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MOK_TIMEOUT_PEER": "60", "PYTHONPATH": str(ROOT)}
WORLD_LIMIT_S = 240


class World:
    """The processes of one world and, when they have ended, what each rank saw.

    The first pytest worker that makes the folder starts them, the others read the same files.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.deadline = time.monotonic() + WORLD_LIMIT_S
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: list[dict[str, Any]] = []
        try:
            folder.mkdir()
        except FileExistsError:
            return
        worker = str(ROOT / "tests/support/rank_worker.py")
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, worker, str(size), str(folder)],
                env=ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until every rank has ended as planned; fails at the first one that has not, with its output."""
        while not all((self.folder / f"ended_{rank}").exists() for rank in range(self.size)):
            failed = [rank for rank in range(self.size) if (self.folder / f"failed_{rank}").exists()]
            assert not failed, (
                f"rank {failed[0]} of {self.size} failed:\n{(self.folder / f'log_{failed[0]}').read_text()[-4000:]}"
            )
            started = self.process is None or not self.process.poll()
            assert started, f"the world of {self.size} did not start:\n{(self.folder / 'log').read_text()[-4000:]}"
            assert time.monotonic() < self.deadline, f"the world of {self.size} did not end within {WORLD_LIMIT_S} s"
            time.sleep(0.05)

    def results(self, check: str) -> list[dict[str, Any]]:
        """What the ranks that finished `check` saw, in rank order."""
        if not self.seen:
            self.wait()
            self.seen = [torch.load(self.folder / f"rank_{rank}.pt", weights_only=True) for rank in range(self.size)]
        return [seen[check] for seen in self.seen if check in seen]

    def stop(self) -> None:
        """End the processes this pytest worker started, once nobody needs them."""
        if self.process is None:
            return
        try:
            self.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, World]]:
    """All worlds, started together so that their waits overlap."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with contextlib.ExitStack() as stack:
        started = {size: World(size, shared / f"world_{size}") for size in WORLDS}
        for world in started.values():
            stack.callback(world.stop)
        yield started


def whole(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The ranks' results as a VirtualGroup returns them: packed in rank order, shared partials summed."""
    return {
        n: summed([p[n] for p in parts]) if n in SHARED_WEIGHT_GRADIENTS else torch.cat([p[n] for p in parts]) for n in parts[0]
    }


def virtual(name: str, precision: str, size: int) -> dict[str, torch.Tensor]:
    """The same step on a VirtualGroup of `size` ranks."""
    return _virtual(name, precision, size, experts_of(size))


@functools.cache
def _virtual(name: str, precision: str, size: int, experts: int) -> dict[str, torch.Tensor]:
    case = make_case(E=experts, **STEPS[name])
    return run_step(case, precision, ep=size, config=WIDE, token_counts=counts_of(name, size))


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize(("size", "name"), [(size, name) for size in WORLDS for name in names_of(size)])
def test_processes_give_the_bits_of_one_process(worlds: dict[int, World], size: int, name: str, precision: str) -> None:
    ours = whole([seen[f"{name}-{precision}"] for seen in worlds[size].results("steps")])
    assert set(ours) >= {"out", "d_x", "d_router_weights", "d_w_routed_gate", "d_w_routed_up", "d_w_routed_down"}
    assert not any(value.isnan().any() for value in ours.values())
    assert bits(ours) == bits(virtual(name, precision, size))
    assert bits(ours, across_ep=True) == bits(_virtual(name, precision, 1, experts_of(size)), across_ep=True)


def test_ranks_without_rows_have_zero_expert_gradients(worlds: dict[int, World]) -> None:
    for seen in worlds[4].results("steps")[1:]:
        for name in ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down"):
            assert not seen["one_rank-bf16"][name].any()
    assert worlds[4].results("steps")[0]["one_rank-bf16"]["d_w_routed_down"].any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rebuilt_context_gives_the_same_bits_after_another_layer(worlds: dict[int, World], size: int) -> None:
    assert bits(whole(worlds[size].results("recompute"))) == bits(virtual("uneven", "mxfp8", size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bad_expert_id_on_one_rank_is_the_same_error_on_all(worlds: dict[int, World], size: int) -> None:
    seen = worlds[size].results("route_fault")
    errors = {(part["error"]["kind"], part["error"]["text"]) for part in seen}
    assert len(seen) == size
    assert len(errors) == 1
    kind, text = errors.pop()
    assert kind == "RouteError"
    assert f"id {EXPERTS} on rank {size - 1}; allowed are -1 (no route) and 0..{EXPERTS - 1}" in text
    assert bits(whole([part["then"] for part in seen])) == bits(virtual("uneven", "bf16", size))


def test_capacity_overflow_of_one_rank_is_the_same_error_on_all(worlds: dict[int, World]) -> None:
    seen = worlds[4].results("capacity_fault")
    errors = {(part["error"]["kind"], part["error"]["text"]) for part in seen}
    assert len(seen) == 4
    assert len(errors) == 1
    kind, text = errors.pop()
    assert kind == "CapacityError"
    assert text.startswith("rank 0 needs 1024 schedule rows (padding included) but the workspace holds 768;")
    assert bits(whole([part["then"] for part in seen])) == bits(virtual("one_rank", "bf16", 4))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_make_different_calls_all_hear_of_it(worlds: dict[int, World], size: int) -> None:
    seen = worlds[size].results("disagreement")
    assert len(seen) == size
    told = {
        "experts": (f"{2 * EXPERTS // size} experts per rank", f"{EXPERTS // size} experts per rank"),
        "tokens": ("rank 0 at publish of token counts", "capacity"),
        "calls": ("rank 0 at publish of x", "rank 1 at publish of token counts"),
    }
    for check, texts in told.items():
        errors = [part[check] for part in seen]
        assert {error["kind"] for error in errors} == {"InputError"}, errors
        assert len({error["text"] for error in errors}) == 1
        assert all(text in errors[0]["text"] for text in texts), errors[0]["text"]
    assert bits(whole([part["then"] for part in seen])) == bits(virtual("uneven", "bf16", size))


def test_group_of_some_of_the_processes(worlds: dict[int, World]) -> None:
    seen = worlds[4].results("subset")
    for outsider in (seen[0], seen[2]):
        assert outsider["outside"]["kind"] == "InputError"
        assert "not a member" in outsider["outside"]["text"]
    members = [seen[1], seen[3]]
    for member in members:
        assert member["disagree"]["kind"] == "InputError"
        assert "rank 0 (world rank 1) at" in member["disagree"]["text"]
        assert "rank 1 (world rank 3) at" in member["disagree"]["text"]
    case = make_case(E=EXPERTS, **STEPS["uneven"])
    assert bits(whole([member["step"] for member in members])) == bits(run_step(case, ep=2, config=WIDE))


def test_workspaces_are_cached_per_group(worlds: dict[int, World]) -> None:
    for seen in worlds[2].results("cache"):
        assert seen["same"]
        assert seen["group"]
        assert seen["virtual"]
        assert seen["layer"]["kind"] == "InputError"
        assert "max_tokens" in seen["layer"]["text"]
        assert seen["device"]["kind"] == "InputError"
        assert "'meta'" in seen["device"]["text"]


@pytest.mark.parametrize("tokens", list(LAYER_COUNTS))
def test_training_step_of_a_layer_on_two_processes(worlds: dict[int, World], tokens: str) -> None:
    counts = LAYER_COUNTS[tokens]
    seen = [rank[tokens] for rank in worlds[2].results("layer")]
    alone = rank_worker.layer_step(0, VirtualGroup(2, counts), counts)
    for name in ("out", "d_x", *(f"{new}_w_routed_{part}" for new in ("d", "new") for part in ("gate", "up", "down"))):
        assert torch.equal(torch.cat([part[name] for part in seen]), alone[name]), name
    for part in ("gate", "up", "down"):
        partials = [rank[f"d_w_shared_{part}"].bfloat16() for rank in seen]
        assert torch.equal(summed(partials).float(), alone[f"d_w_shared_{part}"])
    for name in ("w_router", "w_shared_gate", "w_shared_up", "w_shared_down"):
        after = seen[0][f"new_{name}"]
        assert torch.equal(after, seen[1][f"new_{name}"])
        # the virtual group rounds its sum of partials to bf16, an all-reduce of f32 gradients does not
        largest_step = rank_worker.LEARNING_RATE * float(alone[f"d_{name}"].abs().max())
        torch.testing.assert_close(after, alone[f"new_{name}"], rtol=0, atol=largest_step * 2.0**-7)


def test_rank_that_never_arrives_ends_the_wait_of_all_others(worlds: dict[int, World]) -> None:
    *waiting, absent = worlds[4].results("never_arrives")
    assert absent == {}
    assert len(waiting) == 3
    for rank, seen in enumerate(waiting):
        error = seen["error"]
        assert error["kind"] == "PeerTimeoutError"
        assert f"rank {rank} at publish of x" in error["text"]
        assert "waited 3 s and rank 3 did not arrive (3 of 4 ranks are there)" in error["text"]
        assert "This workspace is dead" in error["text"]
        assert 2.5 < error["seconds"] < 8
        assert seen["again"]["kind"] == "WorkspaceError"
        assert "rank 3 did not arrive" in seen["again"]["text"]
        assert seen["new"]["kind"] == "PeerTimeoutError"  # the group's connections are gone: an error, not a second wait
        assert seen["new"]["seconds"] < 8
        assert bits(seen["virtual"]) == bits(run_step(make_case(E=EXPERTS, **STEPS["uneven"]), ep=2, config=WIDE))


def test_rank_that_dies_inside_an_exchange(worlds: dict[int, World]) -> None:
    (survivor,) = worlds[2].results("dies")
    assert survivor["error"]["kind"] == "PeerTimeoutError"
    assert "rank 0 at delivery of combine: lost the connection to rank 1" in survivor["error"]["text"]
    assert survivor["error"]["seconds"] < 30  # at once, not after MOK_TIMEOUT_PEER
    assert survivor["again"]["kind"] == "WorkspaceError"


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", ["uneven-bf16", "one_rank-bf16", "uneven-mxfp8", "layers"])
def test_ranks_that_map_each_others_memory_give_the_same_bits(worlds: dict[int, World], size: int, name: str) -> None:
    ours = whole([seen[name] for seen in worlds[size].results("shared_memory")])
    case, _, precision = name.partition("-")
    assert bits(ours) == bits(virtual("uneven" if case == "layers" else case, precision or "bf16", size))


@pytest.mark.parametrize("size", [3, 4])
def test_what_ranks_that_map_memory_say_of_each_other(worlds: dict[int, World], size: int) -> None:
    seen = worlds[size].results("shared_memory")
    assert all("symmetric memory" in part["repr"] for part in seen)
    assert {part["sizes"]["kind"] for part in seen} == {"InputError"}
    assert all("do not agree at making a workspace: rank 0: a workspace of" in part["sizes"]["text"] for part in seen)
    for rank, part in enumerate(seen):
        drained, late = part["drained"], part["late"]
        # the drained rank's own kernel would have left a record of its own; here nobody did
        if rank < size - 1:
            assert drained["error"]["kind"] == "LocalTimeoutError"
            assert f"rank {size - 1} drained a launch and said so at barrier" in drained["error"]["text"]
            assert drained["again"]["kind"] == "WorkspaceError"
        assert drained["nan"]
        assert drained["seconds"] < 30
        assert late["nan"]
        assert late["error"]["kind"] == "PeerTimeoutError"
        assert f"{size - 1} of {size} ranks arrived" in late["error"]["text"]
        assert late["again"]["kind"] == "WorkspaceError"
    # one time-out for all meetings of a step, and the late rank hears of it instead of waiting itself
    assert all(1.5 < part["late"]["seconds"] < 5 for part in seen[:-1])
    assert seen[-1]["late"]["seconds"] < 1.5


def test_rank_killed_in_mid_step_ends_all_others_and_leaves_nobody(worlds: dict[int, World]) -> None:
    survivors = worlds[3].results("killed")
    assert len(survivors) == 2
    for rank, seen in zip((0, 2), survivors, strict=True):
        assert seen["error"]["kind"] == "PeerTimeoutError"
        assert f"rank {rank} at delivery of combine: lost the connection to rank 1" in seen["error"]["text"]
        assert seen["error"]["seconds"] < 10
        assert seen["again"]["kind"] == "WorkspaceError"
    deadline = time.monotonic() + 20
    while not (worlds[3].folder / "all_gone").exists():  # the world's parent has waited for every one of its children
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_groups_that_cannot_exchange_are_refused(worlds: dict[int, World]) -> None:
    (seen,) = worlds[1].results("groups_without_gloo")
    assert {error["kind"] for error in seen.values()} == {"InputError"}
    assert "destroyed" in seen["destroyed"]["text"]
    assert "initialise torch.distributed" in seen["none"]["text"]
    assert "'fake' for cpu" in seen["backend"]["text"]
    assert "gloo" in seen["backend"]["text"]


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_peer_timeout_must_be_a_positive_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MOK_TIMEOUT_PEER", text)
    with pytest.raises(InputError, match="MOK_TIMEOUT_PEER must be a positive number of seconds"):
        peer_timeout_s()


def test_torchrun_example() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    ran = subprocess.run(
        [*command, str(ROOT / "examples/mxfp8_torchrun.py")], env=ENVIRONMENT, capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    errors = {words[0]: float(words[1]) for words in lines if len(words) == 3 and len(words[2]) == 32}
    assert len(errors) == 9
    assert all(0 < error < (0.01 if "shared" in name else 0.12) for name, error in errors.items()), errors
    assert "same bits on every rank" in ran.stdout
