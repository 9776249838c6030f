"""Putting the checkpoint of a stopped Spark query back to a batch, so that it sends that batch next.

What Spark reads of it when it starts: the newest entry of ``offsets/`` is the batch that was planned last, the newest
of ``commits/`` the one that was finished last, ``state/`` has a version per finished batch. Rewinding to batch N keeps
``offsets`` up to N, so that N is made of the same rows as before, ``commits`` below N, and state versions up to N.
Batches behind N are planned anew and may be cut otherwise; what a file sink remembers of them has to go too, or Spark
would take them for written: name its directory as ``sink``.

A Spark that is killed while it writes one of these leaves the file that it was about to rename. As long as no batch
stands in the logs it refuses to start beside such a file (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY), whichever of its
checkpoint file managers wrote it; later it does not care. Another ``checkpointLocation`` would be another query, which
in real-time mode begins anew with rows that were applied: so they are taken out.

A machine that loses its power may leave an entry of these logs without bytes, at which Spark refuses to start
("Incomplete log file"). A rewind to its batch takes it out, and the batch is planned anew.

Nothing is deleted. What is taken out goes to ``_rewound/<time>/`` beside it, in the order in which a rewind that was
cut short can be done again.
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
#: a file of one of the logs that was to be renamed, and its checksum
_LEFT = re.compile(r"(?:offsets|commits)/\.{1,2}\d+\.[0-9a-f\-]{36}\.tmp(?:\.crc)?\Z")
_ENTRY = re.compile(r"(?:offsets|commits)/\d+\Z")
_VERSION = re.compile(r"\.?(\d+)(?:_[0-9a-f\-]+)*\.(?:delta|snapshot|zip|changelog)(?:\.crc)?\Z")


@dataclass(frozen=True, slots=True)
class Rewind:
    """What a rewind takes out. ``moved`` and ``sink_moved``: relative to the checkpoint and to the sink.

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
    """What to take out.

    Args:
        files: of the checkpoint directory, relative, with ``/``.
        sink_log: names in the sink's ``_spark_metadata``.
        empty: those of ``files`` that have no bytes. As entries of a log they say nothing, and are taken out.

    Raises InvalidArgument when this is no checkpoint of a query, or the batch cannot be gone back to.
    """
    names = set(files)
    said = names.difference(empty)
    offsets, commits = _batches(said, "offsets"), _batches(said, "commits")
    left = sorted(filter(_LEFT.match, names))
    if "metadata" not in names or not (offsets or left):
        raise InvalidArgument(
            "this is no checkpoint directory of a Spark streaming query",
            remedy="name the query's checkpointLocation",
        )
    last = max(offsets, default=-1)
    if to_batch < 0 or to_batch > last + 1:
        raise InvalidArgument(f"there is no batch {to_batch}", remedy=f"the last one planned is {last}")
    if to_batch > 0 and not (to_batch - 1 in offsets and to_batch - 1 in commits):
        oldest = min(offsets & commits, default=last) + 1
        raise InvalidArgument(
            f"Spark keeps too little to go back to batch {to_batch}",
            remedy=f"the oldest possible is {oldest}; spark.sql.streaming.minBatchesToRetain keeps more",
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
    """Entries of the sink's log from ``to_batch`` on. Some hold all before them too: those before must be there."""
    plain = {int(name): name for name in names if _BATCH.match(name)}
    compact = {int(name[: -len(".compact")]): name for name in names if re.fullmatch(r"\d+\.compact", name)}
    base = max((number for number in compact if number < to_batch), default=-1)
    missing = [number for number in range(base + 1, to_batch) if number not in plain and number not in compact]
    if any(number >= to_batch for number in compact) and missing:
        raise InvalidArgument(
            f"the sink's log no longer has batch {missing[0]} by itself",
            remedy=f"go back to a batch behind {max(compact)}, or write to a new directory",
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
    """Plan a rewind of a stopped query, and with ``apply`` do it.

    Args:
        directory: the query's checkpointLocation, on a file system of this machine.
        to_batch: the batch the query shall send next, as a PositionGap names it.
        sink: directory of a file sink that the query writes to.

    Raises InvalidArgument.

    Example: ``rewind("checkpoint/", to_batch=41, apply=True)``
    """
    root = _local(directory)
    log = None if sink is None else _local(sink) / SINK_LOG
    if log is not None and not log.is_dir():
        raise InvalidArgument("this is no directory of a Spark file sink", remedy="name the query's path", path=sink)
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
    """Of a query that is about to start: what keeps Spark from starting it, see above. Nothing for a directory that is
    not on this machine, or where batches stand in the logs."""
    try:
        root = _local(directory)
        plan = plan_rewind(_files(root), 0)
    except InvalidArgument:  # there is no such thing
        return ()
    if plan.last_batch >= 0:
        return ()
    _move(root, plan.moved, root / ASIDE / _moment(SYSTEM_CLOCK))
    return plan.moved


def _files(root: Path) -> list[str]:
    files = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return [name for name in files if not name.startswith(ASIDE)]


def _empty(root: Path) -> set[str]:
    """A log's entries without bytes, as a machine leaves them that loses its power: Spark refuses to start at one."""
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
