"""Converts values to messages and back; has the limits and handlers that all channels share.

:func:`message_of` and :func:`value_of` convert dataclasses field by field, and the values in them. ``_SHAPES`` lists
further differences between a value and its message. Batches are converted by hand where they are sent and received, as
reflection would take longer.

Both ends check the fields of what they receive (:func:`unary`, :func:`streaming`, :func:`answered`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, StateflowError, Unavailable
from stateflow.fleet import AgentInfo, Child, Spawned
from stateflow.partition.change_feed import SnapshotInfo
from stateflow.partition.control import (
    Cancelled,
    Fence,
    Fenced,
    Origin,
    PartitionView,
    Restore,
    Restored,
    TakenOver,
    TakeOver,
    Wanted,
)
from stateflow.partition.layout import Position, Session
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import SourceView
from stateflow.reports import (
    AgentReport,
    CheckpointReport,
    ChildReport,
    MoveReport,
    ReplicaStatistics,
    RestoredPartition,
    Taken,
)
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.faults import WHAT_RUNS, abort, error_of, fault_of, log_failure, remote_error, unexpected
from stateflow.rpc.fields import NUMBER_MAX, checked
from stateflow.rpc.secure import CHANNEL_OPTIONS, channel
from stateflow.status import (
    AdoptedOperator,
    ClusterReport,
    DeployingOperator,
    Deployment,
    RefusedReplica,
    ReplicaStatus,
)
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, shown

#: longest silence of a stream without deadline, in seconds
SILENCE_S = 60.0
#: repeated fields that may outgrow a message are sent in pieces of about this many bytes
PIECE_BYTES = 1 << 20
#: limit of what a client joins from pieces, such as the output of a partition, in bytes; none is stored larger
JOINED_BYTES_MAX = 1 << 32
#: bytes of a page of a long list for display, small because the event loop that builds pages also has urgent work
PAGE_BYTES = 32 << 10
CONNECT_TIMEOUT_S = 2.0
#: metadata of an answer: the newest ledger record on which it is based, and the leader's term. Metadata of a request:
#: the record that a follower must have read to answer it.
NEWEST_KEY, TERM_KEY, AFTER_KEY = "stateflow-newest", "stateflow-term", "stateflow-after"
#: metadata of a request: URI of the user for whom a process calls
USER_KEY = "stateflow-user"
T = TypeVar("T")
M = TypeVar("M", bound=Message)
log = logging.getLogger(__name__)


def answered(message: M | None, address: str) -> M:
    """Returns the answer, if each of its fields holds a valid value.

    Raises Unavailable otherwise: the answering process is not a member of the cluster.

    Args:
        message: None: the answer could not be parsed, for which gRPC's asynchronous calls return None.
    """
    if message is None:
        raise Unavailable(f"invalid answer from {address}: it cannot be parsed", remedy=WHAT_RUNS)
    try:
        return checked(message)
    except InvalidArgument as error:
        what = f"invalid answer from {address}: {error.what}"
        raise Unavailable(what, remedy=WHAT_RUNS, **error.where) from error


def connect(address: str) -> grpc.aio.Channel:
    """Opens a channel between servers; a simulation passes another function. Raises InsecureRefused, BadCertificate."""
    return channel(address, CHANNEL_OPTIONS)


async def connected(channel: grpc.aio.Channel, address: str) -> None:
    """Waits until the channel has a connection.

    Without that wait, calls to a restarted peer would be refused while the channel backs off, although the peer is
    running. Raises Unavailable.
    """
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
    except TimeoutError as error:
        what = f"no connection to {address} within {CONNECT_TIMEOUT_S:g} s"
        raise Unavailable(what, remedy="check that it runs and that the address is right") from error


async def read_stream(
    call: Any,
    address: str,
    silence_s: float = SILENCE_S,
    answers: Callable[[float], Awaitable[bool]] | None = None,
) -> AsyncGenerator[Any]:
    """Yields the messages of a stream without deadline, whose duration cannot be known.

    gRPC answers keepalive in its own threads, so a server whose event loop hangs keeps its connections. Raises the
    refusal of the server, or Unavailable if the server is silent for about ``silence_s``.

    Args:
        call: the stream, which is cancelled at the end.
        answers: sends the server another request, and tells whether the server answers it within the given seconds. A
            server that answers is not silent, but works for long. None: only messages of the stream count, which the
            server sends often enough.
    """
    loop = asyncio.get_running_loop()
    waits_since, silent = loop.time(), False

    async def watch() -> None:
        nonlocal waits_since, silent
        patience_s = silence_s if answers is None else silence_s / 2
        while not silent:
            await asyncio.sleep(silence_s / 8)
            since = waits_since
            if loop.time() - since < patience_s:
                continue
            alive = answers is not None and await answers(silence_s / 4)
            if waits_since == since:  # otherwise a message has come meanwhile
                waits_since, silent = loop.time(), not alive
        call.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            waits_since = math.inf  # the reader may take any time before it asks for more
            yield answered(message, address)
            waits_since = loop.time()
    except grpc.aio.AioRpcError as error:
        raise remote_error(error, address) from error
    except asyncio.CancelledError:
        reader = asyncio.current_task()
        if not silent or (reader is not None and reader.cancelling()):
            raise
        what = f"no message from {address} for {silence_s:g} s"
        raise Unavailable(what, remedy="check that it is healthy, and retry") from None
    finally:
        watching.cancel()
        call.cancel()


def read_stream_blocking(call: Any, address: str, silence_s: float = SILENCE_S) -> Generator[Any, None, None]:
    """Yields the messages of a stream without deadline; see :func:`read_stream`. A thread watches for silence.

    Raises the refusal of the server, or Unavailable, also after ``silence_s`` without a message.
    """
    heard_at, ended, silent = SYSTEM_CLOCK.monotonic(), threading.Event(), False

    def watch() -> None:
        nonlocal silent
        while not ended.wait(silence_s / 4):
            if SYSTEM_CLOCK.monotonic() - heard_at > silence_s:
                silent = True
                call.cancel()
                return

    threading.Thread(target=watch, name="silence", daemon=True).start()
    try:
        for message in call:
            heard_at = math.inf  # the reader may take any time before it asks for more
            yield answered(message, address)
            heard_at = SYSTEM_CLOCK.monotonic()
    except grpc.RpcError as error:
        if silent:
            what = f"no message from {address} for {silence_s:g} s"
            raise Unavailable(what, remedy="check that it is healthy, and retry") from error
        raise remote_error(error, address) from error
    finally:
        ended.set()
        call.cancel()


def unary(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorates a unary handler: it checks the request's fields, and sends StateflowErrors to the caller unchanged."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> T:
        try:
            return await method(self, checked(request), context)
        except StateflowError as error:
            await abort(context, error)
            raise
        except Exception as error:
            log_failure(method.__name__, error)
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
            log_failure(method.__name__, error)
            await abort(context, unexpected(error))

    return handler


# -- freshness of answers ---------------------------------------------------------------------------------


def tell_newest(context: grpc.aio.ServicerContext, term: int, record: int) -> None:
    """Attaches to an answer the term and record on which it is based.

    Args:
        term: term of the answering leader; 0: a follower answers.
    """
    context.set_trailing_metadata(((NEWEST_KEY, str(record)), (TERM_KEY, str(term))))


def newest_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[int, int]:
    """Returns the term and the record on which an answer is based; 0: the answer does not state it."""
    return _number_of(TERM_KEY, metadata) or 0, _number_of(NEWEST_KEY, metadata) or 0


def after_of(context: grpc.aio.ServicerContext) -> int | None:
    """Returns the ledger record that a follower must have read to answer; None: only the leader may answer."""
    return _number_of(AFTER_KEY, context.invocation_metadata())


def _number_of(key: str, metadata: Any) -> int | None:
    """Returns the number under a key; None: there is none, or it is not valid; any process may have sent it."""
    said = dict(metadata or ()).get(key, "")
    return int(said) if isinstance(said, str) and said.isdecimal() and len(said) < 19 else None


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


# -- values and messages ----------------------------------------------------------------------------------


_Getter = Callable[[Any], Any]
_Fields = Callable[[Any], dict[str, Any]]


class _Shape(NamedTuple):
    """The difference between a value and its message.

    ``names``: field of the value → its name in the message. ``write`` returns fields of the message for a value,
    ``read`` fields of the value for a message; they take precedence over fields of the same name.
    """

    names: Mapping[str, str] = {}
    write: _Fields = lambda _: {}
    read: _Fields = lambda _: {}


def message_of(kind: type[M], value: object = None, **given: Any) -> M:
    """Returns the message of a value.

    Args:
        value: a dataclass; None: all fields are given.
        given: fields of the message that the value lacks, or has in another shape; values in them are converted, too.
    """
    get, write, convert = _sending(type(value), kind)  # type: ignore[arg-type]  # classes are hashable
    made = get(value) | write(value) | given
    for name, sent in convert:
        if (each := made.get(name)) is not None:
            made[name] = sent(each)
    return kind(**made)


def value_of(kind: type[T], message: Message, **given: Any) -> T:
    """Returns the value of a message.

    Args:
        kind: a dataclass.
        given: fields of the value that the message lacks, or has in another shape.
    """
    get, read, convert = _reading(kind, type(message))  # type: ignore[arg-type]  # classes are hashable
    given = read(message) | given
    made = get(message)
    for name, received in convert:
        if name not in given:
            made[name] = received(message)
    return kind(**made | given)


@functools.cache
def _sending(kind: type, message: type[Message]) -> tuple[_Fields, _Fields, list[tuple[str, _Getter]]]:
    """Returns what :func:`message_of` needs for a pair of types: a function that gets the fields with the same shape
    from a value, a function that makes the fields of another shape, and (name, conversion) of each field that protobuf
    does not accept unchanged.

    Raises TypeError for a field of the value that neither the message nor :data:`_APART` has.
    """
    shape, theirs = _shape(kind, message), _fields_of(message)
    attributes: dict[str, str] = {}
    apart = _APART.get((kind, message), "").split()
    for name, hint in _hints(kind):
        sent_as = shape.names.get(name, name)
        if hint is PartitionId:  # a message with the operator's spec does not repeat the operator
            attributes |= {each: f"{name}.{each}" for each in ("operator", "partition") if each in theirs}
        elif sent_as in theirs:
            attributes[sent_as] = name
        elif name not in apart:
            lost = f"{kind.__name__}.{name} would be lost: {message.DESCRIPTOR.full_name} has no field {sent_as!r}"
            raise TypeError(f"{lost}; add one, or list the value's field in _APART")
    convert = [(name, sent) for name, field in theirs.items() if (sent := _sent(field)) is not None]
    return _getting(attributes), shape.write, convert


@functools.cache
def _reading(kind: type, message: type[Message]) -> tuple[_Fields, _Fields, list[tuple[str, _Getter]]]:
    """Returns what :func:`value_of` needs for a pair of types: a function that gets the fields that are the same in the
    message, a function that makes the fields of another shape, and (name, conversion) of each other field.
    """
    shape, theirs = _shape(kind, message), _fields_of(message)
    attributes: dict[str, str] = {}
    convert: list[tuple[str, _Getter]] = []
    for name, hint in _hints(kind):
        sent_as = shape.names.get(name, name)
        if hint is PartitionId:
            operator = attrgetter("operator" if "operator" in theirs else "spec.name")
            convert.append((name, partial(_partition_of, operator)))
        elif sent_as in theirs and (received := _received(theirs[sent_as], hint)) is not None:
            convert.append((name, received))
        elif sent_as in theirs:
            attributes[name] = sent_as
    return _getting(attributes), shape.read, convert


def _getting(attributes: Mapping[str, str]) -> _Fields:
    """Returns a function that gets attributes of an object. ``attributes``: name in the result → attribute."""
    names = tuple(attributes)
    if len(names) < 2:
        return lambda source: {name: getattr(source, attribute) for name, attribute in attributes.items()}
    get = attrgetter(*attributes.values())  # one call for all: there may be thousands of objects
    return lambda source: dict(zip(names, get(source), strict=True))


def _sent(field: FieldDescriptor) -> _Getter | None:
    """Returns the conversion of a value's field; None: protobuf accepts the field unchanged."""
    inner = field.message_type
    if inner is None or inner.GetOptions().map_entry:
        return None if field.enum_type is None else attrgetter("value")
    kind = GetMessageClass(inner)

    def sent(value: Any) -> Any:
        if isinstance(value, Message):
            return value
        return fault_of(value) if isinstance(value, StateflowError) else message_of(kind, value)

    return (lambda values: [*map(sent, values)]) if field.is_repeated else sent


