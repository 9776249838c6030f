"""The operators of the simulated cluster, and rows for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa

from stateflow import Context, Operator, state
from stateflow.partitioner import partition_of
from stateflow.rpc.apply import BatchRows
from tests.applying import rows_of

PARTITIONS = 3
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("event_us", pa.int64()), ("processing_us", pa.int64())])
SCHEMA_BYTES = SCHEMA.serialize().to_pybytes()
#: called for every row; a thread may pause in it
step: Callable[[], None] = lambda: None  # noqa: E731


class Flow(Operator):
    """An operator with counters, a map, timers of both domains and a side output. Its rows tell the watermark that they
    see. It does not hear of watermarks, so that batches with new ones skip partitions."""

    key = "k"
    output = "k string, n long, total long, why string"
    side_outputs = {"sevens": "k string, v long"}  # noqa: RUF012
    n = state.value(int, default=0)
    total = state.value(int, default=0)
    seen = state.map(str, int)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int, int, str]]:
        step()
        self.n.value += 1
        self.total.value += row.v
        tag = f"t{row.v % 5}"
        self.seen[tag] = self.seen.get(tag, 0) + row.v
        if row.v % 3 == 0:
            ctx.set_timer(row.event_us, name=tag)
        if row.v % 3 == 1:
            ctx.set_timer(row.processing_us, name=tag, domain="processing")
        if row.v % 7 == 0:
            ctx.emit("sevens", (row.k, row.v))
        yield row.k, self.n.value, self.total.value, f"row {ctx.watermark}"

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[str, int, int, str]]:
        self.n.value += 100
        yield timer.key, self.n.value, self.total.value, f"{timer.domain} {timer.name} {timer.at.timestamp():.6f}"


class Hearing(Flow):
    """A :class:`Flow` that also emits at every watermark."""

    def on_watermark(self, watermark: Any, ctx: Context) -> Iterator[tuple[str, int, int, str]]:
        yield "", int(watermark.timestamp()), 0, "watermark"


@cache
def messages() -> dict[int, list[bytes]]:
    """Returns partition → forty encoded Arrow messages with one to three rows each, the same in every run."""
    random = Random(7)
    keys: dict[int, list[str]] = {partition: [] for partition in range(PARTITIONS)}
    for number in range(60):
        keys[partition_of((f"k{number}",), PARTITIONS)].append(f"k{number}")
    found: dict[int, list[bytes]] = {}
    for partition, of_it in keys.items():
        found[partition] = []
        for _ in range(40):
            rows = [
                {
                    "k": random.choice(of_it[:4]),
                    "v": random.randrange(1000),
                    "event_us": random.randrange(20_000_000),
                    "processing_us": random.randrange(1_000_000_000, 1_030_000_000),
                }
                for _ in range(random.randint(1, 3))
            ]
            found[partition].append(pa.RecordBatch.from_pylist(rows, schema=SCHEMA).serialize().to_pybytes())
    return found


def sorted_rows(rows: Mapping[int, bytes]) -> BatchRows:
    """Combines the messages of some partitions into one batch. ``b""``: no rows for the partition."""
    read = {p: pa.ipc.read_record_batch(message, SCHEMA) if message else None for p, message in rows.items()}
    return rows_of(read, SCHEMA_BYTES)
