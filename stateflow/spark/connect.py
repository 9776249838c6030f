"""Sessions of Spark Connect.

Their driver is in a server, which may be on another machine, and this process has none of its objects. Where this
package asks a classic session through the JVM, it asks a Connect session by running a plan, or cannot ask.

PySpark's own classes are recognised by the name of their module, as a classic session does not need Connect's packages.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: rows of a range that Spark splits into its default number of parts
_RANGE = 1 << 12
_FOREACH_BATCH = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
_PARALLELISM: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by session


def is_connect(frame_or_session: Any) -> bool:
    return type(frame_or_session).__module__.startswith("pyspark.sql.connect")


def default_parallelism(spark: SparkSession) -> int:
    """Returns the number of tasks that Spark makes by default. For a session of Connect, a query finds it, once."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    if spark not in _PARALLELISM:
        from pyspark.sql import functions as F  # noqa: N812

        parts = spark.range(_RANGE).select(F.spark_partition_id().alias("part")).distinct()
        _PARALLELISM[spark] = parts.count()
    return _PARALLELISM[spark]


def master_of(spark: SparkSession) -> str:
    """Returns Spark's master URL, with the host in front if the server is on another machine."""
    if not is_connect(spark):
        return str(spark.sparkContext.master)
    client: Any = spark.client
    master = str(spark.conf.get("spark.master", "unknown"))
    return master if is_here(spark) else f"{client.host}: {master}"


def is_here(spark: Any) -> bool:
    """Tells whether the server of a Connect session is on this machine, by its address."""
    return spark.client.host in ("localhost", "127.0.0.1", "::1")


def in_micro_batch(df: DataFrame) -> bool:
    """Tells whether the caller runs within ``foreachBatch``."""
    if is_connect(df):
        return _FOREACH_BATCH in (getattr(sys.modules["__main__"].__spec__, "name", None), *sys.modules)
    return df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") is not None
