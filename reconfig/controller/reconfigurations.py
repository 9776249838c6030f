"""Reconfigurations begun: planned as a whole, refused as a whole or recorded, then handed over to be carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from reconfig import migration as m
from reconfig import plan, policies
from reconfig.controller.cluster_state import ClusterState, Deployed, OpenMove
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import Executor
from reconfig.controller.history import past
from reconfig.controller.move_runner import MoveRunner
from reconfig.controller.run_registry import Running, RunRegistry
from reconfig.placement import Wish
from reconfig.plan import Load, Transfer
from reconfig.work import Cause, PlannedMove, ReconfigurationState
from stateflow import ring
from stateflow.errors import AlreadyThere, InvalidArgument, MoveConflict, StateflowError, Unavailable
from stateflow.moves import MoveOptions
from stateflow.reports import Reconfiguration
from stateflow.types import PartitionId, node_of, worker_of

#: all other planning waits meanwhile, the replacement of dead replicas too
LOADS_WITHIN_S = 1.0
log = logging.getLogger(__name__)


class Reconfigurations:
    def __init__(self, context: ControllerContext, runs: RunRegistry, executor: Executor) -> None:
        self._context, self._runs, self._executor = context, runs, executor

    async def migrate(
        self, operator: str, partitions: Iterable[int], to: str, options: MoveOptions, reason: str = ""
    ) -> Reconfiguration:
        """Raises AlreadyThere, MoveConflict, UnknownSite, Unavailable, or what a target lacks; then nothing changes."""
        numbers = sorted(set(partitions))
        if not numbers:
            raise InvalidArgument("no partition is named", remedy="name at least one")
        deployed = self._context.cluster.operator(operator)
        async with self._context.planning:
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
            reasons = {PartitionId(operator, number): reason for number in targets}
            return await self._start(deployed, targets, options, Cause.MIGRATE, to, reasons)

    async def rebalance(self, operator: str, options: MoveOptions) -> list[Reconfiguration]:
        """Every replica that answers gets its weight's share, of operators that are confined to sites each one there,
        by as few moves as that takes."""
        names = [operator] if operator else sorted(self._context.cluster.deployed)
        async with self._context.planning:
            owners = self._owners(names)
            moves = ring.rebalance(owners, self._context.alive().values(), self._context.cluster.confined())
            return await self._start_all(moves, options, Cause.REBALANCE, "")

    async def place(self, wishes: Sequence[Wish], options: MoveOptions, cause: Cause) -> list[Reconfiguration]:
        """What policies wish, as far as it still holds: a partition that is elsewhere by now, or moves, stays. Raises
        what targets lack; then nothing moves."""
        if not wishes:
            return []
        async with self._context.planning:
            owners = self._owners({wish.partition.operator for wish in wishes} & self._context.cluster.deployed.keys())
            alive, busy = self._context.alive(), self.busy()
            stands = [
                wish
                for wish in wishes
                if owners.get(wish.partition) == wish.source and wish.partition not in busy and wish.target in alive
            ]
            reasons = {wish.partition: wish.reason for wish in stands}
            moves = {wish.partition: wish.target for wish in stands}
            return await self._start_all(moves, options, cause, "", reasons)

    def busy(self) -> set[PartitionId]:
        """What moves or is being restored."""
        restores = {planned.partition for planned, _ in self._context.cluster.open_restores.values()}
        return restores | {planned.partition for planned in self._context.cluster.changes()}

    async def drain(self, replica: str, options: MoveOptions, reason: str = "") -> list[Reconfiguration]:
        """Everything leaves one replica, or all workers of a node. Raises UnknownSite, Unavailable when nobody else
        answers, or nobody at the sites of an operator that it owns something of; then nothing moves."""
        if replica not in self._context.cluster.replicas:
            self._context.check_site(replica)
            raise InvalidArgument(f"{replica!r} is a site", remedy="name one replica of it")
        drained = {replica, *self._workers(replica)}
        async with self._context.planning:
            owners = self._owners(sorted(self._context.cluster.deployed))
            others = [info for name, info in self._context.alive().items() if name not in drained and info.weight > 0]
            if not others:
                raise Unavailable("no other replica answers", remedy="start one", replica=replica)
            home = self._context.cluster.replicas[replica].site
            moves: dict[PartitionId, str] = {}
            for sites, theirs, able in ring.by_sites(owners, others, self._context.cluster.confined()):
                leaving = sorted({partition.operator for partition, owner in theirs.items() if owner in drained})
                if not leaving:
                    continue
                if not able:
                    raise Unavailable(
                        f"no other replica at the sites of {', '.join(leaving)} answers",
                        remedy="start one there, deploy the operator again with other sites, or migrate its partitions",
                        replica=replica,
                        sites=", ".join(sorted(sites)),
                    )
                siblings = [info for info in able if node_of(info.name) == node_of(replica)]
                near = siblings or [info for info in able if info.site == home] or able
                moves |= ring.drain(drained, theirs, near)
            if not moves:
                raise AlreadyThere("the replica owns nothing", remedy="it can be stopped", replica=replica)
            return await self._start_all(moves, options, Cause.DRAIN, "", dict.fromkeys(moves, reason))

    def _workers(self, node: str) -> list[str]:
        """All of a node, where it is named and not one worker of it."""
        return [name for name in self._context.cluster.replicas if node_of(name) == node]

    def _owners(self, operators: Iterable[str]) -> dict[PartitionId, str]:
        return {
            PartitionId(name, number): owner
            for name in operators
            for number, owner in enumerate(self._context.cluster.operator(name).assignment.owners)
        }

    async def _start_all(
        self,
        moves: Mapping[PartitionId, str],
        options: MoveOptions,
        cause: Cause,
        asked: str,
        reasons: Mapping[PartitionId, str] = MappingProxyType({}),
    ) -> list[Reconfiguration]:
        by_operator: dict[str, dict[int, str]] = {}
        for partition, target in moves.items():
            by_operator.setdefault(partition.operator, {})[partition.partition] = target
        for operator, targets in by_operator.items():  # all of them, before the first is recorded
            self._check_free(operator, targets)
        return [
            await self._start(self._context.cluster.operator(operator), targets, options, cause, asked, reasons)
            for operator, targets in sorted(by_operator.items())
        ]

    def _target(self, to: str, owner: str, coming: Mapping[str, int]) -> str:
        """A replica by its name, or the one of a site, or of a node, with the fewest partitions for its weight."""
        replicas, alive = self._context.cluster.replicas, self._context.members.alive
        # a node's first worker has the node's name: it is told from the node by its number
        exact = node_of(to) if to != node_of(to) and worker_of(to) == 0 else ""
        named = [replicas[name] for name in ([exact] if exact else self._workers(to) or [to]) if name in replicas]
        here = named or [info for info in replicas.values() if info.site == to]
        if not here:
            self._context.check_site(to)
        if any(info.name == owner for info in here):
            return owner
        answering = [info for info in here if alive(info.name)]
        if not answering:
            names = [info.name for info in here]
            raise Unavailable(f"no replica of {to} answers", remedy="start it, or move to another", replicas=names)
        return self._context.least_loaded(answering, coming).name

    def _check_free(self, operator: str, partitions: Iterable[int]) -> None:
        wanted = {PartitionId(operator, number) for number in partitions}
        for partition in wanted:
            self._context.check_not_restored(partition)
        for planned in self._context.cluster.changes():
            if planned.partition in wanted:
                raise MoveConflict(
                    "the partition is moving already",
                    remedy="wait for that move, or cancel it",
                    partition=planned.partition,
                    reconfiguration=planned.reconfiguration,
                )

    async def _start(
        self,
        deployed: Deployed,
        targets: Mapping[int, str],
        options: MoveOptions,
        cause: Cause,
        asked: str,
        reasons: Mapping[PartitionId, str] = MappingProxyType({}),
    ) -> Reconfiguration:
        """Record the moves and begin them. Called with ``planning`` held."""
        operator = deployed.spec.name
        self._check_free(operator, targets)
        for name in sorted(set(targets.values())):  # a replica without the operator, or with an older one, says so here
            await self._context.replicas.learn(name, deployed.spec)
        loads = await self._loads(deployed, targets)
        strategy = policies.strategy_named(options.strategy)
        if strategy is None:
            changes = sum(self._executor.change_rates.get(PartitionId(operator, number), 0.0) for number in targets)
            some = [loads.get(number, Load()) for number in targets]
            strategy = policies.choose(some, changes, options.max_pause_ms, self._executor.bandwidth)
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
        rounds = strategy.rounds(plan.ordered(transfers, options.order))
        reconfiguration = self._context.new_id()
        together = min(max(map(len, rounds)), self._context.settings.concurrent_moves if strategy.limited else 1 << 30)
        moves = [
            PlannedMove(
                reconfiguration,
                transfer.partition,
                transfer.source,
                transfer.target,
                deployed.assignment.owner(transfer.partition.partition)[1],
                self._context.cluster.next_epoch(transfer.partition),
                strategy.name,
                options,
                options.patience_s or self._context.settings.patience_s,
                (options.max_bandwidth or 0.0) / together,
                cause,
                asked,
                number,
                reasons.get(transfer.partition, ""),
            )
            for number, round_ in enumerate(rounds)
            for transfer in round_
        ]
        await self._context.record(ClusterState.plan_moves, moves)
        running = self._running(reconfiguration, strategy)
        for planned in moves:
            self._add(running, planned, MoveRunner.machine_for(planned))
        running.go.set()
        self._runs.keep(running)
        self._context.spawn(self._executor.run(running))
        return running.report()

    def _running(self, reconfiguration: str, strategy: policies.Strategy) -> Running:
        """As the ledger tells of it, with those of its moves that have ended."""
        cluster = self._context.cluster
        recorded = cluster.history[reconfiguration]
        told = past(recorded)
        ended = {planned.move_id for item, (planned, _) in recorded.moves.items() if item not in cluster.open_moves}
        state = ReconfigurationState.PAUSED if reconfiguration in cluster.paused else ReconfigurationState.RUNNING
        moves = tuple(move for move in told.moves if move.id in ended)
        order = {move.id: number for number, move in enumerate(told.moves)}
        return Running(replace(told, state=state, moves=moves), strategy, order)

    def _add(self, running: Running, planned: PlannedMove, machine: m.Move) -> None:
        """In the order of the plan."""
        runner = self._executor.runner(running, planned, machine)
        last = running.runners[-1].planned if running.runners else None
        if not isinstance(last, PlannedMove) or last.round != planned.round:
            running.rounds.append([])
        running.rounds[-1].append(runner)
        running.runners.append(runner)

    async def _loads(self, deployed: Deployed, targets: Mapping[int, str]) -> dict[int, Load]:
        """Of the partitions that move, as far as their owners answer: an order and a strategy are chosen by it, no
        more."""
        sources = sorted({deployed.assignment.owner(number)[0] for number in targets})
        operator, replicas = deployed.spec.name, self._context.replicas
        asked = (replicas.loads(name, operator, LOADS_WITHIN_S) for name in sources)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        loads: dict[int, Load] = {}
        for name, reply in zip(sources, replies, strict=True):
            if isinstance(reply, StateflowError):
                log.warning("the load of %s is not known: %s", name, reply)
                continue
            if isinstance(reply, BaseException):
                raise reply
            loads |= reply
        return loads

    async def retry(self, reconfiguration: str) -> Reconfiguration:
        """A new one for what failed of this one, with the same options. Raises MoveConflict when nothing did."""
        running = self._runs.found(reconfiguration)
        if running.told.kind == Cause.FAILOVER:
            raise InvalidArgument("a take-over is retried by itself", remedy="see `stateflow reconfig list`")
        failed = self._runs.failed(reconfiguration)
        if not running.over or not failed:
            raise MoveConflict(
                "nothing of it has failed" if running.over else "it is not over",
                remedy="see its details",
                reconfiguration=reconfiguration,
            )
        async with self._context.planning:
            deployed = self._context.cluster.operator(running.told.operator)
            targets = {
                planned.partition.partition: planned.target
                for planned in failed
                if deployed.assignment.owner(planned.partition.partition)[0] != planned.target
            }
            if not targets:
                raise AlreadyThere("its partitions are there by now", remedy="nothing to do", id=reconfiguration)
            for target in sorted(set(targets.values())):
                if not self._context.members.alive(target):
                    raise Unavailable(f"{target} does not answer", remedy="start it, or migrate to another replica")
            return await self._start(deployed, targets, failed[0].options, failed[0].cause, failed[0].asked)

    async def pause(self, reconfiguration: str) -> Reconfiguration:
        """Also for a controller that is started again. Raises MoveUnknown, MoveConflict when it is over."""
        running = self._runs.unfinished(reconfiguration)
        await self._context.record(ClusterState.pause, reconfiguration, True)
        return self._runs.pause(running)

    async def resume(self, reconfiguration: str) -> Reconfiguration:
        running = self._runs.unfinished(reconfiguration)
        await self._context.record(ClusterState.pause, reconfiguration, False)
        return self._runs.resume(running)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume_all(self) -> None:
        """Carry on with the moves the ledger says were under way, and remember those that ended."""
        by_reconfiguration: dict[str, dict[PlannedMove, OpenMove]] = {}
        for open_move in self._context.cluster.open_moves.values():
            if isinstance(move := open_move.planned, PlannedMove):
                by_reconfiguration.setdefault(move.reconfiguration, {})[move] = open_move
        for reconfiguration, moves in by_reconfiguration.items():
            self._resume(reconfiguration, moves)

    def _resume(self, reconfiguration: str, moves: Mapping[PlannedMove, OpenMove]) -> None:
        running = self._running(reconfiguration, policies.STRATEGIES[next(iter(moves)).strategy])
        first: dict[str, list[m.Instruction]] = {}
        for move, open_move in moves.items():
            machine, instructions = MoveRunner.resumed(move, open_move.granted)
            if instructions is not None:
                first[move.item_id] = instructions
            self._add(running, move, machine)
        if running.state is not ReconfigurationState.PAUSED:
            running.go.set()
        self._runs.keep(running)
        self._context.spawn(self._executor.run(running, first))
