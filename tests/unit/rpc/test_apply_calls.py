"""Numbered calls of a stream: each ends once, and every sign of life reaches all of them."""

from __future__ import annotations

from stateflow.rpc.apply import Calls


def test_numbers_rise_and_answers_find_who_waits() -> None:
    calls: Calls[str] = Calls()
    assert [calls.begin("a", 0.0), calls.begin("b", 0.0)] == [1, 2]
    assert calls.came(2, last=False, now=0.0) == "b"
    assert calls.came(2, last=True, now=0.0) == "b"
    assert calls.came(2, last=True, now=0.0) is None, "it is over"
    assert (calls.is_open(1), calls.is_open(2), len(calls)) == (True, False, 1)
    assert calls.begin("c", 0.0) == 3, "a number is not used twice"
    assert calls.end(3) == "c"
    assert calls.end_all() == ["a"]
    assert calls.end_all() == []


def test_whatever_comes_is_a_sign_of_life_for_all() -> None:
    calls: Calls[str] = Calls()
    calls.begin("a", 1.0)
    assert calls.heard_at == 1.0
    calls.begin("b", 5.0)
    assert calls.heard_at == 1.0, "the first has waited since then"
    assert calls.came(0, last=False, now=7.0) is None
    assert calls.heard_at == 7.0
    calls.came(2, last=True, now=8.0)
    assert calls.heard_at == 8.0


def test_silence_counts_from_when_something_was_to_come() -> None:
    calls: Calls[str] = Calls()
    calls.end(calls.begin("a", 0.0))
    calls.begin("b", 100.0)
    assert calls.heard_at == 100.0
