"""Batch slices on their way to their partitions: joined from pieces, counted while they wait, sent back when late."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import InvalidArgument, Moved, NotOwner, Unavailable
from stateflow.partition.batches import Answers
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Frame
from stateflow.replica.applying import SLICE_S, Answer, Applier
from stateflow.replica.executor import LeftBehind
from stateflow.replica.streams import Piece
from stateflow.types import PartitionId, ReplicaInfo

SOON_S = 0.01
LONG_S = 30.0
MUCH = 1000
SCHEMA = pa.schema([("v", pa.int64())])


class Node:
    """A node. ``here``: by partition, the result of its rows; None: the partition is on its way."""

    def __init__(self, here: dict[int, Any], hold_s: float = LONG_S) -> None:
        self.settings = SimpleNamespace(
            hold_timeout_s=hold_s, waiting_bytes_max=2 * MUCH, stop_timeout_s=LONG_S, acknowledge="sync"
        )
        self.here = here
        self.rows: list[tuple[int, list[int]]] = []
        self.batches = self.running = self

    def skip(self, frame: Frame) -> list[int]:
        return []

    def apply(self, slices: BatchSlices, answers: Answers) -> None:
        for number, part in enumerate(slices.parts):
            answers.begun(number)
            rows = [] if slices.rows is None else slices.rows.slice(part.start, part.stop - part.start)["v"].to_pylist()
            self.rows.append((part.partition, rows))
            answers.told(number, self.here[part.partition])

    def lifecycle(self, partition: PartitionId) -> Any:
        return SimpleNamespace(epoch=6)

    def active(self) -> list[Any]:
        return []


class Sender:
    """A sender of ``requests``. ``then`` is awaited once all of them are sent."""

    caller = "s"

    def __init__(self, requests: Iterable[Piece], then: Any = None) -> None:
        self.requests, self.then = list(requests), then
        self.taken = asyncio.Event()
        self.taken.set()
        self.answers: list[Answer] = []
        self.past: list[int] = []

    async def receive(self, patience_s: float | None = None) -> Piece | None:
        if self.requests:
            return self.requests.pop(0)
        if self.then is not None:
            async with asyncio.timeout(patience_s):
                await self.then()
        return None

    async def answer(self, answers: Sequence[Answer]) -> None:
        self.answers += answers

    async def passed(self, partitions: Sequence[int]) -> None:
        self.past += partitions

    async def give_sign_of_life(self) -> None: ...


def frame(rows: dict[int, list[int]], batch: Batch = Batch("s", 0)) -> Frame:  # noqa: B008 - frozen
    values = pa.array([value for mine in rows.values() for value in mine], pa.int64())
    message = pa.record_batch([values], schema=SCHEMA).serialize().to_pybytes() if len(values) else b""
    schema, counts = SCHEMA.serialize().to_pybytes(), [len(mine) for mine in rows.values()]
    return Frame("Op", batch, schema, list(rows), [1] * len(rows), counts, [], [], message)


def whole(rows: dict[int, list[int]]) -> Piece:
    return Piece(frame(rows), frame(rows).message, True)


def in_pieces(rows: dict[int, list[int]], *cuts: int) -> list[Piece]:
    message = frame(rows).message
    pieces = [message[start:stop] for start, stop in pairwise([0, *cuts, len(message)])]
    return [Piece(None if n else frame(rows), piece, n == len(cuts)) for n, piece in enumerate(pieces)]


def applied(rows: int) -> Applied:
    return Applied(b"", False, rows)


def serve(node: Node, sender: Sender, changed: Any = None) -> Applier:
    async def run() -> Applier:
        asked: list[PartitionId] = []
        event = changed or (lambda _: asyncio.Event())
        applier = Applier(cast(ReplicaNode, node), SYSTEM_CLOCK, event, asked.append)
        try:
            await asyncio.wait_for(applier.run(sender), LONG_S)
        finally:
            await applier.close()
            assert applier.waiting.bytes == 0, "rows are counted that nobody has"
        return applier

    return asyncio.run(run())


def test_pieces_are_joined() -> None:
    node = Node({0: applied(1), 1: applied(2), 2: applied(0), 3: applied(1)})
    sender = Sender([whole({1: [3]}), *in_pieces({0: [1, 2], 2: []}, 10, 20), whole({3: [4]})])
    applier = serve(node, sender)
    assert node.rows == [(1, [3]), (0, [1, 2]), (2, []), (3, [4])]
    assert [partition.partition for partition, _ in sender.answers] == [1, 0, 2, 3]
    (sample,) = applier.samples.after(0)
    assert (sample.operator, sample.rows, sample.held_ms) == ("Op", 4, 0.0)


def test_rows_of_a_call_that_fails_count_where_they_were_applied() -> None:
    async def breaks() -> None:
        raise ConnectionResetError

    async def run() -> Applier:
        node = cast(ReplicaNode, Node({0: applied(3), 1: NotOwner("it went", remedy="ask")}))
        applier = Applier(node, SYSTEM_CLOCK, lambda _: asyncio.Event(), lambda _: None)
        with pytest.raises(ConnectionResetError):
            await applier.run(Sender([whole({0: [1, 2, 3], 1: [4]})], breaks))
        await applier.close()
        return applier

    samples = asyncio.run(run()).samples
    assert (samples.rows, samples.by_operator["Op"].rows) == (3, 3)
    assert samples.after(0) == [], "how long it took says nothing"


def test_a_share_that_moved_says_where_it_went() -> None:
    sender = Sender([whole({0: [1]})])
    serve(Node({0: ReplicaInfo("b", "s", "b:1")}), sender)
    ((_, answer),) = sender.answers
    assert isinstance(answer, Moved)
    assert (answer.where["address"], answer.where["epoch"]) == ("b:1", 6)


def test_a_share_whose_partition_does_not_come_is_sent_back() -> None:
    sender = Sender([whole({0: [1], 1: [2]})])
    applier = serve(Node({0: None, 1: applied(1)}, hold_s=SOON_S), sender)
    assert [partition.partition for partition, _ in sender.answers] == [1, 0]
    assert isinstance(sender.answers[1][1], NotOwner)
    assert applier.samples.after(0)[0].held_ms > 0


def test_a_share_whose_partition_comes_is_applied_then() -> None:
    node = Node({0: None})

    class Arrives(asyncio.Event):
        async def wait(self) -> Any:
            node.here[0] = applied(3)
            return True

    sender = Sender([whole({0: [1]})])
    serve(node, sender, lambda _: Arrives())
    assert [answer for _, answer in sender.answers] == [applied(3)]


def test_a_call_that_ends_while_it_waits_for_a_partition_leaves_no_task() -> None:
    """A sender that went away while its partition was awaited left a task behind for each partition."""
    waiting = asyncio.Event()

    def changed(_: PartitionId) -> asyncio.Event:
        waiting.set()
        return event

    event = asyncio.Event()

    async def run() -> None:
        applier = Applier(cast(ReplicaNode, Node({0: None})), SYSTEM_CLOCK, changed, lambda _: None)
        call = asyncio.create_task(applier.run(Sender([whole({0: [1]})])))
        await waiting.wait()
        while len(asyncio.all_tasks()) < 3:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call], timeout=LONG_S)
        await asyncio.sleep(0)
        await applier.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_rows_that_would_wait_beyond_the_limit_are_refused() -> None:
    much = {0: list(range(MUCH))}
    with pytest.raises(InvalidArgument, match="would be buffered here"):
        serve(Node({}), Sender(in_pieces(much, MUCH + 1)))
    with pytest.raises(InvalidArgument, match="would be buffered here"):
        serve(Node({0: None}), Sender([whole(much)]))


def test_rows_of_others_do_not_wait_with_those_that_do() -> None:
    arrived: list[int] = []

    class Arrives(asyncio.Event):
        async def wait(self) -> Any:
            arrived.append(node.here.setdefault(5, 0))
            node.here[0] = applied(1)
            return True

    node = Node({0: None, 1: applied(MUCH)})
    sender = Sender([whole({0: [7], 1: list(range(MUCH))})])
    serve(node, sender, lambda _: Arrives())
    assert node.rows[-1] == (0, [7])
    assert [partition.partition for partition, _ in sender.answers] == [1, 0]


@pytest.mark.parametrize("counts", [[1, 2], [0, 1], [3, 3], [1 << 31, 1 << 31]], ids=str)
def test_rows_that_are_not_as_many_as_was_said_are_refused(counts: list[int]) -> None:
    node, said = Node({0: applied(1), 1: applied(1)}), frame({0: [1], 1: [2]})._replace(counts=counts)
    with pytest.raises(InvalidArgument, match="2 rows arrived"):
        serve(node, Sender([Piece(said, said.message, True)]))
    assert node.rows == []


def test_rows_that_cannot_be_read_are_refused() -> None:
    node, said = Node({0: applied(1)}), frame({0: [1, 2, 3]})
    for message in (b"none", said.message[:-8], said.message[:20]):
        with pytest.raises(InvalidArgument, match="cannot be read as Arrow"):
            serve(node, Sender([Piece(said._replace(message=message), message, True)]))
    assert node.rows == []


def test_a_part_that_was_given_up_is_asked_for_again() -> None:
    node = Node({0: applied(1), 1: applied(2)})
    gives_up = [1]

    class Spares(Node):
        def apply(self, slices: BatchSlices, answers: Answers) -> None:
            for number, part in enumerate(slices.parts):
                answers.begun(number)
                node.rows.append((part.partition, []))
                if part.partition not in gives_up:
                    answers.told(number, node.here[part.partition])
            gives_up.clear()

    sender = Sender([whole({0: [1], 1: [2]})])
    serve(Spares(node.here), sender)
    assert [number for number, _ in node.rows] == [0, 1, 1]
    assert [answer for _, answer in sender.answers] == [applied(1), applied(2)]


def test_a_rest_that_does_not_come_is_not_waited_for() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="the remaining rows of a batch"):
        serve(Node({}, hold_s=SOON_S), Sender(in_pieces({0: [1]}, 4)[:1], never))


class SkippedBatches(Node):
    """A node that skips all partitions without rows but the first; or none, since its thread does not return."""

    comes_back = True

    def skip(self, frame: Frame) -> list[int]:
        if not self.comes_back:
            raise LeftBehind
        return [place for place, count in enumerate(frame.counts) if not count and frame.partitions[place]]


def test_partitions_that_a_batch_passes_are_answered_and_not_visited() -> None:
    node = SkippedBatches({0: applied(0), 2: applied(2)})
    sender = Sender([whole({0: [], 1: [], 2: [3, 4], 3: []}), whole({5: []})])
    applier = serve(node, sender)
    assert node.rows == [(0, []), (2, [3, 4])]
    assert [partition.partition for partition, _ in sender.answers] == [0, 2]
    assert sender.past == [1, 3, 5]
    (sample,) = applier.samples.after(0)
    assert (sample.operator, sample.rows) == ("Op", 2)


def test_a_batch_of_a_sparse_source_or_with_rows_everywhere_asks_nobody_to_pass() -> None:
    node = SkippedBatches({0: applied(1), 1: applied(0)})
    node.skip = None  # type: ignore[assignment, method-assign]
    sparse = frame({1: []}, Batch("s", 0, sparse=True))
    serve(node, Sender([whole({0: [1]}), Piece(sparse, sparse.message, True)]))
    assert [partition for partition, _ in node.rows] == [0, 1]


def test_where_the_thread_does_not_come_back_partitions_are_visited() -> None:
    node = SkippedBatches({1: applied(0)})
    node.comes_back = False
    sender = Sender([whole({1: []})])
    serve(node, sender)
    assert node.rows == [(1, [])]
    assert sender.past == []


class Slow(Node):
    """A node on whose clock each partition takes longer than a time slice.

    Attributes:
        took_s: time of single partitions, in seconds.
        held: partition → event for which it waits.
        began: partitions that were begun.
    """

    def __init__(self, partitions: int, *held: int) -> None:
        super().__init__({number: applied(number) for number in range(partitions)})
        self.clock, self.took_s, self.calls = ManualClock(), dict[int, float](), list[BatchSlices]()
        self.held = {partition: threading.Event() for partition in held}
        self.began = {partition: threading.Event() for partition in self.here}

    def apply(self, slices: BatchSlices, answers: Answers) -> None:
        self.calls.append(slices)
        for number, part in enumerate(slices.parts):
            if not answers.goes_on():
                return
            answers.begun(number)
            self.rows.append((part.partition, []))
            slices.arrived(part, ("v",))
            self.began[part.partition].set()
            assert part.partition not in self.held or self.held[part.partition].wait(LONG_S)
            self.clock.advance(self.took_s.get(part.partition, 2 * SLICE_S))
            answers.told(number, self.here[part.partition])

    @property
    def order(self) -> list[int]:
        return [partition for partition, _ in self.rows]


def sender_of(partitions: Iterable[int], caller: str = "s") -> Sender:
    made = Sender([whole({number: [number] for number in partitions})])
    made.caller = caller
    return made


class Beside:
    """Calls that are served beside each other. The first partition of the first call waits until all have given their
    jobs to the batch thread."""

    def __init__(self, node: Slow) -> None:
        self.node = node
        self.applier = Applier(cast(ReplicaNode, node), node.clock, lambda _: asyncio.Event(), lambda _: None)
        self.calls: list[asyncio.Task[None]] = []

    async def begin(self, *senders: Sender) -> None:
        for sender in senders:
            self.calls.append(asyncio.create_task(self.applier.run(sender)))
            while len(self.applier.watch._callers) < len(self.calls):
                await asyncio.sleep(0)
            await asyncio.to_thread(self.node.began[0].wait, LONG_S)

    async def end(self) -> None:
        for event in self.node.held.values():
            event.set()
        await asyncio.wait_for(asyncio.gather(*self.calls), LONG_S)
        await self.applier.close()


def serve_beside(node: Slow, *senders: Sender) -> None:
    async def run() -> None:
        beside = Beside(node)
        await beside.begin(*senders)
        await beside.end()

    asyncio.run(run())


def test_one_that_takes_long_lets_others_go_first() -> None:
    """A slow call lets others go first between two of its partitions, and each partition is applied once."""
    node = Slow(8, 0)
    large, small = sender_of(range(7)), sender_of([7], "another")
    serve_beside(node, large, small)
    assert node.order == [0, 7, *range(1, 7)]
    assert [answer for _, answer in small.answers] == [applied(7)]
    assert large.answers == [(PartitionId("Op", number), applied(number)) for number in range(7)]


def test_of_each_caller_one_batch_at_most_is_half_done() -> None:
    """A call that has paused goes on before its caller's other calls, with the rows that it has decoded."""
    node = Slow(8, 0)
    large = [sender_of(range(7)) for _ in range(3)]
    serve_beside(node, *large, sender_of([7], "another"))
    assert node.order == [0, 7, *range(1, 7), *range(7), *range(7)]
    begin, _, rest, *_ = node.calls
    assert begin._arriving is not None
    assert rest._arriving is begin._arriving
    assert all(each.answers == large[0].answers for each in large)


