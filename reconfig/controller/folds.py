"""Folds of the ledger's records of members, jobs, restores and sweeps.

Each book holds the state that follows from the records; its ``fold_…`` methods update the state by further records. The
books are part of :mod:`reconfig.controller.cluster_state`, which has the table of records.

The restores of one command are a batch of the board, whose entities are its partitions. The cluster state derives
owners and epochs from them.

A sweep is long work on many nodes: a batch of the board, whose entities are the nodes. Restarts are ``roll/…`` items,
because that is what early versions, which had no other chores, recorded; all other sweeps are ``sweep/…`` items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from reconfig.controller.history import Batch
from reconfig.decisions.jobs import RUNS_MAX, Do, Job, Node, Run, RunState, Unreadable, next_us, read_job
from reconfig.decisions.plan import PlannedRestore, restore_of
from reconfig.decisions.sweeps import Chore, Maintenance, Partitions, packed, unpacked, without
from stateflow.errors import InvalidArgument
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger.records import Record, RecordState
from stateflow.ledger.rules import BatchStatus, EntityStatus
from stateflow.reports import (
    FollowerReport,
    JobReport,
    JobRun,
    JobStage,
    PartitionFault,
    Rolling,
    RollingNode,
    Sweep,
    SweepNode,
)
from stateflow.types import PartitionId, ReplicaInfo, node_of

NOTHING: Mapping[str, str] = MappingProxyType({})
#: sweeps of each chore that are kept after their end
KEPT = 20
#: name of a sweep's last entity, which covers the partitions that moved during the sweep. No node has such a name
MOVED = "(moved)"


# -- Members of the cluster ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Home:
    """A data directory, by its id and its place. The place is empty until a process registers from the directory."""

    directory: str = ""
    place: str = ""


@dataclass(slots=True)
class Roster:
    """Replicas, agents and nodes of the cluster."""

    replicas: dict[str, ReplicaInfo] = field(default_factory=dict)
    homes: dict[str, Home] = field(default_factory=dict)  # by replica; absent if only early versions recorded it
    agents: dict[str, AgentInfo] = field(default_factory=dict)
    agent_homes: dict[str, Home] = field(default_factory=dict)
    spawned: dict[str, Spawned] = field(default_factory=dict)  # wanted state at its agent, by replica
    maintenance: dict[str, Maintenance] = field(default_factory=dict)  # by node; stays here after its end

    # -- replicas -----------------------------------------------------------------------------------------

    def is_rehomed(self, name: str) -> bool:
        """Tells whether a command gave the name to another data directory, from which no process has registered yet."""
        home = self.homes.get(name)
        return home is not None and bool(home.directory) and not home.place

    def fold_replica(self, rest: str, record: Record) -> None:
        name = rest.rpartition("/")[0]
        fields = dict(record.payload)
        home = Home(fields.pop("directory", ""), fields.pop("place", ""))
        self.replicas[name] = ReplicaInfo(name, **fields)
        if home.directory:
            self.homes[name] = home

    def fold_directory(self, rest: str, record: Record) -> None:
        self.homes[rest.rpartition("/")[0]] = Home(record.payload["directory"])

    def fold_forget(self, rest: str, record: Record) -> None:
        name = rest.rpartition("/")[0]
        self.replicas.pop(name, None)
        self.homes.pop(name, None)
        self.spawned.pop(name, None)

    # -- agents -------------------------------------------------------------------------------------------

    def fold_agent(self, rest: str, record: Record) -> None:
        name = rest.rpartition("/")[0]
        fields = dict(record.payload)
        self.agent_homes[name] = Home(fields.pop("directory"), fields.pop("place"))
        self.agents[name] = AgentInfo(name, **fields)

    def fold_dismiss(self, rest: str, record: Record) -> None:
        name = rest.rpartition("/")[0]
        self.agents.pop(name, None)
        self.agent_homes.pop(name, None)
        self.spawned = {replica: each for replica, each in self.spawned.items() if each.agent != name}

    def fold_spawn(self, rest: str, record: Record) -> None:
        replica = rest.rpartition("/")[0]
        self.spawned[replica] = Spawned(replica, **record.payload)

    def wanted_at(self, agent: str) -> list[Spawned]:
        """Returns the replicas that an agent should run, sorted by name."""
        return [each for _, each in sorted(self.spawned.items()) if each.agent == agent]

    def is_stopping(self, replica: str) -> bool:
        """Tells whether an agent was told to stop a replica, or the node whose worker the replica is."""
        spawned = self.spawned.get(node_of(replica))
        return spawned is not None and not spawned.running

    # -- nodes --------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Node]:
        """Returns the nodes that have replicas, by name, with their agents' names and labels."""
        found: dict[str, Node] = {}
        for info in self.replicas.values():
            name = node_of(info.name)
            spawned = self.spawned.get(name)
            agent = None if spawned is None else self.agents.get(spawned.agent)
            labels = {} if agent is None else dict(agent.labels)
            found[name] = Node(name, info.site, labels, "" if agent is None else agent.name)
        return found

    def fold_maintenance(self, rest: str, record: Record) -> None:
        node = rest.rpartition("/")[0]
        if record.payload:
            self.maintenance[node] = Maintenance(**record.payload)
        else:
            self.maintenance.pop(node, None)


