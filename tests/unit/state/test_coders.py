from __future__ import annotations

import dataclasses
import decimal
import math
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, NewType
from uuid import UUID

import msgpack
import numpy as np
import pytest

from stateflow.errors import DeclarationError, DecodeError, EncodeError
from stateflow.state import coders
from stateflow.state.cells import encode_row_key
from stateflow.state.declare import coder_for
from stateflow.state.encoding import NESTED_MAX

WEST, EAST = timezone(timedelta(hours=-5)), timezone(timedelta(hours=5))


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.5


@dataclasses.dataclass
class Track:
    name: str
    points: list[Point] = dataclasses.field(default_factory=list)
    best: Point | None = None
    total: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class Tree:
    label: str
    children: list[Tree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Box:
    items: list[int]


@pytest.mark.parametrize(
    ("type_", "name"),
    [
        (int, "int64"),
        (float, "float64"),
        (bool, "bool"),
        (str, "utf8"),
        (bytes, "bytes"),
        (datetime, "timestamp"),
        (date, "date"),
        (decimal.Decimal, "decimal"),
        (UUID, "uuid"),
        (list, "msgpack"),
        (list[int], "msgpack"),
        (dict[str, list[float]], "msgpack"),
        (set, "msgpack"),
        (tuple, "msgpack"),
        (int | None, "msgpack"),
        (Any, "msgpack"),
        (tuple[str, int], "tuple[utf8,int64]"),
        (tuple[str, ...], "tuple[utf8,...]"),
        (Point, "struct:Point"),
        (list[Point], "msgpack[list[struct:Point]]"),
        (NewType("Tail", str), "utf8"),
        (coders.Int64, "int64"),
    ],
)
def test_every_supported_type_has_its_coder(type_: Any, name: str) -> None:
    assert coder_for(type_).name == name


@pytest.mark.parametrize("type_", [complex, object(), 5, "int", list[complex], set[Point], Point | Track])
def test_other_types_are_refused(type_: Any) -> None:
    with pytest.raises(DeclarationError):
        coder_for(type_)
    with pytest.raises(DeclarationError, match="Decimal, UUID, list, dict"):
        coder_for(complex)


@pytest.mark.parametrize(
    ("coder", "value"),
    [
        (coders.Int64(), True),
        (coders.Int64(), 1.0),
        (coders.Int64(), None),
        (coders.Int64(), 2**63),
        (coders.Int64(), -(2**63) - 1),
        (coders.Float64(), True),
        (coders.Float64(), "1"),
        (coders.Float64(), 10**400),
        (coders.Bool(), 1),
        (coders.Utf8(), b"a"),
        (coders.Utf8(), "\ud800"),
        (coders.Bytes(), "a"),
        (coders.Timestamp(), datetime(2020, 1, 1)),
        (coders.Timestamp(), date(2020, 1, 1)),
        (coders.Date(), datetime(2020, 1, 1)),
        (coders.Decimal(), 1.5),
        (coders.UUID(), "a"),
        (coders.Msgpack(), object()),
        (coders.Msgpack(), {"a": {1j}}),
        (coders.Struct(Point), {"x": 1.0}),
        (coder_for(list[Point]), [1]),
        (coder_for(list[Point]), 5),
        (coder_for(tuple[str, int]), ("a",)),
        (coder_for(tuple[str, int]), ["a", 1]),
    ],
)
def test_values_that_do_not_fit_are_refused(coder: Any, value: Any) -> None:
    with pytest.raises(EncodeError):
        coder.encode(value)


def test_an_array_is_no_int_and_a_missing_time_no_time() -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    assert coders.Int64().encode(numpy.array(5)) == coders.Int64().encode(5)
    for coder, value in [(coders.Int64(), numpy.array([5])), (coders.Timestamp(), pandas.NaT)]:
        for encode in (coder.encode, coder.encode_key):
            with pytest.raises(EncodeError, match=f"a value of type {type(value).__name__} does not fit"):
                encode(value)


@pytest.mark.parametrize("coder", [coders.Int64(), coders.Utf8()])
def test_a_number_of_thousands_of_digits_is_refused(coder: Any) -> None:
    """Python refuses to write such a number, also for an error."""
    with pytest.raises(EncodeError, match="cannot be shown"):
        coder.encode(10**5000)


def test_a_cycle_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError):
        coders.Msgpack().encode(loop)
    knot = ([],)
    knot[0].append(knot)
    with pytest.raises(EncodeError):
        coders.Msgpack().encode(knot)


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda each: (each,), lambda each: frozenset([each]), lambda each: [(each, 1)]])
def test_tuples_and_sets_are_nested_no_deeper_than_they_can_be_read(wrap: Any) -> None:
    """Reading 200 tuples within each other takes more than the stack of a thread, which ends the process."""
    coder = coders.Msgpack()
    most = nested(NESTED_MAX, wrap)
    assert coder.decode(coder.encode(most)) == most
    with pytest.raises(EncodeError, match="nested too deeply"):
        coder.encode(nested(NESTED_MAX + 1, wrap))


