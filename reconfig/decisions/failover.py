"""Decisions of failover: takeovers of partitions without their old owner's consent, serving without a controller, and
the adoption of operators that a ledger has lost. Sans-io.

A takeover begins in three cases: the old owner's lease has lapsed by the controller's clock, including its margin, so
that the old owner no longer serves the partition; the old owner came back without the partition's data; or it sealed
the partition for a move that can never end. :func:`choose` names the new owner, the target.

A takeover from a checkpoint loses what the owner acknowledged since. After a cold start, an owner that has not
registered yet may only be slow to start, so such a takeover waits for it for a while (:func:`waits`).

``TABLE`` below is the machine; docs/state-machines.md shows it as a page and a diagram. The grant is recorded before
the target hears of it. A target that does not answer is asked again, because it may already own the partition. A
granted takeover ends without an owner only if the target refuses and then promises never to own the partition by this
takeover, or if the target's lease has lapsed.

The epoch of a takeover that was given up is void: no replica may own the partition at that epoch. The next takeover
gets a newer epoch. A replica that comes back and owns the partition at the void epoch is ordered to seal it.

Owners of operators whose failover is ``manual`` may serve while no controller answers. Each heartbeat reply names the
operators that the replica may serve alone, and the number of the newest failover order. The replica makes both durable
first, and then repeats them in its next heartbeats. The leading controller therefore knows which operators a silent
replica may still be serving: those that it repeated last, those whose failover is manual now, and those that a later
order concerns. A replica that has repeated nothing in this term may be serving every operator that was ever manual.

When a ledger that lost its records adopts operators, the owned copy with the greatest epoch of each partition counts.
If two owned copies have the same epoch, either may be the right one, and the operator is not adopted. Two kinds of
partitions are adopted only if the caller asks for it:

* Only a sealed copy is known. It was sealed for a move and may be older than the copy at the move's target, which may
  still appear. The sealed copy is served again.
* No copy is known: it was lost with its replica, or the controller has not heard from its replica. The partition waits
  for a checkpoint, or for its owner, as after any failover. It is never created empty.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, get_args

from reconfig.decisions.migration import (
    Begin,
    CancelTarget,
    GrantRecorded,
    OwnedRecorded,
    RecordAborted,
    RecordGrant,
    TargetCancelled,
    TargetUnknown,
)
from reconfig.decisions.placement import Terms, best
from stateflow.errors import InvalidArgument, StateflowError, StateMissing, Unavailable
from stateflow.transitions import Guard, Ignored, Impossible, Machine, Order, Row, Table, Transition
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo, node_of, ranges

#: number of epochs that new grants skip, because a replica that has not reported may have seen greater epochs
EPOCHS_SKIPPED = 1000


# -- The successor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standby:
    """A standby copy. ``following`` tells whether it follows its owner; ``sequence`` is the number of the last change
    set that it reported."""

    replica: str
    move_id: str
    following: bool
    sequence: int


@dataclass(frozen=True, slots=True)
class Choice:
    target: str
    how: How
    standby_move: str = ""


def choose(
    owner: ReplicaInfo,
    holds_seal: bool,
    standbys: Sequence[Standby],
    alive: Mapping[str, ReplicaInfo],
    owned: Mapping[str, int],
    sites: Collection[str] = (),
    cordoned: Collection[str] = (),
    tried: Mapping[str, int] = MappingProxyType({}),
) -> Choice | None:
    """Chooses the successor with which the least data is lost: the owner with its sealed partition, else the standby
    with the greatest sequence, else a replica that loads a checkpoint. None: no replica can take over now.

    Among equal successors, the function prefers nodes that are not in maintenance, then the ``sites``. It chooses
    others if there are none of these, because availability is more important. A replica where a takeover failed, e.g.
    for lack of room, is tried again when the others have failed as often. After these criteria the function prefers the
    owner's site, then the least load.

    Args:
        owner: the former owner.
        holds_seal: the owner has the whole partition, sealed; counts only if it is alive.
        alive: replicas that answer, by name.
        owned: number of partitions by replica, including those on their way to it.
        sites: the sites at which the operator is allowed; empty: all.
        cordoned: nodes in maintenance.
        tried: number of failed attempts by replica.
    """

    if holds_seal and owner.name in alive:
        return Choice(owner.name, How.LOCAL)
    following = _following(standbys, alive)
    latest = max((standby.sequence for standby in following), default=0)
    move_ids = {standby.replica: standby.move_id for standby in following if standby.sequence == latest}
    able = [alive[name] for name in move_ids] or [info for info in alive.values() if info.weight > 0]
    target = best(able, owned, Terms(cordoned, sites, tried, {owner.site: -1}))
    if target is None:
        return None
    how = How.STANDBY if move_ids else How.CHECKPOINT
    return Choice(target.name, how, move_ids.get(target.name, ""))


def _following(standbys: Sequence[Standby], alive: Collection[str]) -> list[Standby]:
    return [standby for standby in standbys if standby.following and standby.replica in alive]


def waits(may_come: bool, accepted: bool, standbys: Sequence[Standby], alive: Collection[str]) -> bool:
    """Tells whether a takeover waits for the owner, because only a checkpoint could replace its state.

    Args:
        may_come: the owner may still be starting after a cold start.
        accepted: a command has accepted that batches are lost.
        standbys: the partition's standbys.
        alive: names of the replicas that answer.
    """
    return may_come and not accepted and not _following(standbys, alive)


# -- Why a partition is not served -----------------------------------------------------------------------------------


class Why(StrEnum):
    """Reasons why an owner does not serve its partitions. ``{}`` stands for the owner's name."""

    MISSING = "{} registered without these partitions: its data directory does not hold their current state"
    LAPSED = "the lease of {} has lapsed"
    SEALED = "{} sealed these partitions for a move that ended without an owner"
    SILENT = "{} does not answer"
    ALONE = "{} does not answer, and may be serving these partitions alone"
    OPENING = "{} is starting"
    COMING = "{} has not registered since the cluster was started"