def test_who_had_less_time_is_not_interrupted_by_those_who_had_more() -> None:
    node = Slow(9, 0)
    node.took_s[0] = 10 * SLICE_S
    serve_beside(node, *(sender_of([0]) for _ in range(3)), sender_of([7, 8], "another"))
    assert node.order == [0, 7, 8, 0, 0]


def test_a_call_that_takes_long_to_decode_pauses_before_its_first_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    node, read = Slow(4, 0), Frame.read

    def slowly(frame: Frame) -> BatchSlices:
        node.clock.advance(2 * SLICE_S if len(frame.partitions) > 1 else 0)
        return read(frame)

    monkeypatch.setattr(Frame, "read", slowly)
    large = sender_of([1, 2])
    serve_beside(node, sender_of([0], "b"), large, sender_of([3], "another"))
    assert node.order == [0, 3, 1, 2]
    assert [answer for _, answer in large.answers] == [applied(1), applied(2)]


def test_queued_calls_of_a_sender_that_takes_no_answers_are_not_begun() -> None:
    node = Slow(3, 0)
    deaf, other = [sender_of([0]), sender_of([1])], sender_of([2], "another")
    deaf[1].taken = deaf[0].taken

    async def run() -> None:
        beside = Beside(node)
        await beside.begin(*deaf, other)
        deaf[0].taken.clear()
        node.held[0].set()
        while beside.applier.watch._callers:
            await asyncio.sleep(0)
        assert node.order == [0, 2], "the others were queued before the answers were too many"
        deaf[0].taken.set()
        await beside.end()

    asyncio.run(run())
    assert node.order == [0, 2, 1]
    assert [len(each.answers) for each in (*deaf, other)] == [1, 1, 1]


