"""Applying batches to the partitions owned here: one batch at a time per partition, committed in groups."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from stateflow.errors import (
    DiskFull,
    DiskRefused,
    InvalidArgument,
    NotOwner,
    OperatorFailed,
    OperatorStuck,
    StateDamaged,
    TooFewFiles,
)
from stateflow.metrics.own import OwnFigures
from stateflow.runtime import layout
from stateflow.runtime.encoding import encode
from stateflow.runtime.failures import failure
from stateflow.runtime.groups import GROUP_ROWS, SLOW_US, Group, Member
from stateflow.runtime.hands import Hands
from stateflow.runtime.host import Commit, PartitionHost, Ran
from stateflow.runtime.lease import Lease
from stateflow.runtime.lifecycle import State, Verdict
from stateflow.runtime.outcomes import Answers, Outcome
from stateflow.runtime.passing import until
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.retirement import Retention
from stateflow.runtime.sending import Sender
from stateflow.runtime.shares import Frame, Part, Shares
from stateflow.runtime.slot import Slot
from stateflow.runtime.watchdog import InHand, Interrupted
from stateflow.state import CachePool
from stateflow.storage.faults import meaning
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: longest time for which requests of an operator are held at once, in seconds: the process that holds them may be gone
HOLD_S_MAX = 10.0
T = TypeVar("T")


class _Taken(Exception):
    """The running batch or its group was taken away from this thread. ``told``: outcome of the current part; None:
    no outcome is reported."""

    def __init__(self, told: BaseException | None) -> None:
        self.told = told


class Batches:
    """Applies batches on one replica. Thread-safe. ``hands``: the running batches of all threads.

    Args:
        sender: seals a partition after its running batch, where a fence asked for that meanwhile.
    """

    def __init__(self, registry: PartitionRegistry, lease: Lease, sender: Sender, cache: CachePool) -> None:
        self._registry, self._lease, self._cache = registry, lease, cache
        self.hands = Hands(registry, sender)
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

    def apply(self, shares: Shares, answers: Answers) -> None:
        """Applies a batch to several partitions, in order, and commits them in groups, see
        :mod:`stateflow.runtime.groups`.

        Reports the outcome of each part to ``answers``, errors included, instead of raising. A part that was begun and
        has no outcome was given up, and may be sent again.
        """
        with self.hands.group() as group:
            for number, part in enumerate(shares.parts):
                if not answers.goes_on():
                    break
                answers.begun(number)
                if not self._part(shares, number, part, group, answers):
                    return
                if group.is_full(self._clock.monotonic()):
                    self._commit(group, answers)
            self._commit(group, answers)

    def pass_over(self, frame: Frame) -> list[int]:
        """Lets a batch skip the partitions that need no visit, and returns their places in the frame. Where skipping is
        not possible the list is empty, and the batch visits all partitions."""
        began = self._clock.monotonic()
        if self._is_held(frame.operator) or not self._lease.holds(began, frame.operator):
            return []
        try:
            _, cls = self._registry.operator(frame.operator)
            places = self._registry.passes.pass_over(
                frame.operator,
                cls,
                frame.batch,
                frame.partitions,
                frame.epochs,
                frame.counts,
                began,
                self._clock.now_us(),
            )
        except Exception as error:  # noqa: BLE001 - the first visit meets the same disk error, and reports it
            log.warning("batch %s of %s skips no partitions: %s", frame.batch.number, frame.batch.source, error)
            return []
        self._registry.served_at = now = self._clock.monotonic()
        # the process may have been stopped meanwhile: partitions skipped after the lease lapsed are not reported
        return places if self._lease.holds(now, frame.operator) else []

    def _part(self, shares: Shares, number: int, part: Part, group: Group, answers: Answers) -> bool:
        """Applies one part and reports its outcome, unless it waits for the group's commit. Returns False where the
        group was taken away from this thread."""
        slot = self._registry.look(PartitionId(shares.operator, part.partition))
        try:
            self._lease.check(self._clock.monotonic(), shares.operator)
            outcome = (
                None if self._is_held(shares.operator) else self._admit(slot, shares, number, part, group, answers)
            )
        except _Taken as taken:
            if taken.told is not None:
                answers.told(number, taken.told)
            return False
        except BaseException as error:  # noqa: BLE001 - it is reported
            # handling the error may have to wait, which a thread with an open group must not
            self._commit(group, answers)
            outcome = self._judged(slot, error)
        if not isinstance(outcome, Member):
            answers.told(number, outcome)
        return True

    def _admit(
        self, slot: Slot, shares: Shares, number: int, part: Part, group: Group, answers: Answers
    ) -> Outcome | Member:
        """Applies one part if its partition is served here. Returns its outcome, or its group member where the group
        commits it."""
        with slot.mutex:
            if slot.lost is not None and slot.lifecycle.state is State.ABSENT:
                raise slot.lost
            if slot.lifecycle.state is not State.OWNED:  # perhaps for minutes, while a checkpoint is fetched
                verdict = slot.lifecycle.begin(part.epoch)
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
        host = slot.host
        slow = part.stop - part.start >= GROUP_ROWS or (host is not None and host.operator_us > SLOW_US)
        if slow or group.has(slot) or not slot.work.acquire(0.0):
            self._commit(group, answers)
            slot.work.__enter__()
        outcome: Outcome | Member = None
        try:
            with slot.mutex:
                if slot.stuck is not None:
                    raise slot.stuck.refusal()
                verdict = slot.lifecycle.begin(part.epoch)
            if verdict is not Verdict.SERVE:
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
            outcome = self._run(slot, shares, number, part, group)
            return outcome
        finally:
            if not isinstance(outcome, Member):
                slot.work.release()

    def _run(self, slot: Slot, shares: Shares, number: int, part: Part, group: Group) -> Outcome | Member:
        self._registry.served_at = began = self._clock.monotonic()
        slot.cadence.began(began)
        hand = self.hands.take(slot, began)
        stays = False
        try:
            host = self._host(slot)
            self._take_up(slot, host)
            rows = shares.arrived(part, host.key)
            ran = host.run(shares.batch, rows, self._clock.now_us(), part.after, part.digest, hand)
            slot.traffic.came(part.stop - part.start, shares.row_bytes, shares.batch.site)
            if shares.batch.site_column:
                slot.traffic.came_from(shares.origins(part))
            self._registry.served_at = now = self._clock.monotonic()
            if isinstance(ran, Ran):
                member = Member(number, slot, hand, host, ran)
                if stays := group.add(member):
                    self.hands.put_down(hand)
                    return member
                host.rollback()
                raise _Taken(None)
            slot.cadence.ended(now)
            self._grant(slot, host, now)
            # the process may have been stopped meanwhile: a commit after the lease lapsed is not reported
            self._lease.check(now, slot.id.operator)
            return ran
        except Interrupted as error:
            stuck = _stuck(hand, error)
            raise _Taken(stuck) if hand.taken else stuck from error
        except BaseException as error:
            if hand.taken:
                raise _Taken(error) from error
            raise
        finally:
            if not stays:
                self.hands.end(slot, hand)

    def _commit(self, group: Group, answers: Answers) -> None:
        """Commits the group and reports the outcomes. Does nothing where the group was taken away."""
        members = group.members
        encoded = encode([member.ran.outputs for member in members])
        if not members or not group.begin_commit(members):
            return
        answers.committing()
        members[-1].hand.end_children()
        outcomes: list[tuple[Member, Outcome]] = []
        staged: list[tuple[Member, Commit]] = []
        for member, rows in zip(members, encoded, strict=True):
            try:
                staged.append((member, member.host.stage(member.ran, rows)))
            except BaseException as error:  # noqa: BLE001 - it is reported
                outcomes.append((member, self._ended(member, error)))
        for member, commit in self._logged(staged, outcomes):
            self.hands.take_up(member.hand, self._clock.monotonic())
            try:
                outcome: Outcome = member.host.write(member.ran, commit)
                self._registry.served_at = now = self._clock.monotonic()
                member.slot.cadence.ended(now)
                self._grant(member.slot, member.host, now)
                # the process may have been stopped meanwhile: a commit after the lease lapsed is not reported
                self._lease.check(now, member.slot.id.operator)
            except BaseException as error:  # noqa: BLE001 - it is reported
                outcome = error
            outcomes.append((member, self._ended(member, outcome)))
        group.end_commit()
        for member, outcome in outcomes:
            judged = self._judged(member.slot, outcome) if isinstance(outcome, BaseException) else outcome
            answers.told(member.number, judged)

    def _logged(
        self, staged: list[tuple[Member, Commit]], outcomes: list[tuple[Member, Outcome]]
    ) -> list[tuple[Member, Commit]]:
        """Appends staged commits to the commit log, if there is one, with one durable write. Returns the commits to be
        written to their databases: all of them, or none where the log failed."""
        log = self._registry.commits.log
        if log is None or not staged:
            return staged
        self.hands.take_up(staged[0][0].hand, self._clock.monotonic())
        try:
            log.append([commit.staged.logged for _, commit in staged if commit.staged.logged is not None])
            return staged
        except BaseException as error:  # noqa: BLE001 - it is reported
            for member, _ in staged:
                member.host.rollback()
                outcomes.append((member, self._ended(member, error)))
            return []

    def _ended(self, member: Member, outcome: Outcome) -> Outcome:
        try:
            self.hands.end(member.slot, member.hand)
        except BaseException as error:  # noqa: BLE001 - it is reported
            return error
        finally:
            member.slot.work.release()
        return outcome

    def refusal(self, partition: PartitionId) -> OperatorStuck | None:
        """Returns the error with which a partition's batches are refused since one of them was taken away. None: they
        are not refused."""
        stuck = self._registry.look(partition).stuck
        return None if stuck is None else stuck.refusal()

    def open_source(
        self, partition: PartitionId, source: str, session: layout.Session, settled: int | None = None
    ) -> int:
        """See :meth:`~stateflow.runtime.host.PartitionHost.open_source`. Raises NotOwner, LeaseLost, SourceTaken."""
        return self._beside_batches(partition, lambda host: host.open_source(source, session, settled))

    def retire_source(self, partition: PartitionId, source: str) -> bool:
        """See :meth:`~stateflow.runtime.host.PartitionHost.retire`. Raises NotOwner, LeaseLost."""
        return self._beside_batches(partition, lambda host: host.retire(source))

    def drop_output(self, partition: PartitionId, source: str, batch: int, apply: bool) -> int:
        """See :meth:`~stateflow.runtime.host.PartitionHost.drop_output`. Raises NotOwner, LeaseLost."""
        return self._beside_batches(partition, lambda host: host.drop_output(source, batch, apply))

    def _beside_batches(self, partition: PartitionId, work: Callable[[PartitionHost], T]) -> T:
        """Runs work that commits to a partition and is not a batch."""
        slot = self._registry.look(partition)
        try:
            return self._commit_beside(slot, work)
        except Exception as error:
            self.judge(slot, error)
            raise

    def _commit_beside(self, slot: Slot, work: Callable[[PartitionHost], T]) -> T:
        self._lease.check(self._clock.monotonic(), slot.id.operator)
        if slot.lifecycle.state is not State.OWNED:
            raise not_owned(slot)
        with slot.work:
            with slot.mutex:
                if slot.stuck is not None:
                    raise slot.stuck.refusal()
                serves = slot.lifecycle.state is State.OWNED
                serves = serves and slot.lifecycle.begin(slot.lifecycle.epoch) is Verdict.SERVE
            if not serves:
                raise not_owned(slot)
            hand = self.hands.take(slot, self._clock.monotonic())
            try:
                host = self._host(slot)  # the operator may have to open
                self._take_up(slot, host)
                hand.begin_commit()
                done = work(host)
                self._lease.check(self._clock.monotonic(), slot.id.operator)
                return done
            except Interrupted as error:
                raise _stuck(hand, error) from error
            finally:
                self.hands.end(slot, hand)

    def judge(self, slot: Slot, error: Exception) -> None:
        """Acts on an error of the store, and raises the error it stands for, if that is another one.

        A partition that cannot be read is given up as lost, so that another replica takes it over instead of failing
        again and again. A partition that could not be written is closed and opened again, as its database accepts no
        more writes.
        """
        meant = meaning(error)
        if isinstance(meant, StateDamaged) and meant is not slot.lost:
            meant.located(partition=slot.id)
            self._registry.lose(slot, meant)
        elif isinstance(meant, DiskFull | DiskRefused | TooFewFiles):
            self._registry.close_store(slot)
        if meant is not None and meant is not error:
            raise meant from error

    def _judged(self, slot: Slot, error: BaseException) -> BaseException:
        """Returns the error to report for a part: what :meth:`judge` raises, or else ``error`` itself."""
        if isinstance(error, Exception):
            try:
                self.judge(slot, error)
            except Exception as meant:  # noqa: BLE001 - it is reported
                return meant
        return error

    def evolve(self, slot: Slot) -> None:
        """Evolves a partition's stored states to those declared now, ahead of its first batch, which would do the same.

        Callers hold ``work``. Raises LeaseLost, and what :meth:`~stateflow.runtime.host.PartitionHost.evolve` raises.
        """
        self._lease.check(self._clock.monotonic(), slot.id.operator)
        host = self._host(slot)
        self._take_up(slot, host)
        host.evolve(self._clock.now_us())

    def _take_up(self, slot: Slot, host: PartitionHost) -> None:
        """Stops batches from skipping the partition, and hands it the positions of those that did: they become durable
        in it with its next commit. Callers hold ``work``."""
        self._registry.passes.revoke(slot)
        host.adopt(self._registry.passes.held(slot, host.epoch, host.sequence))

    def _grant(self, slot: Slot, host: PartitionHost, now: float) -> None:
        """Lets following batches skip the partition until a visit is due. Callers hold ``work``, after a batch."""
        self._registry.passes.grant(slot, host, host.needs_no_visit(until(slot.id, now)))

    def _host(self, slot: Slot) -> PartitionHost:
        """Returns the partition's host, with the code that is deployed now; creates it if necessary. Callers hold
        ``work``."""
        spec, cls = self._registry.operator(slot.id.operator)
        if slot.host is not None and not slot.host.runs(cls):
            slot.host.let_go(self._registry.environment.aside)
            slot.host = None
        if slot.host is None:
            slot.host = PartitionHost(
                cls,
                slot.id,
                self._registry.store(slot),
                slot.lifecycle.epoch,
                cached_keys=self._settings.cached_keys,
                cache=self._cache,
                max_value_bytes=self._settings.value_bytes_max,
                log=self._registry.commits.log,
                on_commit=slot.tell,
                clock=self._clock,
                retention=self._retention,
                deployed=partial(self._registry.deployed, slot.id.operator),
                partitions=spec.partitions,
                figures=self.figures,
            )
        return slot.host

    def hold(self, operator: str, seconds: float) -> None:
        """Lets requests of an operator wait for at most so many seconds; 0: lets them go on. Raises InvalidArgument."""
        if not 0 <= seconds <= HOLD_S_MAX:
            raise InvalidArgument(
                f"requests cannot be held for {seconds:g} s",
                remedy=f"hold them for at most {HOLD_S_MAX:g} s at a time",
            )
        self._held[operator] = self._clock.monotonic() + seconds
        if not seconds:
            for slot in self._registry.slots():
                if slot.id.operator == operator:
                    self._registry.on_change(slot.id)

    def _is_held(self, operator: str) -> bool:
        return self._held.get(operator, 0.0) > self._clock.monotonic() if self._held else False


def not_owned(slot: Slot) -> NotOwner:
    return NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=slot.id)


def _stuck(hand: InHand, error: Interrupted) -> OperatorFailed:
    hand.shield()
    return failure("the operator", error, "", operator=hand.partition.operator, partition=hand.partition.partition)
