"""A partition as the replica that has it shows it."""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.runtime.lifecycle import State
from stateflow.types import PartitionId


@dataclass(frozen=True, slots=True)
class PartitionView:
    """``move_id``: of the move that warms, fenced or sealed it. ``batch_rate``: batches a second. ``bytes``: of its
    files, 0 where nobody asked for it."""

    partition: PartitionId
    state: State
    epoch: int
    sequence: int
    move_id: str = ""
    batch_rate: float = 0.0
    bytes: int = 0
