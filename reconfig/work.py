"""Work that was decided: a typed union, and the form in which the ledger has it.

==========================  ====================================================================================
work                        what it does
==========================  ====================================================================================
:class:`PlannedMove`        a partition changes hands, by one of the strategies of :mod:`reconfig.policies`
:class:`PlannedStandby`     a copy is made beside the owner, follows it and stays
:class:`PlannedTakeover`    a partition whose owner is gone gets another one, without the old one's word
:class:`PlannedRestore`     a partition gets the state that a checkpoint has
==========================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from stateflow import moves
from stateflow.moves import MoveOptions, StrategyName
from stateflow.types import How, PartitionId, ReplicaInfo, node_of


class Cause(StrEnum):
    """What a reconfiguration was begun for."""

    MIGRATE = "migrate"
    REBALANCE = "rebalance"
    DRAIN = "drain"
    FAILOVER = "failover"
    STANDBY = "standby"
    AUTOPILOT = "autopilot"


class ReconfigurationState(StrEnum):
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"  # moves that have not begun wait
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"  # at least one of its moves; the others may have completed
    CANCELLED = "CANCELLED"  # and moves of it ended so; the others may have completed or failed

    @property
    def over(self) -> bool:
        return self not in (ReconfigurationState.RUNNING, ReconfigurationState.PAUSED)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """``epoch``: at which ``source`` owns the partition."""

    reconfiguration: str
    partition: PartitionId
    source: str
    target: str
    epoch: int

    @property
    def item_id(self) -> str:
        return f"move/{self.reconfiguration}/{self.partition.partition}"

    @property
    def move_id(self) -> str:
        return f"{self.reconfiguration}-{self.partition.partition}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What was said of targets. ``to``, as its caller named it: a site, a node or a replica; ``leaving``: a node or
    replica that is drained; ``only``: nodes that may be given something; None: all."""

    to: str = ""
    leaving: str = ""
    only: frozenset[str] | None = None

    def allows(self, info: ReplicaInfo) -> bool:
        node = node_of(info.name)
        wanted = self.to in ("", info.site, info.name, node)
        return wanted and self.leaving not in (info.name, node) and (self.only is None or node in self.only)


@dataclass(frozen=True, slots=True)
class PlannedMove(_Transfer):
    """``granted_epoch`` is what its target will own the partition at.

    ``options``: what was asked; ``strategy``, ``patience_s`` (0: the default) and ``bandwidth_max`` (bytes a second for
    the base; 0: no limit) are what came of it for this move. ``round``: moves of one go on side by side; it begins when
    the one before has ended. ``reason``: why a policy wanted it.
    """

    granted_epoch: int
    strategy: StrategyName
    options: MoveOptions = moves.DEFAULT
    patience_s: float = 0.0
    bandwidth_max: float = 0.0
    cause: Cause = Cause.MIGRATE
    asked: Asked = Asked()
    round: int = 0
    reason: str = ""

    @property
    def max_pause_ms(self) -> float:
        """0: no budget."""
        return self.options.max_pause_ms or 0.0


@dataclass(frozen=True, slots=True)
class PlannedStandby(_Transfer):
    """Nobody is to own by it: it is granted no epoch."""

    granted_epoch: ClassVar[int] = 0
    max_pause_ms: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "standby"
    cause: ClassVar[Cause] = Cause.STANDBY


@dataclass(frozen=True, slots=True)
class PlannedTakeover(_Transfer):
    """``source``: the former owner. ``standby_move``: the copy's, where that is what it rests on."""

    granted_epoch: int
    how: How
    standby_move: str = ""

    max_pause_ms: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "failover"
    cause: ClassVar[Cause] = Cause.FAILOVER


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """``epoch``: the least its target will own it at."""

    restore_id: str
    partition: PartitionId
    owner: str
    target: str
    epoch: int
    url: str = ""
    savepoint: str = ""
    source: str = ""
    batch: int = 0
    stop_sources: bool = False

    @property
    def item_id(self) -> str:
        return f"restore/{self.restore_id}/{self.partition.partition}"


