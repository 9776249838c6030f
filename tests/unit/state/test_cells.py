from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from stateflow.errors import DecodeError, EncodeError, NullKey, UnsupportedKeyType
from stateflow.state import cells


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**21, 2**40])
def test_varints_round_trip(number: int) -> None:
    data = b"x" + cells.varint(number) + b"y"
    assert cells.read_varint(data, 1) == (number, len(data) - 1)


@pytest.mark.parametrize("key", [b"", b"k", b"k" * 127, b"k" * 128, b"k" * 70_000])
@pytest.mark.parametrize("namespace", [b"", b"w" * 200])
def test_addresses_split(key: bytes, namespace: bytes) -> None:
    address = cells.CELL + b"8 bytes!" + cells.row_part(key, namespace) + b"entry"
    assert cells.split_address(address) == (key, namespace, b"entry")


def test_a_cut_address_is_a_decode_error() -> None:
    with pytest.raises(DecodeError):
        cells.split_address(cells.CELL + b"8 bytes!" + b"\x05abc")


def test_the_address_of_a_cell_stays() -> None:
    """Addresses of cells are stored by released versions, and must never change."""
    assert cells.tag_of("n", "value", ("int64",)).hex() == "ded00215e1e95d9a"
    assert cells.row_part(cells.encode_row_key("N1")).hex() == "03734e3100"
    assert cells.encode_row_key((1, "a")).hex() == "28698000ff00ff00ff00ff00ff00ff01000073610000"


def test_tags_tell_states_apart() -> None:
    tags = {
        cells.tag_of("n", "value", ("int64",)),
        cells.tag_of("m", "value", ("int64",)),
        cells.tag_of("n", "set", ("int64",)),
        cells.tag_of("n", "value", ("float64",)),
        cells.tag_of("n", "map", ("int64", "float64")),
    }
    assert len(tags) == 5
    assert {len(tag) for tag in tags} == {8}


def test_stored_values_have_a_version() -> None:
    assert cells.unpack_cell(cells.pack_cell(b"abc")) == b"abc"
    assert cells.unpack_cell(b"\x81" + (77).to_bytes(8, "big") + b"abc") == b"abc"
    assert cells.unpack_cell_with_expiry(b"\x81" + (77).to_bytes(8, "big") + b"abc") == (b"abc", 77)
    assert cells.unpack_cell_with_expiry(b"\x01abc") == (b"abc", None)


@pytest.mark.parametrize("data", [b"", b"\x02abc", b"\x82abcdefghi", b"\x81abc", b"\x00"])
def test_newer_and_cut_values_are_decode_errors(data: bytes) -> None:
    with pytest.raises(DecodeError):
        cells.unpack_cell(data)


def test_range_end() -> None:
    assert cells.range_end(b"ca") == b"cb"
    assert cells.range_end(b"c\xff\xff") == b"d"


LOOKALIKES = [
    *(
        "1",
        1,
        1.0,
        True,
        Decimal(1),
        b"1",
        "",
        b"",
        (),
        ("",),
        ((),),
        ("1",),
        (1,),
        (True,),
        ("a", "b"),
        ("a\x00", "b"),
    ),
    *(("a", "\x00b"), ("a\x00\x00b",), (("a",), "b"), ("a", ("b",)), date(2020, 1, 1), datetime(2020, 1, 1)),
    *(datetime(2020, 1, 1, tzinfo=UTC), UUID(int=1), -1, 0.5, Decimal("0.5"), "ab", "a\x00\x00b", False, 0),
]


def test_keys_of_different_types_never_collide() -> None:
    assert len({cells.encode_row_key(key) for key in LOOKALIKES}) == len(LOOKALIKES)


@pytest.mark.parametrize("key", LOOKALIKES)
def test_row_keys_come_back(key: Any) -> None:
    back = cells.decode_row_key(cells.encode_row_key(key))
    assert (back, type(back)) == (key, type(key))


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (None, NullKey),
        (("a", None), NullKey),
        (float("nan"), EncodeError),
        (float("inf"), EncodeError),
        (Decimal("NaN"), EncodeError),
        (2**63, EncodeError),
        ("\ud800", EncodeError),
        ((1, float("nan")), EncodeError),
        (frozenset({1}), UnsupportedKeyType),
        (1j, UnsupportedKeyType),
        ([1], UnsupportedKeyType),
    ],
)
def test_keys_that_cannot_be_stored(key: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        cells.encode_row_key(key)


@pytest.mark.parametrize("data", [b"", b"z", b"i\x01", b"s\xff", b"(ab", b"u\x01", b"m\x02"])
def test_damaged_keys_are_decode_errors(data: bytes) -> None:
    with pytest.raises(DecodeError):
        cells.decode_row_key(data)
