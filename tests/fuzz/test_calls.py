"""Hostile calls to a controller, a replica and an agent of this process end with an answer or an error of one line."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stateflow.agent.agent import Agent, Config
from stateflow.agent.processes import Rlimits
from stateflow.client import Cluster
from tests.fuzz.answers import Idle
from tests.fuzz.calls import SERVICES, honest, storm
from tests.fuzz.pages import watched
from tests.integration.operators import Tally
from tests.sizes import SEED, THOROUGH, sized
from tests.walks import PATIENCE_S, SOURCE, Participants, Tracer

#: the gate draws what it has drawn before
FIRST = SEED if THOROUGH else 1


@pytest.fixture
def as_before() -> Iterator[None]:
    """Undoes what replicas set for their whole process."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@contextmanager
def agent(folder: Path, controller: str) -> Iterator[str]:
    """Runs an agent in a thread. Yields its address."""
    ready: Future[str] = Future()
    stops: list[Any] = []

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        launcher: Any = Idle()
        config = Config("gw", "edge", controller, folder, "127.0.0.1:0", "", {}, 4, 0, 1.0, {})
        await Agent(config, Rlimits(), launcher).run(stop, ready.set_result)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield ready.result(PATIENCE_S)
    finally:
        stops[0]()
        thread.join(PATIENCE_S)


def test_every_service_is_sent_hostile_calls(tmp_path: Path, as_before: None) -> None:
    with Participants(tmp_path, Tracer()) as participants, agent(tmp_path / "gw", participants.address) as address:
        cluster = Cluster(participants.address)
        participants.settle(cluster)
        cluster.deploy(Tally, 4)
        honest(cluster, 0)
        replica = next(each.address for each in cluster.status().replicas if each.name == SOURCE)
        addresses = {"controller": participants.address, "replica": replica, "agent": address}
        with watched() as logged:
            outcome = asyncio.run(storm(addresses, sized(8000), FIRST))
        assert outcome.wrong + logged == []
        assert outcome.said.keys() >= {"OK", "FAILED_PRECONDITION"}
        honest(cluster, 1)


def test_every_method_is_called() -> None:
    assert {name: len(calls) for name, calls in SERVICES.items()} == {"controller": 52, "replica": 28, "agent": 1}
