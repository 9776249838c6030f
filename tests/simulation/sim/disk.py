"""A computer whose power may fail: files and databases keep the data that is synced, and by chance some of the rest.

Files and directories are inodes. After a power loss, a file may have its content of its last sync, and a directory its
entries of its last sync: a newer name may be gone, and a name removed since may be back. Of data appended since then, a
random prefix is kept, and a sector of that may be zeros. A rename is one transaction, as in a journal: a node that was
durable under the old name exists under one of the two names.

A database has a log and immutable files, like RocksDB. A write is in the log when it returns, and outlives its process.
It outlives a power loss once it is synced, or a later write or a flush is. A power loss leaves a prefix of the log or,
where a commit log comes first, a prefix of each of the log's files.
"""

from __future__ import annotations

import fnmatch
import io
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgpack

from stateflow.changes import Mutations
from stateflow.errors import DataDirLocked, StateDamaged, StateMissing
from stateflow.partition.data_directory import INCOMING, OWNED, UNFINISHED
from stateflow.storage.commit_log import FRAME_MAGIC, Commit, decode, segment_header, segment_name
from stateflow.storage.store import prefix_end
from tests.simulation.sim.loop import Crashed, Mutex, Process

SSTS_MAX = 4
#: number of writes after which a database's log begins a new file
LOG_FILE_RECORDS = 3
SECTOR = 512


@dataclass(slots=True)
class File:
    number: int
    data: bytes = b""
    synced: bytes = b""
    records: Any = None  # decoded at first use; immutable from then on


@dataclass(slots=True)
class Log:
    """Write-ahead log of a database.

    Attributes:
        records: the records of all files of the log.
        synced: number of records that are durable.
        damaged_at: index of the first damaged record; None if no record is damaged.
        files: index of the first record of each file except the first file.
        hole_at: index of the first record after a gap that a power loss left; None if there is no gap.
    """

    records: list[Any] = field(default_factory=list)
    synced: int = 0
    damaged_at: int | None = None
    files: list[int] = field(default_factory=list)
    hole_at: int | None = None

    def lose_power(self, random: Random) -> None:
        kept: list[Any] = []
        for start, end in itertools.pairwise([0, *self.files, len(self.records)]):
            keep = random.randint(max(start, min(self.synced, end)), end)
            if self.hole_at is None and len(kept) < start < keep:
                self.hole_at = len(kept)
            kept += self.records[start:keep]
        self.records, self.synced, self.files = kept, len(kept), []

    @property
    def readable(self) -> int:
        """Number of records before the first damaged or missing one."""
        return min(at for at in (self.hole_at, self.damaged_at, len(self.records)) if at is not None)


@dataclass(slots=True)
class Dir:
    entries: dict[str, File | Dir] = field(default_factory=dict)
    durable: dict[str, File | Dir] = field(default_factory=dict)
    log: Log | None = None  # of the database in it
    opened_by: Process | None = None
    next_file: int = 1

    def put(self, name: str, node: File) -> None:
        """Writes a file and its entry durably, as databases do."""
        node.synced = node.data
        self.entries[name] = self.durable[name] = node

    def drop(self, name: str) -> None:
        self.entries.pop(name, None)
        self.durable.pop(name, None)


class _Rename(NamedTuple):
    node: File | Dir
    before: Dir
    old: str
    behind: Dir
    new: str

    def commit(self) -> None:
        if self.before.durable.get(self.old) is self.node:
            del self.before.durable[self.old]
            self.behind.durable[self.new] = self.node

    def undo(self) -> None:
        if self.before.durable.get(self.old) is self.node:
            if self.behind.entries.get(self.new) is self.node:
                del self.behind.entries[self.new]
            self.before.entries[self.old] = self.node


