"""Sweeps: long work at many nodes, a few nodes at a time, while the nodes serve.

The work of a sweep is its chore, such as taking checkpoints. :class:`Sweeps` begins sweeps, at most one of each chore
at a time, and the next leader resumes them. Each node's begin and outcome are recorded. A :class:`ChoreWork` carries
out one chore: :class:`Covering` carries out chores on partitions, by :class:`Checkpoints` or :class:`Verifications`;
:mod:`reconfig.controller.agents` restarts nodes. :class:`Scrubbing` begins verifications at intervals.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.folds import MOVED, Outcome, RecordedSweep
from reconfig.controller.standbys import Standbys
from reconfig.decisions.sweeps import Begin, Chore, Partitions, Plan, packed, shares, without
from stateflow.errors import InvalidArgument, MoveConflict, MoveUnknown, StateflowError, Unavailable
from stateflow.ledger.rules import EntityStatus
from stateflow.partition.control import Verification
from stateflow.reports import PartitionFault, Rolling, Sweep, Taken
from stateflow.rpc.faults import unexpected
from stateflow.types import PartitionId, node_of

log = logging.getLogger(__name__)
#: seconds since the last pass that processed a partition, after which the remaining partitions are given up
PATIENCE_S = 30.0
#: seconds between checks whether the sweep was cancelled
SWEEP_LOOK_S = 0.5
#: failures in a row after which a replica is no longer asked: then the replica or its store is at fault, not a
#: partition
FAILURES_MAX = 3
#: maximum number of a node's faults that are recorded one by one, because they stay in the ledger for ever
FAULTS_MAX = 100
#: seconds between two checks whether a verification is due; fewer if the interval is short
SCRUB_LOOK_S = 60.0
#: attempts to compare an owner with a standby, which may be past the sequence number that the owner reads
ATTEMPTS = 3
#: text about the running sweep, for the message that refuses a second sweep of its chore
_GOING = {
    Chore.RESTART: "replicas are being restarted",
    Chore.CHECKPOINT: "checkpoints are being taken",
    Chore.VERIFY: "partitions are being verified",
}


# -- Sweeps ----------------------------------------------------------------------------------------------------------


class ChoreWork(Protocol):
    """The work of one chore. After a node has ended, the next one begins ``settle_s`` seconds later."""

    settle_s: float

    def plan(self, site: str, limit: int, operator: str) -> Plan:
        """Plans a sweep. Raises InvalidArgument if there is nothing to do."""
        ...

    async def carry(self, sweep_id: str, node: str, begin: Begin | None) -> Outcome | None:
        """Carries out the work at one node. Returns the outcome; None: the node did not begin.

        Args:
            begin: records that the node begins, and returns False if the node must no longer begin; None: the node
                began under a former leader.

        Raises the error that makes the whole node fail.
        """
        ...


class Sweeps:
    def __init__(self, context: ControllerContext, does: Mapping[Chore, ChoreWork]) -> None:
        self._context, self._does = context, does
        self._book = context.cluster.sweeps

    async def begin(self, chore: Chore, site: str, limit: int, operator: str = "") -> str:
        """Begins a sweep. Returns its id.

        Args:
            site: only nodes at this site; empty: everywhere.
            limit: nodes at a time, 1 to 256.
            operator: only partitions of this operator; empty: all.

        Raises InvalidArgument, OperatorNotDeployed, and MoveConflict while another sweep of this chore is under way.
        """
        await self._context.acquainted()
        async with self._context.planning:
            if not 0 < limit <= 256:
                raise InvalidArgument(f"a sweep cannot process {limit} nodes at a time", remedy="give 1 to 256")
            if under_way := self._book.under_way(chore):
                raise MoveConflict(
                    _GOING[chore],
                    remedy="wait until the batch has ended, or cancel it",
                    batch=self._named(under_way[0]),
                )
            plan = self._does[chore].plan(site, limit, operator)
            sweep_id = self._context.new_id()
            await self._context.record(steps.plan_sweep, sweep_id, plan)
        self._context.spawn(self._run(sweep_id))
        return sweep_id

    def report(self, sweep_id: str) -> Sweep:
        """Returns the report of a sweep. Raises MoveUnknown."""
        self._check(sweep_id)
        return self._book.report(sweep_id)

    def rolling(self, sweep_id: str) -> Rolling:
        """Returns the report of a rolling restart. Raises MoveUnknown."""
        self._check(sweep_id, Chore.RESTART)
        return self._book.rolling(sweep_id)

    async def cancel(self, sweep_id: str) -> None:
        """Cancels a sweep. Nodes that have not begun do not begin. Raises MoveUnknown."""
        self._check(sweep_id)
        await self._context.record(steps.call_off_sweep, sweep_id)

    def resume_all(self) -> None:
        for sweep_id in self._book.under_way():
            self._context.spawn(self._run(sweep_id))

    def _check(self, sweep_id: str, chore: Chore | None = None) -> None:
        known = self._book.there.get(sweep_id)
        if known is None or chore not in (None, known.chore):
            what = "rolling restart" if chore is Chore.RESTART else "sweep"
            raise MoveUnknown(f"there is no {what} {sweep_id!r}", remedy="see `stateflow batch list`")

    def _named(self, sweep_id: str) -> str:
        return self._book.there[sweep_id].batch.record.item_id

    async def _run(self, sweep_id: str) -> None:
        known = self._book.there[sweep_id]
        does = self._does[known.chore]
        going: dict[asyncio.Task[None], str] = {}
        for task in known.of(EntityStatus.IN_PROGRESS):
            going[self._context.spawn(self._carry(sweep_id, task.node, begun=True))] = task.node
        while not self._context.over.done() and not known.over:
            for node in known.next(list(going.values())):
                going[self._context.spawn(self._carry(sweep_id, node))] = node
            done, _ = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                del going[each]
                if (error := each.exception()) is not None:
                    if not self._context.over.done():  # else the next leader resumes the sweep
                        log.error("sweep %s stopped: %s", self._named(sweep_id), error)
                    for other in going:
                        other.cancel()
                    return
            if known.of(EntityStatus.WAITING):
                await asyncio.sleep(does.settle_s)

    async def _carry(self, sweep_id: str, node: str, *, begun: bool = False) -> None:
        known, clock = self._book.there[sweep_id], self._context.clock
        began = clock.monotonic()

        async def begin() -> bool:
            async with self._context.planning:
                return bool(await self._context.record(steps.begin_swept, sweep_id, node))

        try:
            outcome = await self._does[known.chore].carry(sweep_id, node, None if begun else begin)
        except Exception as failed:  # noqa: BLE001 - bugs too: a node that stayed under way could never be cancelled
            self._context.check_leads()
            outcome = Outcome(str(failed if isinstance(failed, StateflowError) else unexpected(failed)))
        if outcome is None:
            return
        if outcome.error:
            log.error("%s of node %s failed: %s", known.chore, node, outcome.error)
        ms = round(1e3 * (clock.monotonic() - began))
        await self._context.record(steps.end_swept, sweep_id, node, outcome, ms)


# -- Chores about partitions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """The outcome for one partition. ``counts`` are figures that reports add up, ``wrong`` the faults found, in
    words."""

    counts: Mapping[str, int]
    wrong: tuple[str, ...] = ()


#: processes one partition at a replica; None: the replica no longer owns it. Raises the error of a failure
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
        """Notes that a partition was not processed, which says nothing about the partition's condition."""
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
    """A chore for partitions. Their owners do it, node by node; partitions that move during the sweep are done last.

    Args:
        do: processes one partition at its owner.
    """

    settle_s = 0.0

    def __init__(self, context: ControllerContext, chore: Chore, do: Do) -> None:
        self._context, self._chore, self._do = context, chore, do

    def plan(self, site: str, limit: int, operator: str) -> Plan:
        """Plans a sweep of the partitions that replicas at ``site`` own; an empty site means all. Raises
        OperatorNotDeployed, UnknownSite, and InvalidArgument if there are no such partitions."""
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
                "there are no partitions to process", remedy="see `stateflow status`", site=site or None
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

    async def _at(
        self, known: RecordedSweep, name: str, partitions: Partitions, tally: _Tally, *, last: bool = False
    ) -> None:
        """Carries out the chore for partitions at one replica, one after another.

        Args:
            last: the caller retries the partitions, so that a retryable error is not a fault yet.
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

    async def _unless_cancelled(self, known: RecordedSweep, work: Coroutine[Any, Any, Piece | None]) -> Piece | None:
        """Waits for the work on a partition, which may take hours, and returns its result. Stops the work when the
        sweep is cancelled. None: the work had no result, or was stopped.
        """
        doing = self._context.spawn(work)
        try:
            while not known.cancelled:
                if (await asyncio.wait([doing], timeout=SWEEP_LOOK_S))[0]:
                    return doing.result()
            return None
        finally:
            doing.cancel()

    async def _rest(self, known: RecordedSweep, tally: _Tally) -> None:
        """Carries out the chore for partitions that no node has processed, because they moved during the sweep. Leaves
        out partitions at a failed node, because the failure of that node is reported already."""
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
            await self._context.pause()

    def _check_alive(self, name: str) -> None:
        """Checks that a replica answers, so that no call waits for a connection to a replica that is gone. Raises
        Unavailable.
        """
        if not self._context.members.alive(name):
            raise Unavailable(f"{name} does not answer", remedy="check that it runs, and run the command again")

    def _owners(self) -> dict[str, tuple[str, ...]]:
        return _owners_of(self._context)


def _owners_of(context: ControllerContext) -> dict[str, tuple[str, ...]]:
    """Returns the owners of each operator's partitions, in the order of partitions."""
    return {name: each.assignment.owners for name, each in context.cluster.deployed.items()}


