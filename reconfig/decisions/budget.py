"""Predicts how long a partition would pause if it were cut over now, and keeps the measurements of links for that.

The last change sets must cross the link before the target may serve. For a target that is ``lag`` bytes behind, with
write rate ``w`` and bandwidth ``B`` (bytes/s), round trip ``rtt``, a fixed cost ``c`` of sealing, proving and opening,
and ``s`` as the present duration of a durable write at the target::

    pause ≈ (½·rtt + max(c, s) + lag/B) / (1 − w/B)

The fixed cost contains durable writes of the usual duration, so that ``s`` counts only if the disk is busier than
usual. A smaller ``s`` does not shorten the prediction, because the measured write is larger than the one that the
pause waits for. The fixed cost, and the margin that a promise adds to it, are estimated from the pauses of recent moves
(:class:`Experience`).

The denominator is the pre-copy argument of Clark et al., "Live Migration of Virtual Machines" (NSDI 2005): changes that
are written while the lag crosses must cross too. With w ≥ B the copy never converges.

:class:`Links` keeps the round trips and bandwidths that were measured between sites. Round trips are measured only
where they can decide a move (:func:`pairs_that_matter`): between the sites that rows come from and the sites where
their partitions are, or might better be. With 400 sites, these are few of 160,000 pairs. Moves measure the bandwidths.

The module does no I/O. Times are monotonic seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reconfig.decisions.placement import Pair, View
from reconfig.decisions.policies import ORIGIN_ROWS_MIN
from stateflow.errors import BudgetUnreachable

#: fixed cost until it has been measured: one durable write and one thread hand-over on each side
FIXED_MS_DEFAULT = 8.0
#: fixed costs, in milliseconds, that are assumed until enough moves were seen on this machine
PRIOR_MS = (4.0, FIXED_MS_DEFAULT, FIXED_MS_DEFAULT, 20.0)
MOVES_ENOUGH = 20
#: if less than this many milliseconds of a pause remain after the time for the delta is subtracted, the move shows no
#: fixed cost
LEAST_MS = 0.5
#: number of standard deviations that a promise allows for. 99 of 100 moves should keep their budget, which is 2.33; but
#: the deviation is estimated from few moves, and latencies have longer tails than a log-normal distribution. On a busy
#: machine 2.0 kept 98.7 of 100 admitted moves within budgets of 10 to 100 ms, 2.33 kept 99.0, 2.6 all.
PROMISED = 2.6
#: standard deviation of the fixed cost's logarithm, until enough moves were seen
PRIOR_DEVIATION = 0.5
#: standard deviation of the fixed cost's logarithm on the most regular machine
LEAST_DEVIATION = 0.2
#: promised fixed cost before any move was seen
PRIOR_PROMISE_MS = FIXED_MS_DEFAULT * math.exp(PROMISED * PRIOR_DEVIATION)
#: ratio of a normal distribution's standard deviation to its median absolute deviation
_DEVIATION_OVER_MAD = 1.4826
PAUSES_REMEMBERED = 64
#: seconds after which a pause is forgotten, because a machine that was busy may be idle again by then
PAUSES_REMEMBERED_S = 600.0
#: seconds after which the round trip of a pair of sites is measured again
RTT_ASKED_S = 60.0
#: seconds for which a measured round trip counts, so that one measurement may fail
RTT_KEPT_S = 150.0
#: maximum number of pairs that are considered; those that matter most come first
PAIRS_MAX = 2048
#: maximum number of pairs that are measured in one look, in all and by one site
ASKED_MAX = 256
ASKED_OF_SITE_MAX = 32
#: a link's bandwidth is that of the fastest of its last moves, because each of several moves at a time gets only a part
MOVES_KEPT = 8
MOVES_KEPT_S = 3600.0


# -- The predicted pause ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """One report of a target that catches up. Rates are in bytes a second; bandwidth 0: it is not known yet."""

    lag_bytes: int
    change_rate: float
    bandwidth: float
    rtt_ms: float
    sync_ms: float = 0.0  # the last durable write at the target
    stall_ms: float = 0.0  # excess of the longest recent round trip over the usual one


def predicted_pause_ms(measured: Measured, fixed_ms: float = FIXED_MS_DEFAULT) -> float:
    """Predicts the pause, in milliseconds. Returns infinity if changes are written faster than they can cross, or if
    there is a lag and nothing tells how fast it crosses."""
    latency = measured.rtt_ms / 2 + max(fixed_ms, measured.sync_ms)
    if measured.bandwidth <= 0:  # too little of the base had to cross
        if not measured.lag_bytes:
            return latency
        arrives = measured.change_rate  # the link carries at least that much
        return latency + measured.lag_bytes / arrives * 1e3 if arrives > 0 else math.inf
    share = measured.change_rate / measured.bandwidth
    if share >= 1:
        return math.inf
    return (latency + measured.lag_bytes / measured.bandwidth * 1e3) / (1 - share)


def lag_ms(measured: Measured) -> float:
    """Returns the part of the predicted pause, in milliseconds, that the lag would take to cross."""
    return predicted_pause_ms(replace(measured, rtt_ms=0.0, sync_ms=0.0), 0.0)


def experience_of(measured: Measured, pause_ms: float) -> tuple[float, float] | None:
    """Returns what a completed move shows of the fixed cost: (pause predicted with a fixed cost of 0, actual pause), in
    milliseconds. The difference of both is the fixed cost with which the actual pause would have been predicted. None:
    no finite pause was predicted.

    Both are scaled to a link that carries no changes, because a fixed cost of ``c`` adds ``c / (1 - w/B)`` to a pause.
    The last durable write is left out, because the fixed cost contains durable writes.

    Args:
        measured: the last report before the fence.
        pause_ms: actual pause.
    """
    explained_ms = predicted_pause_ms(replace(measured, sync_ms=0.0), 0.0)
    if not math.isfinite(explained_ms):
        return None
    unshared = 1 - measured.change_rate / measured.bandwidth if measured.bandwidth > 0 else 1.0
    return explained_ms * unshared, pause_ms * unshared


# -- The fixed cost --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FixedCost:
    """The cost of a cutover apart from transferring bytes, in milliseconds: the expected cost, and the margin by which
    the actual cost may exceed it."""

    expected_ms: float = FIXED_MS_DEFAULT
    margin_ms: float = 0.0


def fixed_cost_of(moves: Sequence[tuple[float, float]]) -> FixedCost:
    """Estimates the fixed cost from the part of past pauses that the size of the delta does not explain. The expected
    cost is the median; nearly every move costs at most expected cost and margin together.

    Args:
        moves: (pause predicted with a fixed cost of 0, actual pause) of recent moves, in milliseconds.

    A move whose delta crossed faster than predicted shows no fixed cost and is left out: counted as a cheap move, it
    would make the others look irregular. Until MOVES_ENOUGH moves were seen, PRIOR_MS and PRIOR_DEVIATION replace the
    missing ones, so that the first moves promise little. A promise is the expected cost and the margin together.

    A promise must hold on a busy machine too, so it exceeds the expected cost. Latencies are assumed to be distributed
    log-normally. Their deviation is estimated from the median absolute deviation, so that a tail is assumed before a
    slow move was seen, and a single slow move does not make every later move exceed its budget.

    On a busy machine the distribution has two humps instead: a process gets the processor at once, or when others have
    used up their time slices. The estimated deviation is then that of the first hump, or the distance between the
    humps. It may be far too small or too large, so two bounds apply. A promise is at least the second-largest cost
    seen. It is at most the greatest of these: the largest cost seen, the promise for the most regular machine, and,
    until MOVES_ENOUGH moves were seen, PRIOR_PROMISE_MS.
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


