"""Listeners of an incoming transfer, and answers to those that ask again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import MoveAborted, StateMissing, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition.control import Phase, Preparation, Progress
from stateflow.partition.lifecycle import Lifecycle, State
from stateflow.partition.replica import ReplicaNode
from stateflow.replica import transfer_in
from stateflow.replica.peers import SourceReplica
from stateflow.replica.transfer_in import IncomingTransfers, RunningTransfer
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.unit.operators import Count

P = PartitionId("Op", 0)
SOURCE = ReplicaInfo("a", "x", "a:1")
OWNED = Progress(Phase.OWNED, epoch=2, bytes_warm=7, digest="d" * 32)


def heard(again: str) -> list[Progress]:
    """Returns what a request for the move ``again`` hears after move "m" has ended here."""

    async def ask() -> list[Progress]:
        lifecycle = Lifecycle(P, State.WARMING, 1)

        class Transfer:
            async def run(self) -> AsyncIterator[Progress]:
                yield Progress(Phase.WARMING)
                lifecycle.state, lifecycle.epoch, lifecycle.move_id = State.OWNED, 2, "m"
                yield OWNED

        async def in_files(*_: object) -> None: ...

        node: Any = SimpleNamespace(
            lifecycle=lambda _: lifecycle,
            receiver=SimpleNamespace(lost=None),
        )
        threads: Any = SimpleNamespace(in_files=in_files, files=None, quick=None)
        connect: Any = None
        transfers = IncomingTransfers(node, None, SYSTEM_CLOCK, connect, threads)
        transfer: Any = Transfer()
        loop = asyncio.get_running_loop()
        transfers._begin = lambda move: RunningTransfer(move.move_id, transfer, loop)  # type: ignore[method-assign]
        move: Any = SimpleNamespace(partition=P, move_id="m", standby=False)
        assert [each.phase async for each in transfers.run(move, "")] == [Phase.WARMING, Phase.OWNED]
        lifecycle.move_id = again  # the move by which the partition came
        asked: Any = SimpleNamespace(partition=P, move_id=again, standby=False)
        return [each async for each in transfers.run(asked, "")]

    return asyncio.run(ask())


def test_who_asks_again_hears_all_that_was_said_of_the_end() -> None:
    """A request that is repeated hears all that was reported of the end.

    A controller whose stream broke at that moment used to record the move without its digest.
    """
    assert heard("m") == [OWNED]


def test_of_a_transfer_that_is_not_known_any_more_only_the_epoch_is_told() -> None:
    assert heard("another") == [Progress(Phase.OWNED, epoch=2)]


def joined(cancelled: str) -> tuple[list[Progress], list[Progress]]:
    """Returns what a move hears that joins a standby's transfer, and what the standby hears."""

    async def ask() -> tuple[list[Progress], list[Progress]]:
        lifecycle = Lifecycle(P, State.WARMING, 1, move_id="standby")
        follows, ends = asyncio.Event(), asyncio.Event()

        class Transfer:
            def copy_from(self, source: SourceReplica) -> None:
                assert source.address == SOURCE.address

            async def run(self) -> AsyncIterator[Progress]:
                yield Progress(Phase.CATCHING_UP)
                follows.set()
                await ends.wait()
                yield OWNED

        async def in_files(*_: object) -> None: ...

        settings = ReplicaSettings()
        node: Any = SimpleNamespace(
            lifecycle=lambda _: lifecycle, receiver=SimpleNamespace(lost=None), settings=settings
        )
        threads: Any = SimpleNamespace(in_files=in_files, files=None, quick=None)
        connect: Any = grpc.aio.insecure_channel
        transfers = IncomingTransfers(node, None, SYSTEM_CLOCK, connect, threads)
        transfer: Any = Transfer()
        loop = asyncio.get_running_loop()
        transfers._begin = lambda move: RunningTransfer(move.move_id, transfer, loop)  # type: ignore[method-assign]

        async def listen(move_id: str, standby_move: str) -> list[Progress]:
            move: Any = SimpleNamespace(partition=P, move_id=move_id, standby=False, source=SOURCE)
            return [each async for each in transfers.run(move, standby_move)]

        standby = loop.create_task(listen("standby", ""))
        await follows.wait()
        if cancelled == "before":
            lifecycle.cancelled |= {"m"}
        move = loop.create_task(listen("m", "standby"))
        if cancelled == "while":
            await asyncio.wait((move,), timeout=0.01)
            transfers.dismiss(P, "m")
        if cancelled:
            await move
            assert not standby.done()
        ends.set()
        return await move, await standby

    return asyncio.run(ask())


@pytest.mark.parametrize("cancelled", ["before", "while"])
def test_a_move_that_was_cancelled_here_waits_for_no_seal_of_the_standby_it_joined(cancelled: str) -> None:
    """A cancelled move waits for no seal of the standby that it joined.

    The wait would never end: no seal is accepted here for a cancelled move, and the standby goes on.
    """
    move, standby = joined(cancelled)
    assert isinstance(move[-1].fault, MoveAborted)
    assert move[-1].phase is Phase.FAILED
    assert standby == [Progress(Phase.CATCHING_UP), OWNED]


