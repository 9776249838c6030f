"""Begins reconfigurations: plans each as a whole, refuses or records it as a whole, and hands it to the executor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from reconfig.controller import steps
from reconfig.controller.cluster_state import Deployed, OpenMove
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import Executor, Running, RunRegistry
from reconfig.controller.history import past
from reconfig.controller.measuring import Heard, heard, loads_of, owners_of, unheard, with_room
from reconfig.controller.runners import MoveRunner
from reconfig.controller.standbys import check_copies
from reconfig.decisions import migration as m
from reconfig.decisions import plan
from reconfig.decisions.placement import Avoided, Choice, MoveProposal, View, drained, spread
from reconfig.decisions.plan import Asked, Cause, Load, PlannedMove, ReconfigurationState, Transfer
from reconfig.decisions.sweeps import Maintenance, ordered
from stateflow import ring
from stateflow.errors import AlreadyThere, InMaintenance, InvalidArgument, MoveConflict, StateflowError, Unavailable
from stateflow.reports import Reconfiguration
from stateflow.types import MoveOptions, OperatorSpec, PartitionId, ReplicaInfo, node_of, worker_of

#: seconds for which the controller waits until replicas, which may be busy, report their room
SAID_WITHIN_S = 3.0
#: maximum number of times that a command is planned: the choice of targets may change while replicas are asked
PREPARATIONS_MAX = 4
log = logging.getLogger(__name__)
#: target of each partition
Moves = Mapping[PartitionId, str]
#: nodes that may receive partitions; None: all
Nodes = Collection[str] | None
ANY = Asked()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The moves of one operator in their rounds, before anything is recorded."""

    deployed: Deployed
    strategy: plan.Strategy
    rounds: list[list[Transfer]]


@dataclass(frozen=True, slots=True)
class Ask:
    """Options of a maintenance, see :class:`~reconfig.decisions.sweeps.Maintenance`."""

    for_s: float = 0.0
    one_of: str = ""


