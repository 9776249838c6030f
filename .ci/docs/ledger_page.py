"""The ledger's tables, from their definition."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite

from stateflow.ledger import records

DIALECTS = {"SQLite": sqlite.dialect(), "PostgreSQL": postgresql.dialect()}


def page() -> str:
    tables = [line for table in records.METADATA.sorted_tables for line in _table(table)]
    return "\n".join([f"{records.__doc__}\n", f"This is revision {records.REVISION}.\n", *tables])


def _table(table: Table) -> Iterator[str]:
    yield f"## {table.name}\n"
    yield f"| column | {' | '.join(DIALECTS)} | |\n|---|{'---|' * len(DIALECTS)}---|"
    for column in table.columns:
        types = [str(column.type.compile(dialect=dialect)) for dialect in DIALECTS.values()]
        told = "primary key" if column.primary_key else "" if column.nullable else "not null"
        yield f"| `{column.name}` | {' | '.join(re.sub(' COLLATE.*', '', each) for each in types)} | {told} |"
    yield ""
    if table.indexes:
        yield "Indexes: " + "; ".join(
            sorted(f"`{each.name}` ({', '.join(c.name for c in each.columns)})" for each in table.indexes)
        )
        yield ""
