"""Jobs and their runs, folded from the ledger's records; part of :mod:`reconfig.controller.cluster_state`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from reconfig.jobs import RUNS_MAX, Do, Job, Run, RunState, Stage, Unreadable, next_us, read_job
from stateflow.errors import InvalidArgument
from stateflow.ledger import Record, RecordState
from stateflow.reports import FollowerReport, JobReport, JobRun, JobStage

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class JobBook:
    """All jobs, and their newest runs.

    ``there``: jobs by name. ``unreadable``: jobs whose record cannot be read. ``orders``: number of records of each
    job. ``runs``: newest runs of each job, oldest first. ``records``: newest record of each run under way, by item.
    """

    there: dict[str, Job] = field(default_factory=dict)
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    orders: dict[str, int] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Returns the names of all jobs, sorted."""
        return sorted(self.there.keys() | self.unreadable.keys())

    def newest(self, job: str) -> Run | None:
        return self.runs[job][-1] if self.runs.get(job) else None

    def under_way(self) -> list[Run]:
        return [run for runs in self.runs.values() for run in runs if run.state is RunState.IN_PROCESS]

    def found(self, name: str) -> Job:
        """Returns a job. Raises InvalidArgument where there is none of that name, or its record cannot be read."""
        if name in self.unreadable:
            raise self.unreadable[name].refused()
        try:
            return self.there[name]
        except KeyError:
            raise InvalidArgument(f"there is no job {name!r}", remedy="see `stateflow job list`") from None

    def run(self, run_id: str) -> Run:
        """Returns a run, also of a deleted job. Raises InvalidArgument where there is none, or it is no longer kept."""
        runs = self.runs.get(run_id.rpartition("/")[0], [])
        found = next((run for run in runs if run.id == run_id), None)
        if found is None:
            raise InvalidArgument(
                f"there is no run {run_id!r}, or it is not among its job's last {RUNS_MAX}",
                remedy="see `stateflow job info NAME`",
            )
        return found

    def report(
        self, name: str, now_us: int, waits: Mapping[str, str] = NOTHING, follower: FollowerReport | None = None
    ) -> JobReport:
        """Returns a job's report. Raises InvalidArgument where there is no job of that name.

        Args:
            waits: what runs under way wait for, by run id.
        """
        runs = self.runs.get(name, [])
        if name in self.unreadable:
            return _unread(self.unreadable[name], runs, waits, follower)
        job = self.found(name)
        return JobReport(
            name,
            job.schedule.text,
            str(job.do),
            job.operator,
            tuple(map(str, job.policies)),
            job.partitions,
            job.to,
            job.paused,
            next_us(job, runs, now_us),
            tuple(told(run, waits) for run in runs),
            "" if job.coordinator is None else job.coordinator.text,
            "" if job.workers is None else job.workers.text,
            follower,
        )

    def fold_job(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        self.orders[name] = int(number)
        self.there.pop(name, None)
        self.unreadable.pop(name, None)
        if record.payload:
            match read_job(name, record.payload, record.timestamp_us):
                case Unreadable() as found:
                    self.unreadable[name] = found
                case job:
                    self.there[name] = job

    def fold_run(self, rest: str, record: Record) -> None:
        job, _, at_us = rest.rpartition("/")
        runs, item = self.runs.setdefault(job, []), record.item_id
        match record.state:
            case RecordState.NEW:
                operators = (record.payload or {}).get("operators")
                begun = None if operators is None else tuple(operators)
                runs.append(Run(job, int(at_us), record.timestamp_us, operators=begun))
                del runs[:-RUNS_MAX]
                self.records[item] = record
            case RecordState.PROCESSING:
                self.records[item] = record
            case RecordState.PROCESSED | RecordState.FAILED:
                self.records.pop(item, None)
                ended = RunState.PROCESSED if record.state is RecordState.PROCESSED else RunState.FAILED
                told = tuple(record.payload["reconfigurations"]), record.payload["note"]
                self.runs[job] = [
                    replace(run, state=ended, ended_us=record.timestamp_us, reconfigurations=told[0], note=told[1])
                    if run.item_id == item
                    else run
                    for run in runs
                ]

    def fold_stage(self, rest: str, record: Record) -> None:
        of, _, operator = rest.rpartition("/")
        job, payload = of.rpartition("/")[0], record.payload
        stage = Stage(operator, tuple(payload["reconfigurations"]), payload.get("error", ""))
        self.runs[job] = [
            replace(run, stages=(*run.stages, stage)) if run.id == of else run for run in self.runs.get(job, [])
        ]


def _unread(
    job: Unreadable, runs: Sequence[Run], waits: Mapping[str, str], follower: FollowerReport | None
) -> JobReport:
    """Returns what can be told of a job whose record cannot be read."""
    do = job.payload.get("do", "")
    return JobReport(
        job.name,
        str(job.payload.get("schedule", "")),
        do if isinstance(do, str) and do in set(Do) else "",
        "",
        (),
        (),
        "",
        False,
        0,
        tuple(told(run, waits) for run in runs),
        follower=follower,
        error=str(job.refused()),
    )


def told(run: Run, waits: Mapping[str, str] = NOTHING, follower: FollowerReport | None = None) -> JobRun:
    """Returns the report of a run.

    Args:
        waits: what runs under way wait for, by run id.
    """
    return JobRun(
        run.at_us,
        run.began_us,
        run.ended_us,
        str(run.state),
        run.reconfigurations,
        run.note or waits.get(run.id, ""),
        run.id,
        tuple(JobStage(each.operator, each.reconfigurations, each.error) for each in run.stages),
        follower,
    )
