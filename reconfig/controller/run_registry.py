"""Reconfigurations as their callers see them: found, watched, cancelled, paused, remembered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.history import past
from reconfig.controller.move_runner import MoveRunner
from reconfig.controller.takeover_runner import TakeoverRunner
from reconfig.policies import Strategy
from reconfig.work import PlannedMove, ReconfigurationState
from stateflow.errors import MoveConflict, MoveUnknown
from stateflow.rpc import controller_pb2 as cpb

WATCH_INTERVAL_S = 0.1
WATCH_IDLE_S = 10.0
FINISHED_KEPT = 1000


@dataclass(slots=True)
class Running:
    """A reconfiguration: its moves, and who is woken when one changes. ``ended``: those of them that ended under an
    earlier controller."""

    message: cpb.Reconfiguration
    strategy: Strategy | None = None
    ended: Sequence[cpb.Move] = ()
    runners: list[MoveRunner | TakeoverRunner] = field(default_factory=list)
    rounds: list[list[MoveRunner]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def refresh(self) -> cpb.Reconfiguration:
        if not self.runners:  # of an earlier process: the message is all there is
            return self.message
        del self.message.moves[:]
        self.message.moves.extend([*self.ended, *(runner.report for runner in self.runners)])
        return self.message

    @property
    def state(self) -> ReconfigurationState:
        return ReconfigurationState(self.message.state)

    @property
    def over(self) -> bool:
        return self.state.over


class RunRegistry:
    """Every reconfiguration that this process began, over or not, and those that the ledger tells of."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.running: dict[str, Running] = {}

    def keep(self, running: Running) -> None:
        """Remember it; of those that are over only the newest."""
        self.running[running.message.id] = running
        over = [key for key, each in self.running.items() if each.over]
        for key in over[: max(0, len(over) - FINISHED_KEPT)]:
            del self.running[key]

    def settle(self, running: Running, state: ReconfigurationState) -> None:
        running.message.state = state
        running.refresh()
        running.changed.set()

    def found(self, reconfiguration: str) -> Running:
        """Under way, or over at any time. Raises MoveUnknown."""
        running = self.running.get(reconfiguration)
        if running is not None:
            return running
        if reconfiguration in self._cluster.history:
            return Running(past(self._cluster.history[reconfiguration]))
        raise MoveUnknown(f"there is no reconfiguration {reconfiguration!r}", remedy="see `stateflow reconfig list`")

    def failed(self, reconfiguration: str) -> list[PlannedMove]:
        """Its moves that ended so, whichever process began them."""
        recorded = self._cluster.history.get(reconfiguration)
        return [planned for planned in recorded.failed if isinstance(planned, PlannedMove)] if recorded else []

    def cancel(self, reconfiguration: str) -> cpb.Reconfiguration:
        running = self.found(reconfiguration)
        for runner in running.runners:
            runner.cancel()
        self._go_on(running)
        return running.refresh()

    def stuck(self, reconfiguration: str) -> list[MoveRunner]:
        """Its moves whose source may have sealed, and that are not owned.

        Raises MoveUnknown, MoveConflict when there is none.
        """
        found = [
            runner
            for runner in self.found(reconfiguration).runners
            if isinstance(runner, MoveRunner) and runner.machine.fenced
        ]
        if not found:
            raise MoveConflict(
                "none of its moves stands behind its fence",
                remedy="cancel it, or wait until it has ended",
                reconfiguration=reconfiguration,
            )
        return found

    def pause(self, running: Running) -> cpb.Reconfiguration:
        """Moves that have not begun wait; those under way complete."""
        if not running.over:
            running.go.clear()
            running.message.state = ReconfigurationState.PAUSED
            running.wake()
        return running.refresh()

    def resume(self, running: Running) -> cpb.Reconfiguration:
        self._go_on(running)
        return running.refresh()

    def _go_on(self, running: Running) -> None:
        if running.state is ReconfigurationState.PAUSED:
            running.message.state = ReconfigurationState.RUNNING
        running.go.set()
        running.wake()

    def unfinished(self, reconfiguration: str) -> Running:
        """Raises MoveUnknown, MoveConflict when it is over."""
        running = self.found(reconfiguration)
        if running.over:
            raise MoveConflict(
                f"the reconfiguration is {running.message.state}",
                remedy="a failed one can be retried",
                reconfiguration=reconfiguration,
            )
        return running

    async def watch(self, reconfiguration: str) -> AsyncIterator[cpb.Reconfiguration]:
        running = self.found(reconfiguration)
        while True:
            changed = running.changed
            report = running.refresh()
            over = running.over  # as it is sent: it may end while it is being sent
            yield report
            if over:
                return
            with contextlib.suppress(TimeoutError):  # said again, so that who watches can tell it from a hang
                await asyncio.wait_for(changed.wait(), WATCH_IDLE_S)
            if not running.over:
                await asyncio.sleep(WATCH_INTERVAL_S)  # moves change many times a second; watchers need not

    def moving(self) -> list[MoveRunner]:
        """Every move under way, standbys aside."""
        return [
            runner
            for running in self.running.values()
            if not running.over
            for runner in running.runners
            if isinstance(runner, MoveRunner) and not runner.ended.is_set()
        ]

    def history(self, limit: int = 0) -> Iterator[cpb.Reconfiguration]:
        """Newest first: those this process knows, then what the ledger says of earlier ones. Made one after another, of
        what there is now."""
        known = list(reversed(self.running.values()))
        names = {running.message.id for running in known}
        earlier = [moves for name, moves in reversed(self._cluster.history.items()) if name not in names]
        everything = itertools.chain((running.refresh() for running in known), map(past, earlier))
        return itertools.islice(everything, limit or None)