def _received(field: FieldDescriptor, hint: Any) -> _Getter | None:
    """Returns a function that reads a field of a message; None: the field is used unchanged."""
    name, inner, get = field.name, field.message_type, attrgetter(field.name)
    many = list if get_origin(hint) is list else tuple
    said = [each for each in get_args(hint) if each is not NoneType]  # X of tuple[X, ...], Sequence[X] and X | None
    if inner is not None and inner.GetOptions().map_entry:
        return lambda message: dict(get(message))
    if inner is not None:
        is_fault = inner is pb.Fault.DESCRIPTOR
        one: _Getter = error_of if is_fault else partial(value_of, said[0] if said else hint)
        if field.is_repeated:
            return lambda message: many(map(one, get(message)))
        if is_fault or said:
            return lambda message: one(get(message)) if message.HasField(name) else None
        return lambda message: one(get(message))
    if field.is_repeated:
        return lambda message: many(get(message))
    if field.enum_type is not None:
        names = {number: each.name for number, each in field.enum_type.values_by_number.items()}
        return lambda message: hint[names[get(message)]]
    if field.has_presence:
        return lambda message: get(message) if message.HasField(name) else None
    return None


def _partition_of(operator: _Getter, message: Any) -> PartitionId:
    return PartitionId(operator(message), message.partition)


