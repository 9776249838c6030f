"""Every key lands where the router looks for it: Python's hash of a key is Spark's, value for value."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t

from stateflow.partitioner import partition_of, spark_xxhash64
from stateflow.spark.apply import _hashable, _placed

pytestmark = pytest.mark.spark

UTC = dt.UTC
LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1
VALUES = 600
PARTITIONS = (1, 7, 128, 65_536)

_scalars = st.characters(exclude_categories=["Cs"])
#: one strategy per Arrow type; it draws extremes often, and EXTREMES adds each of them once
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "string": (pa.string(), st.text(_scalars, max_size=80)),
    "long": (pa.int64(), st.integers(LONG_MIN, LONG_MAX)),
    "int": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "short": (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
    "byte": (pa.int8(), st.integers(-(1 << 7), (1 << 7) - 1)),
    "binary": (pa.binary(), st.binary(max_size=80)),
    "boolean": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "float": (pa.float32(), st.floats(allow_nan=False, width=32)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(UTC))),
}
EXTREMES: dict[str, list[Any]] = {
    "string": ["", "\0", "a\0", "\0a", "😀", "𐀀\U0010ffff", "\ud7ff\ue000", "\u00e9", "e\u0301", "ß" * 33, "x" * 32],
    "long": [LONG_MIN, LONG_MIN + 1, -(1 << 31) - 1, -1, 0, 1, 1 << 31, 1 << 32, LONG_MAX - 1, LONG_MAX],
    "int": [-(1 << 31), -1, 0, 1, (1 << 31) - 1],
    "short": [-(1 << 15), -1, 0, 1, (1 << 15) - 1],
    "byte": [-(1 << 7), -1, 0, 1, (1 << 7) - 1],
    "binary": [b"", b"\0", b"\0" * 8, b"\xff" * 31, b"\xff" * 32, b"\xff" * 33, bytes(range(256))],
    "boolean": [True, False],
    "double": [0.0, -0.0, math.inf, -math.inf, 5e-324, -5e-324, 1.7976931348623157e308, 0.1, 2.0**53 + 2],
    "float": [0.0, -0.0, math.inf, -math.inf, 2.0**-149, 3.4028234663852886e38],
    "date": [dt.date.min, dt.date(1582, 10, 4), dt.date(1582, 10, 15), dt.date(1969, 12, 31), dt.date.max],
    "timestamp": [
        dt.datetime.min.replace(tzinfo=UTC),
        dt.datetime(1582, 10, 4, 23, 59, 59, 999_999, UTC),
        dt.datetime(1900, 1, 1, tzinfo=UTC),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        dt.datetime(1970, 1, 1, tzinfo=UTC),
        dt.datetime.max.replace(tzinfo=UTC),
    ],
}


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """``count`` values of a strategy in one list, so that one Spark job can judge them all."""
    values: list[Any] = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values


def hashed_by_spark(spark: SparkSession, table: pa.Table, keys: list[tuple[str, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yields (xxhash64, pmod by each of PARTITIONS) of each row, key after key.

    One job hashes all of them, and casts as apply_operator casts.
    """
    frame = spark.createDataFrame(table)

    def figures(columns: tuple[str, ...]) -> Column:
        number = F.xxhash64(*(_hashable(frame, column, "Op") for column in columns))
        return F.array(number, *(F.pmod(number, F.lit(count)).cast("int").cast("long") for count in PARTITIONS))

    row = _placed(frame).agg(*(F.collect_list(figures(columns)) for columns in keys)).first()
    assert row is not None
    for column in row:
        yield tuple(map(tuple, column))


def by_python(key: tuple[Any, ...]) -> tuple[int, ...]:
    return (spark_xxhash64(*key), *(partition_of(key, count) for count in PARTITIONS))


def assert_equal(keys: list[tuple[Any, ...]], by_spark: tuple[Any, ...]) -> None:
    assert len(keys) == len(by_spark)
    wrong = [(key, want, by_python(key)) for key, want in zip(keys, by_spark, strict=True) if by_python(key) != want]
    assert not wrong, f"{len(wrong)} of {len(keys)} differ, first (key, Spark, Python): {wrong[0]}"


