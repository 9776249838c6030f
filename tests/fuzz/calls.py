"""Hostile requests to every RPC of real processes: a controller and two replicas.

A request is made field by field, of values that the field may hold and of others that it must not; some requests are
then damaged byte by byte. Each call must end with an answer or a StateflowError of one line, no process may end or log
a traceback, and an honest client's rows are counted before and after.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2, replica_pb2
from stateflow.rpc.faults import remote_error
from stateflow.rpc.fields import Kind, kind_of
from stateflow.rpc.secure import OPTIONS
from stateflow.security.roles import RULES, Role
from stateflow.testing import LocalCluster
from tests.fuzz.doors import LINE_MAX
from tests.integration.operators import Tally
from tests.property.arrow_mutants import damaged

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
ROWS = [{"k": f"honest-{number}", "v": number} for number in range(20)]
#: calls under way at a time, and their deadline: streams that go on are left
TOGETHER = 48
DEADLINE_S = 3.0
MESSAGES_MAX = 5
#: seconds within which an honest client must be served
GOES_ON_WITHIN_S = 20.0
DEPTH_MAX = 4
INTEGERS = (0, 1, 2, 3, 4, 7, 255, 65_535, 65_536, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, (1 << 64) - 1, -1)
REALS = (0.0, 1.0, 0.5, -1.0, 1e9, 1e300, float("inf"), float("nan"), 5e-324)
HOSTILE = (
    *("", "x", "../../etc/passwd", "/etc/passwd", "a\nb", "[/x]", "a\x00b", "\x1b[2J", "é" * 90, "x" * 300, "a/b"),
    *("unix:/run/docker.sock", "host:1", "127.0.0.1:1", "[::1]:70000", "file:///etc", "memory://x", "s3://b/k"),
    *("*/5 * * * *", "0 0 31 2 *", "hard label a=b:2-4", "{}", "[]", "[[[[", '{"a": 1e999}', "tests.fuzz:Nothing"),
    *("0" * 32, "f" * 64, "rebalance", "migrate", "stateflow:migration", "batch:x", "PAUSED", "%00", "{0}", "r-0"),
)
#: names that exist. Only calls for READ and DATA roles get them: others may legitimately move and delete what they name
KNOWN = ("Tally", "cloud-0", "edge-0", "cloud", "edge", "s")
HARMLESS = frozenset({Role.READ, Role.DATA})


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


@dataclass(slots=True)
class Outcome:
    """Result of all calls. ``said``: number of calls by status. ``wrong``: violations, one text each."""

    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Made:
    """A maker of messages, whose fields hold valid and invalid values."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
        self._bytes = [b"", b"x", SCHEMA.serialize().to_pybytes(), batch.serialize().to_pybytes(), bytes(5000)]

    def message(self, kind: type[Message], names: tuple[str, ...], depth: int = 0) -> Message:
        message = kind()
        for each in kind.DESCRIPTOR.fields:
            if self._chance.random() < (0.75 if depth < DEPTH_MAX else 0.0):
                self._set(message, each, names, depth)
        return message

    def encoded(self, call: Call) -> bytes:
        data = self.message(call.kind, call.names).SerializeToString()
        return damaged(data, self._chance) if data and self._chance.random() < 0.2 else data

    def _set(self, message: Message, each: FieldDescriptor, names: tuple[str, ...], depth: int) -> None:
        inner = each.message_type
        count = self._chance.choice((0, 1, 1, 2, 3, 40)) if each.is_repeated else 1
        if inner is not None and inner.GetOptions().map_entry:
            if inner.fields_by_name["value"].message_type is None:
                for _ in range(count):
                    pair = [self._value(inner.fields_by_name[name], names) for name in ("key", "value")]
                    getattr(message, each.name)[pair[0]] = pair[1]
        elif inner is not None:
            for _ in range(count):
                made = self.message(GetMessageClass(inner), names, depth + 1)
                if each.is_repeated:
                    getattr(message, each.name).append(made)
                else:
                    getattr(message, each.name).CopyFrom(made)
        elif each.is_repeated:
            getattr(message, each.name).extend(self._value(each, names) for _ in range(count))
        else:
            setattr(message, each.name, self._value(each, names))

    def _value(self, each: FieldDescriptor, names: tuple[str, ...]) -> Any:
        """Chooses a value that is mostly valid for the field: otherwise few requests would get far."""
        kind = kind_of(each)
        for _ in range(6 if isinstance(kind, Kind) and self._chance.random() < 0.95 else 1):
            value = self._any(each, names)
            if not isinstance(kind, Kind) or kind.holds(value):
                break
        return value

    def _any(self, each: FieldDescriptor, names: tuple[str, ...]) -> Any:
        kinds = FieldDescriptor
        match each.type:
            case kinds.TYPE_STRING:
                return self._chance.choice(names)
            case kinds.TYPE_BYTES:
                data = self._chance.choice(self._bytes)
                return damaged(data, self._chance) if data and self._chance.random() < 0.5 else data
            case kinds.TYPE_BOOL:
                return self._chance.random() < 0.5
            case kinds.TYPE_DOUBLE | kinds.TYPE_FLOAT:
                return self._chance.choice(REALS)
            case kinds.TYPE_ENUM:
                assert each.enum_type is not None
                return self._chance.choice([value.number for value in each.enum_type.values])
            case _:
                bits = 32 if each.type in (kinds.TYPE_INT32, kinds.TYPE_UINT32) else 64
                signed = each.type in (kinds.TYPE_INT32, kinds.TYPE_INT64, kinds.TYPE_SINT64)
                low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
                small = self._chance.random() < 0.6
                return max(low, min(high, self._chance.choice(INTEGERS[:5] if small else INTEGERS)))


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


