"""stateflow: keyed, stateful stream operators for PySpark whose state can move while the pipeline runs."""

from stateflow import state
from stateflow.client import Cluster, StreamClient
from stateflow.errors import StateflowError
from stateflow.runtime.operator import BatchOperator, Context, Operator
from stateflow.runtime.windows import SessionWindows, SlidingWindows, TumblingWindows, Window
from stateflow.state import (
    Namespace,
    TrackedCounter,
    TrackedList,
    TrackedMap,
    TrackedReducing,
    TrackedSet,
    TrackedValue,
)

__version__ = "0.1.0"
__all__ = [
    "BatchOperator",
    "Cluster",
    "Context",
    "Namespace",
    "Operator",
    "SessionWindows",
    "SlidingWindows",
    "StateflowError",
    "StreamClient",
    "TrackedCounter",
    "TrackedList",
    "TrackedMap",
    "TrackedReducing",
    "TrackedSet",
    "TrackedValue",
    "TumblingWindows",
    "Window",
    "state",
]
