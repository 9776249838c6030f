"""Agents on the wire: messages between agents and controllers, and clients for both."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc.aio

from stateflow.fleet import AgentInfo, Beat, Child, DesiredState, Directory, Request, Spawned
from stateflow.partition.control import Command
from stateflow.reports import AgentReport, ChildReport
from stateflow.rpc import agent_pb2 as apb
from stateflow.rpc import agent_pb2_grpc, controller_pb2_grpc
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.reports import command_of, command_to_pb
from stateflow.rpc.wire import answered, message_of, remote_error, streaming, value_of

CALL_TIMEOUT_S = 5.0
#: (command, replica, lines, follow) → pieces of its log; an empty piece is only a sign of life
Logs = Callable[[Command, str, int, bool], AsyncIterator[bytes]]


# -- values -----------------------------------------------------------------------------------------------


def spawned_to_pb(spawned: Spawned) -> cpb.Spawned:
    return message_of(cpb.Spawned, spawned)


def spawned_of(message: cpb.Spawned) -> Spawned:
    return value_of(Spawned, message)


def _child_to_pb(child: Child) -> cpb.Child:
    return message_of(cpb.Child, child, spawned=spawned_to_pb(child.spawned))


def _child_of(message: cpb.Child) -> Child:
    return value_of(Child, message, spawned=spawned_of(message.spawned))


def beat_to_pb(beat: Beat) -> cpb.AgentBeatRequest:
    return message_of(
        cpb.AgentBeatRequest,
        beat,
        agent=message_of(cpb.Agent, beat.agent),
        directory=message_of(cpb.Directory, beat.directory),
        children=map(_child_to_pb, beat.children),
    )


def beat_of(message: cpb.AgentBeatRequest) -> Beat:
    return value_of(
        Beat,
        message,
        agent=value_of(AgentInfo, message.agent),
        directory=value_of(Directory, message.directory),
        children=tuple(map(_child_of, message.children)),
    )


def desired_state_to_pb(orders: DesiredState) -> cpb.AgentBeatReply:
    return message_of(cpb.AgentBeatReply, orders, wanted=map(spawned_to_pb, orders.wanted))


def desired_state_of(message: cpb.AgentBeatReply) -> DesiredState:
    return value_of(DesiredState, message, wanted=tuple(map(spawned_of, message.wanted)))


def request_to_pb(request: Request) -> cpb.SpawnRequest:
    return message_of(cpb.SpawnRequest, request)


def request_of(message: cpb.SpawnRequest) -> Request:
    return value_of(Request, message)


def agent_to_pb(info: AgentInfo) -> cpb.Agent:
    return message_of(cpb.Agent, info)


def view_to_pb(
    info: AgentInfo,
    alive: bool,
    heard_s: float,
    disk_free_bytes: int,
    wanted: list[Spawned],
    children: list[Child],
) -> cpb.AgentView:
    return cpb.AgentView(
        agent=agent_to_pb(info),
        alive=alive,
        last_heartbeat_s=heard_s,
        disk_free_bytes=disk_free_bytes,
        wanted=map(spawned_to_pb, wanted),
        children=map(_child_to_pb, children),
    )


def report_of(message: cpb.AgentView) -> AgentReport:
    """Returns the report of an agent, with each replica that it is to run or runs, by name.

    ``state`` is empty for a replica that the agent has not reported yet.
    """
    info = value_of(AgentInfo, message.agent)
    wanted = {each.replica: spawned_of(each) for each in message.wanted}
    children = {child.spawned.replica: child for child in map(_child_of, message.children)}
    replicas = []
    for name in sorted(wanted.keys() | children.keys()):
        child = children.get(name)
        spawned = wanted.get(name) or (child.spawned if child is not None else None)
        assert spawned is not None
        replicas.append(
            ChildReport(
                replica=name,
                wanted="" if name not in wanted else "running" if spawned.running else "stopped",
                state="" if child is None else child.state,
                generation=spawned.generation,
                runs=0 if child is None else child.spawned.generation,
                workers=spawned.workers,
                weight=spawned.weight,
                memory_bytes=spawned.memory_bytes,
                deaths=0 if child is None else child.deaths,
                address="" if child is None else child.address,
                fault=None if child is None else child.fault,
            )
        )
    return value_of(
        AgentReport,
        message,
        name=info.name,
        site=info.site,
        address=info.address,
        labels=dict(info.labels),
        cores=info.cores,
        memory_bytes=info.memory_bytes,
        disk_bytes=info.disk_bytes,
        version=info.version,
        python=info.python,
        limits=info.limits,
        replicas=tuple(replicas),
    )


# -- calls ------------------------------------------------------------------------------------------------


class ControllerCaller:
    """A controller, as its agents call it. Raises what it refuses with, or Unavailable."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.address = address
        self._stub = controller_pb2_grpc.ControllerServiceStub(channel)

    async def beat(self, beat: Beat) -> DesiredState:
        try:
            reply = await self._stub.AgentBeat(beat_to_pb(beat), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise remote_error(error, self.address) from error
        return desired_state_of(answered(reply, self.address))


class AgentCaller:
    """An agent, as its controller calls it. Raises what it refuses with, or Unavailable."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._address = address
        self._stub = agent_pb2_grpc.AgentServiceStub(channel)

    async def logs(self, command: Command, replica: str, lines: int, follow: bool) -> AsyncGenerator[bytes]:
        request = apb.LogsRequest(replica=replica, lines=lines, follow=follow, command=command_to_pb(command))
        call = self._stub.Logs(request)
        try:
            while (page := await call.read()) is not grpc.aio.EOF:
                yield answered(page, self._address).data
        except grpc.aio.AioRpcError as error:
            raise remote_error(error, self._address) from error
        finally:
            call.cancel()


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The gRPC service of an agent."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    @streaming
    async def Logs(self, request: apb.LogsRequest, _: grpc.aio.ServicerContext) -> AsyncIterator[apb.LogsPage]:
        async for data in self._logs(command_of(request), request.replica, request.lines, request.follow):
            yield apb.LogsPage(data=data)


def add_agent_service(server: Any, logs: Logs) -> None:
    agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(logs), server)
