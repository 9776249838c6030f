"""Claims: partitions that replicas have and the ledger does not know, and their adoption into the ledger.

The controller remembers claims, so that it never creates empty partitions in their place. A replica that belongs to
another ledger is not registered; a replica that registers may have operators that this ledger has lost. Both report
what they have. Claims are kept in memory, because replicas report them again to a new controller.

For adoption into a ledger that lost its records, the copy of a partition that is owned at the greatest epoch counts.
Two owned copies at the same epoch cannot be told apart; then nothing of that operator is adopted. A partition that no
replica owns was lost with its replica, or the controller has not heard its replica. A copy that was sealed for a move
may be older than the copy at the move's target, which may still appear. Partitions of both kinds are adopted only if
the caller asks for that: the sealed copy is served again; a partition without any copy waits for a checkpoint, or for
its owner, as after any failover, and is never created empty.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.folds import Home
from stateflow.clock import Clock
from stateflow.code.loading import check_signed
from stateflow.errors import AdoptionRefused, PartitionsClaimed
from stateflow.partition.control import PartitionView
from stateflow.settings import ControllerSettings
from stateflow.status import AdoptedOperator
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: the most silent replicas remembered at once, as any process may report under any name
SILENT_MAX = 1_000
#: a replica that was not heard may have seen greater epochs than those that were, so new grants skip that many epochs
EPOCHS_SKIPPED = 1000


# -- Claims ----------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a replica's report of what it has. ``belongs_to``: the ledger that the replica's data directory belongs
    to. ``first``: the piece begins a new report and voids the former one; ``last``: it completes the report."""

    info: ReplicaInfo
    home: Home
    belongs_to: str
    operators: Sequence[OperatorSpec]
    partitions: Sequence[PartitionView]
    first: bool = False
    last: bool = False

    def only(self, partitions: Sequence[PartitionView]) -> Piece:
        return replace(self, partitions=partitions)


@dataclass(slots=True)
class Claimant:
    """A replica with claims. ``whole``: its report is complete. ``at``: time of its last heartbeat, monotonic
    seconds."""

    info: ReplicaInfo
    home: Home
    claim: Claim
    at: float
    whole: bool = False


def claimants(claims: Sequence[Claim], operator: str) -> dict[str, int]:
    """Counts an operator's partitions by replica, without incomplete copies (WARMING)."""
    found: dict[str, int] = {}
    for claim in claims:
        count = sum(p.operator == operator and held.state != "WARMING" for p, held in claim.held.items())
        if count:
            found[claim.replica] = found.get(claim.replica, 0) + count
    return found


