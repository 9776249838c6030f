"""Interprets errors of disks and databases for users.

RocksDB's errors arrive as plain ``Exception``. Their text is RocksDB's status: ``Corruption: …``, or ``IO error: …``
with the message of the operating system. Other statuses may quote an ``IO error: …``: a database is not damaged because
no file can be opened or written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from stateflow.errors import (
    DiskFull,
    DiskRefused,
    InvalidArgument,
    OutOfMemory,
    StateDamaged,
    StateflowError,
    TooFewFiles,
    Unavailable,
)
from stateflow.types import PartitionId

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
FEW_FILES = frozenset({errno.EMFILE, errno.ENFILE})
LOST = frozenset(
    {
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
    }
)
#: errors of a database whose files are missing or cannot be read
UNREADABLE = frozenset({errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR})
DAMAGED = "the copy is quarantined in `evidence/`; the partition fails over to a standby or the newest checkpoint"


def meaning(error: BaseException) -> StateflowError | None:
    """Returns the error to show the user for ``error``. None: ``error`` is neither a StateflowError nor a failure of
    disk, memory or network."""
    if isinstance(error, StateflowError):
        cause = error.__cause__  # a database error that an operator met while it read its state
        return error if cause is None else _of_database(cause) or error
    if isinstance(error, MemoryError):
        return _no_memory("an allocation failed")
    if isinstance(error, OSError) and error.errno is not None:
        return _of_system(error.errno, error.strerror or str(error), error.filename)
    return _of_database(error)


def damage(error: BaseException) -> StateDamaged | None:
    """Returns the damage that ``error`` reports; None: it reports no damage."""
    meant = meaning(error)
    return meant if isinstance(meant, StateDamaged) else None


def _of_database(error: BaseException) -> StateflowError | None:
    if type(error) is not Exception or not _raised_here(error):
        return None
    text = str(error)  # never called for other errors: their __str__ may be an operator's code
    kind, _, rest = text.partition(": ")
    number = 0
    if kind == "IO error" or (kind in ("Corruption", "Invalid argument") and "IO error: " in rest):
        number = next((n for n, said in _SAID.items() if said in text), 0)
    if number not in UNREADABLE and (meant := _of_system(number, _one_line(text), None)) is not None:
        return meant
    if kind == "Corruption":
        return StateDamaged(f"the database files are corrupt: {_one_line(text)}", remedy=DAMAGED)
    if kind == "IO error" and number in UNREADABLE:
        return StateDamaged(f"the database files cannot be read: {_one_line(text)}", remedy=DAMAGED)
    return None


_KNOWN = FULL | REFUSED | FEW_FILES | UNREADABLE
_SAID = {number: os.strerror(number) for number in sorted(_KNOWN, key=lambda number: number in UNREADABLE)}


def _raised_here(error: BaseException) -> bool:
    """Tells whether code of stateflow raised an error. An operator may raise an error with the same text, which is not
    RocksDB's."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("stateflow.")


def _of_system(number: int, said: str, path: object) -> StateflowError | None:
    if number in FULL:
        return DiskFull(
            f"the disk is full: {said}",
            remedy="free space, then try again; nothing acknowledged is lost",
            path=path,
        )
    if number in REFUSED or number == errno.EIO:
        return DiskRefused(
            f"the file system fails or refuses access: {said}",
            remedy="check the disk, and that the file system is mounted read-write and belongs to the user of this "
            "process; then try again",
            path=path,
        )
    if number in FEW_FILES:
        return TooFewFiles(
            f"no more files can be opened: {said}",
            remedy="raise the limit (`ulimit -n`, LimitNOFILE= in a systemd unit) and start the process again",
            path=path,
        )
    if number == errno.ENOMEM:
        return _no_memory(said)
    if number in LOST:
        return Unavailable(
            f"a network connection failed: {said}",
            remedy="check that the process or store at the other end runs and is reachable, then try again",
        )
    return None


def too_large(sizes: Mapping[PartitionId, int]) -> InvalidArgument:
    """Returns the error for commits that are too large to be written together. ``sizes``: bytes of their changes."""
    largest = max(sizes, key=sizes.__getitem__)
    return InvalidArgument(
        f"a batch changes more state than can be committed at once: {sum(sizes.values())} bytes",
        remedy="send smaller batches",
        partition=largest,
        size=sizes[largest],
    )


def _no_memory(said: str) -> OutOfMemory:
    return OutOfMemory(
        f"out of memory: {said}",
        remedy="give the process more memory, or let it use less (smaller batches, STATEFLOW_REPLICA_CACHE_BYTES), and "
        "try again",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
