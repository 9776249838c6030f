"""A running cluster, by its controller's address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import sleep
from typing import TYPE_CHECKING

import pyarrow as pa

from stateflow.client.reports import ClusterStatus, Reconfiguration
from stateflow.client.stream import StreamClient
from stateflow.errors import NotOwner, Unavailable
from stateflow.router import backoff
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.clients import ControllerClient, ReplicaClient
from stateflow.runtime.operator import DEFAULT_PARTITIONS, Operator, describe
from stateflow.types import OperatorSpec

if TYPE_CHECKING:
    from stateflow.rpc.replica_pb2 import StatsReply


class Migration:
    """A reconfiguration under way."""

    def __init__(self, controller: ControllerClient, first: Reconfiguration) -> None:
        self._controller = controller
        self.report = first

    @property
    def id(self) -> str:
        return self.report.id

    def progress(self) -> Iterator[Reconfiguration]:
        """Reports as it goes on; the last one is not RUNNING. Raises Unavailable when the controller goes away."""
        request = cpb.ReconfigurationRequest(id=self.id)
        for message in self._controller.stream("WatchReconfiguration", request):
            self.report = Reconfiguration.of(message)
            yield self.report

    def wait(self) -> Reconfiguration:
        """The final report. It does not raise for moves that failed: see its ``state`` and each move's ``error``."""
        for _ in self.progress():
            pass
        return self.report


class Cluster:
    """Control surface of a running controller. Methods raise what the controller refuses with, or Unavailable."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._controller = ControllerClient(address)

    def status(self) -> ClusterStatus:
        return ClusterStatus.of(self._controller.call("Status", cpb.StatusRequest()))

    def deploy(
        self,
        operator: type[Operator],
        partitions: int = DEFAULT_PARTITIONS,
        *,
        sites: Iterable[str] = (),
        name: str | None = None,
    ) -> None:
        """Create an operator's partitions on the replicas of ``sites`` (all by default). Doing it twice is no error."""
        self._controller.deploy(describe(operator, partitions, name), sites)

    def operator(self, name: str) -> OperatorSpec:
        return self._controller.deployment(name)[0]

    def stream(self, operator: str, source: str, *, schema: str | pa.Schema | None = None) -> StreamClient:
        return StreamClient(self.address, operator, source, schema=schema)

    def migrate(
        self,
        operator: str,
        partitions: Iterable[int],
        to: str,
        *,
        max_pause_ms: float = 0.0,
        strategy: str = "auto",
    ) -> Migration:
        """Start moving partitions to a site or replica; those that are there already stay.

        Args:
            max_pause_ms: a partition is cut over only when its pause is predicted to be within; 0: no budget.
        """
        request = cpb.MigrateRequest(
            operator=operator,
            partitions=list(partitions),
            to=to,
            max_pause_ms=max_pause_ms,
            strategy=strategy,
        )
        return Migration(self._controller, Reconfiguration.of(self._controller.call("Migrate", request)))

    def cancel(self, reconfiguration: str) -> None:
        """Moves before their fence are rolled back, those behind it complete."""
        self._controller.call("CancelReconfiguration", cpb.ReconfigurationRequest(id=reconfiguration))

    def checkpoint(self, operator: str = "") -> rpb.CheckpointReply:
        """Take a checkpoint of every partition now and wait for it."""
        reply: rpb.CheckpointReply = self._controller.call("Checkpoint", rpb.CheckpointRequest(operator=operator), 3600)
        return reply

    def read_state(self, operator: str, state: str) -> pa.Table:
        """All entries of one state: columns key, map_key (null for a value), value, partition.

        Each partition is read as of one moment between two batches' commits.
        """
        pages: list[pa.Table] = []
        left = set(range(self.operator(operator).partitions))
        for pause in backoff():
            _, _, owners, _ = self._controller.deployment(operator)
            for partition in sorted(left):
                try:
                    records = list(ReplicaClient(owners[partition].address).scan(operator, state, [partition]))
                except (NotOwner, Unavailable):  # it moved since the controller was asked, or its owner is starting
                    if pause is None:
                        raise
                    continue
                pages += [pa.ipc.open_stream(record).read_all() for record in records]
                left.discard(partition)
            if not left:
                break
            sleep(pause or 0.0)
        if not pages:
            return pa.table({"key": [], "map_key": [], "value": [], "partition": pa.array([], pa.int32())})
        return pa.concat_tables(pages, promote_options="permissive")

    def replica_stats(self, address: str, after: int = 0) -> StatsReply:
        """Requests a replica served since sample number ``after``, and what it holds."""
        reply: StatsReply = ReplicaClient(address).call("Stats", rpb.StatsRequest(after=after))
        return reply