@dataclass(frozen=True, slots=True)
class Lack:
    """A reason why a partition's owner does not serve it. ``failed`` says why the last takeover failed, and is empty if
    none failed. If ``by_command``, a takeover begins only by command. ``until_us`` is the time at which the wait for a
    COMING owner ends, by the controller's clock."""

    owner: str
    why: Why
    failed: str = ""
    by_command: bool = False
    until_us: int = 0


def unserved(lacks: Mapping[PartitionId, Lack]) -> Iterator[tuple[str, list[int], Lack, StateflowError]]:
    """Groups unserved partitions by operator and reason (:class:`Lack`). Yields (operator, partitions, reason, error to
    report)."""
    groups: dict[tuple[str, Lack], list[int]] = {}
    for partition, lack in sorted(lacks.items(), key=lambda each: each[0]):
        groups.setdefault((partition.operator, lack), []).append(partition.partition)
    for (operator, lack), numbers in groups.items():
        yield operator, numbers, lack, _lacking(operator, numbers, lack)


def _lacking(operator: str, numbers: list[int], lack: Lack) -> StateflowError:
    what = lack.why.format(lack.owner)
    if lack.why is Why.OPENING:
        return Unavailable(what, remedy="wait until it has started", operator=operator, partitions=ranges(numbers))
    if lack.why is Why.COMING:
        until = datetime.fromtimestamp(lack.until_us / 1e6, UTC).isoformat(timespec="seconds")
        what += f"; until {until} its partitions wait for it, because a checkpoint may lack acknowledged batches"
    if lack.by_command or lack.why in (Why.ALONE, Why.COMING):
        lost = f"`stateflow takeover {operator} {ranges(numbers)} --accept-loss` gives them to others"
        remedy = f"check that {node_of(lack.owner)} runs with its data directory; if it is gone for good, {lost}"
        error = StateMissing if lack.why is Why.MISSING else Unavailable
        return error(what, remedy=remedy, operator=operator, partitions=ranges(numbers))
    if lack.failed:
        what += f"; no takeover: {lack.failed}"
    elif lack.why is Why.SILENT:
        what += "; its partitions are taken over when its lease has lapsed"
    else:
        what += "; its partitions are being taken over"
    error = StateMissing if lack.why is Why.MISSING else Unavailable
    remedy = "check that it runs" if lack.why is Why.SILENT else "wait"
    if lack.failed:
        remedy = (
            f"start {node_of(lack.owner)} with the data directory that has them, or restore them: "
            f"`stateflow checkpoint restore {operator} {ranges(numbers)} --from STORE`; if they are lost for good, "
            f"start empty: `stateflow undeploy {operator} "
            "--delete-state`, then deploy again"
        )
    return error(what, remedy=remedy, operator=operator, partitions=ranges(numbers))


# -- The takeover -----------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    PLANNED = "PLANNED"
    GRANTED = "GRANTED"
    OWNED = "OWNED"
    COMPLETED = "COMPLETED"
    ABANDONED = "ABANDONED"


TERMINAL = frozenset({Phase.COMPLETED, Phase.ABANDONED})


@dataclass(frozen=True, slots=True)
class TargetOwned:
    epoch: int


