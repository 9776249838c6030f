"""Compatibility of releases: which ones talk to each other."""

from __future__ import annotations

import pytest

from stateflow.errors import ReleaseMismatch
from stateflow.release import FIRST, OWN, Release, check_release, release_of

NEXT, LATER = Release("0.3.0", 3, 2), Release("0.4.0", 4, 3)


def test_neighbours_understand_each_other_and_others_do_not() -> None:
    line = [FIRST, OWN, NEXT, LATER]
    for at, one in enumerate(line):
        for other_at, other in enumerate(line):
            assert one.speaks_with(other) is (abs(at - other_at) <= 1), (one, other)


def test_it_is_said_with_each_call() -> None:
    assert release_of(OWN.agent) == OWN
    assert release_of(f"{OWN.agent} grpc-python-asyncio/1.80.0 grpc-c/53.0.0 (linux; chttp2)") == OWN
    for other in ("", "grpc-python/1.80.0", "grpcurl/v1.9", "stateflow/x protocol/a-b", "stateflow/" + "9" * 99):
        assert release_of(other) == FIRST


def test_who_is_to_be_upgraded_is_said() -> None:
    check_release(NEXT)
    with pytest.raises(ReleaseMismatch, match=r"the caller's stateflow 0\.4\.0 and .*: upgrade the server first"):
        check_release(LATER)
    with pytest.raises(ReleaseMismatch, match="upgrade the caller first"):
        check_release(FIRST, NEXT)
