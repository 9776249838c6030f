"""Brings tasks' reports to a client of Spark Connect, which has no accumulators: as Spark's observed metrics.

A task's last row has its report in a column of its own and nothing else. Spark collects that column as an observed
metric, part of a micro-batch's progress or of a batch's answer. The row itself is filtered out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateflow.spark.metrics import Seconds, TaskReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPORT_COLUMN = "__stateflow_report"
_NAMED, _REPORTS = "stateflow:", "reports"
_FIELDS = [field.name for field in fields(TaskReport)]
_NOT_NULL = re.compile(r"\s+not\s+null\b", re.IGNORECASE)


def with_report_column(schema: Any) -> Any:
    """Returns the schema that tasks give, in DDL or as a StructType.

    All columns may be null, as those of a report row are.
    """
    if isinstance(schema, str):
        return f"{_NOT_NULL.sub('', schema)}, {REPORT_COLUMN} string"
    from pyspark.sql.types import StringType, StructField, StructType

    given = [StructField(each.name, each.dataType, True, each.metadata) for each in schema]
    return StructType([*given, StructField(REPORT_COLUMN, StringType())])


def with_report(
    outputs: Iterable[pa.RecordBatch], schema: pa.Schema, reports: list[TaskReport]
) -> Iterator[pa.RecordBatch]:
    """Yields the outputs, then the content of ``reports`` at that time. ``schema``: used where there are no outputs."""
    for batch in outputs:
        schema = batch.schema
        yield _joined(batch.columns, schema, pa.nulls(batch.num_rows, pa.string()))
    texts = pa.array(map(encoded, reports), pa.string())
    yield _joined([pa.nulls(len(texts), field.type) for field in schema], schema, texts)


def _joined(columns: list[pa.Array], schema: pa.Schema, reports: pa.Array) -> pa.RecordBatch:
    given = [field.with_nullable(True) for field in schema]
    return pa.RecordBatch.from_arrays(
        [*columns, reports], schema=pa.schema([*given, pa.field(REPORT_COLUMN, pa.string())])
    )


def observed(frame: DataFrame, use: str) -> tuple[DataFrame, Any]:
    """Returns the tasks' outputs without reports, and for a batch DataFrame the Observation with the reports.

    ``use``: name of this application, as Spark refuses two observations of one name in a query.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.connect.observation import Observation

    observation: Any = f"{_NAMED}{use}" if frame.isStreaming else Observation(f"{_NAMED}{use}")
    reports = F.collect_list(REPORT_COLUMN).alias(_REPORTS)
    seen = frame.observe(observation, reports)
    rows = seen.where(F.col(REPORT_COLUMN).isNull()).drop(REPORT_COLUMN)
    return rows, None if frame.isStreaming else observation


def reports_of(metrics: dict[str, Any]) -> list[TaskReport]:
    """Returns the reports in the observed metrics of a micro-batch, by their names."""
    return [
        decoded(text)
        for name, row in metrics.items()
        if name.startswith(_NAMED)
        for text in _said(row).get(_REPORTS) or ()  # a query without tasks has no reports
    ]


def _said(row: Any) -> dict[str, Any]:
    """Returns the row as a dict. Over Spark Connect the row is in Java's form, with its values and its schema."""
    said: dict[str, Any] = row.asDict()
    if said.keys() != {"values", "schema"}:
        return said
    return dict(zip((field["name"] for field in said["schema"]["fields"]), said["values"], strict=True))


def reports_at(observation: Any) -> list[TaskReport]:
    """Returns the reports of the newest evaluation of a batch DataFrame; none before the first."""
    return [decoded(text) for text in observation.get.get(_REPORTS) or ()]


def encoded(report: TaskReport) -> str:
    """Returns the report as short JSON: the progress of each micro-batch has one for each task."""
    return json.dumps(astuple(report), separators=(",", ":"))


def decoded(text: str) -> TaskReport:
    values = json.loads(text)
    return TaskReport(
        **dict(zip(_FIELDS, values, strict=True)) | {"seconds": Seconds(*values[_FIELDS.index("seconds")])}
    )
