"""One clock from several: offset and drift between two ranks, from events that both took part in.

No rank leaves a collective before every rank has entered it, so each one bounds the offset from both sides, whatever
the network did in between. Over all of them the bounds are half-planes in (offset, drift): what is left of the plane is
where the truth lies, and its extent is a guaranteed uncertainty. Inside it, the best guess is the line that the ends of
the collectives suggest, since they end nearly together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import require

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

MAX_DRIFT_PPM = 500.0  # crystal oscillators of hosts stay within 100
_ROUNDS = 30
_FIRST_SLACK_NS = 1000.0
_MAX_SLACK_NS = 1e9


@dataclass(frozen=True, slots=True)
class Clock:
    """What to add to another rank's time t: offset_ns + drift_ppm * 1e-6 * (t - at_ns).

    uncertainty_ns bounds the error of that sum anywhere among the anchors, given that clocks drift evenly and no rank
    left early. spread_ns is the median distance of the anchors' ends from the line. slack_ns is how much the bounds
    contradicted each other (0: not at all); it is part of the uncertainty.
    """

    offset_ns: int
    drift_ppm: float
    at_ns: int
    uncertainty_ns: int
    spread_ns: int
    slack_ns: int
    num_anchors: int

    def shift(self, t_ns: I64) -> I64:
        """int64 [N]: what to add to each time."""
        drift: I64 = np.rint((t_ns - self.at_ns) * (self.drift_ppm * 1e-6)).astype(np.int64)
        return drift + self.offset_ns


def fit(start: I64, end: I64, other_start: I64, other_end: I64) -> Clock:
    """The `Clock` that brings the other rank's times to the first one's, from matched collectives, int64 [K] each.

    Raises InputError without any anchor, or when no steady drift below MAX_DRIFT_PPM explains them within a second.
    """
    require(len(start) > 0, "no event was recorded by both ranks, so their clocks cannot be compared.")
    at = int(other_end[len(other_end) // 2])
    base = int(np.median(end - other_end))  # float64 then only sees what differs from it
    half = max(float(np.abs(other_end - at).max()), float(np.abs(other_start - at).max()), 1.0)
    lower, x_lower = (start - other_end - base).astype(np.float64), (other_end - at) / half
    upper, x_upper = (end - other_start - base).astype(np.float64), (other_start - at) / half
    steepest = MAX_DRIFT_PPM * 1e-6 * half
    slack, region = 0.0, _region(lower, x_lower, upper, x_upper, steepest)
    while not len(region):
        slack = slack * 4 if slack else _FIRST_SLACK_NS
        require(slack <= _MAX_SLACK_NS, "the ranks' events contradict every steady clock; are they of the same run?")
        region = _region(lower - slack, x_lower, upper + slack, x_upper, steepest)
    ends = (end - other_end - base).astype(np.float64)
    guess = _line(x_lower, ends)
    if not _inside(guess, lower - slack, x_lower, upper + slack, x_upper, steepest):
        guess = region.mean(axis=0)
    reach = max(float(np.abs((region - guess) @ np.array([1.0, side])).max()) for side in (-1.0, 1.0))
    return Clock(
        offset_ns=base + round(float(guess[0])),
        drift_ppm=float(guess[1]) / half * 1e6,
        at_ns=at,
        uncertainty_ns=int(np.ceil(reach + slack)) + 1,
        spread_ns=int(np.median(np.abs(ends - guess[0] - guess[1] * x_lower))),
        slack_ns=int(slack),
        num_anchors=len(start),
    )


def _region(lower: F64, x_lower: F64, upper: F64, x_upper: F64, steepest: float) -> F64:
    """Corners [C, 2] of the (offset, slope) that satisfy lower <= offset + slope * x <= upper; none if there are none."""
    low, high = float(lower.min()) - steepest, float(upper.max()) + steepest
    if low >= high:
        return np.zeros((0, 2))
    corners = np.array([[low, -steepest], [high, -steepest], [high, steepest], [low, steepest]])
    order_lower, order_upper = np.argsort(-lower), np.argsort(upper)  # tight ones first, so that few corners are ever cut
    for sign, order, bound, x in ((1.0, order_lower, lower, x_lower), (-1.0, order_upper, upper, x_upper)):
        for k in order.tolist():
            corners = _cut(corners, sign, float(x[k]), float(bound[k]))
            if not len(corners):
                return corners
    return corners


def _cut(corners: F64, sign: float, x: float, bound: float) -> F64:
    """The part of a convex polygon where sign * (offset + slope * x - bound) >= 0."""
    side = sign * (corners[:, 0] + corners[:, 1] * x - bound)
    if side.min() >= 0:
        return corners
    if side.max() < 0:
        return corners[:0]
    kept = []
    for i in range(len(corners)):
        j = (i + 1) % len(corners)
        if side[i] >= 0:
            kept.append(corners[i])
        if (side[i] >= 0) != (side[j] >= 0):
            part = side[i] / (side[i] - side[j])
            kept.append(corners[i] + part * (corners[j] - corners[i]))
    return np.array(kept)


def _inside(guess: F64, lower: F64, x_lower: F64, upper: F64, x_upper: F64, steepest: float) -> bool:
    above = (guess[0] + guess[1] * x_lower >= lower).all()
    below = (guess[0] + guess[1] * x_upper <= upper).all()
    return bool(above and below and abs(guess[1]) <= steepest)


def _line(x: F64, y: F64) -> F64:
    """(offset, slope) of least absolute deviation, by reweighting: a straggler does not bend it."""
    if len(x) < 2 or float(np.ptp(x)) == 0.0:
        return np.array([float(np.median(y)), 0.0])
    design = np.stack([np.ones_like(x), x], axis=1)
    weight = np.ones_like(x)
    found: F64 = np.zeros(2)
    for _ in range(_ROUNDS):
        scaled = design * weight[:, None]
        found = np.asarray(np.linalg.lstsq(scaled, y * weight, rcond=None)[0], np.float64)
        weight = 1.0 / np.sqrt(np.maximum(np.abs(y - design @ found), 1.0))
    return found
