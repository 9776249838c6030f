"""Calls of one stream: concurrent, in order, bounded, and undisturbed by each other's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from stateflow.errors import InvalidArgument, NotOwner, Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition.processor import Applied
from stateflow.replica import streams
from stateflow.replica.applying import Answer, Applier, Exchange
from stateflow.replica.executor import BEAT_S
from stateflow.replica.streams import CallStream, Piece
from stateflow.rpc import replica_pb2 as rpb
from stateflow.types import PartitionId

LONG_S = 30.0
Run = Callable[[Exchange], Awaitable[None]]


def request(call: int, *partitions: int, begins: bool = True, last: bool = True, rows: bytes = b"") -> rpb.ApplyRequest:
    header = rpb.ApplyHeader(operator="Op", source="s", batch=call) if begins else None
    ones, counts = [1] * len(partitions), [int(bool(rows))] * len(partitions)
    return rpb.ApplyRequest(
        call=call, header=header, partitions=partitions, epochs=ones, counts=counts, rows=rows, last=last
    )


class Stream:
    """A stream of calls. ``run``: what an Applier does with a call."""

    def __init__(self, run: Run) -> None:
        self.sent: asyncio.Queue[rpb.ApplyRequest | None] = asyncio.Queue()
        self.said: asyncio.Queue[rpb.ApplyResponse] = asyncio.Queue()
        self.taken = 0
        applier = cast(Applier, type("A", (), {"run": staticmethod(run)}))
        self.stream = CallStream(applier, self.said.put, 1 << 20)
        self.task = asyncio.create_task(self.stream.run(self._requests()))

    async def _requests(self) -> AsyncIterator[rpb.ApplyRequest]:
        while (came := await self.sent.get()) is not None:
            self.taken += 1
            yield came

    def send(self, *requests: rpb.ApplyRequest | None) -> None:
        for each in requests:
            self.sent.put_nowait(each)

    async def hear(self) -> rpb.ApplyResponse:
        return await asyncio.wait_for(self.said.get(), LONG_S)


def applied(*pieces: Piece) -> list[Answer]:
    frames = [piece.frame for piece in pieces if piece.frame is not None]
    return [(PartitionId("Op", number), Applied(b"", False, 1)) for frame in frames for number in frame.partitions]


def number_of(piece: Piece | None) -> int:
    assert piece is not None
    assert piece.frame is not None
    return piece.frame.batch.number


async def echo(exchange: Exchange) -> None:
    while (piece := await exchange.receive()) is not None:
        await exchange.answer(applied(piece))


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work(), LONG_S)

    asyncio.run(within())


def test_the_last_answer_of_a_call_ends_it() -> None:
    async def work() -> None:
        s = Stream(echo)
        s.send(request(1, 0, 1, last=False), request(1, 2, begins=False), None)
        first, second = await s.hear(), await s.hear()
        assert [(each.call, len(each.results), each.last) for each in (first, second)] == [(1, 2, False), (1, 1, True)]
        await s.task
        assert s.said.empty()

    run(work)


def test_a_call_may_end_with_partitions_that_a_batch_passed() -> None:
    async def skipped_batches(exchange: Exchange) -> None:
        first = await exchange.receive()
        assert first is not None
        assert first.frame is not None
        await exchange.passed(first.frame.partitions[1:])
        await exchange.answer(applied(first)[:1])
        second = await exchange.receive()
        assert second is not None
        assert second.frame is not None
        await exchange.passed(second.frame.partitions)

    async def work() -> None:
        s = Stream(skipped_batches)
        s.send(request(1, 0, 1, 2, last=False), request(1, 3, 4, begins=False), None)
        said = [await s.hear() for _ in range(3)]
        assert [(list(each.passed), len(each.results), each.last) for each in said] == [
            ([1, 2], 0, False),
            ([], 1, False),
            ([3, 4], 0, True),
        ]
        await s.task
        assert s.said.empty()

    run(work)


def test_a_call_that_waits_holds_up_no_other() -> None:
    async def work() -> None:
        here = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            piece = await exchange.receive()
            assert piece
            if number_of(piece) == 1:
                await here.wait()
            await exchange.answer(applied(piece))

        s = Stream(waits)
        s.send(request(1, 0), request(2, 0))
        assert (await s.hear()).call == 2
        here.set()
        assert (await s.hear()).call == 1
        s.send(None)
        await s.task

    run(work)


def test_calls_are_begun_in_the_order_they_came() -> None:
    async def work() -> None:
        begun: list[int] = []

        async def note(exchange: Exchange) -> None:
            piece = await exchange.receive()
            assert piece
            begun.append(number_of(piece))
            await exchange.answer(applied(piece))

        s = Stream(note)
        s.send(*(request(number, 0) for number in range(1, 20)), None)
        await s.task
        assert begun == list(range(1, 20))

    run(work)


def test_a_refusal_ends_its_call_and_what_still_comes_of_it_is_dropped() -> None:
    async def work() -> None:
        async def refuse(exchange: Exchange) -> None:
            piece = await exchange.receive()
            assert piece
            if number_of(piece) == 1:
                raise NotOwner("it went", remedy="refresh")
            await exchange.answer(applied(piece))

        s = Stream(refuse)
        s.send(request(1, 0, last=False))
        refused = await s.hear()
        assert (refused.call, refused.fault.code, refused.last) == (1, "not_owner", True)
        s.send(request(1, 1, begins=False), request(2, 0), None)
        assert (await s.hear()).call == 2
        await s.task
        assert s.said.empty()

    run(work)


def test_a_bug_is_said_to_the_caller_and_to_no_other() -> None:
    async def work() -> None:
        async def fail(exchange: Exchange) -> None:
            raise ZeroDivisionError

        s = Stream(fail)
        s.send(request(1, 0), None)
        assert "ZeroDivisionError" in (await s.hear()).fault.what
        await s.task

    run(work)


def test_fields_that_hold_what_they_may_not_are_the_calls_fault() -> None:
    async def work() -> None:
        s = Stream(echo)
        s.send(request(1, 1 << 20), request(2, 0), None)
        assert {(await s.hear()).call, (await s.hear()).call} == {1, 2}
        await s.task

    run(work)


@pytest.mark.parametrize("numbers", [[0], [1, 1], [2, 1]], ids=str)
def test_requests_that_are_no_calls_end_the_stream(numbers: list[int]) -> None:
    async def work() -> None:
        s = Stream(echo)
        s.send(*(request(number, 0) for number in numbers))
        with pytest.raises(InvalidArgument, match="call number is not above the earlier ones of its stream"):
            await s.task

    run(work)


def test_no_more_is_read_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_BYTES_MAX", 10_000)

    async def work() -> None:
        here = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await here.wait()
            await echo(exchange)

        s = Stream(waits)
        s.send(*(request(number, 0, rows=bytes(3_900)) for number in range(1, 21)), None)
        for _ in range(100):
            await asyncio.sleep(0)
        assert s.taken == 3, "nearly 5,000 bytes each"
        here.set()
        await s.task
        assert s.taken == 20
        assert s.stream.unread == 0

    run(work)


def test_who_is_not_read_is_not_impatient_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call does not time out while its stream is not read: the rest of the call may be among the unread messages."""
    monkeypatch.setattr(streams, "READ_BYTES_MAX", 10_000)

    async def work() -> None:
        here = asyncio.Event()
        patience_s = 0.05

        async def serve(exchange: Exchange) -> None:
            piece = await exchange.receive()
            assert piece
            if number_of(piece) > 1:
                await here.wait()
            elif not (rest := await exchange.receive(patience_s)):
                raise AssertionError
            else:
                await exchange.answer(applied(piece, rest))
                return
            await exchange.answer(applied(piece))

        s = Stream(serve)
        s.send(request(1, 0, last=False), *(request(number, 0, rows=bytes(3_900)) for number in (2, 3, 4)))
        s.send(request(1, 1, begins=False), None)
        await asyncio.sleep(3 * patience_s)
        assert s.said.empty(), "it was not sent back, though nothing of it came for so long"
        here.set()
        assert {(await s.hear()).call for _ in range(4)} == {1, 2, 3, 4}
        await s.task

    run(work)


