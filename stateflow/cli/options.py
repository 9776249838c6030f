"""Options that many commands share, and the parsing of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from stateflow.errors import InvalidArgument
from stateflow.moves import MoveOptions
from stateflow.moves import Order as MoveOrder
from stateflow.private import state_directory
from stateflow.types import LABEL, shown

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Controller = Annotated[
    str,
    typer.Option(
        "--controller", envvar="STATEFLOW_CONTROLLER", help="host:port of the controller, or of several: a:7070,b:7070."
    ),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        "--checkpoints",
        envvar="STATEFLOW_CHECKPOINTS",
        help="Checkpoint store: directory or fsspec URL, or @FILE that holds it.",
    ),
]
LISTEN = "127.0.0.1:7070"
#: replaced where a program runs its own cluster in this directory, see `stateflow.cli.configuring`
LOCAL = LISTEN


def allow_plain_text(wanted: bool) -> None:
    """Allows plain text over a network, for this process and those that it starts."""
    if wanted:
        os.environ["STATEFLOW_INSECURE"] = "1"


Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        callback=allow_plain_text,
        expose_value=False,
        help="Allow plain text over a network, where anyone can read it and send commands.",
    ),
]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def default_ledger(*, make: bool = False) -> str:
    """Returns the URL of the default ledger: one file for each user, in any working directory."""
    from stateflow.ledger.database import sqlite_url

    file = state_directory() / "ledger.db"
    if make:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return sqlite_url(file)


def seconds(text: str) -> float:
    """Parses ``90s``, ``15m``, ``2h``, ``7d``. Raises InvalidArgument."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    if match is None:
        raise InvalidArgument(f"{shown(text)} is not a duration", remedy="write 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def position(text: str) -> tuple[str, int]:
    """Parses ``SOURCE=BATCH``. Raises InvalidArgument."""
    source, _, batch = text.rpartition("=")
    if not source or not batch.isdecimal():
        raise InvalidArgument(
            f"{shown(text)} is not a position", remedy="write SOURCE=BATCH, as `checkpoint list` shows them"
        )
    return source, int(batch)


def labels_of(words: Sequence[str]) -> dict[str, str]:
    """Parses words ``key=value``. Raises InvalidArgument."""
    labels: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and LABEL.holds(key) and LABEL.holds(value)):
            raise InvalidArgument(f"{shown(word)} is not a label", remedy="write key=value")
        labels[key] = value
    return labels


MaxPause = Annotated[
    str | None, typer.Option("--max-pause", help="Pause budget of each partition, e.g. 50ms; default: no limit.")
]
MaxBandwidth = Annotated[
    str | None,
    typer.Option(
        "--max-bandwidth",
        help="Limit of all base copies of this command together, over all operators, e.g. 20MB/s; default: none. "
        "Changes written during the copy and copies for standbys are not limited.",
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        help="Strategy of the move: auto, warm-up, stop-and-restart, pause-and-copy, fluid, batched or on-demand."
    ),
]
Order = Annotated[str, typer.Option(help="Order of the partitions: number, hot-first or hot-last.")]
Patience = Annotated[
    str | None,
    typer.Option(
        "--patience", help="How long to wait for a pause within the budget, e.g. 30s, before the move is refused."
    ),
]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would move, and its cost.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Maximum number of moves at a time.", min=1)]
PerNode = Annotated[
    int | None,
    typer.Option("--per-node", help="Maximum number of moves at a time with the same node as source or target.", min=1),
]
PerLink = Annotated[
    int | None, typer.Option("--per-link", help="Maximum number of moves at a time between the same two sites.", min=1)
]
Policies = Annotated[
    str, typer.Option("--policy", help="ring, load, locality, or several in order of priority, e.g. locality,load.")
]


def milliseconds(text: str) -> float:
    """Parses ``50ms``, ``0.2s``, ``300us``; a bare number is milliseconds. Raises InvalidArgument."""
    match = re.fullmatch(r"([0-9.]+)\s*(us|ms|s)?", text.strip())
    try:
        if match is None:
            raise ValueError
        return float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3, None: 1.0}[match[2]]
    except ValueError:
        raise InvalidArgument(f"{shown(text)} is not a duration", remedy="write 50ms or 0.2s") from None


def bytes_per_second(text: str) -> float:
    """Parses ``20MB/s``, ``1GiB/s``, ``500kB``; a bare number is bytes. Raises InvalidArgument."""
    units = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1024, "Mi": 1 << 20, "Gi": 1 << 30}
    match = re.fullmatch(r"([0-9.]+)\s*(k|M|G|Ki|Mi|Gi)?(?:B?(?:/s)?)", text.strip())
    try:
        if match is None:
            raise ValueError
        return float(match[1]) * units[match[2] or ""]
    except ValueError:
        raise InvalidArgument(f"{shown(text)} is not a bandwidth", remedy="write 20MB/s or 1GiB/s") from None


def byte_count(text: str) -> int:
    """Parses ``512MB``, ``4GiB``; a bare number is bytes. Raises InvalidArgument."""
    units = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(k|M|G|T|Ki|Mi|Gi|Ti)?B?", text.strip())
    if match is None or not float(match[1]):
        raise InvalidArgument(f"{shown(text)} is not a size", remedy="write 512MB or 4GiB")
    return round(float(match[1]) * units[match[2] or ""])


def move_options(
    max_pause: str | None,
    max_bandwidth: str | None,
    strategy: str,
    order: str,
    patience: str | None,
    limits: tuple[int | None, int | None, int | None] = (None, None, None),
) -> MoveOptions:
    """Returns the options of moves that the command line gives. Raises InvalidArgument."""
    return MoveOptions(
        None if max_pause is None else milliseconds(max_pause),
        None if max_bandwidth is None else bytes_per_second(max_bandwidth),
        None if patience is None else milliseconds(patience) / 1e3,
        strategy,
        cast("MoveOrder", order),  # MoveOptions refuses any other
        *limits,
    )
