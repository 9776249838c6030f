"""Decides what the client of a sparse source sends, and repairs batches that partitions lost. Sans-io.

Generators yield steps (:class:`Open`, :class:`Look`, :class:`SameOperator`, :class:`Deliver`). A driver performs each
step, and sends its result, or throws its error, into the generator (:func:`perform`). So threads with sockets and a
simulation run the same decisions.

:class:`Delivery` sends to all partitions of an operator, :class:`PartitionSender` from an outbox to one of them.
Callers open a ``Delivery`` first, and run one of its generators at a time.

A new batch that fails is *in doubt*: some partitions may contain it. It is finished before any other batch is sent,
unless it was refused for its content, or the caller numbers its batches. If other batches follow while some partition
may contain the failed batch, it is *left*. If its rows are sent again, the caller gets the stored outputs; if these are
gone, the rows are sent again under the batch's number.

A partition that lacks an earlier batch refuses a batch with PositionGap. The delivery then asks all partitions what
they contain, sends the lost batches again in order, and repeats the refused batch (``history`` says what to send).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stateflow.client.history import LOGGED_MAX, History, Sent
from stateflow.client.outbox import Base, Part
from stateflow.errors import (
    BadCertificate,
    CodeRefused,
    DecodeError,
    InsecureRefused,
    InvalidArgument,
    LocalMisuse,
    OperatorNotDeployed,
    OperatorNotImportable,
    OperatorOutdated,
    OutboxOvertaken,
    OutOfMemory,
    PositionGap,
    SchemaMismatch,
    SourceRetired,
    SourceTaken,
    StaleBatch,
    StateflowError,
)
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import Batch
from stateflow.rpc.apply import BatchRows

log = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")
#: maximum number of times that one call sends lost batches again; partitions may lose more while it does
REWINDS_MAX = 10
#: maximum number of times that a client proposes a newer session, because a partition knows a newer one than proposed
OPENS_MAX = 1000
#: maximum number of batches between a failed batch and an attempt to send it again
AGAIN_MAX = 1000
#: maximum number of failed batches whose outputs are kept for callers that send the rows again
OUTPUTS_MAX = 16
#: maximum number of internal errors of replicas after which an outbox sends a batch again; with its pauses, about 30 s
FAULTS_MAX = 10
#: position of a partition to which no number was ever sent
NOTHING = Position(-1)


@dataclass(frozen=True, slots=True)
class Open:
    """Step that makes all partitions refuse clients older than ``session``.

    Result: partition → its position, or SourceTaken. ``settled``: number of the batch up to which outputs are no longer
    needed, for a source whose outputs are kept.
    """

    session: Session
    settled: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """Step that asks for the positions of all partitions, as any client may. Result: partition → its position."""


@dataclass(frozen=True, slots=True)
class SameOperator:
    """Step that checks that the client's operator was not deployed anew. Raises OperatorOutdated if it was."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Step that delivers a batch. Result: the outputs by partition once all have committed, or the first refusal.

    ``after``: partition → newest batch that it must already contain.
    """

    batch: Batch
    rows: BatchRows
    after: Mapping[int, int]


Step: TypeAlias = Open | Look | SameOperator | Deliver
Steps: TypeAlias = Generator[Step, Any, T]


class Asked(NamedTuple):
    """Rows and watermark that a caller asked to apply. Equal content means the same batch."""

    rows: BatchRows
    watermark_us: int | None

    @property
    def digest(self) -> tuple[bytes, int | None]:
        return self.rows.digest, self.watermark_us


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The batch that failed last, which some partitions may contain. ``refused``: another attempt would fail, too."""

    asked: Asked
    sent: Sent
    refused: bool


class _Left(NamedTuple):
    """A failed batch that was followed by others; the failure was reported to its caller.

    ``outputs``: outputs of the batch, which has been applied since. None: it is unknown which partitions contain the
    batch, or its outputs are gone.
    """

    number: int
    outputs: Mapping[int, bytes] | None


def perform(steps: Generator[S, Any, T], do: Callable[[S], Any]) -> T:
    """Runs ``steps`` to their end, and performs each with ``do``. Raises the error of the steps."""
    try:
        step = next(steps)
        while True:
            try:
                came = do(step)
            except BaseException as error:  # noqa: BLE001 - also Ctrl-C: the batch may be sent again
                step = steps.throw(error)
            else:
                step = steps.send(came)
    except StopIteration as end:
        value: T = end.value
        return value


