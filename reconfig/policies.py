"""Strategies: how a reconfiguration's partitions are copied, and how many at a time. Sans-io.

====================  ==========  =============  ==============================================================
strategy              copies      at a time      pauses
====================  ==========  =============  ==============================================================
``stop-and-restart``  stopped     all            the whole operator, from its checkpoint until it goes on
``pause-and-copy``    fenced      all            each moving partition, while it is copied with all the others
``fluid``             fenced      one            each moving partition, while it alone is copied
``batched``           fenced      a matching     as fluid, one per pair of source and target at a time
``on-demand``         fenced      as requested   each moving partition, from its first batch until it is copied
``warm-up``           serving     a few          each moving partition, while its last changes cross
``auto``              warm-up, but pause-and-copy where changes come faster than they can cross
====================  ==========  =============  ==============================================================

Fluid and batched are Megaphone's (Hoffmann et al., VLDB 2019). On-demand is the fetching of Meces (Gu et al., ATC 2022)
with partitions as the unit: all change owners at once, and the partitions that batches wait for are copied first.
Stop-and-restart is what users of micro-batch engines do today. Warm-up is the pre-copy of live migration of virtual
machines (Clark et al., NSDI 2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reconfig import plan
from reconfig.migration import Kind
from reconfig.plan import Load, Transfer
from stateflow.moves import AUTO, StrategyName


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy. ``stops``: the operator is stopped from before the first move until after the last. ``limited``: the
    controller's limit on moves at a time applies. ``on_demand``: each target copies partitions that batches wait for at
    once, and the others one after another."""

    name: StrategyName
    kind: Kind
    rounds: Callable[[Sequence[Transfer]], list[list[Transfer]]]
    stops: bool = False
    limited: bool = False
    on_demand: bool = False


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(StrategyName.STOP_AND_RESTART, Kind.COLD, plan.all_at_once, stops=True),
        Strategy(StrategyName.PAUSE_AND_COPY, Kind.COLD, plan.all_at_once),
        Strategy(StrategyName.FLUID, Kind.COLD, plan.one_by_one),
        Strategy(StrategyName.BATCHED, Kind.COLD, plan.matched),
        Strategy(StrategyName.ON_DEMAND, Kind.COLD, plan.all_at_once, on_demand=True),
        Strategy(StrategyName.WARM_UP, Kind.WARM, plan.all_at_once, limited=True),
    )
}
#: bytes a second, until a move has measured the bandwidth
BANDWIDTH_GUESS = 100e6
#: seconds that a copy behind the fence takes beside its bytes: a snapshot, round trips, opening a database
COLD_FIXED_S = 0.05


def strategy_named(name: str) -> Strategy | None:
    """Returns the strategy of a name that MoveOptions accepts; None for ``auto``."""
    return None if name == AUTO else STRATEGIES[StrategyName(name)]


def choose(loads: Sequence[Load], change_bytes: float, max_pause_ms: float | None, bandwidth: float = 0.0) -> Strategy:
    """Chooses the strategy for ``auto``.

    A warm-up never pauses longer than a copy behind the fence, unless more changes during the copy than the whole state
    is large; then copying twice is a waste.

    Args:
        loads: loads of the partitions that move.
        change_bytes: bytes written a second to all of them, as measured by earlier moves; 0: not known.
        max_pause_ms: budget, which only a warm-up can keep; None: no budget.
        bandwidth: bytes a second between source and target; 0: not known.
    """
    if max_pause_ms:
        return STRATEGIES[StrategyName.WARM_UP]
    speed = bandwidth or BANDWIDTH_GUESS
    copy_s = sum(load.size for load in loads) / speed + COLD_FIXED_S
    changed = change_bytes * copy_s
    if changed >= sum(load.size for load in loads) > 0 and change_bytes >= speed:
        return STRATEGIES[StrategyName.PAUSE_AND_COPY]
    return STRATEGIES[StrategyName.WARM_UP]