#: what gives a partition another owner
Change = PlannedMove | PlannedTakeover
#: what copies a partition from an owner that lives
Copy = PlannedMove | PlannedStandby
#: what has an item ``move/…`` in the ledger
Planned = PlannedMove | PlannedStandby | PlannedTakeover
Work = Planned | PlannedRestore


# -- as the ledger has it -----------------------------------------------------------------------------------


def to_payload(work: Work) -> dict[str, Any]:
    place = {"operator": work.partition.operator, "partition": work.partition.partition}
    if isinstance(work, PlannedRestore):
        fields = asdict(work)
        del fields["restore_id"], fields["partition"]
        if not work.stop_sources:
            del fields["stop_sources"]  # the release before knows none
        return fields | place
    move = work if isinstance(work, PlannedMove) else None
    takeover = work if isinstance(work, PlannedTakeover) else None
    fields = {
        **place,
        "source": work.source,
        "target": work.target,
        "epoch": work.epoch,
        "granted_epoch": work.granted_epoch,
        "max_pause_ms": work.max_pause_ms,
        "strategy": str(work.strategy),
        "patience_s": move.patience_s if move else 0.0,
        "bandwidth_max": move.bandwidth_max if move else 0.0,
        "kind": str(work.cause),
        "how": str(takeover.how) if takeover else "",
        "standby_move": takeover.standby_move if takeover else "",
        "asked": move.asked.to if move else "",
    }
    if move is None:
        return fields
    fields |= {"round": move.round, "options": _options_payload(move.options)}
    more = {
        "reason": move.reason,
        "leaving": move.asked.leaving,
        "only": None if move.asked.only is None else sorted(move.asked.only),
    }
    return fields | {name: value for name, value in more.items() if value not in ("", None)}


def _options_payload(options: MoveOptions) -> dict[str, Any]:
    """What was not said is 0."""
    return {name: value or 0.0 for name, value in asdict(options).items()}


def _options_of(payload: Mapping[str, Any]) -> MoveOptions:
    said: dict[str, Any] = {name: value for name, value in payload.items() if value}
    return MoveOptions(**said)


def planned_of(item_id: str, payload: Mapping[str, Any]) -> Planned:
    """Of an item ``move/<reconfiguration>/<partition>``. Earlier versions left out fields."""
    reconfiguration = item_id.split("/", 1)[1].rpartition("/")[0]
    partition = PartitionId(payload["operator"], payload["partition"])
    source, target, epoch = payload["source"], payload["target"], payload["epoch"]
    match payload["strategy"]:
        case PlannedStandby.strategy:
            return PlannedStandby(reconfiguration, partition, source, target, epoch)
        case PlannedTakeover.strategy:
            return PlannedTakeover(
                reconfiguration,
                partition,
                source,
                target,
                epoch,
                payload["granted_epoch"],
                How(payload["how"]),
                payload.get("standby_move", ""),
            )
        case strategy:
            only = payload.get("only")
            asked = Asked(
                payload.get("asked", ""), payload.get("leaving", ""), None if only is None else frozenset(only)
            )
            patience_s, bandwidth_max = payload.get("patience_s", 0.0), payload.get("bandwidth_max", 0.0)
            said = payload.get("options") or {  # else what was made of it is all that is known
                "max_pause_ms": payload["max_pause_ms"],
                "max_bandwidth": bandwidth_max,
                "patience_s": patience_s,
                "strategy": strategy,
            }
            return PlannedMove(
                reconfiguration,
                partition,
                source,
                target,
                epoch,
                payload["granted_epoch"],
                StrategyName(strategy),
                _options_of(said),
                patience_s,
                bandwidth_max,
                Cause(payload.get("kind", Cause.MIGRATE)),
                asked,
                payload.get("round", 0),
                payload.get("reason", ""),
            )


def restore_of(item_id: str, payload: Mapping[str, Any]) -> PlannedRestore:
    """Of an item ``restore/<id>/<partition>``."""
    fields = {name: value for name, value in payload.items() if name != "set"}  # which is the board's
    partition = PartitionId(fields.pop("operator"), fields.pop("partition"))
    return PlannedRestore(item_id.split("/", 1)[1].rpartition("/")[0], partition, **fields)
