"""Hostile requests to real processes: to every RPC of a controller, a replica and an agent, and to their HTTP pages.

A request is made field by field, of values that the field may hold and of others that it must not; some requests are
then damaged byte by byte. Each call must end with an answer or a StateflowError of one line, no process may end or log
a traceback, and an honest client's rows are counted before and after. :mod:`tests.fuzz.pages` makes those of pages.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stateflow.client import Cluster
from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.errors import StateflowError
from stateflow.rpc import agent_pb2, controller_pb2, replica_pb2
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import OPTIONS
from stateflow.security.roles import RULES, Role
from stateflow.testing import LocalCluster
from tests.fuzz import pages
from tests.fuzz.doors import LINE_MAX
from tests.fuzz.makers import HOSTILE, KNOWN, ROWS, Made, Outcome
from tests.integration.operators import Tally

#: calls under way at a time, and their deadline: streams that go on are left
TOGETHER = 48
DEADLINE_S = 3.0
MESSAGES_MAX = 5
#: seconds within which an honest client must be served
GOES_ON_WITHIN_S = 20.0
#: callers of these roles get names that exist: others may legitimately move and delete what they name
HARMLESS = frozenset({Role.READ, Role.QUERY, Role.DATA})


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    method: MethodDescriptor
    names: tuple[str, ...]

    @property
    def kind(self) -> type[Message]:
        return GetMessageClass(self.method.input_type)


def calls_of(module: Any, service: str) -> list[Call]:
    found = []
    for method in module.DESCRIPTOR.services_by_name[service].methods:
        path = f"/{method.containing_service.full_name}/{method.name}"
        harmless = path in RULES and RULES[path].roles & HARMLESS
        found.append(Call(path, method, HOSTILE + KNOWN * 4 if harmless else HOSTILE))
    return found


async def _one(channel: grpc.aio.Channel, call: Call, requests: list[bytes], outcome: Outcome) -> None:
    asks, answers = call.method.client_streaming, call.method.server_streaming

    async def sent() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    try:
        if asks and answers:
            stream = channel.stream_stream(call.path)(sent(), timeout=DEADLINE_S)
        elif asks:
            await channel.stream_unary(call.path)(sent(), timeout=DEADLINE_S)
        elif answers:
            stream = channel.unary_stream(call.path)(requests[0], timeout=DEADLINE_S)
        else:
            await channel.unary_unary(call.path)(requests[0], timeout=DEADLINE_S)
        if answers:
            count = 0
            async for _ in stream:
                count += 1
                if count == MESSAGES_MAX:
                    stream.cancel()
                    break
        outcome.said["OK"] += 1
    except asyncio.CancelledError:
        outcome.said["OK"] += 1  # by the cancellation above
    except grpc.aio.AioRpcError as error:
        outcome.said[error.code().name] += 1
        if problem := _problem(call, error):
            outcome.wrong.append(f"{call.path}: {problem}; request {requests[0].hex()[:4000]}")


def _problem(call: Call, error: grpc.aio.AioRpcError) -> str:
    details = error.details() or ""
    fault = remote_error(error, "it")
    said = str(fault)
    if not said.isprintable() or len(said) > LINE_MAX:
        return f"not said in one line: {said[:LINE_MAX]!r}"
    if error.code() is grpc.StatusCode.UNKNOWN or type(fault) is StateflowError:
        return f"an error that nobody meant: {said}"
    # a stream of requests may end so where its sender is late
    if error.code() is grpc.StatusCode.INTERNAL and not call.method.client_streaming:
        return f"an error inside of it: {details}"
    if error.code() is grpc.StatusCode.UNAVAILABLE and "stateflow-fault-bin" not in str(error.trailing_metadata()):
        return f"it does not answer: {details}"
    return ""


SERVICES: dict[str, list[Call]] = {
    "controller": calls_of(controller_pb2, "ControllerService"),
    "replica": calls_of(replica_pb2, "ReplicaService"),
    "agent": calls_of(agent_pb2, "AgentService"),
}
#: share of the calls that a service gets: an agent has one, and a controller fifty
WEIGHTS = {"controller": 10, "replica": 10, "agent": 1}


async def storm(addresses: Mapping[str, str], count: int, seed: int) -> Outcome:
    """Sends ``count`` calls to the services at these addresses, by the names of :data:`SERVICES`."""
    chance, outcome = random.Random(seed), Outcome()
    made = Made(chance)
    channels = {name: grpc.aio.insecure_channel(address, options=OPTIONS) for name, address in addresses.items()}
    names, weights = list(addresses), [WEIGHTS[name] for name in addresses]
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            (to,) = chance.choices(names, weights)
            call = chance.choice(SERVICES[to])
            several = chance.choice((1, 2, 3)) if call.method.client_streaming else 1
            requests = [made.encoded(call.kind, call.names) for _ in range(several)]
            await _one(channels[to], call, requests, outcome)

    await asyncio.gather(*(worker() for _ in range(TOGETHER)))
    for channel in channels.values():
        await channel.close()
    return outcome


def honest(cluster: Cluster, batch: int) -> None:
    """Counts an honest client's rows, and looks for the agent. Raises AssertionError if either is wrong."""
    with cluster.stream("Tally", source="honest") as stream:
        counts = {row["k"]: row["n"] for row in stream.send(ROWS, sequence=batch)}
    assert counts == {row["k"]: batch + 1 for row in ROWS}, counts
    assert "gw" in [each.name for each in cluster.agents() if each.alive]


