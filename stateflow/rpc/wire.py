"""Conversion of messages to domain objects and back; errors, limits and servers that all channels share.

An error of a handler goes to the caller as a ``Fault`` in the trailing metadata of the failed call, and the caller
raises the same StateflowError (:func:`abort`, :func:`remote_error`). Both ends check the fields of what they receive
(:func:`unary`, :func:`streaming`, :func:`answered`).

Values become messages field by field where both have the same names (:func:`message_of`, :func:`value_of`); errors
become faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from stateflow.errors import (
    REPORT_LOG,
    InvalidArgument,
    PortInUse,
    ReleaseMismatch,
    StateflowError,
    Unavailable,
    from_wire,
)
from stateflow.partition.change_feed import BaseFile, Seal, SnapshotInfo
from stateflow.partition.control import PartitionView
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import SourceView
from stateflow.release import OWN
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.fields import checked
from stateflow.rpc.secure import add_port, channel
from stateflow.storage.faults import meaning
from stateflow.types import OperatorSpec, ReplicaInfo, cannot_listen, listened_at

#: limit of requests: pieces of at most 3 MiB (settings); the rest is room for their envelope
MESSAGE_BYTES_MAX = 4 << 20
#: limit of answers, which the process has asked for: they may name every partition, a few hundred bytes each
ANSWER_BYTES_MAX = 64 << 20
#: a connection silent for this long is asked for a sign of life, which must come within the second time
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 10, 5
_COMMON = [
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # a server that takes pings for abuse would cut the channel in mid-call
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
OPTIONS = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), *_COMMON]  # of servers
CHANNEL_OPTIONS = [
    ("grpc.primary_user_agent", OWN.agent),
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    # otherwise the channel dials a dead peer twice a second for ever, at a port that may be another program's by then
    ("grpc.client_idle_timeout_ms", 10_000),
    *_COMMON,
]
#: repeated fields that may outgrow a message are sent in pieces of about this many bytes
PIECE_BYTES = 1 << 20
#: pages of a long list for display: the event loop that builds them has other work, where a few milliseconds count
PAGE_BYTES = 32 << 10
CONNECT_TIMEOUT_S = 2.0
FAULT_KEY = "stateflow-fault-bin"
#: with an answer: the newest ledger record that it rests on, and the term of the leader that gave it; with a question:
#: a follower may answer it, when it has read this record
NEWEST_KEY, TERM_KEY, AFTER_KEY = "stateflow-newest", "stateflow-term", "stateflow-after"
#: limits in characters, for a fault that is too long for HTTP/2's metadata
FAULT_TEXT_MAX, FAULT_FACT_MAX, FAULT_FACTS_MAX = 600, 100, 12
T = TypeVar("T")
M = TypeVar("M", bound=Message)
log = logging.getLogger(__name__)


# -- faults -----------------------------------------------------------------------------------------------


def fault_of(error: StateflowError) -> pb.Fault:
    wire = error.to_wire()
    where = {_sendable(key): _sendable(value) for key, value in wire["where"].items()}
    return pb.Fault(code=wire["code"], what=_sendable(wire["what"]), remedy=_sendable(wire["remedy"]), where=where)


def _sendable(text: str) -> str:
    """Escapes half surrogate pairs, as file names may have: UTF-8 cannot encode them, and an error must not fail on its
    way."""
    return text.encode(errors="backslashreplace").decode()


def error_of(fault: pb.Fault) -> StateflowError:
    """Returns the error of any fault, trusted or not."""
    wire = {"code": fault.code, "what": fault.what, "remedy": fault.remedy, "where": dict(fault.where)}
    return from_wire(wire)


def unexpected(error: BaseException) -> StateflowError:
    """Returns the environment's error, if it is one, or else a StateflowError that users can report."""
    return meaning(error) or StateflowError(f"{type(error).__name__}: {error}", remedy=REPORT_LOG)


def remote_error(error: grpc.RpcError, address: str) -> StateflowError:
    """Returns what a failed call means: the error that the server named, or Unavailable."""
    for key, value in error.trailing_metadata() or ():
        if key == FAULT_KEY:
            with contextlib.suppress(DecodeError):
                return error_of(pb.Fault.FromString(value))
    code = error.code()
    details = error.details() or ""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ReleaseMismatch(f"{address} does not know the call: its stateflow is older", remedy="upgrade it first")
    why = details.rpartition(": ")[2].strip(" []")  # what comes before is gRPC's own account
    what = f"no answer from {address}: {code.name.lower().replace('_', ' ')}" + (f", {why}" if why else "")
    return Unavailable(what, remedy=_mended(details))


