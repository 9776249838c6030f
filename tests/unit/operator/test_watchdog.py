"""Batches that are interrupted or taken away at any moment are applied whole or not at all."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Context, Operator, state
from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import OperatorStuck
from stateflow.operator.operator import describe
from stateflow.operator.watchdog import in_operator, stalled_s
from stateflow.partition.environment import WorkLock
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.executor import PAUSED, FairQueue, LeftBehind, WorkerThread
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
P = PartitionId("Adds", 0)


class Adds(Operator):
    """An operator that works a moment on each row, so that it can be interrupted in the middle."""

    key = "k"
    output = "k string, total long"
    total = state.value(int, default=0)
    seen = state.map(int, int)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        for n in range(20):
            self.total.value += 1
            for _ in range(n * 20):
                pass
            self.total.value -= 1
        self.total.value += row.v
        self.seen[row.v] = self.seen.get(row.v, 0) + 1
        yield row.k, self.total.value


class Waits(Adds):
    entered, go_on = threading.Event(), threading.Event()

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.total.value += row.v
        if row.v == 0:
            Waits.entered.set()
            Waits.go_on.wait()
        yield row.k, self.total.value


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ReplicaNode]:
    node = ReplicaNode(ReplicaInfo("a", "s", "", 1), tmp_path / "a")
    node.create(describe(Adds, 2), [0, 1], 1)
    node.create(describe(Waits, 2), [0, 1], 1)
    yield node
    node.close()


def send(node: ReplicaNode, number: int, partition: PartitionId = P, **values: int) -> Applied:
    rows = pa.RecordBatch.from_pylist([{"k": k, "v": v} for k, v in values.items()], schema=SCHEMA)
    applied = apply_to(
        node, partition, 1, Batch("s", number), SCHEMA.serialize().to_pybytes(), rows.serialize().to_pybytes()
    )
    assert isinstance(applied, Applied)
    return applied


def total(node: ReplicaNode, partition: PartitionId = P) -> dict[Any, Any]:
    return {key: value for key, _, value in node.reader.scan(partition, "total")}


def test_a_batch_that_is_interrupted_anywhere_is_there_whole_or_not_at_all(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own hook would be interrupted, too
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            for run in node.batches.running.active():
                run.interrupt()
            time.sleep(0.0003)

    disturbing = threading.Thread(target=disturb)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    disturbing.start()
    interrupted, number = 0, 0
    try:
        while number < 100 or not interrupted:  # on a busy machine a hundred batches may pass between two attempts
            try:
                applied = send(node, number, a=1, c=2, d=3, f=4)
            except OperatorStuck:
                interrupted += 1
                continue
            assert not applied.replayed, "what was interrupted had not been committed"
            number += 1
    finally:
        over.set()
        disturbing.join()
        sys.setswitchinterval(switch)
    assert total(node) == {"a": number, "c": 2 * number, "d": 3 * number, "f": 4 * number}
    position = node.reader.position(P, "s")
    assert position is not None
    assert position.batch == number - 1
    send(node, number, a=1)


def test_what_was_taken_away_never_commits_and_its_partition_comes_back_with_it(node: ReplicaNode) -> None:
    waits = PartitionId("Waits", 0)
    Waits.entered.clear()
    Waits.go_on.clear()
    send(node, 0, waits, a=5)
    raised: list[OperatorStuck] = []

    def work() -> None:
        try:
            send(node, 1, waits, a=0)
        except OperatorStuck as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert Waits.entered.wait(30)
    (run,) = node.batches.running.active()
    assert node.batches.running.overdue(3600) is None
    assert node.batches.running.overdue(0) is run
    assert node.batches.running.take_away(run)
    run.left = True
    assert node.batches.running.active() == []
    assert node.batches.running.is_stuck
    with pytest.raises(OperatorStuck, match="waits where it cannot be interrupted") as caught:
        send(node, 1, waits, a=7)
    assert "go_on.wait" in caught.value.where["traceback"]
    send(node, 0, PartitionId("Waits", 1), b=1)
    node.sender.snapshot(waits, "m", False)  # needs the partition's lock, which is free
    assert total(node, waits) == {"a": 5}
    Waits.go_on.set()
    thread.join(30)
    assert len(raised) == 1
    assert not node.batches.running.is_stuck
    assert not send(node, 1, waits, a=7).replayed
    assert total(node, waits) == {"a": 12}


def test_a_batch_that_has_ended_is_neither_interrupted_nor_taken_away(node: ReplicaNode) -> None:
    running = []
    apply = Waits.process

    def look(self: Waits, row: Any, ctx: Context) -> Iterator[Any]:
        running.extend(node.batches.running.active())
        yield from apply(self, row, ctx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waits, "process", look)
        send(node, 0, PartitionId("Waits", 0), a=5)
    (run,) = running
    run.interrupt()
    assert not run.interrupted
    assert not node.batches.running.take_away(run)
    send(node, 1, PartitionId("Waits", 0), a=5)


def test_only_the_operators_own_code_is_interrupted() -> None:
    assert not in_operator(None)
    assert not in_operator(sys._getframe()), "nobody of stateflow called it"


# -- locks and lanes ------------------------------------------------------------------------------------------


def test_a_lock_that_is_taken_away_is_free_for_those_who_wait_and_not_freed_by_its_former_holder() -> None:
    lock = WorkLock()
    took, let_go, order = threading.Event(), threading.Event(), []

    def hold() -> None:
        with lock, lock:
            took.set()
            let_go.wait(30)
        order.append("former")

    def wait() -> None:
        with lock:
            order.append("next")

    former, following = threading.Thread(target=hold), threading.Thread(target=wait)
    former.start()
    assert took.wait(30)
    following.start()
    lock.take_away()
    following.join(30)
    assert order == ["next"]
    with lock:
        let_go.set()
        former.join(30)
        other = threading.Thread(target=wait)
        other.start()
        other.join(0.05)
        assert other.is_alive(), "the former holder freed what is not its own"
    other.join(30)
    assert order == ["next", "former", "next"]


@pytest.mark.parametrize(
    ("busy_since", "has_batch", "served_at", "stalled"),
    [
        (None, False, 5.0, 0.0),
        (8.0, True, 5.0, 0.0),
        (8.0, False, 5.0, 2.0),
        (3.0, False, 9.0, 1.0),  # the running batch ended a second ago, and the next one has not begun
        (3.0, False, float("-inf"), 7.0),
    ],
)
def test_a_thread_is_stalled_while_it_has_work_and_no_batch(
    busy_since: float | None, has_batch: bool, served_at: float, stalled: float
) -> None:
    assert stalled_s(busy_since, has_batch, served_at, now=10.0) == stalled


def test_who_had_least_of_a_lane_comes_first() -> None:
    """A caller with many jobs waits behind its own, and an idle caller saves up no time."""
    fair = FairQueue()
    jobs: Any = {name: (None, name) for name in ("f0", "f1", "f2", "f3", "a0", "a1", "a2", "b0", "own")}
    for name in ("f0", "f1", "f2"):
        fair.give("flood", jobs[name])
    took: list[str] = []

    def turn(seconds: float) -> None:
        caller, (_, name) = fair.take()
        fair.took(caller, seconds)
        took.append(name)  # type: ignore[arg-type]

    turn(5.0)
    for name in ("a0", "a1", "a2"):
        fair.give("a", jobs[name])
    turn(2.0)
    turn(2.0)
    fair.give(None, jobs["own"])
    fair.give("b", jobs["b0"])
    assert fair.others_go_first("b", 0.0), "the process itself"
    turn(9.0)
    turn(0.5)
    turn(2.0)
    turn(5.0)
    assert took == ["f0", "a0", "a1", "own", "b0", "a2", "f1"]
    assert not fair.others_go_first("flood", 0.0)
    for number in range(3000):
        fair.give(number, jobs["a0"])
        turn(0.001)
    assert len(fair._had) <= 1002
    turn(0.0)
    assert took[-1] == "f2"


def test_only_who_had_less_goes_before_the_rest_of_a_job() -> None:
    fair = FairQueue()
    job: Any = (None, None)
    fair.give("flood", job)
    assert fair.take()[0] == "flood"
    assert not fair.others_go_first("flood", 100.0), "nobody waits"
    fair.give("a", job)
    assert not fair.others_go_first("flood", 0.0)
    assert fair.others_go_first("flood", 0.001)
    fair.took("flood", 5.0)
    fair.give("flood", job)
    assert fair.take()[0] == "a"
    assert not fair.others_go_first("a", 4.9), "a flood is behind whoever has had less"
    assert fair.others_go_first("a", 5.1)


def test_a_job_that_has_paused_comes_before_the_others_of_its_caller() -> None:
    fair = FairQueue()
    jobs: Any = {name: (None, name) for name in ("f0", "f1", "a0")}
    for name in ("f0", "f1"):
        fair.give("flood", jobs[name])
    caller, job = fair.take()
    fair.took(caller, 1.0)
    fair.give(caller, job, first=True)
    fair.give("a", jobs["a0"])
    took: list[Any] = []
    for _ in range(3):
        caller, (_, name) = fair.take()
        fair.took(caller, 1.0)
        took.append(name)
    assert took == ["a0", "f0", "f1"]


def test_a_job_pauses_for_others_and_goes_on_before_its_callers_next_ones() -> None:
    worker = WorkerThread("test", SYSTEM_CLOCK)
    began, go_on, done = threading.Event(), threading.Event(), list[str]()

    def long() -> object:
        done.append("long")
        began.set()
        assert go_on.wait(30)
        return PAUSED if worker.others_go_first("flood") else len(done)

    first = worker.submit_for("flood", long)
    assert began.wait(30)
    rest = [worker.submit_for(who, functools.partial(done.append, who)) for who in ("flood", "a", "a")]
    go_on.set()
    for each in rest:
        each.result(30)
    assert done == ["long", "a", "a", "long", "flood"]
    assert first.result(30) == 4
    worker.shutdown()


def test_a_job_that_pauses_while_its_thread_is_shut_down_is_over() -> None:
    worker = WorkerThread("test", SYSTEM_CLOCK)
    began, go_on, done = threading.Event(), threading.Event(), list[str]()

    def long() -> object:
        began.set()
        assert go_on.wait(30)
        return PAUSED

    first = worker.submit_for("flood", long)
    assert began.wait(30)
    last = worker.submit_for("a", functools.partial(done.append, "a"))
    worker.shutdown(wait=False)
    go_on.set()
    last.result(30)
    assert first.result(30) is PAUSED
    assert done == ["a"]


def test_callers_of_a_lane_take_turns() -> None:
    """Jobs of one caller run in their order."""
    worker = WorkerThread("test", SYSTEM_CLOCK)
    began, go_on, done = threading.Event(), threading.Event(), list[str]()

    def busy() -> bool:
        began.set()
        return go_on.wait(30)

    first = worker.submit_for("flood", busy)
    assert began.wait(30)
    assert not worker.others_go_first("flood")
    rest = [worker.submit_for("flood", functools.partial(done.append, f"flood {n}")) for n in range(4)]
    rest += [worker.submit_for("a", functools.partial(done.append, f"a {n}")) for n in range(2)]
    rest += [worker.submit(done.append, "own")]
    assert worker.others_go_first("flood")
    assert worker.others_go_first("nobody"), "the process itself waits"
    go_on.set()
    worker.shutdown()
    assert [each.result(30) for each in rest] == [None] * 7
    assert done[:3] == ["own", "a 0", "a 1"], "who had none of it yet"
    assert done[3:] == [f"flood {n}" for n in range(4)]
    assert not worker.others_go_first("nobody")
    assert first.result(0)
    with pytest.raises(RuntimeError):
        worker.submit(done.append, "late")


def test_who_hangs_has_had_the_time_for_which_the_others_waited() -> None:
    clock = ManualClock()
    worker = WorkerThread("test", clock)
    hangs, busy, go_on, done = threading.Event(), threading.Event(), threading.Event(), list[str]()

    def hang() -> None:
        hangs.set()
        go_on.wait(30)

    def keep_busy() -> None:
        busy.set()
        go_on.wait(30)

    worker.submit_for("hangs", hang)
    assert hangs.wait(30)
    clock.advance(60)
    worker.submit(keep_busy)
    worker.leave_behind(worker.busy_since)
    assert busy.wait(30)
    last = [worker.submit_for(who, functools.partial(done.append, who)) for who in ("hangs", "other", "other")]
    go_on.set()
    for each in last:
        each.result(30)
    assert done == ["other", "other", "hangs"]
    worker.shutdown()


def test_a_lane_goes_on_without_a_thread_that_does_not_come_back() -> None:
    worker = WorkerThread("test", SYSTEM_CLOCK)
    began, go_on, done = threading.Event(), threading.Event(), []

    def stuck() -> str:
        began.set()
        go_on.wait(30)
        return "late"

    first = worker.submit(stuck)
    rest = [worker.submit(done.append, n) for n in range(3)]
    assert began.wait(30)
    assert worker.busy_since is not None
    worker.leave_behind(worker.busy_since)
    with pytest.raises(LeftBehind):
        first.result(30)
    for each in rest:
        each.result(30)
    assert done == [0, 1, 2]
    go_on.set()
    worker.submit(done.append, 3).result(30)
    assert done == [0, 1, 2, 3]
    worker.shutdown()
    with pytest.raises(ZeroDivisionError):
        WorkerThread("test", SYSTEM_CLOCK).submit(lambda: 1 / 0).result(30)


def test_a_thread_whose_job_returned_while_it_was_judged_is_not_left_behind() -> None:
    clock = ManualClock()
    worker = WorkerThread("test", clock)
    judged = worker.submit(lambda: worker.busy_since).result(30)
    for waits in range(20):
        worker.leave_behind(judged)  # perhaps while the thread waits for its next job
        assert worker.submit(lambda waits=waits: waits).result(30) == waits
    clock.advance(1)
    began, go_on = threading.Event(), threading.Event()

    def other() -> str:
        began.set()
        go_on.wait(30)
        return "done"

    running = worker.submit(other)
    assert began.wait(30)
    worker.leave_behind(judged)
    go_on.set()
    assert running.result(30) == "done"
    worker.shutdown()
