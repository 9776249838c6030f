"""The error tree: stable codes, one line each, the same class on the other side of a wire."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow import errors
from stateflow.errors import (
    TRACEBACKS,
    Busy,
    LeaseLost,
    LocalMisuse,
    Moved,
    NotLeading,
    NotOwner,
    OperatorFailed,
    PositionGap,
    RemoteCondition,
    StaleEpoch,
    StandbyMissing,
    StateDamaged,
    StateflowError,
    Unavailable,
    WriteUncertain,
    from_wire,
    is_on,
)


def _tree(cls: type[StateflowError]) -> list[type[StateflowError]]:
    return [cls, *(each for child in cls.__subclasses__() for each in _tree(child))]


ALL = [cls for cls in _tree(StateflowError) if cls.__module__ == "stateflow.errors"]


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in ALL]
    assert len(set(codes)) == len(codes) > 40
    assert all("code" in vars(cls) for cls in ALL)
    assert all(code.isascii() and code.replace("_", "").islower() for code in codes)


def test_codes_that_users_match_on_never_change() -> None:
    assert {cls.__name__: cls.code for cls in (StaleEpoch, NotOwner, Moved, PositionGap, OperatorFailed)} == {
        "StaleEpoch": "stale_epoch",
        "NotOwner": "not_owner",
        "Moved": "moved",
        "PositionGap": "position_gap",
        "OperatorFailed": "operator_failed",
    }


@pytest.mark.parametrize(
    ("text", "wanted"), [("", False), ("0", False), ("false", False), ("No", False), ("OFF", False), ("1", True)]
)
def test_tracebacks_are_switched_as_settings_are(text: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACEBACKS, text)
    assert is_on(TRACEBACKS) is wanted


def test_a_taken_code_is_refused() -> None:
    with pytest.raises(TypeError, match="'locked' is taken by Locked"):
        type("Other", (StateflowError,), {"code": "locked"})
    assert StateflowError.registry["locked"] is errors.Locked


def test_a_subclass_without_a_code_is_refused() -> None:
    with pytest.raises(TypeError, match="is taken by NullKey"):
        type("Child", (errors.NullKey,), {})


def test_misuse_and_remote_conditions_are_separate() -> None:
    for cls in ALL:
        assert not (issubclass(cls, LocalMisuse) and issubclass(cls, RemoteCondition)), cls


def test_only_conditions_that_pass_by_themselves_are_retryable() -> None:
    assert {cls for cls in ALL if cls.retryable} == {
        Unavailable,
        Busy,
        NotLeading,
        WriteUncertain,
        NotOwner,
        Moved,
        LeaseLost,
        StandbyMissing,
        StateDamaged,
    }


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (StateflowError("it broke"), "error: it broke"),
        (NotOwner("not here", remedy="refresh"), "not_owner: not here: refresh"),
        (
            StaleEpoch("too old", remedy="read again", operator="Delay", partition=3),
            "stale_epoch: too old (operator=Delay partition=3): read again",
        ),
        (Unavailable("no answer", address="a:1", owner=None), "unavailable: no answer (address=a:1)"),
    ],
)
def test_str_is_code_what_where_remedy(error: StateflowError, line: str) -> None:
    assert str(error) == line


@pytest.mark.parametrize("cls", ALL)
def test_str_is_one_line_whatever_a_user_put_in(cls: type[StateflowError]) -> None:
    error = cls("first\nsecond\r\nthird", remedy="do\nthis", operator="a\nb", traceback="\nTraceback\n  File …")
    assert len(str(error).splitlines()) == 1
    assert str(from_wire(error.to_wire())) == str(error)


def test_the_users_traceback_is_kept_and_shown_where_tracebacks_are() -> None:
    error = OperatorFailed("process() raised", key="'k'", traceback="\nTraceback (most recent call last):\n  boom\n")
    for each in (error, from_wire(error.to_wire())):
        assert "boom" in each.where["traceback"]
        assert "boom" not in str(each)
        assert any("boom" in note for note in each.__notes__)


@pytest.mark.parametrize("cls", ALL)
def test_wire_round_trip_keeps_class_and_text(cls: type[StateflowError]) -> None:
    error = cls("what", remedy="remedy", operator="Delay", partition=3, epoch=7)
    wire = json.loads(json.dumps(error.to_wire()))
    again = from_wire(wire)
    assert type(again) is cls
    assert (str(again), again.what, again.remedy) == (str(error), "what", "remedy")
    assert again.where == {"operator": "Delay", "partition": "3", "epoch": "7"}
    assert again.to_wire() == wire


names = st.text("abcdefgh_", min_size=1, max_size=8).filter(lambda n: n not in ("what", "remedy", "self"))


@given(st.text(), st.text(), st.dictionaries(names, st.text() | st.integers() | st.none() | st.floats()))
def test_wire_round_trip_of_any_text(what: str, remedy: str, where: dict[str, Any]) -> None:
    error = PositionGap(what, remedy=remedy, **where)
    wire = error.to_wire()
    assert set(wire["where"]) == {key for key, value in where.items() if value is not None}
    assert from_wire(wire).to_wire() == wire
    assert str(from_wire(wire)) == str(error)


def test_a_code_of_a_newer_program_comes_back_as_the_root() -> None:
    again = from_wire({"code": "not_yet_invented", "what": "w", "remedy": "r", "where": {}})
    assert type(again) is StateflowError
    assert again.what == "w"


def test_errors_survive_being_copied_between_processes() -> None:
    """Errors survive a copy by ``__reduce__``, as worker pools make it."""
    error = Moved("went", remedy="send it there", owner="edge-0", epoch=4)
    again = copy.copy(error)
    assert type(again) is Moved
    assert str(again) == str(error)


def test_an_error_with_constructor_arguments_of_its_own_comes_back() -> None:
    class Special(StateflowError):
        code = "special_for_this_test"

        def __init__(self, number: int) -> None:
            super().__init__(f"number {number}", number=number)

    try:
        again = from_wire(Special(4).to_wire())
        assert type(again) is Special
        assert again.where == {"number": "4"}
    finally:
        del StateflowError.registry["special_for_this_test"]
