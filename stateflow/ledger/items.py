"""Builds items from their rows, and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stateflow.errors import Locked
from stateflow.ledger import reading, rules
from stateflow.ledger.records import Item, Kind
from stateflow.ledger.verify import faults_of, payload_faults


def item_of(item_id: str, rows: list[tuple[Any, bool]], schemas: Mapping[str, Mapping[str, Any]]) -> Item:
    records = tuple(reading.record_of(row, strict=False) for row, _ in rows)
    faults = [*faults_of(item_id, records)]
    for row, _ in rows:
        faults += payload_faults(row, schemas)
    return Item(
        item_id,
        records,
        rules.state_of(records),
        rules.blocking(records),
        tuple(faults),
        any(archived for _, archived in rows),
        Kind.of(records[0].payload_schema),
    )


def locked(item: Item) -> Locked:
    assert item.blocking is not None
    error = Locked(
        f"the item is {item.blocking.state}",
        remedy="wait for its holder, or resolve it",
        item=item.item_id,
        blocking_record=item.blocking.record_id,
    )
    error.blocking_record = item.blocking
    return error
