"""Steps: the decisions that change the cluster's state.

The function of a step reads the state and returns the entries that record the change, all for one transaction; it
changes nothing itself and does no I/O. :class:`~reconfig.controller.context.Writer` appends the entries to the ledger.
Only what was appended is folded, see :mod:`reconfig.controller.cluster_state`: a step that failed has no effect, and
can be taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from reconfig.controller.cluster_state import EVENTS, ClusterState
from reconfig.controller.folds import MOVED, Home, Outcome, Task
from reconfig.controller.history import APP, begun, begun_batch, ended, entity, entry, retaken, taken_up
from reconfig.decisions.failover import Failover
from reconfig.decisions.jobs import Job, Run, RunState
from reconfig.decisions.plan import Limits, Planned, PlannedMove, PlannedRestore, PlannedStandby, to_payload
from reconfig.decisions.policies import AutopilotSettings
from reconfig.decisions.sweeps import Chore, Maintenance, Plan, packed
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger.records import Entry, Item, Kind, Record, RecordState
from stateflow.ledger.rules import BatchStatus, EntityStatus
from stateflow.reports import JobStage
from stateflow.types import OperatorSpec, ReplicaInfo


@dataclass(frozen=True, slots=True)
class Ending:
    """A step that ends items, or pauses them.

    If a person has already resolved an item by hand, the item is set back to PROCESSING and ended again, so that the
    records tell what happened.
    """

    entries: Sequence[Entry]

    def again(self, items: Iterable[Item]) -> list[Entry]:
        """Returns the entries to try next, given the ledger's items as they are now. Empty: a person resolved none."""
        by_hand = {
            each.item_id
            for each in items
            if each.state is RecordState.RESOLVED and each.records[-1].app.name != APP.name
        }
        if not by_hand:
            return []
        return [one for each in self.entries for one in (retaken(each) if each.item_id in by_hand else [each])]


Step = Sequence[Entry] | Ending


# -- Plumbing --------------------------------------------------------------------------------------------------------


def _new(item: str, payload: Any) -> Entry:
    return replace(entry(item, RecordState.NEW, None, payload), app=EVENTS[item.partition("/")[0]].app)


def _numbered(cluster: ClusterState, kind: str, name: str, payload: Any) -> Entry:
    return _new(cluster.next_item(kind, name), payload)


def _under_way(item: str, payload: Any) -> list[Entry]:
    """Returns the entries by which an item is planned and begins at once."""
    new = _new(item, payload)
    return [new, entry(item, RecordState.PROCESSING, new)]


def _end(record: Record, state: RecordState, payload: Any = None, with_it: Sequence[Entry] = ()) -> Ending:
    """Returns the step that ends an item. If the item has not begun, the step begins it first."""
    item, schema = record.item_id, record.payload_schema
    begun = [taken_up(record)] if record.state is RecordState.NEW else []
    return Ending([*begun, entry(item, state, begun[0] if begun else record, payload, schema), *with_it])


def together(cluster: ClusterState, *parts: Callable[[ClusterState], Sequence[Entry]]) -> list[Entry]:
    """Takes several steps as one, so that all of them are recorded or none. No two record an item of one series."""
    return [entry for part in parts for entry in part(cluster)]


