"""stateflow: keyed, stateful stream operators for PySpark whose state can move while the pipeline runs."""

from stateflow import state
from stateflow.client import Cluster, StreamClient
from stateflow.errors import StateflowError
from stateflow.release import VERSION
from stateflow.runtime.operator import BatchOperator, Context, Operator
from stateflow.runtime.timers import Timer, TimerColumns
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

__version__ = VERSION
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
    "Timer",
    "TimerColumns",
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
