"""The comparison that benchmarks rely on, against a real cluster as it is read today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import Ledger
from benchmarks.operators import CountSum
from stateflow.testing import LocalCluster

pytestmark = pytest.mark.processes


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"k": number % 7, "v": number * 0.25} for number in range(100)]


def test_the_state_of_a_cluster_is_compared(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    truth = Ledger()
    with LocalCluster(CountSum, data_dir=tmp_path, partitions=4) as local:
        with local.stream("CountSum", source="s") as stream:
            truth.apply(rows, stream.send(rows))
        assert (truth.lost, truth.duplicated) == (0, 0)
        assert truth.equals(local.cluster, "CountSum")
        truth.apply(rows[:1], None)  # a row that the cluster was not given
        assert not truth.equals(local.cluster, "CountSum")
