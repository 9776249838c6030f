"""How long would a partition stand still if it were cut over now?

The last change sets must cross the link before the target may serve. With ``lag`` bytes behind, write rate ``w``
and bandwidth ``B`` (bytes/s), round trip ``rtt``, a fixed cost ``c`` of sealing, proving and opening, and a durable
write at the target that takes ``s`` now::

    pause ≈ (½·rtt + max(c, s) + lag/B) / (1 − w/B)

The fixed cost contains the durable writes as they usually are; only where the disk is busier than that ``s`` counts.
For less it is no measure: what is measured has more to write than what the pause waits for.

The denominator is the pre-copy argument of Clark et al., "Live Migration of Virtual Machines" (NSDI 2005): what is
written while the rest crosses must cross too. With w ≥ B the copy never converges.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: fixed cost until it has been measured: one durable write and one thread hand-over on each side
FIXED_MS_DEFAULT = 8.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One report of a target that catches up. Rates are bytes a second; a bandwidth of 0 is not known yet."""

    lag_bytes: int
    change_rate: float
    bandwidth: float
    rtt_ms: float
    sync_ms: float = 0.0  # a durable write there, just now
    stall_ms: float = 0.0  # by so much the longest of the last round trips exceeded the usual one


def predicted_pause_ms(measured: Measured, fixed_ms: float = FIXED_MS_DEFAULT) -> float:
    """Infinite when changes come faster than they can cross."""
    latency = measured.rtt_ms / 2 + max(fixed_ms, measured.sync_ms)
    if measured.bandwidth <= 0:  # nothing had to cross yet, so that only latency counts
        return latency
    share = measured.change_rate / measured.bandwidth
    if share >= 1:
        return math.inf
    return (latency + measured.lag_bytes / measured.bandwidth * 1e3) / (1 - share)


def lag_ms(measured: Measured) -> float:
    """What of the pause the changes that are behind would take."""
    return predicted_pause_ms(replace(measured, rtt_ms=0.0, sync_ms=0.0), 0.0)


#: what moves may cost before any was seen on this machine
PRIOR_MS = (4.0, FIXED_MS_DEFAULT, FIXED_MS_DEFAULT, 20.0)
MOVES_ENOUGH = 20
#: no move costs less: of one whose delta explains all but this, or more than all, the fixed cost is not known
LEAST_MS = 0.5
#: standard deviations up to which a promise reaches. 99 moves of 100 are to keep their budget, which is 2.33; but the
#: deviation is judged by few moves, and latencies have longer tails than a log-normal. On a busy machine 2.0 kept 98.7
#: of 100 admitted moves within budgets of 10 to 100 ms, 2.33 kept 99.0, 2.6 all.
PROMISED = 2.6
#: of the logarithm
PRIOR_DEVIATION = 0.5
#: no machine is more regular than that
LEAST_DEVIATION = 0.2
#: before any move was seen
PRIOR_PROMISE_MS = FIXED_MS_DEFAULT * math.exp(PROMISED * PRIOR_DEVIATION)
#: of a normal distribution, over its median absolute deviation
_DEVIATION_OVER_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class FixedCost:
    """What a cutover costs beside the bytes that cross: what to expect, and how much more it may be, milliseconds."""

    expected_ms: float = FIXED_MS_DEFAULT
    margin_ms: float = 0.0


def fixed_cost_of(moves: Sequence[tuple[float, float]]) -> FixedCost:
    """The fixed cost that past moves show, of what the size of the delta did not explain: the median is expected, and
    the margin reaches up to what nearly every move kept within.

    Args:
        moves: (pause predicted with a fixed cost of 0, actual pause) of recent moves, milliseconds.

    A move whose delta crossed faster than was thought shows none and is left out: taken for a cheap one, it would make
    the others look irregular. Until MOVES_ENOUGH have been seen, PRIOR_MS and PRIOR_DEVIATION stand in for the rest:
    the first promise little.

    A promise must hold on a busy machine too, so that what is expected is not what is promised. Latencies are taken to
    be distributed log-normally; their deviation is judged by the median of the absolute ones, so that the tail is known
    before it was met, and one move on a bad moment does not keep out all later ones.

    On a busy machine they have two humps instead: a process gets the processor at once, or when others have used up
    their turn. Judged by the median, the deviation is then that of the first hump or the distance of both. So a promise
    is at least what was needed twice, and at most what was ever needed, or what a machine that is as regular as can be
    would need.
    """
    seen = [actual - predicted for predicted, actual in moves if actual - predicted >= LEAST_MS]
    unexplained = seen if len(seen) >= MOVES_ENOUGH else [*seen, *PRIOR_MS]
    expected = statistics.median(unexplained)
    apart = statistics.median(abs(math.log(each / expected)) for each in unexplained) * _DEVIATION_OVER_MAD
    weight = min(1.0, len(seen) / MOVES_ENOUGH)
    deviation = max(LEAST_DEVIATION, math.sqrt(weight * apart**2 + (1 - weight) * PRIOR_DEVIATION**2))
    promised = expected * math.exp(PROMISED * deviation)
    *twice, worst = [0.0, *sorted(seen)[-2:]] if seen else [0.0, 0.0]
    regular = expected * math.exp(PROMISED * LEAST_DEVIATION)
    most = max(worst, regular, 0.0 if len(seen) >= MOVES_ENOUGH else PRIOR_PROMISE_MS)
    return FixedCost(expected, min(max(promised, twice[-1]), most) - expected)


PAUSES_REMEMBERED = 64
#: what was busy may be idle again
PAUSES_REMEMBERED_S = 600.0


class Experience:
    """The pauses of recent moves, and what they say of the next.

    A move that the margin alone kept out costs the oldest of them. Were it not so, a machine that was busy for a while
    would refuse every move for as long as that is remembered, and learn nothing meanwhile.
    """

    def __init__(self) -> None:
        #: (seen at, (pause predicted with a fixed cost of 0, actual pause)), the oldest first
        self._pauses: deque[tuple[float, tuple[float, float]]] = deque(maxlen=PAUSES_REMEMBERED)

    def cost(self, now_s: float) -> FixedCost:
        self._forget(now_s)
        return fixed_cost_of([pauses for _, pauses in self._pauses])

    def completed(self, now_s: float, predicted_ms: float, actual_ms: float) -> None:
        self._pauses.append((now_s, (predicted_ms, actual_ms)))

    def kept_out(self, now_s: float) -> None:
        """By the margin: what was expected would have fit."""
        self._forget(now_s)
        if self._pauses:
            self._pauses.popleft()

    def _forget(self, now_s: float) -> None:
        while self._pauses and self._pauses[0][0] < now_s - PAUSES_REMEMBERED_S:
            self._pauses.popleft()
