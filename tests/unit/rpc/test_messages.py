"""Tests the conversion of positions and views of sources, and what a conversion refuses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import SourceView
from stateflow.reports import AgentReport
from stateflow.rpc import messages
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.messages import message_of, positions_of, positions_to_pb, value_of


def test_positions_cross_by_partition() -> None:
    found = {
        0: Position(4),
        3: Position(-1, event_us=0, event_before_us=-7, known=b"k", client="me"),
        5: Position(0, event_us=9),
    }
    assert positions_of(positions_to_pb(found)) == found
    assert positions_of(positions_to_pb({})) == {}


@pytest.mark.parametrize("newest_us", [None, 0, 70])
def test_one_position_is_that_of_all_that_were_asked(newest_us: int | None) -> None:
    said = positions_to_pb(Position(5, event_us=newest_us))
    assert positions_of(said, [0, 1], 6) == dict.fromkeys((0, 1), Position(5, event_us=newest_us))


@pytest.mark.parametrize(
    "view",
    [
        SourceView("s", 4, 77, 12, -3, False, Session(9, "")),
        SourceView("s", -1, 0, 0, None, True, None),
        SourceView("s", 0, 1, 1, 0),
    ],
)
def test_a_view_of_a_source_crosses(view: SourceView) -> None:
    assert value_of(SourceView, message_of(rpb.SourceView, view, partition=3)) == view


def test_who_a_client_is_stays_with_the_partition() -> None:
    view = SourceView("s", 4, 77, 12, session=Session(9, "a-secret"))
    assert value_of(SourceView, message_of(rpb.SourceView, view, partition=3)).session == Session(9, "")


@dataclass(frozen=True)
class Extended(Session):
    """A value with a field that its message lacks."""

    mood: str = ""


def test_a_field_that_the_message_lacks_is_refused_and_not_dropped() -> None:
    with pytest.raises(
        TypeError, match=r"Extended\.mood would be lost: stateflow\.rpc\.SourceSession has no field 'mood'"
    ):
        message_of(rpb.SourceSession, Extended(1, "a", mood="good"))


def test_a_field_that_is_listed_as_not_sent_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(messages._APART, (Extended, rpb.SourceSession), "mood")
    messages._sending.cache_clear()
    assert message_of(rpb.SourceSession, Extended(1, "a", mood="good")).id == "a"
    messages._sending.cache_clear()


@pytest.mark.parametrize(("kind", "message"), messages._SHAPES, ids=lambda each: each.__name__)
def test_the_conversion_of_every_registered_type_can_be_built(kind: type, message: type) -> None:
    messages._reading(kind, message)
    if kind is not AgentReport:  # only read: controllers send another value
        messages._sending(kind, message)
