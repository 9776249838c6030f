"""The cluster's state, rebuilt from what replicas report to have, for a ledger that lost its records. Sans-io.

For each partition, the copy that is owned at the greatest epoch counts. Two owned copies at the same epoch cannot be
told apart; then nothing of that operator is adopted. A partition that no replica owns was lost with its replica, or the
controller has not heard its replica. A copy that was sealed for a move may be older than the copy of the move's target,
as long as that target may still come. Partitions of both kinds are adopted only if the caller asks for that: the sealed
copy is served again; a partition without any copy waits for a checkpoint, or for its owner, as after any failover, and
is never created empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stateflow.types import OperatorSpec, PartitionId

#: a replica that was not heard may have seen greater epochs than those that were, so new grants skip that many epochs
EPOCHS_SKIPPED = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """A replica's copy of a partition. ``state``: OWNED, FENCING, SEALED or WARMING."""

    state: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A report of the replica of one data directory: what it has. ``ledger``: id of the ledger it belongs to."""

    replica: str
    directory: str
    ledger: str
    specs: Mapping[str, OperatorSpec] = field(default_factory=dict)
    held: Mapping[PartitionId, Held] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """One operator as replicas have it. ``spec`` is None if it cannot be adopted at all, see ``conflicts``.

    ``owners``: partition → (replica, epoch). ``sealed``: partition → (replica, epoch) of the newest sealed copy, for
    partitions whose newest copy is not an owned one. ``missing``: partitions without any copy. ``granted``: partition →
    the newest epoch that counts as granted from now on.
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
    """Counts an operator's partitions by replica, without incomplete copies (WARMING)."""
    found: dict[str, int] = {}
    for claim in claims:
        count = sum(p.operator == operator and held.state != "WARMING" for p, held in claim.held.items())
        if count:
            found[claim.replica] = found.get(claim.replica, 0) + count
    return found


def find(claims: Sequence[Claim], known: set[str]) -> list[Found]:
    """Returns what replicas have of each operator that the ledger does not know.

    Args:
        known: operators of the ledger; nothing is adopted over them.
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
    # the newest; among specs without an order, the one that most replicas have
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

    A sealed partition is assigned to the replica of its copy, at the epoch before that copy's; a missing one to the
    replica with the most partitions, at epoch 1. No replica owns these at such an epoch, so that they go the way of a
    failover: the sealed copy is served again, else a checkpoint is loaded, else the partition waits.
    """
    anybody = max(claimants(claims, found.operator).items(), key=lambda each: (each[1], each[0]))[0]
    everything = dict(found.owners)
    for number, (name, epoch) in found.sealed.items():
        everything[number] = name, max(epoch - 1, 1)
    for number in found.missing:
        everything[number] = anybody, 1
    return everything
