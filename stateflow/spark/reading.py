"""State as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from stateflow.client import Cluster
from stateflow.spark.apply import HasAddress, address_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_state(spark: SparkSession, *, cluster: str | HasAddress, operator: str, state: str) -> DataFrame:
    """Every entry of one state of a live cluster: columns key, map_key (null for a value), value, partition.

    The entries pass through the driver. Raises OperatorNotDeployed, UnknownState or Unavailable.
    """
    table = Cluster(address_of(cluster)).read_state(operator, state)
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            table = table.set_column(index, field.name, table[field.name].cast(pa.string()))
    return spark.createDataFrame(table)
