"""Origins of rows, counted as they arrive."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from stateflow.partition.slices import SITES_MAX, Origins, Traffic


def rows(sites: list[str | None], kind: Any = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": list(range(len(sites))), "site": pa.array(sites, kind or pa.string())})


def test_each_row_says_it_for_itself() -> None:
    origins = Origins(rows(["a", "b", None, "a", "", "b", "b"]), "site")
    assert origins.of(0, 7) == {"a": 2, "b": 3}
    assert origins.of(0, 3) == {"a": 1, "b": 1}
    assert origins.of(2, 3) == {}
    assert origins.of(4, 4) == {}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parts_add_up_to_what_a_loop_counts(kind: Any) -> None:
    chance = random.Random(3)
    said = [chance.choice(["a", "b", "c-1", "", None, "no name"]) for _ in range(500)]
    origins = Origins(rows(said, kind), "site")
    bounds = [0, *sorted(chance.sample(range(500), 9)), 500]
    for start, stop in pairwise(bounds):
        assert origins.of(start, stop) == Counter(site for site in said[start:stop] if site in {"a", "b", "c-1"})


def test_a_slice_is_counted_as_what_it_is() -> None:
    origins = Origins(rows(["a", "b", "b", "c"]).slice(1, 2), "site")
    assert origins.of(0, 2) == {"b": 2}


@pytest.mark.parametrize("column", ["n", "nothing"])
def test_a_column_that_says_no_sites_counts_for_none(column: str) -> None:
    assert Origins(rows(["a"]), column).of(0, 1) == {}


def test_a_column_of_anything_is_not_looked_at_for_ever() -> None:
    assert len(Origins(rows([f"s{number}" for number in range(5000)]), "site").of(0, 5000)) == SITES_MAX


def test_what_no_name_is_never_reaches_who_asks() -> None:
    """An invalid name of an origin never reaches a reader, as a reply that names it would be refused."""
    assert Origins(rows(["../x", "a b", "x" * 500, "ok"]), "site").of(0, 4) == {"ok": 1}


def test_traffic_adds_up() -> None:
    traffic = Traffic()
    traffic.came(3, 10.0, "a")
    traffic.came(4, 10.0, "")
    traffic.came_from({"a": 1, "b": 2})
    assert (traffic.rows, traffic.bytes, traffic.origins) == (7, 70.0, {"a": 4, "b": 2})
    traffic.came_from({f"s{number}": 1 for number in range(2 * SITES_MAX)})
    assert len(traffic.origins) == SITES_MAX
