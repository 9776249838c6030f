"""Sessions of Spark Connect: their driver is in a server, which may be another machine's, and this process has none of
its objects. What a classic session is asked in the JVM, one of these is asked by a plan, or nobody knows.

PySpark's own classes are looked at by the name of their module: a classic session does without what Connect needs.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: rows of a range, in as many parts as a server makes of it by itself
_RANGE = 1 << 12
_FOREACH_BATCH = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
_PARALLELISM: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by session


def is_connect(frame_or_session: Any) -> bool:
    return type(frame_or_session).__module__.startswith("pyspark.sql.connect")


def default_parallelism(spark: SparkSession) -> int:
    """Tasks that Spark makes where nobody says how many. A session of Connect runs a query for it, once."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    if spark not in _PARALLELISM:
        from pyspark.sql import functions as F  # noqa: N812

        parts = spark.range(_RANGE).select(F.spark_partition_id().alias("part")).distinct()
        _PARALLELISM[spark] = parts.count()
    return _PARALLELISM[spark]


def master_of(spark: SparkSession) -> str:
    """Where tasks run, as Spark has it; of a server that is elsewhere, beginning with its host."""
    if not is_connect(spark):
        return str(spark.sparkContext.master)
    client: Any = spark.client
    master = str(spark.conf.get("spark.master", "unknown"))
    return master if is_here(spark) else f"{client.host}: {master}"


def is_here(spark: Any) -> bool:
    """Of a session of Connect: is its server this machine's, by its address?"""
    return spark.client.host in ("localhost", "127.0.0.1", "::1")


def in_micro_batch(df: DataFrame) -> bool:
    """Is this called within ``foreachBatch``?"""
    if is_connect(df):
        return _FOREACH_BATCH in (getattr(sys.modules["__main__"].__spec__, "name", None), *sys.modules)
    return df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") is not None
