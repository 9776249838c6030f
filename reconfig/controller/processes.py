"""Identifies this process, and tells whether another process of this machine has ended."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from stateflow.ledger import Holder

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def here(address: str) -> Holder:
    """Returns this process as a holder.

    Where the system does not tell when it started, no other process ever takes it for ended.
    """
    pid = os.getpid()
    return Holder(
        uuid.uuid4().hex, socket.gethostname(), address, pid, _started(pid) or 0, _read(_BOOT).strip(), _namespace()
    )


def is_gone(other: Holder) -> bool:
    """Tells whether another process has certainly ended.

    It has if it ran since this boot, in this process's namespace, and does not run any more. A process that cannot be
    looked at, as files are missing or /proc hides the processes of other users, is not taken for ended.
    """
    if not other.started or not other.boot or not other.namespace:
        return False
    if other.boot != _read(_BOOT).strip() or other.namespace != _namespace():
        return False
    try:
        return _parsed(_stat(other.pid).read_text()) != other.started
    except FileNotFoundError:
        return not _runs(other.pid)
    except (OSError, ValueError, IndexError):
        return False


def _started(pid: int) -> int | None:
    """Returns when a process was started, in ticks since boot; None: it does not run, or the system does not tell."""
    try:
        return _parsed(_stat(pid).read_text())
    except (OSError, ValueError, IndexError):
        return None


def _stat(pid: int) -> Path:
    return Path(f"/proc/{pid}/stat")


def _parsed(stat: str) -> int | None:
    """Returns when a process was started, in ticks since boot; None: it is dead or a zombie.

    Raises ValueError, IndexError.
    """
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _runs(pid: int) -> bool:
    """Tells whether a process with this number exists, whichever user runs it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
