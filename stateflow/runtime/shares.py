"""Several partitions' slices of one batch, as they are applied: the rows of all of them in one record batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

import pyarrow as pa

from stateflow.errors import InvalidArgument
from stateflow.runtime.arriving import Arrived, Arriving
from stateflow.runtime.arrow import BatchReader
from stateflow.runtime.digests import digests_of
from stateflow.runtime.positions import Batch
from stateflow.runtime.rows import RowReader
from stateflow.runtime.traffic import Origins


class Part(NamedTuple):
    """Slice of a batch for one partition: the rows from ``start`` to before ``stop``. ``epoch``: of ownership, as the
    sender believes. ``after``: see :meth:`~stateflow.runtime.host.PartitionHost.run`. ``digest``: of the rows, where
    they must be the same every time the batch is sent.
    """

    partition: int
    epoch: int
    start: int = 0
    stop: int = 0
    after: int | None = None
    digest: int | None = None


class Frame(NamedTuple):
    """Slices as they came, with rows that are not decoded yet. ``partitions``: ascending; ``epochs``, ``counts`` of
    rows, ``afters`` (-1: it does not say) and ``digests``: of each slice; the last two may be empty. ``message``: the
    Arrow record batch message of all rows, ``b""`` for none.
    """

    operator: str
    batch: Batch
    schema: bytes
    partitions: Sequence[int]
    epochs: Sequence[int]
    counts: Sequence[int]
    afters: Sequence[int]
    digests: Sequence[int]
    message: bytes

    def without(self, places: Sequence[int]) -> Frame:
        """Returns the frame without some of its slices.

        Args:
            places: of slices without rows, ascending.
        """
        gone = set(places)
        rest = [place for place in range(len(self.partitions)) if place not in gone]

        def of(numbers: Sequence[int]) -> Sequence[int]:
            return [numbers[place] for place in rest] if numbers else numbers

        return self._replace(
            partitions=of(self.partitions),
            epochs=of(self.epochs),
            counts=of(self.counts),
            afters=of(self.afters),
            digests=of(self.digests),
        )

    def read(self) -> Shares:
        """Decodes the rows. Raises InvalidArgument when it is unknown which rows are of which slice."""
        rows = BatchReader.of(self.schema).read(self.message) if self.message else None
        bounds = [0, *accumulate(self.counts)]
        if bounds[-1] != (0 if rows is None else rows.num_rows):
            raise InvalidArgument(
                f"{0 if rows is None else rows.num_rows} rows arrived, {bounds[-1]} were announced",
                remedy="check which client sends them, and its version",
                operator=self.operator,
                source=self.batch.source,
            )
        digests: Sequence[int | None] = self.digests
        if not digests:
            named = self.batch.session is not None
            digests = digests_of(self.schema, rows, bounds) if named else [None] * len(self.partitions)
        parts = [
            Part(
                partition,
                epoch,
                start,
                stop,
                None if after < 0 else after,
                None if self.digests and start == stop else digest,
            )
            for partition, epoch, (start, stop), after, digest in zip(
                self.partitions, self.epochs, pairwise(bounds), self.afters or repeat(-1), digests, strict=False
            )
        ]
        return Shares(self.operator, self.batch, self.schema, rows, parts)


@dataclass(slots=True)
class Shares:
    """Slices of a batch, with their rows. ``schema``: Arrow IPC schema of ``rows``, which are checked; None: no part
    has any. The rows of each part come after those of the parts before it. Raises InvalidArgument where they do not.
    """

    operator: str
    batch: Batch
    schema: bytes
    rows: pa.RecordBatch | None
    parts: list[Part]
    _arriving: Arriving | None = field(default=None, init=False)
    _row_bytes: float | None = field(default=None, init=False)
    _origins: Origins | None = field(default=None, init=False)

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
            f"rows {part.start} to {part.stop} do not belong to this partition",
            remedy="check which client sends them, and its version",
            operator=self.operator,
            partition=part.partition,
        )

    @property
    def row_bytes(self) -> float:
        """Average size of a row in memory, in bytes."""
        if self._row_bytes is None:
            self._row_bytes = self.bytes / max(1, 0 if self.rows is None else self.rows.num_rows)
        return self._row_bytes

    @property
    def bytes(self) -> int:
        """Size of the rows in memory, in bytes."""
        return 0 if self.rows is None else int(self.rows.nbytes)

    def origins(self, part: Part) -> dict[str, int]:
        """Returns site → number of a part's rows that name it, in the column that the batch names."""
        if self.rows is None:
            return {}
        if self._origins is None:
            self._origins = Origins(self.rows, self.batch.site_column)
        return self._origins.of(part.start, part.stop)

    def only(self, places: Sequence[int]) -> Shares:
        """Returns some of the parts, by place, ascending.

        The result holds the rows of all parts, or only its own where these are few.
        """
        parts = [self.parts[place] for place in places]
        count = sum(part.stop - part.start for part in parts)
        if self.rows is not None and 2 * count > self.rows.num_rows:
            return Shares(self.operator, self.batch, self.schema, self.rows, parts)
        bounds = [0, *accumulate(part.stop - part.start for part in parts)]
        mine = [
            part._replace(start=start, stop=stop) for part, (start, stop) in zip(parts, pairwise(bounds), strict=True)
        ]
        rows = None
        if self.rows is not None and count:
            rows = pa.concat_batches([self.rows.slice(part.start, part.stop - part.start) for part in parts])
        return Shares(self.operator, self.batch, self.schema, rows, mine)

    def arrived(self, part: Part, key: tuple[str, ...]) -> Arrived | None:
        """Returns a part's rows, by these key columns; None: it has none. Raises KeyColumnMissing."""
        if part.start == part.stop:
            return None
        if self._arriving is None or self._arriving.reader.key != key:
            assert self.rows is not None
            reader = RowReader.of(self.schema, key, self.operator)
            self._arriving = Arriving(reader, self.rows, [each.stop for each in self.parts])
        return Arrived(self._arriving, part.start, part.stop)
