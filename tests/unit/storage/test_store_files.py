"""Open files of a process: the limits of each database."""

from __future__ import annotations

import pytest

from stateflow.errors import TooFewFiles
from stateflow.storage.store import (
    PER_DATABASE,
    RESERVED,
    RUNS_MAX,
    RUNS_NEW,
    TABLES_MAX,
    TABLES_MIN,
    file_limits,
)


def test_with_enough_of_them_nothing_is_held_back() -> None:
    assert file_limits(128, 20_000) == file_limits(1, 1024)
    assert file_limits(1, 1024).tables == TABLES_MAX


def test_the_usual_limit_is_enough_for_the_usual_partitions() -> None:
    """The usual limit is enough for the usual partitions; sorted files are merged at once then."""
    assert file_limits(128, 1024).runs == file_limits(128, 1024).tables == 1


@pytest.mark.parametrize("limit", [256, 1024, 4096, 65_536])
def test_what_is_promised_fits(limit: int) -> None:
    for databases in range(1, 5000, 7):
        if databases * (PER_DATABASE + 1) + RESERVED > limit:
            with pytest.raises(TooFewFiles, match=f" {databases} partitions need about .*, the limit is {limit}: "):
                file_limits(databases, limit)
            continue
        given = file_limits(databases, limit)
        assert databases * (PER_DATABASE + given.runs) + RESERVED <= limit
        assert 1 <= given.runs <= given.tables
        assert given.runs == 1 or given.runs + RUNS_NEW <= given.tables, "merges and flushes have files open, too"


def test_what_a_refusal_asks_for_is_enough_at_any_load() -> None:
    """RocksDB keeps ten sorted files of a database open, however few it is told to keep."""
    with pytest.raises(TooFewFiles, match=f" {2000 * (PER_DATABASE + TABLES_MIN) + RESERVED} open files"):
        file_limits(2000, 1024)
    assert file_limits(2000, 2000 * (PER_DATABASE + TABLES_MIN) + RESERVED).runs == RUNS_MAX
