"""Failover: gives partitions a new owner if the present one is gone for good, has lost them, or is given up by command.

A partition that no owner serves is an *orphan*: its owner's lease has lapsed, its owner has lost it, or a move or
restore that ended without an owner left it sealed. :meth:`Takeovers.watch` finds orphans, and begins a takeover of each
one, once moves and restores of the partition have ended. :class:`TakeoverRunner` carries it out. A takeover that failed
is tried again after a growing delay. A takeover from a checkpoint waits for an owner that may still be starting after a
cold start (:func:`reconfig.decisions.failover.waits`). A partition is an orphan no longer when a takeover has
completed, its owner came back with it, or it has another owner.

Under manual failover, only a command begins a takeover (:class:`reconfig.controller.placing.GivingUp`), except that an
owner serves again what it sealed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import Executor, Running, RunRegistry
from reconfig.controller.history import takeover_note
from reconfig.controller.runners import MoveRunner, Runner
from reconfig.controller.standbys import Standbys
from reconfig.decisions import failover as f
from reconfig.decisions import migration as m
from reconfig.decisions.plan import PlannedMove, PlannedTakeover, ReconfigurationState
from stateflow.errors import (
    InvalidArgument,
    LeaseLost,
    Locked,
    StaleTerm,
    StateflowError,
    Unavailable,
)
from stateflow.ledger import RecordState
from stateflow.partition.control import Cancellation, PartitionView, Superseded, TakeOver
from stateflow.partition.lifecycle import SERVED, State
from stateflow.reports import MoveReport, Reconfiguration
from stateflow.types import How, PartitionId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A partition that no owner serves.

    ``epoch`` is the epoch at which it was owned. If ``why`` is SEALED, its owner runs and has the whole partition, but
    no longer serves it. ``move_id`` names the move for which it sealed the partition; empty: for no move, or
    ``why`` is another.
    """

    epoch: int
    why: f.Why
    move_id: str = ""


#: resolutions for partitions whose seal cannot be proved
RESOLUTIONS = ("serve-source", "restore")
TICK_S = 0.25
LOOK_AGAIN_S = 1.0  # delay before a takeover that waits for its owner is looked at again
#: doublings of the delay between two attempts: by default up to 80 s while there are other targets, or replicas
#: register, and up to 85 min while the same targets fail again and again
MOST_DOUBLINGS, MOST_DOUBLINGS_AGAIN = 4, 10


# -- One takeover ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class TakeoverRunner(Runner):
    """Carries out one takeover."""

    planned: PlannedTakeover
    machine: f.Takeover

    def __post_init__(self) -> None:
        self._begin_report(self.machine.phase)
        self._tell(note=f"by {self.planned.how.lower()}")

    @property
    def completed(self) -> bool:
        return self.machine.phase is f.Phase.COMPLETED

    def cancel(self) -> None:
        """Ignores the cancellation: a partition without an owner is taken over in any case."""

    def target_gone(self) -> None:
        self._events.put_nowait(f.TargetGone())

    async def _run(self, first: list[f.Instruction] | None) -> MoveReport:
        self._began = self.clock.monotonic()
        try:
            await self._carry_out(self.handle(m.Begin()) if first is None else first)
            while self.machine.phase not in f.TERMINAL:
                await self._carry_out(self.handle(await self._next_event()))
                self._say(self.machine.phase)
        finally:
            self._end()
        return self.report

    async def _carry_out_one(self, instruction: f.Instruction) -> None:
        match instruction:
            case m.RecordGrant():
                try:
                    await self.hooks.record_grant()
                except Locked as error:
                    self._events.put_nowait(f.TargetRefused(error))
                else:
                    self._events.put_nowait(m.GrantRecorded())
            case f.TakeOver(epoch):
                self._start(self._take_over(epoch))
            case m.CancelTarget():
                self._start(self._cancel())
            case f.RecordOwned(epoch):
                await self._record_owned(epoch=epoch)
                self._events.put_nowait(m.OwnedRecorded())
            case m.RecordAborted(error):
                if self.planned.standby_move:  # no other runner is left that would cancel that copy
                    await self._cancel_at(self.target, self.planned.standby_move)
                await self._record_aborted(error)
            case f.Retry(f.TakeOver(epoch)):
                self._start(self._later(lambda: self._take_over(epoch)))
            case f.Retry(m.CancelTarget()):
                self._start(self._later(self._cancel))

    # -- calls --------------------------------------------------------------------------------------------

    async def _take_over(self, epoch: int) -> None:
        wanted = TakeOver(
            self.deployed.spec,
            self.planned.partition,
            self.planned.move_id,
            epoch,
            self.planned.how,
            standby_move=self.planned.standby_move,
            oldest_epoch=self.deployed.first_epoch,
        )
        try:
            taken = await self.replicas.take_over(self.target.name, wanted)
        except StateflowError as error:
            log.warning("takeover %s not confirmed: %s", self.planned.move_id, error)
            unknown = isinstance(error, Unavailable | LeaseLost | StaleTerm)
            self._events.put_nowait(m.TargetUnknown() if unknown else f.TargetRefused(error))
            return
        self._tell(note=takeover_note(self.planned, taken) + self._outside())
        self._events.put_nowait(f.TargetOwned(taken.epoch))

    def _outside(self) -> str:
        if self.deployed.may_be_at(self.target):
            return ""
        sites = ", ".join(self.deployed.sites)
        return f"; {self.target.name} is at {self.target.site}, outside the operator's sites ({sites})"

    async def _cancel(self) -> None:
        reply = await self._cancel_at(self.target, self.planned.move_id)
        if reply is None:
            self._events.put_nowait(m.TargetUnknown())
            return
        self._events.put_nowait(f.TargetOwned(reply.epoch) if reply.owned else m.TargetCancelled())


