"""Runs an operator with more state than memory: ``python -m benchmarks.state_large DIRECTORY GIGABYTES SEED``.

The program fills the state, then reads and changes random keys, and then checks a sample of the keys. It prints one
JSON object.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.came import Came
from stateflow import Operator, state
from stateflow.operator.operator import describe
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Part
from stateflow.partitioner import partition_of
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo

PARTITIONS = 16
VALUE_BYTES = 4_000
BATCH_ROWS = 2_000
RANDOM_ROWS = 100_000
SETTINGS = ReplicaSettings(
    cache_bytes=128 << 20, block_cache_bytes=192 << 20, write_buffer_bytes=64 << 20, checkpoint_interval_s=0
)


class Archive(Operator):
    """Keeps a blob and the number of its changes for every key. Each row checks the blob and replaces it."""

    key = "k"
    output = "k long, changes long"

    blob = state.value(bytes)
    changes = state.counter()

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int]]:
        blob = self.blob.value or b""
        # incompressible, and determined by key and change
        self.changes.value += 1
        self.blob.value = content(row.k, self.changes.value)
        if self.changes.value > 1 and blob != content(row.k, self.changes.value - 1):
            raise AssertionError(f"key {row.k} lost a change")
        yield row.k, self.changes.value


def content(key: int, change: int) -> bytes:
    return random.Random(key * 1_000 + change).randbytes(VALUE_BYTES)


def by_partition(keys: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for key in keys:
        found.setdefault(partition_of(key, PARTITIONS), []).append(key)
    return found


def main() -> None:
    directory, size_gb, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    keys = int(size_gb * 1e9 / VALUE_BYTES)
    node = ReplicaNode(ReplicaInfo("large", "here", "none"), directory / "data", SETTINGS)
    node.create(describe(Archive, PARTITIONS), range(PARTITIONS), 1)
    numbers = [0] * PARTITIONS
    schema = pa.schema([("k", pa.int64())])
    encoded = schema.serialize().to_pybytes()

    def send(partition: int, rows: list[int]) -> None:
        batch = pa.record_batch({"k": rows}, schema=schema)
        came = Came()
        part = Part(partition, 1, 0, len(rows))
        node.batches.apply(BatchSlices("Archive", Batch("s", numbers[partition]), encoded, batch, [part]), came)
        came.applied()
        numbers[partition] += 1

    began = time.perf_counter()
    waiting: list[list[int]] = [[] for _ in range(PARTITIONS)]
    for key in range(keys):
        mine = waiting[partition := partition_of(key, PARTITIONS)]
        mine.append(key)
        if len(mine) == BATCH_ROWS:
            send(partition, mine)
            waiting[partition] = []
    for partition, mine in enumerate(waiting):
        send(partition, mine)
    filled_s = time.perf_counter() - began
    chosen = random.Random(seed)
    began = time.perf_counter()
    changed: dict[int, int] = {}
    for _ in range(RANDOM_ROWS // BATCH_ROWS):
        rows = [chosen.randrange(keys) for _ in range(BATCH_ROWS)]
        for key in rows:
            changed[key] = changed.get(key, 1) + 1
        for partition, mine in by_partition(rows).items():
            send(partition, mine)
    changed_s = time.perf_counter() - began
    sample = [*list(changed)[:500], *(chosen.randrange(keys) for _ in range(500))]
    counts: dict[int, int] = {}
    for partition in by_partition(sample):
        counts.update((key, value) for key, _, value in node.reader.scan(PartitionId("Archive", partition), "changes"))
    equal = len(counts) == keys and all(counts[key] == changed.get(key, 1) for key in sample)
    stored = sum(file.stat().st_size for file in (directory / "data").rglob("*") if file.is_file())
    node.close()
    print(
        json.dumps(
            {
                "keys": keys,
                "stored_gb": stored / 1e9,
                "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
                "filled_rows_per_s": keys / filled_s,
                "random_rows_per_s": RANDOM_ROWS / changed_s,
                "equal": equal,
            }
        )
    )


if __name__ == "__main__":
    main()
