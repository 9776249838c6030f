"""The pace of work whose parts end one after another, and the time that the rest will take."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z = 1.959964  # quantile of a normal variable, two-sided 95 %
#: with fewer finished parts there is no estimate
FINISHED_MIN = 2


@dataclass(frozen=True, slots=True)
class Remaining:
    """Seconds of work until all parts have ended: expected, and with 95 % confidence from ``low_s`` to ``high_s``."""

    s: float
    low_s: float
    high_s: float


def pace_per_s(finished: int, worked_s: float) -> float | None:
    """Returns parts per second of work; None before one has ended."""
    return finished / worked_s if finished and worked_s > 0 else None


def remaining(total: int, finished: int, worked_s: float) -> Remaining | None:
    """Estimates the remaining work, for ends that come at random at a constant rate. None before two have ended.

    The time for k ends is gamma distributed. So the quotient of the time for those to come and the time for those that
    were has an F distribution with 2 (total - finished) and 2 finished degrees of freedom (Casella and Berger,
    Statistical Inference, 5.3).
    """
    pace, left = pace_per_s(finished, worked_s), total - finished
    if pace is None or finished < FINISHED_MIN:
        return None
    if left <= 0:
        return Remaining(0.0, 0.0, 0.0)
    expected = left / pace
    return Remaining(expected, *(expected * _f_quantile(z, 2 * left, 2 * finished) for z in (-Z, Z)))


def _f_quantile(z: float, first: int, second: int) -> float:
    """Returns the quantile of the F distribution that corresponds to ``z`` of a normal variable.

    After Paulson, "An approximate normalization of the analysis of variance distribution", 1942.
    """
    a, b = 2 / (9 * first), 2 / (9 * second)
    below = (1 - b) ** 2 - z * z * b
    spread = z * math.sqrt(max(0.0, a * (1 - b) ** 2 + b * (1 - a) ** 2 - z * z * a * b))
    return max(0.0, ((1 - a) * (1 - b) + spread) / below) ** 3