def _each(partitions: Partitions) -> list[PartitionId]:
    return [PartitionId(operator, number) for operator, numbers in partitions.items() for number in numbers]


# -- Verification at intervals ---------------------------------------------------------------------------------------


class Scrubbing:
    """Begins a sweep that verifies every partition, whenever such a sweep is due.

    Damage is thus found before a move or a restart needs the partition. The sweep is like a verification by command: it
    processes one node at a time, replicas read at most ``verify_bytes_per_s`` and let batches go first, and the next
    leader resumes it.
    """

    def __init__(self, context: ControllerContext, sweeps: Sweeps) -> None:
        self._context, self._sweeps = context, sweeps

    async def watch(self) -> None:
        interval_s = self._context.settings.verify_interval_s
        while interval_s:
            await asyncio.sleep(min(SCRUB_LOOK_S, interval_s / 4))
            if not self.is_due(interval_s):
                continue
            try:
                sweep_id = await self._sweeps.begin(Chore.VERIFY, "", 1)
                log.info("sweep/%s began: verifies every partition (interval: %g s)", sweep_id, interval_s)
            except StateflowError as error:  # no replica answers; the next round tries again
                log.warning("verification not started, will be retried: %s", error)

    def is_due(self, interval_s: float) -> bool:
        """Tells whether a verification of all partitions is due, and none is under way.

        It is due when the last one began longer ago than the interval, or, if there was none yet, when the oldest
        deployed version is older than the interval. A time to come is from a clock that was ahead and was put back: the
        verification is due then, because nothing is known of its age.
        """
        cluster = self._context.cluster
        book = cluster.sweeps
        if not cluster.deployed or book.under_way(Chore.VERIFY):
            return False
        last_us = book.whole_us.get(Chore.VERIFY)
        if last_us is None:
            last_us = min(cluster.versions_us.get(name, 0) for name in cluster.deployed)
        return not 0 <= cluster.now_us() - last_us <= interval_s * 1e6


