"""Operators that the tests run; importable, as deployed ones must be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Count(Operator):
    """Counts rows and sums values per key, and keeps what was seen."""

    key = "k"
    output = "k string, n long, total long"
    n = state.value(int, default=0)
    total = state.value(int, default=0)
    seen = state.set(str)
    by_tag = state.map(str, int)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int, int]]:
        self.n.value += 1
        self.total.value += row.v
        self.seen.add(f"{row.v}")
        self.by_tag[f"t{row.v % 3}"] = self.by_tag.get(f"t{row.v % 3}", 0) + row.v
        yield row.k, self.n.value, self.total.value


class Picky(Count):
    """Writes state, then fails as the row says."""

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.value += 1
        match row.v:
            case -1:
                raise RuntimeError("minus one\nis not liked")
            case -2:
                self.n.value = "two"  # type: ignore[assignment]
            case -3:
                yield row.k, "three", 0
            case -4:
                yield (row.k,)
            case -5:
                raise KeyboardInterrupt
            case -6:
                raise SystemExit(1)
            case _:
                yield row.k, self.n.value, row.v


class Pair(Operator):
    key = ("a", "b")
    output = "a string, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> list[tuple[str, int]] | None:
        self.n.value += 1
        return None if row.a == "quiet" else [(row.a, self.n.value)]


class Lifecycled(Operator):
    key = "k"
    output = "k string"
    calls: list[str] = []  # noqa: RUF012 - a log shared by all instances

    def open(self, ctx: Context) -> None:
        self.calls.append(f"open {ctx.partition} {ctx.key}")

    def process(self, row: Any, ctx: Context) -> None:
        self.calls.append(f"process {ctx.key}")

    def close(self, ctx: Context) -> None:
        self.calls.append("close")


class Gate(Count):
    """Sets ``entered`` while a batch runs, and waits for ``opened``."""

    entered = threading.Event()
    opened = threading.Event()

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int, int]]:
        if row.v < 0:
            self.entered.set()
            assert self.opened.wait(20)
        yield from super().process(row, ctx)


class BadEnds(Count):
    """An operator whose ``close`` raises."""

    def close(self, ctx: Context) -> None:
        raise RuntimeError("close is not liked either")


class BadStart(Count):
    """An operator whose ``open`` raises."""

    def open(self, ctx: Context) -> None:
        raise RuntimeError("no such file")


class Outer:
    class Inner(Count):
        pass


not_a_class = 7