def _without(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns ``fields`` without the field ``name``, which is part of the item's id."""
    del fields[name]
    return fields


# -- Replicas and agents ---------------------------------------------------------------------------------------------


def register(cluster: ClusterState, info: ReplicaInfo, home: Home) -> list[Entry]:
    roster = cluster.roster
    if roster.replicas.get(info.name) == info and roster.homes.get(info.name) == home:
        return []
    payload = {"site": info.site, "address": info.address, "weight": info.weight, **asdict(home)}
    return [_numbered(cluster, "replica", info.name, payload)]


def rehome(cluster: ClusterState, name: str, directory: str) -> list[Entry]:
    """Records that a replica's name belongs to another data directory."""
    return [_numbered(cluster, "directory", name, {"directory": directory})]


def forget(cluster: ClusterState, name: str) -> list[Entry]:
    return [_numbered(cluster, "forget", name, {})]


def register_agent(cluster: ClusterState, info: AgentInfo, home: Home) -> list[Entry]:
    roster = cluster.roster
    if roster.agents.get(info.name) == info and roster.agent_homes.get(info.name) == home:
        return []
    payload = {**asdict(info), "labels": dict(info.labels), **asdict(home)}
    return [_numbered(cluster, "agent", info.name, _without("name", payload))]


def dismiss(cluster: ClusterState, name: str) -> list[Entry]:
    """Forgets an agent, and the replicas that it should run."""
    return [_numbered(cluster, "dismiss", name, {})]


def spawn(cluster: ClusterState, wanted: Iterable[Spawned]) -> list[Entry]:
    """Records the wanted state of agents' replicas."""
    return [_numbered(cluster, "spawn", each.replica, _without("replica", asdict(each))) for each in wanted]


def maintain(cluster: ClusterState, node: str, maintenance: Maintenance | None) -> list[Entry]:
    """Records a node's maintenance; None: it has ended."""
    payload = {} if maintenance is None else maintenance.to_payload()
    return [_numbered(cluster, "maintenance", node, payload)]


# -- Operators -------------------------------------------------------------------------------------------------------


def _spec_payload(spec: OperatorSpec) -> dict[str, Any]:
    return _without("name", spec.to_json())


def plan_deployment(
    cluster: ClusterState, spec: OperatorSpec, owners: Mapping[int, str], sites: Collection[str] = ()
) -> list[Entry]:
    placed = [owners[p] for p in range(spec.partitions)]
    payload = {"spec": _spec_payload(spec), "owners": placed, "sites": list(sites)}
    former = cluster.undeployed.get(spec.name)
    return _under_way(f"operator/{spec.name}" + ("" if former is None else f"/{former + 1}"), payload)


def begin_deployment(_: ClusterState, planned: Record) -> list[Entry]:
    """Begins a deployment that an earlier controller recorded as planned, but not as begun."""
    return [entry(planned.item_id, RecordState.PROCESSING, planned)]


def finish_deployment(_: ClusterState, planned: Record) -> Ending:
    return _end(planned, RecordState.PROCESSED)


def fail_deployment(_: ClusterState, planned: Record, error: Mapping[str, Any]) -> Ending:
    """Records that a deployment failed. No replica owns the partitions that were created."""
    return _end(planned, RecordState.FAILED, {"error": error})


def upgrade(cluster: ClusterState, spec: OperatorSpec) -> list[Entry]:
    """Records another version of a deployed operator. It applies to all its partitions from now on."""
    return [_numbered(cluster, "upgrade", spec.name, {"spec": _spec_payload(spec)})]


def allow_sites(cluster: ClusterState, name: str, sites: Collection[str]) -> list[Entry]:
    return [_numbered(cluster, "sites", name, {"sites": list(sites)})]


def undeploy(_: ClusterState, name: str, epoch: int) -> list[Entry]:
    """Records that an operator is undeployed.

    Args:
        epoch: see :meth:`ClusterState.newest_epoch`.
    """
    return [_new(f"undeploy/{name}/{epoch}", {})]


def adopt(
    _: ClusterState, spec: OperatorSpec, owners: Mapping[int, tuple[str, int]], granted: Mapping[int, int]
) -> list[Entry]:
    """Records an operator as replicas report it.

    Args:
        owners: (replica, epoch) by partition.
        granted: the newest epoch that counts as granted, by partition.
    """
    numbers = range(spec.partitions)
    replicas = sorted({name for name, _ in owners.values()})
    index = {name: number for number, name in enumerate(replicas)}
    payload = {
        "spec": _spec_payload(spec),
        "replicas": replicas,
        "owners": [index[owners[p][0]] for p in numbers],
        "epochs": [owners[p][1] for p in numbers],
        "granted": [granted[p] for p in numbers],
    }
    return [_new(f"adopt/{spec.name}", payload)]


def adopt_ledger(cluster: ClusterState, ledger: str) -> list[Entry]:
    return [] if ledger in cluster.adopted else [_new(f"adopted/{ledger}", {})]


def order_failover(cluster: ClusterState, operator: str, failover: Failover) -> list[Entry]:
    failovers = cluster.failovers
    if failovers.is_manual(operator) is (failover is Failover.MANUAL):
        return []
    return [_new(f"failover/{operator}/{failovers.count + 1}", {"failover": failover.value})]


def want_standbys(cluster: ClusterState, operator: str, count: int) -> list[Entry]:
    if cluster.standbys.get(operator, 0) == count:
        return []
    return [_numbered(cluster, "standbys", operator, {"count": count})]


def order_autopilot(cluster: ClusterState, orders: AutopilotSettings) -> list[Entry]:
    return [] if orders == cluster.autopilot else [_numbered(cluster, "autopilot", "", orders.to_dict())]


# -- Moves -----------------------------------------------------------------------------------------------------------


def plan_moves(cluster: ClusterState, moves: Iterable[Planned]) -> list[Entry]:
    """Records a plan. Standbys are in no batch, because they do not end."""
    moves = list(moves)
    entries = begun([move for move in moves if not isinstance(move, PlannedStandby)], cluster.now_us())
    for copy in moves:
        if isinstance(copy, PlannedStandby):
            new = _new(copy.item_id, to_payload(copy))
            entries += [new, taken_up(new)]
    return entries


def retarget(cluster: ClusterState, move: PlannedMove, target: str, reason: str) -> list[Entry]:
    """Gives another target to a move that has not begun. ``reason`` is shown to people."""
    return [_numbered(cluster, "retarget", move.item_id, {"target": target, "reason": reason})]


def resolve(cluster: ClusterState, moves: Iterable[Planned], how: str) -> list[Entry]:
    """Records that moves are given up, by this controller or a later one. Skips moves that have ended."""
    open_moves = [cluster.open_moves[move.item_id] for move in moves if move.item_id in cluster.open_moves]
    wanted = [each.planned.item_id for each in open_moves if each.resolution != how]
    return [_numbered(cluster, "resolve", item, {"how": how}) for item in wanted]


def begin_moves(cluster: ClusterState, moves: Iterable[Planned]) -> list[Entry]:
    """Records that these moves begin. Skips moves that have begun already, or ended."""
    waiting = [cluster.open_moves[move.item_id].record for move in moves if move.item_id in cluster.open_moves]
    return [taken_up(record) for record in waiting if record.state is RecordState.NEW]


def grant(_: ClusterState, move: Planned) -> list[Entry]:
    """Grants an epoch to a move. The writer raises Locked if the epoch was granted to another move."""
    item = f"grant/{move.partition.operator}/{move.partition.partition}/{move.granted_epoch}"
    return [_new(item, {"move": move.item_id, "target": move.target})]


def move_owned(cluster: ClusterState, move: Planned, report: Mapping[str, Any]) -> Ending:
    payload = {"epoch": move.granted_epoch, "owner": move.target, "report": report}
    return _end_move(cluster, move, RecordState.PROCESSED, payload)


def move_aborted(cluster: ClusterState, move: Planned, error: Mapping[str, Any], report: Mapping[str, Any]) -> Ending:
    if cluster.open_moves[move.item_id].resolution == "restore":
        report = {**report, "distrusted": True}  # release 0.1 reads no resolution, and would serve what was rejected
    return _end_move(cluster, move, RecordState.FAILED, {"error": error, "report": report})


def _end_move(cluster: ClusterState, move: Planned, state: RecordState, payload: dict[str, Any]) -> Ending:
    """Ends a move, and its batch if the move is the last one of the batch."""
    record, recorded = cluster.open_moves[move.item_id].record, cluster.history.get(move.reconfiguration)
    over: list[Entry] = []
    if recorded is not None and recorded.batch is not None and recorded.is_last(move.item_id):
        status = BatchStatus.CANCELLED if recorded.cancelled else BatchStatus.DONE
        over = recorded.batch.to(status, cluster.now_us())
    return _end(record, state, ended(record, payload, state), over)


# -- Reconfigurations ------------------------------------------------------------------------------------------------


def pause(cluster: ClusterState, reconfiguration: str, paused: bool) -> Step:
    """Pauses or resumes a reconfiguration. Does nothing if it has ended."""
    recorded = cluster.history.get(reconfiguration)
    if (reconfiguration in cluster.paused) == paused or (recorded is not None and recorded.state.over):
        return []
    if recorded is not None and recorded.batch is not None:
        status = BatchStatus.PAUSED if paused else BatchStatus.IN_PROGRESS
        return Ending(recorded.batch.to(status, cluster.now_us()))
    return [_numbered(cluster, "pause", reconfiguration, {"paused": paused})]  # an earlier version began it


def edit(cluster: ClusterState, reconfiguration: str, limits: Limits) -> list[Entry]:
    if limits == cluster.history[reconfiguration].limits:
        return []
    return [_numbered(cluster, "edit", reconfiguration, limits.to_payload())]


def cancel(cluster: ClusterState, reconfiguration: str) -> list[Entry]:
    """Records that moves of a reconfiguration that are not fenced yet must be rolled back, by this controller or a
    later one. Does nothing if the reconfiguration has ended."""
    recorded = cluster.history.get(reconfiguration)
    if recorded is None or recorded.cancelled or recorded.state.over:
        return []
    return [_new(f"cancel/{reconfiguration}", {})]


def operator_downtime(_: ClusterState, reconfiguration: str, ms: float) -> list[Entry]:
    return [_new(f"stood/{reconfiguration}", {"ms": ms})]


# -- Restores --------------------------------------------------------------------------------------------------------


def plan_restores(cluster: ClusterState, restores: Iterable[PlannedRestore]) -> list[Entry]:
    """Records a plan of restores. They begin at the same time."""
    entries: list[Entry] = []
    for planned in restores:
        batch = f"restores/{planned.restore_id}"
        if not entries:
            entries += begun_batch(batch, planned.partition.operator, "restore", cluster.now_us())
        entries += [new := entity(batch, planned), _restore_begun(new, planned)]
    return entries


def _restore_begun(new: Entry, planned: PlannedRestore) -> Entry:
    record = taken_up(new)
    if not planned.stop_sources:
        return record
    return replace(record, payload={**record.payload, "stop_sources": True})  # see RestoreBook.fold_one


def restore_owned(cluster: ClusterState, restore: PlannedRestore, epoch: int, report: Mapping[str, Any]) -> Ending:
    payload = {"epoch": epoch, "owner": restore.target, "report": report}
    return _end_restore(cluster, restore, RecordState.PROCESSED, payload)


def restore_failed(cluster: ClusterState, restore: PlannedRestore, granted: int, error: Mapping[str, Any]) -> Ending:
    """Records that a restore failed.

    Args:
        granted: the epoch for which the owner was asked to stop; 0: the owner was not asked.
    """
    return _end_restore(cluster, restore, RecordState.FAILED, {"error": error, "granted": granted})


def _end_restore(cluster: ClusterState, planned: PlannedRestore, state: RecordState, payload: dict[str, Any]) -> Ending:
    """Ends the restore of a partition, and its batch if the partition is the last one of the batch."""
    book = cluster.restores
    record, batch = book.records[planned.item_id][1], book.batches.get(planned.restore_id)
    others = any(other.restore_id == planned.restore_id and other != planned for other in book.under_way)
    over: list[Entry] = []
    if batch is not None and not others:
        cancelled = planned.restore_id in book.cancelled
        over = batch.to(BatchStatus.CANCELLED if cancelled else BatchStatus.DONE, cluster.now_us())
    return _end(record, state, ended(record, payload, state), over)


def call_off_restore(cluster: ClusterState, restore_id: str) -> list[Entry]:
    """Cancels a restore. Does nothing if it is cancelled already."""
    return [] if restore_id in cluster.restores.cancelled else [_new(f"unrestore/{restore_id}", {})]


# -- Jobs ------------------------------------------------------------------------------------------------------------


def define_job(cluster: ClusterState, name: str, job: Job | None) -> list[Entry]:
    """Records a job's definition; None: the job is deleted."""
    return [_numbered(cluster, "job", name, {} if job is None else job.to_payload())]


def begin_run(_: ClusterState, job: str, at_us: int, operators: Collection[str] = ()) -> list[Entry]:
    """Begins a run of a job. The writer raises IllegalRecord if a run for that time was begun before.

    Args:
        operators: the operators that the run has a stage for.
    """
    return _under_way(f"run/{job}/{at_us}", {"operators": list(operators)})


def end_stage(_: ClusterState, run: Run, stage: JobStage) -> list[Entry]:
    payload = {"reconfigurations": list(stage.reconfigurations)} | ({"error": stage.error} if stage.error else {})
    return [_new(f"stage/{run.id}/{stage.operator}", payload)]


def end_run(cluster: ClusterState, run: Run, state: RunState, reconfigurations: Collection[str], note: str) -> Ending:
    to = RecordState.PROCESSED if state is RunState.PROCESSED else RecordState.FAILED
    payload = {"reconfigurations": list(reconfigurations), "note": note}
    return _end(cluster.jobs.records[run.item_id], to, payload)


# -- Sweeps ----------------------------------------------------------------------------------------------------------


class Items(NamedTuple):
    """The ledger's names for a batch, its entities and its cancellation."""

    batch: str
    entity: str
    cancelled: str


ROLL, SWEEP = Items("roll", "rolled", "unroll"), Items("sweep", "swept", "unsweep")


def items_of(chore: Chore) -> Items:
    return ROLL if chore is Chore.RESTART else SWEEP


def plan_sweep(cluster: ClusterState, sweep_id: str, plan: Plan) -> list[Entry]:
    items = items_of(plan.chore)
    batch = f"{items.batch}/{sweep_id}"
    more: dict[str, Any] = {"site": plan.site, "limit": plan.limit}
    nodes = list(plan.nodes)
    if plan.chore.covers:
        more |= {"chore": plan.chore.value, "operator": plan.operator, "scope": packed(plan.scope)}
        nodes.append(MOVED)
    name = plan.site or "all"
    if plan.operator:
        name = f"{plan.operator} at {plan.site}" if plan.site else plan.operator
    new, going = begun_batch(batch, name, plan.chore.value, cluster.now_us(), more)
    return [new, going, *(_task(items, sweep_id, node) for node in nodes)]


def begin_swept(cluster: ClusterState, sweep_id: str, node: str) -> list[Entry]:
    """Records that a node of a sweep begins; for a restart, also the command to the node's agent. Returns no entries if
    the node must not begin, because the sweep was cancelled or the restart of another node failed."""
    known = cluster.sweeps.there[sweep_id]
    task = known.tasks[node]
    if task.status is not EntityStatus.WAITING:
        return []
    if known.chore is not Chore.RESTART:
        return [_begun(task.record)]
    spawned = cluster.roster.spawned[node]
    return [_begun(task.record), *spawn(cluster, [replace(spawned, generation=spawned.generation + 1)])]


def end_swept(cluster: ClusterState, sweep_id: str, node: str, outcome: Outcome, ms: int) -> Step:
    """Records that a node of a sweep has ended; with its last node, the sweep ends. Does nothing if the node has ended
    already, because it was cancelled before it began."""
    known = cluster.sweeps.there[sweep_id]
    task = known.tasks[node]
    if task.status.over:
        return []
    status, state = EntityStatus.COMPLETED, RecordState.PROCESSED
    if outcome.error or outcome.cancelled:
        status = EntityStatus.FAILED if outcome.error else EntityStatus.CANCELLED
        state = RecordState.FAILED
    columns = {"status": status.value, "ms": ms, "result": outcome.to_json()}
    entries = [_begun(task.record)] if task.status is EntityStatus.WAITING else []
    entries.append(_of(entries[0] if entries else task.record, state, columns))
    waiting = [each for each in known.of(EntityStatus.WAITING) if each.node != node]
    if known.cancelled or (outcome.error and known.chore.stops):
        entries += _withdrawn(waiting)
        waiting = []
    others = [each for each in known.of(EntityStatus.IN_PROGRESS) if each.node != node]
    if not waiting and not others:
        failed = outcome.error or known.of(EntityStatus.FAILED)
        to = BatchStatus.FAILED if failed else BatchStatus.CANCELLED if known.cancelled else BatchStatus.DONE
        entries += known.batch.to(to, cluster.now_us())
    return Ending(entries)


def call_off_sweep(cluster: ClusterState, sweep_id: str) -> Step:
    """Cancels a sweep. Waiting nodes do not begin. Does nothing if it has ended or is cancelled already."""
    known = cluster.sweeps.there[sweep_id]
    if known.over or known.cancelled:
        return []
    over: list[Entry] = []
    if not known.of(EntityStatus.IN_PROGRESS):
        failed = known.of(EntityStatus.FAILED)
        over = known.batch.to(BatchStatus.FAILED if failed else BatchStatus.CANCELLED, cluster.now_us())
    cancelled = _new(f"{items_of(known.chore).cancelled}/{sweep_id}", {})
    return Ending([cancelled, *_withdrawn(known.of(EntityStatus.WAITING)), *over])


def _task(items: Items, sweep_id: str, node: str) -> Entry:
    columns = {"bid": f"{items.batch}/{sweep_id}", "entity": node, "status": EntityStatus.WAITING.value}
    item = f"{items.entity}/{sweep_id}/{node}"
    return entry(item, RecordState.NEW, None, {"set": columns}, Kind.ENTITY.payload_schema)


def _of(record: Record | Entry, state: RecordState, columns: dict[str, Any]) -> Entry:
    return entry(record.item_id, state, record, {"set": columns}, Kind.ENTITY.payload_schema)


def _begun(record: Record) -> Entry:
    return _of(record, RecordState.PROCESSING, {"status": EntityStatus.IN_PROGRESS.value})


def _withdrawn(tasks: Sequence[Task]) -> list[Entry]:
    entries: list[Entry] = []
    for task in tasks:
        begun = _begun(task.record)
        entries += [begun, _of(begun, RecordState.FAILED, {"status": EntityStatus.CANCELLED.value, "ms": 0})]
    return entries
