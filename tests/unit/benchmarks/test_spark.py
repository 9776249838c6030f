"""The record of benchmark T1: its statements about its contestants."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.spark import COLUMNS, NATIVE, OURS, TRANSFORM, TRIVIAL, _record, above_floor_us

SOUND = {"lost": 0, "duplicated": 0, "late": 0, "state_equal": True}


def outcome(per_s: float, **more: Any) -> dict[str, Any]:
    run = {"rows_per_s": [per_s], "warm_up_s": []}
    return {"runs": {"1000": run, "100000": run}, "spark_settings": {}, **more}


def test_time_above_the_floor_is_per_row() -> None:
    assert above_floor_us(500_000, 1_000_000) == pytest.approx(1.0)
    assert above_floor_us(None, 1.0) is None
    assert above_floor_us(1.0, None) is None


def test_ours_are_held_against_rivals_and_floor_and_the_floor_keeps_nothing() -> None:
    outcomes = {
        name: outcome(per_s, correctness=SOUND)
        for name, per_s in {OURS: 500_000, COLUMNS: 800_000, NATIVE: 600_000, TRANSFORM: 8_000}.items()
    }
    record = _record("T1", outcomes | {TRIVIAL: outcome(1_000_000)}, quick=True, seed=1)
    assert record.complete
    met = {target.name: target.met for target in record.targets}
    assert met[f"{OURS}/{TRANSFORM}@100000 keys"]
    assert not met[f"{OURS}/{NATIVE}@1000 keys"]
    assert met[f"{COLUMNS}/{NATIVE}@1000 keys"]
    assert met[f"{COLUMNS}@1000 keys above {TRIVIAL}, µs a row"]
    assert not met[f"{OURS}@1000 keys above {TRIVIAL}, µs a row"]
    assert met[f"{OURS}@100000 keys above {TRIVIAL}, µs a row"]


def test_without_the_floor_its_targets_are_not_measured() -> None:
    record = _record("T1", {OURS: outcome(500_000, correctness=SOUND)}, quick=True, seed=1)
    above = [target.value for target in record.targets if "above" in target.name]
    assert above == [None] * 4
