"""Requests to the controller: a caller that gives up does not stop one half-way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reconfig.controller import service as service_module
from reconfig.controller.controller import Controller
from reconfig.controller.service import ControllerService
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost, NotAllowed, NotLeading, Unavailable
from stateflow.ledger import Ledger
from stateflow.operator.operator import describe
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import message_of
from stateflow.security.refusals import Refusals
from stateflow.security.roles import Identity, Role
from tests.unit.operators import Count

REQUESTS = {
    "Migrate": cpb.MigrateRequest(operator="Flow", partitions=[0], to="edge"),
    "Rebalance": cpb.RebalanceRequest(operator="Flow"),
    "Drain": cpb.DrainRequest(replica="edge"),
    "RetryReconfiguration": cpb.ReconfigurationRequest(id="r1"),
    "Standby": cpb.StandbyRequest(operator="Flow", count=1),
    "Deploy": message_of(cpb.DeployRequest, spec=describe(Count, 4)),
    "Restore": cpb.RestoreOperatorRequest(operator="Flow"),
}
#: by RPC: the part of the controller that answers, and its method
PLANS = {
    "Migrate": ("reconfigurations", "migrate"),
    "Rebalance": ("reconfigurations", "rebalance"),
    "Drain": ("reconfigurations", "drain"),
    "RetryReconfiguration": ("reconfigurations", "retry"),
    "Standby": ("standbys", "want"),
    "Deploy": ("deployments", "deploy"),
    "Restore": ("restores", "restore"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_was_begun_is_done_though_its_caller_has_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        controller = Controller(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))

        @contextlib.asynccontextmanager
        async def term() -> AsyncIterator[Controller]:
            yield controller

        service = ControllerService(cast("Any", SimpleNamespace(term=term)))
        begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def plan(*_: Any) -> Any:
            begun.set()
            await go_on.wait()  # the move is in the ledger, and no runner carries it out yet
            done.set()
            raise Unavailable("nobody hears this", remedy="none")

        part, method = PLANS[name]
        monkeypatch.setattr(getattr(controller, part), method, plan)
        call = asyncio.ensure_future(getattr(service, name)(REQUESTS[name], cast("Any", None)))
        await begun.wait()
        call.cancel()  # as gRPC does at the caller's deadline
        await asyncio.wait([call])
        assert call.cancelled()
        go_on.set()
        await asyncio.wait_for(done.wait(), 5)
        await controller.close()
        controller.context.ledger.close()

    asyncio.run(scenario())


def test_a_question_at_the_end_of_a_term_may_be_asked_again() -> None:
    """A batch whose client asked for the owners then used to fail, because an error of the lease is not retried."""

    @contextlib.asynccontextmanager
    async def term() -> AsyncIterator[Controller]:
        raise HoldLost("the term is over", remedy="none")
        yield

    async def scenario() -> None:
        service = ControllerService(cast("Any", SimpleNamespace(term=term, leads=True)))
        with pytest.raises(NotLeading) as refused:
            async with service.telling(cast("Any", None)):
                pass
        assert refused.value.retryable
        assert "the term is over" in refused.value.what

    asyncio.run(scenario())


def test_every_rpc_has_its_handler() -> None:
    """Every RPC has a handler: gRPC's own base class refuses one without as unknown."""
    methods = cpb.DESCRIPTOR.services_by_name["ControllerService"].methods_by_name
    assert set(methods) <= vars(ControllerService).keys()


def test_a_node_that_takes_partitions_from_others_leaves_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals, who = Refusals(ManualClock()), Identity(Role.NODE, "edge-0")
    monkeypatch.setattr(service_module, "REFUSALS", refusals)
    monkeypatch.setattr(service_module, "caller", lambda: who)
    deployed = SimpleNamespace(assignment=SimpleNamespace(owners=("cloud-0",)))
    controller: Any = SimpleNamespace(cluster=SimpleNamespace(operator=lambda _: deployed))
    with pytest.raises(NotAllowed, match="may not move partition 0 away from cloud-0"):
        service_module._check_mover(controller, cpb.MigrateRequest(operator="Op", partitions=[0], to="edge-0"))
    assert refusals.counts() == {("Migrate", "node"): 1}
