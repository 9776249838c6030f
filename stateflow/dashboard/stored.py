"""The contents of a checkpoint store, for the page."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from stateflow.checkpoint import CheckpointStore

#: limit of savepoints shown
SAVEPOINTS_MAX = 100


def checkpoints(store: CheckpointStore) -> dict[str, Any]:
    """Returns counts and times of checkpoints by operator, and the names of savepoints.

    ``oldest_us``: the time of the oldest among the partitions' newest checkpoints; a partition would go back at most to
    that time.
    """
    newest: dict[str, dict[int, int]] = defaultdict(dict)
    counts: dict[str, int] = defaultdict(int)
    for found in store.catalog.checkpoints():
        operator, number = found.partition.operator, found.partition.partition
        counts[operator] += 1
        newest[operator][number] = max(newest[operator].get(number, 0), found.modified_us)
    return {
        "operators": [
            {
                "operator": operator,
                "checkpoints": counts[operator],
                "partitions": len(times),
                "oldest_us": min(times.values()),
                "newest_us": max(times.values()),
            }
            for operator, times in sorted(newest.items())
        ],
        "savepoints": sorted(store.savepoints())[:SAVEPOINTS_MAX],
    }
