"""State as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster
from stateflow.errors import InvalidArgument
from stateflow.runtime.arrow import read_table
from stateflow.runtime.offline import read_checkpoint
from stateflow.runtime.reading import joined
from stateflow.spark.apply import HasAddress, address_of
from stateflow.spark.checks import check_classic, check_running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_state(
    spark: SparkSession,
    *,
    operator: str,
    state: str,
    cluster: str | HasAddress | None = None,
    checkpoint: str | CheckpointStore | None = None,
    savepoint: str = "",
) -> DataFrame:
    """Every entry of one state: columns key, map_key (null for a value), value, partition.

    Types are those that the state declares, see :mod:`stateflow.state.typed`; several key columns are a struct. Of a
    live ``cluster``, or of a ``checkpoint`` store (its newest, or a ``savepoint``'s) without any cluster. Nothing is
    stopped for it. The entries pass through the driver. What has expired is left out: of a cluster now, of a checkpoint
    as of when it was taken.

    Raises OperatorNotDeployed, UnknownState, Unavailable; CheckpointMissing or CheckpointCorrupt of a checkpoint.
    """
    check_classic(spark)
    check_running(spark)
    if (cluster is None) == (checkpoint is None):
        raise InvalidArgument("state is read of one place", remedy="pass cluster= or checkpoint=")
    if cluster is not None:
        table = Cluster(address_of(cluster)).read_state(operator, state)
    else:
        assert checkpoint is not None
        store = CheckpointStore(checkpoint, create=False) if isinstance(checkpoint, str) else checkpoint
        pages = read_checkpoint(store, operator, state, savepoint=savepoint)
        table = joined([read_table(page) for page in pages])
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            table = table.set_column(index, field.name, table[field.name].cast(pa.string()))
    return spark.createDataFrame(table.combine_chunks())  # Spark leaves out what stands behind an empty chunk
