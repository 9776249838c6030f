"""State as a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster
from stateflow.errors import InvalidArgument
from stateflow.local.embedded import embedded
from stateflow.operator.arrow import read_table
from stateflow.partition.checkpoints import read_checkpoint
from stateflow.partition.entries import joined
from stateflow.spark.apply import HasAddress, address_of
from stateflow.spark.checks import check_running
from stateflow.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_state(
    spark: SparkSession,
    *,
    operator: str,
    state: str,
    cluster: str | HasAddress | None = None,
    checkpoint: str | CheckpointStore | None = None,
    directory: str | Path | None = None,
    savepoint: str = "",
) -> DataFrame:
    """Reads every entry of one state: columns key, map_key (null for a value), value, partition.

    A state addressed at run time is read by the name of its tag. Three more columns follow the key: window_start,
    window_end and namespace, see :class:`~stateflow.partition.entries.StateColumns`.

    Column types are those that the state declares, see :mod:`stateflow.state.arrays`; several key columns are a struct.
    Entries come from a live ``cluster``, or without any cluster from a ``checkpoint`` store (its newest checkpoint, or
    a ``savepoint``), or else from this program's own cluster in ``directory`` or ``./stateflow-data``. Reading does not
    stop processing. The entries are those of this moment, and pass through the driver: call it again for newer ones.
    Expired entries are left out: those of a cluster that have expired by now, those of a checkpoint that had expired
    when it was taken.

    Raises OperatorNotDeployed, UnknownState, Unavailable; InvalidArgument if more than one of these is named, for a
    directory that never had a cluster, or if several tags have the name; CheckpointMissing or CheckpointCorrupt for a
    checkpoint.

    Example: ``read_state(spark, operator="DelayByAircraft", state="flights").where("value > 9").show()``
    """
    check_running(spark)
    if sum(each is not None for each in (cluster, checkpoint, directory)) > 1:
        raise InvalidArgument(
            "more than one place to read state from", remedy="pass one of cluster=, directory= and checkpoint="
        )
    if savepoint and checkpoint is None:
        raise InvalidArgument("savepoint= needs a checkpoint store", remedy="pass checkpoint= as well")
    if checkpoint is None:
        table = Cluster(address_of(embedded(directory, create=False) if cluster is None else cluster)).read_state(
            operator, state
        )
    else:
        store = CheckpointStore(checkpoint, create=False) if isinstance(checkpoint, str) else checkpoint
        pages = read_checkpoint(store, operator, state, savepoint=savepoint)
        table = joined([read_table(page) for page in pages])
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            table = table.set_column(index, field.name, table[field.name].cast(pa.string()))
    if is_connect(spark) and not table.num_rows:
        from pyspark.sql.pandas.types import from_arrow_schema

        return spark.createDataFrame([], from_arrow_schema(table.schema))
    return spark.createDataFrame(table.combine_chunks())  # Spark drops what follows an empty chunk
