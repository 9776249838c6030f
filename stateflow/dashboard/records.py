"""What is in the ledger, for the page: batches, and items that are searched for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stateflow.ledger import Board, Ledger, Record

#: newest batches that are shown, of so many that are looked at: reconfigurations, which are most, are shown elsewhere
BATCHES_MAX, LOOKED_AT = 30, 300
#: newest records that are searched, and those that are shown of what is found
SEARCHED, FOUND_MAX = 5000, 200
#: characters of a record's payload
PAYLOAD_MAX = 2000
OVER = ("DONE", "FAILED", "CANCELLED")
RECONFIGURATIONS = "reconfiguration/"


class Records:
    """Used by several threads. Args: url: of a ledger that is there; it is opened when it is first asked for."""

    def __init__(self, url: str, author: str) -> None:
        self._ledger = Ledger(url, author=author, create=False)
        self.board = Board(self._ledger)
        self._over: dict[str, dict[str, Any]] = {}  # by bid, with their counts, which stay

    def close(self) -> None:
        self._ledger.close()

    def batches(self) -> list[dict[str, Any]]:
        """Newest first, without reconfigurations; their counts with all of them. One query and, for each that has not
        ended, three."""
        rows = [row for row in self.board.batches(limit=LOOKED_AT) if not row["bid"].startswith(RECONFIGURATIONS)]
        found = [self._known(row) or self.board.batch(row["bid"]) for row in rows[:BATCHES_MAX]]
        self._over = {batch["bid"]: batch for batch in found if batch["status"] in OVER}
        return found

    def _known(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """One that is still over: it may be tried again, and have ended once more since."""
        batch = self._over.get(row["bid"])
        return batch if batch is not None and all(batch[each] == row[each] for each in ("status", "ended_us")) else None

    def search(self, words: str) -> dict[str, Any]:
        """An item of this name with all its records; else the newest records that have each of the words in their item,
        state, application, author or payload. ``searched``: so many of the newest were looked at."""
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