def test_stored_tuples_that_are_nested_too_deeply_are_refused() -> None:
    data = msgpack.packb(1)
    for _ in range(NESTED_MAX + 1):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    with pytest.raises(DecodeError, match="nested too deeply"):
        coders.Msgpack().decode(data)


def test_a_record_within_itself_is_nested_only_so_deeply() -> None:
    tree: Any = None
    for _ in range(1000):
        tree = Tree("a", [] if tree is None else [tree])
    for coder, value in ((coders.Struct(Tree), tree), (coders.Msgpack(list[Tree]), [tree])):
        with pytest.raises(EncodeError, match="nested too deeply"):
            coder.encode(value)


@pytest.mark.parametrize("coder", [coders.Float64(), coders.Decimal()])
def test_nan_is_a_value_but_no_key(coder: Any) -> None:
    nan = type(coder.decode(coder.encode(0)))("nan")
    assert math.isnan(coder.decode(coder.encode(nan)))
    with pytest.raises(EncodeError):
        coder.encode_key(nan)


def test_msgpack_codes_no_keys() -> None:
    assert not coders.Msgpack().deterministic
    with pytest.raises(EncodeError):
        coders.Msgpack().encode_key("a")


def test_what_a_float_state_makes_of_an_int() -> None:
    coder = coders.Float64()
    assert type(coder.decode(coder.encode(3))) is float
    assert coder.encode_key(-0.0) == coder.encode_key(0.0)
    assert str(coder.decode_key(coder.encode_key(-0.0))) == "0.0"


def test_timestamps_come_back_in_utc() -> None:
    coder = coders.Timestamp()
    at = datetime(2020, 1, 1, 12, 0, 0, 7, tzinfo=timezone(timedelta(hours=2)))
    back = coder.decode(coder.encode(at))
    assert back == at
    assert back.tzinfo is UTC


@pytest.mark.parametrize("at", [datetime.max.replace(tzinfo=WEST), datetime.min.replace(tzinfo=EAST)])
def test_times_that_have_no_datetime_in_utc_are_refused(at: datetime) -> None:
    """Stored, they could not be read again."""
    for coder in (coders.Timestamp(), coders.Msgpack(), coders.Tuple((coders.Timestamp(),))):
        with pytest.raises(EncodeError, match="years 1 to 9999"):
            coder.encode((at,) if isinstance(coder, coders.Tuple) else at)
    with pytest.raises(EncodeError, match="years 1 to 9999"):
        encode_row_key(at)
    for end in (datetime.max, datetime.min):
        assert coders.Msgpack().decode(coders.Msgpack().encode(end)) == end
        utc = end.replace(tzinfo=UTC)
        assert coders.Timestamp().decode(coders.Timestamp().encode(utc)) == utc


def test_equal_decimals_are_one_key() -> None:
    coder = coders.Decimal()
    assert coder.encode_key(decimal.Decimal("1.50")) == coder.encode_key(decimal.Decimal("1.5"))
    assert str(coder.decode(coder.encode(decimal.Decimal("1.50")))) == "1.50"
    assert str(coder.decode_key(coder.encode_key(decimal.Decimal("-1200.0")))) == "-1200"


@pytest.mark.parametrize(
    "coder",
    [coders.Int64(), coders.Float64(), coders.Bool(), coders.Timestamp(), coders.Date(), coders.UUID()],
)
def test_short_bytes_are_a_decode_error(coder: Any) -> None:
    with pytest.raises(DecodeError):
        coder.decode(b"\x07\x08")


@pytest.mark.parametrize(
    ("coder", "data"),
    [
        (coders.Utf8(), b"\xff"),
        (coders.Decimal(), b"x"),
        (coders.Msgpack(), b""),
        (coders.Msgpack(), b"\xc1"),
        (coders.Msgpack(), b"\xd4\x63\x00"),
        (coders.Struct(Point), b"\x01"),
        (coders.Struct(Point), b"\x80"),
        (coder_for(tuple[str, int]), b"a"),
        (coder_for(tuple[str, int]), b"a\x00\x00"),
    ],
)
def test_damaged_bytes_are_a_decode_error(coder: Any, data: bytes) -> None:
    with pytest.raises(DecodeError):
        coder.decode(data)


