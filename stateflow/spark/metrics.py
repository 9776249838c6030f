"""What the operators of queries did and what it took, put together from what their tasks report.

Pure: how reports come here, and what Spark says of a query, is in :mod:`stateflow.spark.task_reports`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

#: of each query, in detail; all are in the totals
BATCHES_KEPT = 100
#: those that reported last
QUERIES_KEPT = 100
#: tasks of a micro-batch; of more, as of a frame that is evaluated again and again, the first are added up
SPANS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where time went, s.

    ``spark``: tasks waited for their rows; of a micro-batch also all that Spark did beside the operators' tasks.
    ``routing``: sorting, cutting and encoding rows in the tasks, and decoding outputs.
    ``rpc``: to replicas and back, less what they spent in the next two: the network, queues, moves, standbys.
    ``operator``: in the operator, timers and watermark with it.
    ``commit``: collecting what changed, and writing it.

    >>> Seconds(operator=0.25).operator
    0.25
    """

    spark: float = 0.0
    routing: float = 0.0
    rpc: float = 0.0
    operator: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        return self.spark + self.routing + self.rpc + self.operator + self.commit

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.spark + other.spark,
            self.routing + other.routing,
            self.rpc + other.rpc,
            self.operator + other.operator,
            self.commit + other.commit,
        )

    def scaled(self, factor: float) -> Seconds:
        return Seconds(
            self.spark * factor,
            self.routing * factor,
            self.rpc * factor,
            self.operator * factor,
            self.commit * factor,
        )

    def to_dict(self) -> dict[str, float]:
        """Milliseconds, as the command line shows them."""
        return {
            "spark_ms": round(self.spark * 1e3, 3),
            "routing_ms": round(self.routing * 1e3, 3),
            "rpc_ms": round(self.rpc * 1e3, 3),
            "operator_ms": round(self.operator * 1e3, 3),
            "commit_ms": round(self.commit * 1e3, 3),
        }


