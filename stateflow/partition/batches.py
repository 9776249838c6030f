"""Applies batches to the partitions owned here, one at a time per partition, and commits them in groups.

The thread that calls :meth:`Batches.apply` applies the parts of a batch, one for each partition, in order. A part goes
through these steps:

1. *Admission*: the lease holds, requests of the operator are not held, the thread acquires the partition's lock
   ``work``, and the lifecycle's ``begin`` returns SERVE. Otherwise the outcome is known at once.
2. *Running*: :class:`RunningBatches` notes the batch, and the partition's processor runs it. If the processor finds
   that the batch was applied before, its outcome is known now.
3. *Processed*: the batch is parked and waits in the thread's :class:`Group`, so that the batches of several partitions
   share one commit. The thread keeps ``work``.
4. *Committed*: one durable write appends all members of the group to the commit log, if there is one. Then each member
   is resumed, written to its database and ended, and its outcome is reported.

Invariants:

* A thread with an open group waits for no other partition: it commits the group before it waits for ``work``, before a
  slow part, and before it handles an error. So no thread waits for a waiting thread. Partitions in which one write
  opens a source form such a group, too.
* A slow part, or an operator that does not return, does not hold up the other members of the group: they are taken from
  the thread, their uncommitted batches are dropped, and their partitions are served again at once.
* A commit is reported only if the lease still holds after it.
* A batch that was taken away from its thread never commits. Its partition is not served here until the operator
  returns.
* A seal that waits for a running batch is written when the batch ends, by whichever thread ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from stateflow.errors import (
    DiskFull,
    DiskRefused,
    InvalidArgument,
    NotOwner,
    OperatorFailed,
    OperatorStuck,
    StateDamaged,
    StateflowError,
    TooFewFiles,
)
from stateflow.metrics.own import OwnFigures
from stateflow.operator.instance import failure
from stateflow.operator.output import encode
from stateflow.operator.watchdog import Interrupted, RunningBatch
from stateflow.partition import layout
from stateflow.partition.lifecycle import State, Verdict
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.positions import Retention
from stateflow.partition.processor import Applied, Commit, PartitionProcessor, Ran
from stateflow.partition.registry import Lease, PartitionRegistry
from stateflow.partition.running import GROUP_ROWS, Group, Member, Opened, RunningBatches
from stateflow.partition.slices import BatchSlices, Frame, Part
from stateflow.partition.sources import until
from stateflow.partition.transfer_out import Sender
from stateflow.state import CachePool
from stateflow.storage.faults import meaning
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: longest time, in seconds, for which one call of hold() makes requests wait, because its caller may die
HOLD_S_MAX = 10.0
#: if the operator took longer than this for a partition's last batch (µs), the group is committed before its next one,
#: so that other partitions do not wait for it with their commits and fences
SLOW_US = 20_000
T = TypeVar("T")
#: outcome of a part: ``Applied``, the replica that the partition moved to, None, or an error. None means that the
#: partition is on its way here or its requests are held, so ask again after the next ``on_change``. The error is
#: LeaseLost, or a fault of the sender, the rows, the operator or this program.
Outcome: TypeAlias = Applied | ReplicaInfo | BaseException | None


class Answers(Protocol):
    """Receives the outcomes of a batch's parts, in the thread that applies the batch. ``number`` counts the parts from
    0."""

    def begun(self, number: int) -> None:
        """Called when part ``number`` begins; all earlier parts have begun by then."""
        ...

    def committing(self) -> None:
        """Called before a group of parts is committed. Then :meth:`told` is called for each of them."""
        ...

    def told(self, number: int, outcome: Outcome) -> None:
        """Called once with the outcome of each part that was begun, unless the part is given up."""
        ...

    def goes_on(self) -> bool:
        """Returns whether another part may be begun."""
        ...


class _Taken(Exception):
    """The running batch or its group was taken away from this thread. ``told`` is the outcome to report for the current
    part; None: no outcome is reported."""

    def __init__(self, told: BaseException | None) -> None:
        self.told = told


# -- Applying --------------------------------------------------------------------------------------------------------


class Batches:
    """Applies batches on one replica. Thread-safe. ``running`` holds the running batches of all threads.

    Args:
        sender: seals a partition at the end of its running batch if it was fenced during the batch.
    """

    def __init__(self, registry: PartitionRegistry, lease: Lease, sender: Sender, cache: CachePool) -> None:
        self._registry, self._lease, self._cache = registry, lease, cache
        self.running = RunningBatches(registry, sender)
        #: metrics that operators define
        self.figures = OwnFigures()
        self._settings, self._clock = registry.settings, registry.clock
        self._retention = Retention(
            round(self._settings.source_idle_s * 1e6),
            self._settings.sources_max,
            self._settings.sources_retired_max,
            round(self._settings.watermark_idle_s * 1e6),
        )
        self._held: dict[str, float] = {}  # operator → until, monotonic

    def apply(self, slices: BatchSlices, answers: Answers) -> None:
        """Applies a batch to several partitions, in order, and commits them in groups.

        Reports the outcome of each part to ``answers``, errors included, instead of raising. A part that was begun and
        has no outcome was given up, and may be sent again.
        """
        version = self._version(slices.operator)
        with self.running.group() as group, self.running.crashes.noted(slices.operator, version, slices.batch):
            for number, part in enumerate(slices.parts):
                if not answers.goes_on():
                    break
                answers.begun(number)
                if not self._part(slices, number, part, group, answers):
                    return
                if group.is_full(self._clock.monotonic()):
                    self._commit(group, answers)
            self._commit(group, answers)

    def _version(self, operator: str) -> int:
        """Returns a number that differs between the deployed versions of an operator."""
        try:
            spec, _ = self._registry.operator(operator)
        except StateflowError:  # each part gets this error
            return 0
        return spec.recorded_us

    def skip(self, frame: Frame) -> list[int]:
        """Lets a batch skip the partitions that need no visit, and returns their indices in the frame. Empty: skipping
        is not possible, and the batch visits all partitions."""
        began = self._clock.monotonic()
        if self._is_held(frame.operator) or not self._lease.holds(began, frame.operator):
            return []
        try:
            _, cls = self._registry.operator(frame.operator)
            places = self._registry.skipped_batches.skip(
                frame.operator,
                cls,
                frame.batch,
                frame.partitions,
                frame.epochs,
                frame.counts,
                began,
                self._clock.now_us(),
            )
        except Exception as error:  # noqa: BLE001 - a visiting batch meets the same disk error, and reports it
            log.warning("batch %s of source %s skips no partitions: %s", frame.batch.number, frame.batch.source, error)
            return []
        self._registry.served_at = now = self._clock.monotonic()
        # the process may have been suspended: partitions skipped after the lease lapsed are not reported
        return places if self._lease.holds(now, frame.operator) else []

    def _part(self, slices: BatchSlices, number: int, part: Part, group: Group, answers: Answers) -> bool:
        """Applies one part and reports its outcome, unless it waits for the group's commit. Returns False if the group
        was taken away from this thread."""
        local = self._registry.look(PartitionId(slices.operator, part.partition))
        try:
            self._lease.check(self._clock.monotonic(), slices.operator)
            outcome = (
                None if self._is_held(slices.operator) else self._admit(local, slices, number, part, group, answers)
            )
        except _Taken as taken:
            if taken.told is not None:
                answers.told(number, taken.told)
            return False
        except BaseException as error:  # noqa: BLE001 - it is reported
            # handling the error may have to wait, which a thread with an open group must not
            self._commit(group, answers)
            outcome = self._judged(local, error)
        if not isinstance(outcome, Member):
            answers.told(number, outcome)
        return True

    def _admit(
        self, local: LocalPartition, slices: BatchSlices, number: int, part: Part, group: Group, answers: Answers
    ) -> Outcome | Member:
        """Applies one part if its partition is served here. Returns its outcome, or its group member if the group will
        commit it."""
        with local.mutex:
            if local.lost is not None and local.lifecycle.state is State.ABSENT:
                raise local.lost
            if local.lifecycle.state is not State.OWNED:  # do not wait for `work`: a restore may hold it for minutes
                verdict = local.lifecycle.begin(part.epoch)
                return local.lifecycle.successor if verdict is Verdict.MOVED else None
        processor = local.processor
        slow = part.stop - part.start >= GROUP_ROWS or (processor is not None and processor.operator_us > SLOW_US)
        if slow or group.has(local) or not local.work.acquire(0.0):
            self._commit(group, answers)
            local.work.__enter__()
        outcome: Outcome | Member = None
        try:
            with local.mutex:
                if local.stuck is not None:
                    raise local.stuck.refusal(of_later=True)
                verdict = local.lifecycle.begin(part.epoch)
            if verdict is not Verdict.SERVE:
                return local.lifecycle.successor if verdict is Verdict.MOVED else None
            outcome = self._run(local, slices, number, part, group)
            return outcome
        finally:
            if not isinstance(outcome, Member):
                local.work.release()

    def _run(
        self, local: LocalPartition, slices: BatchSlices, number: int, part: Part, group: Group
    ) -> Outcome | Member:
        self._registry.served_at = began = self._clock.monotonic()
        local.timing.began(began)
        run, crashes = self.running.take(local, began), self.running.crashes
        stays = False
        try:
            if crashes.any:
                crashes.check(slices.operator, self._version(slices.operator), slices.batch, part.partition)
            crashes.at(part.partition)
            processor = self._processor(local)
            self._take_up(local, processor)
            rows = slices.arrived(part, processor.key)
            try:
                ran = processor.run(slices.batch, rows, self._clock.now_us(), part.after, part.digest, run)
            finally:
                if crashes.any:
                    crashes.survived(slices.operator, self._version(slices.operator), slices.batch, part.partition)
            local.traffic.came(part.stop - part.start, slices.row_bytes, slices.batch.site)
            if slices.batch.site_column:
                local.traffic.came_from(slices.origins(part))
            self._registry.served_at = now = self._clock.monotonic()
            if isinstance(ran, Ran):
                member = Member(number, local, run, processor, ran)
                if stays := group.add(member):
                    self.running.park(run)
                    return member
                processor.rollback()
                raise _Taken(None)
            local.timing.ended(now)
            self._grant(local, processor, now)
            # the process may have been suspended: a commit after the lease lapsed is not reported
            self._lease.check(now, local.id.operator)
            return ran
        except Interrupted as error:
            stuck = _stuck(run, error)
            raise _Taken(stuck) if run.taken else stuck from error
        except BaseException as error:
            if run.taken:
                raise _Taken(error) from error
            raise
        finally:
            if not stays:
                self.running.end(local, run)

    def _commit(self, group: Group, answers: Answers) -> None:
        """Commits the group and reports the outcomes. Does nothing if the group was taken away."""
        members = group.members
        encoded = encode([member.ran.outputs for member in members])
        if not members or not group.begin_commit(members):
            return
        answers.committing()
        members[-1].run.end_children()
        outcomes: list[tuple[Member, Outcome]] = []
        staged: list[tuple[Member, Commit]] = []
        for member, rows in zip(members, encoded, strict=True):
            try:
                staged.append((member, member.processor.stage(member.ran, rows)))
            except BaseException as error:  # noqa: BLE001 - it is reported
                outcomes.append((member, self._ended(member, error)))
        for member, commit in self._logged(staged, outcomes):
            self.running.resume(member.run, self._clock.monotonic())
            try:
                outcome: Outcome = member.processor.write(member.ran, commit)
                self._registry.served_at = now = self._clock.monotonic()
                member.local.timing.ended(now)
                self._grant(member.local, member.processor, now)
                # the process may have been suspended: a commit after the lease lapsed is not reported
                self._lease.check(now, member.local.id.operator)
            except BaseException as error:  # noqa: BLE001 - it is reported
                outcome = error
            outcomes.append((member, self._ended(member, outcome)))
        group.end_commit()
        for member, outcome in outcomes:
            judged = self._judged(member.local, outcome) if isinstance(outcome, BaseException) else outcome
            answers.told(member.number, judged)

    def _logged(
        self, staged: list[tuple[Member, Commit]], outcomes: list[tuple[Member, Outcome]]
    ) -> list[tuple[Member, Commit]]:
        """Appends staged commits to the commit log. Returns the commits to be written to their databases: all of them,
        or none if the log failed."""
        error = self._append(staged[0][0].run, [commit.staged for _, commit in staged]) if staged else None
        if error is None:
            return staged
        for member, _ in staged:
            member.processor.rollback()
            outcomes.append((member, self._ended(member, error)))
        return []

    def _append(self, run: RunningBatch, staged: list[layout.Staged]) -> BaseException | None:
        """Appends staged commits to the commit log, if there is one, with one durable write. Returns the error, if
        there was one. Meanwhile, ``run`` counts as the running batch of this thread."""
        log = self._registry.commits.log
        if log is None:
            return None
        self.running.resume(run, self._clock.monotonic())
        try:
            log.append([each.logged for each in staged if each.logged is not None])
        except BaseException as error:  # noqa: BLE001 - it is reported
            return error
        return None

    def _ended(self, member: Member | Opened, outcome: T) -> T | BaseException:
        """Ends the running batch of a partition and releases the partition's ``work``. Returns ``outcome``, or the
        error if the batch cannot be ended properly."""
        try:
            self.running.end(member.local, member.run)
        except BaseException as error:  # noqa: BLE001 - it is reported
            return error
        finally:
            member.local.work.release()
        return outcome

    def refusal(self, partition: PartitionId) -> OperatorStuck | None:
        """Returns the error of a partition's batch that was taken away; None: the partition accepts batches."""
        stuck = self._registry.look(partition).stuck
        return None if stuck is None else stuck.refusal()

    @property
    def commits_together(self) -> bool:
        """Tells whether one write makes the commits of several partitions durable, because there is a commit log."""
        return self._registry.commits.log is not None

    def is_ready(self, partition: PartitionId) -> bool:
        """Tells whether the partition's operator is open, with the code that is deployed now. Callable from any
        thread."""
        processor = self._registry.look(partition).processor
        return processor is not None and processor.runs(self._registry.operator(partition.operator)[1])

    def make_ready(self, partition: PartitionId) -> None:
        """Opens a partition's database and operator, which may take long. Raises NotOwner, LeaseLost, and the errors of
        the store and of the operator."""
        self._beside_batches(partition, lambda _: None)

    def open_source(
        self, partitions: Collection[PartitionId], source: str, session: layout.Session, settled: int | None = None
    ) -> dict[PartitionId, int | NotOwner]:
        """Makes partitions refuse older clients of a source from now on. With a commit log, one write makes that
        durable. Returns for each partition the sequence of its last commit, or NotOwner if it is not served here.

        A partition that is not ready, or that another thread works on, gets a durable write of its own, because a
        thread that holds partitions waits for no other partition and for no operator.

        Args:
            settled: see :meth:`~stateflow.partition.sources.Sources.open`.

        Raises LeaseLost, SourceTaken, SourceRetired, or an error of the store if any partition has it; the source may
        then be open in the other partitions.
        """
        opened: list[Opened] = []
        alone: list[PartitionId] = []
        for partition in dict.fromkeys(partitions):
            staged = self._stage_opening(self._registry.look(partition), source, session, settled)
            if staged is None:
                alone.append(partition)
            else:
                opened.append(staged)
        at: dict[PartitionId, int | NotOwner] = {**self._commit_openings(opened)}
        for partition in alone:
            try:
                at[partition] = self._beside_batches(
                    partition, lambda processor: processor.open_source(source, session, settled)
                )
            except NotOwner as error:
                at[partition] = error
        return at

    def _stage_opening(
        self, local: LocalPartition, source: str, session: layout.Session, settled: int | None
    ) -> Opened | None:
        """Prepares the commit that opens a source in a partition. This thread then holds the partition's ``work``.
        None: the partition needs a write of its own, and this thread does not hold ``work``."""
        if not self._lease.holds(self._clock.monotonic(), local.id.operator) or not local.work.acquire(0.0):
            return None
        opened: Opened | None = None
        try:
            with suppress(Exception, Interrupted):  # the separate opening that follows raises the error
                opened = self._staged(local, source, session, settled)
        finally:
            if opened is None:
                local.work.release()
        return opened

    def _staged(
        self, local: LocalPartition, source: str, session: layout.Session, settled: int | None
    ) -> Opened | None:
        processor = local.processor
        if processor is None or not self.is_ready(local.id):
            return None
        run = self._begin_beside(local)
        opened: Opened | None = None
        try:
            self._take_up(local, processor)
            run.begin_commit()
            opened = Opened(local, run, processor, processor.stage_opening(source, session, settled))
            self.running.park(run)
            return opened
        finally:
            if opened is None:
                self.running.end(local, run)

    def _commit_openings(self, opened: list[Opened]) -> dict[PartitionId, int]:
        """Commits prepared openings, and releases their partitions. Returns the sequence of each partition's last
        commit. Raises the first error."""
        staged = [each.opening.staged for each in opened if each.opening is not None]
        refused = self._append(opened[0].run, staged) if staged else None
        outcomes: list[int | BaseException] = []
        for each in opened:
            self.running.resume(each.run, self._clock.monotonic())
            outcome: int | BaseException
            try:
                if each.opening is not None:
                    if refused is not None:
                        raise refused
                    each.processor.write_opening(each.opening)
                outcome = each.processor.sequence
                self._registry.skipped_batches.committed(each.local, outcome)
                # the process may have been suspended: an opening after the lease lapsed is not reported
                self._lease.check(self._clock.monotonic(), each.local.id.operator)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                outcome = error
            outcomes.append(self._ended(each, outcome))
        at: dict[PartitionId, int] = {}
        errors: list[BaseException] = []
        for each, outcome in zip(opened, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors.append(self._judged(each.local, outcome))
            else:
                at[each.local.id] = outcome
        if errors:
            raise errors[0]
        return at

    def retire_source(self, partition: PartitionId, source: str) -> bool:
        """Retires a source in a partition, see :meth:`~stateflow.partition.processor.PartitionProcessor.retire`. Raises
        NotOwner, LeaseLost."""
        return self._beside_batches(partition, lambda processor: processor.retire(source))

    def drop_output(self, partition: PartitionId, source: str, batch: int, apply: bool) -> int:
        """Drops the stored output of a batch, see
        :meth:`~stateflow.partition.processor.PartitionProcessor.drop_output`. Raises NotOwner, LeaseLost."""
        return self._beside_batches(partition, lambda processor: processor.drop_output(source, batch, apply))

    def _beside_batches(self, partition: PartitionId, work: Callable[[PartitionProcessor], T]) -> T:
        """Runs work, other than a batch, that commits to a partition. Returns its result."""
        local = self._registry.look(partition)
        try:
            return self._commit_beside(local, work)
        except Exception as error:
            self.judge(local, error)
            raise

    def _commit_beside(self, local: LocalPartition, work: Callable[[PartitionProcessor], T]) -> T:
        self._lease.check(self._clock.monotonic(), local.id.operator)
        if local.lifecycle.state is not State.OWNED:
            raise not_owned(local)
        with local.work:
            run = self._begin_beside(local)
            try:
                processor = self._processor(local)  # the operator may have to open
                self._take_up(local, processor)
                run.begin_commit()
                done = work(processor)
                self._registry.skipped_batches.committed(local, processor.sequence)
                self._lease.check(self._clock.monotonic(), local.id.operator)
                return done
            except Interrupted as error:
                raise _stuck(run, error) from error
            finally:
                self.running.end(local, run)

    def _begin_beside(self, local: LocalPartition) -> RunningBatch:
        """Begins work, other than a batch, on a partition. The work counts as the partition's running batch. Callers
        hold ``work``. Raises NotOwner, OperatorStuck."""
        with local.mutex:
            if local.stuck is not None:
                raise local.stuck.refusal(of_later=True)
            serves = local.lifecycle.state is State.OWNED
            serves = serves and local.lifecycle.begin(local.lifecycle.epoch) is Verdict.SERVE
        if not serves:
            raise not_owned(local)
        return self.running.take(local, self._clock.monotonic())

    def judge(self, local: LocalPartition, error: Exception) -> None:
        """Acts on an error of the store. If another error describes it better, raises that one, for the caller to
        report.

        A partition that cannot be read is given up as lost, so that another replica takes it over instead of failing
        again and again. A partition that could not be written is closed and opened again, because its database refuses
        writes after a failed one.
        """
        meant = meaning(error)
        if isinstance(meant, StateDamaged) and meant is not local.lost:
            meant.located(partition=local.id)
            self._registry.lose(local, meant)
        elif isinstance(meant, DiskFull | DiskRefused | TooFewFiles):
            self._registry.close_store(local)
        if meant is not None and meant is not error:
            raise meant from error

    def _judged(self, local: LocalPartition, error: BaseException) -> BaseException:
        """Returns the error to report for a part: the one that :meth:`judge` raises, otherwise ``error`` itself."""
        if isinstance(error, Exception):
            try:
                self.judge(local, error)
            except Exception as meant:  # noqa: BLE001 - it is reported
                return meant
        return error

    def evolve(self, local: LocalPartition) -> None:
        """Evolves a partition's stored states to those declared now, so that its first batch does not have to.

        Callers hold ``work``. Raises LeaseLost, and the errors of :meth:`.PartitionProcessor.evolve`.
        """
        self._lease.check(self._clock.monotonic(), local.id.operator)
        processor = self._processor(local)
        self._take_up(local, processor)
        processor.evolve(self._clock.now_us())

    def _take_up(self, local: LocalPartition, processor: PartitionProcessor) -> None:
        """Stops batches from skipping the partition, and gives ``processor`` the positions of those that skipped it;
        its next commit makes them durable. Callers hold ``work``."""
        self._registry.skipped_batches.revoke(local)
        processor.adopt(self._registry.skipped_batches.held(local, processor.epoch, processor.sequence))

    def _grant(self, local: LocalPartition, processor: PartitionProcessor, now: float) -> None:
        """Lets following batches skip the partition until a visit is due. Callers hold ``work``, after a batch."""
        self._registry.skipped_batches.grant(local, processor, processor.needs_no_visit(until(local.id, now)))

    def _processor(self, local: LocalPartition) -> PartitionProcessor:
        """Returns the partition's processor, with the code that is deployed now; creates it if necessary. Callers hold
        ``work``."""
        spec, cls = self._registry.operator(local.id.operator)
        if local.processor is not None and not local.processor.runs(cls):
            local.processor.let_go(self._registry.environment.aside)
            local.processor = None
        if local.processor is None:
            local.processor = PartitionProcessor(
                cls,
                local.id,
                self._registry.store(local),
                local.lifecycle.epoch,
                cached_keys=self._settings.cached_keys,
                cache=self._cache,
                max_value_bytes=self._settings.value_bytes_max,
                log=self._registry.commits.log,
                on_commit=local.tell,
                clock=self._clock,
                retention=self._retention,
                deployed=partial(self._registry.deployed, local.id.operator),
                partitions=spec.partitions,
                figures=self.figures,
            )
        return local.processor

    def hold(self, operator: str, seconds: float) -> None:
        """Makes requests of an operator wait for at most ``seconds``; 0 ends the wait. Raises InvalidArgument for a
        negative number or more than ``HOLD_S_MAX``."""
        if not 0 <= seconds <= HOLD_S_MAX:
            raise InvalidArgument(
                f"requests cannot be held for {seconds:g} s",
                remedy=f"hold them for 0 to {HOLD_S_MAX:g} s at a time",
            )
        self._held[operator] = self._clock.monotonic() + seconds
        if not seconds:
            for local in self._registry.local_partitions():
                if local.id.operator == operator:
                    self._registry.on_change(local.id)

    def _is_held(self, operator: str) -> bool:
        return self._held.get(operator, 0.0) > self._clock.monotonic() if self._held else False


def not_owned(local: LocalPartition) -> NotOwner:
    return NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=local.id)


def _stuck(run: RunningBatch, error: Interrupted) -> OperatorFailed:
    run.shield()
    return failure("the operator", error, "", operator=run.partition.operator, partition=run.partition.partition)
