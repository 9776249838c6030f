"""What a round of failover makes of what happens to other partitions while it waits for one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.takeovers import Orphan, Takeovers
from stateflow.types import PartitionId

FIRST, SECOND = PartitionId("Op", 0), PartitionId("Op", 1)


def takeovers(epoch: int) -> Takeovers:
    """Both partitions are owned at ``epoch`` by now."""
    deployed = SimpleNamespace(assignment=SimpleNamespace(owner=lambda _: ("a", epoch)))
    book: Any = SimpleNamespace(
        replicas={}, finished=[], failed_restores=[], open_restores={}, operator=lambda _: deployed
    )
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    desk: Any = SimpleNamespace(book=book, members=SimpleNamespace(), clock=clock)
    nothing: Any = SimpleNamespace()
    return Takeovers(desk, nothing, nothing, nothing)


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_owner_that_comes_back_while_another_partition_is_taken_over(epoch: int) -> None:
    made = takeovers(1)
    made._orphans |= {FIRST: Orphan(1, False), SECOND: Orphan(epoch - 1, False)}
    started = []

    async def start(partition: PartitionId) -> None:
        started.append(partition)
        made._orphans.pop(SECOND)

    made._start = start  # type: ignore[method-assign]
    asyncio.run(made._tick())
    assert started == [FIRST]
    assert set(made._orphans) == {FIRST}
