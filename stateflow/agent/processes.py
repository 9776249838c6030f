"""Runs the processes of an agent's replicas: limits their memory, keeps their logs, and stores the agent's orders.

*Memory limits.* Control groups limit the memory of replicas if the agent may create them; otherwise process limits do
(:func:`limits`).

*Logs.* :class:`Rotating` writes a log into files, and starts a new file when one is full; :class:`Reader` reads it at
the same time.

*Launching.* :class:`LocalLauncher` starts child processes. A process notices by its standard input that its parent has
ended.

*The file* ``AGENT`` in an agent's data directory contains the agent's identity, and the replicas that it should run
(:class:`Store`). The file is written as a whole, and is durable before the agent acts on it. So a restarted agent runs
its replicas at once, even if no controller answers, and obeys no controller whose term is over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from stateflow.durable import MALFORMED, write_durably
from stateflow.errors import InvalidArgument
from stateflow.fleet import Command, Spawned, Started

log = logging.getLogger(__name__)
#: allowance for memory that a replica's process allocates and never uses: arenas of allocators, stacks of its threads
OVERHEAD_BYTES = 2 << 30
CGROUP, RLIMIT, NONE = "cgroup", "rlimit", "none"

# -- Memory limits ---------------------------------------------------------------------------------------------------


class Limits(Protocol):
    """A way to limit the memory of replicas. ``kind``: its name in reports."""

    kind: str

    def apply(self, name: str, pid: int, memory_bytes: int, workers: int) -> None:
        """Limits a process that was just started, and the processes that it will start. Raises OSError.

        Args:
            memory_bytes: limit for all these processes together; 0: no limit.
            workers: number of worker processes that the replica has.
        """
        ...

    def forget(self, name: str) -> None:
        """Forgets a replica, whose processes have ended."""
        ...


class Rlimits:
    """Limits by process limits (``RLIMIT_DATA``): each process gets its share of the replica's limit.

    An allocation beyond the limit fails, whether or not the memory is used. Before its first row, a replica allocates
    1.4 GiB that it never uses, so ``OVERHEAD_BYTES`` are added to the limit. Therefore a replica can use more memory
    than was ordered, but it cannot fill the machine's memory.
    """

    kind = RLIMIT if sys.platform == "linux" else NONE

    def apply(self, name: str, pid: int, memory_bytes: int, workers: int) -> None:
        if memory_bytes and self.kind == RLIMIT:
            limit = min(memory_bytes // workers + OVERHEAD_BYTES, sys.maxsize)  # a larger one is not a number to Linux
            resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))

    def forget(self, name: str) -> None:
        pass


class Cgroups:
    """Limits by a control group (version 2) for each replica.

    A control group counts the memory that all processes of the replica use. If they exceed the limit, the kernel ends
    one of them.

    Args:
        root: the agent's group. It holds no process itself: the agent's process is in the group ``agent`` within it.
    """

    kind = CGROUP

    def __init__(self, root: Path) -> None:
        self._root = root

    def apply(self, name: str, pid: int, memory_bytes: int, workers: int) -> None:
        group = self._root / f"replica-{name}"
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(str(memory_bytes) if memory_bytes else "max")
        with contextlib.suppress(OSError):  # without swap there is no such file
            (group / "memory.swap.max").write_text("0" if memory_bytes else "max")
        (group / "cgroup.procs").write_text(str(pid))

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._root / f"replica-{name}").rmdir()


def own_group(proc: Path = Path("/proc/self")) -> Path | None:
    """Returns the directory of this process's control group of version 2; None: there is none."""
    try:
        path = next(line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::"))
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if after.split(" ")[0] == "cgroup2":
                return Path(before.split(" ")[4]) / path.lstrip("/")
    except (OSError, StopIteration, IndexError):
        pass
    return None


def limits(group: Path | None) -> Limits:
    """Returns limits by control groups if ``group``, the group of this process, can contain further groups; otherwise
    limits by process limits.

    A group that contains limited groups must hold no process itself, so this process moves into a new group ``agent``
    in it.
    """
    if group is None or "memory" not in _words(group / "cgroup.controllers"):
        return Rlimits()
    inner = group / "agent"
    try:
        inner.mkdir(exist_ok=True)
        (inner / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        log.info("the agent cannot limit replicas by control groups, and uses process limits: %s", error)
        return Rlimits()
    try:
        (group / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:  # other processes are in the group
        log.info("the agent cannot limit replicas by control groups, and uses process limits: %s", error)
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(os.getpid()))
            inner.rmdir()
        return Rlimits()
    return Cgroups(group)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


# -- Logs ------------------------------------------------------------------------------------------------------------

#: size of one file, and number of older files that are kept
FILE_BYTES, OLDER = 8 << 20, 4
PIECE_BYTES = 64 << 10


def older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


class Rotating:
    """A log file with rotation. A full file becomes ``NAME.1``, which becomes ``NAME.2``, …; the oldest is deleted.

    Data that cannot be written is dropped, because logging must not wait. The next write opens the file again.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES, kept: int = OLDER) -> None:
        self._path, self._file_bytes, self._kept = path, file_bytes, kept
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> bool:
        """Appends data. Returns False if it was dropped."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = self._path.open("ab", buffering=0)
            if self._file.tell() + len(data) > self._file_bytes and self._file.tell():
                self._rotate()
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            self.close()
            return False
        return True

    def _rotate(self) -> None:
        self.close()
        _make_room(self._path, self._kept)
        if self._kept:
            self._path.replace(older(self._path, 1))
        else:
            self._path.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _make_room(path: Path, kept: int) -> None:
    """Moves each older file of a log on by one number, over the oldest one. Raises OSError."""
    for number in range(kept - 1, 0, -1):
        if older(path, number).exists():
            older(path, number).replace(older(path, number + 1))


def rotate_open_log(path: Path, file_bytes: int = FILE_BYTES, kept: int = OLDER) -> None:
    """Copies a full log to ``NAME.1``, see :class:`Rotating`, and empties it. Does nothing if the log is not full.

    Other processes may hold the log open and append to it. What they write between the copy and the emptying is lost.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= file_bytes:
            return
        _make_room(path, kept)
        try:
            shutil.copy(path, older(path, 1))
        except OSError:  # the log must not keep the disk full
            older(path, 1).unlink(missing_ok=True)
        os.truncate(path, 0)


def pump(pipe: IO[bytes], path: Path, name: str) -> threading.Thread:
    """Starts a thread that copies all data of a pipe to a log, until the pipe ends. Returns the thread.

    The thread keeps reading even if the disk is full, because a process that writes into a full pipe blocks.
    """

    def run() -> None:
        log = Rotating(path)
        with pipe:
            while data := os.read(pipe.fileno(), PIECE_BYTES):
                log.write(data)
        log.close()

    thread = threading.Thread(target=run, name=f"log of {name}", daemon=True)
    thread.start()
    return thread


def last_line(path: Path) -> str:
    """Returns the last line of a log, or its end if the line is longer than ``PIECE_BYTES``; empty: there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - PIECE_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


class Reader:
    """Reads a log that may be written and rotated at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def last(self, lines: int) -> Iterator[bytes]:
        """Yields the newest ``lines`` lines, in pieces of up to ``PIECE_BYTES``. :meth:`more` returns later lines.

        If the current file has too few lines, lines of the file before it are added; still older files are not read.
        """
        self._open()
        found = b"" if self._file is None else self._file.read()
        data = found
        if data.count(b"\n") < lines:
            try:
                data = older(self._path, 1).read_bytes() + data
            except OSError:
                pass
        kept = data.splitlines(keepends=True)
        data = b"".join(kept[len(kept) - lines :] if 0 < lines < len(kept) else kept if lines else [])
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]

    def more(self) -> bytes:
        """Returns data written since the last read, up to ``PIECE_BYTES``; empty: none."""
        self._open()
        if self._file is None:
            return b""
        data = self._file.read(PIECE_BYTES)
        if not data and self._is_over():
            data = self._file.read(PIECE_BYTES)  # data written just before the file was rotated
            if not data:
                self.close()
                self._open()
                data = b"" if self._file is None else self._file.read(PIECE_BYTES)
        return data

    def _open(self) -> None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                self._file = None

    def _is_over(self) -> bool:
        """Tells whether the log was rotated, so that its path now names another file than the open one."""
        assert self._file is not None
        try:
            now, mine = self._path.stat(), os.fstat(self._file.fileno())
        except OSError:
            return False
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# -- Launching -------------------------------------------------------------------------------------------------------


class Processes:
    """The base of launchers: methods that do not depend on how a process was started."""

    def stop(self, handle: Started) -> None:
        self.send(handle, signal.SIGTERM)

    def kill(self, handle: Started) -> None:
        """Kills a process. Its workers notice that it has ended, and end as well."""
        self.send(handle, signal.SIGKILL)

    def send(self, handle: Started, number: signal.Signals) -> None:
        """Sends a signal to a process, unless it has ended."""
        if self.is_running(handle):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(handle.process.pid, number)

    def is_running(self, handle: Started) -> bool:
        return handle.process.poll() is None

    def logs(self, handle: Started) -> Iterator[bytes]:
        reader = Reader(handle.command.log)
        try:
            while data := reader.more():
                yield data
        finally:
            reader.close()


class LocalLauncher(Processes):
    """A launcher of child processes, see :class:`~stateflow.fleet.Launcher`.

    The caller reads a process's standard output. A child process notices by its standard input that this process has
    ended, in whatever way.

    Args:
        rotates: True: this process writes the log of a child, and starts a new file when one is full; False: the child
            writes its log itself, and a full log is rotated only when a process starts.
    """

    def __init__(self, *, rotates: bool = True) -> None:
        self._rotates = rotates

    def start(self, spec: Command) -> Started:
        """Starts a process. Raises OSError."""
        if not self._rotates:
            rotate_open_log(spec.log)
            with spec.log.open("ab") as log:
                return Started(spec, self._start(spec, log.fileno(), ()))
        reads, writes = os.pipe()
        try:
            # The child holds the reading end, too. If this process dies, the child blocks when the pipe is full, and
            # ends soon after. Without a reader, an operator that prints something in that time would fail.
            process = self._start(spec, writes, (reads,))
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        pump(os.fdopen(reads, "rb", buffering=0), spec.log, spec.name)
        return Started(spec, process)

    def _start(self, spec: Command, errors: int, kept: Collection[int]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*spec.within, sys.executable, "-m", "stateflow", *spec.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=kept,
            text=True,
            errors="replace",  # whoever reads a line that is no text would end, and not notice the process's end
            env=dict(spec.environment),
            start_new_session=True,  # signals of a terminal reach it only through this process
        )


# -- The file AGENT --------------------------------------------------------------------------------------------------

FILE = "AGENT"


@dataclass(frozen=True, slots=True)
class Kept:
    """The contents of the file ``AGENT``.

    Attributes:
        id: id of the data directory, created once.
        ledger: ledger of the controller that the agent obeyed last.
        term: term of that controller.
        wanted: replicas that the agent should have.
    """

    id: str
    name: str
    ledger: str = ""
    term: int = 0
    wanted: tuple[Spawned, ...] = ()


class Store:
    """Reads and writes the file ``AGENT``.

    Raises InvalidArgument if the file is damaged, or names another agent and replicas for it. If the file names another
    agent without replicas, this agent takes it over under its own name.

    Args:
        directory: the agent's data directory, which the caller has claimed.
        name: name of this agent.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._file = directory / FILE
        self.kept = self._read() or self._write(Kept(uuid.uuid4().hex, name))
        if self.kept.name != name:
            if self.kept.wanted:
                raise InvalidArgument(
                    f"the data directory belongs to agent {self.kept.name!r}",
                    remedy=f"start it with --name {self.kept.name}, or give {name!r} its own --data-dir",
                    path=directory,
                )
            self._write(replace(self.kept, name=name))

    def keep(self, ledger: str, term: int, wanted: Iterable[Spawned]) -> None:
        """Writes new orders, which are durable when this function returns.

        Raises OSError; then the file keeps the former orders.
        """
        new = replace(self.kept, ledger=ledger, term=term, wanted=tuple(wanted))
        if new != self.kept:
            self._write(new)

    def _write(self, kept: Kept) -> Kept:
        write_durably(self._file, json.dumps(asdict(kept)))
        self.kept = kept
        return kept

    def _read(self) -> Kept | None:
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(data)
            fields["wanted"] = tuple(Spawned(**each) for each in fields["wanted"])
            return Kept(**fields)
        except MALFORMED as error:
            raise InvalidArgument(
                "the agent's file is damaged: it does not describe the agent's replicas",
                remedy="restore it from a backup; without one, remove it and start the agent under a new --name: the "
                "replicas' state stays in `replicas`",
                path=self._file,
            ) from error
