"""Runs one contestant of T2 in this process: ``python -m benchmarks.direct_worker JOB``.

The job and the result are JSON objects.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.came import Came
from benchmarks.direct_common import (
    BYTEWAX,
    COLUMNS,
    PLAIN,
    RECOVERY,
    RECOVERY_1S,
    ROWS,
    Columns,
    Contest,
    Outcome,
    State,
    main,
)
from benchmarks.operators import CountSum, CountSumColumns
from stateflow import Operator
from stateflow.operator.arrow import BatchReader, read_schema
from stateflow.operator.operator import describe, output_schema
from stateflow.operator.output import OutputReader
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Part
from stateflow.partitioner import partition_of
from stateflow.replica.executor import Garbage
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo

PARTITIONS = 8
SOURCE_BATCH = 1_000


# -- contestants --------------------------------------------------------------------------------------------


def plain(batches: Columns, warm_up: int, _: Path, keep: bool) -> Outcome:
    state: State = {}
    outcome = Outcome(state=state)
    tuples = [list(zip(k.tolist(), v.tolist(), strict=True)) for k, v in batches]
    for number, rows in enumerate(tuples):
        if number == warm_up:
            outcome.began_s = time.perf_counter()
        outputs = []
        for k, v in rows:
            n, total = state.get(k, (0, 0.0))
            state[k] = n, total = n + 1, total + v
            outputs.append((k, n, total))
        if keep:
            outcome.outputs += outputs
    outcome.ended_s = time.perf_counter()
    return outcome


def replica(operator: type[Operator]) -> Contest:
    """Returns a contest of a replica in this process, without sockets.

    The rows of a batch are one Arrow message, ordered by partition.
    """

    def contest(batches: Columns, warm_up: int, directory: Path, keep: bool) -> Outcome:
        name = operator.__name__
        node = ReplicaNode(ReplicaInfo("r", "here", "none"), directory, ReplicaSettings(checkpoint_interval_s=0))
        node.create(describe(operator, PARTITIONS), range(PARTITIONS), 1)
        messages = [_messages(k, v) for k, v in batches]
        outcome = Outcome(state={})
        outputs: list[bytes] = []
        garbage = Garbage(lambda: node.cache.objects)
        for number, (schema, message, parts) in enumerate(messages):
            if number == warm_up:
                outcome.began_s = time.perf_counter()
            came = Came()
            rows = BatchReader(read_schema(schema)).read(message)
            node.batches.apply(BatchSlices(name, Batch("s", number), schema, rows, parts), came)
            outputs += [applied.output for applied in came.applied() if keep]
            if garbage.is_due():  # as a replica process does
                garbage.collect()
        outcome.ended_s = time.perf_counter()
        rows, _ = OutputReader(output_schema(operator), {}).rows(outputs)
        outcome.outputs = [(row["k"], row["n"], row["total"]) for row in rows]
        outcome.state = {
            key: tuple(value)
            for partition in range(PARTITIONS)
            for key, _, value in node.reader.scan(PartitionId(name, partition), "figures")
        }
        node.close()
        return outcome

    return contest


def _messages(k: Any, v: Any) -> tuple[bytes, bytes, list[Part]]:
    """Returns (schema, rows ordered by partition, range of each partition's rows) for one batch."""
    kinds, places = np.unique(k, return_inverse=True)
    partition = np.array([partition_of(key, PARTITIONS) for key in kinds.tolist()])[places]
    order = np.argsort(partition, kind="stable")
    whole = pa.record_batch({"k": k[order], "v": v[order]})
    stops = np.cumsum(np.bincount(partition, minlength=PARTITIONS)).tolist()
    parts = [Part(p, 1, start, stop) for p, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))]
    return whole.schema.serialize().to_pybytes(), whole.serialize().to_pybytes(), parts


def bytewax(epoch_s: float | None) -> Contest:
    """Returns a contest of a Bytewax dataflow. ``epoch_s`` are the seconds between snapshots; None: no recovery."""

    def contest(batches: Columns, warm_up: int, directory: Path, keep: bool) -> Outcome:
        import bytewax.operators as op
        from bytewax.dataflow import Dataflow
        from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
        from bytewax.outputs import DynamicSink, StatelessSinkPartition
        from bytewax.recovery import RecoveryConfig, init_db_dir
        from bytewax.testing import cluster_main

        items = [item for k, v in batches for item in zip(map(str, k.tolist()), v.tolist(), strict=True)]
        warm_rows = sum(len(k) for k, _ in batches[:warm_up])
        outcome = Outcome()
        sinks: list[Kept] = []

        class Rows(StatefulSourcePartition):  # type: ignore[type-arg]
            def __init__(self) -> None:
                self.at = 0

            def next_batch(self) -> Any:
                if self.at >= len(items):
                    raise StopIteration
                start, self.at = self.at, self.at + SOURCE_BATCH
                return items[start : self.at]

            def snapshot(self) -> int:
                return self.at

        class Source(FixedPartitionedSource):  # type: ignore[type-arg]
            def list_parts(self) -> list[str]:
                return ["one"]

            def build_part(self, step_id: str, for_part: str, resume_state: Any) -> Rows:
                return Rows()

        class Kept(StatelessSinkPartition):  # type: ignore[type-arg]
            seen = 0

            def write_batch(self, values: list[Any]) -> None:
                self.seen += len(values)
                if not outcome.began_s and self.seen >= warm_rows:
                    outcome.began_s = time.perf_counter()
                if keep:
                    outcome.outputs.extend((int(key), n, total) for key, (n, total) in values)

        class Sink(DynamicSink):  # type: ignore[type-arg]
            def build(self, step_id: str, worker_index: int, worker_count: int) -> Kept:
                sinks.append(Kept())
                return sinks[-1]

        def add(state: Any, value: float) -> Any:
            n, total = state or (0, 0.0)
            state = n + 1, total + value
            return state, state

        flow = Dataflow("t2")
        op.output("out", op.stateful_map("sum", op.input("in", flow, Source()), add), Sink())
        settings: dict[str, Any] = {}
        if epoch_s is not None:
            directory.mkdir()
            init_db_dir(directory, 1)
            settings = {
                "recovery_config": RecoveryConfig(directory),
                "epoch_interval": timedelta(seconds=epoch_s),
            }
        cluster_main(flow, [], 0, worker_count_per_proc=1, **settings)
        outcome.ended_s = time.perf_counter()
        outcome.rows = sum(sink.seen for sink in sinks)
        return outcome

    return contest


CONTEST: dict[str, Contest] = {
    PLAIN: plain,
    ROWS: replica(CountSum),
    COLUMNS: replica(CountSumColumns),
    BYTEWAX: bytewax(None),
    RECOVERY: bytewax(10.0),
    RECOVERY_1S: bytewax(1.0),
}

if __name__ == "__main__":
    main(CONTEST)
