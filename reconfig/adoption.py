"""The cluster's state rebuilt from what replicas say they have: for a ledger that lost what it knew. Sans-io.

Of each partition the copy that is owned at the greatest epoch counts. Two at one epoch cannot be told apart: then
nothing of that operator is adopted. A partition that nobody owns was lost with its replica, or its replica was not
heard. A copy that was sealed for a move may be older than its target's, as long as that target may come. Both are
adopted only where the caller says so: the sealed copy is served again; a partition without owner waits for a
checkpoint, or for its owner, as after any failover, and is never created empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stateflow.types import OperatorSpec, PartitionId

#: a replica that was not heard may have seen greater epochs than those that were: what is granted from now on is beyond
EPOCHS_SKIPPED = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """A partition as a replica has it. ``state``: OWNED, FENCING, SEALED or WARMING."""

    state: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What the replica of one data directory says it has."""

    replica: str
    directory: str
    ledger: str
    specs: Mapping[str, OperatorSpec] = field(default_factory=dict)
    held: Mapping[PartitionId, Held] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """One operator. ``spec`` is None where it cannot be adopted at all, see ``conflicts``.

    ``owners``: partition → (replica, epoch), of what is adopted. ``sealed``: of what is not owned, partition → who has
    a sealed copy, at which epoch. ``missing``: nobody has it. ``granted``: partition → the newest epoch that counts as
    granted from now on.
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


def claimants(claims: Sequence[Claim], operator: str) -> dict[str, int]:
    """Replica → how many partitions of an operator it has, in whatever form that might be state."""
    found: dict[str, int] = {}
    for claim in claims:
        count = sum(p.operator == operator and held.state != "WARMING" for p, held in claim.held.items())
        if count:
            found[claim.replica] = found.get(claim.replica, 0) + count
    return found


def find(claims: Sequence[Claim], known: set[str]) -> list[Found]:
    """Args: known: operators that the ledger has; nothing is adopted over them."""
    names = {partition.operator for claim in claims for partition in claim.held} - known
    return [found for name in sorted(names) if claimants(claims, name) for found in [_find(claims, name)]]


def _find(claims: Sequence[Claim], operator: str) -> Found:
    found = Found(operator)
    replicas = Counter(claim.replica for claim in claims if any(p.operator == operator for p in claim.held))
    found.conflicts += [f"two data directories are replica {name}" for name, n in sorted(replicas.items()) if n > 1]
    specs = Counter(claim.specs[operator] for claim in claims if operator in claim.specs)
    if not specs:
        found.conflicts.append("no replica has the operator's description")
        return found
    if len({spec.partitions for spec in specs}) > 1:
        found.conflicts.append("replicas differ in how many partitions it has")
        return found
    # the newest, and of those that have no order the one that most have
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
    """Partition → (owner, epoch), for all of them: what is not owned is given to somebody who has not got it, so that
    it goes the way of a failover: a copy that was sealed is served again, else a checkpoint, else it waits."""
    anybody = max(claimants(claims, found.operator).items(), key=lambda each: (each[1], each[0]))[0]
    everything = dict(found.owners)
    for number, (name, epoch) in found.sealed.items():
        everything[number] = name, max(epoch - 1, 1)
    for number in found.missing:
        everything[number] = anybody, 1
    return everything
