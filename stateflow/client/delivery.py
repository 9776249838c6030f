"""One batch after another from the newest client of a sparse source, and again what partitions lost. Sans-io.

What is to be done comes as steps out of generators: whoever runs one performs each step, and hands back what came of
it, or the error. So the same decisions are run by threads and sockets, and by a simulation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stateflow.client.history import LOGGED_MAX, History, Sent
from stateflow.errors import (
    CodeRefused,
    InvalidArgument,
    LocalMisuse,
    OperatorNotDeployed,
    OperatorNotImportable,
    OperatorOutdated,
    OutOfMemory,
    PositionGap,
    SourceRetired,
    SourceTaken,
    StaleBatch,
    StateflowError,
)
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.layout import Position, Session
from stateflow.runtime.positions import Batch

log = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")
#: what partitions lost is sent again so many times in one call, as they may lose more meanwhile
REWINDS_MAX = 10
#: who sends what failed again, does so within so many batches
AGAIN_MAX = 1000
#: outputs of so many batches are kept for callers who were told that they failed
OUTPUTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Open:
    """Have all partitions refuse older clients than ``session``; comes to what they contain, by partition, or
    SourceTaken. ``settled``: of a source whose outputs are kept, those of batches up to this one are wanted no more."""

    session: Session
    settled: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """Comes to what all partitions contain, by partition, as they say it to anybody."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Comes to the outputs by partition, when each of them has committed, or to the first refusal.

    ``after``: partition → newest batch that it must contain.
    """

    batch: Batch
    rows: BatchRows
    after: Mapping[int, int]


Step: TypeAlias = Open | Look | Deliver
Steps: TypeAlias = Generator[Step, Any, T]


class Asked(NamedTuple):
    """What a caller wants to be applied: who asks for the same again, means the same batch."""

    rows: BatchRows
    watermark_us: int | None

    @property
    def digest(self) -> tuple[bytes, int | None]:
        return self.rows.digest, self.watermark_us


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The batch that failed last: some of its partitions may contain it. ``refused``: it will not do better."""

    asked: Asked
    sent: Sent
    refused: bool


class _Left(NamedTuple):
    """A batch whose caller was told that it failed, and others came since. ``outputs``: it is applied; None: it is in
    some partitions, perhaps, or its outputs are gone."""

    number: int
    outputs: Mapping[int, bytes] | None


