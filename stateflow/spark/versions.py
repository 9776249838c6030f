"""Differences between the versions of PySpark that this package supports.

A feature that an older version lacks is refused by name where a caller asks for it. Otherwise Spark or Python would
raise an error about some part of theirs.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stateflow.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that needs a newer PySpark.

    ``what``: its name for users. ``since``: first version of PySpark, and of Spark, that supports it.
    """

    what: str
    since: tuple[int, int]

    def is_in(self, version: str) -> bool:
        """Tells whether a version has the feature.

        Args:
            version: as PySpark and Spark give theirs, ``4.2.1`` or ``4.3.0.dev1``.
        """
        return _is_at_least(version, self.since)

    def needs(self) -> str:
        """Returns the requirement in words, such as ``real-time mode needs PySpark 4.3 or newer``."""
        return f"{self.what} needs PySpark {_dotted(self.since)} or newer"


#: needs Python workers that give a row's outputs before they have the next row (``spark.python.udf.pipelined.enabled``)
REAL_TIME = Feature("real-time mode", (4, 3))
#: needs Python sources that are given a micro-batch's start, and its limit of rows (``ReadLimit``)
JETSTREAM = Feature("the JetStream source", (4, 2))


def require(feature: Feature, spark: SparkSession | None = None) -> None:
    """Checks that PySpark has a feature, and the Spark of a session, which over Spark Connect may be another version.

    Raises InvalidArgument where one is too old, ImportError without PySpark.
    """
    import pyspark

    remedy = f"pip install 'pyspark=={_dotted(feature.since)}.*'"
    if not feature.is_in(pyspark.__version__):
        raise InvalidArgument(f"{feature.needs()}, but this is {pyspark.__version__}", remedy=remedy)
    if spark is not None and not feature.is_in(spark.version):
        raise InvalidArgument(
            f"{feature.needs()}, but the session's Spark is {spark.version}", remedy=f"where it runs: {remedy}"
        )


def metadata_of(planned: Any, version: str) -> Any:
    """Returns the metadata that Spark recorded of a batch beside its offsets.

    Args:
        planned: the JVM's entry of the offset log.
        version: Spark's version.
    """
    return (planned.metadataOpt() if _is_at_least(version, (4, 2)) else planned.metadata()).get()


def arrow_schema(schema: StructType) -> pa.Schema:
    """Converts Spark's schema to Arrow's, with times in UTC: PySpark 4.1 always uses UTC, later versions on request."""
    from pyspark.sql.pandas.types import to_arrow_schema

    told = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    found: pa.Schema = to_arrow_schema(schema, **told)
    return found


def _is_at_least(version: str, least: tuple[int, int]) -> bool:
    found = _NUMBERS.match(version)
    return found is not None and (int(found[1]), int(found[2])) >= least


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
