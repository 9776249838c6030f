from __future__ import annotations

import dataclasses
import json

import pytest

from stateflow.demo.result import DemoResult


def test_counts_and_pauses_are_those_of_completed_moves(result: DemoResult) -> None:
    assert len(result.moves) == 24
    assert (result.moves_completed, result.moves_failed) == (23, 1)
    pauses = sorted(move.pause_ms for move in result.moves if move.state == "COMPLETED")
    assert result.pause_ms_max == pauses[-1]
    assert result.pause_ms_median == pauses[11]


def test_the_state_is_read_in_either_case(result: DemoResult) -> None:
    moves = [dataclasses.replace(move, state=move.state.lower()) for move in result.moves]
    assert dataclasses.replace(result, moves=moves).moves_completed == 23


def test_without_a_completed_move_no_pause_is_claimed(result: DemoResult) -> None:
    still = dataclasses.replace(result, moves=[move for move in result.moves if not move.completed])
    assert (still.pause_ms_max, still.pause_ms_median) == (None, None)


def test_summary_has_exactly_the_promised_keys_and_is_json(result: DemoResult) -> None:
    summary = result.summary()
    assert set(summary) == {
        "state_equal", "output_equal", "moves_completed", "moves_failed",
        "pause_ms_max", "pause_ms_median", "rows", "rows_per_s",
    }  # fmt: skip
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_results_are_frozen(result: DemoResult) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.rows = 1  # type: ignore[misc]
