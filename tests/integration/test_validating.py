"""Invariants that a replica's process checks, and the error when one does not hold."""

from __future__ import annotations

import pytest

from stateflow.errors import InvariantBroken
from stateflow.testing import LocalCluster
from tests.integration.operators import Corrupting

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("corrupted", "words"),
    [
        ("epoch", r"an invariant is broken in OWNED: the processor has the owned epoch"),
        ("directory", r"an invariant is broken in OWNED: an owned or sealed partition is on disk"),
        ("lost", r"an invariant is broken in OWNED: a lost partition is not served"),
    ],
)
def test_a_corrupted_partition_is_caught_behind_the_batch(corrupted: str, words: str) -> None:
    with LocalCluster(Corrupting, sites={"edge": 1}, partitions=1) as cluster:
        stream = cluster.stream("Corrupting", "s")
        stream.send([{"k": "a", "what": ""}])
        with pytest.raises(InvariantBroken, match=words) as caught:
            stream.send([{"k": "a", "what": corrupted}])
    assert caught.value.where["partition"] == "Corrupting/0"
    assert str(caught.value).endswith("a bug in stateflow, please report it with this line")


def test_nobody_looks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATEFLOW_DEBUG_VALIDATE")
    with LocalCluster(Corrupting, sites={"edge": 1}, partitions=1) as cluster:
        stream = cluster.stream("Corrupting", "s")
        stream.send([{"k": "a", "what": "epoch"}])
        (row,) = stream.send([{"k": "a", "what": ""}])
    assert row["n"] == 2
