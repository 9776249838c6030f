"""The embedded cluster, which a program starts for itself if it names no other cluster. It consists of a controller and
a replica for each core, in separate processes.

One directory contains the ledger and all state. The processes end with the program, and the next run uses the same
state. Only one program at a time uses a directory: it holds the directory's lock ``EMBEDDED`` until its processes have
ended. The file ``embedded.json`` in the directory names the program that runs the cluster, and the controller's
address.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from stateflow.clock import SYSTEM_CLOCK
from stateflow.durable import MALFORMED, listed, write_durably
from stateflow.errors import DataDirLocked, InvalidArgument, Unavailable
from stateflow.local.cluster import LocalCluster
from stateflow.node.workers import nobody_in
from stateflow.partition.environment import claim
from stateflow.private import keep_private
from stateflow.settings import EmbeddedSettings, ReplicaSettings
from stateflow.settings.base import expanded

LOCK, FILE = "EMBEDDED", "embedded.json"
SITE = "local"
#: maximum time for the processes of an ended program to end, in seconds
ENDING_S = 20.0
_LOOK_S = 0.1
_REPLICAS_MAX = 64


class Embedded(LocalCluster):
    """A program's own cluster, as returned by :func:`embedded`. Its property ``cluster`` is a client."""

    def __init__(self, directory: Path, replicas: int, lock: TextIO) -> None:
        super().__init__(sites={SITE: replicas}, data_dir=directory)
        self._lock = lock

    def _start(self) -> None:
        super()._start()
        said = {"replicas": self._sites[SITE], "pid": os.getpid(), "address": self.address, "program": sys.argv[0]}
        file = self.data_dir / FILE
        try:
            write_durably(file, json.dumps(said))
        except OSError as error:
            raise Unavailable(
                f"the file with the cluster's address cannot be written: {error.strerror}",
                remedy="check that the directory is writable and has free space",
                path=file,
            ) from error

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            _RUNNING.pop((os.getpid(), self.data_dir), None)
            if os.getpid() == self._pid:
                _forget_address(self.data_dir)
            self._lock.close()


_MUTEX = threading.Lock()
#: (process id, directory) → running cluster; a forked process has another id, and therefore no cluster in here
_RUNNING: dict[tuple[int, Path], Embedded] = {}


def embedded(directory: str | Path | None = None, replicas: int | None = None, *, create: bool = True) -> Embedded:
    """Returns this program's cluster in ``directory``, and starts the cluster if it is not running.

    Further calls return the same cluster.

    Args:
        directory: directory of the cluster, created if missing; None: ``STATEFLOW_EMBEDDED_DIRECTORY``, or
            ``./stateflow-data``.
        replicas: number of replicas; None: ``STATEFLOW_EMBEDDED_REPLICAS``, or if that is not set, as many as the
            cluster had before, and one for each core in a new cluster.
        create: False creates no cluster if the directory has none, for callers that only read.

    Raises DataDirLocked if another program uses the directory; InvalidArgument if the directory contains other
    files, if the cluster has another number of replicas, or if there is none and ``create`` is False; Unavailable if
    the cluster cannot be started.

    Example: ``embedded("stateflow-data").address``
    """
    if directory == "":
        raise InvalidArgument("the directory is empty text", remedy="pass a directory, or None")
    settings = EmbeddedSettings()
    place = expanded(directory if directory is not None else settings.directory).resolve()
    with _MUTEX:
        running = _RUNNING.get((os.getpid(), place))
        if running is not None:
            _check_count(running.data_dir, running._sites[SITE], replicas)
            return running
        _check_place(place, create)
        lock = _claimed(place)
        try:
            count = _count(place, replicas if replicas is not None else settings.replicas or None)
            keep_private(place)
            _wait_for_ends(place, count)
            started = Embedded(place, count, lock)
            started.start()
        except BaseException:
            lock.close()
            raise
        _RUNNING[os.getpid(), place] = started
        atexit.register(_end, os.getpid(), place)
    print(
        f"stateflow: {count} replica{'s' * (count > 1)} and a controller at {started.address}, until this program ends;"
        f" state is kept in {place}",
        file=sys.stderr,
        flush=True,
    )
    return started


