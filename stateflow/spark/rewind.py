"""Rewinds the checkpoint of a stopped Spark query to a batch, so that the query sends that batch next.

When Spark starts, it reads three folders of the checkpoint. The newest entry of ``offsets/`` is the last planned batch,
the newest entry of ``commits/`` is the last finished batch, and ``state/`` has a version for each finished batch. A
rewind to batch N keeps ``offsets`` up to N, ``commits`` below N, and state versions up to N. So batch N has the same
rows as before. Batches after N are planned anew and may contain other rows. The log of a file sink must not list
batches from N on, because Spark would skip them as already written; pass the sink's directory as ``sink`` to remove its
entries, too.

If Spark is killed while it writes one of these entries, the temporary file that it was about to rename remains. While
the logs contain no batch, Spark refuses to start with such a file (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY),
whichever of its checkpoint file managers wrote it; once the logs contain a batch, Spark ignores the file. A new
``checkpointLocation`` is no remedy, because it makes another query, which in real-time mode would start from the
beginning with rows that were already applied. So a rewind removes these files.

After a power failure, an entry of ``offsets/`` or ``commits/`` may be an empty file, with which Spark refuses to start
("Incomplete log file"). A rewind to that batch removes the entry, and Spark plans the batch anew, unless partitions
contain it: then the query is refused when it starts.

A rewind deletes nothing. It moves the files that it removes to ``_rewound/<time>/`` in the same directory, in such an
order that an interrupted rewind can be repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.durable import files_below, listed
from stateflow.errors import InvalidArgument

ASIDE = "_rewound"
SINK_LOG = "_spark_metadata"
_BATCH = re.compile(r"\d+\Z")
#: a temporary file that was never renamed to an entry of a log, or the checksum of such a file
_LEFT = re.compile(r"(?:offsets|commits)/\.{1,2}\d+\.[0-9a-f\-]{36}\.tmp(?:\.crc)?\Z")
_ENTRY = re.compile(r"(?:offsets|commits)/\d+\Z")
#: first line of an entry in the log of finished batches
_MICRO_BATCHES = b"v1"
_VERSION = re.compile(r"\.?(\d+)(?:_[0-9a-f\-]+)*\.(?:delta|snapshot|zip|changelog)(?:\.crc)?\Z")


@dataclass(frozen=True, slots=True)
class Rewind:
    """Files that a rewind moves out of a checkpoint.

    Attributes:
        to_batch: the batch that the query sends next.
        last_batch: the last planned batch; -1 if there is none.
        moved: files, relative to the checkpoint.
        sink_moved: files, relative to the sink's log.

    Example: ``rewind("checkpoint/", 41).moved``
    """

    to_batch: int
    last_batch: int
    moved: tuple[str, ...]
    sink_moved: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "to_batch": self.to_batch,
            "last_batch": self.last_batch,
            "moved": list(self.moved),
            "sink_moved": list(self.sink_moved),
        }


def plan_rewind(
    files: Iterable[str], to_batch: int, sink_log: Iterable[str] = (), empty: Collection[str] = ()
) -> Rewind:
    """Plans which files a rewind moves out of a checkpoint.

    Args:
        files: paths of the files in the checkpoint directory, relative to it, with ``/``.
        to_batch: the batch that the query must send next.
        sink_log: names of the files in the sink's ``_spark_metadata``.
        empty: the empty files among ``files``; empty log entries are moved out.

    Raises InvalidArgument if ``files`` are not those of a query's checkpoint, or the query cannot go back to
    ``to_batch``.
    """
    names = set(files)
    said = names.difference(empty)
    offsets, commits = _batches(said, "offsets"), _batches(said, "commits")
    left = sorted(filter(_LEFT.match, names))
    if "metadata" not in names or not (offsets or left):
        raise InvalidArgument(
            "the directory is not the checkpoint directory of a Spark streaming query",
            remedy="name the query's checkpointLocation",
        )
    last = max(offsets, default=-1)
    if to_batch < 0 or to_batch > last + 1:
        raise InvalidArgument(f"there is no batch {to_batch}", remedy=f"use a batch up to the last planned one, {last}")
    if to_batch > 0 and not (to_batch - 1 in offsets and to_batch - 1 in commits):
        oldest = min(offsets & commits, default=last) + 1
        raise InvalidArgument(
            f"the checkpoint lacks the offsets or the commit of the batch before batch {to_batch}",
            remedy=f"use a batch after a committed one, {oldest} at the earliest; a higher "
            "spark.sql.streaming.minBatchesToRetain keeps more",
        )
    out = [name for name in sorted(names - said) if _ENTRY.match(name)]
    out += [f"commits/{number}" for number in sorted(commits, reverse=True) if number >= to_batch]
    out += [f"offsets/{number}" for number in sorted(offsets, reverse=True) if number > to_batch]
    for name in sorted(names):
        match = _VERSION.match(name.rpartition("/")[2]) if name.startswith("state/") else None
        if match is not None and int(match[1]) > to_batch:
            out.append(name)
    moved = left + [each for name in out for each in (_crc(name), name) if each in names]
    return Rewind(to_batch, last, tuple(moved), tuple(_sink(set(sink_log), to_batch)))


def _batches(names: set[str], folder: str) -> set[int]:
    found = (name.partition("/") for name in names)
    return {int(rest) for place, _, rest in found if place == folder and _BATCH.match(rest)}


def _crc(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.crc"


def _sink(names: set[str], to_batch: int) -> list[str]:
    """Returns the entries of the sink's log from ``to_batch`` on.

    A compact entry includes all entries before it. Raises InvalidArgument if a compact entry has to be moved out, but
    single entries for the batches before ``to_batch`` are missing.
    """
    plain = {int(name): name for name in names if _BATCH.match(name)}
    compact = {int(name[: -len(".compact")]): name for name in names if re.fullmatch(r"\d+\.compact", name)}
    base = max((number for number in compact if number < to_batch), default=-1)
    missing = [number for number in range(base + 1, to_batch) if number not in plain and number not in compact]
    if any(number >= to_batch for number in compact) and missing:
        raise InvalidArgument(
            f"the sink's log no longer has an entry of its own for batch {missing[0]}",
            remedy=f"go back to a batch after {max(compact)}, or write to a new directory",
        )
    out = [name for number, name in {**plain}.items() if number >= to_batch]
    out += [name for number, name in compact.items() if number >= to_batch]
    out.sort(key=lambda name: int(name.partition(".")[0]), reverse=True)
    return [each for name in out for each in (f".{name}.crc", name) if each in names]


def rewind(
    directory: str | Path,
    to_batch: int,
    *,
    sink: str | Path | None = None,
    apply: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Rewind:
    """Plans a rewind of a stopped query, and carries it out if ``apply`` is True.

    Args:
        directory: the query's checkpointLocation, on a file system of this machine.
        to_batch: the batch that the query must send next; a PositionGap names it.
        sink: directory of the file sink that the query writes to; None if it writes to another sink.
        apply: False only plans, and moves nothing.
        clock: clock for the name of the folder of removed files.

    Raises InvalidArgument if ``directory`` is not the checkpoint of a query, ``sink`` is not the directory of a file
    sink, or the query cannot go back to ``to_batch``.

    Example: ``rewind("checkpoint/", to_batch=41, apply=True)``
    """
    root = _local(directory)
    log = None if sink is None else _local(sink) / SINK_LOG
    if log is not None and not log.is_dir():
        raise InvalidArgument(
            "the path is not a directory of a Spark file sink",
            remedy="name the path that the query writes to",
            path=sink,
        )
    plan = plan_rewind(
        _files(root),
        to_batch,
        () if log is None else (path.name for path in log.iterdir() if path.is_file()),
        _empty(root),
    )
    if apply:
        moment = _moment(clock)
        if log is not None:
            _move(log, plan.sink_moved, log.parent / ASIDE / moment / SINK_LOG)
        _move(root, plan.moved, root / ASIDE / moment)
    return plan


def take_out_left(directory: str | Path) -> tuple[str, ...]:
    """Removes temporary files, with which Spark would not start the query, from a checkpoint. Returns their names.

    The files are moved aside. Call it before the query starts. It moves nothing, and returns an empty tuple, if
    ``directory`` is not on this machine, or the logs contain batches.
    """
    try:
        root = _local(directory)
        plan = plan_rewind(_files(root), 0)
    except InvalidArgument:  # no such directory, or no checkpoint
        return ()
    if plan.last_batch >= 0:
        return ()
    _move(root, plan.moved, root / ASIDE / _moment(SYSTEM_CLOCK))
    return plan.moved


def ran_in_micro_batches(directory: str | Path) -> bool:
    """Tells whether the last finished batch of a query's checkpoint is a micro-batch.

    In real-time mode Spark writes the log of finished batches in another format. Returns False if ``directory`` is not
    on this machine or contains no finished batch.
    """
    try:
        root = _local(directory)
    except InvalidArgument:
        return False
    finished = [int(path.name) for path in listed(root / "commits") if _BATCH.match(path.name)]
    if not finished:
        return False
    with (root / "commits" / str(max(finished))).open("rb") as entry:
        return entry.readline().strip() == _MICRO_BATCHES


def last_planned(directory: str | Path) -> tuple[str, int] | None:
    """Returns the id of a query, and the last batch that its checkpoint has planned; -1: it has planned none.

    Returns None if ``directory`` is not on this machine, or is not the checkpoint of a query.
    """
    try:
        root = _local(directory)
        query = json.loads((root / "metadata").read_bytes())["id"]
    except (InvalidArgument, OSError, ValueError, LookupError, TypeError):
        return None
    planned = _batches(set(_files(root)) - _empty(root), "offsets")
    return str(query), max(planned, default=-1)


def _files(root: Path) -> list[str]:
    files = (path.relative_to(root).as_posix() for path in files_below(root))
    return [name for name in files if not name.startswith(ASIDE)]


def _empty(root: Path) -> set[str]:
    """Returns the empty entries of the logs, with which Spark refuses to start. A power failure may leave them."""
    entries = (path for folder in ("offsets", "commits") for path in listed(root / folder) if path.is_file())
    return {path.relative_to(root).as_posix() for path in entries if not path.stat().st_size}


def _moment(clock: Clock) -> str:
    return datetime.fromtimestamp(clock.now_us() / 1e6, UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def _move(root: Path, names: Iterable[str], aside: Path) -> None:
    for name in names:
        target = aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (root / name).rename(target)


def _local(directory: str | Path) -> Path:
    text = str(directory)
    path = Path(text.removeprefix("file://").removeprefix("file:"))
    if "://" in str(path) or not path.is_dir():
        raise InvalidArgument(
            "there is no such directory on this machine",
            remedy="name a local one; copy a remote one here, rewind it, and copy it back",
            path=directory,
        )
    return path