class Delivery:
    """Client of one source: numbers batches, delivers them, and repairs losses.

    Args:
        session: proposed session; if a former client's clock was ahead, a newer session than that client's is used.
        acknowledged: returns the newest acknowledged batch that the application knows of; called when no predecessor
            can receive another acknowledgement.
        settled: see :class:`Open`.
    """

    def __init__(
        self,
        history: History,
        session: Session,
        acknowledged: Callable[[], int | None],
        settled: int | None = None,
    ) -> None:
        self.history, self.session = history, session
        self._acknowledged, self._settled = acknowledged, settled
        self._watermark_us: int | None = None
        self._refused = False  # a partition lacks a batch, and not all partitions have been asked since
        self._rewinds = False  # the last batch was part of a rewind by hand
        self._promised_us: int | None = None  # the watermark before the rewind
        self._used = -1  # the newest number that was sent, with or without success
        self._doubt: _Doubt | None = None
        self._left: dict[tuple[bytes, int | None], _Left] = {}  # digest of a request → batch

    def open(self) -> Steps[None]:
        """Becomes the newest client of the source at every partition.

        Raises SourceTaken if partitions name ever newer clients.
        """
        for attempt in itertools.count(1):
            try:
                found = yield Open(self.session, self._settled)
            except SourceTaken as taken:
                if attempt == OPENS_MAX:
                    raise
                self.session = Session(int(taken.where["generation_us"]) + 1, self.session.id)
            else:
                known = [position.known for position in found.values() if position.known]
                self.history.resume(_contained(found), known, self._acknowledged())
                return

    def deliver(
        self,
        rows: BatchRows,
        sequence: int | None,
        rewind: bool,
        watermark_us: int | None,
        read: Callable[[Mapping[int, bytes]], T],
    ) -> Steps[T]:
        """Delivers one batch, and returns the result of ``read`` for its outputs.

        If ``read`` raises, the batch counts as failed, because its caller has not seen the outputs.

        A caller that numbers its batches (``sequence``) decides their order. Otherwise a failed batch is repeated
        before any other is sent, under its number: a partition knows only its newest batch, and could not tell later
        whether it contains the failed one. A batch that is refused for its content would hold up all others, so it is
        skipped. If some partition contains its rows, it keeps its number, so that no partition applies it twice.
        """
        if rewind and sequence is None:
            raise InvalidArgument("a rewind needs the number of each batch", remedy="pass sequence=")
        asked, left, batch = Asked(rows, watermark_us), None, None
        if sequence is None:
            left = self._left.get(asked.digest) if self._left else None
            if left is not None and self.history.position - left.number > AGAIN_MAX:
                left = None  # equal rows by chance, but another batch
            if left is not None and left.outputs is not None:
                result = read(left.outputs)
                del self._left[asked.digest]
                return result
            if self._doubt is not None and self._doubt.asked != asked:
                yield from self._finish(self._doubt)
            if self._doubt is not None:
                batch = self._doubt.sent
            sequence = max(self.history.position, self._used) + 1 if left is None else left.number
        number = sequence if batch is None else batch.number
        yield from self._prepare(number, rewind)
        self._watermark_us = watermark_us if watermark_us is not None else self._watermark_us
        batch = batch or Sent(number, rows, self._watermark_us)
        new = not rewind and left is None and self.history.lacks(batch)
        self._used = max(self._used, number)
        try:
            result = read((yield from self._applied(batch, rewind)))
        except BaseException as error:
            if new:
                self._put_in_doubt(_Doubt(asked, batch, is_hopeless(error)))
            if left is not None and isinstance(error, StaleBatch):
                raise self._overtaken(number) from error
            raise
        self._ended(asked, number, rewind)
        return result

    def verify(self) -> Steps[None]:
        """Asks partitions for their positions, and sends lost batches again.

        Raises SourceTaken, and PositionGap if lost batches are no longer kept.
        """
        yield from self._ask()
        yield from self._mend()

    def accept_loss(self) -> Steps[int | None]:
        """Gives up lost batches. Returns the oldest of them; None: nothing was lost."""
        yield from self._ask()
        if self.history.taken:  # another client's batches may have these numbers
            self._doubt = None
            self._left.clear()
        return self.history.accept_loss()

    def let_go(self) -> None:
        """Drops the kept rows and outputs. Call it when no more batches will be sent."""
        self.history.let_go()
        self._doubt = None
        self._left.clear()

    # -- batches that failed -------------------------------------------------------------------------------

    def _finish(self, doubt: _Doubt) -> Steps[None]:
        """Finishes the failed batch, so that others may follow.

        Raises the error that prevents it, unless the batch is refused for its content.
        """
        number = doubt.sent.number
        if not doubt.refused:
            try:
                yield from self._prepare(number, False)
                outputs = yield from self._applied(doubt.sent, False)
            except StateflowError as error:
                if not is_hopeless(error):
                    error.located(unfinished_batch=number)
                    raise
                self._doubt = replace(doubt, refused=True)
            else:
                self._leave(doubt, outputs)
                self._doubt = None
                return
        try:
            contained = _contained((yield Look()))
        except StateflowError:  # an unreachable partition must hold up no other: it may contain the batch
            contained = dict.fromkeys(doubt.sent.rows, number)
        if any(contained.get(partition, -1) >= number for partition in doubt.sent.rows):
            self._leave(doubt, None)
        self._doubt = None

    def _put_in_doubt(self, doubt: _Doubt) -> None:
        before, self._doubt = self._doubt, doubt
        if before is not None and before.asked != doubt.asked:  # the caller numbered the batch after it
            self._leave(before, None)

    def _leave(self, doubt: _Doubt, outputs: Mapping[int, bytes] | None) -> None:
        self._left[doubt.asked.digest] = _Left(doubt.sent.number, outputs)
        for each in [each for each, left in self._left.items() if left.outputs is not None][:-OUTPUTS_MAX]:
            self._left[each] = self._left[each]._replace(outputs=None)
        while len(self._left) > LOGGED_MAX:
            del self._left[next(iter(self._left))]

    def _ended(self, asked: Asked, number: int, rewind: bool) -> None:
        """Forgets the failed batches that the applied batch ``number`` replaces.

        The applied batch replaces a failed batch with the same number (whose rows the caller may have corrected), and
        one with the same content.
        """
        if self._doubt is not None and (self._doubt.sent.number == number or self._doubt.asked == asked):
            self._doubt = None
        if self._left and not rewind:  # in a rewind partitions may skip a batch that they lack
            self._left.pop(asked.digest, None)
            self._left = {each: left for each, left in self._left.items() if left.number != number}

    def _overtaken(self, number: int) -> StaleBatch:
        return StaleBatch(
            f"these rows failed as batch {number}; some or all partitions applied it, and later batches followed",
            remedy="resend only what the state lacks, or pass sequence= to apply all rows again",
            operator=self.history.operator,
            source=self.history.source,
            batch=number,
        )

    def _prepare(self, number: int, rewind: bool) -> Steps[None]:
        """Repairs losses before batch ``number``. Raises PositionGap if the caller must send other batches first."""
        if rewind:
            if self._refused or not self._rewinds:
                yield from self._ask()  # the answers tell where the rewind begins
            if not self._rewinds:
                self._promised_us, self._watermark_us = self._watermark_us, None  # promised after the rewound batches
            self._rewinds = True
            self.history.rewinding(number)
            return
        if self._rewinds:
            promised = [each for each in (self._promised_us, self._watermark_us) if each is not None]
            self._rewinds, self._watermark_us = False, max(promised, default=None)
        if self._refused or self.history.incomplete:
            yield from self._ask()
            if not self.history.finishes(number):
                yield from self._mend()

    def _applied(self, batch: Sent, rewind: bool) -> Steps[dict[int, bytes]]:
        """Delivers a batch, and returns its outputs. Earlier batches that partitions lost are sent first."""
        for left in reversed(range(REWINDS_MAX)):
            try:
                return (yield from self._sent(batch, rewind))
            except PositionGap:
                if not left:
                    raise
                yield from self._ask()
                yield from self._mend()
        raise AssertionError

    def _mend(self) -> Steps[None]:
        """Sends again the batches that partitions are known to have lost.

        Raises PositionGap if they are no longer kept, and OperatorOutdated if no partition has a batch because another
        operator was deployed under the name: its state begins empty, and must not get the former operator's rows.
        """
        if self.history.incomplete and max(self.history.contained) < 0:
            yield SameOperator()
        for left in reversed(range(REWINDS_MAX)):
            missing = self.history.missing()
            if not missing:
                return
            log.warning(
                "partitions of operator %s lost acknowledged batches of source %s: resending %d batches, from %d on",
                self.history.operator,
                self.history.source,
                len(missing),
                missing[0].number,
            )
            try:
                for batch in missing:
                    yield from self._sent(batch, True)
            except PositionGap:  # partitions have lost more in between
                if not left:
                    raise
                yield from self._ask()

    def _sent(self, sent: Sent, rewind: bool) -> Steps[dict[int, bytes]]:
        number, parts = sent.number, sent.rows
        known = self.history.known(self.session, number, parts)
        batch = Batch(
            self.history.source,
            number,
            sparse=True,
            watermark_us=sent.watermark_us,
            rewind=rewind,
            session=self.session,
            known=known,
        )
        after = self.history.after(number, parts, rewind)
        outputs: dict[int, bytes] = {}
        if parts:
            try:
                outputs = yield Deliver(batch, parts, after)
            except PositionGap:
                self._refused = True
                raise
        self.history.acknowledged(sent)
        return outputs

    def _ask(self) -> Steps[None]:
        """Asks all partitions for their positions, and remains their newest client.

        A client with a successor gets SourceTaken, so that it does not mistake the successor's batches for its own.
        """
        self._refused = True  # until all have answered: the others may not know this client
        found = yield Open(self.session, self._settled)
        others = {p for p, position in found.items() if position.client not in ("", self.session.id)}
        self.history.heard(_contained(found), others)
        self._refused = False


