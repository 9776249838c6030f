"""SECURE: only moves that completed have a pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import secure
from benchmarks.record import Correctness
from stateflow.client import MoveReport


class Load:
    """A load whose batches take a millisecond or two."""

    began_s = 0.0
    sources = (SimpleNamespace(latencies=SimpleNamespace(between=lambda *_: [1.0, 2.0])),)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> None: ...


def side(state: str, pause_ms: float) -> secure.Side:
    """Returns a side whose moves end in this state."""
    move = MoveReport("m", 0, "a", "b", state, "warm-up", pause_ms=pause_ms)
    report = SimpleNamespace(state=state, moves=[move] * 4)
    made: Any = object.__new__(secure.Side)
    made.local = SimpleNamespace(certificates=None, migrate=lambda *_: SimpleNamespace(wait=lambda: report))
    made.load = lambda _: Load()
    return made  # type: ignore[no-any-return]


def test_a_move_that_fails_is_not_a_pause_of_0_ms() -> None:
    assert side("COMPLETED", 4.0).paced(10.0, 0.0, 4)["pause_ms"] == 4.0
    with pytest.raises(RuntimeError, match="partition 0 to b ended FAILED"):
        side("FAILED", 0.0).paced(10.0, 0.0, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_with_a_move_that_fails_has_a_failure_and_no_targets_that_are_met(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0

    class Side:
        def __init__(self, local: Any, seed: int) -> None: ...

        def fastest(self, seconds: float) -> float:
            return 100.0

        def paced(self, rate: float, seconds: float, moves: int) -> dict[str, float]:
            nonlocal turns
            turns += 1
            if fails and turns == 4:
                raise RuntimeError("the move of partition 0 to b ended FAILED")
            return {"p50_ms": 1.0, "p99_ms": 2.0, "pause_ms": 3.0}

        def correctness(self) -> Correctness:
            return Correctness(0, 0, 0, True)

    class Local:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Local:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(secure, "Side", Side)
    monkeypatch.setattr(secure, "LocalCluster", Local)
    record = secure.run("SECURE", quick=True, seed=1)
    assert record.complete is not fails
    assert [target.value for target in record.targets] == ([None] * 3 if fails else [1.0] * 3)
    assert record.figures["plain"]["pause_ms"]["values"] == [3.0] * (2 if fails else 6), "what was measured stays"