def _mended(details: str) -> str:
    """Returns the remedy for a failed handshake, by gRPC's words about it."""
    for word, remedy in _HANDSHAKES.items():
        if word in details:
            return remedy
    return "check that it runs and that the address is right"


_HANDSHAKES = {
    "Hostname Verification": "its certificate is not for this host: `stateflow certs issue --host`",
    "certificate has expired": "its certificate has expired: `stateflow certs renew`",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from the authority in STATEFLOW_TLS_CA, or not for servers",
    "WRONG_VERSION_NUMBER": "it speaks plain text: set STATEFLOW_TLS_CA, _CERT and _KEY there, or none of them here",
    "Socket closed": "check that it runs and that the address is right; with TLS it closes connections in plain text, "
    "and those with a certificate that has expired or is from another authority",
}


def answered(message: M, address: str) -> M:
    """Returns the answer, if each of its fields holds a valid value.

    Raises Unavailable otherwise: the process that answers is no member of the cluster.
    """
    try:
        return checked(message)
    except InvalidArgument as error:
        what = f"invalid answer from {address}: {error.what}"
        raise Unavailable(what, remedy="check what runs there, and its version", **error.where) from error


def connect(address: str) -> grpc.aio.Channel:
    """Opens a channel between servers; a simulation passes another function. Raises InsecureRefused, BadCertificate."""
    return channel(address, CHANNEL_OPTIONS)


async def connected(channel: grpc.aio.Channel, address: str) -> None:
    """Waits until the channel has a connection.

    Without that wait, calls to a restarted peer are refused while the channel backs off, though the peer is there.
    Raises Unavailable.
    """
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
        fault.what, fault.remedy = fault.what[:FAULT_TEXT_MAX], fault.remedy[:FAULT_TEXT_MAX]
        for key in list(fault.where)[FAULT_FACTS_MAX:]:
            del fault.where[key]
        for key, value in fault.where.items():
            fault.where[key] = value[:FAULT_FACT_MAX]
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        fault.code,
        trailing_metadata=((FAULT_KEY, fault.SerializeToString()),),
    )


