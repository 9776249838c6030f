"""In what the versions of PySpark differ that this package runs with.

A feature that an older one lacks is refused by name where it is asked for, not by what Spark or Python say of something
that they lack.
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
    """``what``: as its users call it. ``since``: the first version of PySpark, and of Spark, that has what it is made
    of."""

    what: str
    since: tuple[int, int]

    def is_in(self, version: str) -> bool:
        """Args: version: as PySpark and Spark say theirs, ``4.2.1`` or ``4.3.0.dev1``."""
        return _is_at_least(version, self.since)

    def needs(self) -> str:
        """In words, as ``real-time mode needs PySpark 4.3 or newer``."""
        return f"{self.what} needs PySpark {_dotted(self.since)} or newer"


#: Python workers that give what came of a row before they have the next (``spark.python.udf.pipelined.enabled``)
REAL_TIME = Feature("real-time mode", (4, 3))
#: Python sources that are told where a micro-batch begins, and how many rows it may have (``ReadLimit``)
JETSTREAM = Feature("the JetStream source", (4, 2))


def require(feature: Feature, spark: SparkSession | None = None) -> None:
    """Raises InvalidArgument where PySpark is older than that, or the Spark that a session of Spark Connect talks to.
    ImportError without PySpark."""
    import pyspark

    remedy = f"pip install 'pyspark=={_dotted(feature.since)}.*'"
    if not feature.is_in(pyspark.__version__):
        raise InvalidArgument(f"{feature.needs()}, and this is {pyspark.__version__}", remedy=remedy)
    if spark is not None and not feature.is_in(spark.version):
        raise InvalidArgument(
            f"{feature.needs()}, and the session's Spark is {spark.version}", remedy=f"where it runs: {remedy}"
        )


def metadata_of(planned: Any, version: str) -> Any:
    """What Spark noted of a batch beside its offsets. Args: planned: the JVM's entry of its log; version: of Spark."""
    return (planned.metadataOpt() if _is_at_least(version, (4, 2)) else planned.metadata()).get()


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark's schema as Arrow's, with times in UTC: 4.1 has them there by itself, and later ones do when told to."""
    from pyspark.sql.pandas.types import to_arrow_schema

    told = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    found: pa.Schema = to_arrow_schema(schema, **told)
    return found


def _is_at_least(version: str, least: tuple[int, int]) -> bool:
    found = _NUMBERS.match(version)
    return found is not None and (int(found[1]), int(found[2])) >= least


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
