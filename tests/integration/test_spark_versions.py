"""Features that an older Spark lacks: one line says which version has them, and nothing is begun."""

from __future__ import annotations

from collections.abc import Iterator

import pyspark
import pytest
from pyspark.sql import SparkSession

from stateflow.errors import InvalidArgument
from stateflow.spark import apply_operator, local_session
from stateflow.spark.session import REAL_TIME
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally

pytestmark = [pytest.mark.spark, pytest.mark.processes]
LINE = r"^invalid_argument: real-time mode needs PySpark 4\.3 or newer, but this is 4\.[12]\.\d+: pip install \S+==4\.3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, sites={"cloud": 1}, partitions=4) as running:
        yield running


def test_real_time_mode(spark: SparkSession, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Spark refuses real-time mode; a query in micro-batches is not told to go over to it either."""
    if REAL_TIME.is_in(pyspark.__version__):
        monkeypatch.setattr(pyspark, "__version__", "4.2.9")
    with pytest.raises(InvalidArgument, match=LINE):
        local_session("x", real_time=True)
    rate = spark.readStream.format("rate").load()
    rows = rate.selectExpr("cast(value as string) k", "'x' kind", "value v", "value % 2 part")
    with pytest.raises(InvalidArgument, match=LINE):
        apply_operator(rows, Tally, cluster=cluster, real_time=True, position=("part", "v"))
    applied = apply_operator(rows, Tally, cluster=cluster)
    with pytest.raises(InvalidArgument, match=LINE):
        applied.writeStream.trigger(realTime="5 seconds")
    applied.writeStream.trigger(availableNow=True)
