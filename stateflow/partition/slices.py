"""Slices of one batch for several partitions, with the rows of all of them in one record batch.

A :class:`Frame` holds the slices as received. Its rows are not decoded yet, so slices without rows can be left out
first. Decoding gives :class:`BatchSlices`, in which the rows of one part follow those of the part before it.
:class:`Waiting` limits the bytes of rows that cannot be applied yet. :class:`Traffic` counts received rows, for
placement. :func:`digests_of` identifies the rows of each slice, so that a changed batch is noticed when it is sent
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t
import xxhash

from stateflow.errors import InvalidArgument, Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.operator.arrow import BatchReader
from stateflow.operator.rows import DecodedRows, RowDecoder, RowReader
from stateflow.partition.positions import Batch
from stateflow.types import NAME

# -- Traffic of a partition ------------------------------------------------------------------------------------------

#: number of sites that are counted separately; rows of further sites count like rows without a site
SITES_MAX = 64


@dataclass(slots=True)
class Traffic:
    """Rows received for a partition since this process first served it. The numbers only grow; two readings give a
    rate.

    Attributes:
        rows: number of rows.
        bytes: size of the rows in Arrow.
        origins: number of rows by the site that they name.
    """

    rows: int = 0
    bytes: float = 0.0
    origins: dict[str, int] = field(default_factory=dict)

    def came(self, rows: int, row_bytes: float, site: str) -> None:
        """Counts received rows of ``row_bytes`` each. ``site`` is their origin; empty: unknown, or each row names its
        own site."""
        self.rows += rows
        self.bytes += rows * row_bytes
        if site:
            self._add(site, rows)

    def came_from(self, origins: Mapping[str, int]) -> None:
        """Counts received rows by the site that they name."""
        for site, rows in origins.items():
            self._add(site, rows)

    def _add(self, site: str, rows: int) -> None:
        if site in self.origins or len(self.origins) < SITES_MAX:
            self.origins[site] = self.origins.get(site, 0) + rows


class Origins:
    """Counts the sites that one column of received rows names. The column is read once, and its values are counted part
    by part. Values that are not names of sites are not counted; a column that is missing or is not text names no
    sites."""

    def __init__(self, rows: pa.RecordBatch, column: str) -> None:
        index = rows.schema.get_field_index(column)
        self._sites: list[str] = []
        if index < 0 or not _is_text(rows.schema.field(index).type):
            return
        encoded = rows.column(index).dictionary_encode()
        values = len(encoded.dictionary)
        # a column that names no sites may have as many values as rows, so only the first ones are examined
        number_of = np.full(values + 1, SITES_MAX, np.int64)
        for place, site in enumerate(encoded.dictionary[:SITES_MAX].to_pylist()):
            if NAME.holds(site):
                number_of[place] = len(self._sites)
                self._sites.append(site)
        self._numbers = number_of[encoded.indices.fill_null(values).to_numpy(zero_copy_only=False)]

    def of(self, start: int, stop: int) -> dict[str, int]:
        """Returns site → number of rows that name it, for the rows from ``start`` to before ``stop``. Sites that no row
        names are left out."""
        if not self._sites:
            return {}
        counts = np.bincount(self._numbers[start:stop], minlength=len(self._sites))[: len(self._sites)].tolist()
        return {site: count for site, count in zip(self._sites, counts, strict=True) if count}


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# -- Slices of a batch -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Slice of a batch for one partition: the rows from ``start`` to before ``stop``.

    Attributes:
        epoch: epoch of ownership, as the sender knows it.
        after: see :meth:`.PartitionProcessor.run`.
        digest: digest of the rows, if they must be the same every time the batch is sent; None: they need not be.
    """

    partition: int
    epoch: int
    start: int = 0
    stop: int = 0
    after: int | None = None
    digest: int | None = None


