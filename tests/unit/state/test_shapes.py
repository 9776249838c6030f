"""Types of state: which values fit one, what they become, and how stored values read under another type."""

from __future__ import annotations

import dataclasses
import enum
import fractions
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Optional, Union
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pytest

from stateflow import state
from stateflow.errors import DeclarationError, EncodeError
from stateflow.state import coder_for
from stateflow.state.shapes import Verdict, signature_of, spelled, verdict
from tests.unit.state.bench import Bench

BIG = 2**60 + 1  # no float holds it


class Colour(enum.StrEnum):
    RED = "red"


class Shade(str, enum.Enum):  # noqa: UP042 - what str() calls it is not what it is
    DARK = "dark"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Node:
    names: list[str] = dataclasses.field(default_factory=list)
    below: list[Node] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (Optional[int], "x"),  # noqa: UP045
        (int | None, 5.0),
        (int | None, True),
        (float | None, BIG),
        (int | str, 1.5),
        (list[int] | dict[str, int], [1, "x"]),
        (date | None, datetime(2020, 1, 1)),
        (bool | None, 1),
        (list, 5),
        (list, (1, 2)),
        (dict, [1]),
        (set, frozenset({1})),
        (frozenset, {1}),
        (tuple, [1]),
        (bytearray, b"a"),
        (list[int], ["x"]),
        (list[int], [1, None]),
        (list[float], [BIG]),
        (list[float], [10**400]),
        (list[float], [fractions.Fraction(1, 3)]),
        (list[Decimal], [1.5]),
        (list[list[str]], [["a"], [1]]),
        (set[str], {1}),
        (frozenset[int], frozenset({"a"})),
        (dict[str, int], {"a": "b"}),
        (dict[str, int], {1: 1}),
        (list[tuple[int, str]], [(1,)]),
        (list[tuple[int, str]], [("a", 1)]),
        (list[tuple[int, ...]], [(1, "a")]),
        (tuple[str, list[int]], ("a", ["x"])),
        (np.ndarray, [1, 2]),
        (np.ndarray, 5),
        (npt.NDArray[np.float64], np.array([1, 2])),
        (dict[str, npt.NDArray[np.floating[Any]]], {"a": np.array(["x"])}),
        (Node, Node(names=["a", 1])),  # type: ignore[list-item]
        (Node, Node(below=[Node(names=[1])])),  # type: ignore[list-item]
        (Node, Node(below={})),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused(type_: Any, value: Any) -> None:
    with pytest.raises(EncodeError):
        coder_for(type_).encode(value)


@pytest.mark.parametrize(
    ("type_", "value", "back"),
    [
        (int | None, None, None),
        (int | None, Level.HIGH, 3),
        (int | None, np.int64(7), 7),
        (float | None, 3, 3.0),
        (float | None, np.float32(0.1), float(np.float32(0.1))),
        (float | None, fractions.Fraction(1, 2), 0.5),
        (float | Decimal, BIG, Decimal(BIG)),
        (int | float, 3, 3),
        (float | int, Level.HIGH, 3),
        (float | int | None, np.int64(5), 5),
        (Decimal | int, Level.HIGH, 3),
        (list[float | int], [Level.HIGH, np.float64(2.0)], [3, 2.0]),
        (str | list[int] | None, [1], [1]),
        (list[int] | dict[str, int] | None, {"a": 2}, {"a": 2}),
        (list[int] | list[str], ["a"], ["a"]),
        (list, [1, "a", None], [1, "a", None]),
        (list[Any], [1, "a"], [1, "a"]),
        (list[float], [1, 2.5, -0.0], [1.0, 2.5, -0.0]),
        (list[Decimal], [1, Decimal("1.50")], [Decimal(1), Decimal("1.50")]),
        (list[int], [2**70, True + 1], [2**70, 2]),
        (list[str], [Colour.RED, Shade.DARK], ["red", "dark"]),
        (str | None, Shade.DARK, "dark"),
        (list, [Shade.DARK], ["dark"]),
        (list[bytes], [bytearray(b"a"), b"b"], [b"a", b"b"]),
        (dict[float, list[int]], {1: [2]}, {1.0: [2]}),
        (set[float], {1, 2.5}, {1.0, 2.5}),
        (list[datetime], [datetime(2020, 1, 1, tzinfo=UTC)], [datetime(2020, 1, 1, tzinfo=UTC)]),
        (list[Any], [datetime(2020, 1, 1)], [datetime(2020, 1, 1)]),
        (list[UUID | date], [UUID(int=1), date(2020, 1, 1)], [UUID(int=1), date(2020, 1, 1)]),
        (list[tuple[float, str]], [(1, "a")], [(1.0, "a")]),
        (list[tuple[Any, ...]], [(1, "a"), ()], [(1, "a"), ()]),
        (Any, {"a": [1]}, {"a": [1]}),
        (None, None, None),
        (Node, Node(["a"], [Node(["b"])]), Node(["a"], [Node(["b"])])),
    ],
)
def test_what_fits_comes_back(type_: Any, value: Any, back: Any) -> None:
    coder = coder_for(type_)
    found = coder.decode(coder.encode(value))
    assert repr(found) == repr(back)


