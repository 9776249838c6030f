"""Stored outputs, as clients read them."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument
from stateflow.operator.output import OutputReader, join_output

FAR_US = 10**18  # in the year 33658


def message(batch: pa.RecordBatch) -> bytes:
    found: bytes = batch.serialize().to_pybytes()
    return found


def test_rows_beside_a_value_that_python_has_not_are_to_be_had() -> None:
    """Rows beside a value beyond Python's range can be read.

    A batch operator may give such a value, and Spark can hold it: a client that asked again used to get the same error
    for ever.
    """
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("d", pa.date32())])
    times = pa.array([0, FAR_US], pa.int64()).cast(schema.field("at").type)
    days = pa.array([0, 10**8], pa.int32()).cast(pa.date32())
    batch = pa.record_batch([pa.array(["a", "b"]), times, days], schema)
    reader = OutputReader(schema, {"late": schema})
    main, side = reader.rows([join_output(message(batch), {"late": message(batch.slice(1))})])
    assert main[0] == {"k": "a", "at": dt.datetime(1970, 1, 1, tzinfo=dt.UTC), "d": dt.date(1970, 1, 1)}
    assert [row["k"] for row in main] == ["a", "b"]
    assert [row["k"] for row in side["late"]] == ["b"]
    for column in ("at", "d"):
        with pytest.raises(InvalidArgument, match=rf"Python cannot represent .*\(column={column} row=1\)"):
            str(main[1][column].year)


def test_a_map_is_a_dict_and_pairs_where_no_dict_can_have_its_keys() -> None:
    text, lists = pa.map_(pa.string(), pa.int64()), pa.map_(pa.list_(pa.int64()), pa.int64())
    schema = pa.schema([("m", text), ("inner", pa.list_(text)), ("odd", lists), ("twice", text)])
    row = {"m": [("a", 1)], "inner": [[("b", 2)], None], "odd": [([1], 3)], "twice": [("a", 1), ("a", 2)]}
    message = pa.RecordBatch.from_pylist([row], schema=schema).serialize().to_pybytes()
    rows, _ = OutputReader(schema, {}).rows([message])
    assert rows == [{"m": {"a": 1}, "inner": [{"b": 2}, None], "odd": [([1], 3)], "twice": [("a", 1), ("a", 2)]}]
