"""The ledger's first schema, and the adoption of the table ``ledger_record`` that preceded it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import BigInteger, Column, Index, Integer, PrimaryKeyConstraint, SmallInteger, UniqueConstraint

from stateflow.ledger.records import OPTIONS, big_key, long_text, text_id

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    if "ledger_record" in sa.inspect(op.get_bind()).get_table_names():
        op.add_column("ledger_record", Column("payload_schema", text_id(128)))  # the projections are rebuilt afterwards
    else:
        _create_record()
    _create_others()


def downgrade() -> None:
    for table in _TABLES:
        op.drop_table(table)


_TABLES = (
    "ledger_record",
    "ledger_archive",
    "ledger_item",
    "ledger_verdict",
    "ledger_lease",
    "ledger_schema",
    "ledger_stage",
    "ledger_batch",
    "ledger_entity",
    "ledger_job",
)


def _record_columns() -> list[Column[Any]]:
    return [
        Column("item_id", text_id(255), nullable=False),
        Column("seq", Integer, nullable=False),
        Column("app_name", text_id(128), nullable=False),
        Column("app_version", text_id(64), nullable=False),
        Column("app_instance", text_id(128)),
        Column("state", text_id(16), nullable=False),
        Column("previous_record_id", BigInteger),
        Column("author", text_id(128), nullable=False),
        Column("timestamp_us", BigInteger, nullable=False),
        Column("run_id", text_id(64), nullable=False),
        Column("payload", long_text()),
        Column("payload_schema", text_id(128)),
    ]


def _create_record() -> None:
    op.create_table(
        "ledger_record",
        Column("record_id", big_key(), primary_key=True, autoincrement=True),
        *_record_columns(),
        UniqueConstraint("item_id", "seq", name="ledger_record_item_seq"),
        sqlite_autoincrement=True,
        **OPTIONS,
    )


def _create_others() -> None:
    op.create_table(
        "ledger_archive",
        Column("record_id", big_key(), primary_key=True, autoincrement=False),
        *_record_columns(),
        UniqueConstraint("item_id", "seq", name="ledger_archive_item_seq"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_item",
        Column("item_id", text_id(255), primary_key=True),
        Column("kind", text_id(16), nullable=False),
        Column("seq", Integer, nullable=False),
        Column("state", text_id(16), nullable=False),
        Column("newest_record_id", BigInteger, nullable=False),
        Column("blocking_record_id", BigInteger),
        Column("blocking_state", text_id(16)),
        Column("created_us", BigInteger, nullable=False),
        Column("updated_us", BigInteger, nullable=False),
        Column("archived", SmallInteger, nullable=False),
        Index("ledger_item_ready", "kind", "archived", "blocking_record_id", "item_id"),
        Index("ledger_item_state", "kind", "archived", "state", "item_id"),
        Index("ledger_item_age", "archived", "state", "updated_us"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_verdict",
        Column("item_id", text_id(255)),
        Column("verdict", text_id(16)),
        Column("app_name", text_id(128)),
        Column("app_instance", text_id(128)),
        # longer than SQL Server allows for the key of a clustered index
        PrimaryKeyConstraint("item_id", "verdict", "app_name", "app_instance", mssql_clustered=False),
        Index("ledger_verdict_app", "verdict", "app_name", "app_instance", "item_id"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_lease",
        Column("item_id", text_id(255), primary_key=True),
        Column("record_id", BigInteger, nullable=False),
        Column("until_us", BigInteger, nullable=False),
        Index("ledger_lease_until", "until_us"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_schema",
        Column("name", text_id(128), primary_key=True),
        Column("body", long_text(), nullable=False),
        **OPTIONS,
    )

    op.create_table(
        "ledger_stage",
        Column("state_id", text_id(255), primary_key=True),
        Column("run_id", text_id(64)),
        Column("job_id", text_id(255)),
        Column("correlation_id_in", text_id(255)),
        Column("correlation_id_out", text_id(255)),
        Column("action", text_id(32)),
        Column("status", text_id(16)),
        Column("source_name", long_text()),
        Column("source_type", long_text()),
        Column("sink_name", long_text()),
        Column("sink_type", long_text()),
        Column("source_entity", text_id(255)),
        Column("source_filter", long_text()),
        Column("sink_entity", text_id(255)),
        Column("sink_filter", long_text()),
        Column("first_record_pulled", long_text()),
        Column("last_record_pulled", long_text()),
        Column("git_sha", text_id(64)),
        Column("sourcing_start_time", BigInteger),
        Column("sourcing_end_time", BigInteger),
        Column("sinking_start_time", BigInteger),
        Column("sinking_end_time", BigInteger),
        Column("updated_on", BigInteger, nullable=False),
        Column("row_count", BigInteger),
        Column("created_on", BigInteger, nullable=False),
        Column("manifest_name", long_text()),
        Column("first_record_id", BigInteger, nullable=False),
        Index("ledger_stage_order", "first_record_id"),
        Index("ledger_stage_job", "job_id", "first_record_id"),
        Index("ledger_stage_entity", "source_entity", "status", "action", "first_record_id"),
        Index("ledger_stage_in", "correlation_id_in"),
        Index("ledger_stage_out", "correlation_id_out"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_batch",
        Column("bid", text_id(255), primary_key=True),
        Column("name", long_text()),
        Column("command", long_text()),
        Column("status", text_id(32), nullable=False),
        Column("owner", long_text()),
        Column("affinity", long_text()),
        Column("job_affinity", long_text()),
        Column("created_us", BigInteger, nullable=False),
        Column("started_us", BigInteger),
        Column("ended_us", BigInteger),
        Column("listed", SmallInteger, nullable=False),
        Column("first_record_id", BigInteger, nullable=False),
        Index("ledger_batch_status", "status", "first_record_id"),
        Index("ledger_batch_order", "first_record_id"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_entity",
        Column("item_id", text_id(255), primary_key=True),
        Column("bid", text_id(255), nullable=False),
        Column("entity", text_id(255), nullable=False),
        Column("status", text_id(16), nullable=False),
        Column("ms", BigInteger),
        Column("result", long_text()),
        Column("first_record_id", BigInteger, nullable=False),
        Index("ledger_entity_status", "bid", "status", "first_record_id"),
        Index("ledger_entity_slowest", "bid", "ms"),
        **OPTIONS,
    )
    op.create_table(
        "ledger_job",
        Column("job_id", text_id(255), primary_key=True),
        Column("bid", text_id(255)),
        Column("name", text_id(255)),
        Column("status", text_id(16), nullable=False),
        Column("tries", Integer, nullable=False),
        Column("worker", text_id(255)),
        Column("affinity", long_text()),
        Column("schedule", long_text()),
        Column("fire_us", BigInteger),
        Column("started_us", BigInteger),
        Column("ended_us", BigInteger),
        Column("first_record_id", BigInteger, nullable=False),
        Index("ledger_job_status", "status", "first_record_id"),
        Index("ledger_job_batch", "bid", "first_record_id"),
        **OPTIONS,
    )
