"""Sweeps about partitions: each is done by whoever owns it, node by node, and in the end what moved meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from reconfig.controller.context import ControllerContext
from reconfig.controller.sweep_book import MOVED, Known, Outcome
from reconfig.sweeps import Begin, Chore, Partitions, Plan, shares, without
from stateflow.errors import InvalidArgument, StateflowError, Unavailable
from stateflow.ledger.batches import EntityStatus
from stateflow.reports import PartitionFault
from stateflow.types import PartitionId, node_of

#: what nobody serves in the end is waited for so long, after a pass in which nothing else was done either
PATIENCE_S = 30.0
#: it is looked so often whether it was cancelled
LOOK_S = 0.5
#: in a row, after which a replica is asked for no more: it is the replica that fails, or its store
FAILURES_MAX = 3
#: of a node that are told one by one, as they are in the ledger for ever
FAULTS_MAX = 100


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one partition. ``wrong``: what was found of it."""

    counts: Mapping[str, int]
    wrong: tuple[str, ...] = ()


#: at a replica; None: it does not own the partition by now. Raises what it fails of
Do = Callable[[str, PartitionId], Coroutine[Any, Any, Piece | None]]


@dataclass(slots=True)
class _Tally:
    done: Partitions = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[PartitionFault] = field(default_factory=list)
    given_up: Partitions = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, partition: PartitionId, replica: str, piece: Piece) -> None:
        self.done.setdefault(partition.operator, []).append(partition.partition)
        self.counts.update({"partitions": 1, **piece.counts})
        for line in piece.wrong:
            self._fault(partition, replica, line, undone=False)

    def fail(self, partition: PartitionId, replica: str, why: str) -> None:
        """Nothing was done with it, which says nothing of what it is like."""
        self._fault(partition, replica, why, undone=True)

    def _fault(self, partition: PartitionId, replica: str, line: str, *, undone: bool) -> None:
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(PartitionFault(partition.operator, partition.partition, replica, line, undone))
        self.lines.append(f"{partition} at {replica}: {line}" if replica else f"{partition}: {line}")
        self.given_up.setdefault(partition.operator, []).append(partition.partition)

    def outcome(self, cancelled: bool) -> Outcome:
        error = ""
        if self.lines:
            more = len(self.lines) - 1
            error = self.lines[0] + (f"; and {more} more" if more else "")
        return Outcome(error, self.done, dict(self.counts), tuple(self.faults), cancelled and not error)


class Covering:
    settle_s = 0.0

    def __init__(self, context: ControllerContext, chore: Chore, do: Do) -> None:
        self._context, self._chore, self._do = context, chore, do

    def plan(self, site: str, limit: int, operator: str) -> Plan:
        """Raises OperatorNotDeployed, UnknownSite, InvalidArgument."""
        cluster = self._context.cluster
        if operator:
            cluster.operator(operator)
        there = {n for n, info in cluster.roster.replicas.items() if site in ("", info.site, n, node_of(n))}
        if site and not there:
            self._context.check_site(site)
        scope = {
            name: [number for number, owner in enumerate(owners) if owner in there]
            for name, owners in self._owners().items()
            if operator in ("", name)
        }
        nodes = sorted({node_of(name) for name in shares(scope, self._owners())})
        if not nodes:
            raise InvalidArgument("nobody there owns a partition", remedy="see `stateflow status`", site=site or None)
        return Plan(self._chore, tuple(nodes), site, limit, operator, scope)

    async def carry(self, sweep_id: str, node: str, begin: Begin | None) -> Outcome | None:
        if begin is not None and not await begin():
            return None
        await self._context.acquainted()
        known, tally = self._context.cluster.sweeps.there[sweep_id], _Tally()
        if node == MOVED:
            await self._rest(known, tally)
        else:
            for name, partitions in shares(known.left(), self._owners()).items():
                if node_of(name) == node:
                    await self._at(known, name, partitions, tally)
        return tally.outcome(known.cancelled)

    async def _at(self, known: Known, name: str, partitions: Partitions, tally: _Tally, *, last: bool = False) -> None:
        """One after another. Args: last: what may be done later is not a fault."""
        failures = 0
        for partition in _each(partitions):
            if known.cancelled or failures == FAILURES_MAX:
                return
            try:
                self._check_alive(name)
                piece = await self._unless_cancelled(known, self._do(name, partition))
            except StateflowError as error:
                self._context.check_leads()
                failures += 1
                if not (last and error.retryable):
                    tally.fail(partition, name, str(error))
                if not self._context.members.alive(name):
                    return
                continue
            failures = 0
            if piece is not None:
                tally.add(partition, name, piece)

    async def _unless_cancelled(self, known: Known, work: Coroutine[Any, Any, Piece | None]) -> Piece | None:
        """A partition may take hours, and whoever calls it off is not to wait for that."""
        doing = self._context.spawn(work)
        try:
            while not known.cancelled:
                if (await asyncio.wait([doing], timeout=LOOK_S))[0]:
                    return doing.result()
            return None
        finally:
            doing.cancel()

    async def _rest(self, known: Known, tally: _Tally) -> None:
        """What nobody took, as it moved meanwhile; but not what is still with a node that failed: that was said."""
        clock = self._context.clock
        until, done = float("inf"), -1
        failed = {task.node for task in known.of(EntityStatus.FAILED)}
        while True:
            left = without(without(known.left(), tally.done), tally.given_up)
            todo = {n: parts for n, parts in shares(left, self._owners()).items() if node_of(n) not in failed}
            if not todo or known.cancelled:
                return
            if clock.monotonic() > until:
                for name, partitions in todo.items():
                    for partition in _each(partitions):
                        tally.fail(partition, name, f"it was served by nobody for {PATIENCE_S:g} s")
                return
            for name, partitions in todo.items():
                await self._at(known, name, partitions, tally, last=True)
            if tally.counts["partitions"] > done:  # a pass may take hours, after which others are served by now
                until, done = clock.monotonic() + PATIENCE_S, tally.counts["partitions"]
            await asyncio.sleep(self._context.settings.retry_interval_s)

    def _check_alive(self, name: str) -> None:
        """Raises Unavailable: nobody waits for the connection of one that is not there."""
        if not self._context.members.alive(name):
            raise Unavailable(f"{name} does not answer", remedy="see that it runs, and give the command again")

    def _owners(self) -> dict[str, tuple[str, ...]]:
        return {name: each.assignment.owners for name, each in self._context.cluster.deployed.items()}


def _each(partitions: Partitions) -> list[PartitionId]:
    return [PartitionId(operator, number) for operator, numbers in partitions.items() for number in numbers]
