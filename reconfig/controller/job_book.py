"""Jobs and their runs, as the ledger's records have them; part of :mod:`reconfig.controller.cluster_state`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from reconfig.jobs import RUNS_MAX, Job, Run, RunState
from stateflow.ledger import Record, RecordState


@dataclass(slots=True)
class JobBook:
    """``there``: those there are. ``orders``: records of each. ``runs``: the newest of each, in their order.
    ``records``: the newest of each run under way, by item."""

    there: dict[str, Job] = field(default_factory=dict)
    orders: dict[str, int] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    def newest(self, job: str) -> Run | None:
        return self.runs[job][-1] if self.runs.get(job) else None

    def under_way(self) -> list[Run]:
        return [run for runs in self.runs.values() for run in runs if run.state is RunState.IN_PROCESS]

    def fold_job(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        self.orders[name] = int(number)
        if record.payload:
            self.there[name] = Job.of(name, record.payload, record.timestamp_us)
        else:
            self.there.pop(name, None)

    def fold_run(self, rest: str, record: Record) -> None:
        job, _, at_us = rest.rpartition("/")
        runs, item = self.runs.setdefault(job, []), record.item_id
        match record.state:
            case RecordState.NEW:
                runs.append(Run(job, int(at_us), record.timestamp_us))
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
