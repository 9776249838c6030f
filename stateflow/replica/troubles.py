"""What goes wrong in what a process does again and again. It is said and gone on: a duty that ended with its first
error would leave a process that looks alive and does not do it any more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from stateflow.storage.faults import meaning


class Troubles:
    """Of one duty. Each kind is said once, until a round goes well.

    Args:
        log: whose duty it is.
        what: begins the line, such as "checkpoints are not taken".
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._said = ""

    @contextmanager
    def survived(self) -> Iterator[None]:
        """A round: whatever goes wrong in it is said, and the next one may go better."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - which is said
            self.met(error)
        else:
            self.over()

    def over(self) -> None:
        """A round went well: what comes next is news."""
        self._said = ""

    def is_new(self, kind: str) -> bool:
        """Is it another one than was said last? It counts as said from now on."""
        former, self._said = self._said, kind
        return kind != former

    def met(self, error: Exception) -> None:
        """One line of what the environment did; with its stack, where it is a bug in stateflow."""
        meant = meaning(error)
        if meant is None:
            self.unforeseen(error)
        elif self.is_new(meant.code):
            self._log.error("%s: %s", self._what, meant)

    def unforeseen(self, error: Exception) -> None:
        """A bug in stateflow, which a simulation fails with."""
        kind = type(error).__name__
        if self.is_new(kind):
            self._log.error("%s: %s: %s", self._what, kind, error, exc_info=error)
