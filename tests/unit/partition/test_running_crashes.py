"""A batch in which the process ends again and again is refused, and nothing else is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stateflow import Context, Operator, state
from stateflow.clock import ManualClock
from stateflow.errors import OperatorCrashed, OperatorFailed
from stateflow.operator.operator import describe
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.running import CRASHES, CRASHES_KEPT_S, ENDS_MAX, REFUSED_S, RUNNING
from stateflow.types import ReplicaInfo
from tests.applying import Told, shares_of
from tests.unit.partition.test_batches_groups import rows

P, Q = 0, 1


class Deadly(Operator):
    """Calls ``met`` with each row; a test lets the process end there."""

    key = "k"
    output = "k long"
    total = state.value(int, default=0)
    met: ClassVar[Any] = None

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        if Deadly.met is not None:
            Deadly.met(row)
        self.total.value += row.v
        yield (row.k,)


class Replica:
    """A replica whose process can end at any row. ``ends_at``: value of the row that ends the process."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock, self.ends_at = root, ManualClock(10**15), -1
        self.spec = describe(Deadly, 2)
        self.node = self._begun()
        self.node.create(self.spec, [P, Q], 1)
        self.left = b""

    def _begun(self) -> ReplicaNode:
        return ReplicaNode(ReplicaInfo("a", "s", "", 1), self.root, clock=self.clock)

    def again(self, note: bytes | None = None, counts: bytes = b"") -> None:
        """Starts a process after the last one. ``note``, ``counts``: what that one left, if it was not stopped."""
        self.node.close()
        if note is not None:
            (self.root / RUNNING).write_bytes(note)
        if counts:
            (self.root / CRASHES).write_bytes(counts)
        self.node = self._begun()

    def send(self, number: int, *values: int, source: str = "s") -> Told:
        """Sends the first value to partition P, and the others to Q."""
        told = Told()
        sent = {P: rows((P, values[0])), Q: rows(*((Q, value) for value in values[1:]))}
        self.node.batches.apply(shares_of("Deadly", Batch(source, number, sparse=True), sent), told)
        return told

    def dies(self, number: int, *values: int, source: str = "s") -> None:
        """Sends a batch, and lets the process end at the value ``ends_at``."""
        notes: list[tuple[bytes, bytes]] = []
        counts = self.root / CRASHES

        def met(row: Any) -> None:
            if row.v == self.ends_at:
                notes.append(((self.root / RUNNING).read_bytes(), counts.read_bytes() if counts.exists() else b""))
                raise RuntimeError  # nothing of the batch is applied

        Deadly.met = met
        self.send(number, *values, source=source)
        Deadly.met = None
        ((note, kept),) = notes
        self.again(note, kept)


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr("stateflow.partition.processor.check_belongs", lambda *_: None)
    made = Replica(tmp_path / "a")
    made.ends_at = 13
    yield made
    made.node.close()


def test_a_batch_that_ends_the_process_again_and_again_is_refused_and_no_other(replica: Replica) -> None:
    for _ in range(ENDS_MAX):
        replica.dies(0, 1, 13)
    told = replica.send(0, 1, 13)
    assert isinstance(told.outcomes[0], Applied), "it was run before the partition that ends the process"
    error = told.outcomes[1]
    assert isinstance(error, OperatorCrashed)
    assert f"{ENDS_MAX} times in a row" in str(error)
    assert (error.where["operator"], error.where["partition"], error.where["batch"]) == ("Deadly", Q, 0)
    assert [type(each) for each in replica.send(0, 5, 6, source="another").outcomes.values()] == [Applied, Applied]


def test_it_is_tried_once_more_after_a_while_and_forgotten_once_it_succeeds(replica: Replica) -> None:
    for _ in range(ENDS_MAX):
        replica.dies(0, 1, 13)
    replica.clock.advance(REFUSED_S)
    replica.dies(0, 1, 13)
    assert isinstance(replica.send(0, 1, 13).outcomes[1], OperatorCrashed), "it has ended the process once more"
    replica.clock.advance(REFUSED_S)
    assert isinstance(replica.send(0, 1, 13).outcomes[1], Applied)
    assert json.loads((replica.root / CRASHES).read_text()) == {}
    for _ in range(ENDS_MAX - 1):
        replica.dies(1, 1, 13)
    assert isinstance(replica.send(1, 1, 13).outcomes[1], Applied)


