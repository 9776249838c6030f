"""What the controller knows durably: a fold over the ledger's records.

==============================  ============================================================================
item                            records
==============================  ============================================================================
``replica/<name>/<incarnation>``  NEW {site, address, weight}: a replica process registered
``operator/<name>``             NEW {spec, owners}, PROCESSING, PROCESSED (every partition was created) | FAILED
``move/<id>/<partition>``       NEW {operator, partition, source, target, epoch, …}, PROCESSING,
                                PROCESSED {epoch, report} (the target owns) | FAILED {error} (rolled back)
``grant/<operator>/<p>/<epoch>``  NEW {move}: this epoch is promised to that move's target, and to nobody else
==============================  ============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stateflow.assignment import Assignment
from stateflow.errors import OperatorNotDeployed
from stateflow.ledger import App, Ledger, Record, RecordState
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

APP = App("reconfig.controller", "1")


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One partition's move as decided. ``granted_epoch`` is what its target will own the partition at."""

    reconfiguration: str
    partition: PartitionId
    source: str
    target: str
    epoch: int
    granted_epoch: int
    max_pause_ms: float
    strategy: str

    @property
    def item_id(self) -> str:
        return f"move/{self.reconfiguration}/{self.partition.partition}"

    @property
    def move_id(self) -> str:
        return f"{self.reconfiguration}-{self.partition.partition}"


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
    """Fold on start, append and fold alike afterwards. Not thread-safe."""

    ledger: Ledger
    replicas: dict[str, ReplicaInfo] = field(default_factory=dict)
    deployed: dict[str, Deployed] = field(default_factory=dict)
    #: deployments that were planned but not finished
    planned: dict[str, tuple[Deployed, Record]] = field(default_factory=dict)
    open_moves: dict[str, OpenMove] = field(default_factory=dict)  # by item id
    finished: list[tuple[PlannedMove, Record]] = field(default_factory=list)
    epochs_granted: dict[PartitionId, int] = field(default_factory=dict)

    @classmethod
    def read(cls, ledger: Ledger) -> Book:
        book = cls(ledger)
        for record in ledger.records():
            book._fold(record)
        return book

    def _append(self, item: str, state: RecordState, previous: Record | None, payload: Any = None) -> Record:
        record = self.ledger.put(item, APP, state, previous, payload)
        self._fold(record)
        return record

    def _end(self, record: Record, state: RecordState, payload: Any = None) -> None:
        """A result. Where the process ended between a plan's two records, the second is written first."""
        if record.state is RecordState.NEW:
            record = self._append(record.item_id, RecordState.PROCESSING, record)
        self._append(record.item_id, state, record, payload)

    def _fold(self, record: Record) -> None:
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
        payload = {
            "spec": {
                "target": spec.target,
                "partitions": spec.partitions,
                "key": list(spec.key),
                "output_schema": spec.output_schema.hex(),
                "state_schema": spec.state_schema,
                "side_schemas": {tag: schema.hex() for tag, schema in spec.side_schemas},
            },
            "owners": [owners[p] for p in range(spec.partitions)],
        }
        planned = self._append(f"operator/{spec.name}", RecordState.NEW, None, payload)
        return self._append(planned.item_id, RecordState.PROCESSING, planned)

    def finish_deployment(self, planned: Record) -> None:
        self._end(planned, RecordState.PROCESSED)

    def _fold_operator(self, name: str, record: Record) -> None:
        match record.state:
            case RecordState.NEW:
                fields = record.payload["spec"]
                spec = OperatorSpec(
                    name,
                    fields["target"],
                    fields["partitions"],
                    tuple(fields["key"]),
                    bytes.fromhex(fields["output_schema"]),
                    fields["state_schema"],
                    tuple((tag, bytes.fromhex(schema)) for tag, schema in sorted(fields["side_schemas"].items())),
                )
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

    # -- moves --------------------------------------------------------------------------------------------

    def next_epoch(self, partition: PartitionId) -> int:
        """Newer than any that is owned or was ever granted."""
        _, epoch = self.operator(partition.operator).assignment.owner(partition.partition)
        return max(epoch, self.epochs_granted.get(partition, 0)) + 1

    def plan_move(self, move: PlannedMove) -> None:
        payload = {
            "operator": move.partition.operator,
            "partition": move.partition.partition,
            "source": move.source,
            "target": move.target,
            "epoch": move.epoch,
            "granted_epoch": move.granted_epoch,
            "max_pause_ms": move.max_pause_ms,
            "strategy": move.strategy,
        }
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
                fields = record.payload
                planned = PlannedMove(
                    rest.rpartition("/")[0],
                    PartitionId(fields["operator"], fields["partition"]),
                    fields["source"],
                    fields["target"],
                    fields["epoch"],
                    fields["granted_epoch"],
                    fields["max_pause_ms"],
                    fields["strategy"],
                )
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

    def _fold_grant(self, rest: str, record: Record) -> None:
        operator, partition, epoch = rest.rsplit("/", 2)
        self.epochs_granted[PartitionId(operator, int(partition))] = int(epoch)
        self.open_moves[record.payload["move"]].granted = True
