"""Rows straight into an operator, millisecond latency, no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from time import sleep
from typing import Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, KeyColumnMissing, NotOwner, Unavailable
from stateflow.partitioner import partition_of
from stateflow.router import Router, backoff
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.clients import ReplicaClient
from stateflow.runtime.ddl import parse_ddl
from stateflow.runtime.output import OutputReader
from stateflow.runtime.positions import Batch
from stateflow.runtime.timers import to_us
from stateflow.settings import RouterSettings


def positions(router: Router, source: str) -> dict[int, int]:
    """Partition → the last batch of ``source`` it contains; those that have seen none are left out."""
    found: dict[int, int] = {}
    for reply in _positions(router, source):
        found |= dict(reply.positions)
    return found


def newest_event_us(router: Router, source: str, batch: int) -> int | None:
    """The newest event time, µs, among all rows of ``source`` before ``batch``; None without rows.

    The same for every attempt of a batch, also when some partitions contain it already.
    """
    found: list[int] = []
    for reply in _positions(router, source):
        for partition, contained in reply.positions.items():
            times = reply.event_us if contained < batch else reply.event_before_us
            if partition in times:
                found.append(times[partition])
    return max(found, default=None)


def _positions(router: Router, source: str) -> Iterator[rpb.PositionsReply]:
    by_address: dict[str, list[int]] = {}
    for partition, route in enumerate(router.table.routes):
        by_address.setdefault(route.address, []).append(partition)
    for partitions in by_address.values():
        try:
            yield _positions_of(router, source, partitions)
        except (NotOwner, Unavailable):  # some of them are moving, or their owner is being started again
            for partition in partitions:
                yield _positions_of_moving(router, source, partition)


def _positions_of(router: Router, source: str, partitions: list[int]) -> rpb.PositionsReply:
    """Of partitions of one owner. Raises NotOwner when one of them is not with it."""
    address = router.table.routes[partitions[0]].address
    request = rpb.PositionsRequest(operator=router.operator, source=source, partitions=partitions)
    reply: rpb.PositionsReply = ReplicaClient(address).call("Positions", request)
    return reply


def _positions_of_moving(router: Router, source: str, partition: int) -> rpb.PositionsReply:
    for pause in backoff():
        try:
            return _positions_of(router, source, [partition])
        except (NotOwner, Unavailable):
            if pause is None:
                raise
            sleep(pause)
            router.refresh()
    raise AssertionError


class StreamClient:
    """Sends batches of rows under one source name and returns the operator's output rows.

    Batches are numbered 0, 1, 2, …; a number that was sent before changes nothing and gives the stored outputs.
    A client that starts again continues behind the newest number any partition contains (:attr:`position`). When
    its predecessor may have died in the middle of a batch, send that batch once more with
    ``sequence=client.position``: partitions that have it skip it.

    A batch that failed may have been applied to some partitions. Sent again with the same rows it keeps its number,
    and they skip it; other rows are another batch and get the next number. To send it mended, pass its number.

    A partition that lost batches it had acknowledged (its owner died and an older checkpoint was restored) refuses the
    next with PositionGap, which names the batch to go back to: send that and the later ones again with ``rewind=True``.

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
        self._output = OutputReader.of(self._router.spec.output_schema, self._router.spec.side_schemas)
        self._watermark_us: int | None = None
        #: rows of the last send's side outputs, by tag
        self.side_outputs: dict[str, list[dict[str, Any]]] = {}
        self._failed: tuple[int, bytes, dict[int, bytes]] | None = None  # number and rows of the batch that did
        self._acknowledged: dict[int, int] = {}  # partition → newest batch
        self.position = max([-1, *positions(self._router, source).values()])

    def send(
        self, rows: Iterable[Mapping[str, Any]], *, sequence: int | None = None, rewind: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the output rows when every partition concerned has committed; grouped by partition, in order per key.

        Args:
            rewind: an older batch, ``sequence``, is sent again: partitions that contain it skip it, and give no output.

        Raises KeyColumnMissing, NullKey, OperatorFailed, PositionGap, …; nothing of a partition that failed was
        applied, and the same call can be made again.
        """
        rows = list(rows)
        schema, messages = self._messages(rows) if rows else (b"", {})
        return self._deliver(schema, messages, sequence, rewind)

    def advance_watermark(self, watermark: datetime | int, *, sequence: int | None = None) -> list[dict[str, Any]]:
        """Promise that no older rows follow from this source, to every partition; returns what timers produced.

        Args:
            watermark: an aware datetime, or microseconds since 1970. One that goes back changes nothing.
        """
        self._watermark_us = to_us(watermark)
        everywhere = dict.fromkeys(range(self._router.spec.partitions), b"")
        return self._deliver(b"", everywhere, sequence)

    def _deliver(
        self, schema: bytes, messages: dict[int, bytes], sequence: int | None, rewind: bool = False
    ) -> list[dict[str, Any]]:
        number = self._next(schema, messages) if sequence is None else sequence
        if number < 0:
            raise InvalidArgument("a sequence cannot be negative", remedy="count from 0")
        batch = Batch(self.source, number, sparse=True, watermark_us=self._watermark_us, rewind=rewind)
        after = {} if rewind else {p: last for p, last in self._acknowledged.items() if last < number}
        try:
            outputs = self._router.send(batch, schema, messages, after) if messages else {}
        except BaseException:
            self._failed = number, schema, messages
            raise
        self._failed = None
        for partition in messages:
            self._acknowledged[partition] = max(number, self._acknowledged.get(partition, number))
        self.position = max(self.position, number)
        rows, self.side_outputs = self._output.rows(outputs[partition] for partition in sorted(outputs))
        return rows

    def _next(self, schema: bytes, messages: dict[int, bytes]) -> int:
        if self._failed is None:
            return self.position + 1
        number, *rows = self._failed
        return number if rows == [schema, messages] else max(self.position, number) + 1

    def _messages(self, rows: list[Mapping[str, Any]]) -> tuple[bytes, dict[int, bytes]]:
        """(input schema, partition → record batch message)."""
        key, partitions = self._router.spec.key, self._router.spec.partitions
        for index, row in enumerate(rows):
            missing = [column for column in key if column not in row]
            if missing:
                raise self._no_key(f"row {index} has no {missing[0]!r}")
        names = self._schema.names if self._schema is not None else dict.fromkeys(name for row in rows for name in row)
        for column in key:
            if column not in names:
                raise self._no_key(f"the schema has no {column!r}")
        try:
            columns = {name: [row.get(name) for row in rows] for name in names}
            table = pa.Table.from_pydict(columns, schema=self._schema)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"the rows do not fit one schema: {str(error).splitlines()[0]}",
                remedy="give schema=, or mend the rows",
            ) from error
        by_partition: dict[int, list[int]] = {}
        # of the keys as the replica will see them: an int in a double column is a double
        keys = zip(*(table.column(column).to_pylist() for column in key), strict=True)
        for index, values in enumerate(keys):
            by_partition.setdefault(partition_of(values, partitions), []).append(index)
        batch = table.combine_chunks().to_batches()[0]
        messages = {
            partition: batch.take(pa.array(indexes)).serialize().to_pybytes()
            for partition, indexes in by_partition.items()
        }
        return table.schema.serialize().to_pybytes(), messages

    def _no_key(self, what: str) -> KeyColumnMissing:
        return KeyColumnMissing(what, remedy="every row needs the key", operator=self._router.operator)
