"""Outbox: keeps rows on disk until their partitions contain them.

An outbox is a SQLite file for one source, which one process at a time uses.

=========  ==========================================================================================================
table      rows
=========  ==========================================================================================================
meta       the source and operator of the outbox, the newest number, and the last known deployment
session    ids of the outbox's clients, which show whether this outbox or another client sent a partition's batch
lane       for each partition: ``base``, which is added to the outbox's numbers to give the partition's numbers; and
           the newest number in the outbox that the partition acknowledged
part       a batch's rows for one partition, until the partition contains them. ``sent_as``: the number under which
           they were sent, alone or with earlier rows; the partition may contain them already
output     a partition's output for rows that were forwarded later, until the caller has retrieved it
refused    rows that an operator refused, and why, until the caller has retrieved them
=========  ==========================================================================================================

A row of ``part`` survives a power loss (``synchronous=FULL``). Its deletion may not: the rows are then sent again under
their number, and a partition that contains them skips them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from stateflow.errors import (
    DataDirLocked,
    DiskFull,
    DiskRefused,
    InvalidArgument,
    OutboxDamaged,
    OutboxForeign,
    OutboxFull,
    StateflowError,
    from_wire,
)
from stateflow.operator.arrow import read_schema
from stateflow.operator.output import rows_in
from stateflow.private import UMASK
from stateflow.rpc.apply import PART_BYTES, BatchRows

FORMAT = 1
#: maximum number of parts, and of their bytes, that are sent as one batch
GROUP_PARTS, GROUP_BYTES = 256, 1 << 20
FILE = "outbox.db"
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS session (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lane (partition INTEGER PRIMARY KEY, base INTEGER, acknowledged INTEGER);
CREATE TABLE IF NOT EXISTS part (partition INTEGER, number INTEGER, sent_as INTEGER, row_count INTEGER, schema BLOB,
    rows BLOB, watermark_us INTEGER, checksum INTEGER, size INTEGER, PRIMARY KEY (partition, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS output (id INTEGER PRIMARY KEY, message BLOB, checksum INTEGER, size INTEGER);
CREATE TABLE IF NOT EXISTS refused (id INTEGER PRIMARY KEY, schema BLOB, rows BLOB, error TEXT, checksum INTEGER,
    size INTEGER);
"""


class Part(NamedTuple):
    """Rows for one partition under one number.

    ``parts``: number of batches to which the rows belong; ``number`` is the last of these batches. ``attempted``: the
    rows were sent before, and the partition may contain them.
    """

    partition: int
    number: int
    rows: BatchRows
    watermark_us: int | None
    attempted: bool
    parts: int = 1


class Base(NamedTuple):
    """Offset between the outbox's numbers and a partition's.

    ``ahead``: number ``n`` in the outbox is ``n + ahead`` at the partition; None: nothing was ever sent to it.
    ``acknowledged``: the newest number in the outbox that the partition acknowledged; -1: none.
    """

    ahead: int | None
    acknowledged: int


class Refused(NamedTuple):
    """Rows that an owner refused for good, and why.

    Example: ``for each in forwarding.refused(): print(each.error)``
    """

    rows: list[dict[str, object]]
    error: StateflowError


class _Stored(NamedTuple):
    """A row of the table ``part``."""

    number: int
    sent_as: int | None
    row_count: int
    schema: bytes
    rows: bytes
    watermark_us: int | None
    checksum: int
    size: int


def directory_given(outbox: str | Path) -> Path:
    """Returns the path of an outbox. Raises InvalidArgument for an empty name, the working directory's."""
    if not str(outbox):
        raise InvalidArgument("the outbox has no name", remedy="pass a directory, '.' for the working directory")
    return Path(outbox)