class Claims:
    def __init__(self, settings: ControllerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._by_directory: dict[str, Claimant] = {}
        #: by directory: replica that has not completed its report, and when it was last heard
        self._silent: dict[str, tuple[str, float]] = {}
        self._heard_from = clock.monotonic() + 2 * settings.heartbeat_interval_s

    def note(self, piece: Piece) -> None:
        directory = piece.home.directory
        if piece.first or directory not in self._by_directory:
            claim = Claim(piece.info.name, directory, piece.belongs_to, {}, {})
            self._by_directory[directory] = Claimant(piece.info, piece.home, claim, self._clock.monotonic())
        noted = self._by_directory[directory]
        specs, held = dict(noted.claim.specs), dict(noted.claim.held)
        specs |= {spec.name: spec for spec in piece.operators}
        held |= {view.partition: Held(view.state, view.epoch) for view in piece.partitions}
        noted.claim = Claim(noted.claim.replica, noted.claim.directory, noted.claim.ledger, specs, held)
        noted.whole = piece.last

    def registered(self, unknown: Piece) -> None:
        """Notes the partitions that a registering replica has.

        Args:
            unknown: the replica's partitions of operators that the ledger does not know.
        """
        self._by_directory.pop(unknown.home.directory, None)
        if unknown.partitions:  # the replica will report more of them; until then nothing is created in their place
            self.note(unknown)

    @property
    def early_s(self) -> float:
        """Seconds until every running replica should have been heard. A controller with an empty ledger waits for that
        long before it creates partitions."""
        return max(0.0, self._heard_from - self._clock.monotonic())

    def foreign(self, replica: str, directory: str) -> bool:
        """Notes a heartbeat of a replica of another ledger. Returns whether its report is complete; otherwise it may
        still be opening its partitions."""
        whole = self.heard(directory)
        if whole:
            self._silent.pop(directory, None)
        else:
            self._silent[directory] = replica, self._clock.monotonic()
            if len(self._silent) > SILENT_MAX:
                del self._silent[next(iter(self._silent))]
        return whole

    def heard(self, directory: str) -> bool:
        """Notes a heartbeat of a replica. Returns whether its report is complete."""
        noted = self._by_directory.get(directory)
        if noted is None:
            return False
        noted.at = self._clock.monotonic()
        return noted.whole

    def present(self) -> list[Claimant]:
        """Returns the claimants with complete reports that were heard lately, by name."""
        since = self._present_since()
        there = [noted for noted in self._by_directory.values() if noted.whole and noted.at >= since]
        return sorted(there, key=lambda noted: (noted.info.name, noted.home.directory))

    def _present_since(self) -> float:
        return self._clock.monotonic() - self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max

    def check_free(self, operator: str, ledger: str) -> None:
        """Checks that an operator can be created. Raises PartitionsClaimed if a replica has partitions of it, or may
        have."""
        since = self._present_since()
        silent = sorted({replica for replica, at in self._silent.values() if at >= since})
        if silent:
            raise PartitionsClaimed(
                "replicas of another ledger have not reported their partitions yet",
                remedy="deploy again when `stateflow status` shows no replica that is opening",
                operator=operator,
                replicas=" ".join(silent),
                ledger=ledger or None,
            )
        found = claimants([noted.claim for noted in self._by_directory.values()], operator)
        if found:
            raise PartitionsClaimed(
                "replicas have partitions of this operator that the ledger does not know",
                remedy="start the controller with the ledger that they belong to; if it is lost, `stateflow adopt "
                "--dry-run` shows what they have, and `stateflow adopt` adds it to this one",
                operator=operator,
                replicas=" ".join(sorted(found)),
                ledger=ledger or None,
            )


# -- Adoption --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """One operator as replicas have it. ``spec`` is None if it cannot be adopted at all, see ``conflicts``.

    ``owners``: partition → (replica, epoch). ``sealed``: partition → (replica, epoch) of the newest sealed copy, for
    partitions whose newest copy is not an owned one. ``missing``: partitions without any copy. ``granted``: partition →
    the newest epoch that counts as granted.
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


class Adopter:
    """Takes operators that replicas have into a ledger that does not know them."""

    def __init__(self, context: ControllerContext, claims: Claims) -> None:
        self._context, self._claims = context, claims

    async def adopt(self, dry_run: bool, partial: bool) -> list[AdoptedOperator]:
        """Adopts every operator that replicas report and the ledger does not know, and returns what was found.

        Everything is checked before the first record. Replicas of another ledger are let in only after all operators
        are recorded.

        Args:
            dry_run: only report what there is.
            partial: also adopt operators whose partitions are partly missing, or exist only as sealed copies.

        Raises AdoptionRefused, unless ``dry_run``.
        """
        async with self._context.deploying, self._context.planning:
            return await self._adopt(self._claims.present(), dry_run, partial)

    async def _adopt(self, there: Sequence[Claimant], dry_run: bool, partial: bool) -> list[AdoptedOperator]:
        claims = [claimant.claim for claimant in there]
        found = find(claims, self._known)
        for each in found:
            each.conflicts += self._strangers(there, each.operator)
        if not dry_run:
            self._check(there, found, partial)
            await self._record(there, found)
        return [_told(each, not dry_run) for each in found]

    @property
    def _known(self) -> set[str]:
        return {*self._context.cluster.deployed, *self._context.cluster.planned}

    def _strangers(self, there: Sequence[Claimant], operator: str) -> list[str]:
        homes = self._context.cluster.roster.homes
        return [
            f"the name {claimant.info.name} belongs to another data directory in this ledger"
            for claimant in there
            if any(partition.operator == operator for partition in claimant.claim.held)
            and claimant.info.name in homes
            and homes[claimant.info.name].directory != claimant.home.directory
        ]

    def _check(self, there: Sequence[Claimant], found: Sequence[Found], partial: bool) -> None:
        if not there:
            raise AdoptionRefused(
                "no replica that answers has partitions unknown to this ledger",
                remedy="start the replicas with this controller's address, and run the command again",
            )
        own = self._context.ledger_id
        for name in sorted(self._known):
            foreign = claimants([c.claim for c in there if c.claim.ledger not in ("", own)], name)
            if foreign:
                raise AdoptionRefused(
                    "an operator on replicas of another ledger is also deployed in this one",
                    remedy="stop those replicas and keep their data directories, or adopt into an empty ledger",
                    operator=name,
                    replicas=" ".join(sorted(foreign)),
                )
        for each in found:
            if each.conflicts or each.spec is None:
                raise AdoptionRefused(
                    "; ".join(each.conflicts),
                    remedy="stop the replica that should not count, keep its data directory, and run the command again",
                    operator=each.operator,
                )
            check_signed(each.spec)
            if not each.whole and not partial:
                lacking = sorted([*each.missing, *each.sealed])
                raise AdoptionRefused(
                    f"{len(each.missing)} partitions are missing, {len(each.sealed)} exist only as copies sealed for "
                    "a move",
                    remedy="start the replicas that have them, and run the command again; with --partial, sealed "
                    "copies are served again and missing partitions wait for a checkpoint or their owner",
                    operator=each.operator,
                    partitions=" ".join(map(str, lacking[:20])) + (" …" if len(lacking) > 20 else ""),
                )

    async def _record(self, there: Sequence[Claimant], found: Sequence[Found]) -> None:
        context = self._context
        claims = [claimant.claim for claimant in there]
        for claimant in there:
            await context.record(steps.register, claimant.info, claimant.home)
            context.members.expect(claimant.info.name)
        for each in found:
            assert each.spec is not None
            await context.record(steps.adopt, each.spec, assignment(each, claims), each.granted)
            log.warning(
                "operator %s adopted: %d partitions, %d missing", each.operator, len(each.owners), len(each.missing)
            )
        for ledger in sorted({claim.ledger for claim in claims} - {"", context.ledger_id}):
            await context.record(steps.adopt_ledger, ledger)
            log.warning("replicas of ledger %s now belong to ledger %s", ledger, context.ledger_id)


def _told(found: Found, done: bool) -> AdoptedOperator:
    return AdoptedOperator(
        found.operator,
        found.spec.partitions if found.spec else 0,
        tuple(sorted(found.owners)),
        tuple(sorted(found.sealed)),
        tuple(found.missing),
        tuple(found.conflicts),
        done,
    )