def test_structs_round_trip() -> None:
    coder = coder_for(Track)
    track = Track("a", [Point(1.0), Point(2.0, 3.0)], Point(4.0))
    track.total = 7
    back = coder.decode(coder.encode(track))
    assert back == track
    assert back.total == 7
    assert coder_for(Tree).decode(coder_for(Tree).encode(Tree("a", [Tree("b")]))) == Tree("a", [Tree("b")])


def test_a_struct_may_gain_and_lose_fields() -> None:
    old = dataclasses.make_dataclass("Point", [("x", float), ("gone", int)])
    assert coder_for(Point).decode(coder_for(old).encode(old(1.0, 2))) == Point(1.0, 0.5)
    new = dataclasses.make_dataclass("Point", [("x", float), ("z", int)])
    with pytest.raises(DecodeError, match="'z'"):
        coder_for(new).decode(coder_for(Point).encode(Point(1.0)))


@pytest.mark.parametrize(
    ("type_", "mutable"),
    [
        (Point, False),
        (Track, True),
        (Box, True),
        (tuple[int, str], False),
        (tuple[Box, str], True),
        (list, True),
        (int, False),
    ],
)
def test_mutability_is_known(type_: Any, mutable: bool) -> None:
    assert coder_for(type_).mutable is mutable


def test_equal_sets_have_equal_bytes() -> None:
    coder = coders.Msgpack()
    assert coder.encode({"a", "b", "c"}) == coder.encode({"c", "b", "a"})
    assert coder.decode(coder.encode([{1}, frozenset({2}), (3,)])) == [{1}, frozenset({2}), (3,)]


def test_stored_forms_stay() -> None:
    """Encoded bytes are stored by released versions, and must never change."""
    assert coders.Int64().encode(1).hex() == "8000000000000001"
    assert coders.Float64().encode(1.5).hex() == "3ff8000000000000"
    assert coders.Float64().encode_key(-1.5).hex() == "4007ffffffffffff"
    assert coders.Decimal().encode_key(decimal.Decimal("-1.5")).hex() == "007ffffffffffffffececaff"
    assert coders.Msgpack().encode([(1,), {2}]).hex() == "92d5019101d5020102"
    assert coders.Msgpack().encode(2**64) == b"\xc7\x14\x0418446744073709551616"
    assert coder_for(Point).encode(Point(1.0)).hex() == "82a178cb3ff0000000000000a179cb3fe0000000000000"


@pytest.mark.parametrize("value", [np.True_, np.False_])
def test_a_bool_of_numpy_is_a_bool(value: Any) -> None:
    for coder in (coders.Bool(), coders.Msgpack(bool), coders.Msgpack(Any), coders.Msgpack(bool | None)):
        assert coder.decode(coder.encode(value)) is bool(value)
        assert coder.encode(value) == coder.encode(bool(value))
    assert coders.Bool().find_key(value) is bool(value)
    nested = coders.Msgpack(dict[str, list[bool]])
    assert nested.decode(nested.encode({"a": [value, True]})) == {"a": [bool(value), True]}
    for other in (coders.Int64(), coders.Float64(), coders.Utf8(), coders.Msgpack(int), coders.Msgpack(float)):
        with pytest.raises(EncodeError):
            other.encode(value)


def test_nanoseconds_are_refused_rather_than_cut() -> None:
    pandas = pytest.importorskip("pandas")
    whole, fine = (pandas.Timestamp(f"2024-07-01T12:00:00.000001{rest}", tz="UTC") for rest in ("", "001"))
    for coder in (coders.Timestamp(), coders.Msgpack(datetime), coders.Msgpack(Any)):
        assert coder.decode(coder.encode(whole)) == whole.to_pydatetime()
        with pytest.raises(EncodeError, match=r"a time has nanoseconds, .*: round it"):
            coder.encode(fine)
    with pytest.raises(EncodeError, match="nanoseconds"):
        encode_row_key(fine)


@pytest.mark.parametrize("coder", [coders.Int64(), coders.Float64(), coders.Msgpack(Any), coders.Msgpack(float)])
def test_a_duration_of_numpy_is_no_number(coder: Any) -> None:
    with pytest.raises(EncodeError):
        coder.encode(np.timedelta64(5, "ns"))