def perform(steps: Generator[S, Any, T], do: Callable[[S], Any]) -> T:
    """Run ``steps`` to their end, ``do`` each of them here. Raises what they do."""
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
    """Args:
    session: proposed; made later than that of a former client whose clock was ahead.
    acknowledged: asked for the newest batch that the application knows of, once no predecessor can be told of more.
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
        self._refused = False  # by a partition that misses something, and not all of them were asked since
        self._rewinds = False  # the last batch was one of a rewind by hand
        self._promised_us: int | None = None  # the watermark before it
        self._used = -1  # the newest number that was sent, whatever came of it
        self._doubt: _Doubt | None = None
        self._left: dict[tuple[bytes, int | None], _Left] = {}  # by what was asked for

    def open(self) -> Steps[None]:
        """Become the newest client of the source at every partition."""
        while True:
            try:
                found = yield Open(self.session, self._settled)
            except SourceTaken as taken:
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
        """One batch; comes to what ``read`` makes of its outputs. Where that raises, the batch has failed like any
        other: its caller has not heard of it.

        Who numbers his batches himself decides himself which comes next. Else one that failed comes before all others,
        under the number it had: partitions can tell only of their newest batch whether they contain it. One that is
        refused for what it is would hold up all others, and is passed over; where partitions contain some of it, it
        keeps its number, under which none takes it twice.
        """
        if rewind and sequence is None:
            raise InvalidArgument("a rewind sends batches under their numbers", remedy="pass sequence=")
        asked, left, batch = Asked(rows, watermark_us), None, None
        if sequence is None:
            left = self._left.get(asked.digest) if self._left else None
            if left is not None and self.history.position - left.number > AGAIN_MAX:
                left = None  # the same rows by chance, and another batch
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
        """Raises PositionGap where something was lost that is no longer kept, SourceTaken."""
        yield from self._ask()
        yield from self._mend()

    def accept_loss(self) -> Steps[int | None]:
        """Comes to the oldest batch that is given up, None: nothing was lost."""
        yield from self._ask()
        if self.history.taken:  # numbers may be another's
            self._doubt = None
            self._left.clear()
        return self.history.accept_loss()

    def let_go(self) -> None:
        """Of rows and outputs: nothing will be sent any more."""
        self.history.let_go()
        self._doubt = None
        self._left.clear()

    # -- batches that failed -------------------------------------------------------------------------------

    def _finish(self, doubt: _Doubt) -> Steps[None]:
        """So that others may come. Raises what stands in the way, unless that is the batch itself."""
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
        except StateflowError:  # a partition that cannot be asked holds up no other: as if it contained some of it
            contained = dict.fromkeys(doubt.sent.rows, number)
        if any(contained.get(partition, -1) >= number for partition in doubt.sent.rows):
            self._leave(doubt, None)
        self._doubt = None

    def _put_in_doubt(self, doubt: _Doubt) -> None:
        before, self._doubt = self._doubt, doubt
        if before is not None and before.asked != doubt.asked:  # whose caller chose the next one's number
            self._leave(before, None)

    def _leave(self, doubt: _Doubt, outputs: Mapping[int, bytes] | None) -> None:
        self._left[doubt.asked.digest] = _Left(doubt.sent.number, outputs)
        for each in [each for each, left in self._left.items() if left.outputs is not None][:-OUTPUTS_MAX]:
            self._left[each] = self._left[each]._replace(outputs=None)
        while len(self._left) > LOGGED_MAX:
            del self._left[next(iter(self._left))]

    def _ended(self, asked: Asked, number: int, rewind: bool) -> None:
        """Batch ``number`` is applied, perhaps mended; or the same under a number that its caller chose instead."""
        if self._doubt is not None and (self._doubt.sent.number == number or self._doubt.asked == asked):
            self._doubt = None
        if self._left and not rewind:  # by which partitions pass over what they may lack
            self._left.pop(asked.digest, None)
            self._left = {each: left for each, left in self._left.items() if left.number != number}

    def _overtaken(self, number: int) -> StaleBatch:
        return StaleBatch(
            f"the same failed as batch {number}, which partitions contain, some of them or all, and others came since",
            remedy="send again what the state lacks; or, to have all of it applied once more, pass sequence=",
            operator=self.history.operator,
            source=self.history.source,
            batch=number,
        )

    def _prepare(self, number: int, rewind: bool) -> Steps[None]:
        """Raises PositionGap when other batches have to come before this one."""
        if rewind:
            if self._refused or not self._rewinds:
                yield from self._ask()  # from where?
            if not self._rewinds:
                self._promised_us, self._watermark_us = self._watermark_us, None  # what was promised later
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
        """Outputs. Partitions that lost what came before it get that first."""
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
        """Send again what partitions are known to have lost. Raises PositionGap when it is no longer kept."""
        for left in reversed(range(REWINDS_MAX)):
            missing = self.history.missing()
            if not missing:
                return
            log.warning(
                "partitions of %s lost batches of %s that they had acknowledged: %d batches are sent again, from %d on",
                self.history.operator,
                self.history.source,
                len(missing),
                missing[0].number,
            )
            try:
                for batch in missing:
                    yield from self._sent(batch, True)
            except PositionGap:  # and lost more meanwhile
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
        """As the client that it is: one that another came after must not take what it hears for its own."""
        self._refused = True  # until all of them have answered: those that did not may not know of this client
        found = yield Open(self.session, self._settled)
        others = {p for p, position in found.items() if position.client not in ("", self.session.id)}
        self.history.heard(_contained(found), others)
        self._refused = False


def is_hopeless(error: BaseException) -> bool:
    """Is a batch refused for what it is, so that it would be again? Else it is for where it was to go."""
    if isinstance(error, OperatorNotDeployed | OperatorNotImportable | OperatorOutdated | CodeRefused):
        return False
    of_rows = isinstance(error, LocalMisuse | StaleBatch | SourceRetired | OutOfMemory)
    return of_rows or type(error) is StateflowError  # a fault of ours that it brings about


def _contained(found: Mapping[int, Position]) -> dict[int, int]:
    """Partition → last batch it contains."""
    return {partition: position.batch for partition, position in found.items()}
