"""Finds micro-batches that were committed but not reported, because a driver was killed or its ledger was away.

Spark reports a batch after it has committed it, to listeners of the same process. The functions here find batches that
are in a query's checkpoint and have no stage. They count the rows again where the source still knows them: a file
source keeps the names of a batch's files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stateflow.spark.versions import metadata_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Swallowed:
    """One committed batch.

    ``rows``: None where the source no longer knows. ``first``, ``last``: offsets of its sources, JSON or None.
    """

    batch: int
    planned_ms: int
    rows: int | None
    first: tuple[str | None, ...]
    last: tuple[str | None, ...]
    sources: tuple[str, ...]
    sink: str | None = None


def execution_of(spark: SparkSession, query: str) -> Any:
    """Returns the JVM's object of a query that is starting; the object outlives the query. None where there is none."""
    found = spark.streams.get(query)
    return None if found is None else found._jsq.streamingQuery()


def committed(execution: Any, before: int | None) -> list[int]:
    """Returns the batches that the checkpoint has as committed, newest first: as many as Spark retains."""
    newest = execution.commitLog().getLatestBatchId()
    number = int(newest.get()) if newest.isDefined() else -1
    if before is not None:
        number = min(number, before - 1)
    found = []
    while number >= 0 and execution.commitLog().get(number).isDefined():
        found.append(number)
        number -= 1
    return found


def swallowed(spark: SparkSession, execution: Any, batches: Collection[int]) -> Iterator[Swallowed]:
    """Yields those of the batches that had rows, oldest first."""
    for batch in sorted(batches):
        planned = execution.offsetLog().get(batch)
        if not planned.isDefined():
            continue
        offsets = _offsets(planned.get())
        before = execution.offsetLog().get(batch - 1) if batch else None
        starts = _offsets(before.get()) if before is not None and before.isDefined() else [_none(spark)] * len(offsets)
        first, last = tuple(map(_json, starts)), tuple(map(_json, offsets))
        if first == last:
            continue
        sources = [execution.sources().apply(place) for place in range(execution.sources().size())]
        counts = [_rows(spark, *each) for each in zip(sources, starts, offsets, strict=False)]
        rows = None if None in counts or len(counts) != len(offsets) else sum(filter(None, counts))
        if rows is None:
            log.warning("row count of batch %d is no longer known", batch)
        names = tuple(str(source.toString()) for source in sources)
        yield Swallowed(
            batch, int(metadata_of(planned.get(), spark.version).batchTimestampMs()), rows, first, last, names
        )


def _offsets(planned: Any) -> list[Any]:
    return [planned.offsets().apply(place) for place in range(planned.offsets().size())]


def _none(spark: SparkSession) -> Any:
    assert spark._jvm is not None
    return spark._jvm.scala.Option.empty()


def _json(offset: Any) -> str | None:
    return str(offset.get().json()) if offset.isDefined() else None


def _rows(spark: SparkSession, source: Any, start: Any, end: Any) -> int | None:
    """Counts the rows of a file source by the relation that it would read again. None for other sources."""
    from py4j.protocol import Py4JError

    if _json(start) == _json(end):
        return 0
    try:
        relation = source.getBatch(start, end.get()).queryExecution().analyzed().relation()
        return int(spark._jsparkSession.baseRelationToDataFrame(relation).count())
    except Py4JError as error:
        log.debug("rows of a batch cannot be recounted: %s", error)
        return None
