"""Access to one database of any supported kind: transactions, code bundles, and the leader lease that fences writers.

Transactions are retried after conflicts, and errors of the database are raised as errors of stateflow.

One process at a time has the leader lease of a ledger, and makes the decisions. The lease is one row, with a term that
rises by one each time it is taken. Once a process has taken the lease, each of its writes checks, in its own
transaction, that the row still has the writer's term and id. So a former holder that was suspended or cut off, and does
not know that it was replaced, writes nothing. The check locks the row: a process that takes the lease waits for every
write that passed the check, and then reads what was written.

A leader lease ends in one of these ways:

- It was not renewed in time. A process that waits for the lease also counts that time by its own clock, from when it
  last saw the row change, because the database's clock may have been put back by an hour.
- Its holder gave it back.
- Its holder was a process of this machine and is gone.

The end of a lease does not prove that its holder has stopped, because clocks step: by its own clock, the former holder
may still decide for the rest of its lease. ``LeaderLease.grace_s`` says for how long.

The ledger also stores the code bundles of operators, beside the records that name them, so that every leader has them.
A bundle is stored in parts, because databases limit the length of a statement. Its digest identifies it, so writes of
bundles carry no term. Storing a part again only renews its age, so that the bundle is still there when a record names
it.
"""

from __future__ import annotations

import json
import os
import random  # noqa: TID251 - a type only
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Select,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from stateflow.errors import (
    HoldLost,
    InvalidArgument,
    LedgerCorrupt,
    LedgerReadOnly,
    LedgerReplaced,
    StateflowError,
    Unavailable,
    WriteUncertain,
)
from stateflow.ledger import rules
from stateflow.ledger.records import BUNDLE, HOLD, IDENTITY, now_us
from stateflow.private import masked
from stateflow.types import shown

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
#: driver codes of errors that a retry may end: deadlock, serialisation failure, lock wait timeout, busy
_RETRYABLE = {
    "postgresql": frozenset({"40001", "40P01", "55P03"}),
    "mysql": frozenset({1205, 1213, 1020}),
    "mssql": frozenset({1205, 1222}),
    "sqlite": frozenset({5, 6}),
}
#: driver codes for a user who may not write, and for a SQLite file or directory that is not writable
_READ_ONLY = {
    "postgresql": frozenset({"42501", "25006"}),
    "mysql": frozenset({1044, 1142, 1143, 1227, 1290, 1792, 1836}),
    "mssql": frozenset({229, 3906}),
    "sqlite": frozenset({8}),
}
_TOO_LARGE = {"postgresql": frozenset({"22003"}), "mysql": frozenset({1264, 1690}), "mssql": frozenset({8115})} | {
    "sqlite": frozenset[str | int]()
}
#: driver codes of further errors at a commit that refuse it: the disk is full, or replication has rolled it back
_COMMIT_REFUSED = {"sqlite": frozenset({13}), "mysql": frozenset({3100, 3101})} | dict.fromkeys(
    ("postgresql", "mssql"), frozenset[int]()
)
#: prefixes of SQLSTATEs after which the outcome of a commit in PostgreSQL is not known; any other refuses the commit
_COMMIT_UNKNOWN = ("08", "40003", "57P0", "58", "XX")
ATTEMPTS_MAX = 8
CONNECT_TIMEOUT_S = 10
#: time after which a connection is given up whose server's machine acknowledges nothing: it has lost its power, or a
#: firewall forgot the connection. The system's default is 15 minutes to two hours. A busy server is waited for.
SILENCE_S = 30.0
KEEPALIVE_S = 10
BACKOFF_MAX_S = 1.0


