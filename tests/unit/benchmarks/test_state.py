"""P1: states are compared with sums that no operator computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import state
from benchmarks.operators import CountSum, CountSumColumns


@pytest.mark.parametrize("operator", [CountSum, CountSumColumns])
def test_the_sums_are_those_of_the_operators(operator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "VECTOR_ROWS", 200)
    _, content = state._direct(operator, 300, 2, 7, tmp_path)
    assert content == state._sums(300, 2, 7)
    assert len(content) == 4


@pytest.mark.parametrize("wrong", [False, True])
def test_two_operators_that_are_wrong_in_the_same_way_are_not_equal_to_the_sums(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def direct(operator: Any, keys: int, batches: int, seed: int, directory: Path) -> Any:
        right = state._sums(keys, batches, seed)
        return state.spread([1.0]), {**right, 0: (-1, 0.0)} if wrong else right

    monkeypatch.setattr(state, "VECTOR_ROWS", 200)
    monkeypatch.setattr(state, "_direct", direct)
    record = state.run("P1", quick=True, seed=1, only=["vectorised"])
    assert record.correctness.state_equal is not wrong
    assert record.complete is not wrong
    assert record.correctness.inapplicable == ("lost", "duplicated", "late")
