"""Times arrive in the zone that they were given, however the zone is named; zones unknown to Python are refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from copy import copy
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import EncodeError, InvalidArgument
from stateflow.operator.arrow import in_python_zones, python_zone
from stateflow.operator.rows import RowReader, alone
from stateflow.operator.timers import to_us

NOON = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)

#: name → hours from UTC in July
ZONES = {
    **{"UTC": 0, "Z": 0, "GMT": 0, "UT": 0, "GMT0": 0, "GMT+0": 0, "UTC-0": 0, "+0": 0, "+00:00": 0, "Etc/GMT+2": -2},
    **{"GMT+2": 2, "UTC+02:00": 2, "UT-3": -3, "+2": 2, "-2": -2, "+02": 2, "+0230": 2.5, "-02:30": -2.5, "+2:30": 2.5},
    **{"+02:5": 2 + 5 / 60, "GMT-11:30": -11.5, "+18:00": 18, "-18": -18, "+02:00:00": 2, "UTC+14": 14},
    **{"PST": -7, "EST": -5, "MST": -7, "HST": -10, "IST": 5.5, "BST": 6, "CST": -5, "JST": 9, "ECT": 2, "AET": 10},
    **{"Europe/Berlin": 2, "America/New_York": -4, "Asia/Kathmandu": 5.75, "CET": 2, "US/Pacific": -7, "PRC": 8},
}
UNKNOWN = ["+02:60", "+02:00:30", "GMT+19", "GMT+18:01", "GMT+", "GMT+2:30:", "Mars/Base", "+", "pst", "+1234567"]


def row_in(zone: str, kind: Any = None, value: Any = NOON) -> Any:
    at = pa.timestamp("us", tz=zone)
    schema = pa.schema([("k", pa.string()), ("at", at if kind is None else kind(at))])
    utc = pa.timestamp("us", tz="UTC")
    plain = pa.array([value], utc if kind is None else kind(utc))
    message = pa.record_batch([pa.array(["a"]), plain], ["k", "at"]).serialize()
    reader = RowReader.of(schema.serialize().to_pybytes(), ("k",), "Op")
    (row,) = alone(reader, pa.ipc.read_record_batch(message, reader.schema)).read()[1]
    return row.at


@pytest.mark.parametrize(("zone", "hours"), ZONES.items())
def test_a_time_is_in_its_zone(zone: str, hours: float) -> None:
    read = row_in(zone)
    assert read == NOON
    assert read.utcoffset() == dt.timedelta(hours=hours)


@pytest.mark.parametrize("zone", UNKNOWN)
def test_a_zone_that_python_has_not_is_refused_before_the_first_row(zone: str) -> None:
    with pytest.raises(InvalidArgument, match=r"Python does not know the time zone .*: use a tz database name"):
        python_zone(zone)
    with pytest.raises(InvalidArgument, match=r"Python does not know the time zone .*\(column=at operator=Op\)"):
        row_in(zone)


@pytest.mark.parametrize(
    ("kind", "value", "inner"),
    [
        (pa.list_, [NOON], lambda read: read[0]),
        (pa.large_list, [NOON], lambda read: read[0]),
        (lambda at: pa.list_(at, 1), [NOON], lambda read: read[0]),
        (lambda at: pa.struct([("n", pa.int64()), ("t", at)]), {"n": 1, "t": NOON}, lambda read: read["t"]),
        (lambda at: pa.map_(pa.string(), at), [("x", NOON)], lambda read: read["x"]),
        (lambda at: pa.map_(at, pa.list_(at)), [(NOON, [NOON])], lambda read: read[NOON][0]),
    ],
)
def test_also_within_others(kind: Any, value: Any, inner: Any) -> None:
    assert inner(row_in("GMT+2", kind, value)).hour == 14


NEW_YEARS = [
    ("America/New_York", dt.datetime(9999, 12, 31, 23, 30), dt.timedelta(hours=-5), "America/New_York"),
    ("Europe/Berlin", dt.datetime(1, 1, 1, 0, 30), dt.timedelta(minutes=53, seconds=28), "Europe/Berlin"),
    ("Europe/Berlin", dt.datetime(9999, 12, 31, 23, 30), dt.timedelta(), "UTC"),
    ("America/New_York", dt.datetime(1, 1, 1, 0, 30), dt.timedelta(), "UTC"),
]


@pytest.mark.parametrize(
    ("kind", "wrapped", "inner"),
    [
        (None, lambda at: at, lambda read: read),
        (pa.list_, lambda at: pa.ListArray.from_arrays([0, 1], at), lambda read: read[0]),
        (pa.large_list, lambda at: pa.LargeListArray.from_arrays([0, 1], at), lambda read: read[0]),
        (
            lambda at: pa.struct([("n", pa.int64()), ("t", at)]),
            lambda at: pa.StructArray.from_arrays([pa.array([None], pa.int64()), at], ["n", "t"]),
            lambda read: read["t"] if read["n"] is None else None,
        ),
        (
            lambda at: pa.map_(pa.string(), at),
            lambda at: pa.MapArray.from_arrays([0, 1], ["x"], at),
            lambda read: read["x"],
        ),
        (
            lambda at: pa.map_(pa.list_(at), pa.int64()),
            lambda at: pa.MapArray.from_arrays([0, 1], pa.ListArray.from_arrays([0, 1], at), [1]),
            lambda read: read[0][0][0] if read[0][1] == 1 else None,
        ),
    ],
)
@pytest.mark.parametrize(("zone", "clock", "offset", "named"), NEW_YEARS)
def test_near_the_ends_of_time_it_is_in_its_zone_or_in_utc(
    zone: str, clock: dt.datetime, offset: dt.timedelta, named: str, kind: Any, wrapped: Any, inner: Any
) -> None:
    """Near the ends of Python's range a time is in its zone or in UTC.

    Python cannot hold the first two in UTC, nor the last two in their zones.
    """
    micros = (clock - dt.datetime(1970, 1, 1) - offset) // dt.timedelta(microseconds=1)
    at = pa.array([micros], pa.int64()).view(pa.timestamp("us", tz=zone))
    column = wrapped(at)
    batch = pa.record_batch([pa.array(["a"]), column], ["k", "at"])
    assert kind is None or column.type == kind(at.type)
    reader = RowReader.of(batch.schema.serialize().to_pybytes(), ("k",), "Op")
    (row,) = alone(reader, batch).read()[1]
    read = inner(row.at)
    assert (read.replace(tzinfo=None), str(read.tzinfo)) == (clock, named)


def test_a_time_that_neither_zone_has_is_refused_when_it_is_looked_at() -> None:
    at = pa.array([1 << 60, 0], pa.int64()).view(pa.timestamp("us", tz="Europe/Berlin"))
    batch = pa.record_batch([pa.array(["a"]), pa.ListArray.from_arrays([0, 2], at)], ["k", "at"])
    reader = RowReader.of(batch.schema.serialize().to_pybytes(), ("k",), "Op")
    (row,) = alone(reader, batch).read()[1]
    looks: list[Callable[[Any], object]] = [
        *(len, list, hash, bool, copy, lambda at: at[0], lambda at: at.hour, lambda at: at == 1, lambda at: 1 in at),
        *(lambda at: f"{at:%Y}", lambda at: at - at, lambda at: [*at], dict, lambda at: at | {}),
    ]
    for look in looks:
        with pytest.raises(InvalidArgument, match=r"Python cannot represent .*column=at row=0"):
            look(row.at)
    assert f"{row.at}" == str(row.at) == "<a list<item: timestamp[us, tz=Europe/Berlin]> that Python cannot represent>"


def test_rows_that_came_with_a_zone_of_java_are_read_in_pythons() -> None:
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="PST"))], {"a": "b"})
    assert in_python_zones(schema).field("at").type.tz == "America/Los_Angeles"
    assert in_python_zones(schema).metadata == {b"a": b"b"}
    same = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
    assert in_python_zones(same) is same


MICROS = dt.timedelta(microseconds=1)
FINE = [
    (pa.timestamp("ns", "UTC"), dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + MICROS),
    (pa.timestamp("ns"), dt.datetime(1970, 1, 1) + MICROS),
    (pa.duration("ns"), MICROS),
    (pa.time64("ns"), dt.time(microsecond=1)),
]


@pytest.mark.parametrize(("kind", "micro"), FINE, ids=[str(kind) for kind, _ in FINE])
@pytest.mark.parametrize("nested", [False, True])
def test_nanoseconds_that_would_be_cut_are_refused_when_they_are_looked_at(
    kind: pa.DataType, micro: object, nested: bool
) -> None:
    times: Any = pa.array([1000, 1001], pa.int64()).cast(kind)
    if nested:
        times = pa.StructArray.from_arrays([times], names=["t"])
    schema = pa.schema([("k", pa.string()), ("at", times.type)])
    batch = pa.record_batch([pa.array(["a", "b"]), times], schema)
    whole, fine = alone(RowReader(schema, ("k",), "Op"), batch).read()[1]
    read = whole.at["t"] if nested else whole.at
    assert read == micro
    assert type(read) is type(micro), "none of pandas"
    with pytest.raises(InvalidArgument, match=r"Python cannot represent .*would lose data.* \(column=at row=1\)"):
        fine.at == micro  # noqa: B015
    if not nested and not pa.types.is_duration(kind):
        with pytest.raises(InvalidArgument, match=r"\(column=at row=1\)"):
            alone(RowReader(schema, ("at",), "Op"), batch).read()


def test_a_timer_has_no_nanoseconds() -> None:
    pandas = pytest.importorskip("pandas")
    assert to_us(pandas.Timestamp(1000, tz="UTC")) == 1
    with pytest.raises(EncodeError, match="nanoseconds"):
        to_us(pandas.Timestamp(1001, tz="UTC"))