def _shape(kind: type, message: type[Message]) -> _Shape:
    return _SHAPES.get((kind, message)) or _Shape()


def _fields_of(message: Any) -> dict[str, FieldDescriptor]:
    return {each.name: each for each in message.DESCRIPTOR.fields}


def _hints(kind: Any) -> list[tuple[str, Any]]:
    """Returns names and types of a dataclass's fields."""
    hints = get_type_hints(kind)
    return [(each.name, hints[each.name]) for each in fields(kind)] if kind is not NoneType else []


# -- positions of sources: a column for each field, as there may be thousands -----------------------------


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
    """Returns positions by partition, without partitions that have no batch of the source.

    Args:
        partitions: partitions in the request.
        before: batch in the request, which asked whether the partitions contain the batch before it.
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


# -- values whose messages have another shape -------------------------------------------------------------


def _spec_to_pb(spec: OperatorSpec) -> dict[str, Any]:
    return {"side_schemas": dict(spec.side_schemas), "dropped": dict(spec.dropped)}


def _spec_of(message: pb.OperatorSpec) -> dict[str, Any]:
    """Returns the maps as sorted tuples, because a spec is hashed and compared."""
    return {name: tuple(sorted(getattr(message, name).items())) for name in ("side_schemas", "dropped")}


def _deployment_to_pb(deployment: Deployment) -> dict[str, Any]:
    """Returns fields that name each owner once, however many partitions it has."""
    known = sorted(set(deployment.owners), key=lambda owner: owner.name)
    numbers = {owner: number for number, owner in enumerate(known)}
    return {"replicas": known, "owners": [numbers[owner] for owner in deployment.owners]}


def _deployment_of(message: cpb.Deployment) -> dict[str, Any]:
    """Returns the owners. Raises InvalidArgument unless each partition has an owner and an epoch."""
    infos = [value_of(ReplicaInfo, each) for each in message.replicas]
    is_whole = len(message.owners) == len(message.epochs) == message.spec.partitions
    if not is_whole or max(message.owners, default=0) >= len(infos):
        raise InvalidArgument(
            "a deployment does not name an owner and an epoch for each partition",
            remedy="check what runs at the controller's address, and its version",
            operator=message.spec.name,
        )
    return {"owners": tuple(infos[number] for number in message.owners)}


def _status_of(message: cpb.ReplicaStatus) -> dict[str, Any]:
    return asdict(value_of(ReplicaInfo, message.replica))


def _cluster_of(message: cpb.StatusReply) -> dict[str, Any]:
    """Returns the replicas of a follower's report as neither alive nor silent, because replicas send heartbeats to the
    leader only. For a leader's report, returns no fields.
    """
    if not message.HasField("follower"):
        return {}
    return {"replicas": tuple(value_of(ReplicaStatus, each, alive=None) for each in message.replicas)}


def _refused_to_pb(refused: RefusedReplica) -> dict[str, Any]:
    replica = pb.Replica(name=refused.name, address=refused.address)
    return {"replica": replica, "directory": cpb.Directory(id=refused.directory)}


def _refused_of(message: cpb.Refused) -> dict[str, Any]:
    return {"name": message.replica.name, "address": message.replica.address, "directory": message.directory.id}


def _restored_to_pb(restored: RestoredPartition) -> dict[str, Any]:
    return {"result": None if restored.fault else message_of(rpb.RestoreReply, restored)}


def _restored_of(message: cpb.RestoredPartition) -> dict[str, Any]:
    restored = value_of(Restored, message.result)
    return {each.name: getattr(restored, each.name) for each in fields(restored) if each.name != "passed_over"} | {
        "unusable": tuple(restored.passed_over)
    }


def _agent_of(message: cpb.AgentView) -> dict[str, Any]:
    """Returns the fields of an agent's report, with each replica that it runs or should run, by name."""
    wanted = {each.replica: value_of(Spawned, each) for each in message.wanted}
    children = {each.spawned.replica: value_of(Child, each) for each in message.children}
    replicas = []
    for name in sorted(wanted.keys() | children.keys()):
        child = children.get(name) or Child(Spawned(name, "", generation=0), "")  # not reported yet
        spawned = wanted.get(name) or child.spawned
        replicas.append(
            ChildReport(
                replica=name,
                wanted="" if name not in wanted else "running" if spawned.running else "stopped",
                state=child.state,
                generation=spawned.generation,
                runs=child.spawned.generation,
                workers=spawned.workers,
                weight=spawned.weight,
                memory_bytes=spawned.memory_bytes,
                deaths=child.deaths,
                address=child.address,
                fault=child.fault,
            )
        )
    return asdict(value_of(AgentInfo, message.agent)) | {"replicas": tuple(replicas)}


