"""Errors of recurring duties: logged, and survived.

A duty that ended with its first error would leave a process that looks alive and no longer performs it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from stateflow.storage.faults import meaning


class Troubles:
    """The errors of one duty. Each kind is logged once, until a round goes well.

    Args:
        log: logger of the duty's module.
        what: begins each line, such as "checkpoints are not taken".
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._said = ""

    @contextmanager
    def survived(self) -> Iterator[None]:
        """Runs one round: any error in it is logged, and the next round may go better."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged
            self.met(error)
        else:
            self.over()

    def over(self) -> None:
        """Notes that a round went well: the next error is logged again."""
        self._said = ""

    def is_new(self, kind: str) -> bool:
        """Tells whether ``kind`` differs from the last one, and notes it as the last."""
        former, self._said = self._said, kind
        return kind != former

    def met(self, error: Exception) -> None:
        """Logs an error of the environment in one line, and a bug in stateflow with its stack."""
        meant = meaning(error)
        if meant is None:
            self.unforeseen(error)
        elif self.is_new(meant.code):
            self._log.error("%s: %s", self._what, meant)

    def unforeseen(self, error: Exception) -> None:
        """Logs a bug in stateflow; simulations fail with it."""
        kind = type(error).__name__
        if self.is_new(kind):
            self._log.error("%s: %s: %s", self._what, kind, error, exc_info=error)
