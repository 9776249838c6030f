"""A savepoint follows partitions that move, and time in which others are uploaded does not count as waiting."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.client import Cluster, cluster
from stateflow.clock import ManualClock
from stateflow.errors import Unavailable
from stateflow.reports import CheckpointReport, Taken
from stateflow.router import backoff


class Controller:
    """Takes checkpoints of four partitions, 5 s each. Partition 1 is served from the call ``served_at`` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, served_at: int) -> None:
        self.now, self.served_at, self.asked = ManualClock(0), served_at, list[list[int]]()
        monkeypatch.setattr(cluster, "backoff", lambda: backoff(clock=self.now))
        monkeypatch.setattr(cluster, "sleep", self.now.advance)
        self.cluster = Cluster("127.0.0.1:1")
        spec = SimpleNamespace(partitions=4)
        client: Any = SimpleNamespace(deployment=lambda _: SimpleNamespace(spec=spec), checkpoint=self.checkpoint)
        self.cluster._client = client

    def checkpoint(self, operator: str, savepoint: str, partitions: Collection[int]) -> Taken:
        self.asked.append(list(partitions))
        taken = tuple(each for each in partitions if each != 1 or len(self.asked) >= self.served_at)
        self.now.advance(5 * len(taken))
        return Taken(CheckpointReport(len(taken), 1, 1, 5.0 * len(taken), "file:///cp"), taken)


def test_time_in_which_other_partitions_are_uploaded_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A savepoint that took longer than 8 s failed at a partition between two owners."""
    controller = Controller(monkeypatch, served_at=4)
    assert controller.cluster.savepoint("before", "Op").partitions == 4
    assert controller.asked == [[0, 1, 2, 3], [1], [1], [1]]


def test_a_partition_that_nobody_serves_ends_the_savepoint(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(monkeypatch, served_at=1000)
    with pytest.raises(Unavailable, match=r"no replica serves partitions \[1\]"):
        controller.cluster.savepoint("before", "Op")
    assert len(controller.asked) > 3
