"""How long would a partition stand still if it were cut over now?

The last change sets must cross the link before the target may serve. With ``lag`` bytes behind, write rate ``w``
and bandwidth ``B`` (bytes/s), round trip ``rtt`` and a fixed cost ``c`` of sealing, proving and opening::

    pause ≈ (½·rtt + c + lag/B) / (1 − w/B)

The denominator is the pre-copy argument of Clark et al., "Live Migration of Virtual Machines" (NSDI 2005): what is
written while the rest crosses must cross too. With w ≥ B the copy never converges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: fixed cost until it has been measured: one durable write and one thread hand-over on each side
FIXED_MS_DEFAULT = 8.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One report of a target that catches up. Rates are bytes a second; a bandwidth of 0 is not known yet."""

    lag_bytes: int
    change_rate: float
    bandwidth: float
    rtt_ms: float


def predicted_pause_ms(measured: Measured, fixed_ms: float = FIXED_MS_DEFAULT) -> float:
    """Infinite when changes come faster than they can cross."""
    latency = measured.rtt_ms / 2 + fixed_ms
    if measured.bandwidth <= 0:  # nothing had to cross yet, so that only latency counts
        return latency
    share = measured.change_rate / measured.bandwidth
    if share >= 1:
        return math.inf
    return (latency + measured.lag_bytes / measured.bandwidth * 1e3) / (1 - share)


def learned_fixed_ms(fixed_ms: float, predicted_ms: float, actual_ms: float, weight: float = 0.3) -> float:
    """The fixed cost after one more move: an exponential average of what was left unexplained."""
    if not math.isfinite(predicted_ms):
        return fixed_ms
    return max(0.5, fixed_ms + weight * (actual_ms - predicted_ms))