def is_hopeless(error: BaseException, faults: int | None = None) -> bool:
    """Tells whether a batch is refused for its content, so that sending it again would fail again.

    Other failures depend on the replica to which the batch was sent, or on this process's right to send. An internal
    error of a replica, or one with an unknown code, counts as caused by the batch after ``FAULTS_MAX`` of them.

    If stored values cannot be read, or the operator failed before it got the batch (the error then has a ``cause``),
    other rows would fail, too. A caller sees the error and decides. An outbox waits until state or operator are mended.

    Args:
        faults: number of earlier internal errors for a batch of an outbox; None: a caller sees each error.
    """
    of_code = OperatorNotDeployed | OperatorNotImportable | OperatorOutdated | CodeRefused
    if isinstance(error, of_code | BadCertificate | InsecureRefused):
        return False
    if isinstance(error, SchemaMismatch) and "column" not in error.where:  # stored states differ, not the rows' keys
        return False
    if faults is not None and (isinstance(error, DecodeError) or "cause" in getattr(error, "where", ())):
        return False
    of_rows = isinstance(error, LocalMisuse | StaleBatch | SourceRetired | OutOfMemory)
    return of_rows or (type(error) is StateflowError and (faults is None or faults >= FAULTS_MAX))


def _contained(found: Mapping[int, Position]) -> dict[int, int]:
    """Returns partition → last batch it contains."""
    return {partition: position.batch for partition, position in found.items()}