@dataclass(frozen=True, slots=True)
class TargetRefused:
    error: StateflowError


@dataclass(frozen=True, slots=True)
class TargetGone:
    """The target's lease has lapsed, margin included."""


Event = (
    Begin | GrantRecorded | TargetOwned | TargetRefused | TargetCancelled | TargetUnknown | TargetGone | OwnedRecorded
)


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Tells the target to own the partition at ``epoch`` → TargetOwned | TargetRefused | TargetUnknown."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RecordOwned:
    """Records in the ledger that the target owns the partition → OwnedRecorded."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Carries out ``instruction`` again after a delay."""

    instruction: TakeOver | CancelTarget


Instruction = RecordGrant | TakeOver | CancelTarget | RecordOwned | RecordAborted | Retry
Says = tuple[Order["Takeover", Instruction], ...]


def _record_aborted_of(takeover: Takeover) -> RecordAborted:
    assert takeover.error is not None
    return RecordAborted(takeover.error)


RECORD_GRANT: Order[Takeover, Instruction] = Order("RecordGrant", lambda takeover: RecordGrant(takeover.granted_epoch))
TAKE_OVER: Order[Takeover, Instruction] = Order("TakeOver", lambda takeover: TakeOver(takeover.granted_epoch))
CANCEL_TARGET: Order[Takeover, Instruction] = Order("CancelTarget", lambda _: CancelTarget())
RECORD_OWNED: Order[Takeover, Instruction] = Order("RecordOwned", lambda takeover: RecordOwned(takeover.granted_epoch))
RECORD_ABORTED: Order[Takeover, Instruction] = Order("RecordAborted", _record_aborted_of)
RETRY_TAKE_OVER: Order[Takeover, Instruction] = Order(
    "Retry(TakeOver)", lambda takeover: Retry(TakeOver(takeover.granted_epoch))
)
RETRY_CANCEL_TARGET: Order[Takeover, Instruction] = Order("Retry(CancelTarget)", lambda _: Retry(CancelTarget()))

CANCELLING: Guard[Takeover] = Guard("the target is asked to cancel", lambda takeover, _: takeover.cancelling)
GRANTED_EPOCH: Guard[Takeover] = Guard(
    "the epoch is the granted one", lambda takeover, event: event.epoch == takeover.granted_epoch
)


def _refused(takeover: Takeover, event: TargetRefused) -> None:
    takeover.error = event.error


def _cancel_for(takeover: Takeover, event: TargetRefused) -> None:
    takeover.cancelling, takeover.error = True, event.error


def _died(takeover: Takeover, _: Event) -> None:
    takeover.error = Unavailable(
        "the takeover's target died, too", remedy="wait until the controller chooses another replica"
    )


_ROWS: tuple[Row[Phase, Takeover], ...] = (
    Transition(Phase.PLANNED, Begin, None, (RECORD_GRANT,), note="the grant is recorded before the target hears of it"),
    Transition(Phase.PLANNED, GrantRecorded, Phase.GRANTED, (TAKE_OVER,)),
    Transition(
        Phase.PLANNED, TargetRefused, Phase.ABANDONED, (RECORD_ABORTED,), effect=_refused,
        note="the grant cannot be recorded",
    ),
    Transition(
        (Phase.PLANNED, Phase.GRANTED), TargetGone, Phase.ABANDONED, (RECORD_ABORTED,), effect=_died,
        note="the target's lease has lapsed too, so it no longer serves",
    ),
    Transition(Phase.GRANTED, TargetOwned, Phase.OWNED, (RECORD_OWNED,), when=GRANTED_EPOCH),
    Impossible(Phase.GRANTED, TargetOwned, note="that epoch was never granted"),
    Transition(
        Phase.GRANTED, TargetUnknown, None, (RETRY_CANCEL_TARGET,), when=CANCELLING, note="silence decides nothing"
    ),
    Transition(
        Phase.GRANTED, TargetUnknown, None, (RETRY_TAKE_OVER,), note="the target may own; silence decides nothing"
    ),
    Transition(
        Phase.GRANTED, TargetRefused, None, (CANCEL_TARGET,), effect=_cancel_for,
        note="a late request is then refused",
    ),
    Transition(
        Phase.GRANTED, TargetCancelled, Phase.ABANDONED, (RECORD_ABORTED,), when=CANCELLING,
        note="the target never owns by this takeover",
    ),
    Impossible(Phase.GRANTED, TargetCancelled, note="the target was not asked to cancel"),
    Transition(Phase.OWNED, OwnedRecorded, Phase.COMPLETED, ()),
    Ignored(
        Phase.OWNED, (TargetOwned, TargetUnknown, TargetGone, TargetRefused), (),
        note="the target owns; other reports no longer matter",
    ),
    Ignored((Phase.COMPLETED, Phase.ABANDONED), get_args(Event), (), note="late events of an ended takeover"),
    # answers to instructions that were not given
    Impossible((Phase.GRANTED, Phase.OWNED), (Begin, GrantRecorded)),
    Impossible(Phase.PLANNED, (TargetOwned, TargetUnknown)),
    Impossible((Phase.PLANNED, Phase.OWNED), TargetCancelled),
    Impossible((Phase.PLANNED, Phase.GRANTED), OwnedRecorded),
)  # fmt: skip
_INVARIANTS: tuple[Guard[Takeover], ...] = (
    Guard(
        "an abandoned takeover has an error",
        lambda takeover, _: takeover.phase is not Phase.ABANDONED or takeover.error is not None,
    ),
    Guard(
        "a target that is asked to cancel had a grant and refused it",
        lambda takeover, _: (
            not takeover.cancelling or (takeover.phase is not Phase.PLANNED and takeover.error is not None)
        ),
    ),
)
TABLE: Table[Phase, Takeover, Says] = Table(
    "A takeover", Phase, get_args(Event), _ROWS, Machine.impossible, _INVARIANTS
)