def _fenced_to_pb(fenced: Fenced) -> dict[str, Any]:
    return {"sealed": fenced.refused is None, "fault": fenced.refused}


def _fenced_of(message: rpb.FenceReply) -> dict[str, Any]:
    return {"refused": None if message.sealed else error_of(message.fault)}


def _taken_over_to_pb(taken: TakenOver) -> dict[str, Any]:
    if (origin := taken.checkpoint) is None:
        return {}
    names = ("checkpoint_epoch", "checkpoint_sequence", "checkpoint_us")
    return dict(zip(names, (origin.epoch, origin.sequence, origin.created_us), strict=True))


def _taken_over_of(message: rpb.TakeOverReply) -> dict[str, Any]:
    origin = Origin(message.checkpoint_epoch, message.checkpoint_sequence, message.checkpoint_us)
    return {"checkpoint": origin if message.checkpoint_epoch else None}


def _view_of(message: rpb.PartitionView) -> dict[str, Any]:
    """Returns the partition's state. Raises InvalidArgument for an unknown state."""
    try:
        return {"state": State(message.state)}
    except ValueError:
        raise InvalidArgument(
            f"{shown(message.state)} is not a partition state", remedy="check the version of the replica"
        ) from None


def _source_to_pb(view: SourceView) -> dict[str, Any]:
    return {"at_us": max(0, view.at_us), "session_us": 0 if view.session is None else view.session.generation_us}


