"""Stages, batches, entities and jobs as views: one row per item, each record setting some of its columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Table

from stateflow.ledger import schema
from stateflow.ledger.records import Kind, Record


@dataclass(frozen=True, slots=True)
class View:
    """Table of a view. ``created`` and ``updated``: the columns that hold the time of the first and of the newest
    record."""

    table: Table
    key: str
    created: str | None = None
    updated: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)

    def apply(self, row: dict[str, Any] | None, record: Record) -> dict[str, Any]:
        """Returns the row after one more record. Pure."""
        if row is None:
            row = dict.fromkeys(self.table.columns.keys())
            row |= {self.key: record.item_id, "first_record_id": record.record_id} | self.defaults
            if self.created:
                row[self.created] = record.timestamp_us
        changes = record.payload["set"]
        row = row | {column: changes[column] for column in changes if column in self.table.columns}
        if self.updated:
            row[self.updated] = record.timestamp_us
        return row

    def fold(self, records: list[Record]) -> dict[str, Any]:
        row = None
        for record in records:
            row = self.apply(row, record)
        assert row is not None
        return row


VIEWS: dict[Kind, View] = {
    Kind.STAGE: View(schema.STAGE, "state_id", created="created_on", updated="updated_on"),
    Kind.BATCH: View(schema.BATCH, "bid", created="created_us", defaults={"listed": 0}),
    Kind.ENTITY: View(schema.ENTITY, "item_id"),
    Kind.JOB: View(schema.JOB, "job_id", defaults={"tries": 0}),
}