@dataclass(slots=True)
class Takeover(Machine[Phase, Event, Instruction]):
    """The state machine of one takeover. Only ``handle`` changes it."""

    partition: PartitionId
    granted_epoch: int
    phase: Phase = Phase.PLANNED
    cancelling: bool = False
    error: StateflowError | None = None
    story: deque[str] = field(default_factory=Machine.empty_story)
    table: ClassVar[Table[Phase, Takeover, Says]] = TABLE

    def _where(self) -> dict[str, Any]:
        return {"partition": self.partition}

    @classmethod
    def resumed(cls, partition: PartitionId, granted_epoch: int, granted: bool) -> tuple[Takeover, list[Instruction]]:
        """Resumes a takeover after a restart of the controller. If ``granted``, the grant is in the ledger, and the
        target is asked again; a target that has answered before gives the same answer."""
        takeover = cls(partition, granted_epoch)
        takeover.story.append("resumed")
        if not granted:
            return takeover, takeover.handle(Begin())
        takeover.phase = Phase.GRANTED
        return takeover, [TAKE_OVER.make(takeover)]


# -- Serving without a controller ------------------------------------------------------------------------------------


class Failover(StrEnum):
    """An operator's failover mode: whether a partition whose owner does not answer is taken over automatically."""

    AUTOMATIC = "automatic"  # another replica takes it over when the owner's lease has lapsed
    MANUAL = "manual"  # its owner continues to serve it alone, until a command gives it to another replica

    @classmethod
    def named(cls, name: str) -> Failover:
        """Returns the failover mode of that name. Raises InvalidArgument."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidArgument(f"{name!r} is not a failover mode", remedy=f"use {' or '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class Said:
    """A replica's report of the operators that it may serve alone, as of a failover order."""

    order: int
    operators: frozenset[str]


NOTHING = Said(0, frozenset())


@dataclass(slots=True)
class Failovers:
    """Failover orders, numbered across all operators. ``newest`` has each operator's newest order, as (number, whether
    it is manual); ``count`` is the number of the newest order of all."""

    newest: dict[str, tuple[int, bool]] = field(default_factory=dict)
    count: int = 0

    def order(self, operator: str, failover: Failover) -> None:
        self.count += 1
        self.newest[operator] = self.count, failover is Failover.MANUAL

    def undeployed(self, operator: str) -> None:
        """Resets the name to automatic failover, in case another operator is deployed under it."""
        if operator in self.newest:
            self.order(operator, Failover.AUTOMATIC)

    def is_manual(self, operator: str) -> bool:
        return self.newest.get(operator, (0, False))[1]

    def manual(self) -> frozenset[str]:
        return frozenset(operator for operator, (_, manual) in self.newest.items() if manual)

    def may_be_alone(self, operator: str, said: Said | None) -> bool:
        """Tells whether a silent replica may be serving an operator.

        Args:
            said: the replica's last report in this term; None: it reported nothing.
        """
        number, manual = self.newest.get(operator, (0, False))
        if said is None:
            return number > 0
        return manual or operator in said.operators or said.order < number