# -- Jobs and their runs ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class JobBook:
    """All jobs, and their newest runs.

    Attributes:
        there: existing jobs, by name.
        unreadable: jobs whose record cannot be read, by name.
        runs: newest runs of each job, oldest first.
        records: newest record of each run under way, by item.
    """

    there: dict[str, Job] = field(default_factory=dict)
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
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
        """Returns a job. Raises InvalidArgument if there is no job of that name, or its record cannot be read."""
        if name in self.unreadable:
            raise self.unreadable[name].refused()
        try:
            return self.there[name]
        except KeyError:
            raise InvalidArgument(f"there is no job {name!r}", remedy="see `stateflow job list`") from None

    def job_of(self, run: Run) -> Job | None:
        """Returns the job that began a run; None: it was deleted since, or its record cannot be read."""
        job = self.there.get(run.job)
        return job if job is not None and job.definition == run.definition else None

    def run(self, run_id: str) -> Run:
        """Returns a run of a job, which may have been deleted. Raises InvalidArgument if the run is unknown or no
        longer kept.
        """
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
        """Returns a job's report. Raises InvalidArgument if there is no job of that name.

        Args:
            waits: by run id, a text that says what the run waits for.
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
        name = rest.rpartition("/")[0]
        before = self.there.pop(name, None)
        self.unreadable.pop(name, None)
        if record.payload:
            match read_job(name, record.payload, record.timestamp_us):
                case Unreadable() as found:
                    self.unreadable[name] = found
                case job if before is None:
                    self.there[name] = replace(job, definition=record.record_id)
                case job:
                    resumed = before.paused and not job.paused
                    self.there[name] = replace(job, resumed=resumed, definition=before.definition)

    def fold_run(self, rest: str, record: Record) -> None:
        job, _, at_us = rest.rpartition("/")
        runs, item = self.runs.setdefault(job, []), record.item_id
        match record.state:
            case RecordState.NEW:
                operators = (record.payload or {}).get("operators")
                begun = None if operators is None else tuple(operators)
                definition = 0 if (of := self.there.get(job)) is None else of.definition
                runs.append(Run(job, int(at_us), record.timestamp_us, operators=begun, definition=definition))
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
        stage = JobStage(operator, tuple(payload["reconfigurations"]), payload.get("error", ""))
        self.runs[job] = [
            replace(run, stages=(*run.stages, stage)) if run.id == of else run for run in self.runs.get(job, [])
        ]


def _unread(
    job: Unreadable, runs: Sequence[Run], waits: Mapping[str, str], follower: FollowerReport | None
) -> JobReport:
    """Returns the report of a job whose record cannot be read, with those fields that can be read."""
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
        waits: by run id, a text that says what the run waits for.
    """
    return JobRun(
        run.at_us,
        run.began_us,
        run.ended_us,
        str(run.state),
        run.reconfigurations,
        run.note or waits.get(run.id, ""),
        run.id,
        run.stages,
        follower,
    )


