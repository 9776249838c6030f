"""What the controller knows durably: a fold over the ledger's records.

==============================  ============================================================================
item                            records
==============================  ============================================================================
``replica/<name>/<incarnation>``  NEW {site, address, weight}: a replica process registered
``operator/<name>``             NEW {spec, owners}, PROCESSING, PROCESSED (every partition was created) | FAILED
``move/<id>/<partition>``       NEW {operator, partition, source, target, epoch, …}, PROCESSING,
                                PROCESSED {epoch, report} (the target owns) | FAILED {error} (rolled back)
``restore/<id>/<partition>``    NEW {operator, partition, owner, target, epoch, url, …}, PROCESSING,
                                PROCESSED {epoch, report} (the target owns) | FAILED {error}
``grant/<operator>/<p>/<epoch>``  NEW {move}: this epoch is promised to that move's target, and to nobody else
``standbys/<operator>/<n>``     NEW {count}: so many copies beside the owner are wanted from now on
==============================  ============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from stateflow.assignment import Assignment
from stateflow.errors import LeaseLost, OperatorNotDeployed
from stateflow.ledger import App, Ledger, Record, RecordState
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

APP = App("reconfig.controller", "1")


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One partition's move as decided. ``granted_epoch`` is what its target will own the partition at.

    ``strategy``: one of :mod:`reconfig.policies`, or ``standby`` for a copy that stays, or ``failover`` for a take-over
    from ``source``, whose ``how`` is one of :class:`reconfig.failover.How`, and ``standby_move`` the copy's.
    ``bandwidth_max``: bytes a second for the base; 0: no limit. ``asked``: the name its caller used as target.
    """

    reconfiguration: str
    partition: PartitionId
    source: str
    target: str
    epoch: int
    granted_epoch: int
    max_pause_ms: float
    strategy: str
    patience_s: float = 0.0
    bandwidth_max: float = 0.0
    kind: str = "migrate"
    how: str = ""
    standby_move: str = ""
    asked: str = ""

    @property
    def item_id(self) -> str:
        return f"move/{self.reconfiguration}/{self.partition.partition}"

    @property
    def move_id(self) -> str:
        return f"{self.reconfiguration}-{self.partition.partition}"


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """One partition's restore as decided. ``epoch``: the least its target will own it at."""

    restore_id: str
    partition: PartitionId
    owner: str
    target: str
    epoch: int
    url: str = ""
    savepoint: str = ""
    source: str = ""
    batch: int = 0

    @property
    def item_id(self) -> str:
        return f"restore/{self.restore_id}/{self.partition.partition}"


@dataclass(slots=True)
class Deployed:
    spec: OperatorSpec
    assignment: Assignment


@dataclass(slots=True)
class OpenMove:
    planned: PlannedMove
    record: Record
    granted: bool = False


