"""Reads state as a DataFrame."""

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
    """Returns the entries of one state, with the columns key, map_key (null for a value), value, partition.

    The columns have the types that the state declares, see :mod:`stateflow.state.arrays`. A key of several columns is a
    struct. For a state that is addressed at run time, three more columns follow the key, see
    :class:`~stateflow.partition.entries.StateColumns`: ``window_start``, ``window_end`` and ``namespace``.

    All entries are read now and pass through the driver; call ``read_state`` again for newer entries. Reading does not
    stop processing. Expired entries are left out; in a checkpoint these are the entries that had expired when the
    checkpoint was taken.

    Args:
        operator: name of the deployed operator.
        state: name of the state's attribute, or of the tag of a state that is addressed at run time.
        cluster: running cluster to read from.
        checkpoint: checkpoint store, or its URL, to read from without a cluster.
        directory: directory of this program's own cluster, which is read if neither ``cluster`` nor ``checkpoint`` is
            given; by default ``./stateflow-data``.
        savepoint: savepoint in the checkpoint store; by default the newest checkpoint is read.

    Raises:
        OperatorNotDeployed: the cluster does not have the operator.
        UnknownState: the operator has no such state.
        Unavailable: the cluster does not answer.
        InvalidArgument: more than one of ``cluster``, ``checkpoint`` and ``directory`` is given, the directory never
            had a cluster, or several tags have the name.
        CheckpointMissing, CheckpointCorrupt: the checkpoint does not exist, or cannot be read.

    Example: ``read_state(spark, operator="DelayByAircraft", state="flights").where("value > 9").show()``
    """
    check_running(spark)
    if sum(each is not None for each in (cluster, checkpoint, directory)) > 1:
        raise InvalidArgument(
            "more than one place to read state from is given", remedy="pass one of cluster=, directory= and checkpoint="
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
    from pyspark.sql.pandas.types import from_arrow_schema

    # otherwise Spark would take naive times for moments in the session's zone
    schema = from_arrow_schema(table.schema, prefer_timestamp_ntz=True)
    if is_connect(spark) and not table.num_rows:
        return spark.createDataFrame([], schema)
    return spark.createDataFrame(table.combine_chunks(), schema)  # Spark drops the rows after an empty chunk
