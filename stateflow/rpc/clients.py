"""Blocking clients for threads and Spark workers. Channels are made at first use, so that a process may fork before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, TypeVar

import grpc
from grpc.experimental import ChannelOptions

from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import OPTIONS, error_of, pieces, remote_error, spec_of, spec_to_pb
from stateflow.runtime.positions import Batch
from stateflow.types import OperatorSpec, ReplicaInfo

Stub = TypeVar("Stub")
_LOCK = threading.Lock()
_STUBS: dict[tuple[str, object], Any] = {}
#: who asks reads the answers itself, instead of waking a thread of the channel's for each
_OPTIONS = (*OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))


def _stub(kind: Callable[[grpc.Channel], Stub], address: str) -> Stub:
    """One channel per address and process: a Spark worker keeps its connections from batch to batch."""
    with _LOCK:
        if (address, kind) not in _STUBS:
            _STUBS[address, kind] = kind(grpc.insecure_channel(address, options=_OPTIONS))
        stub: Stub = _STUBS[address, kind]
        return stub


class ControllerClient:
    """Raises StateflowErrors only: what the controller refused with, or Unavailable."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        stub = _stub(controller_pb2_grpc.ControllerServiceStub, self.address)
        try:
            return getattr(stub, method)(request, timeout=timeout_s or self._timeout_s)
        except grpc.RpcError as error:
            raise remote_error(error, f"the controller at {self.address}") from error

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        stub = _stub(controller_pb2_grpc.ControllerServiceStub, self.address)
        try:
            yield from getattr(stub, method)(request)
        except grpc.RpcError as error:
            raise remote_error(error, f"the controller at {self.address}") from error

    def deploy(self, spec: OperatorSpec, sites: Iterable[str] = ()) -> cpb.Deployment:
        deployment: cpb.Deployment = self.call(
            "Deploy", cpb.DeployRequest(spec=spec_to_pb(spec), sites=list(sites)), 120
        )
        return deployment

    def deployment(self, operator: str) -> tuple[OperatorSpec, int, list[ReplicaInfo], list[int]]:
        """(spec, version, owner per partition, epoch per partition)."""
        reply = self.call("GetDeployment", cpb.GetDeploymentRequest(operator=operator))
        infos = [ReplicaInfo(r.name, r.site, r.address, r.weight) for r in reply.replicas]
        return spec_of(reply.spec), reply.version, [infos[i] for i in reply.owners], list(reply.epochs)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one partition; see :class:`~stateflow.runtime.host.Applied`."""

    output: bytes
    replayed: bool
    operator_us: int
    commit_us: int


class ReplicaClient:
    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def call(self, method: str, request: Any) -> Any:
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        try:
            return getattr(stub, method)(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise remote_error(error, self.address) from error

    def scan(self, operator: str, state: str, partitions: Iterable[int], keys: Iterable[bytes] = ()) -> Iterator[bytes]:
        """Arrow IPC streams of one state's entries, of these stored keys or of all."""
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        request = rpb.ScanRequest(operator=operator, state=state, partitions=list(partitions), keys=list(keys))
        begun: list[bytes] = []
        try:
            for page in stub.Scan(request):
                begun.append(page.records)
                if not page.continues:
                    yield b"".join(begun)
                    begun.clear()
        except grpc.RpcError as error:
            raise remote_error(error, self.address) from error

    def apply(
        self,
        operator: str,
        batch: Batch,
        schema: bytes,
        parts: Iterable[tuple[int, int]],
        rows: Mapping[int, bytes],
        chunk_bytes: int,
        after: Mapping[int, int] | None = None,
    ) -> Iterator[tuple[int, Answer | StateflowError]]:
        """Send one batch's rows for these (partition, epoch); yields (partition, answer or error) as answers come.
        Raises Unavailable when the stream breaks."""
        header = rpb.ApplyHeader(
            operator=operator,
            source=batch.source,
            batch=batch.number,
            input_schema=schema,
            sparse=batch.sparse,
            watermark_us=batch.watermark_us,
            attempt=rpb.Attempt(**asdict(batch.attempt)),
            event_us=batch.event_us,
            rewind=batch.rewind,
        )
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        buffers: dict[int, list[bytes]] = {}
        try:
            requests = _requests(header, parts, rows, chunk_bytes, after)
            first, second = next(requests), next(requests, None)
            responses = stub.ApplyOne(first) if second is None else stub.Apply(chain((first, second), requests))
            for response in responses:
                for result in response.results:
                    if result.HasField("fault"):
                        yield result.partition, error_of(result.fault)
                    elif not result.last:
                        buffers.setdefault(result.partition, []).append(result.output)
                    else:
                        output = result.output
                        if result.partition in buffers:
                            output = b"".join([*buffers.pop(result.partition), output])
                        answer = Answer(output, result.replayed, result.operator_us, result.commit_us)
                        yield result.partition, answer
        except grpc.RpcError as error:
            raise remote_error(error, self.address) from error


def _requests(
    header: rpb.ApplyHeader,
    parts: Iterable[tuple[int, int]],
    rows: Mapping[int, bytes],
    chunk_bytes: int,
    after: Mapping[int, int] | None = None,
) -> Iterator[rpb.ApplyRequest]:
    request, size = rpb.ApplyRequest(header=header), 0
    for partition, epoch in parts:
        for piece, last in pieces(rows.get(partition, b""), chunk_bytes):
            if size and size + len(piece) > chunk_bytes:
                yield request
                request, size = rpb.ApplyRequest(), 0
            request.parts.append(
                rpb.PartitionRows(
                    partition=partition,
                    epoch=epoch,
                    rows=piece,
                    last=last,
                    after=after.get(partition) if after else None,
                )
            )
            size += len(piece) + 32
    yield request