async def _storm(addresses: dict[str, str], count: int, seed: int) -> Outcome:
    chance, outcome = random.Random(seed), Outcome()
    made = Made(chance)
    calls = {
        "controller": calls_of(controller_pb2, "ControllerService"),
        "replica": calls_of(replica_pb2, "ReplicaService"),
    }
    channels = {name: grpc.aio.insecure_channel(address, options=OPTIONS) for name, address in addresses.items()}
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            to = chance.choice(list(calls))
            call = chance.choice(calls[to])
            several = chance.choice((1, 2, 3)) if call.method.client_streaming else 1
            await _one(channels[to], call, [made.encoded(call) for _ in range(several)], outcome)

    await asyncio.gather(*(worker() for _ in range(TOGETHER)))
    for channel in channels.values():
        await channel.close()
    return outcome


def _honest(local: LocalCluster, batch: int) -> None:
    stream = local.stream("Tally", source="honest")
    counts = {row["k"]: row["n"] for row in stream.send(ROWS, sequence=batch)}
    assert counts == {row["k"]: batch + 1 for row in ROWS}, counts


def _tracebacks(folder: Path) -> Iterator[str]:
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        if (at := text.find("Traceback")) >= 0:
            yield f"{log.name}: {text[max(0, at - 300) : at + 3000]}"


def run(count: int, seed: int, folder: Path) -> Outcome:
    """Sends the calls. Raises AssertionError if an honest client is not served as before."""
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=folder) as local:
        pids = {name: process.pid for name, process in local.processes.items()}
        _honest(local, 0)
        address = next(each.address for each in local.cluster.status().replicas if each.name == "edge-0")
        outcome = asyncio.run(_storm({"controller": local.address, "replica": address}, count, seed))
        ended = [name for name, process in local.processes.items() if not process.running or process.pid != pids[name]]
        outcome.wrong += [f"{name} has ended" for name in ended]
        outcome.wrong += _tracebacks(folder)
        began = time.monotonic()
        _honest(local, 1)
        if (took := time.monotonic() - began) > GOES_ON_WITHIN_S:
            outcome.wrong.append(f"an honest client waited for {took:.0f} s")
    return outcome
