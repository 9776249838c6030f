"""Planned work, and the decisions on the strategy, order, rounds and turns of its moves. Sans-io.

==========================  ====================================================================================
work                        what it does
==========================  ====================================================================================
:class:`PlannedMove`        a partition changes owners, by one of the strategies below
:class:`PlannedStandby`     a standby copy is made, and follows the owner until it is ended
:class:`PlannedTakeover`    a partition whose owner is gone gets another owner, without the old owner's consent
:class:`PlannedRestore`     a partition gets the state of a checkpoint
==========================  ====================================================================================

The moves of a reconfiguration are put in order, and its strategy splits them into rounds. The moves of a round run side
by side; a round begins when the one before has ended. A move whose round has begun waits for its turn
(:func:`next_turns`), and may get another target until then (:func:`reconfig.decisions.placement.replan`). A strategy
says how partitions are copied, and how many at a time:

====================  ==========  =============  ==============================================================
strategy              copies      at a time      pauses
====================  ==========  =============  ==============================================================
``stop-and-restart``  stopped     all            the whole operator, from its checkpoint until it continues
``pause-and-copy``    fenced      all            each moving partition, while it is copied with all the others
``fluid``             fenced      one            each moving partition, while it alone is copied
``batched``           fenced      a matching     as fluid, one per pair of source and target at a time
``on-demand``         fenced      as requested   each moving partition, from its first batch until it is copied
``warm-up``           serving     a few          each moving partition, while its last changes cross
``auto``              warm-up, but pause-and-copy if changes are written faster than they can cross
====================  ==========  =============  ==============================================================

Fluid and batched are Megaphone's (Hoffmann et al., VLDB 2019). On-demand is the fetching of Meces (Gu et al., ATC
2022) with partitions as the unit: all change owners at once, and the partitions that batches wait for are copied
first. Stop-and-restart is what users of micro-batch engines do today. Warm-up is the pre-copy of live migration of
virtual machines (Clark et al., NSDI 2005).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from stateflow.types import (
    AUTO,
    DEFAULT_OPTIONS,
    How,
    MoveOptions,
    Order,
    PartitionId,
    ReplicaInfo,
    StrategyName,
    node_of,
)

#: bandwidth, in bytes a second, that is assumed until a move has measured it
BANDWIDTH_GUESS = 100e6
#: seconds that a copy behind the fence takes apart from transferring bytes: a snapshot, round trips, opening a database
COLD_FIXED_S = 0.05


# -- Planned work ----------------------------------------------------------------------------------------------------


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
class _PlannedTransfer:
    """Work between two replicas. ``source`` owns the partition at ``epoch``."""

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
    """The caller's constraints on targets.

    Attributes:
        to: name of a site, node or replica; empty: any.
        leaving: node or replica that is drained; empty: none.
        only: nodes that may receive partitions; None: all.
    """

    to: str = ""
    leaving: str = ""
    only: frozenset[str] | None = None

    def allows(self, info: ReplicaInfo) -> bool:
        node = node_of(info.name)
        wanted = self.to in ("", info.site, info.name, node)
        return wanted and self.leaving not in (info.name, node) and (self.only is None or node in self.only)


@dataclass(frozen=True, slots=True)
class PlannedMove(_PlannedTransfer):
    """A move of a partition from one replica to another.

    Attributes:
        granted_epoch: the epoch at which the target will own the partition.
        strategy: derived from ``options`` for this move, as are ``patience_s`` and ``bandwidth_max``.
        options: the options that the caller gave.
        patience_s: seconds to wait until the budget can be met; 0: the default.
        bandwidth_max: bytes a second for the base copy; 0: no limit.
        round: number of the move's round. The moves of a round run side by side, after the round before has ended.
        reason: why a policy or a job wanted the move.
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
class PlannedStandby(_PlannedTransfer):
    """A standby copy of a partition. It is granted no epoch, because it makes no replica the owner."""

    granted_epoch: ClassVar[int] = 0
    max_pause_ms: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "standby"
    cause: ClassVar[Cause] = Cause.STANDBY


@dataclass(frozen=True, slots=True)
class PlannedTakeover(_PlannedTransfer):
    """A takeover of a partition from ``source``, its former owner. ``standby_move`` is the move id of the standby copy
    that takes over, and empty if none does."""

    granted_epoch: int
    how: How
    standby_move: str = ""

    max_pause_ms: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "failover"
    cause: ClassVar[Cause] = Cause.FAILOVER


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """A restore of a partition from a checkpoint. The target will own the partition at ``epoch`` or a later one."""

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


# -- Form in the ledger ----------------------------------------------------------------------------------------------


