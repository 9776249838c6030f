"""Functions shared by the suites of the ledger."""

from __future__ import annotations

import uuid

from sqlalchemy import text

from stateflow.ledger import App, Ledger, Record, rules
from stateflow.ledger.statements import load_heads

A, B = App("a", "1"), App("b", "2")
#: longest wait for another transaction's lock, in seconds
PATIENCE_S = 60


def item_id() -> str:
    return uuid.uuid4().hex


def done(ledger: Ledger, item: str, app: App = A) -> Record:
    return ledger.process_new_item(item, app, lambda _: None)


def sound(ledger: Ledger) -> None:
    """Asserts that ``verify`` finds no fault, and that each item's head equals the fold of its records."""
    assert ledger.verify() == []
    by_item: dict[str, list[Record]] = {}
    for record in ledger.records(archived=True):
        by_item.setdefault(record.item_id, []).append(record)
    with ledger.database.reading() as connection:
        heads = load_heads(connection, by_item)
        assert connection.execute(text("SELECT count(*) FROM ledger_item")).scalar() == len(by_item)
    assert heads == {item: rules.fold(records) for item, records in by_item.items()}
