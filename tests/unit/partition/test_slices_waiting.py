"""Limits on waiting batches: how much may wait at a replica that cannot be applied yet."""

from __future__ import annotations

import pytest

from stateflow.errors import InvalidArgument, Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition.slices import Waiting


def test_one_caller_may_have_half_of_it() -> None:
    waiting = Waiting(100)
    waiting.admit(30, 0, "s")
    waiting.admit(20, 30, "s")
    with pytest.raises(InvalidArgument, match="more than 50 bytes") as caught:
        waiting.admit(1, 50, "s")
    assert caught.value.where["source"] == "s"
    assert waiting.bytes == 50, "what was refused does not wait"


def test_all_of_them_have_no_more_than_all_of_it() -> None:
    waiting, before = Waiting(100), LIMIT_HITS.count("waiting_bytes")
    for _ in range(2):
        waiting.admit(50, 0, "s")
    with pytest.raises(Unavailable, match="100 bytes"):
        waiting.admit(1, 0, "another")
    assert LIMIT_HITS.count("waiting_bytes") == before + 1
    waiting.let_go(50)
    waiting.admit(1, 0, "another")
    assert waiting.bytes == 51
