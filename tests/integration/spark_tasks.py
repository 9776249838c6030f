"""Operator tasks that tell while they are at work. Spark's Python workers import this module by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stateflow.spark.task import OperatorTask


@dataclass(frozen=True, slots=True)
class TellingTask(OperatorTask):
    """A task that keeps a file named by its process id in ``told`` while it is at work."""

    told: str = ""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine = Path(self.told) / str(os.getpid())
        mine.touch()
        try:
            yield from OperatorTask.__call__(self, batches)
        finally:
            mine.unlink()