def test_a_move_that_joined_a_standby_hears_its_end() -> None:
    assert joined("") == ([Progress(Phase.CATCHING_UP), OWNED], [Progress(Phase.CATCHING_UP), OWNED])


def test_a_transfer_that_was_stopped_is_freed_without_a_garbage_collection() -> None:
    """A stopped transfer is freed at once, and what it holds with it.

    The collector examines objects once, while a transfer runs, and then not before there are half a million more.
    """

    class Message:
        pass

    async def stop() -> weakref.ref[Message]:
        follows, messages = asyncio.Event(), []

        class Transfer:
            async def run(self) -> AsyncIterator[Progress]:
                message = Message()
                messages.append(weakref.ref(message))
                yield Progress(Phase.CATCHING_UP)
                follows.set()
                await asyncio.Event().wait()

        node: Any = None
        connect: Any = None
        threads: Any = None
        transfer: Any = Transfer()
        transfers = IncomingTransfers(node, None, SYSTEM_CLOCK, connect, threads)
        transfers._running[P] = RunningTransfer("m", transfer, asyncio.get_running_loop())
        await follows.wait()
        task = transfers._running[P].task
        transfers.stop(P)
        await asyncio.wait((task,))
        return messages[0]

    gc.disable()
    try:
        assert asyncio.run(stop())() is None
    finally:
        gc.enable()


def test_a_copy_goes_on_at_the_address_that_its_source_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for the same move at another address leads the transfer there.

    A standby's transfer never ends, so it tried the former address for ever, whatever a new controller named.
    """
    tried, gone = list[str](), asyncio.Event()

    class Source(SourceReplica):
        async def connected(self) -> None:
            tried.append(self.address)
            if self.address == SOURCE.address:
                gone.set()
                raise Unavailable("nobody is there", remedy="none")
            raise StateMissing("it is here, and has nothing", remedy="none")

    monkeypatch.setattr(transfer_in, "SourceReplica", Source)
    monkeypatch.setattr(transfer_in, "RETRY_INTERVAL_S", 0.0)
    node = ReplicaNode(ReplicaInfo("target", "edge", "edge:1"), tmp_path, ReplicaSettings())
    spec = describe(Count, 4)

    async def in_files(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    async def run() -> list[Progress]:
        threads: Any = SimpleNamespace(in_files=in_files, in_quick=in_files, files=None, quick=None)
        transfers = IncomingTransfers(node, None, SYSTEM_CLOCK, grpc.aio.insecure_channel, threads)
        move = Preparation("m", spec, PartitionId(spec.name, 0), SOURCE, 1, standby=True)

        async def reports(move: Preparation) -> list[Progress]:
            return [each async for each in transfers.run(move, "")]

        first = asyncio.ensure_future(reports(move))
        await gone.wait()
        again = await asyncio.wait_for(reports(replace(move, source=replace(SOURCE, address="a:2"))), 10)
        await asyncio.wait_for(first, 10)
        await transfers.close()
        return again

    last = asyncio.run(run())[-1]
    node.close()
    assert isinstance(last.fault, StateMissing)
    assert tried[-1] == "a:2"


def test_a_channel_that_no_transfer_uses_is_closed_when_another_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of agents have another address after each restart. Every channel used to stay open."""
    closed: list[str] = []
    node = ReplicaNode(ReplicaInfo("target", "edge", "edge:1"), tmp_path, ReplicaSettings())
    spec = describe(Count, 4)

    def connect(address: str) -> Any:
        async def close() -> None:
            closed.append(address)

        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        return SimpleNamespace(close=close, **dict.fromkeys(kinds, lambda *_, **__: None))

    async def run() -> None:
        ends, follows = asyncio.Event(), asyncio.Event()

        async def reports(transfer: Any) -> AsyncIterator[Progress]:
            if transfer._move.partition.partition == 0:
                follows.set()
                await ends.wait()
            yield OWNED

        async def in_files(*_: object) -> None: ...

        monkeypatch.setattr(transfer_in.IncomingTransfer, "run", reports)
        threads: Any = SimpleNamespace(in_files=in_files, in_quick=in_files, files=None, quick=None)
        transfers = IncomingTransfers(node, None, SYSTEM_CLOCK, connect, threads)

        async def moved(number: int, address: str) -> None:
            source = replace(SOURCE, address=address)
            move = Preparation(f"m{number}", spec, PartitionId(spec.name, number), source, 1)
            assert [each async for each in transfers.run(move, "")] == [OWNED]
            await transfers._running[move.partition].task  # it ends just behind its last report
            await asyncio.sleep(0)

        first, waits = asyncio.ensure_future(moved(0, "a:1")), asyncio.ensure_future(follows.wait())
        await asyncio.wait({first, waits}, return_when=asyncio.FIRST_COMPLETED)
        assert not first.done() or first.result()
        for number in (1, 2, 3):
            await moved(number, f"b:{number}")
        assert set(transfers._peers) == {"a:1", "b:3"}
        ends.set()
        await first
        await moved(4, "b:4")
        await asyncio.gather(*transfers._closing)
        assert (set(transfers._peers), set(closed)) == ({"b:4"}, {"a:1", "b:1", "b:2", "b:3"})
        await transfers.close()

    asyncio.run(run())
    node.close()
