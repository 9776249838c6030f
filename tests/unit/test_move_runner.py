"""What the controller makes of the order in which source and target are heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from reconfig.controller.book import PlannedMove
from reconfig.controller.errand import Hooks
from reconfig.controller.runner import MoveRunner
from stateflow.clock import SYSTEM_CLOCK
from stateflow.rpc import replica_pb2 as rpb
from stateflow.runtime.operator import describe
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.unit.operators import Count

#: far more than the whole move takes
IN_HAND_MS = 60_000.0


class Pair:
    """Source and target as one stub. The target has the seal before the source has answered."""

    def __init__(self) -> None:
        self.sealed, self.owned = asyncio.Event(), asyncio.Event()

    async def Prepare(self, request: rpb.PrepareRequest) -> AsyncIterator[rpb.MoveProgress]:
        yield rpb.MoveProgress(phase=rpb.MoveProgress.CATCHING_UP, bandwidth=1e9)
        await self.sealed.wait()
        self.owned.set()
        yield rpb.MoveProgress(phase=rpb.MoveProgress.OWNED, epoch=request.source_epoch + 1, digest="d")

    async def Fence(self, request: rpb.FenceRequest, timeout: float) -> rpb.FenceReply:
        self.sealed.set()
        while not self.owned.is_set():
            await asyncio.sleep(0)
        for _ in range(20):  # turns of the loop, in which the controller hears the target
            await asyncio.sleep(0)
        return rpb.FenceReply(sealed=True, in_hand_ms=IN_HAND_MS)

    async def Release(self, request: rpb.ReleaseRequest, timeout: float) -> Any:
        return None


async def _nothing(*_: object) -> None:
    return None


def test_a_pause_is_without_the_batch_in_hand_though_the_target_is_heard_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> tuple[float, dict[str, object]]:
        recorded: list[dict[str, object]] = []

        async def owned(summary: dict[str, object]) -> None:
            recorded.append(summary)

        source, target = ReplicaInfo("a", "a", "a:1"), ReplicaInfo("b", "b", "b:1")
        planned = PlannedMove("r", PartitionId("Count", 0), "a", "b", 1, 2, 0.0, "warm-up")
        pair = Pair()

        monkeypatch.setattr("reconfig.controller.runner.connected", _nothing)
        monkeypatch.setattr(MoveRunner, "_stub", lambda *_: pair)
        runner = MoveRunner(
            planned=planned,
            spec=describe(Count, 4),
            source=source,
            target=target,
            channel=lambda _: None,  # type: ignore[arg-type,return-value]
            hooks=Hooks(_nothing, owned, _nothing, lambda: None),
            settings=ControllerSettings(),
            clock=SYSTEM_CLOCK,
            session=lambda _: "",
            machine=MoveRunner.machine_for(planned),
            newest_epoch=lambda: 1,
        )
        report = await asyncio.wait_for(runner.run(), 10)
        assert report.phase == "COMPLETED", report
        return report.pause_ms, recorded[0]

    pause_ms, recorded = asyncio.run(run())
    assert pause_ms == 0.0
    assert recorded["pause_ms"] == 0.0