@dataclass(slots=True)
class Book:
    """Fold on start, append and fold alike afterwards. Not thread-safe.

    ``on_record`` is called with every record that was appended: a second book that folds them is the same.
    """

    ledger: Ledger
    replicas: dict[str, ReplicaInfo] = field(default_factory=dict)
    deployed: dict[str, Deployed] = field(default_factory=dict)
    #: deployments that were planned but not finished
    planned: dict[str, tuple[Deployed, Record]] = field(default_factory=dict)
    open_moves: dict[str, OpenMove] = field(default_factory=dict)  # by item id
    open_restores: dict[str, tuple[PlannedRestore, Record]] = field(default_factory=dict)  # by item id
    failed_restores: list[PlannedRestore] = field(default_factory=list)  # whose owner may have stopped for them
    finished: list[tuple[PlannedMove, Record]] = field(default_factory=list)
    upgrades: dict[str, int] = field(default_factory=dict)  # how many, by operator
    epochs_granted: dict[PartitionId, int] = field(default_factory=dict)
    standbys: dict[str, int] = field(default_factory=dict)  # operator → copies wanted
    standby_orders: int = 0
    on_record: Callable[[Record], None] | None = None

    @classmethod
    def read(cls, ledger: Ledger, mirror: Book | None = None) -> Book:
        """``mirror``: an empty book that folds the same records."""
        book = cls(ledger)
        for record in ledger.records(archived=True):
            book.fold(record)
            if mirror is not None:
                mirror.fold(record)
        return book

    def _append(self, item: str, state: RecordState, previous: Record | None, payload: Any = None) -> Record:
        # Its locks have no lease: a controller that comes back carries its own moves on.
        record = self.ledger.put(item, APP, state, previous, payload, lease_s=math.inf)
        self.fold(record)
        if self.on_record is not None:
            self.on_record(record)
        return record

    def _end(self, record: Record, state: RecordState, payload: Any = None) -> None:
        """A result. Where the process ended between a plan's two records, the second is written first."""
        if record.state is RecordState.NEW:
            record = self._append(record.item_id, RecordState.PROCESSING, record)
        try:
            self._append(record.item_id, state, record, payload)
        except LeaseLost:  # a person resolved it by hand; what has happened is told all the same
            again = self._append(record.item_id, RecordState.PROCESSING, None)
            self._append(record.item_id, state, again, payload)

    def fold(self, record: Record) -> None:
        """Know a record that is in the ledger. Those of others, in a ledger that is shared, say nothing here."""
        if record.app.name != APP.name:
            return
        kind, _, rest = record.item_id.partition("/")
        getattr(self, f"_fold_{kind}")(rest, record)

    # -- replicas -----------------------------------------------------------------------------------------

    def register(self, info: ReplicaInfo, incarnation: str) -> None:
        if self.replicas.get(info.name) == info:
            return
        payload = {"site": info.site, "address": info.address, "weight": info.weight}
        self._append(f"replica/{info.name}/{incarnation}", RecordState.NEW, None, payload)

    def _fold_replica(self, rest: str, record: Record) -> None:
        name = rest.rpartition("/")[0]
        self.replicas[name] = ReplicaInfo(name, **record.payload)

    # -- operators ----------------------------------------------------------------------------------------

    def plan_deployment(self, spec: OperatorSpec, owners: dict[int, str]) -> Record:
        payload = {"spec": _spec_to_json(spec), "owners": [owners[p] for p in range(spec.partitions)]}
        planned = self._append(f"operator/{spec.name}", RecordState.NEW, None, payload)
        return self._append(planned.item_id, RecordState.PROCESSING, planned)

    def upgrade(self, spec: OperatorSpec) -> None:
        """Another version of a deployed operator: from here on it is this one, wherever its partitions are."""
        number = self.upgrades.get(spec.name, 0) + 1
        self._append(f"upgrade/{spec.name}/{number}", RecordState.NEW, None, {"spec": _spec_to_json(spec)})

    def _fold_upgrade(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        self.upgrades[name] = int(number)
        self.deployed[name].spec = _spec_of(name, record.payload["spec"])

    def finish_deployment(self, planned: Record) -> None:
        self._end(planned, RecordState.PROCESSED)

    def _fold_operator(self, name: str, record: Record) -> None:
        match record.state:
            case RecordState.NEW:
                spec = _spec_of(name, record.payload["spec"])
                owners = dict(enumerate(record.payload["owners"]))
                self.planned[name] = Deployed(spec, Assignment.initial(name, owners)), record
            case RecordState.PROCESSING:
                self.planned[name] = self.planned[name][0], record
            case RecordState.PROCESSED:
                self.deployed[name] = self.planned.pop(name)[0]

    def operator(self, name: str) -> Deployed:
        """Raises OperatorNotDeployed."""
        try:
            return self.deployed[name]
        except KeyError:
            known = ", ".join(sorted(self.deployed)) or "none"
            raise OperatorNotDeployed(
                f"there is no operator {name!r} (deployed: {known})",
                remedy="deploy it with `stateflow deploy module:Class`",
            ) from None

    def assigned(self, name: str) -> dict[PartitionId, int]:
        """A replica's partitions, and the epochs it owns them at."""
        return {
            PartitionId(operator, number): epoch
            for operator, deployed in self.deployed.items()
            for number, epoch in deployed.assignment.of(name).items()
        }

    # -- moves --------------------------------------------------------------------------------------------

    def next_epoch(self, partition: PartitionId) -> int:
        """Newer than any that is owned or was ever granted."""
        _, epoch = self.operator(partition.operator).assignment.owner(partition.partition)
        return max(epoch, self.epochs_granted.get(partition, 0)) + 1

    def plan_move(self, move: PlannedMove) -> None:
        payload = {
            **asdict(move),
            "operator": move.partition.operator,
            "partition": move.partition.partition,
        }
        del payload["reconfiguration"]
        planned = self._append(move.item_id, RecordState.NEW, None, payload)
        self._append(move.item_id, RecordState.PROCESSING, planned)

    def grant(self, move: PlannedMove) -> None:
        """Raises Locked when the epoch was granted to another move."""
        item = f"grant/{move.partition.operator}/{move.partition.partition}/{move.granted_epoch}"
        self._append(item, RecordState.NEW, None, {"move": move.item_id, "target": move.target})

    def move_owned(self, move: PlannedMove, report: dict[str, Any]) -> None:
        payload = {"epoch": move.granted_epoch, "owner": move.target, "report": report}
        self._end(self.open_moves[move.item_id].record, RecordState.PROCESSED, payload)

    def move_aborted(self, move: PlannedMove, error: dict[str, Any], report: dict[str, Any]) -> None:
        self._end(self.open_moves[move.item_id].record, RecordState.FAILED, {"error": error, "report": report})

    def _fold_move(self, rest: str, record: Record) -> None:
        match record.state:
            case RecordState.NEW:
                fields = dict(record.payload)
                partition = PartitionId(fields.pop("operator"), fields.pop("partition"))
                planned = PlannedMove(rest.rpartition("/")[0], partition, **fields)
                self.open_moves[record.item_id] = OpenMove(planned, record)
            case RecordState.PROCESSING:
                self.open_moves[record.item_id].record = record
            case RecordState.PROCESSED | RecordState.FAILED:
                planned = self.open_moves.pop(record.item_id).planned
                self.finished.append((planned, record))
                if record.state is RecordState.PROCESSED:
                    deployed = self.operator(planned.partition.operator)
                    deployed.assignment = deployed.assignment.moved(
                        planned.partition.partition, planned.target, planned.granted_epoch
                    )

    # -- restores -----------------------------------------------------------------------------------------

    def plan_restore(self, restore: PlannedRestore) -> None:
        payload = asdict(restore)
        payload.pop("restore_id")
        payload |= payload.pop("partition")
        planned = self._append(restore.item_id, RecordState.NEW, None, payload)
        self._append(restore.item_id, RecordState.PROCESSING, planned)

    def restore_owned(self, restore: PlannedRestore, epoch: int, report: dict[str, Any]) -> None:
        payload = {"epoch": epoch, "owner": restore.target, "report": report}
        self._end(self.open_restores[restore.item_id][1], RecordState.PROCESSED, payload)

    def restore_failed(self, restore: PlannedRestore, granted: int, error: dict[str, Any]) -> None:
        """Args: granted: the epoch for which the owner was asked to stop; 0: it was not."""
        payload = {"error": error, "granted": granted}
        self._end(self.open_restores[restore.item_id][1], RecordState.FAILED, payload)

    def _fold_restore(self, rest: str, record: Record) -> None:
        match record.state:
            case RecordState.NEW:
                fields = dict(record.payload)
                partition = PartitionId(fields.pop("operator"), fields.pop("partition"))
                restore = PlannedRestore(rest.rpartition("/")[0], partition, **fields)
                self.open_restores[record.item_id] = restore, record
                self.epochs_granted[partition] = max(self.epochs_granted.get(partition, 0), restore.epoch)
            case RecordState.PROCESSING:
                self.open_restores[record.item_id] = self.open_restores[record.item_id][0], record
            case RecordState.PROCESSED | RecordState.FAILED:
                restore = self.open_restores.pop(record.item_id)[0]
                if record.state is RecordState.PROCESSED:
                    deployed = self.operator(restore.partition.operator)
                    deployed.assignment = deployed.assignment.moved(
                        restore.partition.partition, restore.target, record.payload["epoch"]
                    )
                elif granted := record.payload.get("granted", 0):
                    self.epochs_granted[restore.partition] = max(self.epochs_granted[restore.partition], granted)
                    self.failed_restores.append(restore)

    # -- standbys -----------------------------------------------------------------------------------------

    def want_standbys(self, operator: str, count: int) -> None:
        if self.standbys.get(operator, 0) != count:
            item = f"standbys/{operator}/{self.standby_orders + 1}"
            self._append(item, RecordState.NEW, None, {"count": count})

    def _fold_standbys(self, rest: str, record: Record) -> None:
        operator, _, number = rest.rpartition("/")
        self.standbys[operator] = record.payload["count"]
        self.standby_orders = max(self.standby_orders, int(number))

    def _fold_grant(self, rest: str, record: Record) -> None:
        operator, partition, epoch = rest.rsplit("/", 2)
        self.epochs_granted[PartitionId(operator, int(partition))] = int(epoch)
        self.open_moves[record.payload["move"]].granted = True


def _spec_to_json(spec: OperatorSpec) -> dict[str, Any]:
    return {
        "target": spec.target,
        "partitions": spec.partitions,
        "key": list(spec.key),
        "output_schema": spec.output_schema.hex(),
        "state_schema": spec.state_schema,
        "side_schemas": {tag: schema.hex() for tag, schema in spec.side_schemas},
    }


def _spec_of(name: str, fields: dict[str, Any]) -> OperatorSpec:
    return OperatorSpec(
        name,
        fields["target"],
        fields["partitions"],
        tuple(fields["key"]),
        bytes.fromhex(fields["output_schema"]),
        fields["state_schema"],
        tuple((tag, bytes.fromhex(schema)) for tag, schema in sorted(fields["side_schemas"].items())),
    )