def test_decoded_rows_are_let_go_before_their_answers_are_taken() -> None:
    class Decodes(Node):
        def apply(self, slices: BatchSlices, answers: Answers) -> None:
            self.decoded = weakref.ref(slices.rows)
            super().apply(slices, answers)

    class TakesLong(Sender):
        async def answer(self, answers: Sequence[Answer]) -> None:
            while node.decoded() is not None:  # for ever, if this call keeps them
                await asyncio.sleep(0)
            await super().answer(answers)

    node = Decodes({0: applied(3)})
    sender = TakesLong([whole({0: [1, 2, 3]})])
    serve(node, sender)
    assert [answer for _, answer in sender.answers] == [applied(3)]


def test_a_call_that_is_cancelled_while_it_pauses_does_nothing_more() -> None:
    node = Slow(8, 0, 7)

    async def run() -> None:
        beside = Beside(node)
        await beside.begin(sender_of(range(7)), sender_of([7], "another"))
        node.held[0].set()
        await asyncio.to_thread(node.began[7].wait, LONG_S)
        cancelled = beside.calls.pop(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await beside.end()

    asyncio.run(run())
    assert node.order == [0, 7]


def test_rows_that_are_applied_when_their_sender_has_gone_count() -> None:
    node = Slow(1, 0)
    node.here[0] = applied(3)

    async def run() -> Applier:
        beside = Beside(node)
        await beside.begin(sender_of([0]))
        cancelled = beside.calls.pop()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await beside.end()
        return beside.applier

    samples = asyncio.run(run()).samples
    assert (samples.rows, samples.by_operator["Op"].rows) == (3, 3)


def test_a_call_that_has_paused_is_refused_when_the_replica_stops() -> None:
    node = Slow(8, 0, 7)
    large, small = sender_of(range(7)), sender_of([7], "another")

    async def run() -> None:
        beside = Beside(node)
        await beside.begin(large, small)
        node.held[0].set()
        await asyncio.to_thread(node.began[7].wait, LONG_S)
        beside.applier.batch_thread.stop()
        await beside.end()

    asyncio.run(run())
    assert node.order == [0, 7]
    assert [answer for _, answer in small.answers] == [applied(7)]
    first, *rest = [answer for _, answer in large.answers]
    assert first == applied(0)
    assert [type(each) for each in rest] == [Unavailable] * 6
