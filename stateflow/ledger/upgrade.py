"""The schema of a database: made or brought up to date when the ledger is opened, never guessed at."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from stateflow.errors import LedgerCorrupt, LedgerTooNew, Unavailable
from stateflow.ledger.database import Database
from stateflow.ledger.rebuild import rebuild
from stateflow.ledger.schema import METADATA, REVISION, VERSION_TABLE

_KNOWN = (REVISION,)
_LOCK = 0x73666C6F77  # 'sflow'
_LOCK_WAIT_S = 60


def prepare(database: Database) -> None:
    """Raises InvalidArgument when the database cannot be opened, LedgerTooNew, LedgerCorrupt."""
    try:
        with database.engine.connect() as connection:
            version = _version(connection)
    except SQLAlchemyError as error:
        raise database.cannot_open(error) from database.cause(error)
    if version == REVISION:
        return
    if version is not None and version not in _KNOWN:
        raise LedgerTooNew(
            f"the ledger's schema is {version!r}, and this program knows it up to {REVISION!r}",
            remedy="use the newer stateflow that wrote it",
            ledger=database.shown,
        )
    database.write(_upgrade)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return None if found is None else str(found)


def _upgrade(connection: Connection) -> None:
    """In one transaction where the database can; several programs may open a fresh ledger at once."""
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells every step, from its import on
    from alembic import command
    from alembic.config import Config

    dialect = connection.dialect.name
    _lock(connection, dialect)
    try:
        if _version(connection) == REVISION:
            return
        adopted = "ledger_record" in inspect(connection).get_table_names() and dialect != "mysql"
        if dialect == "mysql":
            _clear_rest_of_killed_upgrade(connection)
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        command.upgrade(config, REVISION)
        if adopted:
            rebuild(connection)
        if dialect == "mysql":  # whoever has the lock next must see the version, or takes this for a killed upgrade
            connection.execute(text("COMMIT"))
    finally:
        if dialect == "mysql":
            connection.execute(text("SELECT RELEASE_LOCK(CONCAT('stateflow.', DATABASE()))"))


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
                f"another program prepares the ledger, and has not ended within {_LOCK_WAIT_S} s",
                remedy="see what it does, and open the ledger again",
            )


def _clear_rest_of_killed_upgrade(connection: Connection) -> None:
    """MySQL commits each DDL statement by itself. A schema without a version holds no records yet."""
    present = set(inspect(connection).get_table_names())
    for table in reversed(METADATA.sorted_tables):
        if table.name not in present:
            continue
        if connection.execute(select(func.count()).select_from(table)).scalar():
            raise LedgerCorrupt(
                "the ledger has records but no schema version",
                remedy=f"restore the table {VERSION_TABLE} from a backup",
                table=table.name,
            )
        table.drop(connection)
