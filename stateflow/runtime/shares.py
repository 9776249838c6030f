"""Several partitions' shares of one batch, as they are applied: rows of all of them in one record batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import xxhash

from stateflow.errors import InvalidArgument
from stateflow.runtime.arriving import Arrived, Arriving
from stateflow.runtime.positions import Batch
from stateflow.runtime.rows import RowReader


class Part(NamedTuple):
    """One partition's: rows from ``start`` to before ``stop``. ``epoch``: of ownership, as its sender believes.
    ``after``: see :class:`~stateflow.runtime.positions.Share`. ``digest``: of the rows, where they must be the same
    whenever the batch is sent. ``known``: what the client tells a successor, and is kept here."""

    partition: int
    epoch: int
    start: int = 0
    stop: int = 0
    after: int | None = None
    digest: int | None = None
    known: bytes = b""


def digest_of(batch: Batch, schema: bytes, rows: bytes) -> int | None:
    """Of the Arrow messages that a partition's share came as; None where other rows may come under its number."""
    return None if batch.session is None else xxhash.xxh3_64_intdigest(rows, xxhash.xxh3_64_intdigest(schema))


@dataclass(slots=True)
class Shares:
    """``schema``: Arrow IPC schema of ``rows``, which are proved; None: no part has any. Each part's lie behind those
    of the parts before it. Raises InvalidArgument where they do not."""

    operator: str
    batch: Batch
    schema: bytes
    rows: pa.RecordBatch | None
    parts: list[Part]
    _arriving: Arriving | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        reached = 0
        for part in self.parts:
            if not reached <= part.start <= part.stop:
                raise self._wrong(part)
            reached = part.stop
        if reached > (0 if self.rows is None else self.rows.num_rows):
            raise self._wrong(self.parts[-1])

    def _wrong(self, part: Part) -> InvalidArgument:
        return InvalidArgument(
            f"rows {part.start} to {part.stop} are none of this partition's",
            remedy="see who sends them, and which version",
            operator=self.operator,
            partition=part.partition,
        )

    def arrived(self, part: Part, key: tuple[str, ...]) -> Arrived | None:
        """Its rows, by these columns; None: it has none. Raises KeyColumnMissing."""
        if part.start == part.stop:
            return None
        if self._arriving is None or self._arriving.reader.key != key:
            assert self.rows is not None
            reader = RowReader.of(self.schema, key, self.operator)
            self._arriving = Arriving(reader, self.rows, [each.stop for each in self.parts])
        return Arrived(self._arriving, part.start, part.stop)