class Frame(NamedTuple):
    """Slices as received, with rows that are not decoded yet.

    Attributes:
        schema: Arrow IPC schema of the rows.
        partitions: the partition of each slice, ascending.
        epochs: the epoch of each slice.
        counts: the number of rows of each slice.
        afters: see :meth:`.PartitionProcessor.run`, for each slice; -1: not stated. Empty: not stated for any.
        digests: the digest of each slice's rows; empty: the sender has none.
        message: Arrow record batch message of all rows; ``b""``: no rows.
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
            places: indices of slices without rows, ascending.
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

    def read(self) -> BatchSlices:
        """Decodes the rows. Raises InvalidArgument if the rows cannot be assigned to slices."""
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
        return BatchSlices(self.operator, self.batch, self.schema, rows, parts)


@dataclass(slots=True)
class BatchSlices:
    """Slices of a batch, with their rows.

    The rows of each part must follow those of the parts before it; otherwise InvalidArgument is raised.

    Attributes:
        schema: Arrow IPC schema of ``rows``.
        rows: checked rows of all parts; None: no part has rows.
    """

    operator: str
    batch: Batch
    schema: bytes
    rows: pa.RecordBatch | None
    parts: list[Part]
    _arriving: RowDecoder | None = field(default=None, init=False)
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
            f"rows {part.start} to {part.stop} are out of order, or beyond the end of the batch",
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
        """Returns site → number of the part's rows that name the site in the batch's ``site_column``."""
        if self.rows is None:
            return {}
        if self._origins is None:
            self._origins = Origins(self.rows, self.batch.site_column)
        return self._origins.of(part.start, part.stop)

    def only(self, places: Sequence[int]) -> BatchSlices:
        """Returns the parts at the indices ``places``, which are ascending.

        The result shares the rows of all parts, or copies its own rows if they are at most half of them.
        """
        parts = [self.parts[place] for place in places]
        count = sum(part.stop - part.start for part in parts)
        if self.rows is not None and 2 * count > self.rows.num_rows:
            return BatchSlices(self.operator, self.batch, self.schema, self.rows, parts)
        bounds = [0, *accumulate(part.stop - part.start for part in parts)]
        mine = [
            part._replace(start=start, stop=stop) for part, (start, stop) in zip(parts, pairwise(bounds), strict=True)
        ]
        rows = None
        if self.rows is not None and count:
            rows = pa.concat_batches([self.rows.slice(part.start, part.stop - part.start) for part in parts])
        return BatchSlices(self.operator, self.batch, self.schema, rows, mine)

    def behind(self, count: int) -> BatchSlices:
        """Returns the parts behind the first ``count``. They share the rows, and what was read of the rows."""
        if not count:
            return self
        rest = BatchSlices(self.operator, self.batch, self.schema, self.rows, self.parts[count:])
        rest._arriving, rest._row_bytes, rest._origins = self._arriving, self._row_bytes, self._origins
        return rest

    def arrived(self, part: Part, key: tuple[str, ...]) -> DecodedRows | None:
        """Returns a part's rows, read with the key columns ``key``; None: the part has no rows. Raises
        KeyColumnMissing."""
        if part.start == part.stop:
            return None
        if self._arriving is None or self._arriving.reader.key != key:
            assert self.rows is not None
            reader = RowReader.of(self.schema, key, self.operator)
            self._arriving = RowDecoder(reader, self.rows, [each.stop for each in self.parts])
        return DecodedRows(self._arriving, part.start, part.stop)


# -- Rows that wait. Sans-io -----------------------------------------------------------------------------------------


class Waiting:
    """Limit on the bytes of rows that cannot be applied yet, because their slice is incomplete or arrived before its
    partition.

    Args:
        bytes_max: limit for all callers together; one caller may use half of it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0

    def admit(self, more: int, has: int, source: str) -> None:
        """Admits ``more`` waiting bytes of a caller that has ``has`` bytes waiting already.

        Raises InvalidArgument if both together exceed the share of one caller, Unavailable if the callers together
        exceed the limit.
        """
        if has + more > self._bytes_max // 2:
            LIMIT_HITS.note("waiting_bytes")
            raise InvalidArgument(
                f"more than {self._bytes_max // 2} bytes of one batch's rows would be buffered here",
                remedy="send smaller batches, or raise STATEFLOW_REPLICA_WAITING_BYTES_MAX",
                source=source,
            )
        if self.bytes + more > self._bytes_max:
            LIMIT_HITS.note("waiting_bytes")
            raise Unavailable(
                f"{self.bytes} bytes of incomplete batches are buffered here already",
                remedy="check the senders, or raise STATEFLOW_REPLICA_WAITING_BYTES_MAX; the request is retried",
            )
        self.bytes += more

    def let_go(self, fewer: int) -> None:
        self.bytes -= fewer


