"""Partitions whose batches are committed together: what happens to one does not affect the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from stateflow import BatchOperator, Context, Operator, state
from stateflow.client.delivery import is_hopeless
from stateflow.clock import ManualClock
from stateflow.errors import DiskFull, NullKey, OperatorFailed, OperatorStuck, OutputMismatch
from stateflow.operator.operator import describe, output_schema
from stateflow.operator.output import OutputReader
from stateflow.operator.rows import RowReader
from stateflow.partition import batches, running
from stateflow.partition.layout import Session
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.storage import RocksStore
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import Told, apply_to, shares_of

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
PARTITIONS = 4
LONG_S = 30.0


class Sums(Operator):
    """Sums by key. A partition has the keys that tests give it; whether keys belong there is checked elsewhere."""

    key = "k"
    output = "k long, total long, note string"
    total = state.value(int, default=0)
    met: ClassVar[Any] = None

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.total.value += row.v
        yield (Sums.met(row, self.total.value) if Sums.met else None) or (row.k, self.total.value, f"of {row.k}")


class Reuses(BatchOperator):
    """A batch operator whose instances all write their output into one array."""

    key = "k"
    output = "k long, total long"
    total = state.value(int, default=0)
    buffer: ClassVar[Any] = np.zeros(2, np.int64)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch:
        Reuses.buffer[:] = [batch["k"][0].as_py(), batch["v"][0].as_py()]
        return pa.record_batch({"k": pa.array(Reuses.buffer[:1]), "total": pa.array(Reuses.buffer[1:])})


@pytest.fixture(autouse=True)
def as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SLOW_US", LONG_S * 1e6)
    monkeypatch.setattr(running, "GROUP_S", LONG_S)
    monkeypatch.setattr("stateflow.partition.processor.check_belongs", lambda *_: None)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ReplicaNode]:
    node = ReplicaNode(ReplicaInfo("a", "s", "", 1), tmp_path / "a")
    for operator in (Sums, Reuses):
        node.create(describe(operator, PARTITIONS), range(PARTITIONS), 1)
    yield node
    node.close()


def rows(*pairs: tuple[int | None, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "v": v} for k, v in pairs], schema=SCHEMA)


def send(
    node: ReplicaNode, number: int, sent: dict[int, pa.RecordBatch], told: Told | None = None, operator: str = "Sums"
) -> Told:
    told = told or Told()
    node.batches.apply(shares_of(operator, Batch("s", number, sparse=True), sent), told)
    return told


def again(node: ReplicaNode, number: int, partition: int, sent: pa.RecordBatch) -> Applied:
    batch, data = Batch("s", number, sparse=True), sent.serialize().to_pybytes()
    outcome = apply_to(node, PartitionId("Sums", partition), 1, batch, SCHEMA.serialize().to_pybytes(), data)
    assert isinstance(outcome, Applied)
    return outcome


def totals(node: ReplicaNode) -> dict[Any, Any]:
    return {k: v for p in range(PARTITIONS) for k, _, v in node.reader.scan(PartitionId("Sums", p), "total")}


def read(applied: list[Applied], operator: type[Operator] = Sums) -> list[tuple[Any, ...]]:
    found, _ = OutputReader(output_schema(operator), {}).rows([each.output for each in applied])
    return [tuple(row.values()) for row in found]


def test_parts_are_decoded_and_encoded_together_and_stored_as_if_each_were_alone(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(node.batches, "_clock", clock)
    monkeypatch.setattr(Sums, "met", lambda row, total: clock.advance(0.25))
    decoded, plain = [], RowReader.read
    monkeypatch.setattr(RowReader, "read", lambda reader, batch: decoded.append(len(batch)) or plain(reader, batch))
    sent = {0: rows((0, 1)), 1: rows((1, 2), (5, 3)), 2: rows(), 3: rows((3, 4))}
    came = send(node, 0, sent).applied()
    assert decoded == [4]
    assert read(came) == [(0, 1, "of 0"), (1, 2, "of 1"), (5, 3, "of 5"), (3, 4, "of 3")]
    assert [each.rows for each in came] == [1, 2, 0, 1]
    assert [each.operator_us for each in came] == [250_000, 500_000, 0, 250_000], "each has the time of its own rows"
    alone = [again(node, 1, partition, mine).output for partition, mine in sent.items()]
    assert [len(each) for each in alone] == [len(each.output) for each in came], "nobody's bytes are in another's"
    assert [again(node, 1, partition, mine).replayed for partition, mine in sent.items()] == [True] * 4


def test_an_operator_that_fails_in_one_partition_spoils_no_other(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(node, 0, {p: rows((p, 1)) for p in range(3)}).applied()
    monkeypatch.setattr(Sums, "met", lambda row, total: 1 / 0 if row.k == 1 else None)
    told = send(node, 1, {p: rows((p, 10)) for p in range(3)})
    assert isinstance(told.outcomes[1], OperatorFailed)
    assert totals(node) == {0: 11, 1: 1, 2: 11}
    monkeypatch.setattr(Sums, "met", None)
    assert not again(node, 1, 1, rows((1, 10))).replayed


@pytest.mark.parametrize("wrong", [(1, "many", ""), (1, 2), [1, 2, ""], {"k": 1}])
def test_output_that_is_not_as_declared_spoils_no_other(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(Sums, "met", lambda row, total: wrong if row.k == 1 else None)
    told = send(node, 0, {p: rows((p, 10)) for p in range(3)})
    assert isinstance(told.outcomes[1], OutputMismatch)
    assert totals(node) == {0: 10, 2: 10}
    monkeypatch.setattr(Sums, "met", None)
    assert read([again(node, 0, 1, rows((1, 10)))]) == [(1, 10, "of 1")]


def test_a_row_or_an_array_that_the_operator_uses_again_is_as_it_was_when_it_was_given(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {}

    def same(of: Any, total: int) -> dict[str, Any]:
        row.update(k=of.k, total=total, note="")
        return row

    monkeypatch.setattr(Sums, "met", same)
    sent = {p: rows((p, p + 10)) for p in range(3)}
    assert read(send(node, 0, sent).applied()) == [(0, 10, ""), (1, 11, ""), (2, 12, "")]
    assert read(send(node, 0, sent, operator="Reuses").applied(), Reuses) == [(0, 10), (1, 11), (2, 12)]


def test_a_null_key_is_only_its_partitions_matter(node: ReplicaNode) -> None:
    told = send(node, 0, {0: rows((0, 1)), 1: rows((1, 1), (None, 1)), 2: rows((2, 1))})
    assert isinstance(told.outcomes[1], NullKey)
    assert totals(node) == {0: 1, 2: 1}


def test_a_partition_that_comes_twice_has_the_batch_once(node: ReplicaNode) -> None:
    slices = shares_of("Sums", Batch("s", 0), {0: rows((0, 1)), 1: rows((0, 1))})
    slices.parts[1] = slices.parts[1]._replace(partition=0)
    told = Told()
    node.batches.apply(slices, told)
    assert [each.replayed for each in told.applied()] == [False, True]
    assert totals(node) == {0: 1}


def test_a_disk_that_refuses_one_partitions_write_refuses_no_others(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(node, 0, {p: rows((p, 1)) for p in range(3)}).applied()
    store = node._registry.store(node._registry.local(PartitionId("Sums", 1)))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "apply", full)
    told = send(node, 1, {p: rows((p, 10)) for p in range(3)})
    assert isinstance(told.outcomes[1], DiskFull)
    assert totals(node) == {0: 11, 1: 1, 2: 11}
    assert not again(node, 1, 1, rows((1, 10))).replayed, "it was opened anew"


def test_a_group_is_committed_when_it_has_come_to_many_rows(node: ReplicaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, running):
        monkeypatch.setattr(module, "GROUP_ROWS", 4)  # two rows and their outputs
    seen: list[int] = []

    class Counts(Told):
        def begun(self, number: int) -> None:
            seen.append(len(self.outcomes))

    send(node, 0, {p: rows((p, 1)) for p in range(4)}, Counts()).applied()
    assert seen == [0, 0, 2, 2]


def test_nobody_waits_for_a_partition_that_was_slow(node: ReplicaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    send(node, 0, {p: rows((p, 1)) for p in range(3)}).applied()
    processor = node._registry.local(PartitionId("Sums", 1)).processor
    assert processor is not None
    assert processor.operator_us < LONG_S * 1e6
    processor.operator_us = round(2e6 * LONG_S)
    seen: list[int] = []
    told = Told()
    monkeypatch.setattr(Sums, "met", lambda row, total: seen.append(len(told.outcomes)))
    send(node, 1, {p: rows((p, 1)) for p in range(3)}, told).applied()
    assert seen == [0, 1, 1]


def test_who_has_to_wait_for_a_partition_keeps_no_other(node: ReplicaNode) -> None:
    local = node._registry.local(PartitionId("Sums", 1))
    first, go_on = threading.Event(), threading.Event()

    class Tells(Told):
        def told(self, number: int, outcome: Any) -> None:
            super().told(number, outcome)
            first.set()

    held = threading.Event()

    def hold() -> None:
        with local.work:
            held.set()
            assert go_on.wait(LONG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(LONG_S)
    told = Tells()
    applying = threading.Thread(target=send, args=(node, 0, {p: rows((p, 1)) for p in range(3)}, told))
    applying.start()
    assert first.wait(LONG_S)
    assert list(told.outcomes) == [0]
    go_on.set()
    holder.join(LONG_S)
    applying.join(LONG_S)
    assert len(told.applied()) == 3


def test_who_opens_a_source_keeps_no_partition_while_it_waits_for_another(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(node, 0, {p: rows((p, 1)) for p in range(3)}).applied()
    held, waits, go_on = threading.Event(), threading.Event(), threading.Event()
    local, alone, opened = node._registry.local(PartitionId("Sums", 1)), node.batches._beside_batches, list[Any]()

    def hold() -> None:
        with local.work:
            held.set()
            assert go_on.wait(LONG_S)

    def beside(*arguments: Any) -> Any:
        waits.set()
        return alone(*arguments)

    def open_source() -> None:
        partitions = [PartitionId("Sums", p) for p in range(3)]
        opened.append(node.batches.open_source(partitions, "t", Session(1, "me")))

    monkeypatch.setattr(node.batches, "_beside_batches", beside)
    threads = [threading.Thread(target=hold), threading.Thread(target=open_source)]
    threads[0].start()
    assert held.wait(LONG_S)
    threads[1].start()
    assert waits.wait(LONG_S)
    assert [again(node, 1, p, rows((p, 1))).sequence for p in (0, 2)] == [3, 3], "it is open there, and they serve"
    go_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert [{each.partition: at for each, at in found.items()} for found in opened] == [{0: 2, 1: 2, 2: 2}]


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_batch_that_is_taken_away_takes_nobody_with_it(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    entered, go_on, let_go = threading.Event(), threading.Event(), threading.Event()

    def wait(row: Any, total: int) -> None:
        if row.k == 1 and not entered.is_set():
            entered.set()
            assert go_on.wait(LONG_S)
            if how == "raises":
                raise ValueError

    monkeypatch.setattr(Sums, "met", wait)
    plain = node.batches.running._drop
    monkeypatch.setattr(node.batches.running, "_drop", lambda members: (plain(members), let_go.set()))
    told = Told()
    applying = threading.Thread(target=send, args=(node, 0, {p: rows((p, 1)) for p in range(3)}, told))
    applying.start()
    assert entered.wait(LONG_S)
    (run,) = node.batches.running.active()
    assert run.partition.partition == 1
    assert node.batches.running.take_away(run)
    run.left = True
    assert let_go.wait(LONG_S)
    assert not again(node, 0, 0, rows((0, 1))).replayed, "it was not committed, and is served at once"
    with pytest.raises(OperatorStuck, match="cause=earlier_batch") as caught:
        again(node, 0, 1, rows((1, 1)))
    assert not is_hopeless(caught.value, faults=0), "an outbox would put rows aside that no operator has seen"
    own = node.batches.refusal(run.partition)
    assert own is not None
    assert is_hopeless(own, faults=0)
    assert not again(node, 0, 2, rows((2, 1))).replayed
    go_on.set()
    applying.join(LONG_S)
    assert set(told.outcomes) == {1}
    assert totals(node) == {0: 1, 2: 1}
    assert not again(node, 0, 1, rows((1, 1))).replayed
    assert totals(node) == {0: 1, 1: 1, 2: 1}


def test_no_database_that_refused_a_seal_stays_open_behind_a_batch_that_is_taken_away(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on, let_go = threading.Event(), threading.Event(), threading.Event()

    def wait(row: Any, total: int) -> None:
        if row.k == 1:
            entered.set()
            assert go_on.wait(LONG_S)

    def refused(*_: Any, **__: Any) -> None:
        raise Exception("Aborted: the database does not say why")

    monkeypatch.setattr(Sums, "met", wait)
    plain = node.batches.running._drop
    monkeypatch.setattr(node.batches.running, "_drop", lambda members: (plain(members), let_go.set()))
    applying = threading.Thread(target=send, args=(node, 0, {p: rows((p, 1)) for p in range(2)}))
    applying.start()
    assert entered.wait(LONG_S)
    ids, other = [PartitionId("Sums", number) for number in range(2)], ReplicaInfo("b", "s", "b:1")
    former = [node._registry.local(each).store for each in ids]
    assert not any(node.sender.fence(each, f"m{each.partition}", 2, other, cold=True) for each in ids)
    (run,) = node.batches.running.active()
    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "apply", refused)
        with pytest.raises(Exception, match="does not say why"):
            node.batches.running.take_away(run)
        assert let_go.wait(LONG_S)
    run.left = True
    assert all(node._registry.local(each).store is not store for each, store in zip(ids, former, strict=True))
    assert all(node.sender.fence(each, f"m{each.partition}", 2, other, cold=True) for each in ids)
    go_on.set()
    applying.join(LONG_S)


def test_what_waits_for_a_slow_partition_is_let_go_and_the_slow_one_is_not(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(row: Any, total: int) -> None:
        if row.k == 1:
            entered.set()
            assert go_on.wait(LONG_S)

    monkeypatch.setattr(Sums, "met", wait)
    told = Told()
    applying = threading.Thread(target=send, args=(node, 0, {p: rows((p, 1)) for p in range(3)}, told))
    applying.start()
    assert entered.wait(LONG_S)
    assert not node.batches.running.keeps_waiting(LONG_S)
    node.batches.running.spare(LONG_S)
    assert node.batches.running.keeps_waiting(0.0)
    node.batches.running.spare(0.0)
    assert not node.batches.running.keeps_waiting(0.0)
    assert not again(node, 0, 0, rows((0, 1))).replayed
    go_on.set()
    applying.join(LONG_S)
    assert set(told.outcomes) == {1, 2}
    assert totals(node) == {0: 1, 1: 1, 2: 1}


def test_a_thread_that_hangs_between_two_partitions_keeps_none(node: ReplicaNode) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Hangs(Told):
        def begun(self, number: int) -> None:
            if number == 1:
                entered.set()
                assert go_on.wait(LONG_S)

    told = Hangs()
    applying = threading.Thread(target=send, args=(node, 0, {p: rows((p, 1)) for p in range(3)}, told))
    applying.start()
    assert entered.wait(LONG_S)
    node.batches.running.leave_behind()
    assert not again(node, 0, 0, rows((0, 1))).replayed
    go_on.set()
    applying.join(LONG_S)
    assert not told.outcomes, "the group was not its any more"
    assert totals(node) == {0: 1}
    assert not again(node, 0, 1, rows((1, 1))).replayed


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_the_child_of_an_operator_that_forks_commits_nothing(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    codes: list[int] = []

    def fork(row: Any, total: int) -> None:
        if row.k == 1:
            child = os.fork()
            if child:
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            elif ends == "raises":
                raise SystemExit(0)

    monkeypatch.setattr(Sums, "met", fork)
    send(node, 0, {p: rows((p, 1)) for p in range(3)}).applied()
    assert codes == [70]
    assert totals(node) == {0: 1, 1: 1, 2: 1}
