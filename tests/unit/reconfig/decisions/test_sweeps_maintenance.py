"""Maintenance of nodes: when it may begin, and until when it lasts."""

from __future__ import annotations

import pytest

from reconfig.decisions.sweeps import Maintenance, ordered
from stateflow.errors import InMaintenance, InvalidArgument

NOW = 10**15


def test_it_ends_by_itself_or_by_command() -> None:
    short = ordered("a", NOW, 60.0, "", {})
    assert short == Maintenance(NOW, NOW + 60_000_000)
    assert (short.lasts(NOW + 59_000_000), short.lasts(NOW + 60_000_000)) == (True, False)
    assert ordered("a", NOW, 0.0, "", {}).lasts(2 * NOW)


def test_never_two_of_a_set() -> None:
    known = {"a": ordered("a", NOW, 60.0, "rack-1", {}), "b": ordered("b", NOW, 0.0, "", {})}
    with pytest.raises(InMaintenance, match="a is in maintenance, and the set rack-1 allows only one"):
        ordered("c", NOW, 0.0, "rack-1", known)
    assert ordered("c", NOW, 0.0, "rack-2", known).one_of == "rack-2"
    assert ordered("c", NOW, 0.0, "", known), "of no set"
    assert ordered("a", NOW, 5.0, "rack-1", known).until_us == NOW + 5_000_000, "its own is replaced"
    assert ordered("c", NOW + 60_000_000, 0.0, "rack-1", known), "that one is over"


@pytest.mark.parametrize("for_s", [-1.0, float("nan"), float("inf"), 1e12])
def test_what_is_no_length_of_time(for_s: float) -> None:
    with pytest.raises(InvalidArgument):
        ordered("a", NOW, for_s, "", {})
