"""Functions that all demonstrations share: the live page, progress on the console, the working directory, and the parts
of reports that show moves and versions."""

from __future__ import annotations

import contextlib
import platform
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from stateflow.client import MoveReport
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.demo.result import MoveRow
from stateflow.errors import InvalidArgument, PortInUse
from stateflow.node.workers import nobody_in
from stateflow.release import VERSION
from stateflow.settings import ReplicaSettings
from stateflow.testing import LocalCluster

# -- The live page of the cluster, while it runs ---------------------------------------------------------------------

#: preferred address of the page: a browser tab that is still open then shows the next demonstration, too
LISTEN = "127.0.0.1:7071"


@contextmanager
def live_page(local: LocalCluster, console: Console) -> Iterator[Dashboard]:
    """Serves the live page of a cluster while the block runs, and prints the page's URL."""
    with _at_a_free_port(local) as page:
        console.print(Text.assemble("  live page: ", (page.url, "bold")))
        yield page


def _at_a_free_port(local: LocalCluster) -> Dashboard:
    checkpoints = str(local.data_dir / "checkpoints")
    try:
        return Dashboard(DashboardOptions(local.address, LISTEN, ledger=local.ledger, checkpoints=checkpoints))
    except PortInUse:
        return Dashboard(DashboardOptions(local.address, ledger=local.ledger, checkpoints=checkpoints))


# -- Progress: on a terminal, one line that is redrawn; elsewhere, a line every three seconds ------------------------

#: seconds between two lines of progress, without a terminal
SAY_EVERY_S = 3.0
LOG_WIDTH = 110


def console_of(tell_stderr: bool) -> Console:
    """Returns a console that writes to stderr if ``tell_stderr``, otherwise to stdout."""
    console = Console(stderr=tell_stderr, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(stderr=tell_stderr, markup=False, emoji=False, width=LOG_WIDTH)


class ProgressPrinter:
    """Prints the step of the demonstration that is running, with its duration.

    A second thread keeps the duration current. Only one thread may call :meth:`of` and :meth:`say`.
    """

    def __init__(self, console: Console, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console, self._clock = console, clock
        self._said = ""
        self._began = self._said_at = clock.monotonic()
        self._status: Status | None = None

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Shows ``what`` as the running step while the block runs."""
        self._said, self._began = what, self._clock.monotonic()
        self._said_at = self._began
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), daemon=True)
        try:
            if self._console.is_terminal:
                self._status = self._console.status(self._line())
                self._status.start()
            watch.start()
            yield
        finally:
            over.set()
            watch.join()
            if self._status is not None:
                self._status.stop()
                self._status = None

    def say(self, what: str) -> None:
        """Changes the description of the running step."""
        self._said = what

    def _line(self) -> Text:
        return Text(f"{self._said} ({self._clock.monotonic() - self._began:.0f} s)")

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.25):
            self.tick()

    def tick(self) -> None:
        """Redraws the line of the running step. Without a terminal, prints the line if it is due."""
        now = self._clock.monotonic()
        if self._status is not None:
            self._status.update(self._line())
        elif now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            self._console.print(Text("  … ").append_text(self._line()))


# -- Directory, moves, versions --------------------------------------------------------------------------------------


def fresh(out: Path) -> Path:
    """Makes an empty directory ``work`` in ``out``, and returns it.

    Raises InvalidArgument if ``out`` is not a directory, and DataDirLocked while replicas of another or a killed
    demonstration still run there.
    """
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
    """Returns the row for a move in the report.

    Args:
        began_us: start of the stream or the drive, from which the report counts seconds.
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
