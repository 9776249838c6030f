"""Operators of the Spark tests. Replicas import this module by name."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from stateflow import Context, Operator, state

#: ``v`` of a row that makes Tally.process raise
POISON = -1_003
#: ``v`` of a row that makes Tally.process yield what its schema does not allow
MISFIT = -1_004
#: ``v`` of a row that gives no output
SILENT = -1_005
#: ``v`` of a row that Laggard dwells on
LAGS = -1_006
DWELLS_S = 3.0
PATIENCE_S = 120.0
#: rows that a partition of Gated processes before it may wait
GATED_AT = 4_000


class Tally(Operator):
    """Counts and sums per key, with a value, a map and a set; one output row for every input row."""

    key = "k"
    output = "seq long, k string, n long, total long"

    n = state.value(int, default=0)
    total = state.value(int, default=0)
    by_kind = state.map(str, int)
    kinds = state.set(str)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        self.total.value += row.v
        self.by_kind[row.kind] = self.by_kind.get(row.kind, 0) + row.v
        self.kinds.add(row.kind)
        if row.v == POISON:
            raise ValueError(f"poison in row {row.seq}")
        if row.v == MISFIT:
            yield row.seq, row.k, "not a number", 0
        elif row.v != SILENT:
            yield row.seq, row.k, self.n.value, self.total.value


class Peak(Operator):
    """Runs behind Tally: counts how often a key's total rose above all before."""

    key = "k"
    output = "seq long, k string, peaks long, highest long"

    peaks = state.value(int, default=0)
    highest = state.value(int)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        if self.highest.value is None or row.total > self.highest.value:
            self.highest.value = row.total
            self.peaks.value += 1
        yield row.seq, row.k, self.peaks.value, self.highest.value


class ByKey(Operator):
    """Counts rows of a key of any type."""

    key = "k"
    output = "n long"

    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[int]]:
        self.n.value += 1
        yield (self.n.value,)


class ByPair(Operator):
    """Counts rows of a key of two columns."""

    key = ("a", "b")
    output = "a string, b long, n long"

    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int, int]]:
        self.n.value += 1
        yield row.a, row.b, self.n.value


class Large(Operator):
    """Writes ``size`` entries of the key's map and set for one row."""

    key = "k"
    output = "k string"

    last = state.value(str, default="")
    entries = state.map(int, str)
    members = state.set(int)

    def process(self, row: Any, ctx: Context) -> None:
        self.last.value = row.k
        for number in range(row.size):
            self.entries[number] = f"{row.k}-{number}"
        self.members.update(range(row.size))


class Flaky(Operator):
    """Tally's counts, but some rows fail the first time they come.

    ``row.seed`` decides which rows; ``row.marks`` is the directory where each failure is noted.
    """

    key = "k"
    output = "seq long, k string, n long, total long"

    n = state.value(int, default=0)
    total = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        self.total.value += row.v
        mark = Path(row.marks) / f"{row.batch}-{ctx.partition}"  # once per batch and partition: Spark has few attempts
        if fails(row.seed, row.seq) and not mark.exists():
            mark.touch()
            raise RuntimeError(f"row {row.seq} fails the first time")
        yield row.seq, row.k, self.n.value, self.total.value


def fails(seed: int, seq: int) -> bool:
    return random.Random(seed * 1_000_003 + seq).random() < 0.1


class Laggard(Operator):
    """Tally's counts, but rows with ``v`` LAGS wait until the file ``row.pad`` exists."""

    key = "k"
    output = "seq long, k string, n long, total long"

    n = state.value(int, default=0)
    total = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        self.total.value += row.v
        if row.v == LAGS:
            dwell(Path(row.pad))
        yield row.seq, row.k, self.n.value, self.total.value


class Gated(Tally):
    """Tally with a gate: behind GATED_AT rows, a partition waits at each row while its file exists.

    The file has the partition's number as name and is in the directory ``row.gate``.
    """

    passed = 0

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.passed += 1
        if self.passed > GATED_AT and (closed := Path(row.gate) / str(ctx.partition)).exists():
            closed.with_suffix(".reached").touch()
            deadline = time.monotonic() + PATIENCE_S
            while closed.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{closed} is not opened")
                time.sleep(0.01)
        yield from super().process(row, ctx)


def dwell(until: Path) -> None:
    """Waits for a file, then DWELLS_S more, so that an attempt that starts at that moment is under way.

    Raises TimeoutError.
    """
    until.with_suffix(".lagging").touch()
    wait_for(until)
    time.sleep(DWELLS_S)


def wait_for(file: Path) -> None:
    """Waits for a file. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {file.name}")
        time.sleep(0.05)


@dataclass
class Stop:
    name: str
    at: datetime | None = None


class Typed(Operator):
    """States of many types, under a key of two columns."""

    key = ("k", "n")
    output = "k string"

    stop = state.value(Stop)
    pair = state.value(tuple[str, int])
    names = state.value(dict[int, str])
    anything = state.value(Any)
    ids = state.map(str, UUID)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.stop.value = Stop(row.k)
        self.pair.value = row.k, row.n
        self.names.value = {row.n: row.k}
        self.anything.value = row.n if row.n % 2 else row.k
        self.ids["one"] = UUID(int=row.n)
        yield (row.k,)
