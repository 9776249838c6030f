"""Sender from an outbox to one partition: which batch goes next, under which number, and with what result. Sans-io.

Batches have numbers in the outbox. At a partition these numbers are shifted, to follow the batches that other clients
had sent to it before. So a new outbox may go on with a source that has existed for long, and its rows are never taken
for other clients' rows. A partition reports which client sent its newest batch:

* This outbox: the partition contains everything up to that batch.
* Another client, which came in between. What the outbox never sent goes behind that batch. Of what it may have sent,
  nothing shows any longer whether the partition contains it, and a person has to decide.

Each partition has a :class:`~stateflow.client.delivery.Delivery` of its own, so that one out of reach holds up no
other.
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

#: position of a partition to which no number was ever sent
NOTHING = Position(-1)


class Lane:
    """Sender to one partition.

    Args:
        base: the offset of numbers, as stored in the outbox. A caller of :meth:`open` stores the lane's new ``base``
            before anything is sent.
        mine: ids of this outbox's clients, including former ones.
        newest: newest number in the outbox when this client was made.
    """

    def __init__(
        self, partition: int, history: History, session: Session, base: Base, mine: Collection[str], newest: int
    ) -> None:
        self.partition, self.base = partition, base
        self._history, self._mine = history, mine
        self._delivery = Delivery(history, session, lambda: None)
        self._newest = newest  # of all numbers when this client was made
        self._opened = False
        self._contained = -1  # the partition's number when it was opened

    @property
    def is_open(self) -> bool:
        return self._opened

    def open(self, first: Part) -> Steps[None]:
        """Makes the partition refuse older clients of the source, and finds out what it contains.

        Args:
            first: the first part that the partition may lack.

        Raises PositionGap where the partition lost what it acknowledged, OutboxOvertaken, SourceTaken.
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
                raise self._overtaken(first, "it has more than this outbox sent, so the outbox is an older copy")
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
        """Sends a part to an open partition, and returns its output. Raises what the partition refuses it with.

        For a batch that the partition contained before, except its newest one, the output is ``b""``.
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
        """Gives up what the partition lost."""
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

    Only the steps that deliver the same batch under the same number go together. If the message fails for one
    partition, the result for the others is unknown, too: each is then to be sent by itself, and partitions that contain
    the batch skip it.

    Args:
        sending: partition → steps of its lane's :meth:`Lane.send`.
        deliver: delivers a batch to these partitions; given partition → batch that it must contain.
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
    """Returns the step's batch without its entry for a successor, which is about the lane's own partition only."""
    return replace(step.batch, known=b"")
