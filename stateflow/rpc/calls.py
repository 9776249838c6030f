"""Calls that share a stream: which are under way, and when the other end was last heard. Sans-io."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

T = TypeVar("T")


class Calls(Generic[T]):
    """The calls of one stream. Each has a number, and a waiter for its answers.

    ``heard_at``: since when nothing has come although an answer is due, in monotonic seconds: the time of the last
    message, or of the begin of a call when none was open. Any message is a sign of life for all calls.
    """

    def __init__(self) -> None:
        self._open: dict[int, T] = {}
        self._newest = 0
        self.heard_at = -math.inf

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, waits: T, now: float) -> int:
        """Opens a call, and returns its number, which is larger than any before."""
        if not self._open:
            self.heard_at = now
        self._newest += 1
        self._open[self._newest] = waits
        return self._newest

    def is_open(self, number: int) -> bool:
        return number in self._open

    def came(self, number: int, last: bool, now: float) -> T | None:
        """Notes a message for a call, and returns its waiter; None: the call is not open, or the message is a mere sign
        of life."""
        self.heard_at = now
        return self._open.pop(number, None) if last else self._open.get(number)

    def end(self, number: int) -> T | None:
        """Closes a call that its waiter has given up, and returns the waiter; None: the call is not open."""
        return self._open.pop(number, None)

    def end_all(self) -> list[T]:
        """Closes all calls, as the stream is over, and returns their waiters."""
        left, self._open = list(self._open.values()), {}
        return left
