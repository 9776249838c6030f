"""One database, whichever it is: opening, transactions that are tried again, and errors in our words."""

from __future__ import annotations

import random  # noqa: TID251 - a type only
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from stateflow.errors import InvalidArgument, LedgerReadOnly, StateflowError, Unavailable

T = TypeVar("T")
_OPEN_REMEDY = "name a writable SQLite file (sqlite:///path/ledger.db) or a reachable database"
_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "mariadb+pymysql": "mysql+pymysql",
    "mssql": "mssql+pyodbc",
}
#: driver codes of what ends well when it is tried again: deadlock, serialisation failure, lock wait timeout, busy
_RETRYABLE = {
    "postgresql": frozenset({"40001", "40P01", "55P03"}),
    "mysql": frozenset({1205, 1213, 1020}),
    "mssql": frozenset({1205, 1222}),
    "sqlite": frozenset({5, 6}),
}
_SQLITE_READONLY = 8
ATTEMPTS_MAX = 8
BACKOFF_MAX_S = 1.0


class Database:
    """Args: url: an SQLAlchemy URL; a driver need not be named. Nothing is connected to yet.

    Raises InvalidArgument.
    """

    def __init__(
        self,
        url: str,
        *,
        rng: random.Random,
        busy_timeout_s: float = 5.0,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self._rng = rng
        parsed = _parse(url)
        self.shown = _shown(parsed)
        self._secrets = _secrets(parsed)
        try:
            self.engine: Engine = _create(parsed, busy_timeout_s, connect_timeout_s)
        except (SQLAlchemyError, ImportError, ValueError, TypeError) as error:
            raise self.cannot_open(error) from None
        self.dialect = self.engine.dialect.name

    # -- transactions -------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Raises Unavailable."""
        try:
            with self.engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise self._said(error, "read", "see to its database") from self.cause(error)

    def write(self, work: Callable[[Connection], T]) -> T:
        """``work`` in one transaction, all of it or nothing; run again when it met another writer.

        Raises what ``work`` raises; Unavailable when the database does not answer or stays busy, LedgerReadOnly.
        """
        engine = self.engine.execution_options(stateflow_write=True)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            committing = False
            try:
                with engine.connect() as connection, connection.begin() as transaction:
                    result = work(connection)
                    committing = True
                    transaction.commit()
                    return result
            except SQLAlchemyError as error:
                if not self._retryable(error):
                    raise self._not_written(error, committing) from self.cause(error)
                if attempt == ATTEMPTS_MAX:
                    raise Unavailable(
                        f"the ledger stayed busy for {ATTEMPTS_MAX} attempts",
                        remedy="try again, and verify the ledger if it stays so; nothing was written",
                        ledger=self.shown,
                    ) from self.cause(error)
            time.sleep(self._rng.random() * min(BACKOFF_MAX_S, 0.005 * 2**attempt))
        raise AssertionError

    def close(self) -> None:
        self.engine.dispose()

    # -- errors -------------------------------------------------------------------------------------------

    def _retryable(self, error: SQLAlchemyError) -> bool:
        """Also a key that another writer took in between: reading again tells who it was."""
        if isinstance(error, IntegrityError):
            return True
        return isinstance(error, DBAPIError) and _code(self.dialect, error.orig) in _RETRYABLE[self.dialect]

    def _not_written(self, error: SQLAlchemyError, committing: bool) -> StateflowError:
        if committing and getattr(error, "connection_invalidated", False):
            return Unavailable(
                "the database went away while the ledger was written",
                remedy="read the item again: it may or may not have been",
                ledger=self.shown,
            )
        return self._said(error, "written", "see to its database; nothing was written")

    def _said(self, error: SQLAlchemyError, done: str, remedy: str) -> StateflowError:
        line = self._line(error)
        read_only = _code(self.dialect, getattr(error, "orig", None)) == _SQLITE_READONLY and self.dialect == "sqlite"
        if read_only or "read-only" in line:
            return LedgerReadOnly(
                "the ledger can only be read",
                remedy="make its database and the directory writable, or name another; nothing was written",
                ledger=self.shown,
            )
        return Unavailable(f"the ledger cannot be {done}: {line}", remedy=remedy, ledger=self.shown)

    def cannot_open(self, error: Exception) -> InvalidArgument:
        return InvalidArgument(
            f"the ledger cannot be opened: {self._line(error)}", remedy=_OPEN_REMEDY, ledger=self.shown
        )

    def _line(self, error: Exception) -> str:
        """The driver's words without the statement and without secrets."""
        if isinstance(error, ModuleNotFoundError):
            return f"the driver {error.name} is not installed"
        said = str(error.orig) if isinstance(error, DBAPIError) else str(error)
        line = " ".join(said.split())
        for secret in self._secrets:
            line = line.replace(secret, "…")
        return line[:300]

    def cause(self, error: Exception) -> Exception | None:
        """An error to chain to, unless a traceback would print a secret with it."""
        return None if any(secret in str(error) for secret in self._secrets) else error


# -- urls -----------------------------------------------------------------------------------------------------


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # their words quote the URL, and with it the password
        raise InvalidArgument(
            "the ledger cannot be opened: this is no database URL", remedy=_OPEN_REMEDY, ledger=_scheme(url)
        ) from None
    return parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))


