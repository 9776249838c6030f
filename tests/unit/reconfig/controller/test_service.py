"""A caller that gives up does not stop the controller half-way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from reconfig.controller.service import ControllerServer
from stateflow.errors import Unavailable
from stateflow.ledger import Ledger
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import spec_to_pb
from stateflow.runtime.operator import describe
from tests.unit.operators import Count

REQUESTS = {
    "Migrate": cpb.MigrateRequest(operator="Flow", partitions=[0], to="edge"),
    "Rebalance": cpb.RebalanceRequest(operator="Flow"),
    "Drain": cpb.DrainRequest(replica="edge"),
    "RetryReconfiguration": cpb.ReconfigurationRequest(id="r1"),
    "Standby": cpb.StandbyRequest(operator="Flow", count=1),
    "Deploy": cpb.DeployRequest(spec=spec_to_pb(describe(Count, 4))),
    "Restore": cpb.RestoreOperatorRequest(operator="Flow"),
}
#: the part of the controller that is asked, by what
PLANS = {
    "Migrate": ("_reconfigurations", "migrate"),
    "Rebalance": ("_reconfigurations", "rebalance"),
    "Drain": ("_reconfigurations", "drain"),
    "RetryReconfiguration": ("_reconfigurations", "retry"),
    "Standby": ("_standbys", "want"),
    "Deploy": ("_deployments", "_deploy"),
    "Restore": ("_restores", "run"),
}


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
            raise Unavailable("nobody hears this", remedy="none")

        async def nothing(*_: Any) -> None:
            pass

        part, method = PLANS[name]
        monkeypatch.setattr(getattr(server, part) if part else server, method, plan)
        monkeypatch.setattr(server._restores, "plan", nothing)
        call = asyncio.ensure_future(getattr(server, name)(REQUESTS[name], cast("Any", None)))
        await begun.wait()
        call.cancel()  # as gRPC does at the caller's deadline
        await asyncio.wait([call])
        assert call.cancelled()
        go_on.set()
        await asyncio.wait_for(done.wait(), 5)
        await server.close()
        server._cluster.ledger.close()

    asyncio.run(scenario())
