"""Who this process is, and whether another one of this machine has ended."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from stateflow.ledger import Holder

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def here(address: str) -> Holder:
    """Where the system does not tell, nobody will ever take this process for gone."""
    pid = os.getpid()
    return Holder(
        uuid.uuid4().hex, socket.gethostname(), address, pid, _started(pid) or 0, _read(_BOOT).strip(), _namespace()
    )


def is_gone(other: Holder) -> bool:
    """Certainly so: it ran since this boot, where this process can see it, and does not run any more."""
    if not other.started or not other.boot or not other.namespace:
        return False
    if other.boot != _read(_BOOT).strip() or other.namespace != _namespace():
        return False
    return _started(other.pid) != other.started


def _started(pid: int) -> int | None:
    """When it was started, in ticks since boot; None: it does not run. One that waits to be buried does not."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


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