class Outbox:
    """The SQLite file of an outbox. Thread-safe. Raises DiskFull, DiskRefused, OutboxDamaged for errors of its file.

    Args:
        directory: directory that only this outbox uses; created if missing.
        bytes_max: maximum size of the stored data, in bytes.

    Raises DataDirLocked if another process uses the outbox, OutboxForeign if it is another source's or operator's.
    """

    def __init__(self, directory: Path, operator: str, source: str, bytes_max: int) -> None:
        self.directory, self._bytes_max = directory, bytes_max
        self._lock = RLock()
        self._bytes, self._newest = 0, -1
        with self._faults():
            directory.mkdir(parents=True, exist_ok=True, mode=0o777 & ~UMASK)
            path = directory / FILE
            path.touch(mode=0o666 & ~UMASK)
            self._inode = path.stat().st_ino
            self._db = sqlite3.connect(path, timeout=0.0, check_same_thread=False, isolation_level=None)
        try:
            self._open(operator, source)
        except BaseException:
            self._db.close()
            raise

    def _open(self, operator: str, source: str) -> None:
        with self._faults():
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            if (found := self._db.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                raise self._damaged(str(found and found[0]))
            self._db.executescript(_TABLES)
        owner = {"format": FORMAT, "operator": operator, "source": source}
        for name, wanted in owner.items():
            known = self._meta(name)
            if known is None:
                with self._written():
                    self._set(name, wanted)
            elif known != wanted:
                raise OutboxForeign(
                    f"this outbox has {name} {known!r}, not {wanted!r}",
                    remedy="pass another directory: each source of each operator needs its own outbox",
                    outbox=self.directory,
                )
        sizes = [self._one(f"SELECT coalesce(sum(size), 0) FROM {table}") for table in ("part", "output", "refused")]
        self._bytes = sum(sizes)
        newest = self._meta("newest")
        self._newest = -1 if newest is None else newest

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- stored deployment ------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The newest number that was used, -1: none."""
        return self._newest

    @property
    def size(self) -> int:
        """Size of the stored data in bytes, as counted for the limit."""
        return self._bytes

    def parts(self) -> dict[int, int]:
        """Returns partition → number of parts stored."""
        with self._faults():
            return dict(self._db.execute("SELECT partition, count(*) FROM part GROUP BY partition").fetchall())

    def sender(self, partition: int) -> Base:
        with self._faults():
            query = "SELECT base, acknowledged FROM lane WHERE partition = ?"
            found = self._db.execute(query, (partition,)).fetchone()
        return Base(None, -1) if found is None else Base(*found)

    def sessions(self) -> frozenset[str]:
        with self._faults():
            return frozenset(each for (each,) in self._db.execute("SELECT id FROM session"))

    @property
    def deployment(self) -> bytes | None:
        """The last known deployment; None: none was ever known."""
        found: bytes | None = self._meta("deployment")
        return found

    # -- changes ------------------------------------------------------------------------------------------

    def begin(self, session: str, deployment: bytes) -> None:
        """Registers a client's session, and stores the last known deployment."""
        with self._written():
            self._db.execute("INSERT OR IGNORE INTO session VALUES (?)", (session,))
            self._set("deployment", deployment)

    def log(
        self,
        number: int,
        batch: BatchRows,
        attempted: Collection[int],
        watermark_us: int | None,
        delivered: Iterable[tuple[int, int]],
        taken: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Stores a new batch, before any of its rows are sent.

        Args:
            attempted: partitions to which the batch is sent at once.
            delivered: (partition, number) of parts to delete.
            taken: table → last row to delete, see :meth:`taken`.

        Raises OutboxFull; the batch is not stored then, and must not be sent.
        """
        self._check_there()
        parts = {partition: batch.only([partition]) for partition in batch.partitions}
        with self._written():
            self._contained(delivered)
            for table, up_to in taken.items():
                self._forget(table, up_to)
            more = sum(part.size for part in parts.values())
            if self._bytes + more > self._bytes_max:
                untaken = sum(self._size(table, 1 << 62) for table in ("output", "refused"))
                raise OutboxFull(
                    f"{self._bytes} bytes are stored, and {more} more would exceed {self._bytes_max}; "
                    f"{untaken} of them have not been retrieved with forwarded() and refused() yet",
                    remedy="call these methods, wait until the rest has been forwarded, or raise outbox_bytes=",
                    outbox=self.directory,
                )
            for partition, part in parts.items():
                rows = b"" if part.rows is None else part.rows.serialize().to_pybytes()
                sent_as = number if partition in attempted else None
                columns = (partition, number, sent_as, part.ends[-1], part.schema, rows, watermark_us)
                check = _checksum(part.schema, rows), part.size
                self._db.execute("INSERT INTO part VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*columns, *check))
            self._bytes += more
            self._set("newest", number)
            self._newest = number

    def next(self, partition: int, alone_to: int = -1) -> Part | None:
        """Returns the first part that the partition may lack, to be sent now; None: nothing is stored for it.

        A part that was sent before stays unchanged. Otherwise as many batches as possible are joined to one part.
        Batches up to ``alone_to`` are not joined.
        """
        with self._written():
            with closing(self._stored(partition)) as found:
                first = next(found, None)
                if first is None:
                    return None
                group = _together(first, found, alone_to) if first.sent_as is None else []
            sent_as = first.sent_as
            if sent_as is not None:
                group = list(self._stored(partition, f"AND sent_as = {sent_as}"))
            else:
                sent_as = group[-1].number
                where = "WHERE partition = ? AND number BETWEEN ? AND ?"
                columns = sent_as, partition, first.number, sent_as
                self._db.execute(f"UPDATE part SET sent_as = ? {where}", columns)
            attempted = first.sent_as is not None
        for each in group:
            self._check(each.checksum, each.schema, each.rows)
        return Part(partition, sent_as, self._joined(partition, group), group[-1].watermark_us, attempted, len(group))

    def apart(self, part: Part) -> None:
        """Splits a part that the partition does not contain, so that its batches can be sent one by one."""
        with self._written():
            where = "WHERE partition = ? AND sent_as = ?"
            self._db.execute(f"UPDATE part SET sent_as = NULL {where}", (part.partition, part.number))

    def _stored(self, partition: int, which: str = "") -> Generator[_Stored]:
        """Yields the parts of a partition, each of which is read from disk only when it is asked for."""
        columns = ", ".join(_Stored._fields)
        query = f"SELECT {columns} FROM part WHERE partition = ? {which} ORDER BY number"
        for each in self._db.execute(query, (partition,)):
            yield _Stored(*each)

    def _joined(self, partition: int, group: list[_Stored]) -> BatchRows:
        read = [self._read(each.schema, each.rows, partition, each.row_count) for each in group]
        if len(read) == 1:
            return read[0]
        rows = [each.rows for each in read if each.rows is not None]
        count = sum(each.row_count for each in group)
        schema = next((each.schema for each in group if each.schema), b"")
        return BatchRows(schema, pa.concat_batches(rows) if rows else None, [partition], [count])

    def base(self, partition: int, base: Base) -> None:
        with self._written():
            self._db.execute("INSERT OR REPLACE INTO lane VALUES (?, ?, ?)", (partition, *base))

    def delivered(self, parts: Iterable[tuple[int, int]]) -> None:
        with self._written():
            self._contained(parts)

    def forwarded(self, partition: int, number: int, output: bytes) -> None:
        """Replaces a part by its output, which is kept until the caller has retrieved it."""
        with self._written():
            self._contained([(partition, number)])
            if output:
                size = PART_BYTES + len(output)
                columns = output, _checksum(output), size
                self._db.execute("INSERT INTO output (message, checksum, size) VALUES (?, ?, ?)", columns)
                self._bytes += size

    def refuse(self, part: Part, error: StateflowError) -> None:
        """Moves a part to the refused rows, which are kept until the caller has retrieved them."""
        rows = b"" if part.rows.rows is None else part.rows.rows.serialize().to_pybytes()
        wire = json.dumps(error.to_wire())
        with self._written():
            self._remove(part.partition, part.number)
            size = part.rows.size + len(wire)
            columns = part.rows.schema, rows, wire, _checksum(part.rows.schema, rows), size
            insert = "INSERT INTO refused (schema, rows, error, checksum, size) VALUES (?, ?, ?, ?, ?)"
            self._db.execute(insert, columns)
            self._bytes += size

    def outputs(self) -> tuple[int, list[bytes]]:
        """Returns the last row's id, for :meth:`taken`, and the outputs."""
        with self._faults():
            found = self._db.execute("SELECT id, checksum, message FROM output ORDER BY id").fetchall()
        for _, checksum, message in found:
            self._check(checksum, message)
        return max((each[0] for each in found), default=0), [message for _, _, message in found]

    def refusals(self) -> tuple[int, list[Refused]]:
        with self._faults():
            query = "SELECT id, schema, rows, error, checksum FROM refused ORDER BY id"
            found = self._db.execute(query).fetchall()
        for _, schema, rows, _, checksum in found:
            self._check(checksum, schema, rows)
        refused = [
            Refused(_rows(self._read(schema, rows, 0, 0)), from_wire(json.loads(error)))
            for _, schema, rows, error, _ in found
        ]
        return max((each[0] for each in found), default=0), refused

    def taken(self, table: str, up_to: int) -> None:
        """Deletes the rows of a table, ``output`` or ``refused``, up to ``up_to``."""
        with self._written():
            self._forget(table, up_to)

    def _forget(self, table: str, up_to: int) -> None:
        self._bytes -= self._size(table, up_to)
        self._db.execute(f"DELETE FROM {table} WHERE id <= ?", (up_to,))

    def _size(self, table: str, up_to: int) -> int:
        found: int = self._one(f"SELECT coalesce(sum(size), 0) FROM {table} WHERE id <= ?", up_to)
        return found

    def _contained(self, parts: Iterable[tuple[int, int]]) -> None:
        keep = "ON CONFLICT (partition) DO UPDATE SET acknowledged = max(acknowledged, excluded.acknowledged)"
        for partition, number in parts:
            self._remove(partition, number)
            self._db.execute(f"INSERT INTO lane VALUES (?, NULL, ?) {keep}", (partition, number))

    def _remove(self, partition: int, number: int) -> None:
        """Deletes the parts of a partition that were sent as ``number``."""
        where = "WHERE partition = ? AND sent_as = ?"
        self._bytes -= self._one(f"SELECT coalesce(sum(size), 0) FROM part {where}", partition, number)
        self._db.execute(f"DELETE FROM part {where}", (partition, number))

    # -- the file -----------------------------------------------------------------------------------------

    def _check_there(self) -> None:
        """Checks that the file still exists: data written to a removed file is lost when this process ends."""
        try:
            there = (self.directory / FILE).stat().st_ino == self._inode
        except OSError:
            there = False
        if not there:
            raise self._damaged("it was removed or replaced while in use")

    def _check(self, checksum: int, *data: bytes) -> None:
        """Checks a checksum, because SQLite does not notice a changed byte in its values."""
        if checksum != _checksum(*data):
            raise self._damaged("checksum mismatch in rows or outputs")

    def _read(self, schema: bytes, rows: bytes, partition: int, count: int) -> BatchRows:
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(rows), read_schema(schema)) if rows else None
        except (pa.ArrowException, StateflowError, OSError, ValueError) as error:
            raise self._damaged(str(error)) from error
        return BatchRows(schema, batch, [partition], [count])

    def _meta(self, key: str) -> Any:
        with self._faults():
            found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if found is None else found[0]

    def _set(self, key: str, value: object) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _one(self, query: str, *values: int) -> Any:
        with self._faults():
            return self._db.execute(query, values).fetchone()[0]

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Runs the block as a transaction, which is written completely or not at all."""
        with self._faults():
            known, commits = (self._bytes, self._newest), False
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                commits = True
                self._db.execute("COMMIT")
            except BaseException as error:
                opened = self._db.in_transaction
                if opened:
                    self._db.execute("ROLLBACK")
                # Ctrl-C during the commit is raised after it: then everything is written
                if opened or not commits or isinstance(error, sqlite3.Error):
                    self._bytes, self._newest = known
                raise

    @contextmanager
    def _faults(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                raise self._meant(error) from error

    def _meant(self, error: Exception) -> StateflowError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY or code == sqlite3.SQLITE_LOCKED:
            return DataDirLocked(
                "another process is using this outbox",
                remedy="use a separate outbox for each client",
                outbox=self.directory,
            )
        if code == sqlite3.SQLITE_FULL:
            return DiskFull(
                "the outbox cannot be written: its disk is full",
                remedy="free space on the disk",
                outbox=self.directory,
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._damaged(str(error))
        return DiskRefused(f"the outbox cannot be used: {error}", remedy="check its disk", outbox=self.directory)

    def _damaged(self, why: str) -> OutboxDamaged:
        return OutboxDamaged(
            f"the outbox cannot be read: {why}",
            remedy="move the directory aside, and resend from the application all rows that were not forwarded",
            outbox=self.directory,
        )


def _rows(batch: BatchRows) -> list[dict[str, object]]:
    return [] if batch.rows is None else rows_in(batch.rows)


def _checksum(*data: bytes) -> int:
    found = 0
    for each in data:
        found = xxhash.xxh3_64_intdigest(each, found)
    return found >> 1  # SQLite's integers are signed


def _together(first: _Stored, others: Iterator[_Stored], alone_to: int) -> list[_Stored]:
    """Returns as many of the first parts as can be sent as one batch.

    All of them have the same schema. A part with a watermark is the last of them, because a watermark takes effect
    after the rows that are sent with it.
    """
    group, size = [first], first.size
    if first.number <= alone_to:
        return group
    while len(group) < GROUP_PARTS and size < GROUP_BYTES and group[-1].watermark_us is None:
        part = next(others, None)
        if part is None or part.number <= alone_to or part.sent_as is not None:
            break
        size += part.size
        if size > GROUP_BYTES or not _fits(group, part):
            break
        group.append(part)
    return group


def _fits(group: list[_Stored], part: _Stored) -> bool:
    """Tells whether a part has the group's schema. A part without rows has no schema, and fits."""
    schemas = {each.schema for each in (*group, part) if each.schema}
    return len(schemas) <= 1