# -- Verification ----------------------------------------------------------------------------------------------------


class Verifications:
    """Verifies partitions. The owner reads a partition. The controller compares the owner's state with the state of a
    standby at the same sequence number.
    """

    def __init__(self, context: ControllerContext, standbys: Standbys) -> None:
        self._context, self._standbys = context, standbys

    async def verify_one(self, name: str, partition: PartitionId) -> Piece | None:
        """Verifies a partition at a replica. Returns the result; None: the replica no longer owns the partition.

        Faults of the partition are in the result. Raises the error that keeps the replica from verifying.
        """
        standby = self._standby_of(partition)
        for attempt in range(ATTEMPTS):
            async with aclosing(self._context.replicas.verify(name, partition)) as pages:
                moment = await anext(pages, None)
                if moment is None:
                    return None
                if standby is None:
                    return piece(await _found(pages, name), None)
                async with aclosing(self._context.replicas.verify(standby, partition, moment.sequence)) as copied:
                    at = await _first(copied, standby, partition)
                    if at is None or at.sequence == moment.sequence or attempt == ATTEMPTS - 1:
                        together = at is not None and at.sequence == moment.sequence
                        copy = _copied(copied, standby, partition) if together else _nothing()
                        found, other = await _both(_found(pages, name), copy)
                        return piece(found, other, standby)
        raise AssertionError("the last attempt returns")

    def _standby_of(self, partition: PartitionId) -> str | None:
        """Returns a replica with a standby that has caught up and answers; None: there is none."""
        alive = self._context.alive()
        names = [each.replica for each in self._standbys.copies(partition) if each.following and each.replica in alive]
        return names[0] if names else None


