from __future__ import annotations

import pytest

from stateflow import state
from stateflow.errors import DeclarationError, UnknownState
from stateflow.state import Declaration, coder_for, declarations_of


class Base:
    n = state.value(int, default=0)
    log = state.value(list, default=[1])


class Op(Base):
    by_dest = state.map(str, float, name="delays")
    seen = state.set(tuple[str, int])


def test_declarations_are_collected_over_base_classes() -> None:
    found = declarations_of(Op)
    assert list(found) == ["n", "log", "by_dest", "seen"]
    assert found["by_dest"].describe() == {
        "name": "delays",
        "kind": "map",
        "coders": ["utf8", "float64"],
        "tag": found["by_dest"].tag.hex(),
    }
    assert [each.kind for each in found.values()] == ["value", "value", "map", "set"]
    assert [coder.name for coder in found["seen"].coders] == ["tuple[utf8,int64]"]


def test_an_overridden_attribute_is_no_state() -> None:
    class Less(Base):
        n = None

    class Other(Base):
        n = state.value(str)

    assert list(declarations_of(Less)) == ["log"]
    assert declarations_of(Other)["n"].coder.name == "utf8"


def test_reading_a_state_needs_a_key() -> None:
    with pytest.raises(UnknownState, match="'n'"):
        Op().n  # noqa: B018
    assert isinstance(Op.n, Declaration)
    op = Op()
    op.__dict__["n"] = "bound"
    assert op.n == "bound"


def test_a_default_must_fit() -> None:
    with pytest.raises(DeclarationError, match="int64"):
        state.value(int, default="x")  # type: ignore[arg-type]


def test_keys_need_a_deterministic_coder() -> None:
    with pytest.raises(DeclarationError, match="map keys"):
        state.map(list, int)
    with pytest.raises(DeclarationError, match="set members"):
        state.set(tuple)


def test_one_stored_name_is_one_state() -> None:
    class Twice:
        a = state.value(int)
        b = state.value(int, name="a")

    class Same:
        a = b = state.value(int)

    for cls in (Twice, Same):
        with pytest.raises(DeclarationError, match="'a' and 'b'"):
            declarations_of(cls)


@pytest.mark.parametrize("name", ["", "a\0b", 5, "\ud800"])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(DeclarationError):
        state.value(int, name=name)


def test_a_coder_can_be_given() -> None:
    assert Declaration("value", coder_for(int), name="n").tag == declarations_of(Op)["n"].tag
    given = state.value(object, coder=coder_for(float), name="n")
    assert isinstance(given, Declaration)
    assert given.coder.name == "float64"
