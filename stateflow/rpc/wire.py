"""Messages to domain objects and back; errors and limits that every channel shares."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from stateflow.errors import InvalidArgument, PortInUse, StateflowError, Unavailable, from_wire
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.runtime.transfer import BaseFile, Seal, SnapshotInfo
from stateflow.types import OperatorSpec, ReplicaInfo

#: messages carry pieces of at most 3 MiB (settings); the rest is room for their envelope
MESSAGE_BYTES_MAX = 4 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
CONNECT_TIMEOUT_S = 2.0
FAULT_KEY = "stateflow-fault-bin"
T = TypeVar("T")
log = logging.getLogger(__name__)


# -- faults -----------------------------------------------------------------------------------------------


def fault_of(error: StateflowError) -> pb.Fault:
    return pb.Fault(**error.to_wire())


def error_of(fault: pb.Fault) -> StateflowError:
    wire = {"code": fault.code, "what": fault.what, "remedy": fault.remedy, "where": dict(fault.where)}
    return from_wire(wire)


def unexpected(error: BaseException) -> StateflowError:
    """An error nobody planned for, in the form users can report."""
    return StateflowError(f"{type(error).__name__}: {error}", remedy="this is a fault of stateflow; see the log")


def remote_error(error: grpc.RpcError, address: str) -> StateflowError:
    """What a failed call means: the error the server named, or Unavailable."""
    for key, value in error.trailing_metadata() or ():
        if key == FAULT_KEY:
            return error_of(pb.Fault.FromString(value))
    code = error.code()
    why = (error.details() or "").rpartition(": ")[2]  # what comes before is gRPC's own story
    what = f"no answer from {address}: {code.name.lower().replace('_', ' ')}" + (f", {why}" if why else "")
    return Unavailable(what, remedy="check that it runs and that the address is right")


def connect(address: str) -> grpc.aio.Channel:
    """How servers reach each other; a simulation hands another in."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


async def connected(channel: grpc.aio.Channel, address: str) -> None:
    """Until the channel has a connection. A peer that was restarted is else refused for as long as the channel backs
    off, though it is there. Raises Unavailable."""
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
    except TimeoutError as error:
        what = f"no connection to {address} within {CONNECT_TIMEOUT_S:g} s"
        raise Unavailable(what, remedy="check that it runs and that the address is right") from error


async def abort(context: grpc.aio.ServicerContext, error: StateflowError) -> None:
    fault = fault_of(error)
    if fault.ByteSize() > 6000:  # HTTP/2 metadata is limited
        for key in ("traceback", "row"):
            fault.where.pop(key, None)
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        fault.code,
        trailing_metadata=((FAULT_KEY, fault.SerializeToString()),),
    )


def unary(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Handler whose StateflowErrors reach the caller as what they are."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> T:
        try:
            return await method(self, request, context)
        except StateflowError as error:
            await abort(context, error)
            raise
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await abort(context, unexpected(error))
            raise

    return handler


def streaming(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[T]:
        try:
            async for message in method(self, request, context):
                yield message
        except StateflowError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await abort(context, unexpected(error))

    return handler


# -- servers ----------------------------------------------------------------------------------------------


def _probe(host: str, port: int) -> None:
    """Raises OSError for an address that cannot be bound; gRPC would say so too, but on stderr and in its own words."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Bind and return the address with the real port. Raises PortInUse, InvalidArgument."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"{listen!r} is not an address", remedy="write host:port; port 0 takes a free one")
    try:
        _probe(host.strip("[]"), int(port))
        bound = server.add_insecure_port(listen)
    except (RuntimeError, OSError, OverflowError) as error:
        raise PortInUse("the address cannot be bound", remedy="choose another port", address=listen) from error
    if bound == 0:
        raise PortInUse("the address cannot be bound", remedy="choose another port", address=listen)
    return f"{host}:{bound}"


# -- pieces -----------------------------------------------------------------------------------------------


def pieces(data: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    """(piece, is it the last) of at most ``size`` bytes; one empty piece for no data."""
    for at in range(0, max(len(data), 1), size):
        yield data[at : at + size], at + size >= len(data)


# -- domain objects ---------------------------------------------------------------------------------------


def spec_to_pb(spec: OperatorSpec) -> pb.OperatorSpec:
    return pb.OperatorSpec(
        name=spec.name,
        target=spec.target,
        partitions=spec.partitions,
        key=spec.key,
        output_schema=spec.output_schema,
        state_schema=spec.state_schema,
        side_schemas=dict(spec.side_schemas),
    )


def spec_of(message: pb.OperatorSpec) -> OperatorSpec:
    return OperatorSpec(
        message.name,
        message.target,
        message.partitions,
        tuple(message.key),
        message.output_schema,
        message.state_schema,
        tuple(sorted(message.side_schemas.items())),
    )


def replica_to_pb(info: ReplicaInfo) -> pb.Replica:
    return pb.Replica(name=info.name, site=info.site, address=info.address, weight=info.weight)


def replica_of(message: pb.Replica) -> ReplicaInfo:
    return ReplicaInfo(message.name, message.site, message.address, message.weight)


def snapshot_to_pb(info: SnapshotInfo) -> rpb.SnapshotReply:
    return rpb.SnapshotReply(
        snapshot_id=info.snapshot_id,
        sequence=info.sequence,
        epoch=info.epoch,
        digest=info.digest,
        files=[rpb.BaseFile(name=f.name, size=f.size, digest=f.digest) for f in info.files],
        kept=info.kept,
    )


def snapshot_of(message: rpb.SnapshotReply) -> SnapshotInfo:
    files = tuple(BaseFile(file.name, file.size, file.digest) for file in message.files)
    return SnapshotInfo(message.snapshot_id, message.sequence, message.epoch, message.digest, files, message.kept)


def seal_to_pb(seal: Seal) -> rpb.Seal:
    return rpb.Seal(
        move_id=seal.move_id,
        epoch=seal.epoch,
        sequence=seal.sequence,
        digest=seal.digest,
        sealed_at_us=seal.sealed_at_us,
    )


def seal_of(message: rpb.Seal) -> Seal:
    return Seal(message.move_id, message.epoch, message.sequence, message.digest, message.sealed_at_us)
