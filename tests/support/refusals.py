"""A shared workspace and the check that a refused call leaves it giving the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import make_case
from support.steps import bits, run_step, workspace_of

from mok import MokError
from mok.errors import InputError

T, H, E, K = 40, 128, 8, 2
CASE = make_case(T=T, H=H, I=H, E=E, K=K)
WORKSPACE = workspace_of(CASE, ep=2)
GOOD = bits(run_step(CASE, workspace=WORKSPACE))
META = torch.device("meta")

Words = tuple[str, ...]


def refused(call: Callable[[], Any], words: Words, kind: type[MokError] = InputError) -> None:
    """The call raises `kind` with all `words`, and the shared workspace still gives the same bits."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{message!r} lacks {missing}"
    WORKSPACE.check()
    assert bits(run_step(CASE, workspace=WORKSPACE)) == GOOD
