"""Rows straight into an operator, millisecond latency, no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, KeyColumnMissing
from stateflow.partitioner import partition_of
from stateflow.router import Router
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.clients import ReplicaClient
from stateflow.runtime.ddl import parse_ddl
from stateflow.runtime.host import Batch, read_batch
from stateflow.settings import RouterSettings


class StreamClient:
    """Sends batches of rows under one source name and returns the operator's output rows.

    Batches are numbered 0, 1, 2, …; a number that was sent before changes nothing and gives the stored outputs.
    A client that starts again continues behind the newest number any partition contains (:attr:`position`). When
    its predecessor may have died in the middle of a batch, send that batch once more with
    ``sequence=client.position``: partitions that have it skip it.

    Args:
        schema: Spark DDL or Arrow schema of the rows; without it the types are inferred, batch by batch.
    """

    def __init__(
        self,
        controller: str,
        operator: str,
        source: str,
        *,
        schema: str | pa.Schema | None = None,
        settings: RouterSettings | None = None,
    ) -> None:
        self._router = Router(controller, operator, settings)
        self.source = source
        self._schema = parse_ddl(schema) if isinstance(schema, str) else schema
        self._output = pa.ipc.read_schema(pa.py_buffer(self._router.spec.output_schema))
        self.position = self._newest()

    def _newest(self) -> int:
        """The newest batch number of this source anywhere; -1 when there is none."""
        by_address: dict[str, list[int]] = {}
        for partition, route in enumerate(self._router.table.routes):
            by_address.setdefault(route.address, []).append(partition)
        newest = -1
        for address, partitions in by_address.items():
            request = rpb.PositionsRequest(operator=self._router.operator, source=self.source, partitions=partitions)
            reply = ReplicaClient(address).call("Positions", request)
            newest = max([newest, *reply.positions.values()])
        return newest

    def send(self, rows: Iterable[Mapping[str, Any]], *, sequence: int | None = None) -> list[dict[str, Any]]:
        """Returns the output rows when every partition concerned has committed; grouped by partition, in order per key.

        Raises KeyColumnMissing, NullKey, OperatorFailed, …; nothing of a partition that failed was applied, and
        the same call can be made again.
        """
        rows = list(rows)
        number = self.position + 1 if sequence is None else sequence
        if number < 0:
            raise InvalidArgument("a sequence cannot be negative", remedy="count from 0")
        outputs = self._send(rows, number) if rows else []
        self.position = max(self.position, number)
        return outputs

    def _send(self, rows: list[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
        try:
            table = pa.Table.from_pylist(rows, schema=self._schema)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"the rows do not fit one schema: {str(error).splitlines()[0]}",
                remedy="give schema=, or mend the rows",
            ) from error
        by_partition: dict[int, list[int]] = {}
        key, partitions = self._router.spec.key, self._router.spec.partitions
        for index, row in enumerate(rows):
            try:
                columns = tuple(row[column] for column in key)
            except KeyError as error:
                raise KeyColumnMissing(
                    f"row {index} has no {error.args[0]!r}",
                    remedy="every row needs the key",
                    operator=self._router.operator,
                ) from None
            by_partition.setdefault(partition_of(columns, partitions), []).append(index)
        batch = table.combine_chunks().to_batches()[0]
        messages = {
            partition: batch.take(pa.array(indexes)).serialize().to_pybytes()
            for partition, indexes in by_partition.items()
        }
        schema = table.schema.serialize().to_pybytes()
        outputs = self._router.send(Batch(self.source, number, sparse=True), schema, messages)
        return [row for p in sorted(outputs) for row in read_batch(outputs[p], self._output).to_pylist()]
