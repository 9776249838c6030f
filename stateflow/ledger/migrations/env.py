"""Alembic's entry point, run on the connection and in the transaction that the ledger hands in."""

from alembic import context

from stateflow.ledger.records import METADATA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    transactional_ddl=False,
)
context.run_migrations()
