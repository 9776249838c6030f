"""Limits the memory of replicas: by control groups where the agent may make some, else by limits of processes.

A control group (version 2) counts what all processes of the replica use, and the kernel ends one of them when that
exceeds the limit. A limit of a process (``RLIMIT_DATA``) concerns what the process allocates: an allocation beyond it
fails. A replica allocates 1.4 GiB that it never uses before it has a row, so ``OVERHEAD_BYTES`` are added to the limit.
Such a limit protects the machine from being filled, but does not keep a replica to its size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)
#: allowance for what a replica's process allocates and never uses: arenas of allocators, stacks of its threads
OVERHEAD_BYTES = 2 << 30
CGROUP, RLIMIT, NONE = "cgroup", "rlimit", "none"


class Limits(Protocol):
    """A way to limit the memory of replicas. ``kind``: its name in reports."""

    kind: str

    def apply(self, name: str, pid: int, memory_bytes: int, workers: int) -> None:
        """Limits a process that was just started, and those that it will start. Raises OSError.

        ``memory_bytes``: limit of all of them together; 0: no limit.
        """
        ...

    def forget(self, name: str) -> None:
        """Forgets a replica, whose processes have ended."""
        ...


class Rlimits:
    kind = RLIMIT if sys.platform == "linux" else NONE

    def apply(self, name: str, pid: int, memory_bytes: int, workers: int) -> None:
        if memory_bytes and self.kind == RLIMIT:
            limit = memory_bytes // workers + OVERHEAD_BYTES
            resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))

    def forget(self, name: str) -> None:
        pass


class Cgroups:
    """Limits by a control group for each replica.

    Args:
        root: the agent's group, which holds no process itself: the agent's process is in the group ``agent`` below it.
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
    """Returns limits by control groups where this process's group can have groups below it, else limits of processes.

    A group with limited groups below it must hold no process itself, so this process moves into one of those.
    """
    if group is None or "memory" not in _words(group / "cgroup.controllers"):
        return Rlimits()
    inner = group / "agent"
    try:
        inner.mkdir(exist_ok=True)
        (inner / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        log.info("control groups for replicas are not available: %s", error)
        return Rlimits()
    try:
        (group / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:  # other processes are in the group
        log.info("control groups for replicas are not available: %s", error)
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