class Reconfigurations:
    def __init__(self, context: ControllerContext, runs: RunRegistry, executor: Executor) -> None:
        self._context, self._runs, self._executor = context, runs, executor
        self._avoided = Avoided()

    async def migrate(
        self,
        operator: str,
        partitions: Iterable[int],
        to: str,
        options: MoveOptions,
        reason: str = "",
        only: Nodes = None,
    ) -> Reconfiguration:
        """Moves partitions to a replica, a node or a site.

        Args:
            only: nodes that may receive partitions; None: all.

        Raises AlreadyThere, MoveConflict, UnknownSite, Unavailable, InMaintenance, NoRoom, or the error of a target
        that cannot run the operator; then nothing changes.
        """
        await self._context.acquainted()
        async with self._planned(lambda: self.migrating(operator, partitions, to, only)) as (moves, said):
            (begun,) = await self._start_all(
                moves, said, options, Cause.MIGRATE, _asked(only, to=to), dict.fromkeys(moves, reason)
            )
            return begun

    def migrating(self, operator: str, partitions: Iterable[int], to: str, only: Nodes = None) -> Choice:
        """Returns the moves that :meth:`migrate` would begin. Raises the same errors."""
        numbers = sorted(set(partitions))
        if not numbers:
            raise InvalidArgument("no partition is named", remedy="name at least one")
        deployed = self._context.cluster.operator(operator)
        here = self._named(to)
        there = {info.name for info in here}
        away = [PartitionId(operator, each) for each in numbers if deployed.assignment.owner(each)[0] not in there]
        if not away:
            raise AlreadyThere(f"all named partitions are already at {to}", remedy="name other ones", operator=operator)
        return spread(away, self._answering(to, here, only), self._context.cluster.owned_counts())

    async def rebalance(self, operator: str, options: MoveOptions, *, in_part: bool = False) -> list[Reconfiguration]:
        """Gives each replica that answers the share of partitions that its weight calls for, by as few moves as
        possible.

        If an operator is allowed at some sites only, its partitions are shared among the replicas there. An empty
        ``operator`` means all operators. Partitions whose owner does not answer stay: their moves would fail.

        Args:
            in_part: see :meth:`place`.
        """
        await self._context.acquainted()
        async with self._planned(lambda: self.rebalancing(operator), in_part) as (moves, said):
            silent = sorted(set(self.rebalancing(operator).left.values()))
            if silent:
                log.warning("rebalance leaves out partitions: %s", ", ".join(silent))
            reasons = dict.fromkeys(moves, f"others stay: {', '.join(silent)}" if silent else "")
            return await self._start_all(moves, said, options, Cause.REBALANCE, reasons=reasons)

    def rebalancing(self, operator: str) -> Choice:
        """Returns the moves that :meth:`rebalance` would begin, without alternative targets."""
        view, alive = self._view(operator), self._context.members.alive
        left = {each: f"{owner} does not answer" for each, owner in view.owners.items() if not alive(owner)}
        owners = {each: owner for each, owner in view.owners.items() if each not in left}
        return Choice(ring.rebalance(owners, view.replicas, view.allowed), left=left)

    async def place(
        self,
        proposals: Sequence[MoveProposal],
        options: MoveOptions,
        cause: Cause,
        only: Nodes = None,
        *,
        in_part: bool = False,
    ) -> list[Reconfiguration]:
        """Begins the moves that policies propose. Skips partitions that have moved since the proposal, or are moving.

        Args:
            only: see :meth:`migrate`.
            in_part: also skip the moves whose target cannot run the operator or has no room, and avoid that target for
                a while. No one who could choose another target sees the error.

        Unless ``in_part``, raises NoRoom or the error of a target that cannot run the operator; then nothing moves.
        """
        if only is not None:
            proposals = [proposal for proposal in proposals if node_of(proposal.target) in only]
        if not proposals:
            return []
        await self._context.acquainted()
        async with self._planned(lambda: _chosen(self._standing(proposals)), in_part) as (moves, said):
            reasons = {proposal.partition: proposal.reason for proposal in proposals}
            return await self._start_all(moves, said, options, cause, _asked(only), reasons)

    def _standing(self, proposals: Sequence[MoveProposal]) -> list[MoveProposal]:
        """Returns the proposed moves that still apply."""
        owners = owners_of(self._context.cluster.deployed)
        alive, busy = self._context.fit(), self.busy()
        return [
            proposal
            for proposal in proposals
            if owners.get(proposal.partition) == proposal.source
            and proposal.partition not in busy
            and proposal.target in alive
        ]

    def avoided(self) -> dict[str, frozenset[str]]:
        """Returns, by operator, the replicas that could not take its partitions and are avoided for now."""
        return self._avoided.now(self._context.clock.monotonic())

    def busy(self) -> set[PartitionId]:
        """Returns the partitions that are moving or being restored."""
        restores = {planned.partition for planned in self._context.cluster.restores.under_way}
        return restores | {planned.partition for planned in self._context.cluster.changes()}

    async def drain(
        self,
        replica: str,
        options: MoveOptions,
        reason: str = "",
        maintenance: Ask | None = None,
        operator: str = "",
        only: Nodes = None,
    ) -> list[Reconfiguration]:
        """Moves all partitions away from one replica, or from all workers of a node.

        Args:
            maintenance: options of a maintenance that begins with the drain, so that the node receives no partitions;
                the node need not own any. None: no maintenance.
            operator: only the partitions of this operator; empty: all.
            only: see :meth:`migrate`.

        Raises UnknownSite, and Unavailable if no other replica answers at the allowed sites of an operator that has
        partitions to move. With ``maintenance`` also raises InvalidArgument, InMaintenance, MoveConflict while a
        partition moves to the node, and Unavailable if an operator that wants standbys could have no standby any more.
        Then nothing moves.
        """
        await self._context.acquainted()
        if maintenance is None:
            async with self._planned(lambda: self.draining(replica, operator, only)) as (moves, said):
                asked, reasons = _asked(only, leaving=replica), dict.fromkeys(moves, reason)
                return await self._start_all(moves, said, options, Cause.DRAIN, asked, reasons)
        cluster, node = self._context.cluster, node_of(replica)

        def begins() -> Maintenance:
            now_us, under_way = cluster.now_us(), cluster.roster.maintenance
            return ordered(node, now_us, maintenance.for_s, maintenance.one_of, under_way)

        def leaving() -> Choice:
            begins()
            self._check_none_come(node)
            try:
                return self.draining(node)
            except AlreadyThere:
                return Choice({})

        async with self._planned(leaving) as (moves, said):
            check_copies(self._context, node)
            asked, reasons = _asked(None, leaving=node), dict.fromkeys(moves, reason)
            begun = await self._start_all(moves, said, options, Cause.DRAIN, asked, reasons)
            await self._context.record(steps.maintain, node, begins())
        log.warning("node %s is in maintenance%s", node, f" for {maintenance.for_s:g} s" if maintenance.for_s else "")
        return begun

    async def end_maintenance(self, node: str) -> None:
        """Ends the maintenance of a node. Raises InvalidArgument if the node is not in maintenance."""
        async with self._context.planning:
            if node not in self._context.cluster.maintained():
                raise InvalidArgument(f"{node!r} is not in maintenance", remedy="see `stateflow maintenance list`")
            await self._context.record(steps.maintain, node, None)

    def draining(self, replica: str, operator: str = "", only: Nodes = None) -> Choice:
        """Returns the moves that :meth:`drain` would begin.

        Raises the same errors, and AlreadyThere if there is nothing to move.
        """
        self.check_replica(replica)
        home = self._context.cluster.roster.replicas[replica].site
        return drained(self._view(operator, only), replica, {replica, *self._workers(replica)}, home)

    def _view(self, operator: str, only: Nodes = None) -> View:
        """Returns the owners of an operator's partitions, and the replicas that may be given partitions.

        Args:
            operator: name of an operator; empty: all operators.
            only: see :meth:`migrate`.
        """
        cluster = self._context.cluster
        able = [info for info in self._context.fit().values() if only is None or node_of(info.name) in only]
        named = [operator] if operator else sorted(cluster.deployed)
        return View(owners_of({name: cluster.operator(name) for name in named}), able, allowed=cluster.allowed_sites())

    def check_replica(self, name: str) -> None:
        """Checks that a name is a replica's or a node's. Raises UnknownSite, and InvalidArgument for a site."""
        if name not in self._context.cluster.roster.replicas:
            self._context.check_site(name)
            raise InvalidArgument(f"{name!r} is a site, not a replica", remedy="name a replica at that site")

    def check_target(self, operator: str, partitions: Iterable[int], to: str) -> None:
        """Checks that a migration's partitions and target exist.

        Raises OperatorNotDeployed, UnknownPartition, UnknownSite.
        """
        assignment = self._context.cluster.operator(operator).assignment
        for number in partitions:
            assignment.owner(number)
        self._named(to)

    def _check_none_come(self, node: str) -> None:
        """Checks that no partition is on its way to a node. Raises MoveConflict."""
        cluster = self._context.cluster
        for coming in (*cluster.changes(), *cluster.restores.under_way):
            if node_of(coming.target) == node:
                raise MoveConflict(
                    "a partition is moving to the node",
                    remedy="wait until that move ends, or cancel it",
                    partition=coming.partition,
                    item=coming.item_id,
                )

    def _workers(self, node: str) -> list[str]:
        """Returns all workers of a node; empty: the name is not that of a node."""
        return [name for name in self._context.cluster.roster.replicas if node_of(name) == node]

    @contextlib.asynccontextmanager
    async def _planned(self, choose: Callable[[], Choice], in_part: bool = False) -> AsyncIterator[tuple[Moves, Heard]]:
        """Acquires the lock ``planning``, and yields the target of each partition, and replicas' reports of their room.

        Before the lock is acquired, replicas are asked, and targets fetch the code that they lack. That may take
        minutes, during which takeovers must not wait. If the choice of targets has changed by then, the new targets are
        asked, too.

        Args:
            in_part: leave out the moves whose target refuses them, see :meth:`place`.

        Raises the errors of ``choose``, MoveConflict, NoRoom, the error of a target that cannot run the operator, and
        Unavailable if the choice changes faster than replicas can be asked.
        """
        said: Heard = {}
        taught: dict[tuple[str, OperatorSpec], StateflowError | None] = {}
        for _ in range(PREPARATIONS_MAX):
            try:
                choice = self._left_over(choose()) if in_part else choose()
                self._check_free(choice.moves)
                said = await heard(self._context, choice, said, SAID_WITHIN_S)
                await self._teach(with_room(self._context, choice, said, in_part=in_part), taught)
            except StateflowError as error:
                log.info("preparation of moves failed, the command may be refused: %s", error)
            async with self._context.planning:
                choice = self._left_over(choose()) if in_part else choose()
                self._check_free(choice.moves)
                if unheard(self._context, choice, said):
                    continue
                moves: Moves = with_room(self._context, choice, said, in_part=in_part)
                targets = self._targets(moves)
                if not targets <= taught.keys():
                    continue
                if in_part:
                    moves = self._able(choice.moves, moves, taught)
                    targets = self._targets(moves)
                for target in sorted(targets, key=lambda each: (each[1].name, each[0])):
                    if (refused := taught[target]) is not None:
                        raise refused
                yield moves, said
                return
        raise Unavailable(
            "the placement kept changing while the command was prepared",
            remedy="run the command again when no replica starts or stops and no partition moves",
        )

    def _left_over(self, choice: Choice) -> Choice:
        """Returns a choice without the moves to targets that are avoided for now."""
        avoided = self.avoided()
        moves = {each: target for each, target in choice.moves.items() if target not in avoided.get(each.operator, ())}
        return replace(choice, moves=moves)

    def _able(
        self, chosen: Moves, fit: Moves, taught: Mapping[tuple[str, OperatorSpec], StateflowError | None]
    ) -> Moves:
        """Returns the moves whose targets can take them. The targets of the others are avoided for a while.

        Args:
            chosen: all moves.
            fit: the moves for which there is room.
            taught: the error of each target that cannot run the operator.
        """
        spec = {
            operator: self._context.cluster.operator(operator).spec for operator in {each.operator for each in chosen}
        }
        failed: dict[tuple[str, str], str] = {}
        for partition, target in chosen.items():
            refused = taught.get((target, spec[partition.operator]))
            if refused is not None:
                failed[partition.operator, target] = str(refused)
            elif partition not in fit:
                failed.setdefault((partition.operator, target), f"no room for {partition}")
        for (operator, target), why in sorted(failed.items()):
            log.warning("operator %s: %s is avoided for a while: %s", operator, target, why)
        able = {
            partition: target for partition, target in fit.items() if taught[target, spec[partition.operator]] is None
        }
        self._avoided.took({(each.operator, target) for each, target in able.items()} - failed.keys())
        self._avoided.failed(self._context.clock.monotonic(), failed)
        return able

    def _targets(self, moves: Moves) -> set[tuple[str, OperatorSpec]]:
        """Returns the targets, each with the operator that it will run."""
        return {
            (target, self._context.cluster.operator(partition.operator).spec) for partition, target in moves.items()
        }

    async def _teach(self, moves: Moves, taught: dict[tuple[str, OperatorSpec], StateflowError | None]) -> None:
        """Lets targets fetch the operator if they lack it or have an older version.

        Adds the error of each target to ``taught``; None: the target has the operator.
        """
        targets = sorted(self._targets(moves) - taught.keys(), key=lambda each: (each[1].name, each[0]))
        learning = (self._context.replicas.learn(name, spec) for name, spec in targets)
        for target, answer in zip(targets, await asyncio.gather(*learning, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, StateflowError):
                raise answer
            taught[target] = answer

    async def _start_all(
        self,
        moves: Moves,
        said: Heard,
        options: MoveOptions,
        cause: Cause,
        asked: Asked = ANY,
        reasons: Mapping[PartitionId, str] = MappingProxyType({}),
    ) -> list[Reconfiguration]:
        """Begins one reconfiguration per operator. Callers pass what :meth:`_planned` yields, and hold its lock."""
        loads = loads_of(self._context, moves, said)
        plans = [
            self._ordered(operator, targets, loads, options)
            for operator, targets in sorted(_by_operator(moves).items())
        ]
        together = plan.copies_at_once(
            [(each.strategy, each.rounds) for each in plans], self._context.settings.concurrent_moves
        )
        bandwidth_max = (options.max_bandwidth or 0.0) / max(together, 1)
        return [await self._start(each, bandwidth_max, options, cause, asked, reasons) for each in plans]

    def _named(self, to: str) -> list[ReplicaInfo]:
        """Returns the replicas that a name means: one replica, all of a node, or all of a site. Raises UnknownSite."""
        replicas = self._context.cluster.roster.replicas
        # a node's first worker has the node's name, and is told from the node by its number
        exact = node_of(to) if to != node_of(to) and worker_of(to) == 0 else ""
        named = [replicas[name] for name in ([exact] if exact else self._workers(to) or [to]) if name in replicas]
        here = named or [info for info in replicas.values() if info.site == to]
        if not here:
            self._context.check_site(to)
        return here

    def _answering(self, to: str, here: Sequence[ReplicaInfo], only: Nodes) -> list[ReplicaInfo]:
        """Returns the replicas that answer and may receive partitions. Raises InMaintenance, Unavailable."""
        if only is not None:
            here = [info for info in here if node_of(info.name) in only]
        fit, maintained = self._context.fit(), self._context.cluster.maintained()
        answering = [info for info in here if info.name in fit]
        if cordoned := sorted({node_of(info.name) for info in here} & maintained) if not answering else []:
            raise InMaintenance(
                f"{', '.join(cordoned)} is in maintenance",
                remedy=f"end it: `stateflow maintenance end {cordoned[0]}`, or choose another target",
            )
        if not answering:
            names = [info.name for info in here]
            raise Unavailable(
                f"no replica of {to} that may receive partitions answers",
                remedy="start one, or choose another target",
                replicas=names,
            )
        return answering

    def _check_free(self, partitions: Collection[PartitionId]) -> None:
        """Checks that no partition is moving or being restored. Raises MoveConflict."""
        wanted = set(partitions)
        for partition in wanted:
            self._context.check_not_restored(partition)
        for planned in self._context.cluster.changes():
            if planned.partition in wanted:
                raise MoveConflict(
                    "the partition is already moving",
                    remedy="wait until that move ends, or cancel it",
                    partition=planned.partition,
                    reconfiguration=planned.reconfiguration,
                )

    def _ordered(
        self, operator: str, targets: Mapping[int, str], loads: Mapping[PartitionId, Load], options: MoveOptions
    ) -> _Plan:
        """Returns the moves of one operator in their order, by the strategy that was asked for or fits best.

        Args:
            loads: the known loads of partitions, which decide only the order and the strategy.

        Raises InvalidArgument for a pause budget with a strategy that cannot keep one.
        """
        deployed = self._context.cluster.operator(operator)
        strategy = plan.strategy_named(options.strategy)
        if strategy is None:
            changes = sum(self._executor.change_rates.get(PartitionId(operator, number), 0.0) for number in targets)
            some = [loads.get(PartitionId(operator, number), Load()) for number in targets]
            strategy = plan.choose(some, changes, options.max_pause_ms, self._executor.bandwidth)
        if options.max_pause_ms and strategy.kind is not plan.Kind.WARM:
            raise InvalidArgument(
                f"{strategy.name} copies while the partition is not served and cannot keep a pause budget",
                remedy="use warm-up or auto with max_pause_ms",
            )
        transfers = [
            Transfer(
                PartitionId(operator, number),
                deployed.assignment.owner(number)[0],
                target,
                loads.get(PartitionId(operator, number), Load()),
            )
            for number, target in targets.items()
        ]
        return _Plan(deployed, strategy, strategy.rounds(plan.ordered(transfers, options.order)))

    async def _start(
        self,
        planned: _Plan,
        bandwidth_max: float,
        options: MoveOptions,
        cause: Cause,
        asked: Asked,
        reasons: Mapping[PartitionId, str],
    ) -> Reconfiguration:
        """Records the moves and begins them. Callers hold ``planning``.

        Args:
            bandwidth_max: limit of each copy, in bytes a second; 0: none.
        """
        deployed, strategy, rounds = planned.deployed, planned.strategy, planned.rounds
        reconfiguration = self._context.new_id()
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
                bandwidth_max,
                cause,
                asked,
                number,
                reasons.get(transfer.partition, ""),
            )
            for number, round_ in enumerate(rounds)
            for transfer in round_
        ]
        await self._context.record(steps.plan_moves, moves)
        running = self._running(reconfiguration, strategy)
        for move in moves:
            self._add(running, move, MoveRunner.machine_for(move))
        self._runs.keep(running)
        self._context.spawn(self._executor.run(running))
        return running.report()

    def _running(self, reconfiguration: str, strategy: plan.Strategy) -> Running:
        """Returns a reconfiguration as the ledger records it. Its report contains only the moves that have ended."""
        cluster = self._context.cluster
        recorded = cluster.history[reconfiguration]
        told = past(recorded)
        ended = {planned.move_id for item, (planned, _) in recorded.moves.items() if item not in cluster.open_moves}
        state = ReconfigurationState.PAUSED if reconfiguration in cluster.paused else ReconfigurationState.RUNNING
        moves = tuple(move for move in told.moves if move.id in ended)
        order = {move.id: number for number, move in enumerate(told.moves)}
        running = Running(replace(told, state=state, moves=moves), strategy, order)
        running.cancelled = recorded.cancelled
        return running

    def _add(self, running: Running, planned: PlannedMove, machine: m.Move) -> None:
        """Adds a move to a reconfiguration. Callers add moves in the order of the plan."""
        runner = self._executor.runner(running, planned, machine)
        last = running.runners[-1].planned if running.runners else None
        if not isinstance(last, PlannedMove) or last.round != planned.round:
            running.rounds.append([])
        running.rounds[-1].append(runner)
        running.runners.append(runner)

    async def retry(self, reconfiguration: str, allow_cancelled: bool = False) -> Reconfiguration:
        """Begins a new reconfiguration for the failed moves of an ended reconfiguration, with the same options.

        Args:
            allow_cancelled: also retry moves that were cancelled.

        Raises MoveConflict if the reconfiguration is not over or none of its moves failed, AlreadyThere if the failed
        moves' partitions are at their targets by now, and InvalidArgument for a takeover.
        """
        running = self._runs.found(reconfiguration)
        if running.told.kind == Cause.FAILOVER:
            raise InvalidArgument(
                "a takeover cannot be retried by command", remedy="wait: the controller retries it by itself"
            )
        failed = self._runs.failed(reconfiguration, allow_cancelled)
        if not running.over or not failed:
            cancelled = running.over and bool(self._runs.failed(reconfiguration))
            raise MoveConflict(
                "no move of the reconfiguration has failed" if running.over else "the reconfiguration is not over",
                remedy="pass --cancelled to retry cancelled moves"
                if cancelled
                else "see its moves with `stateflow reconfig info`",
                reconfiguration=reconfiguration,
            )
        await self._context.acquainted()
        async with self._planned(lambda: self._retrying(running, failed)) as (moves, said):
            first = failed[0]
            (begun,) = await self._start_all(moves, said, first.options, first.cause, first.asked)
            return begun

    def _retrying(self, running: Running, failed: Iterable[PlannedMove]) -> Choice:
        assignment = self._context.cluster.operator(running.told.operator).assignment
        moves = {
            planned.partition: planned.target
            for planned in failed
            if assignment.owner(planned.partition.partition)[0] != planned.target
        }
        if not moves:
            raise AlreadyThere(
                "the partitions of the failed moves are already at their targets",
                remedy="no retry is needed",
                id=running.told.id,
            )
        for target in sorted(set(moves.values())):
            info = self._context.cluster.roster.replicas.get(target)
            self._answering(target, [] if info is None else [info], None)
        return Choice(moves)

    async def pause(self, reconfiguration: str) -> Reconfiguration:
        """Pauses a reconfiguration. The pause outlasts a restart of the controller.

        Raises MoveUnknown, and MoveConflict if it is over.
        """
        running = self._runs.unfinished(reconfiguration)
        await self._context.record(steps.pause, reconfiguration, True)
        return self._runs.pause(running)

    async def resume(self, reconfiguration: str) -> Reconfiguration:
        running = self._runs.unfinished(reconfiguration)
        await self._context.record(steps.pause, reconfiguration, False)
        return self._runs.resume(running)

    async def edit(self, reconfiguration: str, **limits: int) -> Reconfiguration:
        """Changes the given limits of a reconfiguration; 0: no limit. Moves under way complete.

        Raises MoveUnknown, and MoveConflict if it is over.
        """
        running = self._runs.unfinished(reconfiguration)
        recorded = self._context.cluster.history[reconfiguration]
        await self._context.record(steps.edit, reconfiguration, replace(recorded.limits, **limits))
        running.wake()
        self._runs.on_change()
        return running.report()

    async def cancel(self, reconfiguration: str) -> Reconfiguration:
        """Cancels a reconfiguration. The cancellation outlasts a restart of the controller. Raises MoveUnknown."""
        self._runs.found(reconfiguration)
        await self._context.record(steps.cancel, reconfiguration)
        return self._runs.cancel(reconfiguration)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume_all(self) -> None:
        """Resumes the moves that were under way, according to the ledger, and remembers those that ended."""
        by_reconfiguration: dict[str, dict[PlannedMove, OpenMove]] = {}
        for open_move in self._context.cluster.open_moves.values():
            if isinstance(move := open_move.planned, PlannedMove):
                by_reconfiguration.setdefault(move.reconfiguration, {})[move] = open_move
        for reconfiguration, moves in by_reconfiguration.items():
            self._resume(reconfiguration, moves)

    def _resume(self, reconfiguration: str, moves: Mapping[PlannedMove, OpenMove]) -> None:
        running = self._running(reconfiguration, plan.STRATEGIES[next(iter(moves)).strategy])
        first: dict[str, list[m.Instruction]] = {}
        for move, open_move in moves.items():
            machine, instructions = MoveRunner.resumed(move, open_move.granted)
            if instructions is not None:
                first[move.item_id] = instructions
            self._add(running, move, machine)
        self._runs.keep(running)
        self._context.spawn(self._executor.run(running, first))
        if running.cancelled:
            self._runs.cancel(reconfiguration)


def _chosen(proposals: Iterable[MoveProposal]) -> Choice:
    return Choice({proposal.partition: proposal.target for proposal in proposals})


def _by_operator(moves: Mapping[PartitionId, str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for partition, target in moves.items():
        found.setdefault(partition.operator, {})[partition.partition] = target
    return found


def _asked(only: Nodes, *, to: str = "", leaving: str = "") -> Asked:
    return Asked(to, leaving, None if only is None else frozenset(only))
