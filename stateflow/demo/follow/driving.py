"""Work that goes on while the convoys drive, each in a thread of its own: telemetry is written, and gateways send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from stateflow.clock import Clock
from stateflow.demo.follow.fleet import COLUMNS, Told
from stateflow.demo.follow.result import Sample
from stateflow.runtime.ddl import parse_ddl

SCHEMA: pa.Schema = parse_ddl(COLUMNS)


class Sends(Protocol):
    def send(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]: ...


class Beside:
    """Threads that end by themselves, or when the block is left."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - go_on raises it
            self._errors.append(error)

    def go_on(self) -> bool:
        """Tells whether any thread still runs. Raises the first error of a thread."""
        if self._errors:
            raise self._errors[0]
        return any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()


def in_time(told: Iterable[Told], began: float, over: threading.Event, clock: Clock) -> Iterator[Told]:
    """Yields each item at its moment, or at once where that has passed. ``began``: monotonic time of the drive's
    start."""
    for each in told:
        if over.wait(max(0.0, began + each.at_s - clock.monotonic())):
            return
        yield each


def write_telemetry(directory: Path, number: int, told: Told) -> None:
    """Writes one file, which is there as a whole or not at all."""
    hidden = directory / f".{number:06}.parquet"
    pq.write_table(pa.Table.from_pylist(told.rows, schema=SCHEMA), hidden)
    hidden.rename(directory / f"{number:06}.parquet")


class Gateways:
    """Gateways that send readings. ``streams``: by site and convoy. ``samples``: what each batch took, from when it was
    sent until its outputs were there. ``outputs``: outputs of all gateways."""

    def __init__(self, streams: Mapping[tuple[str, int], Sends], clock: Clock) -> None:
        self._streams, self._clock = streams, clock
        self.samples: list[Sample] = []
        self.outputs: list[dict[str, Any]] = []

    def serve(self, convoy: int, readings: Iterable[Told], began: float, over: threading.Event) -> None:
        """Sends the readings of one convoy, one after another, each through the gateway that is near the convoy."""
        for told in in_time(readings, began, over, self._clock):
            sent_at = self._clock.monotonic()
            outputs = self._streams[told.site, convoy].send(told.rows)
            took_ms = (self._clock.monotonic() - sent_at) * 1e3
            self.samples.append(Sample(sent_at - began, took_ms, convoy, told.site, len(told.rows)))
            self.outputs += outputs
