"""Sweeps, folded from the ledger's records; part of :mod:`reconfig.controller.cluster_state`.

A sweep is long work on many nodes: a batch of the board, whose entities are the nodes. Restarts are ``roll/…`` items,
as they were before there were other chores; all other sweeps are ``sweep/…`` items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reconfig.controller.batch_book import Batch, begun_batch, entry
from reconfig.sweeps import Chore, Partitions, Plan, packed, unpacked, without
from stateflow.ledger import Entry, Record, RecordState
from stateflow.ledger.batches import BatchStatus, EntityStatus
from stateflow.ledger.records import Kind
from stateflow.reports import PartitionFault, Rolling, RollingNode, Sweep, SweepNode
from stateflow.types import PartitionId

#: sweeps of each chore that are kept after their end
KEPT = 20
#: last entity of a sweep over partitions: those that moved meanwhile. No node has such a name
MOVED = "(moved)"


class Items(NamedTuple):
    """The ledger's names for a batch, its entities and its cancellation."""

    batch: str
    entity: str
    cancelled: str


ROLL, SWEEP = Items("roll", "rolled", "unroll"), Items("sweep", "swept", "unsweep")


def items_of(chore: Chore) -> Items:
    return ROLL if chore is Chore.RESTART else SWEEP


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a sweep at one node.

    ``error``: why the node failed; empty: it did not. ``done``: partitions that were done, also by a node that failed.
    ``counts``: figures for reports. ``faults``: what was found wrong with partitions of ``done``, or why nothing was
    done with other partitions. ``cancelled``: the node did not finish, as the sweep was cancelled.
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
    """Returns the fields of a fault that a record has: those of release 0.1, which reads no others.

    ``undone`` is left out, as it follows from the partitions that were done.
    """
    return {name: value for name, value in fault.to_dict().items() if name != "undone"}


def _fault_of(kept: Mapping[str, Any], done: Partitions) -> PartitionFault:
    """Inverse of :func:`_kept`."""
    undone = kept["partition"] not in done.get(kept["operator"], ())
    return PartitionFault(**{**kept, "undone": undone})


@dataclass(slots=True)
class Task:
    """One node of a sweep. ``ms``: duration."""

    node: str
    record: Record
    status: EntityStatus = EntityStatus.WAITING
    outcome: Outcome = field(default_factory=Outcome)
    ms: int = 0


@dataclass(slots=True)
class Known:
    """A sweep. ``tasks``: by node, in their order."""

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
        """Returns the nodes that begin now, beside those that are ``going``. ``MOVED`` begins when no node is going."""
        waiting = [task.node for task in self.of(EntityStatus.WAITING) if task.node not in going]
        nodes = [node for node in waiting if node != MOVED]
        if nodes:
            return nodes[: max(0, self.limit - len(going))]
        return [] if going else waiting


@dataclass(slots=True)
class SweepBook:
    """Sweeps, and what follows from those that are no longer kept.

    ``there``: sweeps by id, the newest last. ``whole_us``: when the newest sweep of the whole cluster began, by chore.
    ``wrong``: faults that the newest verification of each partition found.
    """

    there: dict[str, Known] = field(default_factory=dict)
    whole_us: dict[Chore, int] = field(default_factory=dict)
    wrong: dict[PartitionId, list[PartitionFault]] = field(default_factory=dict)

    def under_way(self, chore: Chore | None = None) -> list[str]:
        return [each for each, known in self.there.items() if not known.over and chore in (None, known.chore)]

    def damaged(self) -> list[PartitionFault]:
        """Returns the known faults, sorted by partition.

        A fault is known until a newer verification of the partition does not find it, or until the partition is
        restored or undeployed.
        """
        there = sorted(self.wrong, key=lambda each: (each.operator, each.partition))
        return [fault for each in there for fault in self.wrong[each]]

    def restored(self, partition: PartitionId) -> None:
        """Forgets the faults of a partition, as it was restored."""
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

    # -- what is written ----------------------------------------------------------------------------------

    @staticmethod
    def planned(sweep_id: str, plan: Plan, now_us: int) -> list[Entry]:
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
        new, going = begun_batch(batch, name, plan.chore.value, now_us, more)
        return [new, going, *(_entity(items, sweep_id, node) for node in nodes)]

    def begun(self, sweep_id: str, node: str) -> Entry | None:
        """Returns the entry by which a node begins; None: it does not begin, as the sweep was cancelled."""
        task = self.there[sweep_id].tasks[node]
        return _begun(task.record) if task.status is EntityStatus.WAITING else None

    def ended(self, sweep_id: str, node: str, outcome: Outcome, ms: int, now_us: int) -> list[Entry]:
        """Returns the entries by which a node ends; with the last node, the batch ends.

        Empty: the node has ended already, as it was cancelled before it began.
        """
        known = self.there[sweep_id]
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
            entries += known.batch.to(to, now_us)
        return entries

    def called_off(self, sweep_id: str, now_us: int) -> list[Entry]:
        """Returns the entries that cancel a sweep: waiting nodes do not begin.

        Empty: the sweep has ended or is cancelled already.
        """
        known = self.there[sweep_id]
        if known.over or known.cancelled:
            return []
        over: list[Entry] = []
        if not known.of(EntityStatus.IN_PROGRESS):
            failed = known.of(EntityStatus.FAILED)
            over = known.batch.to(BatchStatus.FAILED if failed else BatchStatus.CANCELLED, now_us)
        return [
            entry(f"{items_of(known.chore).cancelled}/{sweep_id}", RecordState.NEW, None, {}),
            *_withdrawn(known.of(EntityStatus.WAITING)),
            *over,
        ]

    # -- what is read -------------------------------------------------------------------------------------

    def fold_sweep(self, sweep_id: str, record: Record) -> None:
        """Takes in a record of a sweep. Records of restarts name no chore."""
        known = self.there.get(sweep_id)
        if known is None:
            first = record.payload
            chore = Chore(first.get("chore", Chore.RESTART))
            site, operator = first["site"], first.get("operator", "")
            said = first["limit"], site, operator, unpacked(first.get("scope", {}))
            known = self.there[sweep_id] = Known(Batch(record, {}), chore, *said)
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


def _entity(items: Items, sweep_id: str, node: str) -> Entry:
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