# -- Restores --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RestoreBook:
    """Restores under way, and failed ones.

    Attributes:
        records: newest record of each restore under way, by item.
        batches: batches under way, by restore id.
        failed: failed restores whose partition the owner may have stopped serving.
        cancelled: ids of cancelled restores, whose waiting partitions do not begin.
    """

    records: dict[str, tuple[PlannedRestore, Record]] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    failed: list[PlannedRestore] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    @property
    def under_way(self) -> list[PlannedRestore]:
        return [planned for planned, _ in self.records.values()]

    def fold_batch(self, restore_id: str, record: Record) -> None:
        batch = self.batches.setdefault(restore_id, Batch(record, {}))
        batch.fold(record)
        if batch.status in (BatchStatus.DONE, BatchStatus.CANCELLED):
            del self.batches[restore_id]
            self.cancelled.discard(restore_id)

    def fold_one(self, record: Record) -> PlannedRestore:
        match record.state:
            case RecordState.NEW:
                planned = restore_of(record.item_id, record.payload)
                self.records[record.item_id] = planned, record
            case RecordState.PROCESSING:
                planned = self.records[record.item_id][0]
                if (record.payload or {}).get("stop_sources"):  # not in the plan, where release 0.1 refuses the field
                    planned = replace(planned, stop_sources=True)
                self.records[record.item_id] = planned, record
            case RecordState.PROCESSED | RecordState.FAILED:
                planned = self.records.pop(record.item_id)[0]
                if record.state is RecordState.FAILED and record.payload.get("granted"):
                    self.failed.append(planned)
        return planned

    def fold_called_off(self, restore_id: str, _: Record) -> None:
        if restore_id in self.batches:
            self.cancelled.add(restore_id)


