"""The ledger's rules over a list: a simulation cannot wait for SQL. A record is durable when ``put`` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stateflow.errors import IllegalRecord, Locked
from stateflow.ledger import App, Record, RecordState
from stateflow.ledger.rules import LEGAL_PREVIOUS, blocking


class MemoryLedger:
    def __init__(self) -> None:
        self._records: list[Record] = []
        self._heads: dict[str, Record] = {}

    def put(
        self,
        item_id: str,
        app: App,
        state: RecordState,
        previous: Record | None = None,
        payload: Any = None,
        *,
        lease_s: float | None = None,
    ) -> Record:
        if (None if previous is None else previous.state) not in LEGAL_PREVIOUS[state]:
            raise IllegalRecord("it cannot follow", remedy="-", item=item_id)
        if previous is not None and previous.item_id != item_id:
            raise IllegalRecord("the previous record is of another item", remedy="-", item=item_id)
        newest = self._heads.get(item_id)
        if newest is None and previous is not None:
            raise Locked("the item has no records here", remedy="-", item=item_id)
        if newest is not None:
            if previous is None and state is RecordState.NEW:
                raise IllegalRecord("the item is there already", remedy="-", item=item_id)
            if previous is not None and previous.seq != newest.seq:
                raise Locked("another writer was first", remedy="-", item=item_id)
            if state is RecordState.PROCESSING and blocking(list(self.records(item_id))):
                raise Locked("the item is held", remedy="-", item=item_id)
        record = Record(
            len(self._records) + 1,
            item_id,
            0 if newest is None else newest.seq + 1,
            app,
            state,
            previous.record_id if previous else None,
            "simulation",
            0,
            "",
            None if payload is None else json.loads(json.dumps(payload)),
        )
        self._records.append(record)
        self._heads[item_id] = record
        return record

    def records(self, item_id: str | None = None, *, archived: bool = False) -> Iterator[Record]:
        return iter([record for record in self._records if item_id in (None, record.item_id)])

    def head(self, item_id: str) -> Record:
        return self._heads[item_id]

    def close(self) -> None:
        pass
