"""Runs Quix Streams as a contestant of T2: ``.venv/quix/bin/python -m benchmarks.direct_quix JOB``.

State is used as in a Quix application: each batch is a transaction over a RocksDB partition. There is no Kafka, and no
changelog topic, which would make the state durable. Quix needs another version of pydantic than stateflow, so it has an
environment of its own: ``make .venv/.quix``.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.direct_common import QUIX, Columns, Outcome, main


def quix(batches: Columns, warm_up: int, directory: Path, keep: bool) -> Outcome:
    from quixstreams.state.rocksdb import RocksDBStorePartition

    directory.parent.mkdir(parents=True, exist_ok=True)
    partition = RocksDBStorePartition(str(directory))
    rows = [[(str(key).encode(), key, value) for key, value in zip(k.tolist(), v.tolist())] for k, v in batches]  # noqa: B905
    outcome = Outcome(state={})
    for number, batch in enumerate(rows):
        if number == warm_up:
            outcome.began_s = time.perf_counter()
        transaction = partition.begin()
        outputs = []
        for prefix, key, value in batch:
            state = transaction.as_state(prefix=prefix)
            n, total = state.get("figures", (0, 0.0))
            state.set("figures", (n + 1, total + value))
            outputs.append((key, n + 1, total + value))
        transaction.prepare()
        transaction.flush()
        if keep:
            outcome.outputs += outputs
    outcome.ended_s = time.perf_counter()
    reading = partition.begin()
    for prefix, key in {(prefix, key) for batch in rows for prefix, key, _ in batch}:
        n, total = reading.as_state(prefix=prefix).get("figures")
        assert outcome.state is not None
        outcome.state[key] = n, total
    partition.close()
    return outcome


if __name__ == "__main__":
    main({QUIX: quix})