class Disk:
    """A disk, which outlives the processes that use it."""

    def __init__(self, random: Random, name: str) -> None:
        self.root = Dir()
        self.random = random
        self.name = name  # unique among disks
        self.ids = 0
        self._files = 0
        self._renames: list[_Rename] = []  # those after which neither of their directories was synced

    def new(self, data: bytes = b"") -> File:
        self._files += 1
        return File(self._files, data)

    def rename(self, before: Dir, old: str, behind: Dir, new: str) -> None:
        node = before.entries.pop(old)
        behind.entries[new] = node
        self._renames.append(_Rename(node, before, old, behind, new))

    def sync(self, directory: Dir) -> None:
        left: list[_Rename] = []
        for rename in self._renames:
            if directory is rename.before or directory is rename.behind:
                rename.commit()
            else:
                left.append(rename)
        self._renames = left
        directory.durable = dict(directory.entries)

    def power_loss(self) -> None:
        # a rename is durable only if all earlier ones are
        kept = self.random.randint(0, len(self._renames)) if self._renames else 0
        for rename in self._renames[:kept]:
            rename.commit()
        for rename in reversed(self._renames[kept:]):
            rename.undo()
        self._renames = []
        self._forget(self.root)

    def _forget(self, directory: Dir) -> None:
        kept: dict[str, File | Dir] = {}
        for name in dict.fromkeys([*directory.entries, *directory.durable]):
            now, then = directory.entries.get(name), directory.durable.get(name)
            node = now if now is then or self.random.random() < 0.5 else then
            if node is not None:
                kept[name] = node
        directory.entries, directory.durable = kept, dict(kept)
        if directory.log is not None:
            directory.log.lose_power(self.random)
        for node in kept.values():
            if isinstance(node, Dir):
                self._forget(node)
            elif node.synced and node.data != node.synced and node.data.startswith(node.synced):
                node.data = node.synced = node.synced + self._torn(len(node.synced), node.data[len(node.synced) :])
            elif node.data != node.synced:
                whole = node.data if self.random.random() < 0.5 else b""
                node.data = node.synced = whole[: self.random.randint(0, len(whole))] or node.synced

    def _torn(self, at: int, appended: bytes) -> bytes:
        """Returns the part of appended data that a power loss leaves: a prefix, perhaps with a sector of zeros.

        Args:
            at: the offset of the data in its file.
        """
        left = appended[: self.random.randint(0, len(appended))]
        if left and self.random.random() < 0.3:
            start = (at + self.random.randrange(len(left))) // SECTOR * SECTOR
            start, end = max(0, start - at), min(len(left), start + SECTOR - at)
            left = left[:start] + bytes(end - start) + left[end:]
        return left


class Note:
    """A note that is lost with its process, which no batch ends here."""

    found = None

    def begin(self, text: str) -> None: ...

    def at(self, number: int) -> None: ...

    def end(self) -> None: ...


