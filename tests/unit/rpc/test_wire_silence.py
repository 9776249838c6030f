"""Streams without a deadline end when their server is silent, and not while it works or its reader takes time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest

from stateflow.errors import NotOwner, StateflowError, Unavailable
from stateflow.rpc import agent_pb2 as apb
from stateflow.rpc.faults import FAULT_KEY, fault_of
from stateflow.rpc.wire import read_stream

SOON_S = 0.08
PAGE = apb.LogsPage(data=b"line")


class Stream:
    """A call that yields the messages put into it. Once cancelled, it ends as gRPC's calls do."""

    def __init__(self, *messages: Any) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        for message in messages:
            self.put(message)
        self.is_cancelled = False

    def put(self, message: Any) -> None:
        self._messages.put_nowait(message)

    async def read(self) -> Any:
        message = await self._messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def cancel(self) -> None:
        self.is_cancelled = True
        self.put(asyncio.CancelledError())


async def all_of(stream: Stream, *asked: Any) -> list[Any]:
    async with aclosing(read_stream(stream, "there", SOON_S, *asked)) as messages:
        return [message async for message in messages]


def test_silence_ends_a_stream_with_an_error() -> None:
    async def scenario() -> Stream:
        stream = Stream(PAGE)
        with pytest.raises(Unavailable, match=r"no message from there for 0\.08 s"):
            await asyncio.wait_for(all_of(stream), 30)
        return stream

    assert asyncio.run(scenario()).is_cancelled, "the server is told"


def test_a_server_that_answers_otherwise_may_work_for_as_long_as_it_likes() -> None:
    async def scenario() -> list[Any]:
        stream, times = Stream(), 0

        async def answers(within_s: float) -> bool:
            nonlocal times
            assert within_s < SOON_S / 2, "the question is part of the silence"
            times += 1
            if times == 4:  # after two silences
                stream.put(PAGE)
                stream.put(grpc.aio.EOF)
            return True

        return await asyncio.wait_for(all_of(stream, answers), 30)

    assert asyncio.run(scenario()) == [PAGE]


def test_a_server_that_does_not_answer_otherwise_either_is_given_up() -> None:
    async def scenario() -> int:
        times = 0

        async def answers(_: float) -> bool:
            nonlocal times
            times += 1
            return times < 3

        with pytest.raises(Unavailable, match="no message from there"):
            await asyncio.wait_for(all_of(Stream(), answers), 30)
        return times

    assert asyncio.run(scenario()) == 3


def test_a_message_that_comes_during_the_question_counts() -> None:
    async def scenario() -> list[Any]:
        stream, times = Stream(), 0

        async def answers(_: float) -> bool:
            nonlocal times
            times += 1
            if times > 1:
                stream.put(grpc.aio.EOF)
                return True
            stream.put(PAGE)
            await asyncio.sleep(0)  # the reader takes it
            await asyncio.sleep(0)
            return False

        return await asyncio.wait_for(all_of(stream, answers), 30)

    assert asyncio.run(scenario()) == [PAGE]


def test_a_reader_may_take_its_time() -> None:
    async def scenario() -> int:
        stream, found, times = Stream(PAGE, PAGE, grpc.aio.EOF), 0, 0

        async def answers(_: float) -> bool:
            nonlocal times
            times += 1
            return False

        async with aclosing(read_stream(stream, "there", SOON_S, answers)) as messages:
            async for _ in messages:
                found += 1
                await asyncio.sleep(2 * SOON_S)
        assert times == 0, "nobody was waited for"
        return found

    assert asyncio.run(scenario()) == 2


def test_a_reader_that_is_cancelled_is_told_nothing_else() -> None:
    async def scenario() -> None:
        reading = asyncio.ensure_future(all_of(Stream()))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(scenario())


def test_a_refusal_arrives_as_what_it_is() -> None:
    metadata = grpc.aio.Metadata((FAULT_KEY, fault_of(NotOwner("not here")).SerializeToString()))
    refusal = grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), metadata)

    async def scenario() -> StateflowError:
        with pytest.raises(NotOwner) as caught:
            await all_of(Stream(refusal))
        return caught.value

    assert asyncio.run(scenario()).what == "not here"
