"""Code bundles of operators."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy import BigInteger, Column, Integer

from stateflow.ledger.records import OPTIONS, long_bytes, text_id

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the table. May be repeated after an upgrade that was killed: MySQL commits each table by itself."""
    if context.is_offline_mode() or not sa.inspect(op.get_bind()).has_table("ledger_bundle"):
        create()


def create() -> None:
    op.create_table(
        "ledger_bundle",
        Column("digest", text_id(64), nullable=False),
        Column("number", Integer, autoincrement=False, nullable=False),
        Column("count", Integer, nullable=False),
        Column("stored_us", BigInteger, nullable=False),
        Column("body", long_bytes(), nullable=False),
        sa.PrimaryKeyConstraint("digest", "number", mssql_clustered=False),
        **OPTIONS,
    )


def downgrade() -> None:
    op.drop_table("ledger_bundle")