def _end(pid: int, place: Path) -> None:
    running = _RUNNING.get((pid, place))
    if running is not None and pid == os.getpid():  # a forked process that exits must not stop it
        running.stop()


def _check_place(place: Path, create: bool) -> None:
    """Checks that the directory contains a cluster, or may get one.

    Raises InvalidArgument if it contains other files, or no cluster and ``create`` is False.
    """
    if not create and not (place / LOCK).exists():
        raise InvalidArgument(
            "no embedded cluster has run in this directory",
            remedy="pass the directory of one, or the address of a cluster",
            path=place,
        )
    if place.is_dir() and not (place / LOCK).exists() and any(place.iterdir()):
        raise InvalidArgument(
            "the directory contains other files", remedy="use an empty or a new directory", path=place
        )


def _claimed(place: Path) -> TextIO:
    """Claims a directory, after the processes of an ended program have released it.

    Raises DataDirLocked if a running program uses the directory, or if those processes do not end in time.
    """
    deadline = SYSTEM_CLOCK.monotonic() + ENDING_S
    while True:
        try:
            return claim(place, LOCK)
        except DataDirLocked as error:
            said = said_in(place)
            if running_in(place) is not None or SYSTEM_CLOCK.monotonic() > deadline:
                address = said.get("address")
                raise DataDirLocked(
                    f"another program's cluster uses this directory: {said.get('program', 'unknown')}",
                    remedy="stop it, or use another directory"
                    + (f'; pass cluster="{address}" to use its cluster' if address else ""),
                    path=place,
                    pid=error.where.get("pid"),
                ) from None
        time.sleep(_LOOK_S)


def _wait_for_ends(place: Path, count: int) -> None:
    """Waits until the replicas of a killed program have ended. They first finish their running batches."""
    for directory in (place / f"{SITE}-{number}" for number in range(count)):
        if directory.is_dir():
            with nobody_in(directory, ReplicaSettings().stop_timeout_s):
                pass


def _count(place: Path, wanted: int | None) -> int:
    known = said_in(place).get("replicas")
    if isinstance(known, int):
        _check_count(place, known, wanted)
        return known
    found = sum(each.is_dir() for each in listed(place, f"{SITE}-*"))  # if the file was lost
    count = found or wanted or min(os.cpu_count() or 1, _REPLICAS_MAX)
    if not 1 <= count <= _REPLICAS_MAX:
        raise InvalidArgument(f"invalid number of replicas: {count}", remedy=f"use 1 to {_REPLICAS_MAX}")
    return count


def _check_count(place: Path, known: int, wanted: int | None) -> None:
    if wanted is not None and wanted != known:
        raise InvalidArgument(
            f"the cluster was created with {known} replicas, which hold its state, not with {wanted}",
            remedy="omit the number, or use another directory",
            path=place,
        )


# -- The file embedded.json ------------------------------------------------------------------------------------------


def said_in(place: Path) -> dict[str, Any]:
    """Returns the contents of a directory's ``embedded.json``; empty: the file is missing or damaged.

    The keys are ``replicas`` (number of replicas), ``pid`` and ``program`` (of the program that ran the cluster last),
    and ``address`` (of the controller; missing: the program has stopped the cluster).
    """
    try:
        found = json.loads((place / FILE).read_text())
    except (OSError, *MALFORMED):
        return {}
    return found if isinstance(found, dict) else {}


def _forget_address(place: Path) -> None:
    """Removes the address from a directory's ``embedded.json``, if possible."""
    said = said_in(place)
    if said.pop("address", None) is not None:
        with contextlib.suppress(OSError):  # without the lock, the address does not count either
            write_durably(place / FILE, json.dumps(said))


def running_in(directory: str | Path | None = None) -> str | None:
    """Returns the address of the controller whose cluster is running in a directory; None: no cluster is running there.

    Args:
        directory: see :func:`embedded`.
    """
    place = expanded(directory if directory is not None else EmbeddedSettings().directory)
    said = said_in(place)
    try:
        os.kill(int(said["pid"]), 0)
        return str(said["address"]) if _is_locked(place) else None
    except (KeyError, ValueError, TypeError, OverflowError, OSError):
        return None


def _is_locked(place: Path) -> bool:
    """Tells whether a program holds a directory's lock. Raises OSError."""
    with (place / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