def to_payload(work: Work) -> dict[str, Any]:
    place = {"operator": work.partition.operator, "partition": work.partition.partition}
    if isinstance(work, PlannedRestore):
        fields = asdict(work)
        del fields["restore_id"], fields["partition"]
        del fields["stop_sources"]  # release 0.1 refuses it here, so the record by which the restore begins has it
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
    """Reads an item ``move/<reconfiguration>/<partition>``. Fields that earlier versions left out get defaults."""
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


# -- Order and rounds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """A partition's load: ``size`` in bytes on disk, and ``rate`` in batches a second."""

    size: int = 0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    partition: PartitionId
    source: str
    target: str
    load: Load = Load()


def ordered(transfers: Iterable[Transfer], order: Order) -> list[Transfer]:
    """Sorts transfers. ``hot-first`` relieves an overloaded source soonest; ``hot-last`` keeps most of the traffic
    undisturbed until the end."""
    by_number = sorted(transfers, key=lambda t: (t.partition.operator, t.partition.partition))
    match order:
        case "hot-first":
            return sorted(by_number, key=lambda t: -t.load.rate)
        case "hot-last":
            return sorted(by_number, key=lambda t: t.load.rate)
        case "number":
            return by_number


def all_at_once(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    return [list(transfers)] if transfers else []


def one_by_one(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    return [[transfer] for transfer in transfers]


def matched(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Returns rounds in which no replica sends twice or receives twice. Each round is as large as possible: a maximum
    matching of sources and targets, found by augmenting paths (Kuhn 1955; the "batched" strategy of Megaphone, VLDB
    2019)."""
    left = list(transfers)
    rounds: list[list[Transfer]] = []
    while left:
        chosen = _maximum_matching(left)
        rounds.append(chosen)
        taken = set(map(id, chosen))
        left = [transfer for transfer in left if id(transfer) not in taken]
    return rounds


def _maximum_matching(transfers: Sequence[Transfer]) -> list[Transfer]:
    of_source: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        of_source.setdefault(transfer.source, []).append(transfer)
    into: dict[str, Transfer] = {}  # by target

    def augment(source: str, seen: set[str]) -> bool:
        for transfer in of_source[source]:
            if transfer.target in seen:
                continue
            seen.add(transfer.target)
            other = into.get(transfer.target)
            if other is None or augment(other.source, seen):
                into[transfer.target] = transfer
                return True
        return False

    for source in of_source:
        augment(source, set())
    chosen = {id(transfer) for transfer in into.values()}
    return [transfer for transfer in transfers if id(transfer) in chosen]


# -- Strategies ------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """The ways in which a partition is copied."""

    WARM = "WARM"  # copy while the source serves, fence when little is left
    COLD = "COLD"  # fence, then copy
    STANDBY = "STANDBY"  # copy, then follow the owner


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy.

    Attributes:
        rounds: splits transfers into rounds.
        stops: the operator is stopped from before the first move until after the last.
        limited: the controller's limit on moves at a time applies.
        on_demand: each target copies the partitions that batches wait for at once, and the others one by one.
    """

    name: StrategyName
    kind: Kind
    rounds: Callable[[Sequence[Transfer]], list[list[Transfer]]]
    stops: bool = False
    limited: bool = False
    on_demand: bool = False


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(StrategyName.STOP_AND_RESTART, Kind.COLD, all_at_once, stops=True),
        Strategy(StrategyName.PAUSE_AND_COPY, Kind.COLD, all_at_once),
        Strategy(StrategyName.FLUID, Kind.COLD, one_by_one),
        Strategy(StrategyName.BATCHED, Kind.COLD, matched),
        Strategy(StrategyName.ON_DEMAND, Kind.COLD, all_at_once, on_demand=True),
        Strategy(StrategyName.WARM_UP, Kind.WARM, all_at_once, limited=True),
    )
}


def strategy_named(name: str) -> Strategy | None:
    """Returns the strategy with a name that MoveOptions accepts; None for ``auto``."""
    return None if name == AUTO else STRATEGIES[StrategyName(name)]


def choose(loads: Sequence[Load], change_bytes: float, max_pause_ms: float | None, bandwidth: float = 0.0) -> Strategy:
    """Chooses the strategy for ``auto``.

    A warm-up never pauses longer than a copy behind the fence, unless the changes during the copy exceed the size of
    the whole state; then copying twice is a waste.

    Args:
        loads: loads of the partitions that move.
        change_bytes: bytes written a second to all these partitions, as measured by earlier moves; 0: not known.
        max_pause_ms: budget, which only a warm-up can keep; None: no budget.
        bandwidth: bytes a second between source and target; 0: not known.
    """
    if max_pause_ms:
        return STRATEGIES[StrategyName.WARM_UP]
    speed = bandwidth or BANDWIDTH_GUESS
    copy_s = sum(load.size for load in loads) / speed + COLD_FIXED_S
    changed = change_bytes * copy_s
    if changed >= sum(load.size for load in loads) > 0 and change_bytes >= speed:
        return STRATEGIES[StrategyName.PAUSE_AND_COPY]
    return STRATEGIES[StrategyName.WARM_UP]


def copies_at_once(plans: Iterable[tuple[Strategy, Sequence[Sequence[Transfer]]]], moves_max: int) -> int:
    """Returns the largest number of copies of these plans that run together. A bandwidth for all copies is divided by
    that number.

    Copies under the controller's limit share that limit across operators.

    Args:
        plans: strategy and rounds of each operator's moves.
        moves_max: the controller's limit on moves at a time.
    """
    limited = others = 0
    for strategy, rounds in plans:
        most = max(map(len, rounds), default=0)
        if strategy.limited:
            limited += most
        else:
            others += most
    return others + min(limited, moves_max)


# -- Turns of moves --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the number of parts under way at a time. 0 means no limit.

    Attributes:
        limit: parts in all.
        per_node: parts with the same node as source or target.
        per_link: parts between the same two sites.
    """

    limit: int = 0
    per_node: int = 0
    per_link: int = 0

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Limits:
        return cls(**payload)

    def to_payload(self) -> dict[str, int]:
        return asdict(self)


NONE = Limits()


def limits_of(options: MoveOptions) -> Limits:
    """Returns the limits that a batch's options ask for."""
    return Limits(options.limit or 0, options.per_node or 0, options.per_link or 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a batch of work, such as a move of a reconfiguration.

    Attributes:
        nodes: source and target node.
        link: source and target site; empty: both are the same.
        shared: the limits for all batches together apply, too.
    """

    batch: str
    nodes: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    shared: bool = True

    @classmethod
    def between(cls, batch: str, source: ReplicaInfo, target: ReplicaInfo, *, shared: bool = True) -> Part:
        nodes = tuple(sorted({node_of(source.name), node_of(target.name)}))
        sites = tuple(sorted({source.site, target.site}))
        return cls(batch, nodes, sites if len(sites) > 1 else (), shared)


class _Taken:
    """Counts parts under way against limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.count = 0
        self._nodes: Counter[str] = Counter()
        self._links: Counter[tuple[str, ...]] = Counter()

    def add(self, part: Part) -> None:
        self.count += 1
        self._nodes.update(part.nodes)
        self._links[part.link] += 1

    @property
    def is_full(self) -> bool:
        return 0 < self.limits.limit <= self.count

    def takes(self, part: Part) -> bool:
        limits = self.limits
        return not (
            self.is_full
            or (limits.per_node and any(self._nodes[node] >= limits.per_node for node in part.nodes))
            or (limits.per_link and part.link and self._links[part.link] >= limits.per_link)
        )


def next_turns(
    waiting: Sequence[Part], under_way: Iterable[Part], limits: Mapping[str, Limits], of_all: Limits = NONE
) -> list[int]:
    """Returns the indices in ``waiting`` of the parts that begin now, in the order of their turns.

    The parts of a batch are its moves. The batch with the fewest parts under way gets the next turn, so that a large
    batch does not keep a small one waiting. Within a batch, turns follow its order and skip the parts that a limit
    holds back.

    Args:
        waiting: parts of batches that are not paused, in the order in which they arrived.
        under_way: parts that have begun and not ended.
        limits: limits by batch; a batch that is missing has none.
        of_all: limits of all batches together.
    """
    all_, each = _Taken(of_all), {part.batch: _Taken(limits.get(part.batch, NONE)) for part in waiting}
    for part in under_way:
        if part.shared:
            all_.add(part)
        if part.batch in each:
            each[part.batch].add(part)
    queues: dict[str, deque[int]] = {}
    for number, part in enumerate(waiting):
        queues.setdefault(part.batch, deque()).append(number)
    chosen: list[int] = []
    while queues:
        batch = min(queues, key=lambda name: each[name].count)  # among equals the one that arrived first
        place = _first_free(queues[batch], waiting, each[batch], all_)
        if place is None:
            del queues[batch]
            continue
        chosen.append(place)
        each[batch].add(waiting[place])
        if waiting[place].shared:
            all_.add(waiting[place])
    return chosen


def _first_free(queue: deque[int], waiting: Sequence[Part], taken: _Taken, all_: _Taken) -> int | None:
    """Removes the first part that the limits allow from the queue, and the parts before it: within one call of
    :func:`next_turns` parts under way never end, so those parts cannot begin. Returns the part's index; None: no part
    may begin."""
    while queue and not taken.is_full:
        part = waiting[place := queue.popleft()]
        if taken.takes(part) and (not part.shared or all_.takes(part)):
            return place
        if part.shared and all_.is_full and all(waiting[each].shared for each in queue):
            break
    return None
