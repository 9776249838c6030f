"""What is in a checkpoint store, for the page."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from stateflow.checkpoint import CheckpointStore

#: savepoints that are shown
SAVEPOINTS_MAX = 100


def checkpoints(store: CheckpointStore) -> dict[str, Any]:
    """By operator: partitions that have checkpoints, how many, and when the oldest of the newest was taken: that old
    is what the partition would go back to at most."""
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
