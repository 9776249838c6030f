"""Operators in PySpark pipelines.

``apply_operator(df, Operator, cluster=…)`` works on streaming and on batch DataFrames; ``read_state`` reads an
operator's state as a DataFrame.
"""

from stateflow.spark.apply import apply_operator
from stateflow.spark.reading import read_state
from stateflow.spark.session import local_session, require_java

__all__ = ["apply_operator", "local_session", "read_state", "require_java"]
