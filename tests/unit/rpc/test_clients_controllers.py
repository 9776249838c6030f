"""Several controllers: which one is asked next."""

from __future__ import annotations

import pytest

from stateflow.errors import InvalidArgument, NotLeading, StateflowError, Unavailable
from stateflow.rpc.clients import NAMED_MAX, Round, Seen, addresses_of

AWAY = Unavailable("-")


def leads(address: str | None) -> NotLeading:
    return NotLeading("-", leader=address)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ({}, ["a:1", "b:1", "c:1"]),
        ({"a:1": leads("c:1")}, ["a:1", "c:1", "b:1"]),
        ({"a:1": leads("x:1")}, ["a:1", "x:1", "b:1", "c:1"]),
        # b names a dead controller: c used to be skipped
        ({"b:1": leads("a:1")}, ["a:1", "b:1", "c:1"]),
        ({"a:1": leads("b:1"), "b:1": leads("a:1")}, ["a:1", "b:1", "c:1"]),
        ({each: leads(None) for each in ("a:1", "b:1", "c:1")}, ["a:1", "b:1", "c:1"]),
    ],
)
def test_each_is_asked_once_and_who_they_say_leads_first(answers: dict[str, StateflowError], asked: list[str]) -> None:
    turn = Round(["a:1", "b:1", "c:1"], "a:1")
    seen = [turn.asked]
    while turn.go_on(answers.get(turn.asked, AWAY)):
        seen.append(turn.asked)
    assert seen == asked
    assert turn.unled is bool(answers)
    assert turn.asked in ("a:1", "b:1", "c:1")


def test_the_next_round_begins_with_the_one_that_is_said_to_lead() -> None:
    turn = Round(["a:1", "b:1"], "a:1")
    assert turn.go_on(AWAY)
    assert not turn.go_on(leads("a:1"))
    assert turn.asked == "a:1"
    alone = Round(["a:1"], "a:1")
    assert not alone.go_on(AWAY)
    assert alone.asked == "a:1"


def test_leaders_that_controllers_invent_are_not_followed_for_ever() -> None:
    """A controller named a new leader each time it was asked, and so did that one: the round had no end."""
    turn = Round(["a:1", "b:1"], "a:1")
    asked = [turn.asked]
    while turn.go_on(leads(f"new:{len(asked)}")):
        asked.append(turn.asked)
    assert asked == ["a:1", *(f"new:{number}" for number in range(1, NAMED_MAX + 1)), "b:1"]
    assert turn.asked in ("a:1", "b:1")


def test_no_answer_is_older_than_one_before() -> None:
    seen = Seen()
    assert seen.takes(1, 10)
    assert seen.takes(0, 12)  # a controller that does not lead has read as far as it was asked to
    assert seen.takes(1, 11)  # the leader may have skipped records of others
    assert seen.record == 12
    assert seen.takes(2, 8)  # from a ledger that was restored
    assert seen.record == 8
    assert not seen.takes(1, 13)  # a former leader, which was stopped and does not know its successor
    assert (seen.term, seen.record) == (2, 8)


def test_a_list_of_addresses() -> None:
    assert addresses_of("a:1") == ["a:1"]
    assert addresses_of(" a:1, b:2,,a:1,") == ["a:1", "b:2"]
    for wrong in ("", " , ", "a:1,b", "a:1 b:1", "a:1;b:1"):
        with pytest.raises(InvalidArgument):
            addresses_of(wrong)


def test_a_port_that_there_is_not_is_refused() -> None:
    numbers = [0, 9, 7070, 59_999, 60_000, 64_999, 65_499, 65_529, 65_535]
    assert addresses_of(",".join(f"h:{number}" for number in numbers)) == [f"h:{number}" for number in numbers]
    for number in (65_536, 65_540, 65_600, 66_000, 70_000, 99_999, 100_000):
        with pytest.raises(InvalidArgument, match="a port up to 65535"):
            addresses_of(f"h:{number}")