# -- From an outbox to one partition ---------------------------------------------------------------------------------


class PartitionSender:
    """Sender from an outbox to one partition, which decides under which number each batch is sent.

    The outbox numbers its batches. At a partition these numbers are shifted, to follow the batches that other clients
    had sent to it before. So a new outbox may continue an existing source, and its rows are never mistaken for other
    clients' rows. A partition reports which client sent its newest batch:

    * If it was a client of this outbox, the partition contains all of the outbox's batches up to that one.
    * If it was another client, the outbox numbers the batches that it has never sent so that they follow that batch.
      For batches that it may have sent, nothing shows any longer whether the partition contains them, and a person has
      to decide.

    Each partition has a :class:`Delivery` of its own, so that an unreachable partition holds up no other.

    Args:
        history: history of this partition only.
        base: the offset of numbers, as stored in the outbox. After :meth:`open`, the caller stores the new ``base``
            before anything is sent.
        mine: ids of this outbox's clients, including former clients.
        newest: newest number in the outbox when this client was created.
    """

    def __init__(
        self, partition: int, history: History, session: Session, base: Base, mine: Collection[str], newest: int
    ) -> None:
        self.partition, self.base = partition, base
        self._history, self._mine = history, mine
        self._delivery = Delivery(history, session, lambda: None)
        self._newest = newest
        self._opened = False
        self._contained = -1  # newest number that the partition contained when it was opened

    @property
    def is_open(self) -> bool:
        return self._opened

    def open(self, first: Part) -> Steps[None]:
        """Makes the partition refuse older clients of the source, and finds out what it contains.

        Args:
            first: the first part that the partition may lack.

        Raises PositionGap if the partition lost batches that it had acknowledged, OutboxOvertaken, SourceTaken.
        """
        if self._opened:
            return
        yield from self._delivery.open()
        found = yield Look()
        position = found.get(self.partition, NOTHING)
        ahead, acknowledged = self.base
        if position.batch < 0 or position.client in self._mine:
            if ahead is None:
                ahead = 0
            if position.batch > self._newest + ahead:
                raise self._overtaken(first, "it contains more than this outbox sent, so the outbox is an older copy")
            if position.batch < acknowledged + ahead:
                raise self._lost(position.batch + 1 - ahead)
        elif ahead is None or position.batch >= first.number + ahead:
            if first.attempted and ahead is not None:
                raise self._overtaken(
                    first, f"another client sent up to {position.batch} after this batch may have been sent"
                )
            ahead = position.batch + 1 - first.number
        self.base = Base(ahead, acknowledged)
        self._contained, self._opened = position.batch, True

    def send(self, part: Part) -> Steps[bytes]:
        """Sends a part to an open partition, and returns its output. Raises the error of a partition that refuses it.

        If the partition contains the batch, but no longer its output, the output is ``b""``.
        """
        ahead = self.base.ahead
        assert ahead is not None
        number = part.number + ahead
        if number < self._contained:
            return b""
        try:
            outputs = yield from self._delivery.deliver(part.rows, number, False, part.watermark_us, dict)
        except SourceRetired:
            if self._history.contained != [number]:
                raise
            outputs = {self.partition: b""}  # applied before the source was retired: not refused
        self.base = Base(ahead, part.number)
        return outputs[self.partition]

    def accept_loss(self) -> Steps[None]:
        """Gives up the batches that the partition lost."""
        yield from self._delivery.open()
        found = yield Look()
        batch = found.get(self.partition, NOTHING).batch
        if self.base.ahead is not None:
            self.base = Base(self.base.ahead, min(self.base.acknowledged, batch - self.base.ahead))
        yield from self._delivery.accept_loss()

    def _lost(self, number: int) -> PositionGap:
        return PositionGap(
            f"acknowledged batches from {number} on are lost",
            remedy="call accept_loss(), then resend what the state lacks",
            operator=self._history.operator,
            source=self._history.source,
            partition=self.partition,
            expected=number,
        )

    def _overtaken(self, first: Part, why: str) -> OutboxOvertaken:
        return OutboxOvertaken(
            f"cannot tell whether the partition applied batch {first.number}: {why}",
            remedy="inspect the state, then send what it lacks through a client with a new outbox",
            operator=self._history.operator,
            source=self._history.source,
            partition=self.partition,
        )


