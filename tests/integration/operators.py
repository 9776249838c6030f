"""Operators that the replicas of the integration tests load."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from stateflow import Context, Operator, TumblingWindows, state
from stateflow.errors import StateDamaged

RAISES, UNENCODABLE, WRONG_OUTPUT, EXITS = -1, -2, -3, -4


class Tally(Operator):
    """Keeps count and sum per key, a sum per tag, and the set of tags. Some values of ``v`` make it misbehave."""

    key = "k"
    output = "k string, n long, total long"
    n = state.value(int, default=0)
    total = state.value(int, default=0)
    by_tag = state.map(str, int)
    tags = state.set(str)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.value += 1
        self.total.value += row.v
        tag = f"t{row.v % 5}"
        self.by_tag[tag] = self.by_tag.get(tag, 0) + row.v
        self.tags.add(tag)
        match row.v:
            case -1:
                raise ValueError("minus one\nis not liked")
            case -2:
                self.total.value = "many"  # type: ignore[assignment]
            case -3:
                yield row.k, "three", 0
            case -4:
                raise SystemExit(4)
            case _:
                yield row.k, self.n.value, self.total.value


class Sorting(Operator):
    """Yields even values, never null, and emits odd ones to a side output."""

    key = "k"
    output = "k string not null, v long NOT NULL"
    side_outputs = {"odd": "v long not null"}  # noqa: RUF012
    n = state.counter()

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.add(1)
        if row.v % 2:
            ctx.emit("odd", (row.v,))
        else:
            yield row.k, row.v


class Alarmed(Operator):
    """Counts alarms by kind; refuses a row below 0."""

    key = "k"
    output = "k string"
    n = state.value(int, default=0)

    def open(self, ctx: Context) -> None:
        self.alarms = ctx.metrics.counter("alarms", "that were raised", ["kind"])
        self.values = ctx.metrics.histogram("value", "of rows", buckets=[10, 100])

    def process(self, row: Any, ctx: Context) -> list[tuple[str]]:
        self.n.value += 1
        self.alarms.labels(kind="even" if row.v % 2 == 0 else "odd").inc()
        self.values.observe(row.v)
        ctx.metrics.gauge("newest").set(row.v)
        if row.v < 0:
            ctx.logger.warning("it is below 0")
            raise ValueError("below 0")
        return [(row.k,)]


class Prints(Operator):
    """Prints a thousand letters for each row."""

    key = "k"
    output = "k string"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> list[tuple[str]]:
        print("x" * 1000)
        return [(row.k,)]


class Works(Operator):
    """Counts rows by key, and takes some processor time for each: the sum of ``loops`` numbers."""

    key = "k"
    output = "k string, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> list[tuple[str, int]]:
        sum(range(row.loops))
        self.n.value += 1
        return [(row.k, self.n.value)]


class Blob(Operator):
    """Keeps a value of the given size; a negative size makes one that cannot be compressed."""

    key = "k"
    output = "k string, size long"
    blob = state.value(bytes, default=b"")

    def process(self, row: Any, ctx: Context) -> list[tuple[str, int]]:
        self.blob.value = b"x" * row.size if row.size >= 0 else Random(0).randbytes(-row.size)
        return [(row.k, row.size)]


class Reading(Operator):
    """Counts rows by a key of type double."""

    key = "k"
    output = "k double, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> list[tuple[float, int]]:
        self.n.value += 1
        return [(row.k, self.n.value)]


COUNT = state.counter(name="count")


class Minutes(Operator):
    """Counts rows per key and minute."""

    key = "k"
    event_time = "at"
    output = "k string, minute timestamp, n long"
    side_outputs = {"late": "k string"}  # noqa: RUF012
    minutes = TumblingWindows(timedelta(minutes=1))

    def process(self, row: Any, ctx: Context) -> None:
        if self.minutes.is_late(ctx):
            ctx.emit("late", (row.k,))
        for window in self.minutes.of(ctx):
            window.state(COUNT).add()

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for window in self.minutes.ended(timer, ctx):
            yield ctx.key, window.start, window.state(COUNT).value


class Own(BaseException):
    """A BaseException that is not an Exception."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise Own

    __repr__ = __str__


class Endless(Exception):
    def __str__(self) -> str:  # noqa: PLE0307
        while True:
            pass


class Rogue(Operator):
    """Misbehaves as its row says."""

    key = "k"
    output = "k string, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.value += 1
        yield row.k, self.n.value
        self.do(row.do)

    def do(self, what: str) -> None:
        match what:
            case "cancelled":
                raise asyncio.CancelledError
            case "generator":
                raise GeneratorExit
            case "keyboard":
                raise KeyboardInterrupt
            case "own":
                raise Own("mine")
            case "stop":
                raise StopIteration
            case "unspeakable":
                raise Unspeakable
            case "endless":
                raise Endless
            case "long":
                raise ValueError("x" * 20_000_000)
            case "deep":
                self.do("deep")
            case "memory":
                raise MemoryError
            case "hungry":
                held = []
                while True:
                    held.append(bytes(160 << 20))
            case "exit":
                sys.exit(3)
            case "spin":
                while True:
                    pass
            case _ if what.startswith("deaf "):
                until = what.removeprefix("deaf ")
                while not os.path.exists(until):  # noqa: PTH110 - as few frames as can be
                    try:
                        while not os.path.exists(until):  # noqa: PTH110
                            pass
                    except BaseException:  # noqa: BLE001 - deafness is its purpose
                        pass
            case _ if what.startswith("waits "):
                with open(what.removeprefix("waits "), "rb") as pipe:  # noqa: PTH123 - waits for a writer
                    pipe.read()
            case "state":
                while True:
                    self.n.value += 1
            case "fork":
                os.fork()
            case "die":
                os._exit(3)
            case _ if what.startswith("/") and not Path(what).exists():
                Path(what).touch()
                time.sleep(3600)
            case _ if what.startswith("sleep"):
                time.sleep(float(what[5:]))


class Unclosable(Rogue):
    def close(self, ctx: Context) -> None:
        time.sleep(3600)


class Unopenable(Rogue):
    def open(self, ctx: Context) -> None:
        while True:
            pass


class Corrupting(Operator):
    """Corrupts all ``LocalPartition`` objects of its process, as only a bug would."""

    key = "k"
    output = "k string, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.value += 1
        from stateflow.partition.local_partition import LocalPartition  # earlier releases load this module without it

        for local in [found for found in gc.get_objects() if type(found) is LocalPartition] if row.what else []:
            match row.what:
                case "epoch":
                    local.lifecycle.epoch += 1
                case "directory":
                    local.directory = None
                case "lost":
                    local.lost = StateDamaged("it was")
        yield row.k, self.n.value
