"""Sweeps about partitions: each partition's owner does it, node by node; partitions that moved meanwhile come last."""

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

#: seconds since the last pass that did a partition, after which the partitions that are left are given up
PATIENCE_S = 30.0
#: seconds between looks at whether the sweep was cancelled
LOOK_S = 0.5
#: failures in a row after which a replica is asked no more: then the replica fails, or its store, not a partition
FAILURES_MAX = 3
#: the most faults of a node that are recorded one by one, as they stay in the ledger for ever
FAULTS_MAX = 100


@dataclass(frozen=True, slots=True)
class Piece:
    """The outcome for one partition. ``counts``: figures to add up. ``wrong``: faults found, in words."""

    counts: Mapping[str, int]
    wrong: tuple[str, ...] = ()


#: does one partition at a replica; None: the replica does not own it any more. Raises the error of a failure
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
        """Notes a partition that was not done, which says nothing about the partition's condition."""
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
        """Plans a sweep of the partitions that replicas at ``site`` own; empty: of all. Raises OperatorNotDeployed,
        UnknownSite, InvalidArgument."""
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
            raise InvalidArgument(
                "no replica there owns a partition", remedy="see `stateflow status`", site=site or None
            )
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
        """Carries out the chore for partitions at one replica, one after another.

        Args:
            last: the partitions are retried, so that a retryable error is not a fault yet.
        """
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
        """Waits for the work on a partition, but not once the sweep is cancelled, as the work may take hours. None also
        if it was cancelled."""
        doing = self._context.spawn(work)
        try:
            while not known.cancelled:
                if (await asyncio.wait([doing], timeout=LOOK_S))[0]:
                    return doing.result()
            return None
        finally:
            doing.cancel()

    async def _rest(self, known: Known, tally: _Tally) -> None:
        """Carries out the chore for the partitions that no node has done, as they moved meanwhile. Those that are still
        at a failed node are left out, as that node's failure was reported."""
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
                        tally.fail(partition, name, f"no replica served it for {PATIENCE_S:g} s")
                return
            for name, partitions in todo.items():
                await self._at(known, name, partitions, tally, last=True)
            if tally.counts["partitions"] > done:  # a pass may take hours, and other partitions are served by then
                until, done = clock.monotonic() + PATIENCE_S, tally.counts["partitions"]
            await asyncio.sleep(self._context.settings.retry_interval_s)

    def _check_alive(self, name: str) -> None:
        """Checks that a replica answers, so that no call waits for a connection to one that is gone. Raises
        Unavailable."""
        if not self._context.members.alive(name):
            raise Unavailable(f"{name} does not answer", remedy="check that it runs, and run the command again")

    def _owners(self) -> dict[str, tuple[str, ...]]:
        return {name: each.assignment.owners for name, each in self._context.cluster.deployed.items()}


def _each(partitions: Partitions) -> list[PartitionId]:
    return [PartitionId(operator, number) for operator, numbers in partitions.items() for number in numbers]
