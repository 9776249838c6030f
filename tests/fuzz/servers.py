"""Hostile servers: of all services of controllers, replicas and agents, and of a checkpoint store.

An answer is sound, or has fields of other values, or of values that no field may hold; or it is damaged, no message at
all, an error that nobody meant, a list without end, or none. The source of a move has a sound base, change sets and a
seal, before they are changed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import pyarrow as pa
import xxhash
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError as NotParsed
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stateflow.checkpoint.backend import LocalBackend, Stored
from stateflow.errors import StateflowError
from stateflow.operator.operator import describe
from stateflow.partition.control import PartitionView
from stateflow.partition.lifecycle import State
from stateflow.replica.service import frames_of
from stateflow.rpc import agent_pb2, controller_pb2, replica_pb2
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc.faults import FAULT_KEY
from stateflow.rpc.secure import OPTIONS
from stateflow.rpc.wire import NEWEST_KEY, TERM_KEY, message_of
from stateflow.types import PartitionId
from tests.contract.backends import Wrapper
from tests.fuzz.makers import HOSTILE, INTEGERS, KNOWN, Made
from tests.integration.operators import Tally
from tests.property.arrow_mutants import damaged
from tests.unit.partition.test_replica import P, Two, path_of

#: messages of a list without end after which its client should have left, and the share of the lists that have no end
ENDLESS, ENDLESS_SHARE = 5000, 0.02
SPEC = describe(Tally, 4, "Tally")
PARTITION = PartitionId("Tally", 0)
DIGEST = xxhash.xxh3_128_hexdigest(b"")
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in (agent_pb2, controller_pb2, replica_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
NAMES = (
    *HOSTILE,
    *KNOWN * 4,
    *(SPEC.target, SPEC.state_schema, DIGEST, "CURRENT", "000012.sst", "MANIFEST-000004", "../../x.sst", "CHANGES"),
    *("RUNNING", "COMPLETED", "FAILED", "OWNED", "SEALED", "CATCHING_UP", "STOPPED", "unavailable", "moved", "cpu"),
    *("00-" + "1" * 32 + "-" + "2" * 16 + "-01", "every 3600", "once 2030-01-01T18:00:00Z", "Tally/1", "l", "s"),
)
#: metadata of answers: the term and the newest record that they are based on
TERMS = ("0", "1", "2", "7", "x", "-1", "9" * 18, "9" * 30, "")


def page_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


ENTRIES = pa.table({"key": ["a"], "map_key": pa.nulls(1), "value": [1], "partition": pa.array([0], pa.int32())})
LISTED = pa.table(
    {"attribute": ["n", None], "declared": ['{"name":"n","kind":"value","coders":["int64"],"tag":"1"}'] * 2}
)
PAGES = (
    *(ENTRIES, ENTRIES, LISTED, LISTED, ENTRIES.drop_columns(["key"]), ENTRIES.rename_columns(["key"] * 4)),
    *(pa.table({"attribute": [1], "declared": ["{"]}), pa.table({"attribute": ["n"], "declared": ["[]"]})),
    *(pa.table({"key": [[1]], "map_key": ["x"], "value": [{"a": 1}], "partition": [2**40]}), pa.table({})),
    pa.table({"attribute": [None], "declared": ['{"name":[],"kind":1,"coders":"x","tag":{}}']}),
    pa.table({"attribute": ["n"], "declared": pa.nulls(1)}),
    ENTRIES.set_column(2, "value", pa.array(["text"])),
)


# -- Servers ---------------------------------------------------------------------------------------------------------


class Hostile(grpc.GenericRpcHandler):
    """A server of all services, which answers as it likes.

    Attributes:
        sound: by method, its sound answers to a request.
        wrong: share of the calls that get another answer.
        endless: streams without end that their clients did not leave.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance, self._made = chance, Made(chance)
        self.sound: dict[str, Callable[[Any], Iterable[Message]]] = {}
        self.wrong = 1.0
        self.endless: list[str] = []
        self.address, self._names = "", NAMES
        self._lock = threading.Lock()

    def serve(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(24), handlers=[self], options=OPTIONS)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        self._names = (*NAMES, *(self.address,) * 12)
        server.start()
        return server

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = METHODS.get(details.method)
        if method is None:
            return None
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(functools.partial(self._both, method))
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(functools.partial(self._many, method))
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._one, method))

    def _one(self, method: MethodDescriptor, request: bytes, context: grpc.ServicerContext) -> bytes:
        messages = self._answers(method, request, context)
        return messages[0] if messages else b""

    def _many(self, method: MethodDescriptor, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._lock:
            endless = method.name in ENDLESSLY and self.chance.random() < self.wrong * ENDLESS_SHARE
            message = ENDLESSLY[method.name](self.chance) if endless else b""
        if endless:
            for _ in range(ENDLESS):
                if not context.is_active():
                    return
                yield message
            self.endless.append(method.full_name)
        yield from self._answers(method, request, context)

    def _both(
        self, method: MethodDescriptor, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        for request in requests:
            yield from self._answers(method, request, context)
            with self._lock:
                if self.chance.random() < 0.05:
                    return

    def _answers(self, method: MethodDescriptor, data: bytes, context: grpc.ServicerContext) -> list[bytes]:
        """Returns the messages of an answer. Aborts the call if it is an error."""
        with self._lock:
            request = _parsed(GetMessageClass(method.input_type), data)
            chance, kind = self.chance, "sound"
            if chance.random() < self.wrong:
                kind = chance.choices(*zip(*KINDS.items(), strict=True))[0]
            if chance.random() < 0.2:
                context.set_trailing_metadata(((TERM_KEY, chance.choice(TERMS)), (NEWEST_KEY, chance.choice(TERMS))))
            if kind == "silent" and not (method.server_streaming or method.client_streaming):
                threading.Event().wait(2 * SHORT_S)  # the client's deadline is earlier
            status = chance.choice([each for each in grpc.StatusCode if each is not grpc.StatusCode.OK])
            words = chance.choice(HOSTILE).encode("ascii", "replace").decode()
            fault = self._fault()
            messages = self._messages(method, request, kind)
        if kind == "fault":
            context.abort_with_status(_Status(grpc.StatusCode.FAILED_PRECONDITION, "", ((FAULT_KEY, fault),)))
        if kind == "status":
            context.abort(status, words)
        return messages

    def _messages(self, method: MethodDescriptor, request: Any, kind: str) -> list[bytes]:
        chance, answer = self.chance, GetMessageClass(method.output_type)
        if kind in ("sound", "changed", "damaged") and method.name in self.sound:
            found = list(self.sound[method.name](request))
        else:
            self._made.wrong = 0.05 if kind == "wrong" else 0.0
            count = chance.choice((0, 1, 1, 2, 3)) if method.server_streaming else 1
            found = [self._made.message(answer, self._names) for _ in range(count)]
            for each in found:
                if kind != "wrong" or chance.random() < 0.5:
                    mended(each, request, self.address, chance)
        if not found:
            return []
        at = chance.randrange(len(found))
        if kind == "changed":
            self._made.wrong = 0.3
            for field in chance.choices(found[at].DESCRIPTOR.fields, k=2) if found[at].DESCRIPTOR.fields else ():
                found[at].ClearField(field.name)
                self._made.set(found[at], field, self._names, 1)
            match chance.randrange(6):
                case 0:
                    del found[at]
                case 1:
                    found.insert(at, found[at])
                case 2:
                    chance.shuffle(found)
        encoded = [each.SerializeToString() for each in found]
        if encoded and kind == "damaged" and encoded[at]:
            encoded[at] = damaged(encoded[at], chance)
        if encoded and kind == "random":
            encoded[at] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 9, 200))))
        return encoded

    def _fault(self) -> bytes:
        chance = self.chance
        code = chance.choice([*StateflowError.registry, "nothing", "moved", "moved", "source_taken", "not_leading"])
        fault = self._made.message(pb.Fault, self._names)
        assert isinstance(fault, pb.Fault)
        fault.code = code
        for name in ("owner", "address", "epoch", "leader", "generation_us", "unfinished_batch", "traceback"):
            if chance.random() < 0.5:
                numbers = ("7", "x", "", "9" * 30, "-1", str(time.time_ns() // 1000 + chance.randrange(10**9)))
                fault.where[name] = chance.choice((self.address, "r-0", *numbers, *HOSTILE[:8]))
        data = fault.SerializeToString()[:6000]
        return damaged(data, chance) if chance.random() < 0.1 else data


@dataclass(frozen=True)
class _Status(grpc.Status):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


#: kinds of answers, and how often they come
KINDS: dict[str, float] = {
    "sound": 10,
    "changed": 30,  # fields of a sound one have other values
    "made": 20,  # of any values that fields may hold
    "wrong": 15,  # some values may not be
    "damaged": 10,
    "random": 4,
    "fault": 10,
    "status": 4,
    "silent": 0.1,
}
#: seconds after which an answer of a silent server is late
SHORT_S = 0.4


def _endless(message: Message) -> Callable[[random.Random], bytes]:
    return lambda _: message.SerializeToString()


#: by method, the message of a list without end that its client must leave
ENDLESSLY: dict[str, Callable[[random.Random], bytes]] = {
    "ListReconfigurations": lambda chance: controller_pb2.ReconfigurationList(
        reconfigurations=[controller_pb2.Reconfiguration(id="x", operator="x")] * chance.randrange(2)
    ).SerializeToString(),
    "Sources": lambda chance: replica_pb2.SourcesReply(
        sources=[replica_pb2.SourceView(source="x")] * chance.randrange(2)
    ).SerializeToString(),
    "Scan": lambda chance: replica_pb2.ScanPage(
        records=bytes(4096) * chance.randrange(2), continues=True
    ).SerializeToString(),
    "Outputs": lambda chance: replica_pb2.OutputsReply(
        output=bytes(4096) * chance.randrange(2), more=True
    ).SerializeToString(),
}


def _parsed(kind: type[Message], data: bytes) -> Any:
    with contextlib.suppress(NotParsed):
        return kind.FromString(data)
    return kind()


def mended(message: Any, request: Any, address: str, chance: random.Random) -> None:
    """Makes parts of a message that depend on each other, or on the request, fit together."""
    match message:
        case controller_pb2.Deployment():
            count = message.spec.partitions = 4
            message.spec.CopyFrom(message_of(pb.OperatorSpec, SPEC))
            if not message.replicas:
                message.replicas.add(name="r-0", site="edge", weight=1)
            for each in message.replicas:
                each.address = address
            del message.owners[:], message.epochs[:]
            message.owners.extend(chance.randrange(len(message.replicas)) for _ in range(count))
            message.epochs.extend(chance.choice((0, 1, 7)) for _ in range(count))
        case controller_pb2.StatusReply():
            for each in message.deployments:
                mended(each, request, address, chance)
        case controller_pb2.AgentBeatReply():
            message.ledger, message.adopted = chance.choice(("l", "l", "m")), ""
            message.term = chance.choice((1, 2, 3))
        case controller_pb2.HeartbeatReply():
            message.ledger, message.adopted, message.term = "l", "", chance.choice((1, 1, 2))
        case controller_pb2.RegisterReply():
            message.ledger, message.term, message.late = "l", 1, False
        case replica_pb2.PositionsReply():
            asked = [*getattr(request, "asked", request).partitions] or [0]
            message.positions.clear()
            for each in asked:
                message.positions[each] = chance.choice((-1, 0, 3))
            for name in ("event_us", "event_before_us", "known", "clients"):
                for each in getattr(message, name).keys() - set(asked):
                    del getattr(message, name)[each]
            if chance.random() < 0.9:  # few of any bytes are a client's record
                message.known.clear()
        case replica_pb2.SourcesReply():
            for each in message.sources:
                each.partition = chance.choice([*request.partitions] or [0])
        case replica_pb2.OutputsReply():
            message.partition = chance.choice([*request.partitions] or [0])
        case replica_pb2.DropOutputReply():
            message.sizes.clear()
            message.sizes[chance.choice([*request.partitions] or [0])] = 5
        case replica_pb2.RoundTripsReply():
            del message.milliseconds[:]
            message.milliseconds.extend([1.5] * len(request.addresses))
        case replica_pb2.ScanPage():
            message.records = page_of(chance.choice(PAGES))
            message.continues = chance.random() < 0.1
        case replica_pb2.ApplyResponse():
            message.call, message.last = request.call, request.last
            if chance.random() < 0.7:
                message.ClearField("fault")
                del message.results[:]
                for each in request.partitions:
                    output = chance.choice((b"", b"", bytes(9), ENTRIES.to_batches()[0].serialize().to_pybytes()))
                    message.results.add(partition=each, output=output, last=chance.random() < 0.9)
        case replica_pb2.SnapshotReply():
            by_name = {each.name: each for each in message.files}
            del message.files[:]
            message.files.extend(by_name.values())
        case controller_pb2.BundlePart():
            message.count = chance.choice((0, 1, 3, 1 << 31))


class HostileStore(Wrapper):
    """A checkpoint store that lists and sends what it likes. ``wrong``: share of the answers that are not true."""

    wrong = 0.0

    def __init__(self, inner: LocalBackend, chance: random.Random) -> None:
        super().__init__(inner)
        self._chance = chance

    def _lies(self) -> bool:
        return self._chance.random() < self.wrong

    def read(self, name: str) -> bytes:
        data = super().read(name)
        if not self._lies():
            return data
        some = (b"", b"null", b"[" * 90_000, b'{"body":1}', data * 3, bytes(200), damaged(data, self._chance))
        return self._chance.choice(some)

    def chunks(self, name: str) -> Iterator[bytes]:
        for data in super().chunks(name):
            yield damaged(data, self._chance) if data and self._lies() else data
        while self._lies():
            yield bytes(1 << 20)

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        super().download(name, file, expected)
        if self._lies():
            file.write(bytes(self._chance.choice((1, 4096, 1 << 20))))

    def list(self, prefix: str) -> list[Stored]:
        found = super().list(prefix)
        if self._lies():
            found += [
                Stored(name.format(prefix), self._chance.choice(INTEGERS), self._chance.choice(INTEGERS))
                for name in self._chance.choices(LISTINGS, k=5)
            ]
        return found

    def stat(self, name: str) -> Stored | None:
        found = super().stat(name)
        return replace(found, size=self._chance.choice(INTEGERS)) if found is not None and self._lies() else found


NAME = "000000000001-0000000000000001.json"
LISTINGS = (
    *("manifests/../../x/p00000/" + NAME, "manifests/Op/p00003/../../../" + NAME, "/p00003/" + NAME, "", "/", "{0}"),
    *("{0}/p00003/" + NAME, "manifests/Op/p" + "9" * 5000 + "/" + NAME, "manifests/Op/p00003/" + NAME[:-5] + "-7.json"),
    *("manifests/Op/p00003/" + NAME[:-5] + "-" + "9" * 5000 + ".json", "manifests/\x1b[2J/p00003/" + NAME, "{0}/a\nb"),
    *("savepoints/../Op/p00003.json", "savepoints/s/../../p00003.json", "savepoints/s/Op/p" + "9" * 5000 + ".json"),
    *("manifests/" + "x" * 5000 + "/p00003/" + NAME, "manifests/Op/p00003/" + NAME, "savepoints/s/Op/p00003.json"),
)


# -- A source of a partition -----------------------------------------------------------------------------------------


def sound_source(folder: Path) -> dict[str, Callable[[Any], Iterable[Message]]]:
    """Returns the answers of a replica to the target of move ``m``: a base, its files, change sets and a seal."""
    two = Two(folder)
    two.send(two.a, *range(40))
    base = two.a.sender.snapshot(P, "m")
    files = {file.name: path_of(two.a, base, file.name).read_bytes() for file in base.files}
    for value in range(5):
        two.send(two.a, value)
    assert two.a.sender.fence(P, "m", 2, two.infos["b"]) is True
    frames = list(frames_of(two.a.sender.change_log(base.snapshot_id).read(base.sequence, 1 << 20), 512))
    two.close()
    reply = message_of(replica_pb2.SnapshotReply, base)

    def fetch(request: Any) -> Iterator[Message]:
        data = files.get(request.name, b"")[request.offset :]
        for at in range(0, len(data), 900):
            piece = data[at : at + 900]
            yield replica_pb2.FileChunk(data=piece, checksum=xxhash.xxh64_intdigest(piece))

    return {
        "Inspect": lambda _: [message_of(replica_pb2.PartitionView, PartitionView(P, State.OWNED, 1, 1))],
        "Snapshot": lambda _: [_copied(reply)],
        "Fetch": fetch,
        "Follow": lambda _: map(_copied, frames),
        "Confirm": lambda _: [pb.Empty()],
    }


def _copied(message: Message) -> Message:
    made = type(message)()
    made.CopyFrom(message)
    return made
