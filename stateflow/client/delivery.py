"""One batch after another from the newest client of a sparse source, and again what partitions lost. Sans-io.

What is to be done comes as steps out of generators: whoever runs one performs each step, and hands back what came of
it, or the error. So the same decisions are run by threads and sockets, and by a simulation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stateflow.client.history import History, Sent
from stateflow.errors import InvalidArgument, PositionGap, SourceTaken
from stateflow.rpc import replica_pb2 as rpb
from stateflow.runtime.layout import Session
from stateflow.runtime.positions import Batch

log = logging.getLogger(__name__)
T = TypeVar("T")
#: what partitions lost is sent again so many times in one call, as they may lose more meanwhile
REWINDS_MAX = 10


@dataclass(frozen=True, slots=True)
class Open:
    """Have all partitions refuse older clients than ``session``; comes to their answers, or SourceTaken."""

    session: Session


@dataclass(frozen=True, slots=True)
class Deliver:
    """Comes to the outputs by partition, when each of them has committed, or to the first refusal.

    ``after``: partition → newest batch that it must contain.
    """

    batch: Batch
    schema: bytes
    rows: Mapping[int, bytes]
    after: Mapping[int, int]


Step: TypeAlias = Open | Deliver
Steps: TypeAlias = Generator[Step, Any, T]


def perform(steps: Steps[T], do: Callable[[Step], Any]) -> T:
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
    """

    def __init__(self, history: History, session: Session, acknowledged: Callable[[], int | None]) -> None:
        self.history, self.session = history, session
        self._acknowledged = acknowledged
        self._watermark_us: int | None = None
        self._refused = False  # by a partition that misses something, and not all of them were asked since
        self._rewinds = False  # the last batch was one of a rewind by hand
        self._promised_us: int | None = None  # the watermark before it
        self._failed: tuple[int, bytes, Mapping[int, bytes]] | None = None  # number and rows of the batch that did

    def open(self) -> Steps[None]:
        """Become the newest client of the source at every partition."""
        while True:
            try:
                replies = yield Open(self.session)
            except SourceTaken as taken:
                self.session = Session(int(taken.where["generation_us"]) + 1, self.session.id)
            else:
                heard = merged(replies)
                self.history.resume(heard.contained, heard.known, self._acknowledged())
                return

    def deliver(
        self,
        schema: bytes,
        messages: Mapping[int, bytes],
        sequence: int | None,
        rewind: bool,
        watermark_us: int | None = None,
    ) -> Steps[dict[int, bytes]]:
        """One batch; comes to its outputs."""
        number = self._next(schema, messages) if sequence is None else sequence
        if rewind and sequence is None:
            raise InvalidArgument("a rewind sends batches under their numbers", remedy="pass sequence=")
        yield from self._prepare(number, rewind)
        self._watermark_us = watermark_us if watermark_us is not None else self._watermark_us
        batch = Sent(number, schema, messages, self._watermark_us)
        try:
            outputs = yield from self._applied(batch, rewind)
        except BaseException:
            self._failed = number, schema, messages
            raise
        self._failed = None
        return outputs

    def verify(self) -> Steps[None]:
        """Raises PositionGap where something was lost that is no longer kept, SourceTaken."""
        yield from self._ask()
        yield from self._mend()

    def accept_loss(self) -> Steps[int | None]:
        """Comes to the oldest batch that is given up, None: nothing was lost."""
        yield from self._ask()
        if self.history.taken:
            self._failed = None  # its number may be another's
        return self.history.accept_loss()

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
        known = b"" if rewind else self.history.known(self.session, number, parts)
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
                outputs = yield Deliver(batch, sent.schema, parts, after)
            except PositionGap:
                self._refused = True
                raise
        self.history.acknowledged(sent)
        return outputs

    def _ask(self) -> Steps[None]:
        """As the client that it is: one that another came after must not take what it hears for its own."""
        replies = yield Open(self.session)
        heard = merged(replies)
        others = {p for p, client in heard.clients.items() if client != self.session.id}
        self.history.heard(heard.contained, others)
        self._refused = False

    def _next(self, schema: bytes, messages: Mapping[int, bytes]) -> int:
        if self._failed is None:
            return self.history.position + 1
        number, *rows = self._failed
        return number if rows == [schema, messages] else max(self.history.position, number) + 1


class Heard(NamedTuple):
    """Partition → last batch it ``contains``, and which of the ``clients`` sent that; what predecessors ``knew``."""

    contained: dict[int, int]
    known: list[bytes]
    clients: dict[int, str]


def merged(replies: Iterable[rpb.PositionsReply]) -> Heard:
    heard = Heard({}, [], {})
    for reply in replies:
        heard.contained.update(reply.positions)
        heard.known.extend(reply.known.values())
        heard.clients.update(reply.clients)
    return heard
