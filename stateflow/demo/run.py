"""Runs the demonstration: streams real flights through Spark and five real processes, moves partitions and kills a
replica while the stream runs, and then compares every row of state and output with an independent computation.

Limits keep the demonstration short on any machine. A slow machine streams fewer flights (:class:`Stretch`). A machine
whose pauses vary widely cannot promise the usual budget (:class:`Budget`). On such a machine a move is refused before
its partition stops, so the refusal only costs time.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stateflow.client import Cluster, MoveReport, Reconfiguration
from stateflow.clock import SYSTEM_CLOCK
from stateflow.demo.flights import Replay, bounds, load_flights, replay
from stateflow.demo.operators import DelayByAircraft
from stateflow.demo.report import write_report
from stateflow.demo.result import (
    UNKNOWN,
    BatchRow,
    DemoResult,
    Expected,
    FinalState,
    Incident,
    RequestSample,
    compare_outputs,
    compare_state,
    expected,
    human_bytes,
    percentile,
)
from stateflow.demo.surroundings import ProgressPrinter, console_of, fresh, live_page, move_row, versions
from stateflow.errors import BudgetUnreachable, StateflowError
from stateflow.spark import apply_operator, local_session
from stateflow.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


# -- Limits of the stream and of pauses ------------------------------------------------------------------------------

#: seconds from the start of the demonstration to the end of the stream; comparing and drawing follow
STREAM_UNTIL_S = 75.0
#: minimum seconds of streaming, however long the processes took to start
STREAM_LEAST_S = 20.0
#: number of slices that are available before they are read; so the stream never waits, and little is left at the end
AHEAD = 4
BUDGET_MS = 250.0
#: factor by which a new budget exceeds the need of the refused moves, because the next move may need more
ROOM = 1.5
BUDGET_STEP_MS = 50.0
#: largest budget; if a larger one is needed, any pause is allowed
BUDGET_MS_MAX = 3_000.0
#: seconds for which a move waits until its pause is predicted within the budget: at first, and after a refused move
PATIENCE_S, PATIENCE_THEN_S = 3.0, 1.0


@dataclass(slots=True)
class Stretch:
    """Decides how much of the stream is fed, so that the stream ends in time. Times are monotonic seconds.

    Attributes:
        slices: number of all slices.
        until_s: time at which the stream is closed.
        began_s: time at which the first slice had been processed; None: no slice yet, so nothing can be moved.
    """

    slices: int
    until_s: float
    began_s: float | None = None
    allowed: int = 0  # number of slices that were made available
    closed: bool = False  # no more slices are made available

    def look(self, done: int, now_s: float) -> None:
        """Allows more slices, or closes the stream. ``done`` is the number of slices that have been processed."""
        if done and self.began_s is None:
            self.began_s, self.until_s = now_s, max(self.until_s, now_s + STREAM_LEAST_S)
        self.closed = self.closed or (self.began_s is not None and now_s >= self.until_s)
        if not self.closed:
            self.allowed = max(self.allowed, min(self.slices, done + AHEAD))

    def is_over(self, done: int) -> bool:
        """Tells whether all slices were processed, or all allowed slices of a closed stream."""
        return done >= self.slices or (self.closed and done >= self.allowed)

    def share(self, done: int, now_s: float) -> float:
        """Returns the progress of the stream, from 0 on; 1 is the end.

        The progress is the share of processed slices or the share of used time, whichever is greater.
        """
        if self.began_s is None:
            return 0.0
        return max(done / self.slices, (now_s - self.began_s) / (self.until_s - self.began_s))


def stretch_of(slices: int, demo_began_s: float, *, whole: bool = False) -> Stretch:
    """Returns the stream of a demonstration.

    Args:
        demo_began_s: start of the demonstration.
        whole: stream all slices, no matter how long that takes.
    """
    return Stretch(slices, math.inf if whole else demo_began_s + STREAM_UNTIL_S)


@dataclass(slots=True)
class Budget:
    """The budget of each move's pause, which grows if this machine cannot keep it.

    Attributes:
        ms: budget in milliseconds; None: any pause is allowed.
        asked: the user has set the budget, so it does not change.
        patience_s: seconds for which a move waits until its pause is predicted within the budget.
    """

    ms: float | None = BUDGET_MS
    asked: bool = False
    patience_s: float = PATIENCE_S
    former: list[float] = field(default_factory=list)  # budgets that were refused

    def __str__(self) -> str:
        """Returns the budgets used so far, in order."""
        return ", then ".join([*(f"{ms:g}" for ms in self.former), "none" if self.ms is None else f"{self.ms:g}"])

    def after(self, moves: Sequence[MoveReport]) -> str:
        """Changes the budget if some of these ended moves were refused because of it.

        Later moves have less patience. Unless the user has set the budget, it is raised above the need of the refused
        moves, or lifted if they need too much. Returns a sentence for the user if the budget was raised or lifted;
        empty: the budget stays. The caller repeats the refused moves if the text is not empty.
        """
        refused = [move for move in moves if is_refused(move)]
        if not refused:
            return ""
        self.patience_s = PATIENCE_THEN_S
        if self.asked or self.ms is None:
            return ""
        needed = max(move.predicted_pause_ms + move.margin_ms for move in refused)
        former = self.ms
        self.former.append(former)
        self.ms = _rounded(max(needed, self.ms) * ROOM)
        now = "from now on any pause is allowed" if self.ms is None else f"the budget is now {self.ms:g} ms"
        return (
            f"{_partitions(len(refused))} not moved: pauses vary on this machine, and {former:g} ms could not "
            f"be guaranteed; {now}"
        )


def is_refused(move: MoveReport) -> bool:
    """Tells whether a move was refused because of its budget. The partition of such a move was never paused."""
    return move.fault is not None and move.fault.code == BudgetUnreachable.code


def _rounded(ms: float) -> float | None:
    return None if ms > BUDGET_MS_MAX else math.ceil(ms / BUDGET_STEP_MS) * BUDGET_STEP_MS


def _partitions(count: int) -> str:
    return "1 partition was" if count == 1 else f"{count} partitions were"


OPERATOR = DelayByAircraft.__name__
EDGES = ("EWR", "JFK", "LGA")
PARTITIONS = 16
ROWS_PER_FILE = 6_000
FILES_MIN = 24
POLL_S = 0.25
#: (share of the stream after which the step begins, site → number of the group of partitions that moves to it)
STEPS: tuple[tuple[float, dict[str, int]], ...] = (
    (0.12, {"EWR": 0, "JFK": 1, "LGA": 2}),  # cloud → edge
    (0.40, {"JFK": 0, "LGA": 1, "EWR": 2}),  # edge → other edge
    (0.75, {"cloud": 0}),  # edge → cloud
    (0.80, {"cloud": 1}),
    (0.85, {"cloud": 2}),
)
CRASH_AT = 0.58
CRASHES = "LGA-0"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of a run.

    Attributes:
        rows: number of flights, from the first on; None: as many as there is time for.
        max_pause_ms: pause budget of every move; None: a budget that this machine can keep.
        nats_url: server whose JetStream streams the flights; None: they are streamed from files.
        before_compare: called with the cluster when the stream has ended; tests use it to spoil the result.
    """

    out: Path = Path("demo-out")
    rows: int | None = None
    max_pause_ms: float | None = None
    nats_url: str | None = None
    before_compare: Callable[[Cluster], None] | None = None


