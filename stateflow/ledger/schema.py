"""Prepares the schema of a ledger's database. Callers that may write the database create or upgrade the schema; for all
others it is only checked.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, false, func, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from stateflow.errors import InvalidArgument, LedgerCorrupt, LedgerTooNew, LedgerTooOld, Unavailable
from stateflow.ledger.database import Database
from stateflow.ledger.records import HOLD, IDENTITY, METADATA, RECORD, REVISION, VERSION_TABLE
from stateflow.ledger.verify import rebuild

_KNOWN = ("0001", "0002", "0003", REVISION)
_LOCK = 0x73666C6F77  # 'sflow'
_LOCK_WAIT_S = 60
#: maximum length of a lock's name in MySQL; MariaDB takes longer ones
_LOCK_NAME_MAX = 64


class Opened(StrEnum):
    """Outcome of opening a ledger: it was ready, was created, or was upgraded."""

    READY = "ready"
    MADE = "made"
    UPGRADED = "upgraded"


def prepare(database: Database, *, create: bool) -> Opened:
    """Prepares the schema of a database.

    Args:
        create: makes a missing schema and upgrades an older one; otherwise nothing is written.

    Raises InvalidArgument if the database cannot be opened or has no ledger, LedgerTooNew, LedgerTooOld,
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
    """Makes or upgrades the schema, in one transaction if the database supports that. Several programs may open a fresh
    ledger at once."""
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
        if dialect == "mysql":  # else the next holder of the lock sees no version, and takes this upgrade for killed
            connection.execute(text("COMMIT"))
        return Opened.MADE if fresh and not adopted else Opened.UPGRADED
    finally:
        if dialect == "mysql":
            connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": _mysql_lock(connection)})


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
        "mysql": ("SELECT GET_LOCK(:name, :seconds)", {"seconds": _LOCK_WAIT_S}),
        "mssql": ("EXEC sp_getapplock 'stateflow', 'Exclusive', 'Transaction', :ms", {"ms": _LOCK_WAIT_S * 1000}),
    }
    if dialect in statement:
        words, values = statement[dialect]
        if dialect == "mysql":
            values["name"] = _mysql_lock(connection)
        got = connection.execute(text(words), values)
        if dialect == "mysql" and got.scalar() != 1:
            raise Unavailable(
                f"another program is preparing the ledger and did not finish within {_LOCK_WAIT_S} s",
                remedy="check that program, then open the ledger again",
            )


def _mysql_lock(connection: Connection) -> str:
    """Returns the name of the lock on preparing this database. Locks belong to the whole server."""
    database = str(connection.execute(text("SELECT DATABASE()")).scalar())
    name = f"stateflow.{database}"
    if len(name) > _LOCK_NAME_MAX and not getattr(connection.dialect, "is_mariadb", False):
        # in lower case, because servers may ignore the case of the database's name
        name = f"stateflow.{sha256(database.lower().encode()).hexdigest()}"[:_LOCK_NAME_MAX]
    return name


def _clear_rest_of_killed_upgrade(connection: Connection) -> None:
    """Drops the tables that a killed upgrade left, because MySQL commits each DDL statement by itself. Raises
    LedgerCorrupt if the tables hold records, which no unfinished upgrade has written.
    """
    present = set(inspect(connection).get_table_names())
    for table in reversed(METADATA.sorted_tables):
        if table.name not in present:
            continue
        rows = select(func.count()).select_from(table)
        if table is IDENTITY:
            # the id is made with the table: where there are no records and no leader lease, no program has read it
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