@dataclass(frozen=True, slots=True)
class OperatorMetrics:
    """One operator of a query, in one micro-batch or in all. ``source``: that of ``apply_operator``.

    ``rows``: that it was given. ``tasks``: of Spark. ``visits``: partitions those tasks sent to, with rows or
    without. None of the three rises when Spark runs a task or a micro-batch again; such tasks are ``repeated``.
    ``replayed``: visits of all tasks, repeated ones too, that were answered with the stored output.
    ``seconds``: of all tasks, repeated ones too, added up: with two tasks at a time there are two in one second.
    In a task they are its duration up to its first output; ``operator`` and ``commit`` are those of the replica
    that took longest for the task, as replicas work side by side.

    Example: ``[(each.operator, each.rows) for each in query_metrics(query).operators]``
    """

    operator: str
    source: str | None
    batches: int
    rows: int
    tasks: int
    visits: int
    repeated: int
    replayed: int
    seconds: Seconds

    def __add__(self, other: OperatorMetrics) -> OperatorMetrics:
        """Of the same operator."""
        return OperatorMetrics(
            self.operator,
            self.source,
            self.batches + other.batches,
            self.rows + other.rows,
            self.tasks + other.tasks,
            self.visits + other.visits,
            self.repeated + other.repeated,
            self.replayed + other.replayed,
            self.seconds + other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "operator": self.operator,
            "source": self.source,
            "batches": self.batches,
            "rows": self.rows,
            "tasks": self.tasks,
            "visits": self.visits,
            "repeated": self.repeated,
            "replayed": self.replayed,
            **self.seconds.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class BatchMetrics:
    """One micro-batch. ``operators``: in the order in which they first reported.

    ``input_rows``: of the query's sources, and ``trigger_s``: from trigger to commit, s; both as Spark says, None as
    long as it has not, or when it has forgotten.
    ``seconds``: add up to ``trigger_s``: the time in which tasks of the operators ran is split as those tasks spent
    theirs, the rest is Spark's. Without ``trigger_s`` there is no rest. Of the newest run, when it was run again.

    Example: ``query_metrics(query).batches[-1].seconds.operator``
    """

    number: int
    input_rows: int | None
    trigger_s: float | None
    seconds: Seconds
    operators: tuple[OperatorMetrics, ...]

    @property
    def rows(self) -> int:
        """Of all operators together: one that passes two of them counts twice."""
        return sum(operator.rows for operator in self.operators)

    @property
    def tasks(self) -> int:
        return sum(operator.tasks for operator in self.operators)


@dataclass(frozen=True, slots=True)
class QueryMetrics:
    """Of one query, since this driver began.

    ``id``: Spark's; of a batch DataFrame the ``source`` of ``apply_operator``, or a made one.
    ``batches``: the newest 100, oldest first. ``batches_total``, ``operators`` and ``seconds`` are about all.

    Example: ``query_metrics(query).batches_total``
    """

    id: str
    name: str | None
    batches: tuple[BatchMetrics, ...]
    batches_total: int
    seconds: Seconds
    operators: tuple[OperatorMetrics, ...]

    @property
    def rows(self) -> int:
        """Of all operators together: one that passes two of them counts twice."""
        return sum(operator.rows for operator in self.operators)

    @property
    def tasks(self) -> int:
        return sum(operator.tasks for operator in self.operators)


# -- what comes in --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One pass of one task over its rows. ``run``: of the query, in which tasks have one number each; empty: of a batch
    DataFrame, whose tasks have one number each in ``use``, one call of ``apply_operator``.

    ``began_us``: by the wall clock of its machine; ``seconds.total``: from then on.
    """

    query: str
    run: str
    batch: int
    operator: str
    source: str | None
    task: int
    rows: int
    visits: int
    replayed: int
    began_us: int
    seconds: Seconds
    use: str = ""


@dataclass(frozen=True, slots=True)
class Trigger:
    """What Spark says of a micro-batch that it has finished."""

    query: str
    name: str | None
    run: str
    batch: int
    input_rows: int
    seconds: float


# -- the tally ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Use:
    """One operator in one batch. ``tasks``: of the newest run, and call of it, task → (rows, visits)."""

    of: str = ""
    tasks: dict[int, tuple[int, int]] = field(default_factory=dict)
    passes: int = 0
    replayed: int = 0
    seconds: Seconds = Seconds()


@dataclass(slots=True)
class _Batch:
    """``covered``, ``spans`` and ``spent`` are of the newest run, as its trigger is."""

    run: str
    uses: dict[tuple[str, str | None], _Use] = field(default_factory=dict)
    covered: float = 0.0  # by spans that are not kept
    spans: list[tuple[float, float]] = field(default_factory=list)
    spent: Seconds = Seconds()
    input_rows: int | None = None
    trigger_s: float | None = None

    def report(self, report: TaskReport) -> None:
        if report.run != self.run:
            self.run, self.covered, self.spans, self.spent = report.run, 0.0, [], Seconds()
            self.input_rows = self.trigger_s = None
            for use in self.uses.values():
                use.tasks = {}  # there may be fewer now, with other rows
        use = self.uses.setdefault((report.operator, report.source), _Use())
        if report.use != use.of:
            use.of, use.tasks = report.use, {}
        use.tasks[report.task] = report.rows, report.visits
        use.passes += 1
        use.replayed += report.replayed
        use.seconds += report.seconds
        if len(self.spans) == SPANS_KEPT:
            self.covered, self.spans = self.covered + covered(self.spans), []
        began = report.began_us / 1e6
        self.spans.append((began, began + report.seconds.total))
        self.spent += report.seconds

    def operators(self) -> Iterable[OperatorMetrics]:
        for (operator, source), use in self.uses.items():
            yield OperatorMetrics(
                operator,
                source,
                1,
                sum(rows for rows, _ in use.tasks.values()),
                len(use.tasks),
                sum(visits for _, visits in use.tasks.values()),
                use.passes - len(use.tasks),
                use.replayed,
                use.seconds,
            )

    def metrics(self, number: int) -> BatchMetrics:
        seconds = elapsed(self.covered + covered(self.spans), self.spent, self.trigger_s)
        return BatchMetrics(number, self.input_rows, self.trigger_s, seconds, tuple(self.operators()))


@dataclass(slots=True)
class _Query:
    """``dropped``, ``dropped_seconds``, ``totals``: of batches that are no longer kept."""

    name: str | None = None
    batches: OrderedDict[int, _Batch] = field(default_factory=OrderedDict)
    dropped: int = 0
    dropped_seconds: Seconds = Seconds()
    totals: dict[tuple[str, str | None], OperatorMetrics] = field(default_factory=dict)

    def drop_oldest(self) -> None:
        number, batch = self.batches.popitem(last=False)
        self.dropped += 1
        self.dropped_seconds += batch.metrics(number).seconds
        _add_up(self.totals, batch.operators())

    def metrics(self, query: str) -> QueryMetrics:
        batches = tuple(batch.metrics(number) for number, batch in self.batches.items())
        totals = dict(self.totals)
        for batch in batches:
            _add_up(totals, batch.operators)
        seconds = reduce(add, (batch.seconds for batch in batches), self.dropped_seconds)
        return QueryMetrics(query, self.name, batches, self.dropped + len(batches), seconds, tuple(totals.values()))


class Tally:
    """Reports of tasks in, metrics out; of bounded size. Thread-safe."""

    def __init__(self, batches_kept: int = BATCHES_KEPT, queries_kept: int = QUERIES_KEPT) -> None:
        self._batches_kept = batches_kept
        self._queries_kept = queries_kept
        self._queries: OrderedDict[str, _Query] = OrderedDict()
        self._observed: OrderedDict[str, int] = OrderedDict()  # run → its newest batch whose reports came so
        self._lock = threading.Lock()

    def report(self, reports: Iterable[TaskReport]) -> None:
        with self._lock:
            for each in reports:
                query = self._queries.setdefault(each.query, _Query())
                self._queries.move_to_end(each.query)
                query.batches.setdefault(each.batch, _Batch(each.run)).report(each)
                if len(query.batches) > self._batches_kept:
                    query.drop_oldest()
                if len(self._queries) > self._queries_kept:
                    self._queries.popitem(last=False)

    def observed(self, run: str, batch: int, reports: Iterable[TaskReport]) -> None:
        """Those of a run's micro-batch, taken once; batches of a run come in their order, and may come again."""
        with self._lock:
            if self._observed.get(run, -1) >= batch:
                return
            self._observed[run] = batch
            self._observed.move_to_end(run)
            if len(self._observed) > self._queries_kept:
                self._observed.popitem(last=False)
        self.report(reports)

    def triggered(self, triggers: Iterable[Trigger]) -> None:
        """What Spark says of batches. Of those that are unknown, and of other runs, it is passed over."""
        with self._lock:
            for each in triggers:
                query = self._queries.get(each.query)
                if query is None:
                    continue
                query.name = each.name
                batch = query.batches.get(each.batch)
                if batch is not None and batch.run == each.run:
                    batch.input_rows, batch.trigger_s = each.input_rows, each.seconds

    def is_whole(self, query: str, run: str, number: int, operator: str, source: str | None, partitions: int) -> bool:
        """Whether tasks of this run have reported for all of the operator's partitions. Some report nothing, so that
        it may be whole all the same."""
        with self._lock:
            known = self._queries.get(query)
            batch = None if known is None else known.batches.get(number)
            use = None if batch is None or batch.run != run else batch.uses.get((operator, source))
            return use is not None and sum(visits for _, visits in use.tasks.values()) == partitions

    def query(self, named: str) -> QueryMetrics | None:
        """By id, or by name: the one of that name that reported last. None when no task has reported."""
        with self._lock:
            if named in self._queries:
                return self._queries[named].metrics(named)
            for identity, query in reversed(self._queries.items()):
                if query.name == named:
                    return query.metrics(identity)
            return None

    def batch(self, query: str, number: int) -> BatchMetrics | None:
        """None when it is not, or no longer, known."""
        with self._lock:
            known = self._queries.get(query)
            batch = None if known is None else known.batches.get(number)
            return None if batch is None else batch.metrics(number)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of (begin, end) was under way."""
    seconds, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


def elapsed(running_s: float, spent: Seconds, trigger_s: float | None) -> Seconds:
    """Time as it passed, from what tasks that overlap spent: adds up to ``trigger_s``, or to ``running_s``, in which
    any of them ran, when that is unknown. Tasks go by their machines' clocks, so that it may seem to be longer."""
    if trigger_s is not None:
        running_s = min(running_s, trigger_s)
    split = spent.scaled(running_s / spent.total) if spent.total else Seconds()
    return split if trigger_s is None else replace(split, spark=split.spark + trigger_s - split.total)


def _add_up(totals: dict[tuple[str, str | None], OperatorMetrics], operators: Iterable[OperatorMetrics]) -> None:
    for each in operators:
        key = each.operator, each.source
        totals[key] = totals[key] + each if key in totals else each
