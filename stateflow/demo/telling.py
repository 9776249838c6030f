"""Progress of the demonstration: a line that changes on a terminal, and elsewhere a line from the third second on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

from stateflow.clock import SYSTEM_CLOCK, Clock

#: seconds between two lines, where nothing can be drawn
SAY_EVERY_S = 3.0
LOG_WIDTH = 110


def console_of(tell_stderr: bool) -> Console:
    """Returns a console of stdout, or of stderr."""
    console = Console(stderr=tell_stderr, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(stderr=tell_stderr, markup=False, emoji=False, width=LOG_WIDTH)


class Telling:
    """Says what goes on, and in a thread of its own that it still goes on. Only one thread may use it."""

    def __init__(self, console: Console, clock: Clock = SYSTEM_CLOCK) -> None:
        self._console, self._clock = console, clock
        self._said = ""
        self._began = self._said_at = clock.monotonic()
        self._status: Status | None = None

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Says that something which may take long goes on, until the block is left."""
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
        """Changes what goes on now."""
        self._said = what

    def _line(self) -> Text:
        return Text(f"{self._said} ({self._clock.monotonic() - self._began:.0f} s)")

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.25):
            self.tick()

    def tick(self) -> None:
        """Draws the line anew, or prints it where it is time to."""
        now = self._clock.monotonic()
        if self._status is not None:
            self._status.update(self._line())
        elif now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            self._console.print(Text("  … ").append_text(self._line()))
