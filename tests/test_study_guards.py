"""What stands beside a block, and where two results stop being the same bits."""

import numpy as np
import pytest
import torch

from mok.ablate import bits, guards
from mok.ablate.bits import Difference, first_difference


def readings(count: int, change: float, noise: float, seed: int = 0) -> dict[str, list[float | None]]:
    rng = np.random.default_rng(seed)
    level = 1e5 * (1 + change * np.arange(count) / count)
    return {"canary_ns": list(level * np.exp(rng.normal(0, noise, count)))}


def test_a_canary_that_drifts_is_heard_and_a_noisy_one_is_not() -> None:
    heard = [guards.health(readings(24, change, 0.01, seed), 0.02).drifted for seed in range(100) for change in (0.06, -0.06)]
    assert np.mean(heard) > 0.95
    for seed in range(40):
        assert guards.health(readings(24, 0.06, 0.002, seed), 0.02).drifted
        assert not guards.health(readings(40, 0.004, 0.002, seed), 0.02).drifted  # below what matters
    noisy = [guards.health(readings(24, 0.0, 0.05, seed), 0.02) for seed in range(200)]
    assert np.median([found.canary_change for found in noisy]) > 0.02  # the spread alone would cry wolf
    assert sum(found.drifted for found in noisy) <= 8  # 1 % asked, 4 % allowed


def test_a_drift_is_said_first() -> None:
    found = guards.health(readings(24, 0.06, 0.002), 0.02)
    assert found.sentences()[0].startswith("THE CANARY DRIFTED: the fixed kernel's time changed by ")
    calm = guards.health(readings(24, 0.0, 0.002), 0.02)
    assert calm.sentences()[0].startswith("canary steady")
    few = guards.health(readings(3, 0.5, 0.0), 0.02)
    assert not few.drifted
    assert "too few" in few.sentences()[0]


def test_clocks_temperature_power_and_reasons() -> None:
    found = guards.health(
        {
            "sm_clock_mhz": [1980.0, None, 1500.0],
            "temperature_c": [50.0, 61.0, float("nan")],
            "power_w": [None, None, None],
            "clock_event_reasons": [0x0, 0x4, 0x24],
        },
        0.02,
    )
    assert (found.sm_clock_mhz, found.temperature_c, found.power_w) == ((1500.0, 1980.0), (50.0, 61.0), None)
    assert found.reasons == {"software power cap": 2, "software thermal slowdown": 1}
    assert "clocks held by software power cap in 2 of 3 readings" in found.sentences()
    assert guards.health({}, 0.02).num_readings == 0


def test_reading_on_a_cpu() -> None:
    reader = guards.Guards("cpu")
    found = reader.read()
    assert tuple(found) == guards.COLUMNS
    assert found["canary_ns"] is not None
    assert found["canary_ns"] > 0
    assert found["power_w"] is None


def test_same_bits() -> None:
    out = torch.randn(5, 7).to(torch.bfloat16)
    same = {"out": out, "d_x": None, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.0)}
    assert first_difference(same, {name: None if value is None else value.clone() for name, value in same.items()}) is None
    nans = torch.full((2, 2), float("nan"))
    assert first_difference({"out": nans}, {"out": nans.clone()}) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_one_bit_is_found_at_its_row(dtype: torch.dtype) -> None:
    a = torch.zeros(4, 3, 8).to(dtype)
    b = a.clone()
    b[2, 1, 5] = 1
    b[3, 2, 0] = 1
    assert first_difference({"first": a, "d_w": a}, {"first": a, "d_w": b}) == Difference("d_w", 7, 2, 12)


def test_signed_zero_is_other_bits() -> None:
    assert first_difference({"x": torch.zeros(3)}, {"x": torch.tensor([0.0, 0.0, -0.0])}) == Difference("x", 2, 1, 3)


def test_other_shapes_and_missing_tensors_have_no_row() -> None:
    a = torch.zeros(2, 2)
    for other in (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64), None):
        found = first_difference({"x": a}, {"x": other})
        assert found == Difference("x", None, 0, 0)
        assert found.text() == "x: another shape or dtype"
    assert first_difference({}, {"y": a}) == Difference("y", None, 0, 0)
    assert bits.Difference("out", 17, 3, 512).text() == "out row 17 (3 of 512 rows)"
    assert bits.Difference("out", 17, 3, 512).to_dict()["row"] == 17
