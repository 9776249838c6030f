"""Reconfigurations as callers see them: finds, watches, pauses, cancels and remembers them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.history import past, progress_of, stood
from reconfig.controller.runners import MoveRunner, TakeoverRunner
from reconfig.decisions.plan import Strategy
from reconfig.decisions.work import PlannedMove, ReconfigurationState
from stateflow.errors import MoveConflict, MoveUnknown
from stateflow.metrics.figures import PAUSE_BUCKETS, Histogram
from stateflow.reports import Reconfiguration

WATCH_INTERVAL_S = 0.1
WATCH_IDLE_S = 10.0
FINISHED_KEPT = 1000


@dataclass(slots=True)
class Running:
    """A reconfiguration with its moves, and the event that wakes its watchers.

    ``told``: report of the reconfiguration, containing only moves that ended under an earlier controller. ``order``:
    positions in the plan, by move id.
    """

    told: Reconfiguration
    strategy: Strategy | None = None
    order: Mapping[str, int] = field(default_factory=dict)
    runners: list[MoveRunner | TakeoverRunner] = field(default_factory=list)
    rounds: list[list[MoveRunner]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    #: returns the fields of the report that describe limits and progress
    progress: Callable[[], Mapping[str, Any]] = dict

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def report(self) -> Reconfiguration:
        moves = [*self.told.moves, *(runner.report for runner in self.runners)]
        moves.sort(key=lambda move: self.order.get(move.id, 0))
        return replace(self.told, moves=tuple(moves), **self.progress())

    def stood(self, pause_ms: float) -> None:
        """Notes for how long the operator was stopped."""
        self.told = replace(self.told, moves=tuple(stood(move, pause_ms) for move in self.told.moves))
        for runner in self.runners:
            runner.report = stood(runner.report, pause_ms)
        self.wake()

    @property
    def id(self) -> str:
        return self.told.id

    @property
    def state(self) -> ReconfigurationState:
        return ReconfigurationState(self.told.state)

    @state.setter
    def state(self, state: ReconfigurationState) -> None:
        self.told = replace(self.told, state=state)

    @property
    def over(self) -> bool:
        return self.state.over


def no_such(reconfiguration: str) -> MoveUnknown:
    return MoveUnknown(f"there is no reconfiguration {reconfiguration!r}", remedy="see `stateflow reconfig list`")


class RunRegistry:
    """All reconfigurations: those that this process began or resumed, and others in the ledger."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.running: dict[str, Running] = {}
        #: called when a reconfiguration resumes or its limits change, so that turns are assigned again
        self.on_change: Callable[[], None] = lambda: None
        #: withdraws all moves of a reconfiguration that wait for their turn
        self.withdraw: Callable[[str], None] = lambda _: None
        #: moves that have ended since this controller began, by kind and state
        self.ended: Counter[tuple[str, str]] = Counter()
        #: pauses of the completed ones in seconds, by kind
        self.pauses: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(PAUSE_BUCKETS))

    def goes_on(self, reconfiguration: str) -> bool:
        return self.running[reconfiguration].state is ReconfigurationState.RUNNING

    def keep(self, running: Running) -> None:
        """Remembers a reconfiguration; of those that are over, only the newest ``FINISHED_KEPT``."""
        self.running[running.id] = running
        running.progress = partial(self._progress, running.id)
        over = [key for key, each in self.running.items() if each.over]
        for key in over[: max(0, len(over) - FINISHED_KEPT)]:
            del self.running[key]

    def _progress(self, reconfiguration: str) -> Mapping[str, Any]:
        recorded = self._cluster.history.get(reconfiguration)
        return {} if recorded is None else progress_of(recorded, self._cluster.now_us())

    def settle(self, running: Running, state: ReconfigurationState) -> None:
        running.state = state
        kind = str(running.told.kind)
        for report in (runner.report for runner in running.runners):
            self.ended[kind, str(report.state)] += 1
            if report.state == "COMPLETED" and report.pause_ms > 0:
                self.pauses[kind].observe(report.pause_ms / 1e3)
        running.changed.set()

    def found(self, reconfiguration: str) -> Running:
        """Returns a reconfiguration, under way or over. Raises MoveUnknown."""
        running = self.running.get(reconfiguration)
        if running is not None:
            return running
        if reconfiguration in self._cluster.history:
            return Running(past(self._cluster.history[reconfiguration]))
        raise no_such(reconfiguration)

    def failed(self, reconfiguration: str, allow_cancelled: bool = True) -> list[PlannedMove]:
        """Returns the failed moves of a reconfiguration, whichever process began them.

        Args:
            allow_cancelled: includes those that were cancelled by command.
        """
        recorded = self._cluster.history.get(reconfiguration)
        if recorded is None:
            return []
        left = [] if allow_cancelled else recorded.withdrawn
        return [move for move in recorded.failed if isinstance(move, PlannedMove) and move not in left]

    def cancel(self, reconfiguration: str) -> Reconfiguration:
        """Cancels a reconfiguration: waiting moves do not begin; others roll back, where it is not too late."""
        running = self.found(reconfiguration)
        running.cancelled = True
        for runner in running.runners:
            runner.cancel()
        self.withdraw(reconfiguration)
        self._go_on(running)
        return running.report()

    def stuck(self, reconfiguration: str) -> list[MoveRunner]:
        """Returns the stuck moves of a reconfiguration: the source may have sealed, and the target does not own yet.

        Raises MoveUnknown, and MoveConflict if there is none.
        """
        found = [
            runner
            for runner in self.found(reconfiguration).runners
            if isinstance(runner, MoveRunner) and runner.machine.fenced
        ]
        if not found:
            raise MoveConflict(
                "none of its moves is past its fence",
                remedy="cancel it, or wait until it has ended",
                reconfiguration=reconfiguration,
            )
        return found

    def pause(self, running: Running) -> Reconfiguration:
        """Pauses a reconfiguration: moves that have not begun wait; those under way complete."""
        if not running.over:
            running.state = ReconfigurationState.PAUSED
            running.wake()
        return running.report()

    def resume(self, running: Running) -> Reconfiguration:
        self._go_on(running)
        return running.report()

    def _go_on(self, running: Running) -> None:
        if running.state is ReconfigurationState.PAUSED:
            running.state = ReconfigurationState.RUNNING
        running.wake()
        self.on_change()

    def unfinished(self, reconfiguration: str) -> Running:
        """Returns a reconfiguration that is not over. Raises MoveUnknown, and MoveConflict if it is over."""
        running = self.found(reconfiguration)
        if running.over:
            raise MoveConflict(
                f"the reconfiguration is {running.state}",
                remedy="retry it if it failed",
                reconfiguration=reconfiguration,
            )
        return running

    async def watch(self, reconfiguration: str) -> AsyncIterator[Reconfiguration]:
        running = self.found(reconfiguration)
        while True:
            changed = running.changed
            report = running.report()
            over = running.over  # taken with the report: it may end while that is being sent
            yield report
            if over:
                return
            with contextlib.suppress(TimeoutError):  # repeated, so that a watcher can tell idleness from a hang
                await asyncio.wait_for(changed.wait(), WATCH_IDLE_S)
            if not running.over:
                await asyncio.sleep(WATCH_INTERVAL_S)  # moves change many times a second; watchers need not

    def moving(self) -> list[MoveRunner]:
        """Returns all moves under way, without standbys."""
        return [
            runner
            for running in self.running.values()
            if not running.over
            for runner in running.runners
            if isinstance(runner, MoveRunner) and not runner.ended.is_set()
        ]

    def history(self, limit: int = 0) -> Iterator[Reconfiguration]:
        """Yields reports, newest first: of reconfigurations that this process knows, then of others in the ledger.

        The call fixes which ones; each report is made when it is taken. ``limit``: 0: all.
        """
        known = list(reversed(self.running.values()))
        names = {running.id for running in known}
        earlier = [moves for name, moves in reversed(self._cluster.history.items()) if name not in names]
        everything = itertools.chain((running.report() for running in known), map(past, earlier))
        return itertools.islice(everything, limit or None)
