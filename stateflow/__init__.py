"""stateflow: keyed, stateful stream operators for PySpark whose state can move while the pipeline runs."""

import importlib
from typing import TYPE_CHECKING, Any

from stateflow.release import VERSION

if TYPE_CHECKING:
    from stateflow import state
    from stateflow.client import Cluster, StreamClient
    from stateflow.errors import StateflowError
    from stateflow.operator.operator import BatchOperator, Context, Operator
    from stateflow.operator.timers import SessionWindows, SlidingWindows, Timer, TimerColumns, TumblingWindows, Window
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
#: module → its public names; imported at first use, as a command needs few of them
_PLACES = {
    "stateflow.client": ("Cluster", "StreamClient"),
    "stateflow.errors": ("StateflowError",),
    "stateflow.operator.operator": ("BatchOperator", "Context", "Operator"),
    "stateflow.operator.timers": (
        *("SessionWindows", "SlidingWindows", "Timer", "TimerColumns", "TumblingWindows", "Window"),
    ),
    "stateflow.state": (
        *("Namespace", "TrackedCounter", "TrackedList", "TrackedMap", "TrackedReducing", "TrackedSet", "TrackedValue"),
    ),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "state":
        return importlib.import_module("stateflow.state")
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'stateflow' has no attribute {name!r}")
    found = getattr(importlib.import_module(_PLACE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
