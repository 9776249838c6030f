"""A progress line on a terminal for work that takes longer than a second; it is removed at the end. In a pipe, and with
``--json``, there is none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from stateflow.cli.output import errors

T = TypeVar("T")
#: seconds before the line appears
QUIET_S = 1.0
LOOK_S = 0.25


@dataclass(slots=True)
class Shown:
    """Progress that is shown. ``total`` 0: unknown."""

    what: str
    done: int = 0
    total: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def of(self, done: int, total: int) -> None:
        self.done, self.total = done, total


@contextmanager
def waiting(
    what: str,
    *,
    as_json: bool = False,
    look: Callable[[Shown], None] | None = None,
    console: Console = errors,
    quiet_s: float = QUIET_S,
) -> Iterator[Shown]:
    """Shows a progress line while the block runs.

    Args:
        look: called now and then to update the progress. Its errors are not shown, as the work itself goes on.
    """
    shown = Shown(what)
    if as_json or not console.is_terminal:
        yield shown
        return
    drawing = threading.Thread(target=_draw, args=(shown, look, console, quiet_s), daemon=True)
    drawing.start()
    try:
        yield shown
    finally:
        shown.over.set()
        drawing.join()


def one_by_one(what: str, items: Sequence[T], *, as_json: bool = False) -> Iterator[T]:
    """Yields the items, and shows how many of them are done."""
    with waiting(what, as_json=as_json) as shown:
        for done, item in enumerate(items):
            shown.of(done, len(items))
            yield item


def _draw(shown: Shown, look: Callable[[Shown], None] | None, console: Console, quiet_s: float) -> None:
    if shown.over.wait(quiet_s):
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(shown.what, total=None)
        while True:
            if look is not None:
                with contextlib.suppress(Exception):
                    look(shown)
            _update(progress, task, shown)
            if shown.over.wait(LOOK_S):
                return


def _update(progress: Progress, task: TaskID, shown: Shown) -> None:
    counted = f", {shown.done} of {shown.total}" if shown.total else ""
    progress.update(task, description=shown.what + counted)
