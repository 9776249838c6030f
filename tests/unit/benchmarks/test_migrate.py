"""M1 to M8: a failed move costs its own run, and the record says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import migrate, migrate_keys
from benchmarks.record import Correctness, Record
from stateflow.client import MoveReport
from stateflow.errors import BudgetUnreachable, StateflowError, Unavailable

ERRORS = [RuntimeError("a move failed"), Unavailable("no replica"), TimeoutError("a sender did not end")]


def failing(error: Exception | None, result: Callable[[], Any]) -> Callable[..., Any]:
    """Returns a function whose second call raises ``error``."""
    calls = 0

    def call(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and error is not None:
            raise error
        migrate._CHECKED.append(Correctness(0, 0, 0, True))
        return result()

    return call


def run(experiment: str) -> Record:
    return migrate.run(experiment, quick=True, seed=1)


@pytest.mark.parametrize("error", [None, *ERRORS])
@pytest.mark.parametrize(("experiment", "runs"), [("M1", 12), ("M2", 9)])
def test_a_failed_run_leaves_the_figures_of_the_others_and_no_target_that_is_met(
    experiment: str, runs: int, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_one", failing(error, lambda: {"pause_ms": 5.0}))
    record = run(experiment)
    assert record.complete is (error is None)
    assert len(record.failures) == (error is not None)
    assert record.targets, "they are named, whatever failed"
    assert all((target.value is None) is (error is not None) for target in record.targets)
    pauses = [each for by in record.figures["pause_ms"].values() for of in by.values() for each in of["values"]]
    assert pauses == [5.0] * (runs - (error is not None))
    monkeypatch.setattr(migrate, "_one", failing(None, lambda: {"pause_ms": 5.0}))
    assert run(experiment).complete, "failures belong to one experiment"


def test_a_failed_run_of_m3(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Correctness(0, 0, 0, True)

    def one(partitions: int, keys: int, strategy: str, seed: int) -> tuple[dict[str, Any], Correctness]:
        if strategy == "warm-up":
            raise Unavailable("no replica")
        return {
            "partitions": partitions,
            "keys": keys,
            "strategy": strategy,
            "latency_ms_during": {"max": 9.0},
            "reconfiguration_s": 1.0,
        }, correct

    monkeypatch.setattr(migrate_keys, "one", one)
    record = run("M3")
    assert [str(Unavailable("no replica"))] == record.failures
    assert [target.value for target in record.targets] == [None]
    assert len(record.figures["runs"]) == 3


@pytest.mark.parametrize("experiment", ["M6", "M7", "M8"])
def test_a_cluster_that_cannot_be_had(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def rig(*_: Any) -> Iterator[Any]:
        raise Unavailable("no replica")
        yield

    monkeypatch.setattr(migrate, "rig", rig)
    record = run(experiment)
    assert set(record.failures) == {str(Unavailable("no replica"))}
    assert record.targets
    assert all(target.value is None for target in record.targets)


def report(fault: StateflowError | None) -> Any:
    moves = [
        MoveReport("m", 0, "a", "b", "COMPLETED", "warm-up", pause_ms=4.0, predicted_pause_ms=5.0),
        MoveReport("n", 1, "a", "b", "ROLLED_BACK", "warm-up", fault=fault),
    ]
    return SimpleNamespace(state="FAILED", moves=moves)


def test_only_a_budget_out_of_reach_is_a_refusal() -> None:
    assert migrate._refused(report(BudgetUnreachable("25 ms"))) == [1]
    for other in (None, Unavailable("no replica")):
        with pytest.raises(RuntimeError, match="partition 1 to b ended ROLLED_BACK"):
            migrate._refused(report(other))


@pytest.mark.parametrize(("fault", "refused"), [(BudgetUnreachable("25 ms"), 4), (Unavailable("no replica"), 0)])
def test_m8_counts_refusals_by_their_cause(
    fault: StateflowError, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(state="COMPLETED", moves=report(None).moves[:1])

    def move(operator: str, partitions: list[int], to: str, **options: Any) -> Any:
        """Only moves with a budget fail, and the moves of what was left behind have none."""
        return SimpleNamespace(wait=lambda: report(fault) if "max_pause_ms" in options else done)

    @contextmanager
    def rig(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(migrate=move), None

    monkeypatch.setattr(migrate, "rig", rig)
    record = run("M8")
    assert sum(record.figures["refused"].values()) == 2 * refused
    assert len(record.failures) == (0 if refused else 2), "one for each budget's cluster"
    assert all((target.value is None) is not bool(refused) for target in record.targets)
