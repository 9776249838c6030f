"""Runs operators in PySpark pipelines.

* ``apply_operator(df, Operator)`` applies an operator to a streaming or batch DataFrame; ``main_output`` and
  ``side_output`` separate the outputs.
* ``read_state`` reads an operator's state as a DataFrame.
* ``embedded`` returns the cluster that ``apply_operator`` and ``read_state`` use if no other is named.
* ``start_cluster`` starts a cluster inside a Spark application.
* ``register_jetstream`` makes NATS JetStream available as a source.
* ``record_queries`` and ``run_stage`` record the work of pipelines as stages of a ledger.
* ``rewind`` sets a query back to an earlier batch, after its operators' state was restored to an older version.
* ``query_metrics`` returns the metrics of a query.
"""

from stateflow.local.embedded import embedded
from stateflow.spark.apply import apply_operator, main_output, side_output
from stateflow.spark.inside import SparkCluster, start_cluster
from stateflow.spark.metrics import BatchMetrics, OperatorMetrics, QueryMetrics, Seconds, query_metrics
from stateflow.spark.reading import read_state
from stateflow.spark.rewind import Rewind, rewind
from stateflow.spark.session import local_session, real_time_settings, register_jetstream, register_state, require_java
from stateflow.spark.stage_recorder import End, record_queries, run_stage

__all__ = [
    "BatchMetrics",
    "End",
    "OperatorMetrics",
    "QueryMetrics",
    "Rewind",
    "Seconds",
    "SparkCluster",
    "apply_operator",
    "embedded",
    "local_session",
    "main_output",
    "query_metrics",
    "read_state",
    "real_time_settings",
    "record_queries",
    "register_jetstream",
    "register_state",
    "require_java",
    "rewind",
    "run_stage",
    "side_output",
    "start_cluster",
]