class Environment:
    """A double of stateflow.partition.environment.Environment, for one process on one disk.

    Args:
        logs: whether the replica has a commit log, so that the logs of its databases may have holes.

    Attributes:
        wrote: called for every write to a database once the write is in the database's log.
        logged: called for every commit once it is in the commit log.
    """

    def __init__(self, process: Process, disk: Disk, *, logs: bool = False) -> None:
        self.process, self.disk, self.logs = process, disk, logs
        self.wrote: Callable[[Store, Mutations], None] = lambda _store, _mutations: None
        self.logged: Callable[[Commit], None] = lambda _commit: None

    @property
    def home(self) -> Path:
        return Path(self, ("data",))

    def write(self) -> None:
        """Called before and after each change of the disk: the process may be killed here. Raises Crashed then."""
        process = self.process
        if not process.alive:
            raise Crashed
        if process.writes_left is not None:
            process.writes_left -= 1
            if process.writes_left < 0:
                process.die()
                raise Crashed
        process.loop.may_switch()

    def mutex(self) -> Mutex:
        return Mutex(self.process.loop)

    def work_lock(self) -> Mutex:
        return Mutex(self.process.loop)

    def aside(self, work: Callable[[], None], wait_s: float = 0.0) -> None:
        work()

    def claim(self, directory: Path) -> Any:
        directory.mkdir(parents=True, exist_ok=True)
        self.disk.root.durable = dict(self.disk.root.entries)  # the real code syncs the parent when it creates it
        return SimpleNamespace(close=lambda: None)

    def open(self, directory: Path, *, create: bool = False, up_to_damage: bool = False) -> Store:
        node = directory.find()
        if not isinstance(node, Dir) or "CURRENT" not in node.entries:
            if not create:
                raise StateMissing("there is no partition database", remedy="-", path=directory)
            directory.mkdir(parents=True, exist_ok=True)
            node = directory.find()
            assert isinstance(node, Dir)
        if node.opened_by is not None and node.opened_by.alive:
            raise DataDirLocked("it is open", remedy="-", path=directory)
        self.write()
        if "CURRENT" in node.entries:
            check(node, up_to_damage)
        if node.log is not None and up_to_damage:
            del node.log.records[node.log.readable :]
            node.log.damaged_at = node.log.hole_at = None
            node.log.files, node.log.synced = [], 0
        return Store(self, node)

    def copy(self, directory: Path, to: Path) -> None:
        found = directory.directory()
        assert found.opened_by is None or not found.opened_by.alive
        self.write()
        made = Dir(next_file=found.next_file)
        to.parent.directory().entries[to.name] = made
        for name, node in found.entries.items():
            if isinstance(node, File):
                self.write()
                made.entries[name] = node if name.endswith(".sst") else self.disk.new(node.data)
        if found.log is not None:
            made.log = Log(list(found.log.records))

    def expect(self, databases: int) -> None:
        pass

    def open_apart(self, directory: Path) -> Store:
        return self.open_read_only(directory)

    def open_read_only(self, directory: Path, *, up_to_damage: bool = False) -> Store:
        if not up_to_damage:
            return self.open(directory)
        node = directory.directory()
        self.write()
        check(node, up_to_damage)
        copy = Dir(dict(node.entries), next_file=node.next_file)
        if node.log is not None:
            copy.log = Log(node.log.records[: node.log.readable])
        return Store(self, copy)

    def sync_database(self, directory: Path) -> None:
        node = directory.directory()
        self.write()
        if node.log is not None:
            node.log.synced = len(node.log.records)
        self.write()

    def segments(self, directory: Path) -> Segments:
        return Segments(self, directory)

    def write_durably(self, path: Path, content: str | bytes) -> None:
        self.write()
        file = self.disk.new(content if isinstance(content, bytes) else content.encode())
        file.synced = file.data
        parent = path.parent.directory()
        parent.entries[path.name] = file
        self.write()
        parent.durable[path.name] = file

    def sync(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self.write()
            node = path.find()
            if isinstance(node, Dir):
                self.disk.sync(node)
            elif isinstance(node, File):
                node.synced = node.data
            else:
                raise FileNotFoundError(path)

    def place(self, directory: Path) -> str:
        return self.disk.name

    def new_id(self) -> str:
        self.disk.ids += 1
        return f"{self.disk.name}.{self.disk.ids}"

    def running_note(self, file: Path) -> Note:
        return Note()

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def remove_tree(self, path: Path) -> None:
        node, parent = path.find(), path.parent.find()
        if isinstance(parent, Dir) and node is not None:
            while isinstance(node, Dir) and node.entries:  # in random order; the process may be killed in between
                self.write()
                name = self.disk.random.choice(list(node.entries))
                if isinstance(node.entries[name], Dir):
                    self.remove_tree(path / name)
                else:
                    del node.entries[name]
            self.write()
            parent.entries.pop(path.name, None)


class Path:
    """The part of pathlib.Path that the product uses."""

    __slots__ = ("_environment", "parts")

    def __init__(self, environment: Environment, parts: tuple[str, ...]) -> None:
        self._environment, self.parts = environment, parts

    def __truediv__(self, name: str) -> Path:
        return Path(self._environment, (*self.parts, *name.split("/")))

    def __str__(self) -> str:
        return "/" + "/".join(self.parts)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Path) and self.parts == other.parts

    def __lt__(self, other: Path) -> bool:
        return self.parts < other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    @property
    def name(self) -> str:
        return self.parts[-1]

    @property
    def suffix(self) -> str:
        return self.name[self.name.rindex(".") :] if "." in self.name else ""

    @property
    def stem(self) -> str:
        return self.name.removesuffix(self.suffix)

    @property
    def parent(self) -> Path:
        return Path(self._environment, self.parts[:-1])

    def find(self) -> File | Dir | None:
        if not self._environment.process.alive:
            raise Crashed
        node: File | Dir | None = self._environment.disk.root
        for part in self.parts:
            if not isinstance(node, Dir):
                return None
            node = node.entries.get(part)
        return node

    def directory(self) -> Dir:
        node = self.find()
        if not isinstance(node, Dir):
            raise FileNotFoundError(str(self))
        return node

    def file(self) -> File:
        node = self.find()
        if not isinstance(node, File):
            raise FileNotFoundError(str(self))
        return node

    def exists(self) -> bool:
        return self.find() is not None

    def is_dir(self) -> bool:
        return isinstance(self.find(), Dir)

    def is_file(self) -> bool:
        return isinstance(self.find(), File)

    def iterdir(self) -> Iterator[Path]:
        return iter([self / name for name in self.directory().entries])

    def glob(self, pattern: str) -> Iterator[Path]:
        first, _, rest = pattern.partition("/")
        if not self.is_dir():
            return
        for path in self.iterdir():
            if fnmatch.fnmatchcase(path.name, first):
                if not rest:
                    yield path
                elif path.is_dir():
                    yield from path.glob(rest)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        self._environment.write()
        if self.exists():
            if not exist_ok:
                raise FileExistsError(str(self))
            return
        node = self._environment.disk.root
        for part in self.parts[:-1]:
            found = node.entries.get(part)
            if found is None and not parents:
                raise FileNotFoundError(str(self.parent))
            if found is None:
                found = node.entries[part] = Dir()
            assert isinstance(found, Dir)
            node = found
        node.entries[self.name] = Dir()

    def rename(self, other: Path) -> Path:
        self._environment.write()
        self._environment.disk.rename(self.parent.directory(), self.name, other.parent.directory(), other.name)
        return other

    def look(self) -> dict[bytes, bytes]:
        """Returns the entries of the database in this directory. No process has the database open."""
        found = self.directory()
        opened_by = found.opened_by
        store = Store(self._environment, found)
        found.opened_by = opened_by
        return store.entries()

    def unlink(self) -> None:
        self._environment.write()
        self.file()
        del self.parent.directory().entries[self.name]

    def stat(self) -> Any:
        file = self.file()
        return SimpleNamespace(st_ino=file.number, st_size=len(file.data), st_mtime_ns=0)

    def read_text(self) -> str:
        return self.file().data.decode()

    def read_bytes(self) -> bytes:
        return self.file().data

    def write_bytes(self, data: bytes) -> None:
        self._environment.write()
        file = self.parent.directory().entries[self.name] = self._environment.disk.new()
        file.data = data

    def hardlink_to(self, other: Path) -> None:
        self._environment.write()
        self.parent.directory().entries[self.name] = other.file()

    def open(self, mode: str) -> Any:
        if mode == "rb":
            return io.BytesIO(self.file().data)
        assert mode == "ab"
        self._environment.write()
        entries = self.parent.directory().entries
        file = entries.get(self.name)
        if file is None:
            file = entries[self.name] = self._environment.disk.new()
        assert isinstance(file, File)
        return _Appending(self._environment, file)