# -- Adoption --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A replica's copy of a partition. ``state`` is OWNED, FENCING, SEALED or WARMING."""

    state: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A replica's report of what its data directory holds. ``ledger`` is the id of the ledger that it belongs to."""

    replica: str
    directory: str
    ledger: str
    specs: Mapping[str, OperatorSpec] = field(default_factory=dict)
    held: Mapping[PartitionId, Held] = field(default_factory=dict)


def claimants(claims: Sequence[Claim], operator: str) -> dict[str, int]:
    """Counts an operator's partitions by replica, without incomplete copies (WARMING)."""
    found: dict[str, int] = {}
    for claim in claims:
        count = sum(p.operator == operator and held.state != "WARMING" for p, held in claim.held.items())
        if count:
            found[claim.replica] = found.get(claim.replica, 0) + count
    return found


@dataclass(slots=True)
class Found:
    """One operator, as far as replicas have reported it.

    Attributes:
        spec: the operator's description; None: the operator cannot be adopted, because of ``conflicts``.
        owners: partition → (replica, epoch).
        sealed: partition → (replica, epoch) of the newest sealed copy, if it is newer than any owned copy.
        missing: partitions without any copy.
        granted: partition → the newest epoch that counts as granted.
        conflicts: reasons against the adoption, for people to read.
    """

    operator: str
    spec: OperatorSpec | None = None
    owners: dict[int, tuple[str, int]] = field(default_factory=dict)
    sealed: dict[int, tuple[str, int]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    granted: dict[int, int] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.spec is not None and not (self.sealed or self.missing or self.conflicts)


def find(claims: Sequence[Claim], known: set[str]) -> list[Found]:
    """Returns the operators that replicas report and the ledger lacks, each with what replicas have of it.

    Args:
        known: operators in the ledger, which are not adopted.
    """
    names = {partition.operator for claim in claims for partition in claim.held} - known
    return [found for name in sorted(names) if claimants(claims, name) for found in [_find(claims, name)]]


def _find(claims: Sequence[Claim], operator: str) -> Found:
    found = Found(operator)
    replicas = Counter(claim.replica for claim in claims if any(p.operator == operator for p in claim.held))
    found.conflicts += [
        f"several data directories have the replica name {name}" for name, n in sorted(replicas.items()) if n > 1
    ]
    specs = Counter(claim.specs[operator] for claim in claims if operator in claim.specs)
    if not specs:
        found.conflicts.append("no replica has the operator's description")
        return found
    if len({spec.partitions for spec in specs}) > 1:
        found.conflicts.append("replicas disagree on the number of partitions")
        return found
    # the newest spec; among specs without a recorded time, the one that most replicas have
    spec = max(specs, key=lambda each: (each.recorded_us, specs[each], each.target, each.state_schema))
    newest = max(held.epoch for claim in claims for p, held in claim.held.items() if p.operator == operator)
    for number in range(spec.partitions):
        found.granted[number] = newest + EPOCHS_SKIPPED
        _find_one(claims, PartitionId(operator, number), found)
    if not found.conflicts:
        found.spec = spec
    return found


def _find_one(claims: Sequence[Claim], partition: PartitionId, found: Found) -> None:
    number = partition.partition
    copies = [(claim.held[partition], claim.replica) for claim in claims if partition in claim.held]
    owned = sorted((held.epoch, name) for held, name in copies if held.state in ("OWNED", "FENCING"))
    sealed = sorted((held.epoch, name) for held, name in copies if held.state == "SEALED")
    if owned and (not sealed or sealed[-1][0] <= owned[-1][0]):
        epoch, name = owned[-1]
        if len(owned) > 1 and owned[-2][0] == epoch:
            found.conflicts.append(f"{partition} is owned by {owned[-2][1]} and {name}, both at epoch {epoch}")
        found.owners[number] = name, epoch
    elif sealed:
        epoch, name = sealed[-1]
        found.sealed[number] = name, epoch
    else:
        found.missing.append(number)


def assignment(found: Found, claims: Sequence[Claim]) -> dict[int, tuple[str, int]]:
    """Returns (owner, epoch) of every partition.

    A partition that exists only as a sealed copy is assigned to the replica with the copy, one epoch before the copy's
    epoch. A missing partition is assigned to the replica with the most partitions, at epoch 1. No replica owns these
    partitions at these epochs, so failover begins for them: the sealed copy is served again, else a checkpoint is
    loaded, else the partition waits.
    """
    anybody = max(claimants(claims, found.operator).items(), key=lambda each: (each[1], each[0]))[0]
    everything = dict(found.owners)
    for number, (name, epoch) in found.sealed.items():
        everything[number] = name, max(epoch - 1, 1)
    for number in found.missing:
        everything[number] = anybody, 1
    return everything
