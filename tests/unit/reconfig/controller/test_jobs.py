"""Due jobs, one of which cannot be begun or carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.jobs import Jobs
from reconfig.decisions.jobs import Affinity, Do, Job, Node, RunState
from stateflow.errors import InvalidArgument
from stateflow.ledger import Ledger
from stateflow.schedule import Schedule
from tests.writing import Written, write

S = 1_000_000
NIGHTLY = Job("nightly", Schedule.parse("every 60"), Do.CHECKPOINT)


class Book:
    """Jobs over a ledger, whose records are written at once."""

    def __init__(self, ledger: Ledger, deployed: Sequence[str] = ()) -> None:
        self.cluster = Written(ledger)
        self.cluster.deployed = dict.fromkeys(deployed)  # type: ignore[arg-type]
        self.refused: set[str] = set()

        async def record(method: Any, *arguments: Any) -> Any:
            if method is steps.begin_run and arguments[0] in self.refused:
                raise ValueError("who knows")
            return write(self.cluster, method, *arguments)

        self.carried_on: list[Any] = []
        context: Any = SimpleNamespace(
            cluster=self.cluster, clock=ledger.clock, record=record, alive=dict, spawn=self.carried_on.append
        )
        nothing: Any = None
        self.jobs = Jobs(context, nothing, nothing, nothing, nothing, Node("ctl"))
        self.jobs._carry_on = lambda run: self.carried_on.append(run.job)  # type: ignore[method-assign]


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        yield ledger


def test_a_job_that_cannot_be_begun_holds_up_none_behind_it(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    book = Book(ledger)
    for name in ("a", "b", "c"):
        write(
            book.cluster, steps.define_job, name, Job(name, Schedule.parse("once 2020-01-01T00:00:00Z"), Do.CHECKPOINT)
        )
    book.refused = {"b"}
    for _ in range(3):
        asyncio.run(book.jobs._look())
    assert book.carried_on == ["a", "c"]
    assert [line.getMessage().partition(";")[0] for line in caplog.records] == [
        "job b not started: ValueError: who knows"
    ]


def test_what_is_refused_is_not_recorded(ledger: Ledger) -> None:
    book = Book(ledger)
    with pytest.raises(InvalidArgument, match="scheduled time has passed"):
        asyncio.run(book.jobs.create(Job("late", Schedule.parse("once 1970-01-01T00:00:00Z"), Do.CHECKPOINT)))
    assert book.jobs.reports() == []
    assert list(ledger.records()) == []


def test_an_operator_whose_stage_fails_with_a_bug_holds_up_none_behind_it(ledger: Ledger) -> None:
    book = Book(ledger, ("A", "B"))
    job = Job("nightly", Schedule.parse("every 60"), Do.CHECKPOINT)
    done: list[str] = []

    async def do(job: Job, operator: str, mark: str, nodes: Any) -> list[str]:
        done.append(operator)
        if operator == "A":
            raise ValueError("who knows")
        return []

    book.jobs._do = do  # type: ignore[method-assign]

    async def scenario() -> tuple[RunState, str]:
        await book.jobs.create(job)
        write(book.cluster, steps.begin_run, "nightly", 7, ["A", "B"])
        state, _, note = await book.jobs._done(book.cluster.jobs.runs["nightly"][-1])
        return state, note

    state, note = asyncio.run(scenario())
    assert (done, state) == (["A", "B"], RunState.FAILED)
    assert "A: ValueError: who knows" in note


def test_a_job_runs_within_its_period_after_the_clock_was_put_back(ledger: Ledger) -> None:
    book = Book(ledger)
    write(book.cluster, steps.define_job, "a", Job("a", Schedule.parse("every 60"), Do.CHECKPOINT))
    corrected_us = book.cluster.jobs.there["a"].since_us - 3600 * S
    for later_s, begun in ((0, []), (59, []), (61, ["a"]), (62, ["a"])):
        clock: Any = SimpleNamespace(now_us=lambda later_s=later_s: corrected_us + later_s * S)
        book.jobs._context.clock = clock  # type: ignore[misc]
        asyncio.run(book.jobs._look())
        assert book.carried_on == begun


def test_a_run_gives_a_soft_affinity_up_in_time_after_the_clock_was_put_back(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run waited for as long as the clock had been ahead, in addition."""
    book = Book(ledger)
    write(book.cluster, steps.define_job, "nightly", NIGHTLY)
    write(book.cluster, steps.begin_run, "nightly", 7)
    run = book.cluster.jobs.runs["nightly"][-1]
    times = iter([run.began_us - 3600 * S + later_s * S for later_s in (0, 4, 5)])
    book.jobs._context.clock = SimpleNamespace(now_us=lambda: next(times))  # type: ignore[misc, assignment]

    async def sleep(_: float) -> None: ...

    monkeypatch.setattr(asyncio, "sleep", sleep)
    affinity = Affinity.parse("soft:5 site nowhere")
    found = asyncio.run(book.jobs._waited_for(run, affinity, lambda: [Node("n")], "nodes"))
    assert found.nodes == {"n"}
    assert not list(times)


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "made anew"])
def test_a_run_begins_nothing_once_its_job_is_deleted(ledger: Ledger, again: bool) -> None:
    """The next stages were carried out, by the definition of a new job of the same name."""
    book = Book(ledger, ("A", "B", "C"))
    done: list[str] = []

    async def do(job: Job, operator: str, mark: str, nodes: Any) -> list[str]:
        done.append(operator)
        write(book.cluster, steps.define_job, "nightly", None)
        if again:
            write(book.cluster, steps.define_job, "nightly", replace(NIGHTLY, do=Do.REBALANCE))
        return []

    book.jobs._do = do  # type: ignore[method-assign]
    write(book.cluster, steps.define_job, "nightly", NIGHTLY)
    write(book.cluster, steps.begin_run, "nightly", 7, ["A", "B", "C"])
    run = book.cluster.jobs.runs["nightly"][-1]
    state, _, note = asyncio.run(book.jobs._done(run))
    assert (done, state) == (["A"], RunState.FAILED)
    assert note == "failed: B: the job was deleted before it began, C: the job was deleted before it began"
    book.cluster = Written.read(ledger)  # the next leader
    book.cluster.deployed = dict.fromkeys("ABC")  # type: ignore[arg-type]
    book.jobs._book = book.cluster.jobs  # type: ignore[misc]
    assert asyncio.run(book.jobs._done(book.cluster.jobs.run(run.id)))[0] is RunState.FAILED
    assert done == ["A"]