def test_who_sends_nothing_though_he_is_read_is_not_waited_for() -> None:
    async def work() -> None:
        async def serve(exchange: Exchange) -> None:
            await exchange.receive()
            try:
                await exchange.receive(0.01)
            except TimeoutError as error:
                raise Unavailable("the rest did not come", remedy="again") from error

        s = Stream(serve)
        s.send(request(1, 0, last=False))
        assert (await s.hear()).fault.code == "unavailable"
        s.task.cancel()

    run(work)


def test_signs_of_life_are_given_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async def beat(exchange: Exchange) -> None:
            await exchange.receive()
            await exchange.give_sign_of_life()
            await asyncio.Event().wait()

        s = Stream(beat)
        s.stream._said_at -= BEAT_S
        s.send(*(request(number, 0) for number in range(1, 10)))
        assert (await s.hear()).call == 0
        for _ in range(20):
            await asyncio.sleep(0)
        assert s.said.empty(), "one tells of all"
        s.task.cancel()

    run(work)


def test_too_many_calls_are_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CALLS_MAX", 2)
    before = LIMIT_HITS.count("stream_batches")

    async def work() -> None:
        here = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await here.wait()
            await echo(exchange)

        s = Stream(waits)
        s.send(*(request(number, 0) for number in (1, 2, 3)), None)
        refused = await s.hear()
        assert (refused.call, refused.fault.code) == (3, "unavailable")
        assert LIMIT_HITS.count("stream_batches") == before + 1
        here.set()
        await s.task

    run(work)