# -- Sweeps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a sweep at one node.

    Attributes:
        error: why the node failed; empty: it did not fail.
        done: partitions that the node completed, even if it failed later.
        counts: figures for reports.
        faults: faults found in partitions of ``done``, or reasons why other partitions were not processed.
        cancelled: the node did not finish, because the sweep was cancelled.
    """

    error: str = ""
    done: Partitions = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[PartitionFault, ...] = ()
    cancelled: bool = False

    def to_json(self) -> str:
        found: dict[str, Any] = {"error": self.error} if self.error else {}
        found |= self.counts
        if self.done:
            found["done"] = packed(self.done)
        if self.faults:
            found["faults"] = [_kept(each) for each in self.faults]
        return json.dumps(found)

    @classmethod
    def of_json(cls, text: str) -> Outcome:
        found = json.loads(text or "{}")
        error, done = found.pop("error", ""), unpacked(found.pop("done", {}))
        faults = tuple(_fault_of(each, done) for each in found.pop("faults", ()))
        return cls(error, done, found, faults)


def _kept(fault: PartitionFault) -> dict[str, Any]:
    """Returns the fields of a fault that are recorded. These are the fields of release 0.1, which reads no others.

    ``undone`` is left out, because it follows from the partitions that were done.
    """
    return {name: value for name, value in fault.to_dict().items() if name != "undone"}


def _fault_of(kept: Mapping[str, Any], done: Partitions) -> PartitionFault:
    """Restores a fault from its recorded fields, see :func:`_kept`."""
    undone = kept["partition"] not in done.get(kept["operator"], ())
    return PartitionFault(**{**kept, "undone": undone})


@dataclass(slots=True)
class Task:
    """One node of a sweep. ``ms``: duration in milliseconds."""

    node: str
    record: Record
    status: EntityStatus = EntityStatus.WAITING
    outcome: Outcome = field(default_factory=Outcome)
    ms: int = 0


@dataclass(slots=True)
class RecordedSweep:
    """A sweep, as recorded. ``tasks`` are keyed by node, in the order in which they begin."""

    batch: Batch
    chore: Chore
    limit: int = 1
    site: str = ""
    operator: str = ""
    scope: Partitions = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def over(self) -> bool:
        return self.batch.status in (BatchStatus.DONE, BatchStatus.FAILED, BatchStatus.CANCELLED)

    def of(self, *statuses: EntityStatus) -> list[Task]:
        return [task for task in self.tasks.values() if task.status in statuses]

    def left(self) -> Partitions:
        """Returns the partitions that no node has done."""
        found = self.scope
        for task in self.tasks.values():
            found = without(found, task.outcome.done)
        return found

    def next(self, going: Sequence[str]) -> list[str]:
        """Returns the nodes that begin now, given those that are already running (``going``). ``MOVED`` begins once no
        node is running."""
        waiting = [task.node for task in self.of(EntityStatus.WAITING) if task.node not in going]
        nodes = [node for node in waiting if node != MOVED]
        if nodes:
            return nodes[: max(0, self.limit - len(going))]
        return [] if going else waiting


@dataclass(slots=True)
class SweepBook:
    """Sweeps, and facts that remain known after their sweeps are dropped.

    Attributes:
        there: sweeps by id, the newest last.
        whole_us: by chore, start time of the newest sweep of the whole cluster.
        wrong: by partition, faults that its newest verification found.
    """

    there: dict[str, RecordedSweep] = field(default_factory=dict)
    whole_us: dict[Chore, int] = field(default_factory=dict)
    wrong: dict[PartitionId, list[PartitionFault]] = field(default_factory=dict)

    def under_way(self, chore: Chore | None = None) -> list[str]:
        return [each for each, known in self.there.items() if not known.over and chore in (None, known.chore)]

    def damaged(self) -> list[PartitionFault]:
        """Returns the known faults, sorted by partition.

        A fault is known until a newer verification of the partition does not find it, or until the partition is
        restored or undeployed.
        """
        return [fault for each in sorted(self.wrong) for fault in self.wrong[each]]

    def restored(self, partition: PartitionId) -> None:
        """Forgets the faults of a partition, because it was restored."""
        self.wrong.pop(partition, None)

    def undeployed(self, operator: str) -> None:
        self.wrong = {partition: each for partition, each in self.wrong.items() if partition.operator != operator}

    def report(self, sweep_id: str) -> Sweep:
        known = self.there[sweep_id]
        nodes = tuple(_told(task) for task in known.tasks.values())
        said = known.chore.value, str(known.batch.status), known.operator, known.site, known.limit
        return Sweep(sweep_id, *said, nodes)

    def rolling(self, sweep_id: str) -> Rolling:
        known = self.there[sweep_id]
        nodes = tuple(RollingNode(t.node, str(t.status), t.outcome.error, t.ms) for t in known.tasks.values())
        return Rolling(sweep_id, str(known.batch.status), known.site, known.limit, nodes)

    def fold_sweep(self, sweep_id: str, record: Record) -> None:
        """Updates a sweep by a record. Records of restarts name no chore."""
        known = self.there.get(sweep_id)
        if known is None:
            first = record.payload
            chore = Chore(first.get("chore", Chore.RESTART))
            site, operator = first["site"], first.get("operator", "")
            said = first["limit"], site, operator, unpacked(first.get("scope", {}))
            known = self.there[sweep_id] = RecordedSweep(Batch(record, {}), chore, *said)
            if not (site or operator):
                self.whole_us[chore] = record.timestamp_us
        known.batch.fold(record)
        over = [each for each, other in self.there.items() if other.over and other.chore is known.chore]
        for old in over[:-KEPT]:
            del self.there[old]

    def fold_task(self, rest: str, record: Record) -> None:
        sweep_id, _, node = rest.partition("/")
        known = self.there.get(sweep_id)
        if known is None:
            return  # the sweep ended long ago
        task = known.tasks.setdefault(node, Task(node, record))
        columns = (record.payload or {}).get("set", {})
        task.record, task.status = record, EntityStatus(columns.get("status", task.status.value))
        task.ms = columns.get("ms") or 0
        task.outcome = Outcome.of_json(columns.get("result") or "")
        if known.chore is Chore.VERIFY:
            self._learn(task.outcome)

    def _learn(self, outcome: Outcome) -> None:
        for operator, numbers in outcome.done.items():
            for number in numbers:
                self.wrong.pop(PartitionId(operator, number), None)
        for fault in outcome.faults:
            if not fault.undone:
                self.wrong.setdefault(PartitionId(fault.operator, fault.partition), []).append(fault)

    def fold_called_off(self, sweep_id: str, _: Record) -> None:
        if sweep_id in self.there:
            self.there[sweep_id].cancelled = True


def _told(task: Task) -> SweepNode:
    outcome = task.outcome
    return SweepNode(task.node, str(task.status), outcome.error, task.ms, faults=outcome.faults, **outcome.counts)