def piece(found: Verification, copy: Verification | None, standby: str = "") -> Piece:
    """Returns the result of one partition.

    Args:
        found: the owner's verification.
        copy: the standby's verification, at the same sequence number; None: they were not compared.
    """
    wrong = list(map(str, found.faults))
    counts = {"bytes_read": found.bytes_read, "cells": found.cells, "compared": 0}
    if copy is not None:
        wrong += [f"its standby at {standby}: {each}" for each in copy.faults]
        if found.digest and copy.digest:
            counts["compared"] = 1
            if found.digest != copy.digest:
                wrong.append(
                    f"its state differs from its standby's at {standby}, both at sequence {found.sequence}: "
                    f"restore it, or rebuild the standby"
                )
    return Piece(counts, tuple(wrong))


async def _first(pages: AsyncGenerator[Verification], standby: str, partition: PartitionId) -> Verification | None:
    """Returns the first page of a standby's verification; None: the standby has no copy or does not answer, and is not
    compared.
    """
    try:
        return await anext(pages, None)
    except StateflowError as error:
        log.warning("standby of %s at %s not compared with the owner: %s", partition, standby, error)
        return None


async def _copied(pages: AsyncGenerator[Verification], standby: str, partition: PartitionId) -> Verification | None:
    try:
        return await _found(pages, standby)
    except StateflowError as error:
        log.warning("standby of %s at %s not compared with the owner: %s", partition, standby, error)
        return None


async def _both(
    found: Coroutine[Any, Any, Verification], copy: Coroutine[Any, Any, Verification | None]
) -> tuple[Verification, Verification | None]:
    """Awaits both results. If one fails, waits until the other has ended as well: pages cannot be closed while a task
    awaits them."""
    copying = asyncio.ensure_future(copy)
    try:
        return await found, await copying
    finally:
        copying.cancel()
        await asyncio.wait([copying])


async def _nothing() -> None:
    return None


async def _found(pages: AsyncGenerator[Verification], name: str) -> Verification:
    found = await anext(pages, None)
    if found is None or not found.done:
        raise Unavailable(f"{name} did not finish the verification", remedy="run the command again")
    return found


