"""A replica's report of its disk: threads read it, so that a slow disk holds up no batch and no heartbeat."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from stateflow.clock import ManualClock
from stateflow.metrics.figures import CALLS, COMMON, LIMITS, REPLICA
from stateflow.operator.operator import describe
from stateflow.partition.control import DiskView
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.server import SIZES_S, Figures
from stateflow.replica.service import REPLICA_LIMITS, ReplicaService
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.serving import CallLimits
from stateflow.settings import ServerSettings
from stateflow.types import ReplicaInfo
from tests.unit.operators import Count


@pytest.fixture
def node(tmp_path: Path) -> ReplicaNode:
    """Makes a node, which its service closes."""
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a")
    node.create(describe(Count, 2, "Op"), [0, 1], 1)
    return node


@pytest.fixture
def looked(node: ReplicaNode, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Collects the threads that read a partition's files or the free space."""
    found = list[threading.Thread]()

    def noticed(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            found.append(threading.current_thread())
            return ask(*arguments)

        return asked

    monkeypatch.setattr(node, "bytes_on_disk", noticed(node.bytes_on_disk))
    monkeypatch.setattr(node, "disk", noticed(node.disk))
    return found


def with_service(node: ReplicaNode, use: Callable[[ReplicaService], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        service = ReplicaService(node, None)
        try:
            await use(service)
        finally:
            await service.close()

    asyncio.run(run())


def test_figures_of_the_disk_are_made_by_a_thread_and_not_each_time(
    node: ReplicaNode, looked: list[threading.Thread]
) -> None:
    clock = ManualClock()

    async def use(service: ReplicaService) -> None:
        figures = Figures(service, node.info, CallLimits(ServerSettings()), clock)
        first = await figures()
        assert set(first) == {each.name for each in (*COMMON, *REPLICA, *CALLS, *LIMITS)}
        assert first["stateflow_streams"] == {(): 0}
        watched = {("calls",), ("calls_per_caller",), *((limit,) for limit in REPLICA_LIMITS)}
        assert set(first["stateflow_limit_reached_total"]) >= watched
        assert first["stateflow_limit_used_ratio"] == {
            (limit,): 0.0
            for limit in (
                *("calls", "calls_per_caller", "waiting_bytes", "followers", "change_log_bytes", "cache_bytes"),
                *("read_ahead_bytes", "stream_read_ahead_bytes", "untaken_bytes", "stream_untaken_bytes"),
            )
        }
        assert list(first["stateflow_disk_free_bytes"]) == [()]
        times = len(looked)
        assert await figures() == first
        assert len(looked) == times
        clock.advance(SIZES_S)
        await figures()
        assert len(looked) == 2 * times == 6, "two partitions, and what is free"

    with_service(node, use)
    assert threading.main_thread() not in looked


def test_a_look_that_takes_long_is_waited_for_by_all_who_ask(
    node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, looks, disk = threading.Event(), list[None](), node.disk

    def slow() -> DiskView:
        looks.append(None)
        goes_on.wait()
        return disk()

    monkeypatch.setattr(node, "disk", slow)

    async def use(service: ReplicaService) -> None:
        figures = Figures(service, node.info, CallLimits(ServerSettings()), ManualClock())
        leaves, *stay = (asyncio.create_task(figures()) for _ in range(3))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.wait([leaves])
        assert not any(each.done() for each in stay)
        goes_on.set()
        assert [list(found["stateflow_disk_free_bytes"]) for found in await asyncio.gather(*stay)] == [[()], [()]]
        assert len(looks) == 1

    with_service(node, use)


def test_after_a_look_that_failed_who_asks_next_looks_again(node: ReplicaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(service: ReplicaService) -> None:
        figures = Figures(service, node.info, CallLimits(ServerSettings()), ManualClock())
        with monkeypatch.context() as patched:

            def broken() -> DiskView:
                raise OSError("it cannot be read")

            patched.setattr(node, "disk", broken)
            for _ in range(2):
                with pytest.raises(OSError, match="cannot be read"):
                    await figures()
        assert list((await figures())["stateflow_disk_free_bytes"]) == [()]

    with_service(node, use)


def test_sizes_do_not_wait_for_long_work_on_files(node: ReplicaNode) -> None:
    async def use(service: ReplicaService) -> None:
        over = threading.Event()
        long = [asyncio.create_task(service.threads.in_files(over.wait)) for _ in range(100)]
        context = cast(grpc.aio.ServicerContext[Any, Any], None)
        figures = Figures(service, node.info, CallLimits(ServerSettings()), ManualClock())
        try:
            async with asyncio.timeout(20):
                assert (await service.Stats(rpb.StatsRequest(sizes=True), context)).disk_free_bytes > 0
                assert (await figures())["stateflow_disk_free_bytes"]
        finally:
            over.set()
            await asyncio.gather(*long)

    with_service(node, use)


def test_statistics_look_at_the_disk_by_a_thread_where_sizes_are_asked_for(
    node: ReplicaNode, looked: list[threading.Thread]
) -> None:
    async def use(service: ReplicaService) -> None:
        context = cast(grpc.aio.ServicerContext[Any, Any], None)
        plain = await service.Stats(rpb.StatsRequest(), context)
        assert (len(plain.partitions), looked) == (2, [])
        sized = await service.Stats(rpb.StatsRequest(sizes=True), context)
        assert len(looked) == 3
        assert sized.disk_free_bytes > 0

    with_service(node, use)
    assert threading.main_thread() not in looked
