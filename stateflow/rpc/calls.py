"""Calls that share a stream: which of them are under way, and when the other end was last heard of. Sans-io."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

T = TypeVar("T")


class Calls(Generic[T]):
    """Of one stream. Each call has a number, and somebody who waits for its answers.

    ``heard_at``: monotonic seconds; since when nothing came though something was to come. Whatever comes is a sign of
    life for all calls.
    """

    def __init__(self) -> None:
        self._open: dict[int, T] = {}
        self._newest = 0
        self.heard_at = -math.inf

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, waits: T, now: float) -> int:
        """Returns its number, larger than any before."""
        if not self._open:
            self.heard_at = now
        self._newest += 1
        self._open[self._newest] = waits
        return self._newest

    def is_open(self, number: int) -> bool:
        return number in self._open

    def came(self, number: int, last: bool, now: float) -> T | None:
        """Something came for a call; returns who waits for it. None: nobody does, as for a mere sign of life."""
        self.heard_at = now
        return self._open.pop(number, None) if last else self._open.get(number)

    def end(self, number: int) -> T | None:
        """Nobody waits for it any more; returns who did."""
        return self._open.pop(number, None)

    def end_all(self) -> list[T]:
        """The stream is over; returns who waited."""
        left, self._open = list(self._open.values()), {}
        return left
