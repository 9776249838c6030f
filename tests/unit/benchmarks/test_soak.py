"""SOAK: what could not be measured is None, so that the record can be written."""

from __future__ import annotations

from benchmarks import soak


def test_a_load_of_which_nothing_was_answered_has_no_latency() -> None:
    assert soak._behind_s({}) is None
    assert soak._behind_s({"latency_ms": {}}) is None
    assert soak._behind_s({"latency_ms": {"max": 1500.0}}) == 1.5