def _tracebacks(folder: Path) -> Iterator[str]:
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        if (at := text.find("Traceback")) >= 0:
            yield f"{log.name}: {text[max(0, at - 300) : at + 3000]}"


def _agent(local: LocalCluster) -> tuple[str, str]:
    """Starts an agent. Returns its address and that of its page."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        page = f"127.0.0.1:{free.getsockname()[1]}"
    agent = local._process(
        "agent",
        [
            *("agent", "--site", "edge", "--name", "gw", "--controller", local.address, "--metrics", page),
            *("--data-dir", str(local.data_dir / "gw")),
        ],
    )
    agent.start()
    agent.wait_ready()
    deadline = time.monotonic() + GOES_ON_WITHIN_S
    while not any(each.alive for each in local.cluster.agents()):
        assert time.monotonic() < deadline, "the agent does not register"
        time.sleep(0.1)
    return agent.address, page


def run(count: int, requests: int, seed: int, folder: Path) -> tuple[Outcome, Outcome]:
    """Sends ``count`` calls and ``requests`` to pages, and returns the outcome of both. Raises AssertionError if an
    honest client is not served as before."""
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=folder) as local:
        agent, metrics = _agent(local)
        pids = {name: process.pid for name, process in local.processes.items()}
        honest(local.cluster, 0)
        replica = next(each.address for each in local.cluster.status().replicas if each.name == "edge-0")
        called = asyncio.run(storm({"controller": local.address, "replica": replica, "agent": agent}, count, seed))
        options = DashboardOptions(local.address, ledger=local.ledger, checkpoints=str(folder / "checkpoints"))
        with pages.watched() as logged, Dashboard(options) as dashboard:
            address = dashboard.url.removeprefix("http://").rstrip("/")
            served = [pages.Page("dashboard", address, True), pages.Page("metrics of the agent", metrics, False)]
            asked = asyncio.run(pages.storm(served, requests, seed))
            asked.wrong += [problem for page in served if (problem := pages.serves(page))]
        asked.wrong += logged
        ended = [name for name, process in local.processes.items() if not process.running or process.pid != pids[name]]
        called.wrong += [f"{name} has ended" for name in ended]
        called.wrong += _tracebacks(folder)
        began = time.monotonic()
        honest(local.cluster, 1)
        if (took := time.monotonic() - began) > GOES_ON_WITHIN_S:
            called.wrong.append(f"an honest client waited for {took:.0f} s")
    return called, asked
