"""Open files: the limit of this process, and the part of it that a partition's database gets.

A database holds six: its directory twice, log, LOCK, LOG and MANIFEST. It also holds one for each sorted file that was
read, up to the limit that RocksDB is given, which is ten at least. Where the process may not open enough, sorted files
are merged sooner, so that there are fewer of them.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

from stateflow.errors import TooFewFiles

PER_DATABASE = 6
#: files kept for sockets, for snapshots that are read and sent, and for files that are being written
RESERVED = 96
#: maximum of sorted files that a database keeps open
TABLES_MAX = 118
#: bounds of the number of sorted runs, which a lookup may have to read, at which some are merged
RUNS_MIN, RUNS_MAX = 1, 8


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one database. ``tables``: sorted files it may keep open; ``runs``: sorted runs before a merge."""

    tables: int
    runs: int


def file_limits(databases: int, limit: int) -> FileLimits:
    """Returns the limits of each of ``databases`` open databases. Raises TooFewFiles when they cannot all be open."""
    tables = (limit - RESERVED) // max(databases, 1) - PER_DATABASE
    if tables < 1:
        needed = databases * (PER_DATABASE + RUNS_MAX) + RESERVED
        raise TooFewFiles(
            f"{databases} partitions need about {needed} open files, the limit is {limit}",
            remedy=f"raise it with `ulimit -n {needed}` (LimitNOFILE= in a systemd unit) and start the replica again, "
            "or use more replicas",
        )
    return FileLimits(min(tables, TABLES_MAX), min(max(tables, RUNS_MIN), RUNS_MAX))


def limit() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Sets this process's limit to the maximum that the system allows. The default is meant for small programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