class Database:
    """A database, named by its URL. The constructor does not connect to it.

    Args:
        url: an SQLAlchemy URL; a driver need not be named.

    Raises InvalidArgument.
    """

    def __init__(self, url: str, *, rng: random.Random, busy_timeout_s: float = 5.0) -> None:
        self._rng = rng
        parsed = _parse(url)
        self.shown = _shown(parsed)
        self._secrets = _secrets(parsed)
        try:
            self.engine: Engine = _create(parsed, busy_timeout_s)
        except (SQLAlchemyError, ImportError, ValueError, TypeError) as error:
            raise self.cannot_open(error) from None
        event.listen(self.engine, "before_cursor_execute", _check_texts)
        self.dialect = self.engine.dialect.name
        file = file_of(parsed)
        # as SQLAlchemy does it, once: the program may change its directory
        self._file = None if file is None else os.path.abspath(file)  # noqa: PTH100 - resolve() follows links
        self._inode: tuple[int, int] | None = None  # of the file, once there is one

    # -- transactions -------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, *, one_moment: bool = False) -> Iterator[Connection]:
        """Connects for reading. Raises Unavailable.

        Args:
            one_moment: all statements read the database as of the first one; SQLite always does so, and SQL Server
                never. Otherwise, each sees what was committed before it.
        """
        engine = self.engine
        if one_moment and self.dialect in ("postgresql", "mysql"):
            engine = engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            with engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise self._said(error, "read", "check its database") from self.cause(error)
        except OverflowError as error:
            raise _too_large() from error

    def write(self, work: Callable[[Connection], T]) -> T:
        """Runs ``work`` in one transaction, all of it or nothing, and repeats it after a conflict with another writer.

        Raises the errors of ``work``; Unavailable when the database does not answer or stays busy, LedgerReadOnly,
        LedgerReplaced, WriteUncertain.
        """
        engine = self.engine.execution_options(stateflow_begin="BEGIN IMMEDIATE")
        for attempt in range(1, ATTEMPTS_MAX + 1):
            committing = False
            self.check_file()
            try:
                with engine.connect() as connection, connection.begin() as transaction:
                    result = work(connection)
                    self.check_file()
                    committing = True
                    transaction.commit()
                    return result
            except OverflowError as error:
                raise _too_large() from error
            except SQLAlchemyError as error:
                if not self._retryable(error):
                    raise self._not_written(error, committing) from self.cause(error)
                if attempt == ATTEMPTS_MAX:
                    raise self._given_up(error) from self.cause(error)
            time.sleep(self._rng.random() * min(BACKOFF_MAX_S, 0.005 * 2**attempt))
        raise AssertionError

    def check_file(self) -> None:
        """Checks that the file is still the one that was opened, because records written to another file, or to a
        deleted one, would be lost. Raises LedgerReplaced.
        """
        if self._file is None:
            return
        found = _inode(self._file)
        if self._inode is None:
            self._inode = found
        if (found is None and self._inode is not None) or found != self._inode:
            raise LedgerReplaced(
                "the ledger's file was deleted or moved" if found is None else "the ledger's file was replaced",
                remedy="put the original file back, or restart to use what is there; nothing was written",
                ledger=self.shown,
            )

    def is_missing(self) -> bool:
        """Tells whether the database is a SQLite file that does not exist."""
        return self._file is not None and _inode(self._file) is None

    def use_write_ahead_log(self) -> None:
        """Switches a SQLite file permanently to a write-ahead log, so that readers never block the writer. Does nothing
        for other databases."""
        if self.dialect == "sqlite":
            with self.engine.execution_options(stateflow_begin="").connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL").close()

    def close(self) -> None:
        self.engine.dispose()

    # -- errors -------------------------------------------------------------------------------------------

    def _retryable(self, error: SQLAlchemyError) -> bool:
        """Tells whether a retry may succeed. For example, if another writer inserted the same key first, a retry reads
        that row."""
        if isinstance(error, IntegrityError):
            return True
        return isinstance(error, DBAPIError) and _code(self.dialect, error.orig) in _RETRYABLE[self.dialect]

    def _given_up(self, error: SQLAlchemyError) -> Unavailable:
        if isinstance(error, IntegrityError):  # several writers, or rows that contradict the records
            what = f"the write conflicted with stored rows in {ATTEMPTS_MAX} attempts"
            remedy = "try again; if the conflict remains, run `stateflow ledger verify`; nothing was written"
        else:
            what = f"the ledger stayed busy for {ATTEMPTS_MAX} attempts"
            remedy = "try again; if it stays busy, end the transaction that locks its database; nothing was written"
        return Unavailable(what, remedy=remedy, ledger=self.shown)

    def _not_written(self, error: SQLAlchemyError, committing: bool) -> StateflowError:
        if committing and not self._is_refusal(error):
            broke = getattr(error, "connection_invalidated", False)
            return WriteUncertain(
                "the connection to the database broke during a commit"
                if broke
                else f"a commit ended with an error of unknown outcome: {self._line(error)}",
                remedy="read the item again to see whether it was written",
                ledger=self.shown,
            )
        return self._said(error, "written", "check its database; nothing was written")

    def _is_refusal(self, error: SQLAlchemyError) -> bool:
        """Tells whether an error at a commit proves that nothing was written."""
        if getattr(error, "connection_invalidated", False):
            return False
        code, dialect = _code(self.dialect, getattr(error, "orig", None)), self.dialect
        if isinstance(code, str):
            return not code.startswith(_COMMIT_UNKNOWN)
        return any(code in codes[dialect] for codes in (_READ_ONLY, _TOO_LARGE, _COMMIT_REFUSED))

    def _said(self, error: SQLAlchemyError, done: str, remedy: str) -> StateflowError:
        line = self._line(error)
        code = _code(self.dialect, getattr(error, "orig", None))
        if code in _TOO_LARGE[self.dialect]:
            return _too_large()
        if code in _READ_ONLY[self.dialect] or "read-only" in line:
            return LedgerReadOnly(
                "the ledger is read-only",
                remedy="grant this user write access, for a file to its directory too, or name another ledger; nothing "
                "was written",
                ledger=self.shown,
            )
        return Unavailable(f"the ledger cannot be {done}: {line}", remedy=remedy, ledger=self.shown)

    def cannot_open(self, error: Exception) -> StateflowError:
        code = _code(self.dialect, getattr(error, "orig", None)) if isinstance(error, DBAPIError) else None
        if code in _READ_ONLY["sqlite"] and self._file is not None and not self.is_missing():
            return LedgerReadOnly(
                "the ledger or its directory is not writable, and SQLite then reads it only while no process writes it",
                remedy=f"if no process writes it, use {_read_only_url(Path(self._file))}",
                ledger=self.shown,
            )
        return InvalidArgument(
            f"the ledger cannot be opened: {self._line(error)}", remedy=_OPEN_REMEDY, ledger=self.shown
        )

    def _line(self, error: Exception) -> str:
        """Returns the driver's message without the statement and without secrets."""
        if isinstance(error, ModuleNotFoundError):
            return f"the driver {error.name} is not installed"
        said = str(error.orig) if isinstance(error, DBAPIError) else str(error)
        line = " ".join(said.split())
        for secret in self._secrets:
            line = line.replace(secret, "…")
        return line[:300]

    def cause(self, error: Exception) -> Exception | None:
        """Returns the error to name as the cause of another one; None: it contains a secret, which a traceback would
        print.
        """
        return None if any(secret in str(error) for secret in self._secrets) else error