def test_what_fits_as_it_is_is_not_copied() -> None:
    for type_, value in ((list[int], [1] * 3), (dict[str, float], {"a": 1.0}), (list, [1]), (set[str], {"a"})):
        assert coder_for(type_)._shape.lower(value) is value


def test_arrays_of_the_declared_items_fit() -> None:
    several = (npt.NDArray[np.float32 | np.float64], npt.NDArray[Union[np.float32, np.float64]])  # noqa: UP007
    for type_ in (np.ndarray, npt.NDArray[np.float64], npt.NDArray[np.floating[Any]], npt.NDArray[Any], *several):
        coder = coder_for(type_)
        assert coder.decode(coder.encode(np.array([1.5]))).tolist() == [1.5]


@pytest.mark.parametrize("item", [np.longlong, np.ulonglong, np.int64, np.intc, np.uint8, np.integer, np.int_])
def test_an_array_that_was_read_fits_again(item: Any) -> None:
    """An array that was read fits again, though numpy returns one of two integer types of equal width for both."""
    coder = coder_for(npt.NDArray[item])
    array = np.array([1, 2], np.ulonglong if item is np.integer else item)
    for each in (array, array.astype(array.dtype.newbyteorder(">"))):
        back = coder.decode(coder.encode(each))
        assert coder.decode(coder.encode(back)).tolist() == [1, 2]
    for other in (np.array([1.5]), np.array([1], np.int16)):
        if not issubclass(other.dtype.type, item):
            with pytest.raises(EncodeError, match=f"an array of {other.dtype} instead of one of {item.__name__}"):
                coder.encode(other)


def test_what_has_the_name_of_what_is_declared_is_told_apart() -> None:
    other = type("UUID", (), {})
    with pytest.raises(EncodeError, match=r"test_shapes\.UUID instead of UUID"):
        coder_for(list[UUID]).encode([other()])


@pytest.mark.parametrize(
    ("type_", "make"),
    [
        (list[datetime], lambda moment: [moment]),
        (dict[str, datetime], lambda moment: {"a": moment}),
        (tuple[int, datetime], lambda moment: (1, moment)),
        (datetime | None, lambda moment: moment),
        (dataclasses.make_dataclass("Stop", [("at", datetime)]), None),
    ],
)
def test_a_datetime_without_a_zone_is_refused_at_every_level(type_: Any, make: Any) -> None:
    coder = coder_for(type_)
    make = make or type_
    coder.encode(make(datetime(2020, 1, 1, tzinfo=UTC)))
    with pytest.raises(EncodeError, match=r"a datetime without a time zone does not name an instant.*: attach one"):
        coder.encode(make(datetime(2020, 1, 1)))


