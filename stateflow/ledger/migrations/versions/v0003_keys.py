"""Makes ids as long as keys of object stores, and adds indexes for the newest stages of a run, a sink or a status, and
the time that a batch was worked on."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import BigInteger, Column

from stateflow.ledger.records import ItemId, text_id

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

#: by table: the columns that become item ids, and whether they may be null
KEYS = {
    "ledger_record": (("item_id", False),),
    "ledger_archive": (("item_id", False),),
    "ledger_item": (("item_id", False),),
    "ledger_verdict": (("item_id", False),),
    "ledger_lease": (("item_id", False),),
    "ledger_stage": (("state_id", False), ("source_entity", True), ("sink_entity", True)),
    "ledger_batch": (("bid", False),),
    "ledger_entity": (("item_id", False), ("bid", False), ("entity", False)),
    "ledger_job": (("job_id", False), ("bid", True)),
}
COLUMNS = {"ledger_batch": ("worked_us", "resumed_us")}
INDEXES: dict[str, dict[str, tuple[str, ...]]] = {
    "ledger_stage": {
        "ledger_stage_run": ("run_id", "first_record_id"),
        "ledger_stage_sink": ("sink_entity", "status", "action", "first_record_id"),
        "ledger_stage_status": ("status", "first_record_id"),
    }
}
#: keys, constraints and indexes that SQL Server must drop before it changes a column
_PRIMARY = {
    "ledger_item": ("item_id",),
    "ledger_verdict": ("item_id", "verdict", "app_name", "app_instance"),
    "ledger_lease": ("item_id",),
    "ledger_stage": ("state_id",),
    "ledger_batch": ("bid",),
    "ledger_entity": ("item_id",),
    "ledger_job": ("job_id",),
}
_UNIQUE = {"ledger_record": "ledger_record_item_seq", "ledger_archive": "ledger_archive_item_seq"}
_INDEXED: dict[str, dict[str, tuple[str, ...]]] = {
    "ledger_item": {
        "ledger_item_ready": ("kind", "archived", "blocking_record_id", "item_id"),
        "ledger_item_state": ("kind", "archived", "state", "item_id"),
    },
    "ledger_verdict": {"ledger_verdict_app": ("verdict", "app_name", "app_instance", "item_id")},
    "ledger_stage": {"ledger_stage_entity": ("source_entity", "status", "action", "first_record_id")},
    "ledger_entity": {
        "ledger_entity_status": ("bid", "status", "first_record_id"),
        "ledger_entity_slowest": ("bid", "ms"),
    },
    "ledger_job": {"ledger_job_batch": ("bid", "first_record_id")},
}
_DROP_PRIMARY = """
DECLARE @name sysname = (
    SELECT name FROM sys.key_constraints WHERE type = 'PK' AND parent_object_id = OBJECT_ID('{table}'));
EXEC('ALTER TABLE {table} DROP CONSTRAINT ' + @name)
"""


def upgrade() -> None:
    """Applies all steps. May be repeated after an upgrade that was killed: MySQL commits each step by itself, and each
    step can be repeated."""
    dialect = op.get_context().dialect.name
    if dialect == "mssql":
        _let_go()
    if dialect != "sqlite":  # SQLite enforces no length
        for table, columns in KEYS.items():
            for name, nullable in columns:
                op.alter_column(table, name, type_=ItemId(), existing_type=text_id(255), existing_nullable=nullable)
    if dialect == "mssql":
        _hold_again()
    inspector: Any = None if op.get_context().as_sql else sa.inspect(op.get_bind())
    for table, added in COLUMNS.items():
        present = {each["name"] for each in inspector.get_columns(table)} if inspector else set()
        for name in added:
            if name not in present:
                op.add_column(table, Column(name, BigInteger))
    for table, indexes in INDEXES.items():
        present = {each["name"] for each in inspector.get_indexes(table)} if inspector else set()
        for name, named in indexes.items():
            if name not in present:
                op.create_index(name, table, list(named))


def _let_go() -> None:
    for table, indexes in _INDEXED.items():
        for name in indexes:
            op.drop_index(name, table)
    for table, name in _UNIQUE.items():
        op.drop_constraint(name, table, type_="unique")
    for table in _PRIMARY:
        op.execute(_DROP_PRIMARY.format(table=table))


def _hold_again() -> None:
    for table, columns in _PRIMARY.items():
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {table}_key PRIMARY KEY NONCLUSTERED ({', '.join(columns)})")
    for table, name in _UNIQUE.items():
        op.create_unique_constraint(name, table, ["item_id", "seq"])
    for table, indexes in _INDEXED.items():
        for name, named in indexes.items():
            op.create_index(name, table, list(named))


def downgrade() -> None:
    raise NotImplementedError("ids may exceed the length that the previous schema allows")