# -- urls -----------------------------------------------------------------------------------------------------


def sqlite_url(file: Path) -> str:
    """Returns the URL of a ledger in a file, whose path may have any characters.

    Raises InvalidArgument for a path that the installed SQLAlchemy cannot write as a URL: versions before 2.1 have no
    escapes.
    """
    path = str(file.absolute())
    url = URL.create("sqlite", database=path).render_as_string(hide_password=False)
    read = make_url(url)
    if (read.database, dict(read.query)) != (path, {}):
        raise InvalidArgument(
            "the path of the ledger cannot be written as a URL", remedy="choose another directory", path=path
        )
    return url


def file_of(url: URL) -> Path | None:
    """Returns the file of a SQLite database. None: the database is in memory, is named by a ``file:`` URI, or is not
    SQLite.
    """
    if url.get_backend_name() != "sqlite" or _in_memory(url) or _is_uri(url):
        return None
    return Path(str(url.database))


def _is_uri(url: URL) -> bool:
    return str(url.query.get("uri", "")).lower() in ("true", "yes", "on", "y", "t", "1")  # as SQLAlchemy reads it


def _read_only_url(file: Path) -> str:
    """Builds a URL that opens a SQLite file read-only: a URI within a URL, each with its own escapes."""
    query = {"mode": "ro", "immutable": "1", "uri": "true"}
    return URL.create("sqlite", database=f"file:{quote(str(file.absolute()))}", query=query).render_as_string()


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # their messages quote the URL, and with it the password
        raise InvalidArgument(
            "the ledger cannot be opened: not a database URL", remedy=_OPEN_REMEDY, ledger=_scheme(url)
        ) from None
    return parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))


