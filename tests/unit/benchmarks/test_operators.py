"""Operators of the benchmarks: one that is measured beside another does the same work, and its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import operators
from benchmarks.operators import KEPT_S, SILENT_S, CountSum, CountSumTimed
from stateflow.testing import OperatorHarness

ROWS = [{"k": number % 3, "v": 1 + number / 4} for number in range(12)]


def test_a_timer_and_a_state_that_expires_change_neither_outputs_nor_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(operators, "time", SimpleNamespace(time_ns=lambda: int(now_s[0] * 1e9)))
    with OperatorHarness(CountSum) as plain, OperatorHarness(CountSumTimed) as timed:
        assert timed.send(ROWS) == plain.send(ROWS)
        assert timed.state(1).last.value == ROWS[10]["v"]
        assert timed.advance_processing_time(SILENT_S) == []
        assert timed.state(1).last.value == 0.0, "its timer has fired"
        now_s[0] = 10 * KEPT_S
        assert timed.send(ROWS) == plain.send(ROWS)
        assert timed.state(1).last.value == ROWS[10]["v"]
        assert timed.advance_processing_time(KEPT_S) == []
        assert timed.state(1).last.value == 0.0, "it has expired, long before its timer"
        assert timed.state(1).figures.value == plain.state(1).figures.value == (8, 19.0)
