"""The ledger's id, and its leader lease (``ledger_hold``)."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy import BigInteger, Column, SmallInteger

from stateflow.ledger.records import HOLD, IDENTITY, OPTIONS, long_text, text_id

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the missing tables. May be repeated after an upgrade that was killed: MySQL commits each table by
    itself."""
    present = set() if context.is_offline_mode() else set(sa.inspect(op.get_bind()).get_table_names())
    create(present)
    if not context.is_offline_mode():
        fill()


def create(present: set[str]) -> None:
    if "ledger_identity" not in present:
        op.create_table(
            "ledger_identity",
            Column("only", SmallInteger, primary_key=True, autoincrement=False),
            Column("id", text_id(64), nullable=False),
            **OPTIONS,
        )
    if "ledger_hold" not in present:
        op.create_table(
            "ledger_hold",
            Column("only", SmallInteger, primary_key=True, autoincrement=False),
            Column("term", BigInteger, nullable=False),
            Column("holder", text_id(64), nullable=False),
            Column("about", long_text(), nullable=False),
            Column("since_us", BigInteger, nullable=False),
            Column("until_us", BigInteger, nullable=False),
            Column("lease_us", BigInteger, nullable=False),
            **OPTIONS,
        )


def fill() -> None:
    connection = op.get_bind()
    if connection.execute(sa.select(IDENTITY)).first() is None:
        connection.execute(sa.insert(IDENTITY).values(only=1, id=uuid.uuid4().hex))
    if connection.execute(sa.select(HOLD)).first() is None:
        nobody = {"term": 0, "holder": "", "about": "{}", "since_us": 0, "until_us": 0, "lease_us": 0}
        connection.execute(sa.insert(HOLD).values(only=1, **nobody))


def downgrade() -> None:
    op.drop_table("ledger_hold")
    op.drop_table("ledger_identity")