# -- Digests of rows -------------------------------------------------------------------------------------------------

_hash = xxhash.xxh3_64_intdigest
_BITS = (1 << 63) - 1


def digests_of(schema: bytes, rows: pa.RecordBatch | None, bounds: Sequence[int]) -> list[int]:
    """Returns the digest of each part of the rows; a part extends from one bound to before the next.

    Rows are digested by their values, so that the same rows have the same digest in any message and beside any other
    rows. A digest covers the buffers of each column, as if the part were alone and all bytes under nulls were zero.

    Args:
        schema: Arrow IPC schema of the rows.
        rows: None: there are no rows.
    """
    seed = _hash(schema)
    found = [seed] * (len(bounds) - 1)
    if rows is not None:
        if bounds[0] or bounds[-1] != rows.num_rows:
            rows = rows.slice(bounds[0], bounds[-1] - bounds[0])
            bounds = [bound - bounds[0] for bound in bounds]
        for column in rows.columns:
            _add(column, bounds, found)
    return [
        -1 - ((digest ^ (stop - start)) & _BITS) for digest, (start, stop) in zip(found, pairwise(bounds), strict=True)
    ]


def _add(column: pa.Array, bounds: Sequence[int], found: list[int]) -> None:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        _add(column.storage, bounds, found)
        return
    if column.null_count:
        _add_nulls(np.asarray(pc.is_null(column).cast(pa.uint8())), bounds, found)
    if t.is_null(kind):
        return
    if t.is_boolean(kind):
        _add_bytes(np.asarray(pc.fill_null(column, False).cast(pa.uint8())), 1, bounds, found)
    elif t.is_binary(kind) or t.is_string(kind) or t.is_large_binary(kind) or t.is_large_string(kind):
        _add_texts(column, bounds, found)
    elif t.is_primitive(kind) and kind.bit_width >= 8:
        width = kind.bit_width // 8
        if column.null_count and t.is_interval(kind):  # Arrow has no integers of 16 bytes
            column = column.view(pa.binary(width)).fill_null(bytes(width))
        if column.null_count:  # the bytes behind a null are arbitrary
            plain = np.asarray(column.view(f"int{kind.bit_width}").fill_null(0))
            _add_bytes(plain, width, bounds, found)
        else:
            _add_bytes(column.buffers()[1], width, [column.offset + bound for bound in bounds], found)
    else:
        _add_others(column, bounds, found)


def _add_nulls(nulls: Any, bounds: Sequence[int], found: list[int]) -> None:
    """Adds the nulls of each part that has any, so that a null elsewhere does not change a part's digest."""
    for number, (start, stop) in enumerate(pairwise(bounds)):
        part = nulls[start:stop]
        if part.any():
            found[number] = _hash(memoryview(part), found[number])


def _add_bytes(data: Any, width: int, bounds: Sequence[int], found: list[int]) -> None:
    view = memoryview(data).cast("B")
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            found[number] = _hash(view[start * width : stop * width], found[number])


def _add_texts(column: pa.Array, bounds: Sequence[int], found: list[int]) -> None:
    if column.null_count:
        column = column.fill_null(b"" if t.is_binary(column.type) or t.is_large_binary(column.type) else "")
    _, offsets, data = column.buffers()
    is_large = t.is_large_binary(column.type) or t.is_large_string(column.type)
    where = np.frombuffer(offsets, np.int64 if is_large else np.int32)[column.offset : column.offset + len(column) + 1]
    _add_bytes(np.diff(where), where.itemsize, bounds, found)
    if data is not None:
        _add_bytes(data, 1, where[list(bounds)].tolist(), found)


def _add_others(column: pa.Array, bounds: Sequence[int], found: list[int]) -> None:
    """Adds a column whose type is nested, or wider than a number, part by part."""
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            alone = column.slice(start, stop - start).take(pa.array(range(stop - start)))
            message = pa.record_batch([pa.concat_arrays([alone])], names=["c"]).serialize()
            found[number] = _hash(memoryview(message), found[number])