def unary(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorates a unary handler: it checks the request's fields, and sends StateflowErrors to the caller as they
    are."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> T:
        try:
            return await method(self, checked(request), context)
        except StateflowError as error:
            await abort(context, error)
            raise
        except Exception as error:
            _say(method.__name__, error)
            await abort(context, unexpected(error))
            raise

    return handler


def streaming(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[T]:
        try:
            async for message in method(self, checked(request), context):
                yield message
        except StateflowError as error:
            await abort(context, error)
        except Exception as error:  # noqa: BLE001 - logged, and sent to the caller
            _say(method.__name__, error)
            await abort(context, unexpected(error))

    return handler


def _say(what: str, error: Exception) -> None:
    """Logs an error: in one line if the environment is to blame, or with its stack if stateflow may be."""
    meant = meaning(error)
    log.error("%s failed: %s", what, meant or error, exc_info=None if meant else error)


# -- freshness of answers ---------------------------------------------------------------------------------


def tell_newest(context: grpc.aio.ServicerContext, term: int, record: int) -> None:
    """Attaches what the answer rests on.

    Args:
        term: of the leader that answers; 0: a follower answers.
    """
    context.set_trailing_metadata(((NEWEST_KEY, str(record)), (TERM_KEY, str(term))))


def newest_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[int, int]:
    """Returns (term, record) of an answer; 0 for what it does not say."""
    return _number_of(TERM_KEY, metadata) or 0, _number_of(NEWEST_KEY, metadata) or 0


def after_of(context: grpc.aio.ServicerContext) -> int | None:
    """Returns the ledger record that a follower must have read to answer; None: only the leader may answer."""
    return _number_of(AFTER_KEY, context.invocation_metadata())


def _number_of(key: str, metadata: Any) -> int | None:
    """Returns the number under a key; None: there is none, or an invalid one, as any process may send it."""
    said = dict(metadata or ()).get(key, "")
    return int(said) if isinstance(said, str) and said.isdecimal() and len(said) < 19 else None


# -- servers ----------------------------------------------------------------------------------------------


def _probe(host: str, port: int) -> None:
    """Binds the address for a moment. Raises OSError; gRPC would report it only on stderr, and in its own words."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def bind(server: grpc.aio.Server, listen: str, advertise: str | None = None) -> str:
    """Binds a server, and returns the address with the real port.

    Raises PortInUse, InvalidArgument, InsecureRefused, BadCertificate.
    """
    host, port = listened_at(listen)
    try:
        _probe(host, port)
        bound = add_port(server, listen, advertise)
    except OSError as error:
        raise cannot_listen(error, listen) from error
    except (RuntimeError, UnicodeError) as error:  # gRPC's errors, and that of a malformed host name
        raise PortInUse("the address cannot be bound", remedy="choose another port", address=listen) from error
    if bound == 0:
        raise PortInUse("the address cannot be bound", remedy="choose another port", address=listen)
    return f"{listen.rpartition(':')[0]}:{bound}"


def reached_at(advertise: str | None, bound: str) -> str:
    """Returns the address where others reach what listens at ``bound``.

    Args:
        advertise: host:port; port 0 stands for the bound one.
    """
    if advertise and advertise.endswith(":0"):
        return f"{advertise[:-2]}:{bound.rpartition(':')[2]}"
    return advertise or bound


# -- pieces -----------------------------------------------------------------------------------------------


def pieces(data: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yields (piece of at most ``size`` bytes, whether it is the last); one empty piece for no data."""
    for at in range(0, max(len(data), 1), size):
        yield data[at : at + size], at + size >= len(data)


def batched(messages: Iterable[M], piece_bytes: int = PIECE_BYTES) -> Iterator[list[M]]:
    """Yields messages in lists of about ``piece_bytes``; one empty list if there are none."""
    batch: list[M] = []
    size = 0
    for message in messages:
        if size >= piece_bytes:
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += message.ByteSize()
    yield batch


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
        dropped=dict(spec.dropped),
        source=spec.source,
        source_digest=spec.source_digest,
        bundle=spec.bundle,
        source_mac=spec.source_mac,
        recorded_us=spec.recorded_us,
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
        tuple(sorted(message.dropped.items())),
        message.source,
        message.source_digest,
        message.source_mac,
        message.recorded_us,
        message.bundle,
    )


def replica_to_pb(info: ReplicaInfo) -> pb.Replica:
    return pb.Replica(name=info.name, site=info.site, address=info.address, weight=info.weight)


def replica_of(message: pb.Replica) -> ReplicaInfo:
    return ReplicaInfo(message.name, message.site, message.address, message.weight)


def view_to_pb(view: PartitionView) -> rpb.PartitionView:
    return rpb.PartitionView(
        operator=view.partition.operator,
        partition=view.partition.partition,
        state=view.state,
        epoch=view.epoch,
        sequence=view.sequence,
        move_id=view.move_id,
        batch_rate=view.batch_rate,
        bytes=view.bytes,
        rows=view.rows,
        row_bytes=view.row_bytes,
        origins=view.origins,
        entries=view.entries,
    )


def session_to_pb(session: Session) -> rpb.SourceSession:
    return rpb.SourceSession(generation_us=session.generation_us, id=session.id)


def session_of(message: rpb.SourceSession) -> Session:
    return Session(message.generation_us, message.id)


def positions_to_pb(found: Position | Mapping[int, Position]) -> rpb.PositionsReply:
    """Returns the message of a source's positions by partition, or of one position that every partition has reached."""
    if isinstance(found, Position):
        return rpb.PositionsReply(whole=True, newest_event_us=found.event_us)
    reply = rpb.PositionsReply()
    for partition, position in found.items():
        reply.positions[partition] = position.batch
        if position.event_us is not None:
            reply.event_us[partition] = position.event_us
        if position.event_before_us is not None:
            reply.event_before_us[partition] = position.event_before_us
        if position.known:
            reply.known[partition] = position.known
        if position.client:
            reply.clients[partition] = position.client
    return reply


def positions_of(
    message: rpb.PositionsReply, partitions: Iterable[int] = (), before: int | None = None
) -> dict[int, Position]:
    """Returns positions by partition, without partitions that have seen nothing of the source.

    Args:
        partitions: those that were asked about.
        before: the batch that they were asked about: whether they contain the one before it.
    """
    if message.whole and before is not None:
        newest_us = message.newest_event_us if message.HasField("newest_event_us") else None
        return dict.fromkeys(partitions, Position(before - 1, event_us=newest_us))
    return {
        partition: Position(
            batch,
            event_us=message.event_us.get(partition),
            event_before_us=message.event_before_us.get(partition),
            known=message.known.get(partition, b""),
            client=message.clients.get(partition, ""),
        )
        for partition, batch in message.positions.items()
    }


def source_to_pb(partition: int, view: SourceView) -> rpb.SourceView:
    return rpb.SourceView(
        source=view.source,
        partition=partition,
        batch=view.batch,
        at_us=max(0, view.at_us),
        bytes=view.bytes,
        watermark_us=view.watermark_us,
        retired=view.retired,
        session_us=0 if view.session is None else view.session.generation_us,
    )


def source_of(message: rpb.SourceView) -> SourceView:
    """Returns the view of a source. Of its session only the begin is known."""
    return SourceView(
        message.source,
        message.batch,
        message.at_us,
        message.bytes,
        message.watermark_us if message.HasField("watermark_us") else None,
        message.retired,
        Session(message.session_us, "") if message.session_us else None,
    )


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
    """Returns the description of a snapshot. Raises InvalidArgument for a base that has a file twice."""
    if len({file.name for file in message.files}) < len(message.files):
        raise InvalidArgument("a base has a file twice", remedy="check what runs at the source's address")
    files = tuple(BaseFile(file.name, file.size, file.digest) for file in message.files)
    return SnapshotInfo(message.snapshot_id, message.sequence, message.epoch, message.digest, files, message.kept)


def seal_to_pb(seal: Seal) -> rpb.Seal:
    return rpb.Seal(
        move_id=seal.move_id,
        epoch=seal.epoch,
        sequence=seal.sequence,
        digest=seal.digest,
        sealed_at_us=seal.sealed_at_us,
        owner=None if seal.owner is None else replica_to_pb(seal.owner),
    )


def seal_of(message: rpb.Seal) -> Seal:
    owner = replica_of(message.owner) if message.HasField("owner") else None
    return Seal(message.move_id, message.epoch, message.sequence, message.digest, message.sealed_at_us, owner)


# -- any value --------------------------------------------------------------------------------------------

_Readers = dict[str, Callable[[Any], Any]]
_known: dict[tuple[type, str], _Readers] = {}  # by the value's type and the message's


def message_of(kind: type[M], value: Any, **given: Any) -> M:
    """Returns the message of a value.

    Args:
        given: fields of the message that have another name in the value, or that are messages themselves.
    """
    made = {name: getattr(value, name) for name in _readers(type(value), kind) if name not in given}
    for name, each in made.items():
        if isinstance(each, StateflowError):
            made[name] = fault_of(each)
    return kind(**made, **given)


def value_of(kind: type[T], message: Message, **given: Any) -> T:
    """Returns the value of a message.

    Args:
        given: fields of the value that have another name in the message, or that are values themselves.
    """
    readers = _readers(kind, type(message))
    return kind(**{name: read(message) for name, read in readers.items() if name not in given}, **given)


def _readers(kind: Any, message: type[Message]) -> _Readers:
    """Returns the readers of the fields that both have."""
    by_name: Any = message.DESCRIPTOR.fields_by_name
    key = kind, message.DESCRIPTOR.full_name
    if key not in _known:
        _known[key] = {each.name: _reader(by_name[each.name]) for each in fields(kind) if each.name in by_name}
    return _known[key]


def _reader(field: FieldDescriptor) -> Callable[[Any], Any]:
    name, inner = field.name, field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return lambda message: dict(getattr(message, name))
    if inner is not None and inner.name == "Fault":
        return lambda message: error_of(getattr(message, name)) if message.HasField(name) else None
    if field.is_repeated:
        return lambda message: tuple(getattr(message, name))
    if field.has_presence and inner is None:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return lambda message: getattr(message, name)