def send_together(
    sending: Mapping[int, Steps[bytes]],
    deliver: Callable[[Batch, Collection[int], Mapping[int, int]], Mapping[int, bytes]],
) -> dict[int, bytes]:
    """Sends the same batch to several partitions as one message, and returns partition → output.

    Only the steps that deliver the same batch under the same number share the message. If the message fails for one
    partition, the result for the others is unknown, too. The caller then sends the batch to each of them separately,
    and partitions that contain the batch skip it.

    Args:
        sending: partition → steps of its :meth:`PartitionSender.send`.
        deliver: delivers a batch, given the batch, its partitions, and partition → batch that it must contain; returns
            partition → output.
    """
    outputs: dict[int, bytes] = {}
    first: dict[int, Deliver] = {}
    for partition, steps in sending.items():
        try:
            step = next(steps)
        except StopIteration as end:
            outputs[partition] = end.value
        else:
            if isinstance(step, Deliver):
                first[partition] = step
    batch = next((_plain(step) for step in first.values()), None)
    together = {partition: step for partition, step in first.items() if _plain(step) == batch}
    if batch is not None:
        after = {partition: number for step in together.values() for partition, number in step.after.items()}
        try:
            came = deliver(batch, together.keys(), after)
        except StateflowError as error:
            for partition in together:
                with suppress(StateflowError, StopIteration):
                    sending[partition].throw(error)
        else:
            for partition in together:
                try:
                    sending[partition].send({partition: came[partition]})
                except StopIteration as end:
                    outputs[partition] = end.value
    for partition in sending.keys() - outputs.keys():
        sending[partition].close()
    return outputs


def _plain(step: Deliver) -> Batch:
    """Returns the step's batch without the entry for a successor, which concerns only the sender's own partition."""
    return replace(step.batch, known=b"")
