"""Targets for Prometheus: one reachable host and port for each source of metrics."""

from __future__ import annotations

import json

import pytest

from stateflow.metrics.figures import Target
from stateflow.metrics.page import answer


@pytest.mark.parametrize(
    ("bound", "asked", "told"),
    [
        ("10.0.0.5:4", "gw-1:9072", "10.0.0.5:4"),
        ("[::1]:4", "gw-1:9072", "[::1]:4"),
        ("0.0.0.0:4", "gw-1:9072", "gw-1:4"),
        ("0.0.0.0:4", "gw-1", "gw-1:4"),
        ("[::]:4", "[fd00::1]:9072", "[fd00::1]:4"),
        ("[::]:4", "[fd00::1]", "[fd00::1]:4"),
    ],
)
def test_a_target_is_where_who_asks_reaches_it(bound: str, asked: str, told: str) -> None:
    assert json.loads(answer([Target(bound, {"replica": "r"})], asked)) == [
        {"targets": [told], "labels": {"replica": "r"}}
    ]


def test_of_none() -> None:
    assert answer([], "gw-1") == b"[]"
