"""Runs contestants of T1, T1-small and T4 in one Spark session: ``python -m benchmarks.spark_worker JOBS-AS-JSON``.

For T1, ``{"runs": {keys: {"rows_per_s", "warm_up_s"}}, "correctness", "spark_settings"}`` is written to the result file
of each job.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupStateTimeout

from benchmarks.operators import CountSum, CountSumColumns
from benchmarks.spark import APPLY_PANDAS, COLUMNS, NATIVE, OURS, TRANSFORM, TRANSFORM_PANDAS, TRIVIAL, Job, Timed
from stateflow import Operator
from stateflow.spark.session import quick_settings

INPUT = "k long, v double"
OUTPUT = "k long, n long, total double"
_STORE = "spark.sql.streaming.stateStore"
SETTINGS = {
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",  # of a query; all micro-batches of a run are wanted
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    # Spark's documentation recommends both for throughput: each commit uploads changes instead of whole snapshots, and
    # keys are not looked up only to count them.
    f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STORE}.rocksdb.trackTotalNumberOfRows": "false",
    # All contestants get the settings that stateflow's documentation recommends. The native aggregation gains from the
    # setting of the log. Contestants in Python gain from all settings but that of planning, because Spark plans a
    # stateful query only once anyway.
    **quick_settings("local[2]"),
}


class CountSumProcessor(StatefulProcessor):
    """Counts and sums values by transformWithState.

    Both figures are in one state, so that a key costs one read and one write in a batch.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._figures = handle.getValueState("figures", "n long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        n, total = self._figures.get() or (0, 0.0)
        for row in rows:
            n += 1
            total += row.v
        self._figures.update((n, total))
        yield Row(k=key[0], n=n, total=total)

    def close(self) -> None:
        pass


class Contestant:
    """A contestant, which applies its operation to a stream, and reads its final state."""

    output_mode = "update"
    rows_out_per_row_in = False

    def __init__(self, spark: SparkSession, partitions: int) -> None:
        self.spark = spark
        self.partitions = partitions  # of stateflow's operators

    def apply(self, stream: DataFrame) -> DataFrame:
        raise NotImplementedError

    def state(self, checkpoint: Path) -> DataFrame | None:
        """Returns the final state as columns k, n and total; None: the contestant keeps no state."""
        raise NotImplementedError

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Provides empty state for one query while the block runs."""
        yield


class TransformWithState(Contestant):
    def apply(self, stream: DataFrame) -> DataFrame:
        return stream.groupBy("k").transformWithState(
            statefulProcessor=CountSumProcessor(),
            outputStructType=OUTPUT,
            outputMode="Update",
            timeMode="None",
        )

    def state(self, checkpoint: Path) -> DataFrame:
        stored = self.spark.read.format("statestore").option("stateVarName", "figures").load(str(checkpoint))
        return stored.select("key.k", "value.n", "value.total")


class Native(Contestant):
    def apply(self, stream: DataFrame) -> DataFrame:
        return stream.groupBy("k").agg(sf.count("*").alias("n"), sf.sum("v").alias("total"))

    def state(self, checkpoint: Path) -> DataFrame:
        stored = self.spark.read.format("statestore").load(str(checkpoint))
        return stored.select("key.k", sf.col("value.count").alias("n"), sf.col("value.sum").alias("total"))


class InPandasProcessor(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._figures = handle.getValueState("figures", "n long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        n, total = self._figures.get() or (0, 0.0)
        for frame in rows:
            n += len(frame)
            total += float(frame["v"].sum())
        self._figures.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})

    def close(self) -> None:
        pass


class TransformWithStateInPandas(TransformWithState):
    def apply(self, stream: DataFrame) -> DataFrame:
        return stream.groupBy("k").transformWithStateInPandas(
            statefulProcessor=InPandasProcessor(), outputStructType=OUTPUT, outputMode="Update", timeMode="None"
        )


class ApplyInPandasWithState(Contestant):
    def apply(self, stream: DataFrame) -> DataFrame:
        return stream.groupBy("k").applyInPandasWithState(
            count_and_sum, OUTPUT, "n long, total double", "update", GroupStateTimeout.NoTimeout
        )

    def state(self, checkpoint: Path) -> DataFrame:
        stored = self.spark.read.format("statestore").load(str(checkpoint))
        figures = sf.col("value.groupState")
        return stored.select("key.k", figures["n"].alias("n"), figures["total"].alias("total"))


def count_and_sum(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    n, total = state.getOption or (0, 0.0)
    for frame in frames:
        n += len(frame)
        total += float(frame["v"].sum())
    state.update((n, total))
    yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})


class Ours(Contestant):
    output_mode = "append"
    rows_out_per_row_in = True
    operator: type[Operator] = CountSum

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        from stateflow.testing import LocalCluster

        with LocalCluster(self.operator, sites={"cloud": 2}, partitions=self.partitions) as cluster:
            self._address = cluster.address
            yield

    def apply(self, stream: DataFrame) -> DataFrame:
        from stateflow.spark import apply_operator

        # one task, as documented for micro-batches of this size; a file is read in one task in any case
        applied: DataFrame = apply_operator(stream, self.operator, cluster=self._address, tasks=1)
        return applied

    def state(self, checkpoint: Path) -> DataFrame:
        from stateflow.spark import read_state

        stored = read_state(self.spark, cluster=self._address, operator=self.operator.__name__, state="figures")
        n, total = sf.col("value._0").alias("n"), sf.col("value._1").alias("total")
        return stored.select(sf.col("key").alias("k"), n, total)


class OursInColumns(Ours):
    rows_out_per_row_in = False
    operator = CountSumColumns


class Trivial(Contestant):
    """The floor: sends rows to Python and back, without state."""

    output_mode = "append"

    def apply(self, stream: DataFrame) -> DataFrame:
        return stream.mapInArrow(lambda batches: batches, INPUT)

    def state(self, checkpoint: Path) -> None:
        return None


CONTESTANTS: dict[str, Callable[[SparkSession, int], Contestant]] = {
    TRANSFORM: TransformWithState,
    NATIVE: Native,
    TRANSFORM_PANDAS: TransformWithStateInPandas,
    APPLY_PANDAS: ApplyInPandasWithState,
    OURS: Ours,
    COLUMNS: OursInColumns,
    TRIVIAL: Trivial,
}


@contextlib.contextmanager
def session(local: Path) -> Iterator[SparkSession]:
    builder = SparkSession.builder.appName("T1")
    for name, value in (SETTINGS | {"spark.local.dir": str(local)}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def work(spark: SparkSession, job: Job) -> dict[str, Any]:
    contestant = CONTESTANTS[job.contestant](spark, job.partitions)
    if job.small:
        return small_run(contestant, job)
    runs, late, equal = {}, 0, True
    for query in job.timed:
        with contestant.fresh():
            progress, same = timed_run(contestant, query, Path(job.work_directory) / str(query.keys))
        seconds = [entry["durationMs"]["triggerExecution"] / 1000 for entry in progress]
        per_s = [entry["numInputRows"] / took for entry, took in zip(progress, seconds, strict=True)]
        runs[query.keys] = {"rows_per_s": per_s[query.warm_up :], "warm_up_s": seconds[: query.warm_up]}
        late += dropped(progress)
        equal &= bool(same)
    found = {"runs": runs, "spark_settings": SETTINGS}
    if job.contestant == TRIVIAL:  # the floor keeps no state
        return found
    with contestant.fresh():
        lost, duplicated, verified = verification_run(contestant, job)
    correctness = {"lost": lost, "duplicated": duplicated, "late": late, "state_equal": equal and verified}
    return found | {"correctness": correctness}


def small_run(contestant: Contestant, job: Job) -> dict[str, Any]:
    """Runs a contestant for T1-small or T4. Returns durations of micro-batches by number of rows, and correctness."""
    (query,) = job.timed
    lost = duplicated = late = None  # not known for the floor, which keeps no state
    with contestant.fresh():
        progress, equal = timed_run(contestant, query, Path(job.work_directory) / "small")
    if job.contestant != TRIVIAL:
        with contestant.fresh():
            lost, duplicated, verified = verification_run(contestant, job)
        equal, late = equal and verified, dropped(progress)
    seconds: dict[str, list[float]] = {}
    for entry in progress[query.warm_up :]:
        took = entry["durationMs"]["triggerExecution"] / 1000
        seconds.setdefault(str(entry["numInputRows"]), []).append(took)
    return {
        "seconds": seconds,
        "correctness": {"lost": lost, "duplicated": duplicated, "late": late, "state_equal": equal},
        "spark_settings": SETTINGS,
    }


def dropped(progress: list[dict[str, Any]]) -> int:
    """Returns the number of rows that Spark dropped because they were too late."""
    return sum(op.get("numRowsDroppedByWatermark", 0) for entry in progress for op in entry["stateOperators"])


def timed_run(contestant: Contestant, timed: Timed, directory: Path) -> tuple[list[dict[str, Any]], bool | None]:
    """Runs a query over the first ``timed.batches`` files.

    Returns (progress of the micro-batches in order, whether the final state is right). The latter is None if the
    contestant keeps no state.
    """
    source, checkpoint = directory / "input", directory / "checkpoint"
    source.mkdir(parents=True)
    for path in input_files(timed.input, timed.batches):
        shutil.copy2(path, source)  # keeps the modification time, by which the file source orders
    query = (
        contestant.apply(stream_of(contestant.spark, str(source)))
        .writeStream.format("noop")
        .outputMode(contestant.output_mode)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    progress = [json.loads(entry.json) for entry in query.recentProgress]
    # Spark may end with one micro-batch without rows; in a small run, some micro-batches have no rows by design.
    batches = progress[: timed.batches]
    rows = [pq.read_metadata(path).num_rows for path in input_files(str(source))]
    if [entry["numInputRows"] for entry in batches] != rows:
        raise RuntimeError(f"expected micro-batches of {rows} rows, saw {[e['numInputRows'] for e in progress]}")
    state = contestant.state(checkpoint)
    return batches, None if state is None else same_state(state, read_input(source))


def verification_run(contestant: Contestant, job: Job) -> tuple[int, int, bool]:
    """Compares every output row of a small run with the reference.

    Returns (number of lost rows, number of unexpected rows, whether everything is equal).
    """
    outputs: list[pd.DataFrame] = []

    def keep(batch: DataFrame, number: int) -> None:
        outputs.append(batch.select("k", "n", "total").toPandas().assign(batch=number))

    query = (
        contestant.apply(stream_of(contestant.spark, job.verify_input))
        .writeStream.foreachBatch(keep)
        .outputMode(contestant.output_mode)
        .option("checkpointLocation", str(Path(job.work_directory) / "verify"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    frames = [read_input(path) for path in input_files(job.verify_input)]
    rows = pd.concat([frame.assign(batch=number) for number, frame in enumerate(frames)], ignore_index=True)
    return compare_outputs(pd.concat(outputs), rows, per_row=contestant.rows_out_per_row_in)


def compare_outputs(came: pd.DataFrame, rows: pd.DataFrame, *, per_row: bool) -> tuple[int, int, bool]:
    """Compares output rows with those that input rows must give.

    Returns (number of lost rows, number of unexpected rows, whether everything is equal). Outputs of a key are
    identified by their count. After a shuffle, the rows of a key in one batch may be processed in any order, so a sum
    is certain only for the last output of a key in a batch; only such sums are compared.

    Args:
        per_row: True: there is an output for each input row; False: for each key in a batch.
    """
    rows = rows.assign(n=rows.groupby("k").cumcount() + 1, total=rows.groupby("k")["v"].cumsum())
    ends = rows.drop_duplicates(["batch", "k"], keep="last")
    wanted = rows if per_row else ends
    identity = ["batch", "k", "n"]
    pairs = wanted[identity].merge(came[identity].drop_duplicates(), how="outer", on=identity, indicator=True)
    lost = int((pairs["_merge"] == "left_only").sum())
    stray = int((pairs["_merge"] == "right_only").sum())
    copies = int(came.duplicated(identity).sum())
    totals = ends.merge(came, on=identity, suffixes=("", "_came"))
    equal = len(totals) == len(ends) and bool((totals["total"] == totals["total_came"]).all())
    return lost, stray + copies, equal and not (lost or stray or copies)


def same_state(state: DataFrame, rows: pd.DataFrame) -> bool:
    wanted = rows.groupby("k")["v"].agg(n="count", total="sum").reset_index()
    came = state.toPandas().sort_values("k", ignore_index=True)[["k", "n", "total"]]
    return len(came) == len(wanted) and bool((came == wanted).all(axis=None))


def stream_of(spark: SparkSession, directory: str) -> DataFrame:
    return spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).parquet(directory)


def input_files(directory: str, count: int | None = None) -> list[Path]:
    return sorted(Path(directory).glob("*.parquet"))[:count]


def read_input(path: str | Path, count: int | None = None) -> pd.DataFrame:
    """Returns the rows of one file, or of the first ``count`` files of a directory, in order."""
    files = input_files(str(path), count) if Path(path).is_dir() else [Path(path)]
    rows: pd.DataFrame = pd.concat([pq.read_table(file).to_pandas() for file in files], ignore_index=True)
    return rows


def main() -> None:
    # The exception leaves the context managers, which stop the replicas and the session.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    jobs = [
        Job(**fields | {"timed": [Timed(**query) for query in fields["timed"]]}) for fields in json.loads(sys.argv[1])
    ]
    with session(Path(jobs[0].work_directory) / "local") as spark:
        for job in jobs:
            Path(job.result).write_text(json.dumps(work(spark, job)))


if __name__ == "__main__":
    main()