def _scheme(url: str) -> str:
    scheme, found, _ = url.partition("://")
    return f"{scheme}://…" if found and scheme.replace("+", "").isalnum() else "…"


def _shown(url: URL) -> str:
    """Enough of a URL to recognise it by."""
    return str(url) if url.drivername.startswith("sqlite") else f"{url.drivername.partition('+')[0]}://…"


def _secrets(url: URL) -> tuple[str, ...]:
    found = [str(url.password)] if url.password else []
    for key, value in url.query.items():
        if "pass" in key.lower() or "pwd" in key.lower() or key.lower() in {"odbc_connect", "sslkey"}:
            found += [value] if isinstance(value, str) else list(value)
    return tuple(each for each in found if each)


def _create(url: URL, busy_timeout_s: float, connect_timeout_s: float) -> Engine:
    name = url.get_backend_name()
    if name not in _RETRYABLE:
        raise ValueError(f"{name} is not supported: use sqlite, postgresql, mysql, mariadb or mssql")
    if name == "sqlite":
        in_memory = url.database in (None, "", ":memory:") or "mode=memory" in str(url)
        # An in-memory database is its connection: one, which all threads take in turn.
        pool: dict[str, Any] = {"pool_size": 1, "max_overflow": 0} if in_memory else {}
        engine = create_engine(
            url, connect_args={"timeout": busy_timeout_s, "check_same_thread": False}, poolclass=QueuePool, **pool
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    connect: dict[str, Any] = {"timeout" if name == "mssql" else "connect_timeout": max(1, round(connect_timeout_s))}
    if name == "mysql":  # what does not fit is refused, never cut
        connect["init_command"] = "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"
    return create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, connect_args=connect)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """WAL with full sync: a record that was reported survives power loss; readers never block the writer."""
    connection.isolation_level = None  # transactions begin where _begin_sqlite says, not where the driver guesses
    cursor = connection.cursor()
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] not in ("wal", "memory"):
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the lock before it reads: two that read first could not both go on to write."""
    write = connection.get_execution_options().get("stateflow_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _code(dialect: str, error: Any) -> str | int | None:
    """The driver's number or SQLSTATE for what happened."""
    if dialect == "postgresql":
        state: str | None = getattr(error, "sqlstate", None)
        return state
    if dialect == "sqlite":
        code = getattr(error, "sqlite_errorcode", None)
        return None if code is None else code & 0xFF
    if dialect == "mysql":
        first = error.args[0] if error is not None and error.args else None
        return first if isinstance(first, int) else None
    return next((code for code in (1205, 1222) if f"({code})" in str(error)), None)