# -- Checkpoints -----------------------------------------------------------------------------------------------------


class Checkpoints:
    """Takes checkpoints on request, at the owners of the partitions."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context

    async def take(self, operator: str = "", partitions: Collection[int] = (), savepoint: str = "") -> Taken:
        """Takes checkpoints of all partitions asked for, and returns a summary.

        A partition that moves is taken where it arrives. A partition of a silent replica is taken when the replica
        answers, or another has taken the partition over. If no checkpoint was taken for ``PATIENCE_S``, the remaining
        partitions are given up.

        Args:
            operator: the operator to take checkpoints of; empty: all operators.
            partitions: partitions of the operator; empty: all.
            savepoint: name of a savepoint to take; empty: a checkpoint.

        Raises OperatorNotDeployed, the error of a replica that fails, and Unavailable for partitions that were given
        up. Checkpoints that were taken before remain.
        """
        context, clock = self._context, self._context.clock
        started = clock.monotonic()
        await context.acquainted()
        if operator:
            context.cluster.operator(operator)
        wanted = set(partitions)
        left: Partitions = {
            name: [number for number in range(len(owners)) if not wanted or number in wanted]
            for name, owners in _owners_of(context).items()
            if operator in ("", name)
        }
        done: list[Taken] = []
        until = clock.monotonic() + PATIENCE_S
        while todo := shares(left, _owners_of(context)):
            taken = await self._pass(todo, savepoint)
            covered: Partitions = {}
            for name, each in taken:
                done.append(each)
                covered.setdefault(name, []).extend(each.numbers)
            left = without(left, covered)
            if any(covered.values()):  # a pass may take hours, and other partitions are served by then
                until = clock.monotonic() + PATIENCE_S
            elif clock.monotonic() > until:
                raise self._given_up(left, Taken.together(done), savepoint)
            if left:
                await context.pause()
                context.check_leads()
        together = Taken.together(done)
        report = replace(together.report, duration_s=clock.monotonic() - started)
        return Taken(report, together.numbers if operator else ())

    async def _pass(self, todo: Mapping[str, Partitions], savepoint: str) -> list[tuple[str, Taken]]:
        """Asks each replica that answers for its share, one operator after another. Returns pairs of operator and
        result."""
        replicas = self._context.replicas

        async def at(name: str, share: Partitions) -> list[tuple[str, Taken]]:
            try:
                await replicas.reach(name)
            except Unavailable as error:  # it has died, and its lease has not run out yet
                log.warning("checkpoints wait for %s: %s", name, error)
                return []
            ask = replicas.checkpoint
            return [(operator, await ask(name, operator, numbers, savepoint)) for operator, numbers in share.items()]

        alive = self._context.members.alive
        asked = await asyncio.gather(*(at(name, share) for name, share in todo.items() if alive(name)))
        return [each for results in asked for each in results]

    def _given_up(self, left: Partitions, taken: Taken, savepoint: str) -> Unavailable:
        names = ", ".join(f"{operator} {numbers}" for operator, numbers in packed(left).items())
        again = "take a savepoint with another name" if savepoint else "run the command again"
        return Unavailable(
            f"no replica served {names} for {PATIENCE_S:g} s; the checkpoints of {taken.report.partitions} other "
            "partitions were taken, and remain",
            remedy=f"check that all replicas answer (`stateflow status`), then {again}",
        )

    async def take_one(self, name: str, partition: PartitionId) -> Piece | None:
        """Takes a checkpoint of one partition at a replica. None: the replica no longer owns the partition. Raises the
        replica's error if the checkpoint fails."""
        taken = await self._context.replicas.checkpoint(name, partition.operator, [partition.partition])
        report = taken.report
        return Piece({"bytes_new": report.bytes_new, "bytes_total": report.bytes_total}) if taken.numbers else None
