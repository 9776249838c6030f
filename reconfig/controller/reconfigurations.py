"""Reconfigurations under way: planned as a whole, recorded, and carried out round by round."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from reconfig import migration as m
from reconfig import plan, policies
from reconfig.budget import FixedCost, fixed_cost_of
from reconfig.controller.book import Book, Deployed, PlannedMove
from reconfig.controller.desk import Desk
from reconfig.controller.history import past
from reconfig.controller.runner import Hooks, MoveRunner
from reconfig.controller.takeover_runner import TakeoverRunner
from reconfig.plan import Load, Transfer
from reconfig.policies import Strategy
from stateflow import ring
from stateflow.errors import (
    AlreadyThere,
    InvalidArgument,
    MoveAborted,
    MoveConflict,
    MoveUnknown,
    StateflowError,
    Unavailable,
)
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import spec_to_pb
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
WATCH_INTERVAL_S = 0.1
PAUSES_REMEMBERED = 64
#: an operator that is stopped is held for so long at a time, and held again before that is over
HOLD_S = 3.0
FINISHED_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """What its caller asked of a reconfiguration; 0: not said."""

    max_pause_ms: float = 0.0
    max_bandwidth: float = 0.0
    patience_s: float = 0.0
    strategy: str = "auto"
    order: plan.Order = "number"

    @classmethod
    def of(cls, message: cpb.MoveOptions) -> Options:
        """Raises InvalidArgument."""
        for name, unit in (
            ("max_pause_ms", "milliseconds"),
            ("max_bandwidth", "bytes a second"),
            ("patience_s", "seconds"),
        ):
            if message.HasField(name) and not getattr(message, name) > 0:
                value = getattr(message, name)
                raise InvalidArgument(
                    f"{name} cannot be {'negative' if value < 0 else f'{value:g}'}",
                    remedy=f"give a positive number of {unit}, or leave it out for no limit",
                )
        order = message.order or "number"
        if order not in plan.ORDERS:
            raise InvalidArgument(f"there is no order {order!r}", remedy=f"use {', '.join(plan.ORDERS)}")
        policies.strategy_named(message.strategy)
        return cls(message.max_pause_ms, message.max_bandwidth, message.patience_s, message.strategy or "auto", order)


@dataclass(slots=True)
class Running:
    """A reconfiguration: its moves, and who is woken when one changes."""

    message: cpb.Reconfiguration
    strategy: Strategy | None = None
    options: Options = Options()
    runners: list[MoveRunner | TakeoverRunner] = field(default_factory=list)
    rounds: list[list[MoveRunner]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def refresh(self) -> cpb.Reconfiguration:
        del self.message.moves[:]
        self.message.moves.extend(runner.report for runner in self.runners)
        return self.message

    @property
    def over(self) -> bool:
        return self.message.state in ("COMPLETED", "FAILED")


class Reconfigurations:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.running: dict[str, Running] = {}
        self._slots = asyncio.Semaphore(desk.settings.concurrent_moves)
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_REMEMBERED)
        self._bandwidth = 0.0  # bytes a second, as the last move saw it
        self._change_rates: dict[PartitionId, float] = {}
        self._cutovers: dict[str, asyncio.Lock] = {}  # by source
        #: ends the standbys of these partitions at these replicas
        self.make_way: Callable[[set[PartitionId], set[str]], Awaitable[None]] = _nothing_in_the_way

    # -- planning -----------------------------------------------------------------------------------------

    async def migrate(self, operator: str, partitions: Iterable[int], to: str, options: Options) -> cpb.Reconfiguration:
        """Raises AlreadyThere, MoveConflict, UnknownSite, Unavailable, or what a target lacks; then nothing changes."""
        numbers = sorted(set(partitions))
        if not numbers:
            raise InvalidArgument("no partition is named", remedy="name at least one")
        deployed = self._desk.book.operator(operator)
        async with self._desk.planning:
            targets: dict[int, str] = {}
            coming: dict[str, int] = {}
            for number in numbers:
                owner, _ = deployed.assignment.owner(number)
                target = self._target(to, owner, coming)
                if target != owner:
                    targets[number] = target
                    coming[target] = coming.get(target, 0) + 1
            if not targets:
                raise AlreadyThere(
                    f"every partition that was named is at {to}", remedy="nothing to do", operator=operator
                )
            return await self._start(deployed, targets, options, "migrate", to)

    async def rebalance(self, operator: str, options: Options) -> list[cpb.Reconfiguration]:
        """Every replica that answers gets its weight's share, by as few moves as that takes."""
        names = [operator] if operator else sorted(self._desk.book.deployed)
        async with self._desk.planning:
            owners = self._owners(names)
            moves = ring.rebalance(owners, self._desk.alive().values())
            return await self._start_all(moves, options, "rebalance", "")

    async def drain(self, replica: str, options: Options) -> list[cpb.Reconfiguration]:
        """Everything leaves one replica. Raises UnknownSite, Unavailable when nobody else answers."""
        if replica not in self._desk.book.replicas:
            self._desk.check_site(replica)
            raise InvalidArgument(f"{replica!r} is a site", remedy="name one replica of it")
        async with self._desk.planning:
            owners = self._owners(sorted(self._desk.book.deployed))
            others = [info for name, info in self._desk.alive().items() if name != replica and info.weight > 0]
            if not others:
                raise Unavailable("no other replica answers", remedy="start one", replica=replica)
            home = self._desk.book.replicas[replica].site
            near = [info for info in others if info.site == home] or others
            moves = {
                partition: target
                for partition, target in ring.rebalance(owners, near).items()
                if owners[partition] == replica
            }
            if not moves:
                raise AlreadyThere("the replica owns nothing", remedy="it can be stopped", replica=replica)
            return await self._start_all(moves, options, "drain", "")

    def _owners(self, operators: Iterable[str]) -> dict[PartitionId, str]:
        return {
            PartitionId(name, number): owner
            for name in operators
            for number, owner in enumerate(self._desk.book.operator(name).assignment.owners)
        }

    async def _start_all(
        self, moves: Mapping[PartitionId, str], options: Options, kind: str, asked: str
    ) -> list[cpb.Reconfiguration]:
        by_operator: dict[str, dict[int, str]] = {}
        for partition, target in moves.items():
            by_operator.setdefault(partition.operator, {})[partition.partition] = target
        for operator, targets in by_operator.items():  # all of them, before the first is recorded
            self._check_free(operator, targets)
        return [
            await self._start(self._desk.book.operator(operator), targets, options, kind, asked)
            for operator, targets in sorted(by_operator.items())
        ]

    def _target(self, to: str, owner: str, coming: Mapping[str, int]) -> str:
        """A replica by its name, or the one of a site with the fewest partitions for its weight."""
        replicas, alive = self._desk.book.replicas, self._desk.members.alive
        named = replicas.get(to)
        here = [named] if named else [info for info in replicas.values() if info.site == to]
        if not here:
            self._desk.check_site(to)
        if any(info.name == owner for info in here):
            return owner
        answering = [info for info in here if alive(info.name)]
        if not answering:
            names = [info.name for info in here]
            raise Unavailable(f"no replica of {to} answers", remedy="start it, or move to another", replicas=names)
        return self._desk.least_loaded(answering, coming).name

    def _check_free(self, operator: str, partitions: Iterable[int]) -> None:
        wanted = {PartitionId(operator, number) for number in partitions}
        for partition in wanted:
            self._desk.check_not_restored(partition)
        for open_move in self._desk.book.open_moves.values():
            planned = open_move.planned
            if planned.partition in wanted and planned.strategy != "standby":
                raise MoveConflict(
                    "the partition is moving already",
                    remedy="wait for that move, or cancel it",
                    partition=planned.partition,
                    reconfiguration=planned.reconfiguration,
                )

    async def _start(
        self, deployed: Deployed, targets: Mapping[int, str], options: Options, kind: str, asked: str
    ) -> cpb.Reconfiguration:
        """Record the moves and begin them. Called with ``planning`` held."""
        operator = deployed.spec.name
        self._check_free(operator, targets)
        for name in sorted(set(targets.values())):  # a replica without the operator, or with an older one, says so here
            await self._desk.call(name, lambda stub: stub.Create, rpb.CreateRequest(spec=spec_to_pb(deployed.spec)))
        loads = await self._loads(deployed, targets)
        strategy = policies.strategy_named(options.strategy)
        if strategy is None:
            changes = sum(self._change_rates.get(PartitionId(operator, number), 0.0) for number in targets)
            some = [loads.get(number, Load()) for number in targets]
            strategy = policies.choose(some, changes, options.max_pause_ms, self._bandwidth)
        if options.max_pause_ms and strategy.kind is not m.Kind.WARM:
            raise InvalidArgument(
                f"{strategy.name} copies while nobody serves: it can keep no pause budget",
                remedy="use warm-up or auto with max_pause_ms",
            )
        transfers = [
            Transfer(
                PartitionId(operator, number),
                deployed.assignment.owner(number)[0],
                target,
                loads.get(number, Load()),
            )
            for number, target in targets.items()
        ]
        await self.make_way({PartitionId(operator, number) for number in targets}, set(targets.values()))
        rounds = strategy.rounds(plan.ordered(transfers, options.order))
        reconfiguration = self._desk.new_id()
        together = min(max(map(len, rounds)), self._desk.settings.concurrent_moves if strategy.slots else 1 << 30)
        running = Running(
            cpb.Reconfiguration(
                id=reconfiguration,
                operator=operator,
                state="RUNNING",
                max_pause_ms=options.max_pause_ms,
                created_us=self._desk.clock.now_us(),
                kind=kind,
                strategy=strategy.name,
            ),
            strategy,
            options,
        )
        for transfer in (transfer for round_ in rounds for transfer in round_):
            planned = PlannedMove(
                reconfiguration,
                transfer.partition,
                transfer.source,
                transfer.target,
                deployed.assignment.owner(transfer.partition.partition)[1],
                self._desk.book.next_epoch(transfer.partition),
                options.max_pause_ms,
                strategy.name,
                options.patience_s or self._desk.settings.patience_s,
                options.max_bandwidth / together,
                kind,
                asked=asked,
            )
            await self._desk.record(Book.plan_move, planned)
            machine = MoveRunner.machine_for(planned, self._cost(), strategy.kind)
            running.runners.append(self.runner(running, planned, machine))
        by_partition = {runner.planned.partition: runner for runner in running.runners}
        running.rounds = [
            [runner for t in round_ if isinstance(runner := by_partition[t.partition], MoveRunner)] for round_ in rounds
        ]
        running.go.set()
        self.keep(running)
        self._desk.spawn(self._run(running))
        return running.refresh()

    def _cost(self) -> FixedCost:
        return fixed_cost_of(self._pauses)

    async def _loads(self, deployed: Deployed, targets: Mapping[int, str]) -> dict[int, Load]:
        """Of the partitions that move, as far as their owners answer: an order and a strategy are chosen by it, no
        more."""
        sources = sorted({deployed.assignment.owner(number)[0] for number in targets})
        replies = await asyncio.gather(
            *(self._desk.call(n, lambda s: s.Stats, rpb.StatsRequest(after=1 << 62, sizes=True)) for n in sources),
            return_exceptions=True,
        )
        loads: dict[int, Load] = {}
        for name, reply in zip(sources, replies, strict=True):
            if isinstance(reply, StateflowError):
                log.warning("the load of %s is not known: %s", name, reply)
                continue
            if isinstance(reply, BaseException):
                raise reply
            for view in reply.partitions:
                if view.operator == deployed.spec.name:
                    loads[view.partition] = Load(view.bytes, view.batch_rate)
        return loads

    # -- carrying out -------------------------------------------------------------------------------------

    def keep(self, running: Running) -> None:
        """Remember it; of those that are over only the newest."""
        self.running[running.message.id] = running
        over = [key for key, each in self.running.items() if each.over]
        for key in over[: max(0, len(over) - FINISHED_KEPT)]:
            del self.running[key]

    def hooks(self, running: Running, planned: PlannedMove) -> Hooks:
        async def record_grant() -> None:
            await self._desk.record(Book.grant, planned)

        async def record_owned(report: dict[str, object]) -> None:
            await self._desk.record(Book.move_owned, planned, report)

        async def record_aborted(error: StateflowError, report: dict[str, object]) -> None:
            await self._desk.record(Book.move_aborted, planned, error.to_wire(), report)

        cutover = self._cutovers.setdefault(planned.source, asyncio.Lock())
        return Hooks(record_grant, record_owned, record_aborted, lambda: None, running.wake, cutover)

    def runner(self, running: Running, planned: PlannedMove, machine: m.Move) -> MoveRunner:
        return MoveRunner(
            planned=planned,
            spec=self._desk.book.operator(planned.partition.operator).spec,
            source=self._desk.book.replicas[planned.source],
            target=self._desk.book.replicas[planned.target],
            channel=self._desk.channel,
            hooks=self.hooks(running, planned),
            settings=self._desk.settings,
            clock=self._desk.clock,
            machine=machine,
        )

    async def _run(self, running: Running, first: Mapping[str, list[m.Instruction]] | None = None) -> None:
        try:
            if running.strategy is not None and running.strategy.stops:
                await self._run_stopped(running)
            else:
                for round_ in running.rounds:
                    await asyncio.gather(*(self._run_one(running, runner, first or {}) for runner in round_))
            completed = all(self._completed(runner) for runner in running.runners)
            self.settle(running, "COMPLETED" if completed else "FAILED")
        except Exception:
            log.exception("reconfiguration %s", running.message.id)
            self.settle(running, "FAILED")

    @staticmethod
    def _completed(runner: MoveRunner | TakeoverRunner) -> bool:
        return runner.machine.phase in (m.Phase.COMPLETED, "COMPLETED")

    async def _run_one(self, running: Running, runner: MoveRunner, first: Mapping[str, list[m.Instruction]]) -> None:
        resumed = first.get(runner.planned.item_id)
        if resumed is not None or running.strategy is None or not running.strategy.slots:
            await self._wait_to_go(running)
            await runner.run(resumed)
        else:
            async with self._slots:
                await self._wait_to_go(running)
                runner.machine.fixed_ms, runner.machine.margin_ms = self._cost().expected_ms, self._cost().margin_ms
                runner.report.margin_ms = runner.machine.margin_ms
                await runner.run()
        self._learn(runner)

    @staticmethod
    async def _wait_to_go(running: Running) -> None:
        while not running.go.is_set():
            await running.go.wait()

    def _learn(self, runner: MoveRunner) -> None:
        report = runner.report
        if runner.machine.phase is not m.Phase.COMPLETED:
            return
        self._bandwidth = report.bandwidth or self._bandwidth
        self._change_rates[runner.planned.partition] = report.change_rate
        predicted = report.predicted_pause_ms
        if predicted and math.isfinite(predicted):
            self._pauses.append((predicted - runner.machine.fixed_ms, report.pause_ms))

    async def _run_stopped(self, running: Running) -> None:
        """Nothing of the operator is served from here until every move has ended, as where a job is stopped, its state
        restored elsewhere, and the job started again."""
        operator = running.message.operator
        began = self._desk.clock.monotonic()
        holding = self._desk.spawn(self._keep_holding(operator))
        try:
            await self._hold(operator, HOLD_S)
            owners = sorted(set(self._desk.book.operator(operator).assignment.owners))
            request = rpb.CheckpointRequest(operator=operator)
            await asyncio.gather(*(self._desk.call(n, lambda s: s.Checkpoint, request, 3600) for n in owners))
            for round_ in running.rounds:
                await asyncio.gather(*(runner.run() for runner in round_))
        finally:
            holding.cancel()
            await self._hold(operator, 0.0)
        stood_ms = (self._desk.clock.monotonic() - began) * 1e3
        for runner in running.runners:
            if self._completed(runner):
                runner.report.pause_ms = stood_ms
        running.wake()

    async def _keep_holding(self, operator: str) -> None:
        while True:
            await asyncio.sleep(HOLD_S / 3)
            await self._hold(operator, HOLD_S)

    async def _hold(self, operator: str, seconds: float) -> None:
        request = rpb.HoldRequest(operator=operator, seconds=seconds)
        calls = (self._desk.call(name, lambda s: s.Hold, request) for name in sorted(self._desk.alive()))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, StateflowError):
                log.warning("a replica was not told to hold %s: %s", operator, result)  # it ends by itself

    def settle(self, running: Running, state: str) -> None:
        running.message.state = state
        running.refresh()
        running.changed.set()

    # -- control ------------------------------------------------------------------------------------------

    def found(self, reconfiguration: str) -> Running:
        try:
            return self.running[reconfiguration]
        except KeyError:
            raise MoveUnknown(
                f"there is no reconfiguration {reconfiguration!r}", remedy="see `stateflow reconfig list`"
            ) from None

    def cancel(self, reconfiguration: str) -> cpb.Reconfiguration:
        running = self.found(reconfiguration)
        running.cancelled = True
        for runner in running.runners:
            runner.cancel()
        self._go_on(running)
        return running.refresh()

    def pause(self, reconfiguration: str) -> cpb.Reconfiguration:
        """Moves that have not begun wait; those under way complete. Raises MoveConflict when it is over."""
        running = self._unfinished(reconfiguration)
        running.go.clear()
        running.message.state = "PAUSED"
        running.wake()
        return running.refresh()

    def resume(self, reconfiguration: str) -> cpb.Reconfiguration:
        running = self._unfinished(reconfiguration)
        self._go_on(running)
        return running.refresh()

    def _go_on(self, running: Running) -> None:
        if running.message.state == "PAUSED":
            running.message.state = "RUNNING"
        running.go.set()
        running.wake()

    def _unfinished(self, reconfiguration: str) -> Running:
        running = self.found(reconfiguration)
        if running.over:
            raise MoveConflict(
                f"the reconfiguration is {running.message.state}",
                remedy="a failed one can be retried",
                reconfiguration=reconfiguration,
            )
        return running

    async def retry(self, reconfiguration: str) -> cpb.Reconfiguration:
        """A new one for what failed of this one, with the same options. Raises MoveConflict when nothing did."""
        running = self.found(reconfiguration)
        if running.message.kind == "failover":
            raise InvalidArgument("a take-over is retried by itself", remedy="see `stateflow reconfig list`")
        failed = [
            runner.planned
            for runner in running.runners
            if isinstance(runner, MoveRunner) and runner.machine.phase is m.Phase.ABORTED
        ]
        if not running.over or not failed:
            raise MoveConflict(
                "nothing of it has failed" if running.over else "it is not over",
                remedy="see its details",
                reconfiguration=reconfiguration,
            )
        async with self._desk.planning:
            deployed = self._desk.book.operator(running.message.operator)
            targets = {
                planned.partition.partition: planned.target
                for planned in failed
                if deployed.assignment.owner(planned.partition.partition)[0] != planned.target
            }
            if not targets:
                raise AlreadyThere("its partitions are there by now", remedy="nothing to do", id=reconfiguration)
            for target in sorted(set(targets.values())):
                if not self._desk.members.alive(target):
                    raise Unavailable(f"{target} does not answer", remedy="start it, or migrate to another replica")
            return await self._start(deployed, targets, running.options, running.message.kind, failed[0].asked)

    async def watch(self, reconfiguration: str) -> AsyncIterator[cpb.Reconfiguration]:
        running = self.found(reconfiguration)
        while True:
            changed = running.changed
            report = running.refresh()
            over = running.over  # as it is sent: it may end while it is being sent
            yield report
            if over:
                return
            await changed.wait()
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

    # -- after a restart ----------------------------------------------------------------------------------

    def resume_all(self) -> None:
        """Carry on with the moves the ledger says were under way, and remember those that ended."""
        by_reconfiguration: dict[str, list[str]] = {}
        for item, open_move in self._desk.book.open_moves.items():
            if open_move.planned.strategy not in ("standby", "failover"):
                by_reconfiguration.setdefault(open_move.planned.reconfiguration, []).append(item)
        for reconfiguration, items in by_reconfiguration.items():
            self._resume(reconfiguration, items)

    def _resume(self, reconfiguration: str, items: list[str]) -> None:
        planned = [self._desk.book.open_moves[item] for item in items]
        some = planned[0].planned
        running = Running(
            cpb.Reconfiguration(
                id=reconfiguration,
                operator=some.partition.operator,
                state="RUNNING",
                max_pause_ms=some.max_pause_ms,
                created_us=self._desk.clock.now_us(),
                kind=some.kind,
                strategy=some.strategy,
            ),
            options=Options(some.max_pause_ms, patience_s=some.patience_s, strategy=some.strategy),
        )
        first: dict[str, list[m.Instruction]] = {}
        for open_move in planned:
            move = open_move.planned
            if open_move.granted:
                machine, instructions = m.Move.resumed(move.epoch, move.granted_epoch, move.max_pause_ms)
            else:  # never granted: nobody can have sealed
                machine = MoveRunner.machine_for(move)
                instructions = machine.handle(
                    m.TargetFailed(MoveAborted("the controller was restarted during the move", remedy="start it again"))
                )
            first[move.item_id] = instructions
            running.runners.append(self.runner(running, move, machine))
        running.rounds = [[runner for runner in running.runners if isinstance(runner, MoveRunner)]]
        running.go.set()
        self.keep(running)
        self._desk.spawn(self._run(running, first))

    # -- history ------------------------------------------------------------------------------------------

    def history(self, limit: int = 0) -> list[cpb.Reconfiguration]:
        """Newest first: those this process knows, then what the ledger says of earlier ones."""
        known = [running.refresh() for running in reversed(self.running.values())]
        if limit and len(known) >= limit:
            return known[:limit]
        names = {message.id for message in known}
        earlier = past(self._desk.book.finished, names, limit - len(known) if limit else 0)
        everything = [*known, *earlier]
        return everything[:limit] if limit else everything


async def _nothing_in_the_way(partitions: set[PartitionId], targets: set[str]) -> None:
    return None