def test_a_default_is_checked_and_an_error_says_where_and_what() -> None:
    with pytest.raises(DeclarationError, match="the default 5 does not fit list"):
        state.value(list, default=5)

    class Op:
        counts = state.map(str, dict[str, int])

    bench = Bench(Op)
    bench.op.counts["m"] = {"a": 1, "b": "x"}
    with pytest.raises(
        EncodeError,
        match=r"a value of type dict does not fit dict\[str, int\]: str instead of int.*state=counts key=k map_key='m'",
    ):
        bench.commit()


# --- one type after another ----------------------------------------------------------------------------


def record(**fields: Any) -> type:
    """Makes a dataclass with these fields. A pair is (type, default)."""
    made = [(n, t[0], dataclasses.field(default=t[1])) if isinstance(t, tuple) else (n, t) for n, t in fields.items()]
    return dataclasses.make_dataclass("R", made)


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        (list, dict, Verdict.CHANGED),
        (Optional[int], set, Verdict.CHANGED),  # noqa: UP045
        (list[int], list[str], Verdict.CHANGED),
        (list, list[int], Verdict.CHANGED),
        (Any, list, Verdict.CHANGED),
        (dict[str, float], dict[str, str], Verdict.CHANGED),
        (dict[str, float], dict[str, int], Verdict.CHANGED),
        (int | str, int | None, Verdict.CHANGED),
        (list[tuple[int, str]], list[tuple[int, ...]], Verdict.CHANGED),
        (list[tuple[int, str]], list[tuple[int, str, int]], Verdict.CHANGED),
        (npt.NDArray[np.float64], npt.NDArray[np.int64], Verdict.CHANGED),
        (record(a=int), record(a=str), Verdict.CHANGED),
        (record(a=int), record(a=int, b=int), Verdict.CHANGED),
        (record(a=list[int]), record(a=list[str]), Verdict.CHANGED),
        (record(a=list[int]), record(a=list[float]), Verdict.CHANGED),  # elements inside a record are not widened
        (list[record(a=int)], list[record(a=str)], Verdict.CHANGED),  # type: ignore[misc]
        (list[int], list[float], Verdict.WIDER),
        (dict[str, int], dict[str, Decimal], Verdict.WIDER),
        (int | None, float | None, Verdict.WIDER),
        (list[dict[int, int]], list[dict[int, float]], Verdict.WIDER),
        (list[int], list[int], Verdict.KEPT),
        (list[int], list, Verdict.KEPT),
        (list[int], Any, Verdict.KEPT),
        (int | None, int | str | None, Verdict.KEPT),
        (int | None, None | int, Verdict.KEPT),
        (list[int] | None, list | dict | None, Verdict.KEPT),
        (npt.NDArray[np.float64], np.ndarray, Verdict.KEPT),
        (record(a=int, gone=str), record(a=float, b=(str, "x")), Verdict.KEPT),
        (record(a=int | None), record(a=Decimal | None), Verdict.KEPT),
        (list[record(a=int)], list[record(a=float)], Verdict.KEPT),  # type: ignore[misc]
        (Node, Node, Verdict.KEPT),
    ],
)
def test_what_stored_values_are_under_another_type(was: Any, now: Any, expected: Verdict) -> None:
    assert verdict(signature_of(was), signature_of(now)) is expected


@pytest.mark.parametrize("type_", [list[int], dict[str, tuple[int, ...]], int | None, Node, tuple[str, list[int]]])
def test_a_verdict_of_kept_holds_for_what_is_read(type_: Any) -> None:
    assert verdict(signature_of(type_), signature_of(type_)) is Verdict.KEPT
    assert "any" not in spelled(signature_of(type_))


def test_types_are_spelled_as_they_are_declared() -> None:
    declared = [list[int], dict[str, tuple[int, ...]], int | None, list, np.ndarray, record(a=list[str])]
    spellings = ["list[int]", "dict[str, tuple[int, ...]]", "int | None", "list", "ndarray", "R(a: list[str])"]
    assert [spelled(signature_of(type_)) for type_ in declared] == spellings
    assert spelled(signature_of(datetime | None)) == "datetime | None"
    assert coder_for(list[datetime]).decode(coder_for(list[datetime]).encode([datetime(2020, 1, 1, tzinfo=UTC)]))
