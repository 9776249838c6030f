"""Makes or upgrades the schema of a database for callers that may write it, and only checks it for all others."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, false, func, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from stateflow.errors import InvalidArgument, LedgerCorrupt, LedgerTooNew, LedgerTooOld, Unavailable
from stateflow.ledger.database import Database
from stateflow.ledger.schema import HOLD, IDENTITY, METADATA, RECORD, REVISION, VERSION_TABLE
from stateflow.ledger.verify import rebuild

_KNOWN = ("0001", "0002", "0003", REVISION)
_LOCK = 0x73666C6F77  # 'sflow'
_LOCK_WAIT_S = 60


class Opened(StrEnum):
    """Outcome of opening a ledger: it was ready, was made, or was upgraded."""

    READY = "ready"
    MADE = "made"
    UPGRADED = "upgraded"


def prepare(database: Database, *, create: bool) -> Opened:
    """Prepares the schema of a database.

    Args:
        create: makes what is missing and upgrades what is older; otherwise nothing is written.

    Raises InvalidArgument when the database cannot be opened or has no ledger, LedgerTooNew, LedgerTooOld,
    LedgerCorrupt.
    """
    if not create and database.is_missing():  # connecting would make the SQLite file
        raise InvalidArgument(
            "there is no ledger",
            remedy="create it with `stateflow ledger init`, or name another",
            ledger=database.shown,
        )
    try:
        with database.engine.connect() as connection:
            version = _version(connection)
            present = create or version is not None or RECORD.name in inspect(connection).get_table_names()
        if version != REVISION and create:
            database.use_write_ahead_log()
    except SQLAlchemyError as error:
        raise database.cannot_open(error) from database.cause(error)
    if version == REVISION:
        return Opened.READY
    if version is not None and version not in _KNOWN:
        raise LedgerTooNew(
            f"the ledger's schema is {version!r}, this program supports up to {REVISION!r}",
            remedy="use the newer stateflow that wrote it",
            ledger=database.shown,
        )
    if create:
        return database.write(_upgrade)
    if present:
        raise LedgerTooOld(
            f"the ledger's schema is {version or 'older than 0001'!r}, this program needs {REVISION!r}",
            remedy="stop all processes that use it, then upgrade it with `stateflow ledger init`",
            ledger=database.shown,
        )
    raise InvalidArgument(
        "there is no ledger in this database",
        remedy="create one with `stateflow ledger init`, or name another",
        ledger=database.shown,
    )


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608 - a name of ours
    return None if found is None else str(found)


def _upgrade(connection: Connection) -> Opened:
    """Makes or upgrades the schema, in one transaction where the database can; several programs may open a fresh ledger
    at once."""
    dialect = connection.dialect.name
    _lock(connection, dialect)
    try:
        version = _version(connection)
        if version == REVISION:
            return Opened.READY
        fresh = version is None
        adopted = fresh and "ledger_record" in inspect(connection).get_table_names() and dialect != "mysql"
        if dialect == "mysql" and fresh:
            _clear_rest_of_killed_upgrade(connection)
        migrate(connection, REVISION)
        if adopted:
            rebuild(connection)
        if dialect == "mysql":  # the next lock holder must see the version, or takes this for killed
            connection.execute(text("COMMIT"))
        return Opened.MADE if fresh and not adopted else Opened.UPGRADED
    finally:
        if dialect == "mysql":
            connection.execute(text("SELECT RELEASE_LOCK(CONCAT('stateflow.', DATABASE()))"))


def migrate(connection: Connection, revision: str) -> None:
    logging.getLogger("alembic").setLevel(logging.WARNING)  # Alembic logs every step, from its import on
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    command.upgrade(config, revision)


def _lock(connection: Connection, dialect: str) -> None:
    statement: dict[str, tuple[str, dict[str, Any]]] = {
        "postgresql": ("SELECT pg_advisory_xact_lock(:number)", {"number": _LOCK}),
        "mysql": ("SELECT GET_LOCK(CONCAT('stateflow.', DATABASE()), :seconds)", {"seconds": _LOCK_WAIT_S}),
        "mssql": ("EXEC sp_getapplock 'stateflow', 'Exclusive', 'Transaction', :ms", {"ms": _LOCK_WAIT_S * 1000}),
    }
    if dialect in statement:
        words, values = statement[dialect]
        got = connection.execute(text(words), values)
        if dialect == "mysql" and got.scalar() != 1:
            raise Unavailable(
                f"another program is preparing the ledger and did not finish within {_LOCK_WAIT_S} s",
                remedy="check that program, then open the ledger again",
            )


def _clear_rest_of_killed_upgrade(connection: Connection) -> None:
    """Drops the tables that a killed upgrade left, as MySQL commits each DDL statement by itself. Raises LedgerCorrupt
    when they hold records: a schema without a version cannot."""
    present = set(inspect(connection).get_table_names())
    for table in reversed(METADATA.sorted_tables):
        if table.name not in present:
            continue
        rows = select(func.count()).select_from(table)
        if table is IDENTITY:
            # its row is made with the table: without records and a hold, no program knows the id
            rows = rows.where(false())
        elif table is HOLD:
            rows = rows.where(HOLD.c.term > 0)
        if connection.execute(rows).scalar():
            raise LedgerCorrupt(
                "the ledger has records but no schema version",
                remedy=f"restore the table {VERSION_TABLE} from a backup",
                table=table.name,
            )
        table.drop(connection)