def _source_of(message: rpb.SourceView) -> dict[str, Any]:
    """Returns the source's session, with nothing but its start time."""
    return {"session": Session(message.session_us, "") if message.session_us else None}


def _snapshot_of(message: rpb.SnapshotReply) -> dict[str, Any]:
    """Checks the files. Raises InvalidArgument for a base that has a file twice, or that no disk could hold."""
    if len({file.name for file in message.files}) < len(message.files):
        raise InvalidArgument("a base has a file twice", remedy="check what runs at the source's address")
    if sum(file.size for file in message.files) > NUMBER_MAX:
        raise InvalidArgument("a base has too many bytes", remedy="check what runs at the source's address")
    return {}


_SHAPES: dict[tuple[type, type[Message]], _Shape] = {
    (AdoptedOperator, cpb.Adopted): _Shape({"name": "operator"}),
    (AgentReport, cpb.AgentView): _Shape(read=_agent_of),
    (Cancelled, rpb.FenceReply): _Shape({"epoch": "owned_epoch"}),
    (ClusterReport, cpb.StatusReply): _Shape(read=_cluster_of),
    (DeployingOperator, cpb.Deploying): _Shape({"name": "operator"}),
    (Deployment, cpb.Deployment): _Shape({}, _deployment_to_pb, _deployment_of),
    # its sender adds the command last
    (Fence, rpb.FenceRequest): _Shape(write=lambda _: {"command": None}),
    (TakeOver, rpb.TakeOverRequest): _Shape(write=lambda _: {"command": None}),
    (Fenced, rpb.FenceReply): _Shape({}, _fenced_to_pb, _fenced_of),
    (MoveReport, cpb.Move): _Shape({"state": "phase"}),
    (OperatorSpec, pb.OperatorSpec): _Shape({}, _spec_to_pb, _spec_of),
    (PartitionView, rpb.PartitionView): _Shape(read=_view_of),
    (RefusedReplica, cpb.Refused): _Shape({}, _refused_to_pb, _refused_of),
    (ReplicaStatistics, rpb.StatsReply): _Shape({"requests": "samples"}),
    (ReplicaStatus, cpb.ReplicaStatus): _Shape({}, lambda status: {"replica": status}, _status_of),
    # the choice of a checkpoint is not a message of its own
    (Restore, rpb.RestoreRequest): _Shape(
        {}, lambda restore: asdict(restore.wanted), lambda message: {"wanted": value_of(Wanted, message)}
    ),
    (RestoredPartition, cpb.RestoredPartition): _Shape({}, _restored_to_pb, _restored_of),
    (RestoredPartition, rpb.RestoreReply): _Shape({"unusable": "passed_over"}),
    (SnapshotInfo, rpb.SnapshotReply): _Shape(read=_snapshot_of),
    (SourceView, rpb.SourceView): _Shape({}, _source_to_pb, _source_of),
    (Taken, rpb.CheckpointReply): _Shape(
        {}, lambda taken: asdict(taken.report), lambda message: {"report": value_of(CheckpointReport, message)}
    ),
    (TakenOver, rpb.TakeOverReply): _Shape({}, _taken_over_to_pb, _taken_over_of),
}
#: fields of the value that the message lacks on purpose: ``write`` or the caller of :func:`message_of` sends them in
#: another shape, or no process reads them
_APART: dict[tuple[type, type[Message]], str] = {
    (Fenced, rpb.FenceReply): "refused",
    # a version is shown, and never run
    (
        OperatorSpec,
        cpb.Version,
    ): "name partitions key output_schema state_schema side_schemas dropped source source_mac",
    (RefusedReplica, cpb.Refused): "name address",
    # the part of a status that describes the replica
    (ReplicaStatus, pb.Replica): "alive last_heartbeat_s opening partitions room_bytes stopped version",
    (ReplicaStatus, cpb.ReplicaStatus): "name address site weight",
    (Restore, rpb.RestoreRequest): "wanted",
    (RestoredPartition, cpb.RestoredPartition): "epoch sequence positions bytes unusable",
    (RestoredPartition, rpb.RestoreReply): "partition replica fault",
    (SourceView, rpb.SourceView): "session",
    (Taken, rpb.CheckpointReply): "report",
    (TakenOver, rpb.TakeOverReply): "checkpoint",
}