class _Appending:
    def __init__(self, environment: Environment, file: File) -> None:
        self._environment, self._file = environment, file

    def __enter__(self) -> _Appending:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        self._environment.write()
        self._file.data += data

    def tell(self) -> int:
        return len(self._file.data)


class Segments:
    """Segments of a commit log. If the process is killed during a write, a part of the write may be in the segment."""

    def __init__(self, environment: Environment, directory: Path) -> None:
        self._environment, self._directory = environment, directory
        self._file: File | None = None

    def read(self) -> list[tuple[int, bytes]]:
        paths = sorted(self._directory.glob("*.commits"))
        return [(int(path.stem), path.read_bytes()) for path in paths]

    def create(self, number: int, data: bytes) -> None:
        self._directory.mkdir(exist_ok=True)
        if self._file is not None:
            self._environment.write()
            self._file.synced = self._file.data
        path = self._directory / segment_name(number)
        path.write_bytes(data)
        self._environment.sync([path, self._directory, self._directory.parent])
        self._file = path.file()

    def append(self, data: bytes, *, sync: bool = True) -> None:
        file, environment = self._file, self._environment
        assert file is not None
        assert file.data.startswith(file.synced)
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            environment.write()
            file.data += part
        number = int.from_bytes(data[len(FRAME_MAGIC) : len(FRAME_MAGIC) + 8], "little")
        segment = decode("-", segment_header(number) + data)
        assert segment is not None
        for record in segment.records:
            if isinstance(record, Commit):
                environment.logged(record)
        environment.write()
        if sync:
            file.synced = file.data
            environment.write()

    def truncate(self, size: int) -> None:
        raise AssertionError("nothing refuses here")

    def rewrite(self, offset: int, data: bytes) -> None:
        raise AssertionError("nothing refuses here")

    def remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            (self._directory / segment_name(number)).unlink()
            self._environment.sync([self._directory])

    def close(self) -> None:
        self._file = None


def check(directory: Dir, up_to_damage: bool = False) -> None:
    """Checks, as RocksDB does at opening, that the log is not damaged and no file of the manifest is missing.

    Args:
        up_to_damage: accept a damaged log, whose records before the damage can be used.

    Raises:
        StateDamaged: the check fails.
    """
    current = directory.entries["CURRENT"]
    assert isinstance(current, File)
    manifest = directory.entries.get(current.data.decode())
    if manifest is None:  # CURRENT became durable before the manifest that it names
        raise StateDamaged("it does not say which its manifest is", remedy="-")
    assert isinstance(manifest, File)
    missing = [name for name in manifest.data.decode().split() if name not in directory.entries]
    log = directory.log
    if missing or (log is not None and log.readable < len(log.records) and not up_to_damage):
        raise StateDamaged("the database files are corrupt", remedy="-", missing=missing)