def _scheme(url: str) -> str:
    scheme, found, _ = url.partition("://")
    return f"{scheme}://…" if found and scheme.replace("+", "").isalnum() else "…"


def _shown(url: URL) -> str:
    """Returns a URL without its secrets, for messages."""
    return masked(str(url)) if url.drivername.startswith("sqlite") else f"{url.drivername.partition('+')[0]}://…"


def _secrets(url: URL) -> tuple[str, ...]:
    found = [str(url.password)] if url.password else []
    for key, value in url.query.items():
        if "pass" in key.lower() or "pwd" in key.lower() or key.lower() in {"odbc_connect", "sslkey"}:
            found += [value] if isinstance(value, str) else list(value)
    return tuple(each for each in found if each)


def _in_memory(url: URL) -> bool:
    inside = _is_uri(url) and str(url.database).startswith("file::memory:")
    return url.database in (None, "", ":memory:") or inside or url.query.get("mode") == "memory"


def _inode(file: str) -> tuple[int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_special(file: Path) -> bool:
    """Tells whether a directory or device has this name; what is written to some devices is lost."""
    try:
        return not stat.S_ISREG(file.stat().st_mode)
    except OSError:  # if there is a file, SQLite says why it cannot be opened
        return False


def _create(url: URL, busy_timeout_s: float) -> Engine:
    name = url.get_backend_name()
    if name not in _RETRYABLE:
        raise ValueError(f"{name} is not supported: use sqlite, postgresql, mysql, mariadb or mssql")
    if name == "sqlite":
        if (file := file_of(url)) is not None and _is_special(file):
            raise ValueError("it is not a regular file")
        # An in-memory database is its connection: all threads use one in turn.
        pool: dict[str, Any] = {"pool_size": 1, "max_overflow": 0} if _in_memory(url) else {}
        engine = create_engine(
            url, connect_args={"timeout": busy_timeout_s, "check_same_thread": False}, poolclass=QueuePool, **pool
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    connect: dict[str, Any] = {"timeout" if name == "mssql" else "connect_timeout": CONNECT_TIMEOUT_S}
    if name == "postgresql":  # texts of a database without an encoding (SQL_ASCII) would come as bytes
        connect |= {"client_encoding": "utf8", "tcp_user_timeout": round(SILENCE_S * 1000)}
        connect |= {"keepalives_idle": KEEPALIVE_S, "keepalives_interval": KEEPALIVE_S}
    if name == "mysql":  # a value that does not fit is refused, never cut
        connect["init_command"] = "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"
    engine = create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, connect_args=connect)
    if name == "mysql":
        event.listen(engine, "connect", _end_silence)
    return engine


def _end_silence(connection: Any, _: Any) -> None:
    """Lets the system end a connection to MySQL whose server's machine is silent, as libpq's parameters do."""
    link = getattr(connection, "_sock", None)
    if link is None or link.family == socket.AF_UNIX:
        return
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_USER_TIMEOUT", round(SILENCE_S * 1000)),
    ):
        if hasattr(socket, name):  # each system has some of them
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """Prepares a connection. Each commit is synced, so that a record survives power loss once its writer has
    returned."""
    connection.isolation_level = None  # transactions begin where _begin_sqlite says, not where the driver guesses
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """Begins a transaction. A writer takes the lock before it reads: if two writers read first, only one of them could
    then write."""
    begin = connection.get_execution_options().get("stateflow_begin", "BEGIN")
    if begin:  # empty for a statement that cannot be in a transaction
        connection.exec_driver_sql(begin)


