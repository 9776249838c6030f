"""Forwarding of one partition's batches from an outbox.

The partition decides as a real one does (:class:`~stateflow.partition.positions.Positions`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stateflow.client.delivery import Deliver, Look, Open, PartitionSender, Step, perform, send_together
from stateflow.client.history import History
from stateflow.client.outbox import Base, Outbox, Part
from stateflow.errors import OutboxOvertaken, PositionGap, SourceTaken, StateflowError, Unavailable
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import Batch, Positions
from stateflow.types import PartitionId
from tests.applying import words

PARTITION = 1
CLIENTS = count(1)


class Partition:
    """A partition that applies words.

    ``away``: it is unreachable. ``late``: it applies the next batch without an answer.
    """

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.positions = Positions(PartitionId("Op", PARTITION), {}, {})
        self.away = self.late = False
        self._output = b""
        self._kept: tuple[list[str], Position | None] | None = None

    def do(self, step: Step) -> Any:
        if self.away:
            raise Unavailable("it is away", remedy="-")
        match step:
            case Open(session):
                if self.positions.is_newer("s", session):
                    self.positions.taken("s", session)
                return self._said()
            case Look():
                return self._said()
            case Deliver(batch, rows, after):
                assert rows.rows is not None
                given = b",".join(rows.rows["word"].to_pylist())
                output = self._apply(batch, given, after.get(PARTITION))
                if self.late:
                    self.late = False
                    raise Unavailable("no answer", remedy="-")
                return {PARTITION: output}

    def _said(self) -> dict[int, Position]:
        known = self.positions.reached_by("s")
        return {} if known is None else {PARTITION: known._replace(known=b"")}

    def _apply(self, batch: Batch, rows: bytes, after: int | None) -> bytes:
        position, digest = self.positions, xxhash.xxh3_64_intdigest(rows)
        assert batch.session is not None
        position.check_client("s", batch.session)
        if position.contains(batch):
            return b""
        if position.is_replay(batch, after):  # raises SourceRetired if the output is gone
            known = position.reached_by("s")
            assert known is not None
            position.check_digest(batch, known.digest, digest)
        else:
            position.reached("s", Position(batch.number, digest=digest, client=batch.session.id))
            self.applied += rows.decode().split(",")
            self._output = b"of " + rows
        return self._output

    def retire(self) -> None:
        """Retires the source, and makes it known again by its tombstone."""
        tombstone = self.positions.tombstone("s")
        self.positions.retired(["s"])
        self.positions.recall("s", tombstone)

    def checkpoint(self) -> None:
        self._kept = self.applied[:], self.positions.reached_by("s")

    def restore(self) -> None:
        """Replaces the partition by an older copy."""
        assert self._kept is not None
        self.applied, known = self._kept
        session = self.positions.session("s")
        assert session is not None
        self.positions = Positions(self.positions.partition, {} if known is None else {"s": known}, {"s": session})


class Gateway:
    """A client of an outbox with one lane."""

    def __init__(self, directory: Path, partition: Partition, rewind_bytes: int = 0) -> None:
        self.partition = partition
        self.outbox = Outbox(directory, "Op", "s", 1 << 20)
        number = next(CLIENTS)
        session = Session(number, f"client-{number}")
        self.outbox.begin(session.id, b"")
        history = History("Op", "s", 4, rewind_bytes, only=PARTITION)
        base = self.outbox.sender(PARTITION)
        self.sender = PartitionSender(PARTITION, history, session, base, self.outbox.sessions(), self.outbox.newest)
        self.outputs: list[str] = []

    def log(self, word: str) -> None:
        queued = bool(self.outbox.parts())
        number = self.outbox.newest + 1
        self.outbox.log(number, words({PARTITION: word.encode()}), () if queued else (PARTITION,), None, [])

    def forward(self, *, dies: bool = False) -> bool:
        """Forwards the first waiting batch. Returns False if there is none, or if the partition did not take it.

        Args:
            dies: ends before the outbox records that the partition has the batch.
        """
        part = self.outbox.next(PARTITION)
        if part is None:
            return False
        try:
            before = self.sender.base
            perform(self.sender.open(part), self.partition.do)
            if self.sender.base != before:
                self.outbox.base(PARTITION, self.sender.base)
            output = perform(self.sender.send(part), self.partition.do)
        except Unavailable:
            return False
        if not dies:
            self.outbox.forwarded(PARTITION, part.number, output)
        return True

    def forward_all(self) -> None:
        while self.outbox.parts():
            assert self.forward()

    def taken(self) -> list[str]:
        up_to, found = self.outbox.outputs()
        self.outbox.taken("output", up_to)
        return [f"of {word}" for each in found for word in each.decode().removeprefix("of ").split(",")]


@contextmanager
def scene() -> Iterator[tuple[Path, Partition]]:
    with TemporaryDirectory() as directory:
        yield Path(directory), Partition()


EVENTS = ("log", "log", "forward", "forward", "away", "there", "late", "dies", "restart")


@given(st.lists(st.sampled_from(EVENTS), max_size=40), st.integers(0, 3))
def test_each_word_is_applied_once_and_in_order_whatever_happens(events: list[str], before: int) -> None:
    """Each word is applied once and in order, for any sequence of events.

    Args:
        before: batches that another client had sent.
    """
    with scene() as (directory, partition):
        for number in range(before):
            by = Session(0, "another")
            partition.do(Open(by))
            partition.do(Deliver(Batch("s", 1000 + number, sparse=True, session=by), words({PARTITION: b"old"}), {}))
        gateway, logged, outputs = Gateway(directory, partition), 0, list[str]()
        for event in events:
            match event:
                case "log":
                    gateway.log(str(logged))
                    logged += 1
                case "forward":
                    gateway.forward()
                case "dies":
                    gateway.forward(dies=True)
                    gateway.outbox.close()
                    gateway = Gateway(directory, partition)
                case "restart":
                    gateway.outbox.close()
                    gateway = Gateway(directory, partition)
                case "late":
                    partition.late = True
                case _:
                    partition.away = event == "away"
            outputs += gateway.taken()
        partition.away = partition.late = False
        gateway.forward_all()
        outputs += gateway.taken()
        wanted = [str(number) for number in range(logged)]
        assert partition.applied == ["old"] * before + wanted
        assert outputs == [f"of {word}" for word in wanted], "none is lost, and none is twice"
        gateway.outbox.close()


def test_what_comes_behind_another_client_is_not_taken_for_its_batches(tmp_path: Path) -> None:
    """A new outbox replaces a lost one, and its numbers begin again."""
    partition = Partition()
    first = Gateway(tmp_path / "one", partition)
    for word in "abc":
        first.log(word)
    first.forward_all()
    second = Gateway(tmp_path / "two", partition)
    second.log("d")
    second.forward_all()
    assert partition.applied == ["a", "b", "c", "d"]
    first.log("e")
    with pytest.raises(SourceTaken):
        first.forward()
    first.outbox.close()
    again = Gateway(tmp_path / "one", partition)  # this client cannot know that e was not sent
    with pytest.raises(OutboxOvertaken):
        again.forward()
    assert partition.applied == ["a", "b", "c", "d"]


def test_what_was_never_sent_goes_behind_another_client(tmp_path: Path) -> None:
    partition = Partition()
    first = Gateway(tmp_path / "one", partition)
    first.log("a")
    first.forward_all()
    partition.away = True
    first.log("b")
    first.log("c")
    first.outbox.delivered([(PARTITION, 1)])  # as if b, which may have been sent, had arrived
    first.outbox.close()
    partition.away = False
    second = Gateway(tmp_path / "two", partition)
    for word in "xyz":
        second.log(word)
    second.forward_all()
    again = Gateway(tmp_path / "one", partition)
    again.forward_all()
    assert partition.applied == ["a", "x", "y", "z", "c"]


@pytest.mark.parametrize("running", [False, True])
def test_an_older_copy_of_an_outbox_is_noticed(tmp_path: Path, running: bool) -> None:
    """An image of a gateway is put back, and partitions already have the numbers that it would use next.

    Args:
        running: the image was made while the client went on.
    """
    partition = Partition()
    there, image = tmp_path / "one", tmp_path / "image"
    gateway = Gateway(there, partition)
    gateway.log("a")
    gateway.forward_all()
    if not running:
        gateway.outbox.close()
    shutil.copytree(there, image)
    if not running:
        gateway = Gateway(there, partition)
    for word in "bc":
        gateway.log(word)
    gateway.forward_all()
    gateway.outbox.close()
    older = Gateway(image, partition)
    older.log("d")
    with pytest.raises(OutboxOvertaken):
        older.forward()
    assert partition.applied == ["a", "b", "c"], "d is not taken for b, nor put behind c unseen"


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_partition_lost_is_asked_for_until_it_is_given_up(tmp_path: Path, restarted: bool) -> None:
    partition = Partition()
    gateway = Gateway(tmp_path, partition)
    gateway.log("a")
    gateway.forward_all()
    partition.checkpoint()
    for word in "bc":
        gateway.log(word)
    gateway.forward_all()
    partition.restore()
    if restarted:
        gateway.outbox.close()
        gateway = Gateway(tmp_path, partition)
    gateway.log("d")
    for _ in range(2):
        with pytest.raises(PositionGap):
            gateway.forward()
    perform(gateway.sender.accept_loss(), partition.do)
    gateway.outbox.base(PARTITION, gateway.sender.base)
    gateway.forward_all()
    assert partition.applied == ["a", "d"]


def test_what_a_partition_lost_is_sent_again_where_it_is_kept(tmp_path: Path) -> None:
    partition = Partition()
    gateway = Gateway(tmp_path, partition, rewind_bytes=1 << 20)
    gateway.log("a")
    gateway.forward_all()
    partition.checkpoint()
    for word in "bc":
        gateway.log(word)
    gateway.forward_all()
    partition.restore()
    gateway.log("d")
    gateway.forward_all()
    assert partition.applied == ["a", "b", "c", "d"]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_applied_before_its_source_was_retired_is_not_refused(tmp_path: Path, restarted: bool) -> None:
    """A link that came back after STATEFLOW_REPLICA_SOURCE_IDLE_S put applied rows among the refused ones."""
    partition = Partition()
    gateway = Gateway(tmp_path, partition)
    gateway.log("a")
    gateway.forward_all()
    gateway.log("b")
    gateway.log("c")
    partition.late = True
    assert not gateway.forward()
    partition.retire()
    if restarted:
        gateway.outbox.close()
        gateway = Gateway(tmp_path, partition)
    gateway.forward_all()
    gateway.log("d")
    gateway.forward_all()
    assert partition.applied == ["a", "b", "c", "d"]
    assert gateway.taken() == ["of a", "of c", "of d"], "the output of b is gone"


def test_a_fault_that_is_none_of_the_link_is_raised(tmp_path: Path) -> None:
    partition = Partition()
    gateway = Gateway(tmp_path, partition)
    gateway.log("a")
    gateway.partition.do = lambda _: (_ for _ in ()).throw(StateflowError("a fault"))  # type: ignore[method-assign]
    with pytest.raises(StateflowError, match="a fault"):
        gateway.forward()
    assert gateway.outbox.next(PARTITION) is not None


class Lanes:
    """Three partitions that one message reaches together. ``error``: refuses the next message."""

    def __init__(self) -> None:
        self.applied: dict[int, list[tuple[int, str]]] = {p: [] for p in range(3)}
        self.messages: list[list[int]] = []
        self.error: StateflowError | None = None
        self.senders = {
            p: PartitionSender(p, History("Op", "s", 3, 0, only=p), Session(1, "me"), Base(0, -1), {"me"}, -1)
            for p in range(3)
        }
        for number, sender in self.senders.items():
            perform(sender.open(self.part(number, 0)), lambda _: {})

    @staticmethod
    def part(partition: int, number: int) -> Part:
        return Part(partition, number, words({partition: b"%d" % number}), None, True)

    def send(self, *numbers: int) -> dict[int, bytes]:
        """Sends to all three lanes and returns the outputs by partition."""
        steps = {p: self.senders[p].send(self.part(p, number)) for p, number in enumerate(numbers)}
        return send_together(steps, self._deliver)

    def _deliver(self, batch: Batch, partitions: Any, after: Any) -> dict[int, bytes]:
        self.messages.append(sorted(partitions))
        if self.error is not None:
            raise self.error
        assert batch.known == b""
        assert after == {p: before[-1] for p in partitions if (before := [n for n, _ in self.applied[p]])}
        for partition in partitions:
            self.applied[partition].append((batch.number, "-"))
        return {partition: b"of %d" % partition for partition in partitions}


def test_what_goes_to_several_partitions_under_one_number_is_one_message() -> None:
    senders = Lanes()
    assert senders.send(0, 0, 0) == {0: b"of 0", 1: b"of 1", 2: b"of 2"}
    assert senders.send(1, 1, 1).keys() == {0, 1, 2}
    assert senders.messages == [[0, 1, 2]] * 2


def test_another_number_goes_by_itself() -> None:
    senders = Lanes()
    assert senders.send(4, 5, 4) == {0: b"of 0", 2: b"of 2"}
    assert senders.messages == [[0, 2]]


@pytest.mark.parametrize("error", [Unavailable("-", remedy="-"), StateflowError("-"), PositionGap("-", expected=0)])
def test_of_a_message_that_is_refused_each_is_sent_by_itself(error: StateflowError) -> None:
    senders = Lanes()
    senders.error = error
    assert senders.send(0, 0, 0) == {}
    senders.error = None
    steps = senders.senders[1].send(senders.part(1, 0))
    assert perform(steps, lambda step: {1: b"of 1"} if isinstance(step, Deliver) else {}) == b"of 1"
