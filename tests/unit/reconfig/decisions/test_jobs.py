"""Jobs: which are due, and what is left of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.history import entry
from reconfig.decisions.jobs import Affinity, Do, Earliest, Job, Run, RunState, due, next_at_us, next_us, read_job
from reconfig.decisions.policies import PolicyName
from stateflow.errors import InvalidArgument
from stateflow.ledger import Ledger, RecordState
from stateflow.reports import JobReport, JobStage
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import message_of, value_of
from stateflow.schedule import Schedule
from tests.writing import Written, write

S = 1_000_000
EVERY = Job("nightly", Schedule.parse("every 60"), Do.CHECKPOINT)


def ran(at_us: int, ended_us: int, state: RunState = RunState.PROCESSED) -> Run:
    return Run("nightly", at_us, at_us, state, ended_us)


def test_a_clock_that_is_behind_runs_for_no_time_again() -> None:
    runs = [ran(1000 * S, 1001 * S)]
    assert due(EVERY, runs, 1030 * S) is None
    assert due(EVERY, runs, 1061 * S) is not None
    assert due(EVERY, [*runs, ran(2000 * S, 0, RunState.IN_PROCESS)], 3000 * S) is None
    assert next_at_us([], 5) == 5
    assert next_at_us(runs, 7) == 1000 * S + 1, "by hand, under a controller whose clock is behind"
    assert next_us(EVERY, runs, 1002 * S) == 1061 * S


def test_an_interval_counts_anew_from_a_clock_that_was_put_back() -> None:
    earliest, ended = Earliest(), [ran(90_000 * S, 90_001 * S)]
    assert earliest.at(EVERY, ended, 90_002 * S) == 90_002 * S
    assert due(EVERY, ended, 90_002 * S, 90_002 * S) is None
    assert next_us(EVERY, ended, 500 * S) == 560 * S
    for now, at in ((500, None), (559, None), (560, 560 * S), (561, 560 * S)):
        assert due(EVERY, ended, now * S, earliest.at(EVERY, ended, now * S)) == at
    again = [*ended, ran(560 * S, 562 * S)]
    assert earliest.at(EVERY, again, 563 * S) == 563 * S, "counted from the end of the run, as ever"
    assert due(EVERY, again, 622 * S, 563 * S) == 622 * S
    earliest.keep([])
    assert earliest.at(EVERY, ended, 9 * S) == 9 * S


def test_a_cron_line_is_due_again_after_a_clock_that_was_put_back_but_for_no_time_twice() -> None:
    """A job that ran by a clock a day ahead used to wait for a day; so did one that was created then."""
    hour, day = 3600 * S, 86_400 * S
    hourly = replace(EVERY, schedule=Schedule.parse("cron 0 * * * *"))
    ahead = [ran(day + hour, day + hour + S)]
    assert due(hourly, ahead, 2 * hour, 2 * hour - S) == 2 * hour
    assert next_us(hourly, ahead, 2 * hour - S) == 2 * hour
    assert due(replace(hourly, since_us=day), [], 2 * hour, 2 * hour - S) == 2 * hour
    both = [*ahead, ran(2 * hour, 2 * hour + S)]
    assert due(hourly, both, 2 * hour + 2 * S, 2 * hour - S) is None, "by a clock that was put back once more"
    assert due(hourly, both, 3 * hour, 2 * hour + 2 * S) == 3 * hour
    assert due(hourly, both, day + hour, day + hour - S) is None, "for that time it has run"
    assert next_us(hourly, both, day) == day + 2 * hour
    missed = [*ahead, ran(2 * hour, 3 * hour + S)]
    assert due(hourly, missed, 3 * hour + 2 * S, 3 * hour + 2 * S) is None, "it ran when this time was due"
    assert due(hourly, [ran(2 * hour, 3 * hour + S)], 3 * hour + 2 * S, 3 * hour + 2 * S) == 3 * hour


def test_a_job_for_one_time_runs_though_a_former_one_of_its_name_ran_by_a_clock_that_was_ahead() -> None:
    """The job that was created again after the clock had been put back never ran."""
    hour, day = 3600 * S, 86_400 * S
    once = replace(EVERY, schedule=Schedule.parse("once 1970-01-01T01:00:00Z"), definition=9)
    for at_us, due_us in ((day, hour), (hour, hour + 1)):
        former = replace(ran(at_us, day + S), definition=2)
        assert next_us(once, [former], hour - S) == hour
        assert due(once, [former], hour - S) is None
        assert due(once, [former], hour + S) == due_us
        both = [former, replace(ran(due_us, hour + S), definition=9)]
        assert due(once, both, hour + 2 * S) is None
        assert next_us(once, both, hour + 2 * S) == 0


def test_whoever_leads_next_goes_on_behind_the_last_stage(tmp_path: Path) -> None:
    """The next leader goes on after the last finished stage.

    Stages that had not begun when the controller died used to be left for the next run.
    """
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        job = Job(
            *("nightly", Schedule.parse("every 60"), Do.REBALANCE),
            coordinator=Affinity.parse("soft:5 site cloud"),
            workers=Affinity.parse("label disk=ssd:2-4"),
        )
        write(cluster, steps.define_job, "nightly", job)
        write(cluster, steps.begin_run, "nightly", 7, ["A", "B", "C"])
        run = cluster.jobs.runs["nightly"][-1]
        write(cluster, steps.end_stage, run, JobStage("A", ("r1",)))
        write(cluster, steps.end_stage, run, JobStage("B", error="no room"))
        again = Written.read(ledger)
        found = again.jobs.run("nightly/7")
        assert found.left(["A", "B", "C", "later"]) == ["C"], "of those that there were when it began"
        assert found.stages == (JobStage("A", ("r1",)), JobStage("B", error="no room"))
        assert (again.jobs.there["nightly"].coordinator, again.jobs.there["nightly"].workers) == (
            job.coordinator,
            job.workers,
        )
        write(again, steps.end_run, found, RunState.FAILED, ["r1"], "failed: B: no room")
        assert Written.read(ledger).jobs.run("nightly/7").state is RunState.FAILED
        with pytest.raises(InvalidArgument, match="there is no run"):
            again.jobs.run("nightly/8")


def test_a_run_of_an_earlier_version_has_a_stage_for_whatever_is_deployed() -> None:
    assert Run("j", 1, 1).left(["A", "B"]) == ["A", "B"]


def test_one_controller_coordinates() -> None:
    with pytest.raises(InvalidArgument, match="a job has one coordinator"):
        Job("j", Schedule.parse("every 60"), Do.CHECKPOINT, coordinator=Affinity.parse("site cloud:2")).check()


BAD = [
    {"schedule": "every 0.0000001", "do": "checkpoint"},
    {"schedule": "fortnightly", "do": "checkpoint"},
    {"schedule": "every 60", "do": "dance"},
    {"schedule": "every 60", "do": "checkpoint", "options": {"colour": "red"}},
    {"do": "checkpoint"},
    {"schedule": 7, "do": ["checkpoint"]},
]


@pytest.mark.parametrize("payload", BAD, ids=str)
def test_a_record_that_cannot_be_read_holds_up_no_other_and_can_be_deleted(
    tmp_path: Path, payload: dict[str, Any]
) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        write(cluster, lambda _: [entry("job/bad/1", RecordState.NEW, None, payload)])
        write(cluster, steps.define_job, "nightly", EVERY)
        again = Written.read(ledger)
        assert again.jobs.names() == ["bad", "nightly"]
        sent = [message_of(cpb.Job, again.jobs.report(name, 0)) for name in again.jobs.names()]
        told = [value_of(JobReport, message) for message in sent]
        assert "cannot be read" in told[0].error
        assert "job delete bad" in told[0].error
        assert (told[1].error, told[1].next_us > 0) == ("", True)
        with pytest.raises(InvalidArgument, match="cannot be read"):
            again.jobs.found("bad")
        write(again, steps.define_job, "bad", None)
        assert Written.read(ledger).jobs.names() == ["nightly"]


@pytest.mark.parametrize(
    "text", ["once 1970-01-01T00:00:00Z", "once 1969-12-31T00:00:00Z", "once 2020-01-01T00:00:00Z"]
)
def test_a_time_that_has_passed_is_refused_before_it_is_recorded(text: str) -> None:
    """A time in the past is refused before it is recorded.

    0 used to count as no time: such a job was recorded and could not be shown any more.
    """
    job = Job("late", Schedule.parse(text), Do.CHECKPOINT)
    with pytest.raises(InvalidArgument, match="scheduled time has passed"):
        job.prove(1_700_000_000 * S)
    assert next_us(job, [], 0) == job.schedule.once_us, "one that an earlier version recorded is told"


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (replace(EVERY, policies=(PolicyName.LOAD,)), "a checkpoint job does not take policies"),
        (replace(EVERY, partitions=(3,)), "does not take partitions"),
        (replace(EVERY, do=Do.DRAIN, to="edge-0", partitions=(3,)), "a drain job does not take partitions"),
        (replace(EVERY, do=Do.REBALANCE, to="edge-0"), "does not take a target"),
    ],
)
def test_what_a_job_would_ignore_is_refused(job: Job, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        job.check()


def test_a_job_whose_record_would_say_something_else_is_not_recorded() -> None:
    EVERY.prove(0)
    with pytest.raises(InvalidArgument, match="changes when it is written and read again"):
        Job("nightly", replace(EVERY.schedule, text="every 61"), Do.CHECKPOINT).prove(0)


@pytest.mark.parametrize(
    ("text", "recorded"), [("every 1h", "every 3600"), ("every 1.5m", "every 90"), ("every 60", "every 60")]
)
def test_release_0_1_reads_a_recorded_schedule(text: str, recorded: str) -> None:
    """A unit used to be recorded: a controller of release 0.1 did not start with that ledger."""
    job = replace(EVERY, schedule=Schedule.parse(text))
    job.prove(0)
    payload = job.to_payload()
    assert payload["schedule"] == recorded
    assert read_job("nightly", payload, 0) == job
    older = read_job("nightly", {"schedule": recorded, "do": "checkpoint"}, 0)
    assert older == replace(job, schedule=Schedule.parse(recorded))


def test_a_job_for_one_time_that_passed_while_it_was_paused_never_runs(tmp_path: Path) -> None:
    """The job ran as soon as it was resumed."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster, now = Written(ledger), ledger.clock.now_us()
        for name, once in (("passed", "1970-01-02T00:00:00Z"), ("to-come", "9999-01-01T00:00:00Z")):
            job = Job(name, Schedule.parse(f"once {once}"), Do.CHECKPOINT)
            write(cluster, steps.define_job, name, job)
            assert next_us(cluster.jobs.there[name], [], now) == job.schedule.once_us, "not paused, it is made up for"
            for paused in (True, False):
                write(cluster, steps.define_job, name, replace(job, paused=paused))
        for jobs in (cluster.jobs, Written.read(ledger).jobs):
            assert due(jobs.there["passed"], [], now) is None
            assert next_us(jobs.there["passed"], [], now) == 0
            assert next_us(jobs.there["to-come"], [], now) > now
