"""Dataclasses, msgspec structs and pydantic models in state, and their permitted changes."""

from __future__ import annotations

import dataclasses
import enum
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Optional

import pytest

from stateflow import state
from stateflow.errors import DeclarationError, DecodeError, EncodeError
from stateflow.state.declare import coder_for
from tests.unit.state.bench import Bench

msgspec = pytest.importorskip("msgspec")
pydantic = pytest.importorskip("pydantic")


@dataclasses.dataclass(frozen=True)
class Point:
    x: int


class Leg(msgspec.Struct, frozen=True):  # type: ignore[misc, name-defined]
    start: str
    miles: float = 1.5
    tags: tuple[str, ...] = ()


class Trip(msgspec.Struct):  # type: ignore[misc, name-defined]
    number: int
    legs: list[Leg] = msgspec.field(default_factory=list)
    first: Optional[Leg] = None  # noqa: UP045


class Frozen(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    model_config = pydantic.ConfigDict(frozen=True)
    name: str
    parent: Optional["Frozen"] = None  # noqa: UP037, UP045


class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    name: str
    age: int = 7
    friends: list[Frozen] = pydantic.Field(default_factory=list)
    born: date | None = pydantic.Field(default=None, alias="bornOn")


class Loose(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Mixed:
    count: int
    mean: float = 0.0
    price: Decimal = Decimal(0)
    on: date | None = None
    any: Any = None
    names: list[str] = dataclasses.field(default_factory=list)
    colour: str = "blue"


@pytest.mark.parametrize(
    ("value", "mutable"),
    [
        (Leg("IAH"), False),
        (Trip(1, [Leg("IAH", 2.0, ("a",)), Leg("JFK")], Leg("EWR")), True),
        (Person(name="a", friends=[Frozen(name="b")], bornOn=date(2000, 1, 1)), True),
        (Frozen(name="a", parent=Frozen(name="b")), False),
        (Mixed(1, 2.5, Decimal("1.5"), date(2020, 1, 1), {"a": [1]}, ["x"]), True),
    ],
)
def test_records_round_trip(value: Any, mutable: bool) -> None:
    coder = coder_for(type(value))
    back = coder.decode(coder.encode(value))
    assert (back, type(back)) == (value, type(value))
    assert coder.encode(back) == coder.encode(value)
    assert (coder.name, coder.mutable) == (f"struct:{type(value).__name__}", mutable)


def test_records_are_changed_in_place() -> None:
    class Op:
        trip = state.value(Trip)
        people = state.map(str, Person)

    bench = Bench(Op)
    bench.op.trip.value = Trip(1)
    bench.op.people["a"] = Person(name="a")
    bench = bench.reopened()
    bench.op.trip.value.legs.append(Leg("IAH"))
    bench.op.people["a"].age = 8
    assert len(bench.commit().puts) == 2
    assert (bench.op.trip.value.legs, bench.op.people["a"].age) == ([Leg("IAH")], 8)


class Aliased(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """A model in which every way to rebuild it by its constructor would give other values."""

    model_config = pydantic.ConfigDict(populate_by_name=True)
    name: str = pydantic.Field(alias="title")
    title: str = pydantic.Field(default="none", alias="heading")
    city: str = pydantic.Field(validation_alias=pydantic.AliasPath("address", "city"))
    address: dict[str, str]
    reads: int = 0
    _notes: list[str] = pydantic.PrivateAttr(default_factory=lambda: ["new"])

    def model_post_init(self, _: Any) -> None:
        self.reads += 1


class Longer(Aliased):
    size: int = pydantic.Field(default_factory=lambda data: len(data["name"]))
    tags: list[str] = pydantic.Field(default_factory=list)


class Rooted(pydantic.RootModel[list[int]]):  # type: ignore[misc, name-defined]
    pass


def test_a_model_is_read_as_it_was_stored() -> None:
    class Op:
        model = state.value(Aliased)

    stored = Aliased(title="Dr", heading="Intro", address={"city": "Rome"})
    stored.city = "Paris"
    stored._notes.append("old")
    bench = Bench(Op)
    bench.op.model.value = stored
    for _ in range(2):
        bench = bench.reopened()
        back = bench.op.model.value
        assert (back.model_dump(), back._notes) == (stored.model_dump(), ["new"])
        assert not bench.commit()
    with pytest.raises(AttributeError):
        back.other  # noqa: B018
    wider = coder_for(Longer).decode(coder_for(Aliased).encode(stored))
    assert (wider.size, wider.tags, wider.reads) == (2, [], 1)
    assert wider.model_fields_set == set(Aliased.model_fields)
    assert coder_for(Rooted).decode(coder_for(Rooted).encode(Rooted([1]))) == Rooted([1])


@pytest.mark.parametrize("type_", [Loose, list[Loose], dataclasses.make_dataclass("Bad", [("x", complex)])])
def test_records_that_cannot_be_stored(type_: Any) -> None:
    for _ in range(2):  # a refused class is not remembered as a good one
        with pytest.raises(DeclarationError):
            coder_for(type_)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Mixed("1"), "count"),  # type: ignore[arg-type]
        (Mixed(True), "count"),
        (Mixed(None), "count"),  # type: ignore[arg-type]
        (Mixed(1, True), "mean"),
        (Mixed(1, 10**400), "mean"),
        (Mixed(1, on=datetime(2020, 1, 1)), "on"),
        (Mixed(1, names=("a",)), "names"),  # type: ignore[arg-type]
        (Trip(1, [Leg("a"), Leg(5)]), "legs.start"),
        (Trip(1, first=Leg("a", "b")), "first.miles"),
        (Trip(1, [5]), "legs"),
        (Trip(1, 5), "legs"),
    ],
)
def test_a_field_holds_what_it_is_declared_as(value: Any, field: str) -> None:
    with pytest.raises(EncodeError) as caught:
        coder_for(type(value)).encode(value)
    assert caught.value.where["field"] == field


