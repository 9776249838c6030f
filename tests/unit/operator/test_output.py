"""Outputs: rows that keep their values until they are encoded, and stored outputs as clients read them."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument, OutputMismatch
from stateflow.operator.output import OutputReader, OutputWriter, join_output

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


# -- rows that keep their values ------------------------------------------------------------------------------

NAMES: dict[str, Any] = {"a": 1, "b": 2}
TEXTS, BYTES = pa.list_(pa.string()), bytearray(b"ab")


@pytest.mark.parametrize(
    ("type_", "value", "found"),
    [
        (pa.binary(), memoryview(BYTES), b"ab"),
        (pa.list_(pa.binary()), (memoryview(BYTES),), [b"ab"]),
        (TEXTS, NAMES.keys(), ["a", "b"]),
        (pa.list_(pa.int64()), NAMES.values(), [1, 2]),
        (pa.map_(pa.string(), pa.int64()), NAMES.items(), [("a", 1), ("b", 2)]),
        (pa.struct([("x", TEXTS)]), {"x": NAMES.keys()}, {"x": ["a", "b"]}),
        (pa.list_(TEXTS), [NAMES.keys()], [["a", "b"]]),
    ],
)
def test_views_are_copied_when_they_are_produced(type_: pa.DataType, value: Any, found: Any) -> None:
    schema = pa.schema([("v", type_)])
    writer = OutputWriter(schema, "Op")
    rows = [writer.freeze((value,)), writer.freeze({"v": value})]
    NAMES["c"], BYTES[0] = 3, 0
    try:
        assert pa.ipc.read_record_batch(writer.write(rows), schema).to_pydict() == {"v": [found, found]}
    finally:
        del NAMES["c"]
        BYTES[0] = ord("a")


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_value_that_cannot_be_copied_is_named_with_its_field(as_dict: bool) -> None:
    writer = OutputWriter(pa.schema([("k", pa.string()), ("v", TEXTS)]), "Op")
    row = {"k": "a", "v": (text for text in "ab")}
    with pytest.raises(
        OutputMismatch, match=r"field 'v' is declared list<.*generator.*cannot be copied.*column=v.: make process"
    ):
        writer.freeze(row if as_dict else tuple(row.values()))
