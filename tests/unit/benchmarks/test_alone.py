"""ALONE: without a takeover beside the edge, nothing shows that the edge was cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import alone
from benchmarks.record import Correctness


class Sites:
    """Two sites that are never really cut off. ``beside`` owns the partitions of the operator with automatic failover
    after the cut."""

    beside = ""

    def __init__(self, folder: Any) -> None:
        nothing = lambda *_, **__: None  # noqa: E731
        self.cluster = SimpleNamespace(deploy=nothing, standby=nothing, stream=nothing)

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *_: object) -> None: ...

    def told(self, operator: str) -> Any:
        owner = self.beside if operator == alone.OTHER else alone.EDGE
        return SimpleNamespace(owners=(owner,), epochs=(1,), unserved=())

    def cut(self) -> None: ...

    def heal(self) -> None: ...

    def until(self, load: Any, what: str, holds: Any) -> float:
        return 0.0


class Load:
    """A load that needs no time."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> None: ...


@pytest.mark.parametrize(("beside", "cut"), [("cloud-0", True), (alone.EDGE, False)])
def test_an_edge_beside_which_nothing_takes_over_was_not_cut_off(
    beside: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sites, "beside", beside)
    monkeypatch.setattr(alone, "Sites", Sites)
    monkeypatch.setattr(alone, "Load", Load)
    monkeypatch.setattr(alone, "correctness_of", lambda *_: Correctness(0, 0, 0, True))
    record = alone.run("ALONE", quick=True, seed=1)
    assert record.complete is cut
    assert record.figures["failed_over_beside"] is cut
    assert [line.rpartition(": ")[2] for line in record.failures] == ([] if cut else ["the edge was not cut off"])
    assert record.targets[0].met is cut
