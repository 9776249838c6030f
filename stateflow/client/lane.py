"""One partition's way out of an outbox: what is sent to it next, under which number, and what came of that. Sans-io.

Batches have their numbers in the outbox, and for a partition they are ahead of those by as many as others had sent to
it before. So a new outbox may go on with a source that has been there for long, and its rows are never taken for those
of others. A partition tells by whom its newest batch was sent:

* by this outbox: what is up to there is contained;
* by another client: that came in between. What was never sent from here goes behind it. Of what may have been sent it
  cannot be told any more whether it is contained, and a person has to say.

Each partition has a :class:`~stateflow.client.delivery.Delivery` of its own, so that one that cannot be reached holds
up no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from stateflow.client.delivery import Deliver, Delivery, Look, Steps
from stateflow.client.history import History
from stateflow.client.outbox import Base, Part
from stateflow.errors import OutboxOvertaken, PositionGap, StateflowError
from stateflow.runtime.layout import Position, Session
from stateflow.runtime.positions import Batch

#: a partition is opened with it where no number was ever sent to it
NOTHING = Position(-1)


class Lane:
    """Args:
    mine: ids of this outbox's clients, also former ones.
    base: as the outbox has it; whoever runs :meth:`send` writes down what it is by then, before anything is sent.
    """

    def __init__(
        self, partition: int, history: History, session: Session, base: Base, mine: Collection[str], newest: int
    ) -> None:
        self.partition, self.base = partition, base
        self._history, self._mine = history, mine
        self._delivery = Delivery(history, session, lambda: None)
        self._newest = newest  # of all numbers that there were when this was made
        self._opened = False
        self._contained = -1  # its number there, when it was opened

    @property
    def is_open(self) -> bool:
        return self._opened

    def open(self, first: Part) -> Steps[None]:
        """Refuse older clients of the source there, and find out what it has. Args: first: that it may lack.

        Raises PositionGap where it lost what was acknowledged, OutboxOvertaken, SourceTaken.
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
                raise self._overtaken(first, "it contains more than this outbox has sent: this is an older copy of it")
            if position.batch < acknowledged + ahead:
                raise self._lost(position.batch + 1 - ahead)
        elif ahead is None or position.batch >= first.number + ahead:
            if first.attempted and ahead is not None:
                raise self._overtaken(first, f"another client sent up to {position.batch}, after it may have been sent")
            ahead = position.batch + 1 - first.number
        self.base = Base(ahead, acknowledged)
        self._contained, self._opened = position.batch, True

    def send(self, part: Part) -> Steps[bytes]:
        """Comes to what the partition made of it; ``b""`` also for what it contained before, but for the newest.

        To be called when it is open. Raises what the partition refuses it with.
        """
        ahead = self.base.ahead
        assert ahead is not None
        number = part.number + ahead
        if number < self._contained:
            return b""
        outputs = yield from self._delivery.deliver(part.rows, number, False, part.watermark_us, dict)
        self.base = Base(ahead, part.number)
        return outputs[self.partition]

    def accept_loss(self) -> Steps[None]:
        """What the partition lost is not asked for again."""
        yield from self._delivery.open()
        found = yield Look()
        batch = found.get(self.partition, NOTHING).batch
        if self.base.ahead is not None:
            self.base = Base(self.base.ahead, min(self.base.acknowledged, batch - self.base.ahead))
        yield from self._delivery.accept_loss()

    def _lost(self, number: int) -> PositionGap:
        return PositionGap(
            f"batches that were acknowledged are lost, from {number} on",
            remedy="call accept_loss(), and send again what the state lacks",
            operator=self._history.operator,
            source=self._history.source,
            partition=self.partition,
            expected=number,
        )

    def _overtaken(self, first: Part, why: str) -> OutboxOvertaken:
        return OutboxOvertaken(
            f"whether batch {first.number} is contained cannot be told: {why}",
            remedy="look into the state; then send what it lacks through a client with a new outbox",
            operator=self._history.operator,
            source=self._history.source,
            partition=self.partition,
        )


def send_together(
    sending: Mapping[int, Steps[bytes]],
    deliver: Callable[[Batch, Collection[int], Mapping[int, int]], Mapping[int, bytes]],
) -> dict[int, bytes]:
    """Partition → output, of those that go as one message: they are to be given the same batch now, under the same
    number. Where that fails for one, it is not known of the others either; each is then to be sent by itself, and what
    is there already is passed over.

    Args: sending: by partition, what its lane's :meth:`Lane.send` is. deliver: a batch to these partitions, and after
        which one of theirs.
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
                with suppress(StateflowError):
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
    """What a lane tells a successor is of its own partition only."""
    return replace(step.batch, known=b"")
