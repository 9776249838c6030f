"""Parts that every demonstration has: a directory to work in, the moves as its report shows them, versions."""

from __future__ import annotations

import contextlib
import platform
import shutil
from importlib import metadata
from pathlib import Path

from stateflow.client import MoveReport
from stateflow.demo.result import MoveRow
from stateflow.errors import InvalidArgument
from stateflow.node.workers import nobody_in
from stateflow.release import VERSION
from stateflow.settings import ReplicaSettings


def fresh(out: Path) -> Path:
    """Makes an empty directory to work in, where the report will go. Raises InvalidArgument, and DataDirLocked while
    replicas of a demonstration that goes on there, or was killed, are running."""
    if out.exists() and not out.is_dir():
        raise InvalidArgument("the report path is not a directory", remedy="pass a directory with --out", path=out)
    work = out / "work"
    with contextlib.ExitStack() as claims:
        for node in sorted((work / "cluster").glob("*/NODE")):
            claims.enter_context(nobody_in(node.parent, ReplicaSettings().stop_timeout_s))
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def move_row(move: MoveReport, began_us: int) -> MoveRow:
    """Returns a move as the report shows it.

    Args:
        began_us: when its times begin.
    """
    return MoveRow(
        partition=move.partition,
        source=move.source,
        target=move.target,
        started_s=(move.started_us - began_us) / 1e6,
        pause_at_s=((move.fenced_us or move.started_us) - began_us) / 1e6,
        duration_s=move.duration_s,
        bytes_warm=move.bytes_warm,
        bytes_reused=move.bytes_reused,
        bytes_delta=move.bytes_delta,
        rounds=move.rounds,
        predicted_pause_ms=move.predicted_pause_ms,
        pause_ms=move.pause_ms,
        state=move.state,
        error=move.error,
        margin_ms=move.margin_ms,
    )


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "stateflow": VERSION,
        **{name: metadata.version(name) for name in ("pyspark", "rocksdict", "grpcio", "pyarrow")},
    }
