"""Output of one batch for one partition, as stored and sent: the main output, and side outputs by tag.

Without side outputs it is the Arrow record batch message itself (which begins with 0xff), or nothing. With them: the
byte 0x00, then msgpack ``[version, main, {tag: message}]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgpack
import pyarrow as pa

from stateflow.errors import DecodeError, OutputMismatch
from stateflow.operator.arrow import BatchReader, read_schema
from stateflow.operator.rows import NOT_PYTHONS, OutputWriter, holds_map, readable

_MARK = b"\x00"
VERSION = 1

# -- Encoding of output rows -----------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    """Output ``rows`` of one partition, frozen by its ``writer``."""

    writer: OutputWriter
    rows: list[Any]


def encode(several: Sequence[Outputs]) -> list[bytes | Exception]:
    """Encodes output rows of several partitions at once: for few rows, making an array costs more than filling it.

    Returns a record batch message for each item, ``b""`` for no rows, or the error of an item whose rows are wrong; the
    other items are encoded nevertheless.
    """
    encoded: list[bytes | Exception] = []
    for _, alike in groupby(several, key=lambda outputs: outputs.writer.schema):
        encoded += _encode(list(alike))
    return encoded


def _encode(alike: list[Outputs]) -> Sequence[bytes | Exception]:
    if len(alike) > 1:
        try:
            return alike[0].writer.write_each([outputs.rows for outputs in alike])
        except Exception:  # noqa: BLE001, S110 - some rows are wrong, or all of them are too many for one message
            pass
    return [_alone(outputs) for outputs in alike]


def _alone(outputs: Outputs) -> bytes | Exception:
    try:
        return outputs.writer.write_each([outputs.rows])[0]
    except Exception as error:  # noqa: BLE001 - it is the result of this batch alone
        return error


# -- Stored and sent outputs -----------------------------------------------------------------------------------------


def join_output(main: bytes, side: dict[str, bytes]) -> bytes:
    if not side:
        return main
    packed: bytes = msgpack.packb([VERSION, main, side])
    return _MARK + packed


def split_output(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Splits an output into (main, tag → record batch message). Raises DecodeError."""
    if not data.startswith(_MARK):
        return data, {}
    try:
        version, main, side = msgpack.unpackb(data[1:])
    except (ValueError, TypeError) as error:
        raise DecodeError("an output cannot be read", remedy="check what runs at the replica's address") from error
    if version != VERSION:
        raise DecodeError(
            f"an output has format {version}, this program reads {VERSION}", remedy="run a newer stateflow"
        )
    if not (type(main) is bytes and type(side) is dict and all(type(each) is bytes for each in side.values())):
        raise DecodeError("an output is malformed", remedy="check what runs at the replica's address")
    return main, side


class OutputReader:
    """Reads outputs as rows, which are dictionaries. A map becomes a dictionary, too, as in an operator's input rows.

    A value that Python cannot represent, such as a time in the year 12000 from a batch operator, raises InvalidArgument
    only when it is accessed: the value is committed, and the other rows stay readable.

    Args:
        side: schema of each side output by its tag.
    """

    def __init__(self, schema: pa.Schema, side: Mapping[str, pa.Schema]) -> None:
        self._main = BatchReader(schema)
        self._side = {tag: BatchReader(each) for tag, each in side.items()}

    @classmethod
    def of(cls, schema: bytes, side: Iterable[tuple[str, bytes]]) -> OutputReader:
        return cls(read_schema(schema), {tag: read_schema(encoded) for tag, encoded in side})

    def join(self, earlier: bytes, later: bytes) -> bytes:
        """Joins two outputs into one, in this order."""
        if not earlier or not later:
            return earlier or later
        (main, side), (more, more_side) = split_output(earlier), split_output(later)
        joined = {
            tag: _append(side.get(tag, b""), more_side.get(tag, b""), reader)
            for tag, reader in self._side.items()
            if tag in side or tag in more_side
        }
        return join_output(_append(main, more, self._main), joined)

    def rows(self, outputs: Iterable[bytes]) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
        """Returns (main rows, tag → rows), in the order of ``outputs``."""
        split = [split_output(output) for output in outputs]
        side = {
            tag: _rows(reader, [messages[tag] for _, messages in split if tag in messages])
            for tag, reader in self._side.items()
        }
        return _rows(self._main, [message for message, _ in split]), side


def _rows(reader: BatchReader, messages: Iterable[bytes]) -> list[dict[str, Any]]:
    batches = [reader.read(message) for message in messages if message]
    if not batches:
        return []
    return rows_in(pa.Table.from_batches(batches, reader.schema))


def rows_in(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows as dictionaries, also where Python cannot represent some value."""
    with_maps = any(holds_map(field.type) for field in table.schema)
    try:
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict" if with_maps else None)
        return rows
    except NOT_PYTHONS:  # some value, as a batch operator may give it: the others stay readable
        columns = [_values(table.column(number), field) for number, field in enumerate(table.schema)]
        return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict" if holds_map(field.type) else None)
        return values
    except NOT_PYTHONS:
        return [readable(scalar, field.name, row) for row, scalar in enumerate(column)]


def _append(one: bytes, two: bytes, reader: BatchReader) -> bytes:
    if not one or not two:
        return one or two
    table = pa.Table.from_batches([reader.read(one), reader.read(two)])
    whole, *more = table.combine_chunks().to_batches()
    if more:
        raise OutputMismatch(
            "the output of timers and rows has more than 2 GiB of text in a column", remedy="send smaller batches"
        )
    message: bytes = whole.serialize().to_pybytes()
    return message