def test_single_columns_hash_as_in_spark(spark: SparkSession) -> None:
    columns = {}
    for kind, (arrow, strategy) in KINDS.items():
        values = itertools.cycle(EXTREMES[kind] + drawn(strategy, VALUES))
        columns[kind] = pa.array(itertools.islice(values, VALUES), arrow)
    table = pa.table(columns)
    results = hashed_by_spark(spark, table, [(kind,) for kind in KINDS])
    for kind, result in zip(KINDS, results, strict=True):
        keys = [(value,) for value in table[kind].to_pylist()]
        assert {(value,) for value in EXTREMES[kind]} <= set(keys)
        assert_equal(keys, result)


def test_several_columns_hash_as_in_spark(spark: SparkSession) -> None:
    columns = ["string", "long", "int", "binary", "boolean", "double", "date", "timestamp"]
    rows = drawn(st.tuples(*(KINDS[kind][1] | st.sampled_from(EXTREMES[kind]) for kind in columns)), VALUES)
    table = pa.table({kind: pa.array([row[i] for row in rows], KINDS[kind][0]) for i, kind in enumerate(columns)})
    shapes: list[tuple[str, ...]] = [
        ("string", "long"),
        ("long", "string"),
        ("binary", "boolean", "double"),
        ("date", "timestamp"),
        ("boolean", "int", "string", "date"),
        tuple(columns),
    ]
    for shape, result in zip(shapes, hashed_by_spark(spark, table, shapes), strict=True):
        picked = table.select(list(shape)).to_pylist()
        assert_equal([tuple(row[column] for column in shape) for row in picked], result)


def test_a_string_of_every_length_around_the_blocks_of_the_hash(spark: SparkSession) -> None:
    """Strings of every length around XXH64's blocks of 32, 8, 4 and 1 bytes hash as in Spark."""
    texts = [("aé😀\0"[i % 4] * length)[:length] for length in range(140) for i in range(4)]
    table = pa.table({"string": texts, "binary": pa.array([text.encode() for text in texts], pa.binary())})
    by_spark = hashed_by_spark(spark, table, [("string",), ("binary",)])
    for kind, result in zip(("string", "binary"), by_spark, strict=True):
        assert_equal([(value,) for value in table[kind].to_pylist()], result)


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_timestamps_hash_as_moments_in_any_session_zone(spark: SparkSession, zone: str) -> None:
    moments = [dt.datetime(2013, month, 1, 5, 17, 0, 1, UTC) for month in range(1, 13)] + EXTREMES["timestamp"]
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        table = pa.table({"timestamp": pa.array(moments, pa.timestamp("us", tz="UTC"))})
        [result] = hashed_by_spark(spark, table, [("timestamp",)])
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert_equal([(moment,) for moment in moments], result)


def test_int_and_long_columns_of_one_value_share_a_partition(spark: SparkSession) -> None:
    """Int and long columns of one value share a partition: apply_operator casts, as Spark hashes them differently."""
    row = spark.range(1).select(F.xxhash64(F.lit(7).cast("int")), F.xxhash64(F.lit(7).cast("long"))).first()
    assert row is not None
    assert row[0] != row[1] == spark_xxhash64(7)
    frame = spark.createDataFrame([(7, 7, 7, 7)], "a tinyint, b smallint, c int, d bigint")
    hashes = _placed(frame).select(*(F.xxhash64(_hashable(frame, column, "Op")) for column in "abcd")).first()
    assert hashes is not None
    assert set(hashes) == {spark_xxhash64(7)}


def test_collated_strings_are_not_hashed_byte_by_byte(spark: SparkSession) -> None:
    """A key with a collation is refused: Spark hashes 'A' as 'a' then, and Python does not."""
    from stateflow.errors import UnsupportedKeyType

    frame = spark.sql("SELECT 'A' COLLATE UTF8_LCASE AS k")
    assert isinstance(frame.schema["k"].dataType, t.StringType)
    with pytest.raises(UnsupportedKeyType):
        _hashable(frame, "k", "Op")