def _code(dialect: str, error: Any) -> str | int | None:
    """Returns the driver's number or SQLSTATE for an error; None when it has none."""
    if dialect == "postgresql":
        state: str | None = getattr(error, "sqlstate", None)
        return state
    if dialect == "sqlite":
        code = getattr(error, "sqlite_errorcode", None)
        return None if code is None else code & 0xFF
    if dialect == "mysql":
        first = error.args[0] if error is not None and error.args else None
        return first if isinstance(first, int) else None
    return next((code for code in (1205, 1222, 229, 3906, 8115) if f"({code})" in str(error)), None)


def _too_large() -> InvalidArgument:
    return InvalidArgument("a number exceeds 64 bits", remedy="use a smaller one; nothing was written")


def _check_texts(connection: Connection, _: Any, __: str, parameters: Any, ___: Any, ____: bool) -> None:
    """Checks that texts in queries are valid, because some databases would refuse an invalid text, and others would
    find nothing. Texts to be written are checked elsewhere. Raises InvalidArgument.
    """
    if "stateflow_begin" in connection.get_execution_options():
        return
    for value in parameters.values() if isinstance(parameters, Mapping) else parameters or ():
        if isinstance(value, str) and not rules.is_text(value):
            raise InvalidArgument(
                f"{shown(value)} cannot be stored in a ledger", remedy="remove NUL and lone surrogates"
            )


# -- Leader lease ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has the leader lease, or wants it. Processes on the same machine can tell by ``boot``,
    ``namespace``, ``pid`` and ``started`` whether it has ended. ``address`` is the address at which it receives
    requests.
    """

    id: str
    host: str = ""
    address: str = ""
    pid: int = 0
    started: int = 0
    boot: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"process {self.pid} on {self.host}{where}" if self.pid else f"{self.id}{where}"


NOBODY = Holder("")


@dataclass(frozen=True, slots=True)
class LeaderLease:
    """The leader lease of a ledger at the time when it was read.

    Attributes:
        left_s: seconds until the lease ends, by the database's clock.
        until_us: end of the lease by that clock. Each renewal changes it. A process with another clock can only tell
            whether it has changed.
        grace_s: seconds after the lease was taken in which the former holder may still decide, by any clock.
    """

    term: int
    holder: Holder
    since_us: int
    lease_s: float
    left_s: float
    grace_s: float = 0.0
    until_us: int = 0


def identity(connection: Connection) -> str:
    """Returns the ledger's id, which never changes. Raises LedgerCorrupt if it is missing."""
    found = connection.execute(select(IDENTITY.c.id)).scalar()
    if found is None:
        raise LedgerCorrupt("the ledger's id is missing", remedy="restore its tables from a backup")
    return str(found)


def present_lease(connection: Connection) -> LeaderLease:
    """Returns the present leader lease; its holder is NOBODY if no process has it."""
    row = connection.execute(_lease_row()).one()
    return _lease_of(row)


def take_lease(
    connection: Connection, holder: Holder, lease_s: float, gone: Callable[[Holder], bool], over_us: int | None = None
) -> LeaderLease:
    """Takes the leader lease if it is free or over. Returns the lease afterwards: the caller's, or the present
    holder's."""
    row = connection.execute(_lease_row().with_for_update().with_hint(HOLD, "WITH (UPDLOCK, ROWLOCK)", "mssql")).one()
    before = _lease_of(row)
    clean = not before.holder.id or before.holder.id == holder.id or gone(before.holder)
    if not clean and before.left_s > 0 and before.until_us != over_us:
        return before
    lease_us = round(lease_s * 1e6)
    taken = update(HOLD).values(
        term=before.term + 1,
        holder=holder.id,
        about=json.dumps(asdict(holder)),
        since_us=now_us(),
        until_us=now_us() + lease_us,
        lease_us=lease_us,
    )
    connection.execute(taken)
    return LeaderLease(before.term + 1, holder, 0, lease_s, lease_s, 0.0 if clean else before.lease_s)


