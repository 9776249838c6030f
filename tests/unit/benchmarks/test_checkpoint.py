"""C1: a checkpoint that fails, or stores nothing, does not count as one that stalls nothing."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import checkpoint
from stateflow.errors import CheckpointStoreMissing


def bench(root: Path, take: Any) -> checkpoint._Bench:
    """Returns a benchmark whose batches are answered at once, and whose checkpoints ``take`` takes."""
    made: Any = object.__new__(checkpoint._Bench)
    made.root, made.keys, made.random, made.expected = root, 1000, random.Random(1), {}
    made.stream = SimpleNamespace(send=lambda rows: None)
    made.cluster = SimpleNamespace(cluster=SimpleNamespace(checkpoint=take))
    made._saturation = lambda: 1e6
    return made  # type: ignore[no-any-return]


def test_the_checkpoint_during_which_latency_is_measured_must_store_something(tmp_path: Path) -> None:
    def fails(operator: str) -> Any:
        raise CheckpointStoreMissing("the disk is full")

    found = bench(tmp_path, lambda operator: SimpleNamespace(bytes_new=7)).stall(2, 0.0)
    assert len(found["added_p99_ms"]["values"]) == 2
    with pytest.raises(CheckpointStoreMissing, match="the disk is full"):
        bench(tmp_path, fails).stall(2, 0.0)
    with pytest.raises(RuntimeError, match="stored nothing"):
        bench(tmp_path, lambda operator: SimpleNamespace(bytes_new=0)).stall(2, 0.0)


def test_keys_that_were_not_restored_and_those_that_were_never_sent_are_counted_apart(tmp_path: Path) -> None:
    made = bench(tmp_path, None)
    made.expected = {1: 10, 2: 20, 3: 30}
    made.state = {1: 10, 2: 21, 4: 40}  # type: ignore[attr-defined]
    assert made.compare() == (2, 1)
