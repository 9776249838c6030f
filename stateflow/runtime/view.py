"""A partition as its replica reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stateflow.runtime.lifecycle import State
from stateflow.types import PartitionId


@dataclass(frozen=True, slots=True)
class DiskView:
    """Disk space that a replica has for its partitions. ``disk``: replicas that name the same one share it, empty:
    unknown; ``disk_free_bytes``: beyond the reserve; ``room_bytes``: limit for its partitions, 0: no limit of its own.
    """

    disk: str = ""
    disk_free_bytes: int = 0
    room_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition on one replica. ``move_id``: the move that warms, fenced or sealed it. ``batch_rate``: batches per
    second. ``bytes``: size of its files, incoming copies included, 0: not measured. ``rows``,
    ``row_bytes``, ``origins``: see :class:`~stateflow.runtime.traffic.Traffic`. ``entries``: see
    :meth:`~stateflow.storage.store.PartitionStore.entries`; None also where the store is not open, or it was not asked
    for.
    """

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