# -- All of them -----------------------------------------------------------------------------------------------------


class Takeovers:
    """Finds partitions that no owner serves, and takes them over. Call :meth:`watch` once; it never returns."""

    def __init__(self, context: ControllerContext, runs: RunRegistry, executor: Executor, standbys: Standbys) -> None:
        self._context, self._runs, self._executor, self._standbys = context, runs, executor, standbys
        executor.on_lost = self.lost
        self._runners: dict[PartitionId, TakeoverRunner] = {}
        self._orphans: dict[PartitionId, Orphan] = {}
        self._not_before: dict[PartitionId, float] = {}
        self._failures: dict[PartitionId, int] = {}
        self._failed: dict[PartitionId, str] = {}  # why the last takeover failed
        self._tried: dict[PartitionId, Counter[str]] = {}  # failed takeovers by target
        self._came: dict[PartitionId, set[str]] = {}  # replicas that registered since the first takeover failed
        self._accepted: set[PartitionId] = set()  # partitions whose loss was accepted by command
        self._coming: set[PartitionId] = set()  # partitions that wait for an owner that may still be starting
        self._announced: set[str] = set()  # owners for which the log says that partitions wait
        self._looked_at = len(context.cluster.finished)
        self._restores_looked_at = len(context.cluster.restores.failed)

    # -- who has what -------------------------------------------------------------------------------------

    def registered(self, name: str, views: Iterable[PartitionView]) -> list[Superseded]:
        """Notes the partitions that a registering replica has. Returns those that it must seal.

        Partitions that are assigned to the replica, but that it does not have, become orphans.
        """
        self._announced.discard(name)
        held = {view.partition: view for view in views}
        seen, granted = self._context.cluster.epochs_seen, self._context.cluster.epochs_granted
        for partition, told in held.items():
            if told.epoch > max(seen.get(partition, 0), granted.get(partition, 0)):
                seen[partition] = told.epoch
        for partition in self._failed.keys() | self._failures.keys():
            self._try_with(name, partition)
        for partition, epoch in self._context.cluster.assigned(name).items():
            view = held.get(partition)
            self._check_held(name, partition, epoch, view)
            if view is not None and view.state is State.FENCING:
                self._context.spawn(self._settle_fence(name, partition, view.epoch, view.move_id))
        return [gone for partition, view in held.items() if (gone := self._superseded(name, partition, view))]

    def _try_with(self, name: str, partition: PartitionId) -> None:
        """Lets the next takeover of a partition begin at once: earlier ones may have failed because this replica was
        missing. A replica that registers once more has not helped, and may be one that crashes again and again, or one
        whose settings were corrected; then the next takeover waits no longer than while there are other targets.
        """
        came = self._came.setdefault(partition, set())
        if name not in came:
            came.add(name)
            for kept in (self._not_before, self._failures, self._failed):
                kept.pop(partition, None)
            if (tried := self._tried.get(partition)) is not None:
                tried.pop(name, None)
        elif partition in self._not_before:
            soon = self._context.clock.monotonic() + self._context.settings.takeover_retry_s * 2**MOST_DOUBLINGS
            self._not_before[partition] = min(self._not_before[partition], soon)

    def _check_held(self, name: str, partition: PartitionId, epoch: int, view: PartitionView | None) -> None:
        if view is not None and view.state is State.SEALED and view.epoch > epoch:
            self._orphans[partition] = Orphan(epoch, f.Why.SEALED, view.move_id)
        elif partition in self._runners:
            pass  # the owner comes too late: see _superseded
        elif view is not None and view.state in SERVED and view.epoch == epoch:
            self._no_orphan(partition)
        else:
            log.error("state_missing: partition %s, epoch %d: its owner registered without it", partition, epoch)
            self._orphans[partition] = Orphan(epoch, f.Why.MISSING)
            for runner in self._runs.moving():  # the source cannot say whether it sealed, and its lease does not lapse
                if (runner.planned.partition, runner.planned.source) == (partition, name):
                    self._source_gone(runner)

    def _why(self, orphan: Orphan) -> f.Why:
        """Returns why an orphan is not served. SEALED: its owner may serve the sealed copy again.

        If a command has rejected that copy, the reason is MISSING. The rejection counts once the move has FAILED, which
        may be after its source has registered.
        """
        rejected = orphan.why is f.Why.SEALED and orphan.move_id in self._context.cluster.distrusted
        return f.Why.MISSING if rejected else orphan.why

    def lost(self, partition: PartitionId, epoch: int, why: StateflowError) -> None:
        """Makes a partition an orphan: its owner at this epoch reports that it has lost the partition."""
        log.error("an owner lost its partition: %s", why)
        self._orphans[partition] = Orphan(epoch, f.Why.MISSING)

    def _look_at_aborted(self) -> None:
        """Asks the owner of each partition whose granted move or restore has failed whether it still serves: the failed
        change may have left the partition sealed.
        """
        finished, failed = self._context.cluster.finished, self._context.cluster.restores.failed
        for planned, record in finished[self._looked_at :]:
            granted = self._context.cluster.epochs_granted.get(planned.partition, 0) >= planned.granted_epoch > 0
            if record.state is RecordState.FAILED and isinstance(planned, PlannedMove) and granted:
                self._context.spawn(
                    self._settle_fence(planned.source, planned.partition, planned.epoch, planned.move_id)
                )
        self._looked_at = len(finished)
        for restore in failed[self._restores_looked_at :]:
            owned = self._owner(restore.partition)
            if owned is not None and owned[0] == restore.owner:
                self._context.spawn(self._settle_fence(restore.owner, restore.partition, owned[1], restore.restore_id))
        self._restores_looked_at = len(failed)

    async def resolve(self, reconfiguration: str, how: str) -> Reconfiguration:
        """Gives up moves whose seal the target cannot prove. Their partitions are taken over. The command outlasts a
        restart of the controller.

        Args:
            how: ``serve-source`` lets the source take over with its sealed copy; ``restore`` takes the state from a
                standby or a checkpoint instead.

        Raises InvalidArgument, MoveUnknown, and MoveConflict if no move is past its fence.
        """
        if how not in RESOLUTIONS:
            raise InvalidArgument(f"{how!r} is not a resolution", remedy=f"use {' or '.join(RESOLUTIONS)}")
        stuck = [runner.planned for runner in self._runs.stuck(reconfiguration)]
        await self._context.record(steps.resolve, stuck, how)
        for runner in self._runs.moving():
            if runner.planned in stuck:
                log.warning("move %s given up by command: %s", runner.planned.move_id, how)
                runner.give_up()
        return self._runs.found(reconfiguration).report()

    def _no_orphan(self, partition: PartitionId) -> None:
        """Notes that a partition has an owner again, or is gone. A loss that was accepted for it counts no longer."""
        self._orphans.pop(partition, None)
        self._accepted.discard(partition)
        self._coming.discard(partition)
        for kept in (self._not_before, self._failures, self._failed, self._tried, self._came):
            kept.pop(partition, None)

    def is_orphan(self, partition: PartitionId) -> bool:
        """Tells whether a partition is an orphan: its owner's lease has lapsed, or the owner lost or sealed it."""
        return partition in self._orphans

    def give_up(self, partition: PartitionId, owner: str, epoch: int) -> None:
        """Accepts by command that a partition gets another owner, even if the present one may be serving it alone.

        The takeover does not begin if the owner registers with the partition before :meth:`begin`.
        """
        log.warning("partition %s given up by command: owner %s does not answer or has lost it", partition, owner)
        self._accepted.add(partition)
        self._orphans.setdefault(partition, Orphan(epoch, f.Why.LAPSED))
        self._not_before.pop(partition, None)

    async def begin(self, partition: PartitionId) -> str:
        """Begins the takeover of a partition that was given up.

        Returns the id of the reconfiguration; empty: another change of the partition must end first, or its owner came
        back with it. Raises Unavailable if no replica can take over now; the controller then retries by itself.
        """
        await self._start(partition)
        runner = self._runners.get(partition)
        if runner is None and partition in self._failed:
            raise Unavailable(self._failed[partition], remedy="start a replica", partition=partition)
        return runner.planned.reconfiguration if runner is not None else ""

    def choice(self, partition: PartitionId, coming: Mapping[str, int] = MappingProxyType({})) -> f.Choice | None:
        """Chooses the replica that takes a partition over, and the copy that it uses; None: no replica can take over.

        Args:
            coming: by replica, the number of partitions that it will receive in addition to the recorded ones.
        """
        orphan, cluster = self._orphans.get(partition), self._context.cluster
        on_their_way = Counter(runner.planned.target for runner in self._runners.values())
        deployed = cluster.operator(partition.operator)
        owner, _ = deployed.assignment.owner(partition.partition)
        return f.choose(
            cluster.roster.replicas[owner],
            orphan is not None and self._why(orphan) is f.Why.SEALED,
            self._standbys.copies(partition),
            self._context.alive(),
            Counter(cluster.owned_counts()) + on_their_way + Counter(coming),
            deployed.sites,
            cluster.maintained(),
            self._tried.get(partition, {}),
        )

    def undeployed(self, operator: str) -> None:
        """Forgets the partitions of an undeployed operator, here and where standbys and moves remember them."""
        self._standbys.undeployed(operator)
        self._executor.undeployed(operator)
        for partition in [each for each in self._orphans if each.operator == operator]:
            self._no_orphan(partition)

    def _owner(self, partition: PartitionId) -> tuple[str, int] | None:
        deployed = self._context.cluster.deployed.get(partition.operator)
        return None if deployed is None else deployed.assignment.owner(partition.partition)

    async def _settle_fence(self, name: str, partition: PartitionId, epoch: int, move_id: str) -> None:
        """Finds out whether a source still serves a partition or has sealed it, after a move has ended without a new
        owner.

        A partition that its source sealed becomes an orphan. The source is asked until it answers, or until it
        registers again or is no longer the owner.
        """
        cluster, members = self._context.cluster, self._context.members
        session = members.session(name)
        while members.session(name) == session:
            await asyncio.sleep(TICK_S)
            if self._owner(partition) != (name, epoch):
                return
            if any(open_move.planned.move_id == move_id for open_move in cluster.open_moves.values()):
                continue
            try:
                reply = await self._context.replicas.cancel(name, Cancellation(partition, move_id, epoch))
            except StateflowError as error:
                log.warning(
                    "%s, fenced for move %s: no answer from replica %s yet: %s", partition, move_id, name, error
                )
                continue
            except Exception:  # no other task asks, and the partition may stay unserved until the source has answered
                log.exception("%s, fenced for move %s: failed to ask replica %s", partition, move_id, name)
                continue
            if reply.sealed and self._owner(partition) == (name, epoch):  # the owner may have changed
                self._orphans[partition] = Orphan(epoch, f.Why.SEALED, move_id)
            return

    def _superseded(self, name: str, partition: PartitionId, view: PartitionView) -> Superseded | None:
        deployed = self._context.cluster.deployed.get(partition.operator)
        if deployed is None or view.state not in SERVED:
            return None
        owner, epoch = deployed.assignment.owner(partition.partition)
        runner = self._runners.get(partition)
        if runner is not None and runner.machine.granted_epoch > view.epoch:
            # also if this replica is the target because it had come back without the partition before: now it has the
            # partition again, and must not serve it while another owner may still be chosen
            if owner == name and partition in self._orphans:  # too late, but needed if the takeover fails
                self._orphans[partition] = Orphan(epoch, f.Why.SEALED)
            owner, epoch = runner.planned.target, runner.machine.granted_epoch
        for restore in self._context.cluster.restores.under_way:
            if restore.partition == partition and owner == name != restore.target and restore.epoch > view.epoch:
                # the target may own by now; if the restore fails, the sealed copy here is served again
                self._orphans[partition] = Orphan(epoch, f.Why.SEALED)
                owner, epoch = restore.target, restore.epoch
        voided = 0
        if view.epoch > epoch and not self._context.cluster.becomes_owner(name, partition, view.epoch):
            voided = view.epoch
            if owner == name:  # it has the whole partition, with all commits of that epoch
                self._orphans[partition] = Orphan(epoch, f.Why.SEALED)
        elif epoch == view.epoch and owner != name:
            voided = view.epoch  # an older copy of the ledger granted that epoch a second time
        elif epoch <= view.epoch:
            return None  # else the replica is outdated, even if it is the owner: its disk was put back
        return Superseded(partition, epoch, self._context.cluster.roster.replicas[owner], voided)

    # -- watching -----------------------------------------------------------------------------------------

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._said("looking for partitions without an owner", self._tick())
            await self._said("reconciling standbys", self._standbys.reconcile())

    @staticmethod
    async def _said(what: str, work: Awaitable[None]) -> None:
        """Awaits work that later ticks repeat, and logs its error, so that the error does not stop other work.
        ``what``: words for the work."""
        try:
            await work
        except StateflowError as error:
            log.error("%s failed, will be retried: %s", what, error)
        except Exception:
            log.exception("%s failed unexpectedly, will be retried", what)

    async def _tick(self) -> None:
        members, cluster = self._context.members, self._context.cluster
        self._look_at_aborted()
        for name in list(cluster.roster.replicas):
            if members.lapsed(name) and not (self._context.names.awaited(name) or members.is_opening(name)):
                await self._said(f"handling the lapsed lease of {name}", self._lapsed(name))
        for partition in list(self._orphans):
            orphan = self._orphans.get(partition)
            if orphan is None:
                continue  # its owner came back while another partition was handled
            owned = self._owner(partition)
            if owned is None or owned[1] > orphan.epoch:
                self._no_orphan(partition)  # it was undeployed or restored
            elif self._is_due(partition):
                await self._said(f"beginning the takeover of partition {partition}", self._start(partition))

    def lack(self, partition: PartitionId) -> f.Lack | None:
        """Returns why a partition is not served; None: no reason is known."""
        orphan, owned = self._orphans.get(partition), self._owner(partition)
        if orphan is None or owned is None or owned[1] > orphan.epoch:
            return None
        if partition in self._coming and (coming := self.coming(owned[0])) is not None:
            return coming
        by_command = self._waits_for_command(partition, orphan)
        return f.Lack(owned[0], self._why(orphan), self._failed.get(partition, ""), by_command)

    def coming(self, owner: str) -> f.Lack | None:
        """Returns why partitions are not served whose owner may still be starting; None: it cannot be."""
        members = self._context.members
        return f.Lack(owner, f.Why.COMING, until_us=members.cold_until_us) if self._may_come(owner) else None

    def _may_come(self, name: str) -> bool:
        """Tells whether a replica may still be starting after a cold start, with its state."""
        return self._context.members.may_come(name) and not self._context.cluster.roster.is_rehomed(name)

    def _waits_for_owner(self, partition: PartitionId, owner: str) -> bool:
        """Tells whether a takeover waits for the owner, and notes that it does."""
        self._coming.discard(partition)
        may_come, accepted = self._may_come(owner), partition in self._accepted
        # copies are looked for only after a cold start, because that takes long where there are many standbys
        copies = self._standbys.copies(partition) if may_come else []
        if not f.waits(may_come, accepted, copies, self._context.alive()):
            return False
        self._coming.add(partition)
        self._not_before[partition] = self._context.clock.monotonic() + LOOK_AGAIN_S
        if owner not in self._announced:
            self._announced.add(owner)
            log.warning(
                "%s has not registered since this cold start: its partitions wait for it, up to %g s after the start, "
                "before they are taken over from checkpoints, which may lack acknowledged batches",
                owner,
                self._context.settings.cold_start_wait_s,
            )
        return True

    def _waits_for_command(self, partition: PartitionId, orphan: Orphan) -> bool:
        """Tells whether only a command can start a takeover of the partition, because its failover is manual.

        An owner that sealed the whole partition may serve it again without a command.
        """
        manual = self._context.cluster.failovers.is_manual(partition.operator)
        return manual and self._why(orphan) is not f.Why.SEALED and partition not in self._accepted

    def concerns(self, partition: PartitionId) -> bool:
        """Tells whether a partition is not served by its owner, or is being taken over."""
        return partition in self._orphans or partition in self._runners

    def _is_due(self, partition: PartitionId) -> bool:
        if partition in self._runners or self._not_before.get(partition, 0.0) > self._context.clock.monotonic():
            return False
        return not self._is_restored(partition)

    def _is_restored(self, partition: PartitionId) -> bool:
        """Tells whether a restore of the partition is under way."""
        return any(planned.partition == partition for planned in self._context.cluster.restores.under_way)

    async def _lapsed(self, name: str) -> None:
        """Handles a replica whose lease has lapsed: until it registers again, it serves none of its partitions.

        Its moves and takeovers are notified. Its partitions become orphans, unless it may serve them alone.
        """
        self._context.members.expel(name)
        for runner in self._runs.moving():
            if runner.planned.source == name:
                self._source_gone(runner)
        if not self._may_come(name):  # else the target may own the partition, with batches acknowledged since
            for takeover in self._runners.values():
                if takeover.planned.target == name:
                    takeover.target_gone()
        for partition, epoch in self._context.cluster.assigned(name).items():
            if self._context.may_be_alone(name, partition.operator):
                continue
            if partition not in self._orphans and partition not in self._runners:
                log.warning("partition %s has no owner: the lease of %s has lapsed", partition, name)
                self._orphans[partition] = Orphan(epoch, f.Why.LAPSED)

    def _source_gone(self, runner: MoveRunner) -> None:
        """Tells a move that its source is gone.

        A move that waits for its turn or is paused gives up its place, so that it does not delay the takeover.
        """
        runner.source_gone()
        self._executor.queue.leave(runner.planned)

    async def _start(self, partition: PartitionId) -> None:
        cluster = self._context.cluster
        async with self._context.planning:
            if partition in self._runners or self._moves_on(partition) or self._is_restored(partition):
                return  # the change under way ends first: it may still end with an owner
            orphan = self._orphans.get(partition)
            if orphan is None:
                return
            deployed = cluster.operator(partition.operator)
            owner, epoch = deployed.assignment.owner(partition.partition)
            if orphan.epoch != epoch:  # it has another owner by now
                self._no_orphan(partition)
                return
            if self._waits_for_owner(partition, owner):
                return
            choice = self.choice(partition)
            if self._waits_for_command(partition, orphan) and (choice is None or choice.how is not How.LOCAL):
                return
            if choice is None:
                self._failed[partition] = "no replica that answers can take over"
                return
            if owner in self._announced and choice.how is How.CHECKPOINT and not self._may_come(owner):
                self._announced.discard(owner)
                log.warning("%s has not registered in time: its partitions are taken over from checkpoints", owner)
            target = cluster.roster.replicas[choice.target]
            if not deployed.may_be_at(target):
                where = ", ".join(deployed.sites)
                log.warning(
                    "takeover of %s by %s at %s, outside allowed sites (%s)", partition, target.name, target.site, where
                )
            planned = PlannedTakeover(
                self._context.new_id(),
                partition,
                owner,
                choice.target,
                epoch,
                cluster.next_epoch(partition),
                choice.how,
                choice.standby_move,
            )
            # the runner is known before the record is written: an owner that registers before is told to seal
            running, runner = self._prepare(planned, f.Takeover(partition, planned.granted_epoch))
            try:
                await self._context.record(steps.plan_moves, [planned])
            except BaseException:
                del self._runners[partition]
                raise
            self._begin(running, runner, None)

    def _moves_on(self, partition: PartitionId) -> bool:
        return any(
            change.partition == partition and isinstance(change, PlannedMove)
            for change in self._context.cluster.changes()
        )

    def _prepare(self, planned: PlannedTakeover, machine: f.Takeover) -> tuple[Running, TakeoverRunner]:
        told = Reconfiguration(
            id=planned.reconfiguration,
            operator=planned.partition.operator,
            state=ReconfigurationState.RUNNING,
            moves=(),
            max_pause_ms=planned.max_pause_ms,
            kind=planned.cause,
            strategy=planned.strategy,
        )
        running = Running(told)
        return running, self._runner(running, planned, machine)

    def _runner(self, running: Running, planned: PlannedTakeover, machine: f.Takeover) -> TakeoverRunner:
        runner = TakeoverRunner(
            planned=planned,
            deployed=self._context.cluster.operator(planned.partition.operator),
            target=self._context.cluster.roster.replicas[planned.target],
            replicas=self._context.replicas,
            hooks=self._executor.hooks(running, planned),
            settings=self._context.settings,
            clock=self._context.clock,
            random=self._context.random,
            machine=machine,
        )
        running.runners = [runner]
        self._runners[planned.partition] = runner
        return runner

    def _begin(self, running: Running, runner: TakeoverRunner, first: list[f.Instruction] | None) -> None:
        running.told = replace(running.told, created_us=self._context.cluster.history[running.id].created_us)
        self._runs.keep(running)
        self._context.spawn(self._run(running, runner, first))

    async def _run(self, running: Running, runner: TakeoverRunner, first: list[f.Instruction] | None) -> None:
        partition = runner.planned.partition
        known = self._orphans.get(partition)
        try:
            runner = await self._to_its_end(running, runner, first)
        finally:
            self._runners.pop(partition, None)
        if self._context.over.done():
            return  # the next leader resumes it
        state = self._context.cluster.history[running.id].state
        if state is ReconfigurationState.COMPLETED:
            self._no_orphan(partition)
            log.warning(
                "partition %s taken over from %s by %s: %s",
                partition,
                runner.planned.source,
                runner.planned.target,
                runner.report.note,
            )
        else:
            log.error("takeover of partition %s failed: %s", partition, runner.machine.error)
            if partition in self._orphans:
                self._failed[partition] = "" if runner.machine.error is None else runner.machine.error.what
            if self._orphans.get(partition) == known:  # otherwise the owner came back: retried at once
                failures = self._failures[partition] = self._failures.get(partition, 0) + 1
                tried = self._tried.setdefault(partition, Counter())
                tried[runner.planned.target] += 1
                most = min(max(tried[runner.planned.target] - 1, MOST_DOUBLINGS), MOST_DOUBLINGS_AGAIN)
                again_s = self._context.settings.takeover_retry_s * 2 ** min(failures - 1, most)
                self._not_before[partition] = self._context.clock.monotonic() + again_s
        self._runs.settle(running, state)

    async def _to_its_end(
        self, running: Running, runner: TakeoverRunner, first: list[f.Instruction] | None
    ) -> TakeoverRunner:
        """Runs a takeover to its end, and returns the runner that completed it.

        After an unexpected error the takeover begins again with a new runner, as after a restart, if it is still open
        in the ledger.
        """
        planned = runner.planned
        while True:
            try:
                await self._standbys.hand_over(planned.partition, planned.standby_move)
                await runner.run(first)
                return runner
            except Exception:
                if self._context.over.done():
                    return runner
                log.exception("takeover %s starts again after an unexpected error", planned.move_id)
            await asyncio.sleep(self._context.settings.takeover_retry_s)
            open_move = self._context.cluster.open_moves.get(planned.item_id)
            if open_move is None:
                return runner
            machine, first = f.Takeover.resumed(planned.partition, planned.granted_epoch, open_move.granted)
            runner = self._runner(running, planned, machine)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume_all(self) -> None:
        for open_move in list(self._context.cluster.open_moves.values()):
            planned = open_move.planned
            if isinstance(planned, PlannedTakeover):
                machine, first = f.Takeover.resumed(planned.partition, planned.granted_epoch, open_move.granted)
                self._orphans[planned.partition] = Orphan(
                    planned.epoch, f.Why.SEALED if planned.how == How.LOCAL else f.Why.LAPSED
                )
                self._begin(*self._prepare(planned, machine), first)