def test_ints_are_widened_and_subclasses_stored_as_their_base() -> None:
    coder = coder_for(Mixed)
    back = coder.decode(coder.encode(Mixed(1, 2, 3, colour=Colour.RED)))  # type: ignore[arg-type]
    assert repr(back) == repr(Mixed(1, 2.0, Decimal(3), colour="red"))


@dataclasses.dataclass
class Measured(Mixed):
    unit: str = "m"


class Again(Mixed):
    def doubled(self) -> int:
        return 2 * self.count


class Return(Trip):
    back: str = "JFK"


class Pupil(Person):
    form: int = 1


@pytest.mark.parametrize("value", [Measured(1), Return(1), Pupil(name="a")])
def test_a_subclass_with_more_fields_is_refused(value: Any) -> None:
    base = type(value).__base__
    for declared, given in ((base, value), (list[base], [value]), (base | None, value)):
        with pytest.raises(EncodeError, match=f"fields that {base.__name__}, the declared class, lacks: "):
            coder_for(declared).encode(given)
    assert coder_for(type(value)).decode(coder_for(type(value)).encode(value)) == value
    assert repr(coder_for(Mixed).decode(coder_for(Mixed).encode(Again(1)))) == repr(Mixed(1))


# --- other fields than stored --------------------------------------------------------------------------


def kinds(fields: dict[str, Any]) -> list[Any]:
    """Returns classes named R with these fields, one of each kind. A pair is (type, default)."""
    pairs = {name: each if isinstance(each, tuple) else (each, ...) for name, each in fields.items()}
    plain = [
        (name, type_) if default is ... else (name, type_, dataclasses.field(default=default))
        for name, (type_, default) in pairs.items()
    ]
    struct = [(name, type_) if default is ... else (name, type_, default) for name, (type_, default) in pairs.items()]
    return [
        dataclasses.make_dataclass("R", plain),
        msgspec.defstruct("R", struct),
        pydantic.create_model("R", **pairs),
    ]


def test_fields_come_go_and_widen() -> None:
    for old, new in zip(
        kinds({"a": int, "gone": str, "b": int | None}),
        kinds({"a": float, "b": float | None, "c": (str, "new")}),
        strict=True,
    ):
        data = coder_for(old).encode(old(a=1, gone="x", b=2))
        back = coder_for(new).decode(data)
        assert (repr(back.a), repr(back.b), back.c) == ("1.0", "2.0", "new")
        assert back == new(a=1.0, b=2.0)
        assert coder_for(old).name == coder_for(new).name


@pytest.mark.parametrize(
    ("then", "value", "now"),
    [
        (int, 1, str),
        (str, "1", int),
        (float, 1.5, int),
        (int | None, None, int),
        (bool, True, int),
        (bool, True, float),
        (list, [1], dict),
        (datetime, datetime(2020, 1, 1), date),
        (int, 10**400, float),
        (list, [1], Point),
        (int, 1, list[Point]),
        (list, [1], list[Point]),
    ],
)
def test_any_other_change_is_refused_by_name(then: Any, value: Any, now: Any) -> None:
    for old, new in zip(kinds({"a": then}), kinds({"a": now}), strict=True):
        data = coder_for(old).encode(old(a=value))
        with pytest.raises(DecodeError) as caught:
            coder_for(new).decode(data)
        assert caught.value.where["field"] == "a"
    for old, new in zip(kinds({"a": int}), kinds({"a": int, "b": int}), strict=True):
        with pytest.raises(DecodeError, match="no field 'b'"):
            coder_for(new).decode(coder_for(old).encode(old(a=1)))


def test_the_error_says_where_the_record_is() -> None:
    old, new = (kinds({"a": each})[0] for each in (int, str))
    bench = Bench(type("Op", (), {"r": state.value(old, name="r"), "m": state.map(str, list[old], name="m")}))  # type: ignore[valid-type]
    bench.op.r.value = old(1)
    bench.op.m["x"] = [old(1)]
    bench.commit()
    changed: Any = type("Op", (), {"r": state.value(new, name="r"), "m": state.map(str, list[new], name="m")})  # type: ignore[valid-type]
    again = Bench(changed, bench.store)
    with pytest.raises(DecodeError, match=r"field 'a'.*field=a.*operator=op state=r key=k"):
        again.op.r.value  # noqa: B018
    with pytest.raises(DecodeError, match=r"field=a.*operator=op state=m key=k map_key='x'"):
        again.op.m["x"]