def renew_lease(connection: Connection, term: int, holder: str, lease_s: float) -> None:
    """Renews the leader lease. Raises HoldLost."""
    mine = (HOLD.c.term == term) & (HOLD.c.holder == holder)
    renewed = update(HOLD).where(mine).values(until_us=now_us() + round(lease_s * 1e6))
    if connection.execute(renewed).rowcount != 1:
        raise leadership_lost(connection, term)


def give_back_lease(connection: Connection, term: int, holder: str) -> None:
    """Gives the leader lease back. Does nothing when this holder no longer has it."""
    mine = (HOLD.c.term == term) & (HOLD.c.holder == holder)
    connection.execute(update(HOLD).where(mine).values(holder="", until_us=0))


def check_lease(connection: Connection, ledger: str, term: int, holder: str) -> None:
    """Checks, in the transaction of a write, that the ledger is still the same one and that the writer has the leader
    lease. Raises LedgerReplaced, HoldLost."""
    if identity(connection) != ledger:
        raise replaced(ledger)
    held = select(HOLD.c.term, HOLD.c.holder).with_for_update(read=True)
    found = connection.execute(held.with_hint(HOLD, "WITH (HOLDLOCK, ROWLOCK)", "mssql")).one()
    if (found.term, found.holder) != (term, holder):
        raise leadership_lost(connection, term)


def replaced(ledger: str) -> LedgerReplaced:
    return LedgerReplaced(
        "the ledger was replaced by another one after it was opened",
        remedy="put the former ledger back, or restart to use the new one; nothing was written",
        ledger=ledger,
    )


def leadership_lost(connection: Connection, term: int) -> HoldLost:
    now = present_lease(connection)
    return HoldLost(
        f"the leader lease was taken by {now.holder}" if now.holder.id else "the leader lease has ended",
        remedy="ask the current leader",
        term=term,
        newest=now.term,
        leader=now.holder.address or None,
    )


def _lease_row() -> Select[Any]:
    return select(HOLD, (HOLD.c.until_us - now_us()).label("left_us"))


def _lease_of(row: Any) -> LeaderLease:
    holder = NOBODY
    if row.holder:  # fields that a newer release has written are ignored
        about = json.loads(row.about)
        holder = Holder(**{each.name: about[each.name] for each in fields(Holder) if each.name in about})
    return LeaderLease(row.term, holder, row.since_us, row.lease_us / 1e6, row.left_us / 1e6, until_us=row.until_us)


# -- Code bundles of operators ---------------------------------------------------------------------------------------


def put_bundle_part(connection: Connection, digest: str, number: int, count: int, body: bytes) -> None:
    """Stores one part of a bundle. Parts are numbered from 0. If the part is already stored, only the time of storing
    is renewed."""
    where = (BUNDLE.c.digest == digest) & (BUNDLE.c.number == number)
    if connection.execute(update(BUNDLE).where(where).values(stored_us=now_us())).rowcount == 0:
        values = {"digest": digest, "number": number, "count": count, "body": body}
        connection.execute(insert(BUNDLE).values(stored_us=now_us(), **values))


def bundle_part(connection: Connection, digest: str, number: int) -> tuple[bytes, int] | None:
    """Returns (body of a part, number of parts of the bundle); None when the part is not stored."""
    where = (BUNDLE.c.digest == digest) & (BUNDLE.c.number == number)
    row = connection.execute(select(BUNDLE.c.body, BUNDLE.c.count).where(where)).first()
    return None if row is None else (bytes(row[0]), int(row[1]))


def drop_other_bundles(connection: Connection, digests: Collection[str], older_than_us: int) -> int:
    """Deletes the bundles whose newest part is at least ``older_than_us`` old, except those in ``digests``.

    Returns how many parts it deleted.
    """
    known = connection.execute(
        select(BUNDLE.c.digest, func.max(BUNDLE.c.stored_us), now_us()).group_by(BUNDLE.c.digest)
    ).all()
    gone = [digest for digest, stored, now in known if digest not in digests and now - stored >= older_than_us]
    if not gone:
        return 0
    return int(connection.execute(delete(BUNDLE).where(BUNDLE.c.digest.in_(gone))).rowcount)
