"""Puts the checkpoint of a stopped Spark query back to a batch, so that it sends that batch next.

When Spark starts, it reads three folders of the checkpoint. The newest entry of ``offsets/`` is the last planned batch,
the newest entry of ``commits/`` is the last finished batch, and ``state/`` has a version per finished batch. Rewinding
to batch N keeps ``offsets`` up to N, so that N has the same rows as before, ``commits`` below N, and state
versions up to N. Batches after N are planned anew and may contain other rows. A file sink's entries for those batches
have to go too, or Spark would take the batches for written: name the sink's directory as ``sink``.

If Spark is killed while it writes one of these entries, the temporary file that it was about to rename stays. While the
logs hold no batch, Spark refuses to start beside such a file (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY), whichever of
its checkpoint file managers wrote it; later Spark ignores it. Another ``checkpointLocation`` would be another query,
which in real-time mode would begin anew with rows that were applied. So a rewind takes these files out.

A machine that loses its power may leave an entry of these logs without bytes, at which Spark refuses to start
("Incomplete log file"). A rewind to that batch takes the entry out, and Spark plans the batch anew.

A rewind deletes nothing. Files that it takes out go to ``_rewound/<time>/`` in the same directory, in an order in which
an interrupted rewind can be done again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import InvalidArgument

ASIDE = "_rewound"
SINK_LOG = "_spark_metadata"
_BATCH = re.compile(r"\d+\Z")
#: a temporary file of one of the logs that was never renamed, and its checksum
_LEFT = re.compile(r"(?:offsets|commits)/\.{1,2}\d+\.[0-9a-f\-]{36}\.tmp(?:\.crc)?\Z")
_ENTRY = re.compile(r"(?:offsets|commits)/\d+\Z")
#: first line of an entry in the log of finished batches
_MICRO_BATCHES = b"v1"
_VERSION = re.compile(r"\.?(\d+)(?:_[0-9a-f\-]+)*\.(?:delta|snapshot|zip|changelog)(?:\.crc)?\Z")


@dataclass(frozen=True, slots=True)
class Rewind:
    """Files that a rewind takes out. ``moved``: relative to the checkpoint. ``sink_moved``: relative to the sink's log.

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
    """Plans which files a rewind takes out.

    Args:
        files: files of the checkpoint directory, relative, with ``/``.
        to_batch: the batch that the query must send next.
        sink_log: names in the sink's ``_spark_metadata``.
        empty: those of ``files`` without bytes; such log entries are taken out.

    Raises InvalidArgument if this is not a checkpoint of a query, or the query cannot go back to that batch.
    """
    names = set(files)
    said = names.difference(empty)
    offsets, commits = _batches(said, "offsets"), _batches(said, "commits")
    left = sorted(filter(_LEFT.match, names))
    if "metadata" not in names or not (offsets or left):
        raise InvalidArgument(
            "not a checkpoint directory of a Spark streaming query",
            remedy="name the query's checkpointLocation",
        )
    last = max(offsets, default=-1)
    if to_batch < 0 or to_batch > last + 1:
        raise InvalidArgument(f"there is no batch {to_batch}", remedy=f"use a batch up to the last planned one, {last}")
    if to_batch > 0 and not (to_batch - 1 in offsets and to_batch - 1 in commits):
        oldest = min(offsets & commits, default=last) + 1
        raise InvalidArgument(
            f"Spark no longer keeps what a rewind to batch {to_batch} needs",
            remedy=f"use batch {oldest} or a later one; a higher spark.sql.streaming.minBatchesToRetain keeps more",
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

    Compact entries include all entries before them. If one is taken out, the single entries before ``to_batch`` must
    exist; otherwise it raises InvalidArgument.
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
    """Plans a rewind of a stopped query, and with ``apply`` carries it out.

    Args:
        directory: the query's checkpointLocation, on a file system of this machine.
        to_batch: the batch that the query must send next, as named by a PositionGap.
        sink: directory of a file sink that the query writes to. None: no file sink.
        apply: False only plans.
        clock: gives the time for the name of the folder of removed files.

    Raises InvalidArgument.

    Example: ``rewind("checkpoint/", to_batch=41, apply=True)``
    """
    root = _local(directory)
    log = None if sink is None else _local(sink) / SINK_LOG
    if log is not None and not log.is_dir():
        raise InvalidArgument(
            "not a directory of a Spark file sink", remedy="name the path that the query writes to", path=sink
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
    """Takes out the files that keep Spark from starting a query, and returns their names.

    Call it when the query is about to start.

    Returns an empty tuple for a directory that is not on this machine, or if the logs hold batches.
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

    Real-time mode writes another format of the log of finished batches. Returns False for a directory that is not on
    this machine or holds no finished batch.
    """
    try:
        root = _local(directory)
    except InvalidArgument:
        return False
    finished = [int(path.name) for path in (root / "commits").glob("*") if _BATCH.match(path.name)]
    if not finished:
        return False
    with (root / "commits" / str(max(finished))).open("rb") as entry:
        return entry.readline().strip() == _MICRO_BATCHES


def _files(root: Path) -> list[str]:
    files = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return [name for name in files if not name.startswith(ASIDE)]


def _empty(root: Path) -> set[str]:
    """Returns the logs' entries without bytes, because of which Spark refuses to start.

    A machine that loses power leaves them.
    """
    entries = (path for folder in ("offsets", "commits") for path in (root / folder).glob("*") if path.is_file())
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