class Store:
    """A partition's database: an ordered map from bytes to bytes, stored in a log and immutable files."""

    def __init__(self, environment: Environment, directory: Dir) -> None:
        self._environment, self._dir = environment, directory
        self._entries: dict[bytes, bytes] = {}
        self._keys: list[bytes] | None = []
        self.closed = False
        entries = directory.entries
        if "CURRENT" not in entries:
            self._manifest([])
        for name in self._ssts():
            file = entries[name]
            assert isinstance(file, File)
            if file.records is None:
                file.records = msgpack.unpackb(file.data, use_list=False)
            for record in file.records:
                self._change(*record)
        if directory.log is None:
            directory.log = Log()
        for record in directory.log.records:
            self._change(*record)
        directory.opened_by = environment.process
        directory.next_file = max([directory.next_file, *(1 + int(n[:6]) for n in entries if n.endswith(".sst"))])

    def _ssts(self) -> list[str]:
        current = self._dir.entries["CURRENT"]
        assert isinstance(current, File)
        manifest = self._dir.entries[current.data.decode()]
        assert isinstance(manifest, File)
        return manifest.data.decode().split()

    def _manifest(self, ssts: list[str]) -> None:
        directory, disk = self._dir, self._environment.disk
        old = directory.entries.get("CURRENT")
        name = f"MANIFEST-{directory.next_file:06}"
        directory.next_file += 1
        directory.put(name, disk.new("\n".join(ssts).encode()))
        directory.put("CURRENT", disk.new(name.encode()))
        if isinstance(old, File):
            directory.drop(old.data.decode())

    def _change(self, clears: Any, deletes: Any, puts: Any) -> None:
        entries = self._entries
        for start, end in clears:
            for key in self._range(start, end):
                del entries[key]
            self._keys = None
        for key in deletes:
            if entries.pop(key, None) is not None:
                self._keys = None
        for key, value in puts:
            if key not in entries:
                self._keys = None
            entries[key] = value

    def _range(self, start: bytes, end: bytes | None) -> list[bytes]:
        if self._keys is None:
            self._keys = sorted(self._entries)
        keys = self._keys
        return keys[bisect_left(keys, start) : None if end is None else bisect_left(keys, end)]

    def _check(self) -> None:
        if not self._environment.process.alive:
            raise Crashed
        if self.closed:
            raise RuntimeError("the database is closed")

    # -- PartitionStore -----------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        self._check()
        return self._entries.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._check()
        return iter([(key, self._entries[key]) for key in self._range(prefix, prefix_end(prefix))])

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        self._check()
        self._environment.write()
        self._check()
        log = self._dir.log
        assert log is not None
        record = tuple(mutations.clears), tuple(mutations.deletes), tuple(mutations.puts)
        begun = len(log.records) - (log.files[-1] if log.files else 0)
        if self._environment.logs and INCOMING not in self._dir.entries and begun >= LOG_FILE_RECORDS:
            log.files.append(len(log.records))
        log.records.append(record)
        if sync:
            log.synced = len(log.records)
        self._change(*record)
        self._environment.wrote(self, mutations)
        self._environment.write()

    def sync(self) -> None:
        self._check()
        self._environment.write()
        log = self._dir.log
        assert log is not None
        log.synced = len(log.records)
        self._environment.write()

    def flush(self) -> None:
        self._check()
        self._environment.write()
        log, directory = self._dir.log, self._dir
        assert log is not None
        if not log.records:
            return
        ssts = self._ssts()
        records: Any = tuple(log.records)
        dropped: list[str] = []
        if len(ssts) >= SSTS_MAX:
            ssts, dropped = [], ssts
            records = (((), (), tuple(sorted(self._entries.items()))),)
        file = self._environment.disk.new(msgpack.packb(records))
        name = f"{directory.next_file:06}.sst"
        directory.next_file += 1
        directory.put(name, file)
        self._manifest([*ssts, name])
        for old in dropped:
            directory.drop(old)
        directory.log = Log()

    def snapshot(self, directory: Path) -> None:
        self.flush()
        self._environment.write()
        parent = directory.parent.directory()
        assert directory.name not in parent.entries
        copy = parent.entries[directory.name] = Dir(next_file=self._dir.next_file)
        files = {name: node for name, node in self._dir.entries.items() if isinstance(node, File)}
        copy.entries = {
            name: node
            for name, node in files.items()
            if name not in (INCOMING, UNFINISHED) and not name.startswith(OWNED)
        }  # files of the database only
        copy.durable = dict(copy.entries)

    def close(self) -> None:
        self.closed = True
        self._dir.opened_by = None

    def entries(self) -> dict[bytes, bytes]:
        return self._entries
