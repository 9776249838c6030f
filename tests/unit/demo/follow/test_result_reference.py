"""The second computation, against rows counted by hand; it finds what differs."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from stateflow.demo.follow.result import FACTS, compare, expected_outputs, expected_state, state_facts


def row(seq: int, vehicle: str, way: str, site: str, metres: int) -> dict[str, Any]:
    return {"seq": seq, "vehicle": vehicle, "way": way, "site": site, "x": 0, "y": 0, "metres": metres}


ROWS = [
    row(3, "a", "gateway", "west", 7),
    row(0, "a", "telemetry", "east", 5),
    row(1, "b", "telemetry", "east", 1),
    row(2, "a", "telemetry", "west", 10),
]
OUTPUTS = [
    (0, "a", "telemetry", 1, 5),
    (1, "b", "telemetry", 1, 1),
    (2, "a", "telemetry", 2, 15),
    (3, "a", "gateway", 1, 7),
]


def test_outputs_count_each_way_by_itself() -> None:
    assert list(expected_outputs(ROWS).itertuples(index=False, name=None)) == OUTPUTS


def test_state_is_what_was_told_in_any_order() -> None:
    told = [("a", "gateway", 1), ("a", "telemetry", 2), ("b", "telemetry", 1)]
    metres = [("a", "telemetry", 15), ("a", "gateway", 7), ("b", "telemetry", 1)]
    sites = [("a", "west"), ("b", "east"), ("a", "east")]
    found = state_facts(
        [dict(zip(("key", "map_key", "value"), each, strict=True)) for each in told],
        [dict(zip(("key", "map_key", "value"), each, strict=True)) for each in metres],
        [dict(zip(("key", "map_key"), each, strict=True)) for each in sites],
    )
    comparison = compare(expected_state(ROWS), found, FACTS[:2])
    assert comparison.equal
    assert comparison.compared == 8
    found.loc[found["fact"] == "sites", "value"] = "east"
    comparison = compare(expected_state(ROWS), found, FACTS[:2])
    assert comparison.differences == ["vehicle a fact sites: value: expected east+west, got east"]


def test_an_empty_state_is_all_missing() -> None:
    comparison = compare(expected_state(ROWS), state_facts([], [], []), FACTS[:2])
    assert (comparison.equal, comparison.compared, comparison.missing) == (False, 0, 8)


@pytest.mark.parametrize(
    ("found", "counts", "said"),
    [
        (OUTPUTS[::-1], (4, 0, 0, 0), []),
        (OUTPUTS[1:], (3, 1, 0, 0), ["seq 0: expected, absent"]),
        ([*OUTPUTS, OUTPUTS[2]], (4, 0, 1, 0), ["seq 2: duplicated"]),
        ([*OUTPUTS, (9, "z", "gateway", 1, 1)], (4, 0, 1, 0), ["seq 9: not expected, present"]),
        (
            [*OUTPUTS[:3], (3, "a", "gateway", 2, 8)],
            (4, 0, 0, 1),
            ["seq 3: told: expected 1, got 2", "seq 3: metres: expected 7, got 8"],
        ),
        ([], (0, 4, 0, 0), [f"seq {seq}: expected, absent" for seq in range(4)]),
    ],
)
def test_what_differs_is_found(found: list[Any], counts: tuple[int, ...], said: list[str]) -> None:
    wanted = expected_outputs(ROWS)
    comparison = compare(wanted, pd.DataFrame(found, columns=wanted.columns), ["seq"])
    assert (comparison.compared, comparison.missing, comparison.extra, comparison.different) == counts
    assert comparison.differences == said
    assert comparison.equal is (counts == (4, 0, 0, 0))
