"""Stopping replicas: the running batch is committed whole or not at all, and no batch is begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateflow import Context, Operator, state
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import StateflowError, Unavailable
from stateflow.operator.operator import BatchOperator, describe
from stateflow.partition import registry
from stateflow.partition.batches import Answers
from stateflow.partition.environment import WorkLock
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied, PartitionProcessor
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Frame
from stateflow.replica.applying import Answer, Applier
from stateflow.replica.streams import Piece
from stateflow.settings import ReplicaSettings
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
P = PartitionId("Sums", 0)
#: longer than any test takes, in seconds
LONG_S = 30.0
ROWS = [("a", 1), ("b", 2), ("c", 3)]


class Sums(Operator):
    key = "k"
    output = "k string, total long"
    total = state.value(int, default=0)
    met = staticmethod(lambda _: None)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.total.value += row.v
        type(self).met(row.k)
        yield row.k, self.total.value


class ColumnSums(BatchOperator):
    key = "k"
    output = "k string, total long"
    total = state.value(int, default=0)
    met = staticmethod(lambda _: None)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch:
        totals = pc.add(self.total.get_many(batch["k"]), batch["v"])
        self.total.put_many(batch["k"], totals)
        type(self).met("b")
        return pa.record_batch({"k": batch["k"], "total": totals})


def message(rows: list[tuple[str, int]]) -> bytes:
    made = pa.RecordBatch.from_pylist([{"k": k, "v": v} for k, v in rows], schema=SCHEMA)
    return cast(bytes, made.serialize().to_pybytes())


def applied_to(processor: PartitionProcessor | ReplicaNode, number: int) -> Any:
    batch, schema = Batch("s", number), SCHEMA.serialize().to_pybytes()
    if isinstance(processor, ReplicaNode):
        return apply_to(processor, P, 1, batch, schema, message(ROWS))
    return processor.apply(batch, schema, message(ROWS), 0)


# -- one partition --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Sums, ColumnSums])
@pytest.mark.parametrize("end", [PartitionProcessor.close, PartitionProcessor.discard])
def test_a_batch_whose_partition_is_let_go_beneath_it_is_not_committed(
    cls: Any, end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    processor = PartitionProcessor(cls, P, store, 1)
    applied_to(processor, 0)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "met", lambda key: end(processor) if key == "b" else None)
        with pytest.raises(Unavailable, match="closed on this replica"):
            applied_to(processor, 1)
    again = PartitionProcessor(cls, P, store, 1)
    assert again.reached("s").batch == 0
    assert not applied_to(again, 1).replayed, "nothing of it was there"
    assert [again.state.peek(key).total.value for key, _ in ROWS] == [2, 4, 6]


# -- a replica ------------------------------------------------------------------------------------------------


class Held:
    """A hook that makes the operator wait at row ``b``."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, key: str) -> None:
        if key == "b":
            self.entered.set()
            assert self.go_on.wait(LONG_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held()
    monkeypatch.setattr(Sums, "met", made)
    yield made
    made.go_on.set()


@pytest.fixture
def node(tmp_path: Path) -> ReplicaNode:
    made = ReplicaNode(ReplicaInfo("a", "s", "", 1), tmp_path / "a", ReplicaSettings(stop_timeout_s=2 * LONG_S))
    made.create(describe(Sums, 1), [0], 1)
    return made


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    came: list[Any] = []

    def do() -> None:
        try:
            came.append(work())
        except StateflowError as error:
            came.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    return thread, came


def test_a_batch_that_is_in_hand_for_longer_than_a_replica_stops_is_not_committed(
    node: ReplicaNode, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RELEASE_S_MAX", 0.01)
    store = node._registry.store(node._registry.local(P))
    thread, came = in_thread(lambda: applied_to(node, 0))
    assert held.entered.wait(LONG_S)
    node.close()
    held.go_on.set()
    thread.join(LONG_S)
    assert isinstance(came[0], Unavailable)
    again = PartitionProcessor(Sums, P, store, 1)
    assert again.reached("s") is None
    assert not again.apply(Batch("s", 0), SCHEMA.serialize().to_pybytes(), message(ROWS), 0).replayed
    store.close()


def test_a_replica_that_stops_waits_for_whoever_has_a_partition(
    node: ReplicaNode, held: Held, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "RELEASE_S_MAX", LONG_S)
    asked = threading.Event()
    acquire = WorkLock.acquire

    def tell(lock: WorkLock, wait_s: float) -> bool:
        if wait_s > lock.LOOK_S:
            asked.set()
        return acquire(lock, wait_s)

    monkeypatch.setattr(WorkLock, "acquire", tell)
    applying, came = in_thread(lambda: applied_to(node, 0))
    assert held.entered.wait(LONG_S)
    closing, _ = in_thread(node.close)
    assert asked.wait(LONG_S)
    held.go_on.set()
    applying.join(LONG_S)
    closing.join(LONG_S)
    assert isinstance(came[0], Applied)
    again = ReplicaNode(ReplicaInfo("a", "s", "", 1), tmp_path / "a")
    again._registry.learn(describe(Sums, 1))
    assert {key: value for key, _, value in again.reader.scan(P, "total")} == dict(ROWS)
    assert applied_to(again, 0).replayed
    again.close()


def test_nothing_is_opened_in_a_replica_that_has_stopped(node: ReplicaNode) -> None:
    node.close()
    local = node._registry.local(P)
    local.processor = local.store = None
    with pytest.raises(Unavailable, match="the replica is stopping"):
        applied_to(node, 0)


def test_a_lock_is_waited_for_as_long_as_was_asked_for() -> None:
    lock = WorkLock()
    took, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            took.set()
            let_go.wait(LONG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert took.wait(LONG_S)
    assert not lock.acquire(0.0)
    assert not lock.acquire(0.01)
    lock.take_away()
    assert lock.acquire(0.0)
    lock.release()
    let_go.set()
    holder.join(LONG_S)
    assert lock.acquire(LONG_S)
    lock.release()


# -- the thread for batches -----------------------------------------------------------------------------------


class Node:
    """A replica that records its batches; the first part waits."""

    settings = ReplicaSettings(stop_timeout_s=2 * LONG_S)

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.batches = self.running = self  # the applier asks nothing else of the two

    def skip(self, frame: Frame) -> list[int]:
        return []

    def apply(self, slices: BatchSlices, answers: Answers) -> None:
        for number, part in enumerate(slices.parts):
            if not answers.goes_on():
                return
            answers.begun(number)
            self.applied.append(part.partition)
            self.entered.set()
            assert self.go_on.wait(LONG_S)
            answers.told(number, Applied(b"", False, 1))

    def active(self) -> list[Any]:
        """Returns no batches, as between two parts of a call."""
        return []


def slices(count: int, rows: bytes = b"") -> Piece:
    schema, counts = SCHEMA.serialize().to_pybytes(), [len(ROWS) if rows else 0] * count
    frame = Frame("Sums", Batch("s", 0), schema, list(range(count)), [1] * count, counts, [], [], rows)
    return Piece(frame, rows, True)


async def until(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, LONG_S)


def applier_of(node: Node) -> Applier:
    return Applier(cast(ReplicaNode, node), SYSTEM_CLOCK, lambda _: asyncio.Event(), lambda _: None)


class Sender:
    """One end of an exchange, which hears the answers."""

    caller = "s"

    def __init__(self, *requests: Piece) -> None:
        self.requests = list(requests)
        self.taken = asyncio.Event()
        self.taken.set()
        self.said: list[Applied | StateflowError] = []

    async def receive(self, patience_s: float | None = None) -> Piece | None:
        return self.requests.pop(0) if self.requests else None

    async def answer(self, answers: Sequence[Answer]) -> None:
        self.said += [answer for _, answer in answers]

    async def give_sign_of_life(self) -> None: ...

    @property
    def codes(self) -> list[str]:
        return ["" if isinstance(each, Applied) else each.code for each in self.said]


def test_a_call_that_was_cancelled_ends_with_the_part_in_hand() -> None:
    async def run() -> list[int]:
        node = Node()
        applier = applier_of(node)
        call = asyncio.create_task(applier.run(Sender(slices(3))))
        await until(node.entered)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        node.go_on.set()
        await applier.batch_thread.between_batches(lambda: None)
        await applier.close()
        return node.applied

    assert asyncio.run(run()) == [0]


def test_a_replica_that_stops_begins_no_other_part_and_waits_for_the_one_in_hand() -> None:
    async def run() -> None:
        node, to = Node(), Sender(slices(3))
        applier = applier_of(node)
        call = asyncio.create_task(applier.run(to))
        await until(node.entered)
        behind = asyncio.create_task(applier.batch_thread.between_batches(lambda: node.applied.append(99)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(applier.close())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done(), "the thread still works on a batch"
        node.go_on.set()
        await asyncio.wait_for(closing, LONG_S)
        assert await applier.batch_thread.is_over()
        await call
        with pytest.raises(Unavailable, match="the replica is stopping"):
            await behind
        assert node.applied == [0]
        assert to.codes == ["", "unavailable", "unavailable"]
        with pytest.raises(Unavailable, match="the replica is stopping"):
            await applier.batch_thread.between_batches(lambda: None)
        late = Sender(slices(1))
        await applier.run(late)
        assert late.codes == ["unavailable"]

    asyncio.run(run())


def test_a_batch_that_never_comes_back_does_not_keep_a_replica_from_stopping(
    node: ReplicaNode, held: Held, tmp_path: Path
) -> None:
    node.settings = ReplicaSettings(stop_timeout_s=0.02)
    to = Sender(slices(1, message(ROWS)))

    async def run() -> None:
        applier = Applier(node, SYSTEM_CLOCK, lambda _: asyncio.Event(), lambda _: None)
        applying = asyncio.create_task(applier.run(to))
        await until(held.entered)
        await asyncio.wait_for(applier.close(), LONG_S)
        await applying

    asyncio.run(run())
    assert to.codes == ["operator_stuck"]
    node.close()
    held.go_on.set()
    again = ReplicaNode(ReplicaInfo("a", "s", "", 1), tmp_path / "a")
    again._registry.learn(describe(Sums, 1))
    assert again.reader.position(P, "s") is None
    again.close()
