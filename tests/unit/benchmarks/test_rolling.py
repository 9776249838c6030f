"""ROLLING: a micro-batch that fails or is begun again is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stateflow.spark
from benchmarks import rolling


class Frame:
    """A frame of one output row, and whatever it becomes on the way to a running query."""

    def __init__(self) -> None:
        self.keep: Any = None
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return self if name in ("readStream", "writeStream") else lambda *_: self

    def foreachBatch(self, keep: Any) -> Frame:
        self.keep = keep
        return self

    def collect(self) -> list[Any]:
        if self.fails:
            raise RuntimeError("a task failed")
        return [SimpleNamespace(k=1, n=1)]

    def exception(self) -> None:
        return None


def test_a_micro_batch_that_is_begun_again_is_counted_though_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = Frame()
    monkeypatch.setattr(stateflow.spark, "apply_operator", lambda *_, **__: frame)
    with rolling.query_of(frame, tmp_path, "cluster") as query:
        frame.keep(frame, 0)
        assert query.failed_batches() == 0
        frame.fails = True
        with pytest.raises(RuntimeError, match="a task failed"):
            frame.keep(frame, 1)
        frame.fails = False
        frame.keep(frame, 1)
        assert query.failed_batches() == 1
        assert list(query.ended()) == [0, 1]


@pytest.mark.parametrize(("error", "failed"), [("a micro-batch was given up", 1), (None, None)])
def test_a_query_that_has_ended_has_a_failed_micro_batch(error: str | None, failed: int | None) -> None:
    spark = SimpleNamespace(exception=lambda: error, recentProgress=[])
    query = rolling.Query(spark, Counter(), [0, 1], [(0, 1.0)])
    figures: dict[str, Any] = {}
    with pytest.raises(TimeoutError), rolling._noting_its_end(query, figures):
        raise TimeoutError("not all rows were read, or a replica did not restart")
    assert figures.get("failed_batches") == failed
