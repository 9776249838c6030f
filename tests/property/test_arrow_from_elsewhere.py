"""Arrow messages written by others: after any content the process goes on and reports one line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument
from stateflow.operator.arrow import BatchReader, read_batch, read_schema, read_table
from stateflow.operator.rows import RowReader, alone
from tests.property.arrow_mutants import ROWS, SCHEMA

ROOT = Path(__file__).parents[2]
MUTANTS = int(os.environ.get("STATEFLOW_TEST_MUTANTS", "2000"))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_messages_are_read_or_refused(seed: int) -> None:
    """Every damaged message is read or refused.

    Runs in its own process: without the checks (`--as-before`) a damaged message ends the process with signal 11.
    """
    command = [sys.executable, "-m", "tests.property.arrow_mutants", str(seed), str(MUTANTS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_sound_rows_come_through() -> None:
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
    message = batch.serialize().to_pybytes()
    assert read_batch(message, SCHEMA).equals(batch)
    assert [row.k for row in alone(RowReader(SCHEMA, ("k",), "Op"), read_batch(message, SCHEMA)).read()[1]] == [
        row["k"] for row in ROWS
    ]


def test_an_offset_that_points_elsewhere_is_refused() -> None:
    """An offset of a string column that lies beyond its characters is refused: such a message ended a replica."""
    batch = pa.record_batch({"k": ["a", "b", "c"]})
    message = bytearray(batch.serialize().to_pybytes())
    at = bytes(message).rindex((1).to_bytes(4, "little") + (2).to_bytes(4, "little") + (3).to_bytes(4, "little"))
    for wrong in (1 << 30, (1 << 32) - 5, 3_000_000):
        message[at : at + 4] = wrong.to_bytes(4, "little")
        with pytest.raises(InvalidArgument, match="rows cannot be read as Arrow"):
            read_batch(bytes(message), batch.schema)


def test_rows_that_would_be_inflated_are_refused() -> None:
    batch = pa.record_batch({"k": ["a" * 1_000_000] * 100})
    for compression in ("zstd", "lz4"):
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
            stream.write_batch(batch)
        with pytest.raises(InvalidArgument, match="compressed"):
            read_table(sink.getvalue())


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int8(), pa.string()),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.string_view(),
        pa.list_(pa.binary_view()),
        pa.list_view(pa.int64()),
        pa.dense_union([pa.field("a", pa.int8())]),
    ],
    ids=str,
)
def test_types_by_which_few_bytes_say_many_values_are_refused(kind: pa.DataType) -> None:
    schema = pa.schema([("k", kind)])
    with pytest.raises(InvalidArgument, match="unsupported type"):
        read_schema(schema.serialize().to_pybytes())
    with pytest.raises(InvalidArgument, match="unsupported type"):
        BatchReader(schema)


def test_a_million_nulls_in_few_bytes_are_refused() -> None:
    many = pa.ListArray.from_arrays(pa.array([0, 1 << 30], pa.int32()), pa.nulls(1 << 30))
    batch = pa.record_batch({"k": ["a"], "many": many})
    message = batch.serialize().to_pybytes()
    assert len(message) < 1000
    with pytest.raises(InvalidArgument, match="cannot hold 1073741824 values"):
        read_batch(message, batch.schema)


def test_deep_and_wide_schemas_are_refused() -> None:
    deep = pa.int64()
    for _ in range(40):
        deep = pa.list_(deep)
    for schema in (pa.schema([("a", deep)]), pa.schema([(f"c{number}", pa.int8()) for number in range(10_001)])):
        with pytest.raises(InvalidArgument, match="too large"):
            read_schema(schema.serialize().to_pybytes())


def test_a_time_beyond_pythons_is_one_line() -> None:
    batch = pa.record_batch({"k": ["a"], "at": pa.array([1 << 62], pa.timestamp("us", "UTC"))})
    _, (row,) = alone(RowReader(batch.schema, ("k",), "Op"), batch).read()
    with pytest.raises(InvalidArgument, match="Python cannot represent"):
        row.at.isoformat()