def test_a_stream_that_is_ended_answers_what_came_whole() -> None:
    async def work() -> None:
        here = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await here.wait()
            await echo(exchange)

        s = Stream(waits)
        s.send(request(1, 0), request(2, 0, last=False))
        while s.taken < 2:
            await asyncio.sleep(0)
        s.stream.end()
        here.set()
        found = [await s.hear(), await s.hear(), await s.hear()]
        assert [(each.call, len(each.results), each.last) for each in found] == [
            *((1, 1, True), (2, 1, False)),
            (2, 0, True),
        ]
        await s.task

    run(work)


def test_calls_of_a_stream_that_broke_are_cancelled() -> None:
    async def work() -> None:
        ended: list[int] = []

        async def waits(exchange: Exchange) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(1)

        s = Stream(waits)
        s.send(request(1, 0), request(2, 0))
        while s.taken < 2:
            await asyncio.sleep(0)
        s.task.cancel()
        await asyncio.wait((s.task,))
        while len(ended) < 2:
            await asyncio.sleep(0)

    run(work)


def test_nobody_is_answered_who_is_gone() -> None:
    async def work() -> None:
        s = Stream(echo)

        async def gone(_: Any) -> None:
            raise RuntimeError("the call is over")

        s.stream._write = gone
        s.send(request(1, 0), None)
        await s.task
        assert not s.stream._calls

    run(work)


def test_of_a_sender_that_takes_no_answers_nothing_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "UNTAKEN_BYTES_MAX", 1000)

    async def work() -> None:
        takes, written, began = asyncio.Event(), list[rpb.ApplyResponse](), list[int]()
        calls = list[Exchange]()

        async def write(response: rpb.ApplyResponse) -> None:
            await takes.wait()
            written.append(response)

        async def big(exchange: Exchange) -> None:
            while (piece := await exchange.receive()) is not None:
                began.append(number_of(piece))
                calls.append(exchange)
                await exchange.answer([(PartitionId("Op", 0), Applied(b"x" * 600, False, 1))])

        s = Stream(big)
        s.stream._write = write
        s.send(*(request(call, 0) for call in range(1, 21)), None)
        async with asyncio.timeout(LONG_S):
            while s.taken < 20 or not began:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        held = len(began)
        assert held < 20, "answers of so many would be kept"
        assert not any(call.taken.is_set() for call in calls)
        takes.set()
        await s.task
        assert all(call.taken.is_set() for call in calls)
        assert began == list(range(1, 21))
        assert len(written) == 20

    run(work)


def test_many_streams_read_ahead_less_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        held = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await exchange.receive()
            await held.wait()
            while await exchange.receive() is not None:
                pass

        s = Stream(waits)
        s.stream._streams = lambda: 100_000
        s.send(*(request(call, 0, rows=b"x" * 30_000) for call in range(1, 21)), None)
        async with asyncio.timeout(LONG_S):
            while s.taken < 3:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert s.taken == 3, "as much as the least that each may have"
        held.set()
        await s.task
        assert s.taken == 20

    run(work)


def test_many_streams_keep_fewer_answers_each() -> None:
    """Each stream has a share of the memory for answers that their senders do not take."""

    async def work() -> None:
        takes, began = asyncio.Event(), list[int]()

        async def write(response: rpb.ApplyResponse) -> None:
            await takes.wait()

        async def big(exchange: Exchange) -> None:
            while (piece := await exchange.receive()) is not None:
                began.append(number_of(piece))
                await exchange.answer([(PartitionId("Op", 0), Applied(b"x" * 50_000, False, 1))])

        s = Stream(big)
        s.stream._write, s.stream._streams = write, lambda: 100_000
        s.send(*(request(call, 0) for call in range(1, 21)), None)
        async with asyncio.timeout(LONG_S):
            while s.taken < 20 or len(began) < 2:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(began) == 2, "the second one exceeds the least that each may have"
        assert s.stream.used() == (pytest.approx(s.stream.unread / 65_536), pytest.approx(s.stream.untaken / 65_536))
        assert s.stream.untaken > 100_000
        takes.set()
        await s.task
        assert len(began) == 20
        assert s.stream.used() == (0.0, 0.0)

    run(work)
