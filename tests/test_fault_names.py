"""A time-out says what was waited for by name: the codes a kernel records become the flags of its protocol."""

from __future__ import annotations

import pytest
import torch

from mok import errors
from mok.config import MoKConfig
from mok.errors import Fault, LocalTimeoutError, PeerTimeoutError
from mok.groups import VirtualGroup
from mok.workspace import create_workspace


def raised(*record: int) -> str:
    """The message of a fault record: code, rank, place, seen, need, index."""
    space = create_workspace(MoKConfig(), VirtualGroup(2), device="cpu", num_local_tokens=8, hidden_size=64, topk=1)
    space.fault[: len(record)] = torch.tensor(record)
    with pytest.raises((LocalTimeoutError, PeerTimeoutError)) as caught:
        space.raise_pending()
    assert not space.fault.any()
    return str(caught.value)


@pytest.mark.parametrize("code", [code for code, name in enumerate(errors.PLACES) if name])
def test_a_local_time_out_names_its_flag_and_which_one(code: int) -> None:
    message = raised(Fault.LOCAL_TIMEOUT, 1, code, 2, 4, 37)
    assert message.startswith(f"rank 1: flag {errors.PLACES[code]}[37] stayed at 2, needed 4;")


def test_a_missing_peer_names_the_meeting() -> None:
    assert raised(Fault.PEER_TIMEOUT, 0, errors.PLACE_BARRIER, 1, 3, 5).startswith(
        "rank 0 waited too long at barrier 5: 1 of 3 ranks arrived."
    )


@pytest.mark.parametrize("code", [0, 18, -1])
def test_a_code_without_a_name_is_shown_as_it_is(code: int) -> None:
    assert f"unknown place {code}[6] stayed" in raised(Fault.LOCAL_TIMEOUT, 0, code, 0, 1, 6)
