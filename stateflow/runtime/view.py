"""A partition as the replica that has it shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stateflow.runtime.lifecycle import State
from stateflow.types import PartitionId


@dataclass(frozen=True, slots=True)
class DiskView:
    """What a replica has for its partitions. ``disk``: replicas that name the same one share it, empty: nobody asked;
    ``disk_free_bytes``: beyond the reserve; ``room_bytes``: that its partitions may take, 0: no limit of its own."""

    disk: str = ""
    disk_free_bytes: int = 0
    room_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartitionView:
    """``move_id``: of the move that warms, fenced or sealed it. ``batch_rate``: batches a second. ``bytes``: of its
    files, copies on their way in included, 0 where nobody asked for it. ``rows``, ``row_bytes``, ``origins``: see
    :class:`~stateflow.runtime.traffic.Traffic`. ``entries``: see
    :meth:`~stateflow.storage.store.PartitionStore.entries`; None, too, where it is not open or nobody asked."""

    partition: PartitionId
    state: State
    epoch: int
    sequence: int
    move_id: str = ""
    batch_rate: float = 0.0
    bytes: int = 0
    rows: int = 0
    row_bytes: int = 0
    origins: Mapping[str, int] = field(default_factory=dict)
    entries: int | None = None