def test_moves_that_a_run_had_begun_are_its_own_though_its_job_is_deleted(ledger: Ledger) -> None:
    """The next leader said that the run had had nothing to do."""
    book = Book(ledger, ("A", "B"))
    write(book.cluster, steps.define_job, "nightly", NIGHTLY)
    write(book.cluster, steps.begin_run, "nightly", 7, ["A", "B"])
    write(book.cluster, steps.define_job, "nightly", None)

    async def completed(_: str) -> bool:
        return True

    book.jobs._begun = lambda _, operator: ("r1",) if operator == "A" else ()  # type: ignore[method-assign]
    book.jobs._completed = completed  # type: ignore[method-assign]
    found = asyncio.run(book.jobs._done(book.cluster.jobs.runs["nightly"][-1]))
    assert found == (RunState.FAILED, ["r1"], "failed: B: the job was deleted before it began")


def test_a_run_that_waits_ends_when_its_job_is_deleted(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted job waited for as long as it took, and then moved partitions."""
    book = Book(ledger, ("A",))
    job = replace(NIGHTLY, coordinator=Affinity.parse("hard site nowhere"))
    write(book.cluster, steps.define_job, "nightly", job)
    write(book.cluster, steps.begin_run, "nightly", 7, ["A"])

    async def sleep(_: float) -> None:
        assert book.jobs._waits
        write(book.cluster, steps.define_job, "nightly", None)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    found = asyncio.run(book.jobs._done(book.cluster.jobs.runs["nightly"][-1]))
    assert found == (RunState.FAILED, (), "the job was deleted before it began")