def unreachable(
    measured: Measured, cost: FixedCost, pause_ms: float, max_pause_ms: float, waited_s: float
) -> BudgetUnreachable:
    """Returns the error of a move whose budget stays out of reach.

    Args:
        cost: expected cost and present margin.
        pause_ms: predicted pause.
        max_pause_ms: budget.
        waited_s: seconds since the base copy was complete.
    """
    remedy = "raise max_pause_ms, or move when there are fewer changes"
    if pause_ms <= max_pause_ms:
        remedy = "raise max_pause_ms, or move a few times without it: the margin is learnt from moves"
    return BudgetUnreachable(
        f"a pause of {pause_ms:.1f} ms is predicted, up to {cost.margin_ms:.1f} ms more is possible, "
        f"{max_pause_ms:g} ms are allowed",
        remedy=remedy,
        lag_bytes=measured.lag_bytes,
        change_rate=round(measured.change_rate),
        bandwidth=round(measured.bandwidth),
        rtt_ms=round(measured.rtt_ms, 3),
        sync_ms=round(measured.sync_ms, 3),
        fixed_ms=round(cost.expected_ms, 3),
        waited_s=round(waited_s, 1),
    )


class Experience:
    """The pauses of recent moves, and the fixed cost that they predict for the next one.

    Each move that was refused only because of the margin drops the oldest pause. Otherwise a machine that was busy for
    a while would refuse every move, and so never measure a shorter pause.
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
        """Notes a move that was refused only because of the margin: its expected pause alone was within the budget."""
        self._forget(now_s)
        if self._pauses:
            self._pauses.popleft()

    def _forget(self, now_s: float) -> None:
        while self._pauses and self._pauses[0][0] < now_s - PAUSES_REMEMBERED_S:
            self._pauses.popleft()


# -- Links between sites ---------------------------------------------------------------------------------------------


class Links:
    """Keeps measurements of links between sites, and decides which round trips to measure next."""

    def __init__(self) -> None:
        self._asked_at: dict[Pair, float] = {}
        self._rtts: dict[Pair, tuple[float, float]] = {}  # (measured at, milliseconds)
        self._moves: dict[Pair, deque[tuple[float, float]]] = {}  # by (from, to): (ended at, bytes a second)

    def moved(self, now_s: float, source: str, target: str, bytes_per_s: float) -> None:
        """Notes the bandwidth that a move has shown.

        Args:
            source, target: sites.
            bytes_per_s: bandwidth of the move; 0: too few bytes crossed to tell.
        """
        if source != target and bytes_per_s > 0:
            self._moves.setdefault((source, target), deque(maxlen=MOVES_KEPT)).append((now_s, bytes_per_s))

    def bytes_per_s(self, now_s: float) -> dict[Pair, float]:
        """Returns bandwidths by (from, to)."""
        found = {pair: [rate for at, rate in moves if now_s - at < MOVES_KEPT_S] for pair, moves in self._moves.items()}
        self._moves = {pair: self._moves[pair] for pair, rates in found.items() if rates}
        return {pair: max(rates) for pair, rates in found.items() if rates}

    def due(self, now_s: float, wanted: Iterable[Pair]) -> dict[str, list[str]]:
        """Returns, for each site to ask now, the other sites to which it should measure round trips. Counts the pairs
        as asked, whether the site answers or not."""
        self._asked_at = {pair: at for pair, at in self._asked_at.items() if now_s - at < RTT_ASKED_S}
        self._rtts = {pair: seen for pair, seen in self._rtts.items() if now_s - seen[0] < RTT_KEPT_S}
        found: dict[str, list[str]] = {}
        count = 0
        for pair in wanted:
            if count >= ASKED_MAX:
                break
            others = found.setdefault(pair[0], [])
            if pair not in self._asked_at and len(others) < ASKED_OF_SITE_MAX:
                self._asked_at[pair] = now_s
                others.append(pair[1])
                count += 1
        return {site: others for site, others in found.items() if others}

    def measured(self, now_s: float, site: str, rtts_ms: Mapping[str, float]) -> None:
        """Notes round trips that a site has measured.

        Args:
            rtts_ms: round trips by other site; a site that did not answer is missing.
        """
        for other, rtt_ms in rtts_ms.items():
            self._rtts[site, other] = now_s, rtt_ms

    def rtts_ms(self, now_s: float) -> dict[Pair, float]:
        """Returns round trips by pair of sites, each pair once, in either order."""
        return {pair: rtt_ms for pair, (at, rtt_ms) in self._rtts.items() if now_s - at < RTT_KEPT_S}


def pairs_that_matter(view: View) -> list[Pair]:
    """Returns the pairs of sites whose round trips may decide a move, those with most rows first. Both sites of a pair
    have replicas. Each pair is returned once; its first site is the one that rows come from."""
    sites_of = {info.name: info.site for info in view.replicas}
    there, able = set(sites_of.values()), {info.site for info in view.takers()}
    groups: Counter[tuple[tuple[str, ...], tuple[str, ...], str]] = Counter()
    for partition, seen in view.seen.items():
        here = sites_of.get(view.owners.get(partition, ""))
        if here is None or not seen.origins or (len(seen.origins) == 1 and here in seen.origins):
            continue  # most partitions, once placement has settled
        rows = sum(seen.origins.values())
        if rows >= ORIGIN_ROWS_MIN:
            allowed = tuple(view.allowed.get(partition.operator, ()))
            groups[allowed, tuple(sorted(seen.origins)), here] += round(rows) + 1
    pairs: dict[Pair, None] = {}
    for (allowed, origins, here), _ in groups.most_common():
        known = [site for site in origins if site in there]
        others = [here, *known]
        able_here = sorted(able.intersection(allowed) if allowed else able)
        if len(origins) > 1 or not set(origins).intersection(able_here):  # a site between them may be nearest
            others += able_here
        for origin in known:
            for other in others:
                if origin != other and (other, origin) not in pairs:
                    pairs[origin, other] = None
        if len(pairs) >= PAIRS_MAX:
            break
    return list(pairs)[:PAIRS_MAX]
