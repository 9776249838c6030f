"""A caller that gives up does not stop the controller half-way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from reconfig.controller.service import ControllerServer
from stateflow.ledger import Ledger
from stateflow.rpc import controller_pb2 as cpb

REQUESTS = {
    "Migrate": cpb.MigrateRequest(operator="Flow", partitions=[0], to="edge"),
    "Rebalance": cpb.RebalanceRequest(operator="Flow"),
    "Drain": cpb.DrainRequest(replica="edge"),
    "RetryReconfiguration": cpb.ReconfigurationRequest(id="r1"),
}
PLANS = {"RetryReconfiguration": "retry"}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_was_begun_is_done_though_its_caller_has_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        server = ControllerServer(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
        begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def plan(*_: Any) -> Any:
            begun.set()
            await go_on.wait()  # the move is in the ledger, and nobody carries it out yet
            done.set()
            return cpb.Reconfiguration() if name in ("Migrate", "RetryReconfiguration") else []

        monkeypatch.setattr(server._reconfigurations, PLANS.get(name, name.lower()), plan)
        call = asyncio.ensure_future(getattr(server, name)(REQUESTS[name], cast("Any", None)))
        await begun.wait()
        call.cancel()  # as gRPC does at the caller's deadline
        await asyncio.wait([call])
        assert call.cancelled()
        go_on.set()
        await asyncio.wait_for(done.wait(), 5)
        await server.close()

    asyncio.run(scenario())
