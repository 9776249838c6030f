"""Chooses the class of tracked objects for a declaration."""

from __future__ import annotations

from typing import Any

from stateflow.state.declare import Declaration
from stateflow.state.expiring import (
    CanonicalExpiringMap,
    CanonicalExpiringSet,
    ExpiringCounter,
    ExpiringList,
    ExpiringMap,
    ExpiringReducing,
    ExpiringSet,
    ExpiringValue,
)
from stateflow.state.tracked_list import TrackedList
from stateflow.state.tracked_map import CanonicalTrackedMap, TrackedMap
from stateflow.state.tracked_reducing import MutableTrackedReducing, TrackedCounter, TrackedReducing
from stateflow.state.tracked_set import CanonicalTrackedSet, TrackedSet
from stateflow.state.tracked_value import MutableTrackedValue, TrackedValue


def tracked_class(declaration: Declaration) -> Any:
    expires, mutable = declaration.ttl is not None, declaration.coder.mutable
    canonical = declaration.key_coder is not None and not declaration.key_coder.python_equality
    match declaration.kind:
        case "value":
            return ExpiringValue if expires else MutableTrackedValue if mutable else TrackedValue
        case "reducing":
            return ExpiringReducing if expires else MutableTrackedReducing if mutable else TrackedReducing
        case "counter":
            return ExpiringCounter if expires else TrackedCounter
        case "list":
            return ExpiringList if expires else TrackedList
        case "map":
            if canonical:
                return CanonicalExpiringMap if expires else CanonicalTrackedMap
            return ExpiringMap if expires else TrackedMap
        case "set":
            if canonical:
                return CanonicalExpiringSet if expires else CanonicalTrackedSet
            return ExpiringSet if expires else TrackedSet
