"""Planned work in the ledger: records of earlier controller versions are read, and written in the same form."""

from __future__ import annotations

from typing import Any

import pytest

from reconfig.decisions.plan import (
    Asked,
    Cause,
    Planned,
    PlannedMove,
    PlannedRestore,
    PlannedStandby,
    PlannedTakeover,
    StrategyName,
    planned_of,
    restore_of,
    to_payload,
)
from stateflow.types import How, MoveOptions, PartitionId

P = PartitionId("Op", 3)
COMMON = {"operator": "Op", "partition": 3, "source": "a", "target": "b", "epoch": 4}
NONE = {"max_pause_ms": 0.0, "patience_s": 0.0, "bandwidth_max": 0.0, "how": "", "standby_move": "", "asked": ""}

OPTIONS = {
    "max_pause_ms": 20.0,
    "max_bandwidth": 4e6,
    "patience_s": 0.0,
    "strategy": "auto",
    "order": "hot-first",
    "limit": 0.0,
    "per_node": 0.0,
    "per_link": 0.0,
}
UNSAID = {"max_pause_ms": 0.0, "max_bandwidth": 0.0}
FORMS: dict[str, tuple[dict[str, Any], Planned]] = {
    "move": (
        COMMON
        | {"granted_epoch": 5, "max_pause_ms": 20.0, "strategy": "fluid", "patience_s": 7.0, "bandwidth_max": 1e6}
        | {"kind": "drain", "how": "", "standby_move": "", "asked": "edge", "round": 2, "options": OPTIONS},
        PlannedMove(
            "r",
            P,
            "a",
            "b",
            4,
            5,
            StrategyName.FLUID,
            MoveOptions(20.0, 4e6, order="hot-first"),
            7.0,
            1e6,
            Cause.DRAIN,
            Asked("edge"),
            2,
        ),
    ),
    "drain": (
        COMMON
        | NONE
        | {"granted_epoch": 5, "strategy": "fluid", "kind": "drain", "round": 0, "options": OPTIONS | UNSAID}
        | {"leaving": "a", "only": ["b", "c"], "reason": "so"},
        PlannedMove(
            *("r", P, "a", "b", 4, 5, StrategyName.FLUID),
            MoveOptions(order="hot-first"),
            cause=Cause.DRAIN,
            asked=Asked(leaving="a", only=frozenset("cb")),
            reason="so",
        ),
    ),
    "standby": (
        COMMON | NONE | {"granted_epoch": 0, "strategy": "standby", "kind": "standby"},
        PlannedStandby("r", P, "a", "b", 4),
    ),
    "takeover": (
        COMMON
        | NONE
        | {"granted_epoch": 5, "strategy": "failover", "kind": "failover", "how": "STANDBY", "standby_move": "s-3"},
        PlannedTakeover("r", P, "a", "b", 4, 5, How.STANDBY, "s-3"),
    ),
}


@pytest.mark.parametrize(("payload", "planned"), FORMS.values(), ids=FORMS)
def test_each_form_is_read_and_written(payload: dict[str, Any], planned: Planned) -> None:
    assert planned_of("move/r/3", payload) == planned
    assert type(planned_of("move/r/3", payload)) is type(planned)
    assert to_payload(planned) == payload


def test_what_earlier_versions_left_out() -> None:
    payload = COMMON | {"granted_epoch": 5, "max_pause_ms": 20.0, "strategy": "warm-up"}
    options = MoveOptions(20.0, strategy="warm-up")
    assert planned_of("move/r/3", payload) == PlannedMove("r", P, "a", "b", 4, 5, StrategyName.WARM_UP, options)
    late = {name: value for name, value in FORMS["move"][0].items() if name not in ("round", "options")}
    options = MoveOptions(20.0, 1e6, 7.0, "fluid")  # options as far as they follow from the record
    assert planned_of("move/r/3", late) == PlannedMove(
        "r", P, "a", "b", 4, 5, StrategyName.FLUID, options, 7.0, 1e6, Cause.DRAIN, Asked("edge")
    )


def test_a_restore() -> None:
    payload = {"operator": "Op", "partition": 3, "owner": "a", "target": "b", "epoch": 5}
    said = {"url": "file:///c", "savepoint": "s", "source": "x", "batch": 9}
    restore = PlannedRestore("r", P, "a", "b", 5, "file:///c", "s", "x", 9)
    assert restore_of("restore/r/3", payload | said) == restore
    assert to_payload(restore) == payload | said
    assert restore_of("restore/r/3", payload) == PlannedRestore("r", P, "a", "b", 5)
    stops = PlannedRestore("r", P, "a", "b", 5, stop_sources=True)
    assert to_payload(stops) == to_payload(PlannedRestore("r", P, "a", "b", 5)), "release 0.1 refuses more fields"
    assert restore_of("restore/r/3", payload | {"stop_sources": True}) == stops, "as builds before recorded it"