def test_a_batch_that_failed_in_between_did_not_end_the_process(replica: Replica) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError

    for _ in range(ENDS_MAX):
        replica.dies(0, 1, 13)
        Deadly.met = fails
        assert isinstance(replica.send(0, 1, 13).outcomes[1], OperatorFailed)
        Deadly.met = None
    assert isinstance(replica.send(0, 1, 13).outcomes[1], Applied)


def test_a_count_of_a_batch_that_does_not_come_again_is_forgotten(replica: Replica) -> None:
    replica.dies(0, 1, 13)
    replica.clock.advance(CRASHES_KEPT_S / 2)
    replica.dies(1, 1, 13)
    replica.clock.advance(CRASHES_KEPT_S / 2)
    replica.send(0, 1, 2, source="another")
    (left,) = json.loads((replica.root / CRASHES).read_text())
    assert json.loads(left.rpartition(" ")[0])[-1] == 1
    replica.clock.advance(CRASHES_KEPT_S / 2)
    replica.send(1, 1, 2, source="another")
    assert not replica.node.batches.running.crashes.any


def test_a_clock_that_was_set_back_refuses_nothing_for_longer(replica: Replica) -> None:
    for _ in range(ENDS_MAX):
        replica.dies(0, 1, 13)
    replica.clock = ManualClock(10**14)
    replica.again()
    assert isinstance(replica.send(0, 1, 13).outcomes[1], Applied)


def test_a_new_version_is_tried_at_once(replica: Replica) -> None:
    for _ in range(ENDS_MAX):
        replica.dies(0, 1, 13)
    replica.node._registry.learn(replace(replica.spec, recorded_us=7))
    assert isinstance(replica.send(0, 1, 13).outcomes[1], Applied)


def test_ends_of_a_process_that_ran_no_batch_or_was_stopped_are_not_counted(replica: Replica) -> None:
    for _ in range(ENDS_MAX):
        replica.send(0, 1, 2)
        replica.again((replica.root / RUNNING).read_bytes())
        replica.again()
    assert not replica.node.batches.running.crashes.any
    assert not (replica.root / CRASHES).exists()


def test_a_thread_that_was_left_behind_leaves_the_note_of_the_next_one_alone(replica: Replica) -> None:
    crashes, began, returns = replica.node.batches.running.crashes, threading.Event(), threading.Event()

    def never_mind() -> None:
        with crashes.noted("Deadly", 0, Batch("s", 0)):
            began.set()
            returns.wait()
            crashes.at(P)

    left = threading.Thread(target=never_mind)
    left.start()
    began.wait()
    with crashes.noted("Deadly", 0, Batch("s", 1)):
        crashes.at(Q)
        returns.set()
        left.join()
        note = (replica.root / RUNNING).read_bytes()
    replica.again(note)
    (counted,) = json.loads((replica.root / CRASHES).read_text())
    assert (json.loads(counted.rpartition(" ")[0])[-1], int(counted.rpartition(" ")[2])) == (1, Q)


@pytest.mark.parametrize("note", [b"", b"x", b"\xff" * 4096, b"\x02\x00\x00\x00" + bytes(4092), bytes(9000)])
def test_files_that_are_damaged_refuse_nothing(replica: Replica, note: bytes) -> None:
    for kept in (b"", b"[", b"[1]", b'{"a": 1}', b'{"a": ["x", 1]}', b"\xff"):
        (replica.root / CRASHES).write_bytes(kept)
        replica.again(note)
        assert not replica.node.batches.running.crashes.any
    replica.dies(0, 1, 13)
    assert replica.node.batches.running.crashes.any, "it begins anew"


def test_a_note_that_cannot_be_made_is_done_without(replica: Replica) -> None:
    replica.node.close()
    (replica.root / RUNNING).unlink()
    (replica.root / RUNNING).mkdir()
    replica.node = replica._begun()
    assert isinstance(replica.send(0, 1, 13).outcomes[1], Applied)