def run_demo(options: DemoOptions, tell_stderr: bool = False) -> DemoResult:
    """Runs the demonstration, and returns its result.

    Raises JavaMissing, ExtraMissing, DataDirLocked, or the error of the cluster or of Spark.

    Args:
        tell_stderr: print progress on stderr instead of stdout.
    """
    began_s, console = SYSTEM_CLOCK.monotonic(), console_of(tell_stderr)
    work = fresh(options.out)
    console.print(
        Text.assemble(
            ("stateflow demo", "bold"), ": the flights of 2013 out of New York, through stateful operators that move"
        )
    )
    telling = ProgressPrinter(console)
    with telling.of("reading the flights"):
        flights = load_flights()
    if options.rows is not None:
        flights = flights.head(options.rows)
    files = max(FILES_MIN, len(flights) // ROWS_PER_FILE)
    via = "files" if options.nats_url is None else "slices of a JetStream stream"
    console.print(f"  {len(flights):,} flights in {files} {via}, in the order they were scheduled")
    sites = {"cloud": 1, **dict.fromkeys(EDGES, 1)}
    local = LocalCluster(
        DelayByAircraft,
        sites=sites,
        partitions=PARTITIONS,
        data_dir=work / "cluster",
        deploy_to=("cloud",),
        checkpoint_interval_s=10,
    )
    with contextlib.ExitStack() as running:
        with telling.of("writing the input of the stream"):
            source = running.enter_context(replay(flights, files, work, options.nats_url))
        with telling.of("starting the processes"):
            running.enter_context(local)
            # the killed replica returns with all of its state, and even on a slow machine no other replica should take
            # over from an older checkpoint before that
            local.cluster.deploy(DelayByAircraft, PARTITIONS, failover="manual")
        running.enter_context(live_page(local, console))
        with telling.of("starting Spark"):
            spark = local_session("stateflow demo", spark__sql__streaming__numRecentProgressUpdates="10000")
        console.print(f"  five processes: controller, {', '.join(n for n in local.processes if n != 'controller')}")
        with telling.of("starting the stream"):
            query = _start(spark, local, work, source)
        stretch = stretch_of(files, began_s, whole=options.rows is not None)
        story = _Story(local, options, source, stretch, len(flights), via, console, telling)
        try:
            story.tell(query)
        finally:
            query.stop()
        if story.rows < len(flights):
            console.print(Text(f"  {story.rows:,} flights were streamed: more would take too long here", "yellow"))
            flights = flights.head(story.rows)
        if options.before_compare is not None:
            options.before_compare(local.cluster)
        with telling.of("reading the state of all replicas"):
            state = _read_state(local.cluster)
        with telling.of("reading the output of Spark"):
            output = _read_output(spark, work)
        with telling.of("recomputing with pandas, and comparing every row"):
            result = story.result(query, expected(flights), state, output)
    with telling.of("drawing the report"):
        html, png = write_report(result, options.out)
    shutil.rmtree(work, ignore_errors=True)
    _conclude(console, result, html, png)
    return result


def _start(spark: SparkSession, local: LocalCluster, work: Path, source: Replay) -> StreamingQuery:
    from pyspark.sql import functions as F  # noqa: N812

    keyed = source.read(spark).withColumn(
        "tailnum", F.coalesce("tailnum", F.lit(UNKNOWN))
    )  # cancelled flights have none
    statistics = apply_operator(keyed, DelayByAircraft, cluster=local, order_by="seq")
    writing = statistics.writeStream.format("parquet").option("checkpointLocation", str(work / "spark-checkpoint"))
    if source.feed is None:
        writing = writing.trigger(availableNow=True)
    return writing.start(str(work / "output"))


class _Story:
    """Carries out the moves and the crash while the stream runs, and keeps the measurements."""

    def __init__(
        self,
        local: LocalCluster,
        options: DemoOptions,
        source: Replay,
        stretch: Stretch,
        rows: int,
        via: str,
        console: Console,
        telling: ProgressPrinter,
    ) -> None:
        self._telling = telling
        self._local = local
        self._budget = Budget() if options.max_pause_ms is None else Budget(options.max_pause_ms, asked=True)
        self._source, self._stretch = source, stretch
        self._bounds = bounds(rows, stretch.slices)
        self._via = via
        self._console = console
        self._started_us = 0
        self._moves: list[MoveReport] = []
        self._incidents: list[Incident] = []
        self._samples: list[RequestSample] = []
        self._duration_s = 0.0

    def tell(self, query: StreamingQuery) -> None:
        self._started_us, started = SYSTEM_CLOCK.now_us(), SYSTEM_CLOCK.monotonic()
        steps = [*((at, self._step(groups)) for at, groups in STEPS), (CRASH_AT, self._crash)]
        steps.sort(key=lambda step: step[0])
        files = self._stretch.slices
        with self._sampling(), self._feeding(query), self._telling.of("streaming"):
            while query.isActive:
                done, now = _batches(query), SYSTEM_CLOCK.monotonic()
                self._telling.say(f"streaming: {done} of {files} files" + (", the last batch" * (done >= files)))
                if steps and self._stretch.share(done, now) >= steps[0][0]:
                    steps.pop(0)[1]()
                elif self._source.feed is not None and self._stretch.is_over(done):
                    query.processAllAvailable()  # raises the error of the query
                    break
                else:
                    query.awaitTermination(POLL_S)
            self._duration_s = SYSTEM_CLOCK.monotonic() - started
            query.stop()
            query.awaitTermination()  # raises the error of the query
        with self._telling.of("running steps for which the stream was too short"):
            for _, step in steps:
                step()

    @property
    def rows(self) -> int:
        """The number of flights that were streamed."""
        return self._bounds[self._slices]

    @property
    def _slices(self) -> int:
        return self._stretch.slices if self._source.feed is None else self._stretch.allowed

    def _step(self, groups: dict[str, int]) -> Callable[[], None]:
        def move() -> None:
            wanted = {to: _group(group) for to, group in groups.items()}
            while wanted := self._moved(wanted):
                pass

        return move

    def _moved(self, wanted: dict[str, list[int]]) -> dict[str, list[int]]:
        """Moves partitions. Returns those whose move was refused and should be repeated with a larger budget.

        Args:
            wanted: site or replica → partitions that move to it; the result has the same form.
        """
        budget = self._budget
        started = {
            to: self._local.migrate(OPERATOR, partitions, to, max_pause_ms=budget.ms, patience_s=budget.patience_s)
            for to, partitions in wanted.items()
        }
        for to, migration in started.items():
            for report in migration.progress():
                self._telling.say(f"moving partitions to {to}: {_standing(report)}")
        reports = {to: migration.report for to, migration in started.items()}
        learnt = budget.after([move for report in reports.values() for move in report.moves])
        again: dict[str, list[int]] = {}
        for to, report in reports.items():
            refused = [move.partition for move in report.moves if is_refused(move)] if learnt else []
            self._moves += [move for move in report.moves if move.partition not in refused]
            pauses = [move.pause_ms for move in report.moves if move.state == "COMPLETED"]
            worst = f", longest pause {max(pauses):.1f} ms" if pauses else ""
            self._console.print(f"  moved {len(pauses)} of {len(report.moves)} partitions to {to}{worst}")
            for failed in (m for m in report.moves if m.error and m.partition not in refused):
                self._console.print(Text(f"  partition {failed.partition} stayed: {failed.error}", "red"))
            if refused:
                again[to] = refused
        if learnt:
            self._console.print(Text(f"  {learnt}", "yellow"))
        return again

    def _crash(self) -> None:
        self._telling.say(f"killing {CRASHES} with SIGKILL and starting it again")
        self._incidents.append(Incident(self._now_s(), "SIGKILL", CRASHES))
        self._local.kill(CRASHES)
        self._local.restart(CRASHES)
        self._incidents.append(Incident(self._now_s(), "restart", CRASHES))
        took = self._incidents[-1].at_s - self._incidents[-2].at_s
        self._console.print(
            f"  killed {CRASHES} with SIGKILL; it is back with everything it had acknowledged after {took:.1f} s"
        )

    def _now_s(self) -> float:
        return self._seconds(SYSTEM_CLOCK.now_us())

    def _seconds(self, at_us: int) -> float:
        return (at_us - self._started_us) / 1e6

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        with _beside(self._sample):
            yield

    @contextmanager
    def _feeding(self, query: StreamingQuery) -> Iterator[None]:
        """Feeds the stream in a thread while the block runs, so that the stream continues during moves."""

        def go_on(stop: threading.Event) -> None:
            while not stop.is_set() and query.isActive:
                self._stretch.look(_batches(query), SYSTEM_CLOCK.monotonic())
                if self._source.feed is not None:
                    self._source.feed(self._stretch.allowed)
                stop.wait(POLL_S / 2)

        with _beside(go_on):
            yield

    def _sample(self, stop: threading.Event) -> None:
        """Collects the durations of requests from all replicas until ``stop`` is set.

        Durations that a killed process had not reported are lost.
        """
        cluster = self._local.cluster
        seen: dict[int, int] = {}  # by process id: a restarted replica numbers requests anew
        while True:
            last = stop.is_set()
            for name, process in self._local.processes.items():
                if name in self._local.controllers or not process.running:
                    continue
                pid = process.pid
                try:
                    stats = cluster.replica_stats(process.address, after=seen.get(pid, 0))
                except StateflowError:
                    continue
                for sample in stats.requests:
                    seen[pid] = sample.number
                    at_s = self._seconds(sample.at_us)
                    self._samples.append(RequestSample(at_s, name, sample.rows, sample.total_ms))
            if last:
                return
            stop.wait(POLL_S)

    def result(
        self, query: StreamingQuery, wanted: Expected, state: dict[str, FinalState], output: pd.DataFrame
    ) -> DemoResult:
        states = compare_state(wanted, state)
        outputs = compare_outputs(wanted, output)
        moves = [move_row(move, self._started_us) for move in self._moves]
        return DemoResult(
            rows=self.rows,
            keys=len(wanted.state),
            rows_per_s=round(self.rows / self._duration_s, 1) if self._duration_s else 0.0,
            duration_s=round(self._duration_s, 3),
            batches=[self._batch_row(progress) for progress in query.recentProgress if progress["numInputRows"]],
            requests=self._samples,
            moves=moves,
            incidents=self._incidents,
            state_equal=states.equal,
            output_equal=outputs.equal,
            state_keys=states.compared,
            output_rows=outputs.compared,
            differences=[*states.differences, *outputs.differences],
            settings={
                "partitions": PARTITIONS,
                "sites": ["cloud", *EDGES],
                "source": f"{self._slices} of {self._stretch.slices} {self._via}",
                "max_pause_ms": str(self._budget),
                "spark": "local[2], one thread per micro-batch",
            },
            versions=versions(),
        )

    def _batch_row(self, progress: Any) -> BatchRow:
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00"))
        return BatchRow(
            batch=progress["batchId"],
            at_s=self._seconds(int(began.timestamp() * 1e6)),
            rows=progress["numInputRows"],
            duration_ms=progress["durationMs"].get("triggerExecution", 0),
        )


@contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _batches(query: StreamingQuery) -> int:
    """Returns the number of micro-batches that are done.

    Progress without rows is reported while the stream waits, and has the number of the next micro-batch.
    """
    progress = query.lastProgress
    return int(progress["batchId"]) + (progress["numInputRows"] > 0) if progress else 0


def _standing(report: Reconfiguration) -> str:
    """Returns text on the progress of a reconfiguration, with the state of the first running move."""
    done = sum(move.state == "COMPLETED" for move in report.moves)
    going = [move for move in report.moves if move.state not in ("COMPLETED", "ABORTED", "WAITING")]
    said = f"{done} of {len(report.moves)}"
    return said + (f", partition {going[0].partition} is {going[0].state.lower().replace('_', ' ')}" if going else "")


def _group(number: int) -> list[int]:
    """Returns the partitions of a group: 0, 3, 6, … for group 0. The last partition is in no group, and stays in the
    cloud."""
    return list(range(number, PARTITIONS - 1, len(EDGES)))


def _read_state(cluster: Cluster) -> dict[str, FinalState]:
    flights = {row["key"]: row["value"] for row in cluster.read_state(OPERATOR, "flights").to_pylist()}
    delays: dict[str, dict[str, float]] = {}
    for row in cluster.read_state(OPERATOR, "delay_by_dest").to_pylist():
        delays.setdefault(row["key"], {})[row["map_key"]] = row["value"]
    carriers: dict[str, set[str]] = {}
    for row in cluster.read_state(OPERATOR, "carriers").to_pylist():
        carriers.setdefault(row["key"], set()).add(row["map_key"])
    keys = flights.keys() | delays.keys() | carriers.keys()
    return {k: FinalState(flights.get(k, 0), delays.get(k, {}), carriers.get(k, set())) for k in keys}


def _read_output(spark: SparkSession, work: Path) -> pd.DataFrame:
    output: pd.DataFrame = spark.read.parquet(str(work / "output")).toPandas()
    return output


def _move_table(result: DemoResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("partition", "from → to", "warm", "reused", "delta", "rounds", "predicted", "pause"):
        table.add_column(column, justify="left" if "→" in column else "right", no_wrap=True)
    for move in result.moves:
        pause = f"{move.pause_ms:.1f} ms" if move.completed else move.state
        table.add_row(
            str(move.partition),
            f"{move.source} → {move.target}",
            *(human_bytes(count) for count in (move.bytes_warm, move.bytes_reused, move.bytes_delta)),
            str(move.rounds),
            f"{move.predicted_pause_ms:.1f} ms",
            pause,
        )
    return table


def _conclude(console: Console, result: DemoResult, html: Path, png: Path) -> None:
    for difference in result.differences:
        console.print(Text(f"  {difference}", "red"))
    summary = result.summary()
    pauses = (
        "no pause"
        if result.pause_ms_max is None
        else (f"pause: {result.pause_ms_max:.1f} ms worst, {summary['pause_ms_median']:.1f} ms median")
    )
    console.print(_move_table(result))
    batches, requests = [b.duration_ms for b in result.batches], [r.total_ms for r in result.requests]
    for what, values in (("micro-batch", batches), ("request to a replica", requests)):
        p50, p99 = percentile(values, 50), percentile(values, 99)
        console.print(f"latency of a {what}: {p50:.0f} ms median, {p99:.0f} ms p99", highlight=False)
    console.print(f"report: {html}  picture: {png}", highlight=False)
    console.print(
        f"rows: {result.rows:,} in {result.duration_s:.1f} s, {result.rows_per_s:,.0f} rows/s", highlight=False
    )
    for name, equal, count, unit in (
        ("state", result.state_equal, result.state_keys, "keys"),
        ("output", result.output_equal, result.output_rows, "rows"),
    ):
        style = "green" if equal else "bold red"
        console.print(Text(f"{name} equal: {'yes' if equal else 'no'} ({count} {unit})", style))
    style = "bold red" if result.moves_failed else ""
    console.print(Text(f"moves: {result.moves_completed} completed, {result.moves_failed} failed", style))
    if result.moves_failed:
        console.print(
            Text(
                "some moves failed, see above; raise --max-pause on a machine this busy",
                "bold red",
            )
        )
    console.print(pauses, highlight=False)
