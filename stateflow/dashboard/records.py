"""Contents of the ledger and of the checkpoint store for the page: batches, items found by a search, checkpoints."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from stateflow.checkpoint import CheckpointStore
from stateflow.ledger import Board, Ledger, Record

# -- Checkpoint store ------------------------------------------------------------------------------------------------

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


# -- Ledger ----------------------------------------------------------------------------------------------------------

#: batches shown, and batches read, newest first: most are reconfigurations, which the page shows elsewhere
BATCHES_MAX, LOOKED_AT = 30, 300
#: newest records that a search reads, and records found that it shows
SEARCHED, FOUND_MAX = 5000, 200
#: characters shown of a record's payload
PAYLOAD_MAX = 2000
OVER = ("DONE", "FAILED", "CANCELLED")
RECONFIGURATIONS = "reconfiguration/"


class Records:
    """The ledger as the page reads it. Used by several threads.

    Args:
        url: of an existing ledger; it is opened at first use.
    """

    def __init__(self, url: str, author: str) -> None:
        self._ledger = Ledger(url, author=author, create=False)
        self.board = Board(self._ledger)
        self._over: dict[str, dict[str, Any]] = {}  # by bid, with their counts, which no longer change

    def close(self) -> None:
        self._ledger.close()

    def batches(self) -> list[dict[str, Any]]:
        """Returns batches with all their counts, newest first, without reconfigurations.

        Costs one query, and three more for each batch that has not ended.
        """
        rows = [row for row in self.board.batches(limit=LOOKED_AT) if not row["bid"].startswith(RECONFIGURATIONS)]
        found = [self._known(row) or self.board.batch(row["bid"]) for row in rows[:BATCHES_MAX]]
        self._over = {batch["bid"]: batch for batch in found if batch["status"] in OVER}
        return found

    def _known(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a batch kept from before, if it is unchanged: it may have been retried, and have ended once more
        since."""
        batch = self._over.get(row["bid"])
        return batch if batch is not None and all(batch[each] == row[each] for each in ("status", "ended_us")) else None

    def search(self, words: str) -> dict[str, Any]:
        """Returns the item of this name with all its records, or else the newest records that match.

        A record matches if each of the words is in its item, state, application, author or payload. ``searched``:
        number of newest records that were read.
        """
        item = self._ledger.item(words) if words else None
        if item is not None:
            records: Sequence[Record] = item.records[-FOUND_MAX:]
            return {"item": item.item_id, "state": str(item.state), "searched": 0, "records": _shown(records)}
        newest = self._ledger.newest(SEARCHED)
        wanted = [word for word in words.lower().split() if word]
        found = [record for record in reversed(newest) if all(word in _text(record) for word in wanted)]
        return {"item": "", "state": "", "searched": len(newest), "records": _shown(found[:FOUND_MAX])}


def _payload(record: Record) -> str:
    return "" if record.payload is None else json.dumps(record.payload, default=str, sort_keys=True)[:PAYLOAD_MAX]


def _text(record: Record) -> str:
    app = record.app
    return " ".join(
        (record.item_id, record.state, app.name, app.instance or "", record.author, _payload(record))
    ).lower()


def _shown(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {
            "record": record.record_id,
            "item": record.item_id,
            "state": str(record.state),
            "application": record.app.name,
            "author": record.author,
            "at_us": record.timestamp_us,
            "payload": _payload(record),
        }
        for record in records
    ]
