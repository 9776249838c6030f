"""Planned work: a typed union, and its form in the ledger.

==========================  ====================================================================================
work                        what it does
==========================  ====================================================================================
:class:`PlannedMove`        a partition changes owners, by one of the strategies of :mod:`reconfig.decisions.plan`
:class:`PlannedStandby`     a standby copy is made, follows the owner and stays
:class:`PlannedTakeover`    a partition whose owner is gone gets another one, without the old one's consent
:class:`PlannedRestore`     a partition gets the state of a checkpoint
==========================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from stateflow.types import DEFAULT_OPTIONS, How, MoveOptions, PartitionId, ReplicaInfo, StrategyName, node_of


class Cause(StrEnum):
    """The cause of a reconfiguration."""

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
    FAILED = "FAILED"  # at least one of its moves failed; the others may have completed
    CANCELLED = "CANCELLED"  # at least one of its moves was cancelled; the others may have completed or failed

    @property
    def over(self) -> bool:
        return self not in (ReconfigurationState.RUNNING, ReconfigurationState.PAUSED)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Work between two replicas. ``epoch``: the epoch at which ``source`` owns the partition."""

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
    """The caller's constraints on targets. ``to``: name of a site, node or replica; empty: any. ``leaving``: node or
    replica that is drained; empty: none. ``only``: nodes that may receive partitions; None: all."""

    to: str = ""
    leaving: str = ""
    only: frozenset[str] | None = None

    def allows(self, info: ReplicaInfo) -> bool:
        node = node_of(info.name)
        wanted = self.to in ("", info.site, info.name, node)
        return wanted and self.leaving not in (info.name, node) and (self.only is None or node in self.only)


@dataclass(frozen=True, slots=True)
class PlannedMove(_Transfer):
    """A move of a partition from one replica to another.

    ``granted_epoch``: the epoch at which the target will own it. ``options``: the options that the caller gave.
    ``strategy``, ``patience_s`` (0: the default) and ``bandwidth_max`` (bytes a second for the base copy; 0: no limit)
    are derived from them for this move. ``round``: the moves of a round run side by side; a round begins when the one
    before has ended. ``reason``: why a policy or a job wanted the move.
    """

    granted_epoch: int
    strategy: StrategyName
    options: MoveOptions = DEFAULT_OPTIONS
    patience_s: float = 0.0
    bandwidth_max: float = 0.0
    cause: Cause = Cause.MIGRATE
    asked: Asked = Asked()
    round: int = 0
    reason: str = ""

    @property
    def max_pause_ms(self) -> float:
        """Budget of the pause, in milliseconds; 0: no budget."""
        return self.options.max_pause_ms or 0.0


@dataclass(frozen=True, slots=True)
class PlannedStandby(_Transfer):
    """A standby copy of a partition. It is granted no epoch, because no replica owns the partition by it."""

    granted_epoch: ClassVar[int] = 0
    max_pause_ms: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "standby"
    cause: ClassVar[Cause] = Cause.STANDBY


@dataclass(frozen=True, slots=True)
class PlannedTakeover(_Transfer):
    """A takeover of a partition. ``source``: the former owner. ``standby_move``: the move id of the standby copy that
    takes over; empty: no standby does."""

    granted_epoch: int
    how: How
    standby_move: str = ""

    max_pause_ms: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "failover"
    cause: ClassVar[Cause] = Cause.FAILOVER


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """A restore of a partition from a checkpoint. ``epoch``: the least epoch at which the target will own it."""

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


#: work that gives a partition another owner
Change = PlannedMove | PlannedTakeover
#: work that copies a partition from an owner that is alive
Copy = PlannedMove | PlannedStandby
#: work with an item ``move/…`` in the ledger
Planned = PlannedMove | PlannedStandby | PlannedTakeover
Work = Planned | PlannedRestore


# -- form in the ledger -------------------------------------------------------------------------------------


def to_payload(work: Work) -> dict[str, Any]:
    place = {"operator": work.partition.operator, "partition": work.partition.partition}
    if isinstance(work, PlannedRestore):
        fields = asdict(work)
        del fields["restore_id"], fields["partition"]
        if not work.stop_sources:
            del fields["stop_sources"]  # the previous release does not know it
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
    """Returns options in their recorded form; an option that was not given is 0."""
    return {name: value or 0.0 for name, value in asdict(options).items()}


def _options_of(payload: Mapping[str, Any]) -> MoveOptions:
    said: dict[str, Any] = {name: value for name, value in payload.items() if value}
    return MoveOptions(**said)


def planned_of(item_id: str, payload: Mapping[str, Any]) -> Planned:
    """Reads an item ``move/<reconfiguration>/<partition>``. Earlier versions left out fields."""
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
            said = payload.get("options") or {  # an earlier version: only what followed from the options is known
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
    """Reads an item ``restore/<id>/<partition>``."""
    fields = {name: value for name, value in payload.items() if name != "set"}  # the board's columns
    partition = PartitionId(fields.pop("operator"), fields.pop("partition"))
    return PlannedRestore(item_id.split("/", 1)[1].rpartition("/")[0], partition, **fields)
