"""What each database may have of the open files of a process."""

from __future__ import annotations

import pytest

from stateflow.errors import TooFewFiles
from stateflow.storage.files import PER_DATABASE, RESERVED, TABLES_MAX, share


def test_with_enough_of_them_nothing_is_held_back() -> None:
    assert share(128, 20_000) == share(1, 1024)
    assert share(1, 1024).tables == TABLES_MAX


def test_the_usual_limit_is_enough_for_the_usual_partitions() -> None:
    """Sorted files are merged at once then."""
    assert share(128, 1024).runs == share(128, 1024).tables == 1


@pytest.mark.parametrize("limit", [256, 1024, 4096, 65_536])
def test_what_is_promised_fits(limit: int) -> None:
    for databases in range(1, 5000, 7):
        if databases * (PER_DATABASE + 1) + RESERVED > limit:
            with pytest.raises(TooFewFiles, match=f" {databases} partitions need about .*, the limit is {limit}: "):
                share(databases, limit)
            continue
        given = share(databases, limit)
        assert databases * (PER_DATABASE + given.runs) + RESERVED <= limit
        assert 1 <= given.runs <= given.tables
