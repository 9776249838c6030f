"""A replica without its sockets: the partitions one process owns, warms and gives away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    AlreadyDeployed,
    DiskFull,
    DiskRefused,
    InvalidArgument,
    NotOwner,
    OperatorFailed,
    OperatorStuck,
    StateDamaged,
    StateMissing,
    TooFewFiles,
)
from stateflow.runtime import layout
from stateflow.runtime.authority import Authority, Command
from stateflow.runtime.checkpointing import Checkpointer
from stateflow.runtime.dropping import drop
from stateflow.runtime.environment import Environment
from stateflow.runtime.failures import failure
from stateflow.runtime.host import Applied, PartitionHost, is_evolved, read_watermark
from stateflow.runtime.identity import Identity
from stateflow.runtime.known_store import remember
from stateflow.runtime.lease import Lease
from stateflow.runtime.lifecycle import Lifecycle, State, Verdict
from stateflow.runtime.positions import Batch
from stateflow.runtime.reading import At, StateColumns, declaration_of, entries_of
from stateflow.runtime.receiving import Receiver
from stateflow.runtime.recovering import Recovery
from stateflow.runtime.registry import UNFINISHED, PartitionRegistry, Slot
from stateflow.runtime.restoring import Restorer
from stateflow.runtime.retirement import Retention, Retired, SourceView, sources_in
from stateflow.runtime.sending import Sender
from stateflow.runtime.takeover import Successor
from stateflow.runtime.view import PartitionView
from stateflow.runtime.watchdog import InHand, Interrupted
from stateflow.settings import ReplicaSettings
from stateflow.state import CachePool
from stateflow.storage import PartitionStore
from stateflow.storage.faults import meaning
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: a rate says nothing any more when no batch came for so long
RATE_FORGOTTEN_S = 60.0
#: requests of an operator are held for so long at a time: whoever holds them may be gone
HOLD_S_MAX = 10.0
T = TypeVar("T")


class ReplicaNode:
    """Serves batches; ``sender`` and ``receiver`` are its two sides of a move, ``checkpointer`` and ``restorer`` those
    of a checkpoint, ``successor`` its part in a take-over. Called from several threads.

    Args:
        lease: without one it needs no controller to serve.
        recover: at once; else :meth:`recover` is to be called.

    Raises what :class:`~stateflow.runtime.registry.PartitionRegistry` raises for its data directory.
    """

    def __init__(
        self,
        info: ReplicaInfo,
        data_dir: Path,
        settings: ReplicaSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        environment: Environment | None = None,
        lease: Lease | None = None,
        *,
        recover: bool = True,
    ) -> None:
        self.info = info
        self.lease = lease or Lease()
        self.settings = settings or ReplicaSettings()
        self._clock = clock
        self.cache = CachePool(self.settings.cache_bytes)
        self._registry = PartitionRegistry(info, data_dir, self.settings, clock, environment)
        self._recovery = Recovery(self._registry)
        self.lost_some = False
        self._registry.on_lost = self._note_loss
        self.authority = Authority(self._registry.read_term(), self._registry.keep_term, alone=lease is None)
        self.sender = Sender(self._registry, self.authority)
        self.receiver = Receiver(self._registry)
        self.checkpointer = Checkpointer(self._registry)
        self.restorer = Restorer(self._registry, self.authority)
        self.successor = Successor(self._registry, self.lease, self.authority, clock)
        self._retention = Retention(
            round(self.settings.source_idle_s * 1e6),
            self.settings.sources_max,
            self.settings.sources_retired_max,
            round(self.settings.watermark_idle_s * 1e6),
        )
        self._in_hand: dict[int, InHand] = {}  # by thread
        self._held: dict[str, float] = {}  # operator → until, monotonic
        if recover:
            self.recover()

    def recover(self) -> None:
        """Find what the data directory holds. To be called once, before anything else is asked of it."""
        self._recovery.run()

    def give_up_recovery(self) -> None:
        """This process is to end, whatever it has found."""
        self._recovery.give_up()

    def _note_loss(self) -> None:
        """The controller must hear of it: by a registration without that partition."""
        self.lost_some = True

    @property
    def served_at(self) -> float:
        """When a batch was last in hand, monotonic seconds; minus infinity: never."""
        return self._registry.served_at

    def operators(self) -> list[OperatorSpec]:
        """Those it knows."""
        return self._registry.operators()

    @property
    def identity(self) -> Identity:
        """Of its data directory."""
        return self._registry.identity

    def on_change(self, listener: Callable[[PartitionId], None]) -> None:
        """Have ``listener`` called, from any thread, after each change of a partition's lifecycle."""
        self._registry.on_change = listener

    def remember(self, store: CheckpointStore) -> None:
        """Keep checkpoints in this store from now on, and in no other that is there in its place."""
        remember(self._registry.environment, self._registry.root, store)

    # -- operators and partitions -----------------------------------------------------------------------

    def learn(self, spec: OperatorSpec) -> None:
        """Know an operator: load its code and keep its description. Raises OperatorNotImportable."""
        self._registry.learn(spec)

    def check(self, spec: OperatorSpec, total: int) -> None:
        """Could this version of an operator, and so many of its partitions, be here? Nothing is changed. Raises
        OperatorNotImportable, OperatorOutdated, TooFewFiles."""
        self._registry.check(spec)
        self._registry.expect(max(0, total - len(self._here(spec.name))))

    def _here(self, operator: str) -> set[int]:
        """Partitions that have a database here."""
        return {slot.id.partition for slot in self._registry.slots() if slot.id.operator == operator and slot.directory}

    def create(self, spec: OperatorSpec, partitions: Iterable[int], epoch: int, total: int = 0) -> None:
        """Empty partitions owned from ``epoch`` on. Those that are there already at this epoch stay as they are.

        Args:
            total: so many partitions of the operator are to be here in the end.

        Raises TooFewFiles, before anything is created.
        """
        self.learn(spec)
        partitions = list(partitions)
        here = self._here(spec.name)
        self._registry.expect(max(len(set(partitions) - here), total - len(here)))
        for number in partitions:
            slot = self._registry.slot(PartitionId(spec.name, number))
            with slot.work, slot.mutex:
                if slot.lifecycle.state is State.OWNED and slot.lifecycle.epoch == epoch:
                    continue
                if slot.lifecycle.state is State.ABSENT and self._registry.evidence.has(spec.name, slot.home.name):
                    raise StateMissing(
                        "the partition was here, and what is left of it was put aside",
                        remedy="restore it from a checkpoint; to begin empty, remove the evidence first",
                        partition=slot.id,
                        replica=self.info.name,
                    )
                if slot.lifecycle.state is not State.ABSENT or slot.lifecycle.epoch >= epoch:
                    raise AlreadyDeployed(
                        "the partition is here already",
                        remedy="use another operator name or data directory",
                        partition=slot.id,
                        epoch=slot.lifecycle.epoch,
                    )
                slot.directory = slot.home / f"created-{epoch}"
                slot.directory.mkdir(parents=True, exist_ok=True)
                (slot.directory / UNFINISHED).write_bytes(b"")  # cut short, it is created again …
                self._registry.environment.sync([slot.directory])  # … which a loss of power may not make it forget
                slot.store = self._registry.environment.open(slot.directory, create=True)
                self._registry.environment.sync([slot.home, slot.home.parent])
                ownership = layout.Ownership(self.info.name, State.OWNED, epoch)
                slot.store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
                (slot.directory / UNFINISHED).unlink()
                self._registry.environment.sync([slot.directory])
                slot.lifecycle.create(epoch)
            self._registry.on_change(slot.id)

    def drop(self, operator: str, epoch: int) -> int:
        """See :func:`~stateflow.runtime.dropping.drop`."""
        return drop(self._registry, operator, epoch)

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """What this replica holds of a partition. To be read, not changed."""
        return self._registry.look(partition).lifecycle

    def begin_session(self, command: Command, adopted: str = "") -> None:
        """Obey this controller, in this session. What was asked for in an earlier one is refused from now on, or done
        when this returns. Raises StaleTerm, ForeignLedger."""
        self.authority.obey(command, adopted)
        for slot in self._registry.slots():
            with slot.mutex:
                pass

    def inventory(self) -> Iterator[tuple[Lifecycle, int]]:
        """(lifecycle, sequence) of every partition that is here in some form."""
        for slot in self._registry.slots():
            if slot.lifecycle.state is not State.ABSENT:
                yield slot.lifecycle, slot.host.sequence if slot.host else 0

    def view(self, partition: PartitionId, *, size: bool = False) -> PartitionView:
        """What this replica says of a partition."""
        lifecycle = self.lifecycle(partition)
        return PartitionView(
            partition,
            lifecycle.state,
            lifecycle.epoch,
            self.sequence(partition),
            lifecycle.move_id,
            self.batch_rate(partition),
            self.bytes_on_disk(partition) if size else 0,
        )

    def views(self, *, sizes: bool = False) -> list[PartitionView]:
        """Of every partition that is here in some form."""
        return [self.view(lifecycle.partition, size=sizes) for lifecycle, _ in self.inventory()]

    @property
    def is_empty(self) -> bool:
        """Is nothing here of any partition, served or put aside?"""
        return next(self.inventory(), None) is None and not self._registry.evidence.any

    def quiet_in(self, partition: PartitionId, pause_s: float) -> float:
        """How long a fence that costs ``pause_s`` should wait for the next commit, seconds; 0: fence now."""
        return self._registry.look(partition).cadence.wait_s(self._clock.monotonic(), pause_s)

    def batch_rate(self, partition: PartitionId) -> float:
        """Batches a second, as averaged while they came."""
        cadence = self._registry.look(partition).cadence
        return cadence.rate if self._clock.monotonic() - cadence.began_at < RATE_FORGOTTEN_S else 0.0

    def bytes_on_disk(self, partition: PartitionId) -> int:
        directory = self._registry.look(partition).directory
        if directory is None or not directory.is_dir():
            return 0
        return sum(path.stat().st_size for path in directory.iterdir() if path.name.endswith(".sst"))

    def sequence(self, partition: PartitionId) -> int:
        """Of the last commit, as far as the partition is at work here; else 0."""
        host = self._registry.look(partition).host
        return host.sequence if host else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            (
                slot.id
                for slot in self._registry.slots()
                if slot.lifecycle.state in (State.OWNED, State.FENCING) and operator in (None, slot.id.operator)
            ),
            key=lambda partition: (partition.operator, partition.partition),
        )

    def hold(self, operator: str, seconds: float) -> None:
        """Let requests of an operator wait, for so long at most; 0: go on. Raises InvalidArgument."""
        if not 0 <= seconds <= HOLD_S_MAX:
            raise InvalidArgument(
                f"requests cannot be held for {seconds:g} s",
                remedy=f"hold them for {HOLD_S_MAX:g} s at most, and again",
            )
        self._held[operator] = self._clock.monotonic() + seconds
        if not seconds:
            for slot in self._registry.slots():
                if slot.id.operator == operator:
                    self._registry.on_change(slot.id)

    def _is_held(self, operator: str) -> bool:
        return self._held.get(operator, 0.0) > self._clock.monotonic() if self._held else False

    def cancel(self, partition: PartitionId, move_id: str, owned_at: int = 0) -> bool:
        """Neither send nor receive this move any more. False: it has sealed here and goes forward.

        ``owned_at``: see :meth:`~stateflow.runtime.lifecycle.Lifecycle.cancel`. Raises StateMissing.
        """
        possible = self.sender.cancel(
            partition, move_id, owned_at
        )  # first, so that a prepare that comes late is refused …
        self.receiver.abandon(partition, move_id)  # … and one that came before is undone
        return possible

    # -- records ------------------------------------------------------------------------------------------

    def apply(
        self,
        partition: PartitionId,
        epoch: int,
        batch: Batch,
        input_schema: bytes,
        rows: bytes,
        after: int | None = None,
    ) -> Applied | ReplicaInfo | None:
        """Apply a batch to one partition.

        Returns what was applied; or the replica the partition went to; or None: it is on its way here, ask
        again after the next ``on_change``. Raises LeaseLost, and what is wrong with sender, rows or operator.
        ``after``: see :meth:`~stateflow.runtime.host.PartitionHost.apply`.
        """
        slot = self._registry.look(partition)
        self.lease.check(self._clock.monotonic())
        if self._is_held(partition.operator):
            return None
        try:
            return self._apply(slot, epoch, batch, input_schema, rows, after)
        except Exception as error:
            self._judge(slot, error)
            raise

    def _apply(
        self, slot: Slot, epoch: int, batch: Batch, input_schema: bytes, rows: bytes, after: int | None
    ) -> Applied | ReplicaInfo | None:
        with slot.mutex:
            if slot.lost is not None and slot.lifecycle.state is State.ABSENT:
                raise slot.lost
            if slot.lifecycle.state is not State.OWNED:  # perhaps for the minutes that a checkpoint is fetched for it
                verdict = slot.lifecycle.begin(epoch)
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
        with slot.work:
            with slot.mutex:
                if slot.stuck is not None:
                    raise slot.stuck.refusal()
                verdict = slot.lifecycle.begin(epoch)
            if verdict is not Verdict.SERVE:
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
            self._registry.served_at = began = self._clock.monotonic()
            slot.cadence.began(began)
            hand = self._take_in_hand(slot, began)
            try:
                applied = self._host(slot).apply(batch, input_schema, rows, self._clock.now_us(), after, hand)
                now = self._clock.monotonic()
                slot.cadence.ended(now)
                self._registry.served_at = now
                # the process may have been stopped meanwhile: what was committed after the lease is not said
                self.lease.check(now)
                return applied
            except Interrupted as error:
                raise _stuck(hand, error) from error
            finally:
                self._end(slot, hand)

    def _take_in_hand(self, slot: Slot, began: float) -> InHand:
        hand = InHand(slot.id, began)
        self._in_hand[hand.thread] = hand
        return hand

    def _end(self, slot: Slot, hand: InHand) -> None:
        del self._in_hand[hand.thread]
        if hand.end():
            with slot.mutex:
                if hand.interrupted and slot.host is not None:
                    slot.host.discard()
                    slot.host = None
                sealing = slot.lifecycle.finish()
                if slot.host is not None and slot.host.is_unsure:
                    # what is on disk is read anew, and followers begin anew: they may not have been told of all of it
                    self._registry.close_store(slot)
                if sealing:
                    self.sender.seal(slot)
            return
        with slot.mutex:  # it was taken away, and comes back at last
            if hand.host is not None:
                hand.host.discard()
            if slot.stuck is hand:
                slot.stuck = None
        log.warning("%s is served again: its operator came back", slot.id)
        self._registry.on_change(slot.id)

    def in_hand(self) -> list[InHand]:
        """Batches that are being worked on."""
        return [hand for hand in list(self._in_hand.values()) if not hand.left]

    @property
    def is_stuck(self) -> bool:
        """Does a thread work on a batch that was given up?"""
        return any(hand.left for hand in list(self._in_hand.values()))

    def refusal(self, partition: PartitionId) -> OperatorStuck | None:
        """Why a partition's batches are refused, since one of them was taken away; None: they are not."""
        stuck = self._registry.look(partition).stuck
        return None if stuck is None else stuck.refusal()

    def overdue(self, limit_s: float) -> InHand | None:
        """A batch that has been in hand for longer than that."""
        before = self._clock.monotonic() - limit_s
        return next((hand for hand in self.in_hand() if hand.began < before), None)

    def take_away(self, hand: InHand) -> bool:
        """Give a batch up that cannot be interrupted: it never commits, and its partition is not served here before its
        thread comes back. It may move away, be checkpointed, and taken over, as it was before the batch. False: it has
        ended, or is just being committed."""
        slot = self._registry.slot(hand.partition)
        with slot.mutex:
            if not hand.take_away():
                return False
            slot.stuck, hand.host, slot.host = hand, slot.host, None
            slot.work.take_away()
            if slot.lifecycle.finish():
                self.sender.seal(slot)
        self._registry.on_change(slot.id)
        return True

    def open_source(self, partition: PartitionId, source: str, session: layout.Session) -> None:
        """See :meth:`~stateflow.runtime.host.PartitionHost.open_source`. Raises NotOwner, LeaseLost, SourceTaken."""
        self._beside_batches(partition, lambda host: host.open_source(source, session))

    def retire_source(self, partition: PartitionId, source: str) -> bool:
        """See :meth:`~stateflow.runtime.host.PartitionHost.retire`. Raises NotOwner, LeaseLost."""
        return self._beside_batches(partition, lambda host: host.retire(source))

    def _beside_batches(self, partition: PartitionId, work: Callable[[PartitionHost], T]) -> T:
        """What commits to a partition and is no batch."""
        slot = self._registry.look(partition)
        try:
            return self._commit_beside(slot, work)
        except Exception as error:
            self._judge(slot, error)
            raise

    def _commit_beside(self, slot: Slot, work: Callable[[PartitionHost], T]) -> T:
        self.lease.check(self._clock.monotonic())
        if slot.lifecycle.state is not State.OWNED:
            raise self._not_owned(slot)
        with slot.work:
            with slot.mutex:
                if slot.stuck is not None:
                    raise slot.stuck.refusal()
                serves = slot.lifecycle.state is State.OWNED
                serves = serves and slot.lifecycle.begin(slot.lifecycle.epoch) is Verdict.SERVE
            if not serves:
                raise self._not_owned(slot)
            hand = self._take_in_hand(slot, self._clock.monotonic())
            try:
                host = self._host(slot)  # the operator may have to open
                hand.begin_commit()
                done = work(host)
                self.lease.check(self._clock.monotonic())
                return done
            except Interrupted as error:
                raise _stuck(hand, error) from error
            finally:
                self._end(slot, hand)

    @staticmethod
    def _not_owned(slot: Slot) -> NotOwner:
        return NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=slot.id)

    def _judge(self, slot: Slot, error: Exception) -> None:
        """Raises what ``error`` means, if that is something else. A partition that cannot be read is lost: it goes to
        another owner, rather than to fail again and again. One that could not be written is opened anew: its database
        takes no more writes."""
        meant = meaning(error)
        if isinstance(meant, StateDamaged) and meant is not slot.lost:
            meant.located(partition=slot.id)
            self._registry.lose(slot, meant)
        elif isinstance(meant, DiskFull | DiskRefused | TooFewFiles):
            self._registry.close_store(slot)
        if meant is not None and meant is not error:
            raise meant from error

    def _host(self, slot: Slot) -> PartitionHost:
        """At work, with the code that is deployed by now. Called with ``work`` held."""
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
                cached_keys=self.settings.cached_keys,
                cache=self.cache,
                max_value_bytes=self.settings.value_bytes_max,
                sync=self.settings.acknowledge != "wal",
                on_commit=partial(self._committed, slot),
                clock=self._clock,
                retention=self._retention,
                deployed=partial(self._registry.deployed, slot.id.operator),
                partitions=spec.partitions,
            )
        return slot.host

    @staticmethod
    def _committed(slot: Slot, sequence: int, encode: Callable[[], bytes]) -> None:
        followers = list(slot.logs.values())
        if slot.since is not None:
            if slot.since.changes.overflowed:
                slot.since = None
            else:
                followers.append(slot.since.changes)
        if followers:
            change_set = encode()
            for follower in followers:
                follower.append(sequence, change_set)

    # -- reading ------------------------------------------------------------------------------------------

    def scan(
        self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()
    ) -> Iterator[tuple[object, object, object]]:
        """(key, entry key or None, value) of one state, as of one moment, without what has expired by then. Raises
        UnknownState, NotOwner.

        Args:
            keys: as they are stored; none: all.
        """
        store = self._owned_store(partition)  # first: one that has lost its data knows no operator either
        _, cls = self._registry.operator(partition.operator)
        declaration = declaration_of(cls, state, partition.operator)
        if not is_evolved(cls, store, self._registry.deployed(partition.operator)):
            store = self._evolved(partition)
        host = self._registry.slot(partition).host
        latest_us = 0 if host is None else host.latest_us  # time does not go back: what is gone stays gone
        at = At(max(self._clock.now_us(), latest_us), read_watermark(store))
        try:
            yield from entries_of(declaration, store, at, keys)
        except Exception as error:
            self._owned_store(partition)  # it left in the middle: NotOwner says it better
            self._judge(self._registry.slot(partition), error)
            raise

    def scan_pages(self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()) -> Iterator[list[bytes]]:
        """The same as Arrow IPC streams, see :class:`~stateflow.runtime.reading.StateColumns`."""
        self._owned_store(partition)
        _, cls = self._registry.operator(partition.operator)
        columns = StateColumns(cls, state, partition.operator)
        yield from columns.pages(self.scan(partition, state, keys), partition.partition)

    def _evolved(self, partition: PartitionId) -> PartitionStore:
        """Its states as they are declared now, which else its first batch would see to. Raises what that raises."""
        slot = self._registry.slot(partition)
        with slot.work:
            self.lease.check(self._clock.monotonic())
            self._owned_store(partition)
            self._host(slot).evolve(self._clock.now_us())
            return self._owned_store(partition)

    def whole_before(self, operator: str, partitions: Iterable[int], source: str, batch: int) -> layout.Position | None:
        """The batch before ``batch``, where all these partitions contain it, with the newest event time up to it. From
        memory: None also where one of them is not at work here."""
        times: list[int] = []
        for number in partitions:
            slot = self._registry.slot(PartitionId(operator, number))
            reached = slot.host.reached(source) if slot.host is not None else None
            if reached is None or reached.batch < batch - 1 or slot.lifecycle.state is not State.OWNED:
                return None
            event_us = reached.event_us if reached.batch < batch else reached.event_before_us
            if event_us is not None:
                times.append(event_us)
        return layout.Position(batch - 1, event_us=max(times, default=None))

    def position(self, partition: PartitionId, source: str) -> layout.Position | None:
        """How far ``source`` has come in the partition. Raises NotOwner."""
        store = self._owned_store(partition)
        stored = store.get(layout.POSITION + source.encode())
        if stored is not None:
            return layout.Position.decode(stored)
        retired = store.get(layout.RETIRED + source.encode())
        contained = None if retired is None else Retired.decode(retired).position
        return None if contained is None or contained.batch < 0 else contained

    def sources(self, partition: PartitionId) -> list[SourceView]:
        """Whoever has sent to a partition, as far as it is known. Raises NotOwner."""
        return sources_in(self._owned_store(partition))

    def _owned_store(self, partition: PartitionId) -> PartitionStore:
        slot = self._registry.look(partition)
        if slot.lifecycle.state is not State.OWNED:
            raise slot.lost or NotOwner(
                "the partition is not owned here", remedy="refresh the assignment", partition=partition
            )
        try:
            return self._registry.store(slot)
        except StateDamaged as error:
            self._judge(slot, error)
            raise

    def close(self) -> None:
        self._registry.close()


def _stuck(hand: InHand, error: Interrupted) -> OperatorFailed:
    hand.shield()
    return failure("the operator", error, "", operator=hand.partition.operator, partition=hand.partition.partition)
