"""Open files: how many this process may have, and what of them a partition's database gets.

A database holds six: its directory twice, log, LOCK, LOG and MANIFEST; and one for each sorted file that was read, up
to what RocksDB is told, which is ten at least. Where there are not as many, sorted files are merged sooner, so that
there are fewer of them.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

from stateflow.errors import TooFewFiles

PER_DATABASE = 6
#: sockets, snapshots that are read and sent, files that are being written
RESERVED = 96
#: sorted files a database keeps open, at most
TABLES_MAX = 118
#: sorted runs a lookup may have to ask, before some are merged
RUNS_MIN, RUNS_MAX = 1, 8


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Of one database. ``tables``: sorted files it may keep open; ``runs``: it may have before some are merged."""

    tables: int
    runs: int


def file_limits(databases: int, limit: int) -> FileLimits:
    """Raises TooFewFiles when so many databases cannot be open at a time."""
    tables = (limit - RESERVED) // max(databases, 1) - PER_DATABASE
    if tables < 1:
        needed = databases * (PER_DATABASE + RUNS_MAX) + RESERVED
        raise TooFewFiles(
            f"{databases} partitions need about {needed} open files, the limit is {limit}",
            remedy=f"raise it with `ulimit -n {needed}` (LimitNOFILE= in a unit) and start the replica again, "
            "or use more replicas",
        )
    return FileLimits(min(tables, TABLES_MAX), min(max(tables, RUNS_MIN), RUNS_MAX))


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """To what the system allows this process to give itself. What it is by default is meant for small programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
