"""Registers replicas under their names, renews their leases, and records the partitions that they report.

Claims are partitions that replicas have and the ledger does not know. The controller remembers them, so that it never
creates empty partitions in their place. A replica that belongs to another ledger is not registered; a replica that
registers may have operators that this ledger has lost. Both report what they have. Claims are kept in memory, because
replicas report them again to a new controller. :class:`Adopter` takes claimed operators into the ledger, by the rules
of :mod:`reconfig.decisions.failover`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.folds import Home
from reconfig.controller.takeovers import Takeovers
from reconfig.decisions.failover import NOTHING, Claim, Found, Held, Said, assignment, claimants, find
from reconfig.decisions.plan import Copy, PlannedMove, PlannedStandby
from stateflow.clock import Clock
from stateflow.code.loading import check_signed
from stateflow.errors import AdoptionRefused, ForeignLedger, InvalidArgument, PartitionsClaimed
from stateflow.partition.control import NamedFollower, PartitionView, Superseded
from stateflow.settings import ControllerSettings
from stateflow.status import AdoptedOperator
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: maximum number of silent replicas that are remembered, because any process may report under any name
SILENT_MAX = 1_000
#: maximum number of data directories whose claims are remembered, and of partitions that one of them claims: any node
#: may report any number of them
CLAIMANTS_MAX, CLAIMED_MAX = 1_000, 1 << 18


# -- Messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Incoming:
    """A copy that is under way between replicas."""

    partition: PartitionId
    move_id: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A replica's heartbeat.

    Attributes:
        belongs_to: the ledger that its data directory belongs to; empty: none yet.
        incoming: copies that it is receiving.
        outgoing: copies that other processes request from it, and whose rightful receivers it does not know.
        opening: it is starting, and registers when it has opened its partitions.
        alone: operators that it may serve without a controller.
        version: its version of stateflow.
    """

    info: ReplicaInfo
    home: Home
    incarnation: str
    belongs_to: str = ""
    incoming: Sequence[Incoming] = ()
    outgoing: Sequence[Incoming] = ()
    opening: bool = False
    alone: Said = NOTHING
    version: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a heartbeat.

    Attributes:
        known: the lease is renewed for ``lease_s``; otherwise the replica registers with ``ticket``.
        ended: those of the replica's incoming copies that are over.
        followers: for each outgoing copy of the replica, the replica that may receive it.
        claimed: the replica has already reported all partitions that the ledger does not know.
        adopted: the ledger that the replica belongs to, if this ledger has adopted its replicas; otherwise empty.
    """

    known: bool = False
    lease_s: float = 0.0
    ended: Sequence[Incoming] = ()
    followers: Sequence[NamedFollower] = ()
    ticket: str = ""
    claimed: bool = False
    adopted: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A replica's description of itself when it registers, or a piece of that description; if ``more``, further pieces
    follow.
    """

    info: ReplicaInfo
    home: Home
    belongs_to: str
    incarnation: str
    ticket: str
    partitions: Sequence[PartitionView]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The answer to a registration.

    ``superseded`` names partitions that the replica must seal before its first heartbeat. ``dropped`` maps undeployed
    operators to epochs; the replica must first delete their partitions of that epoch and older.
    """

    operators: Sequence[OperatorSpec] = ()
    superseded: Sequence[Superseded] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a replica's report of what it has.

    Attributes:
        belongs_to: the ledger that the replica's data directory belongs to.
        first: the piece begins a new report, which voids the former one.
        last: the piece completes the report.
    """

    info: ReplicaInfo
    home: Home
    belongs_to: str
    operators: Sequence[OperatorSpec]
    partitions: Sequence[PartitionView]
    first: bool = False
    last: bool = False

    def only(self, partitions: Sequence[PartitionView]) -> Piece:
        return replace(self, partitions=partitions)


# -- Claims ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Claimant:
    """A replica with claims. ``at`` is the time of its last heartbeat, in monotonic seconds; ``whole`` tells whether
    its report is complete."""

    info: ReplicaInfo
    home: Home
    claim: Claim
    at: float
    whole: bool = False


class Claims:
    """The partitions that replicas have and the ledger does not know, by data directory.

    Beyond ``CLAIMANTS_MAX`` directories the one that was silent for longest is forgotten. Its replica no longer runs,
    because each heartbeat counts as a sign of life. A replica that starts again reports again.
    """

    def __init__(self, settings: ControllerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._by_directory: dict[str, Claimant] = {}  # in the order in which they were last heard
        #: by directory: replica that has not completed its report, and when it was last heard
        self._silent: dict[str, tuple[str, float]] = {}
        self._heard_from = clock.monotonic() + 2 * settings.heartbeat_interval_s

    def note(self, piece: Piece) -> None:
        """Notes a piece of a report. Raises InvalidArgument if the directory claims more than ``CLAIMED_MAX``
        partitions; its report is then incomplete, so that no operator is created in its place."""
        directory, now = piece.home.directory, self._clock.monotonic()
        noted = self._by_directory.pop(directory, None)
        if piece.first or noted is None:
            claim = Claim(piece.info.name, directory, piece.belongs_to, {}, {})
            noted = Claimant(piece.info, piece.home, claim, now)
        self._by_directory[directory] = noted
        specs, held = dict(noted.claim.specs), dict(noted.claim.held)
        specs |= {spec.name: spec for spec in piece.operators}
        held |= {view.partition: Held(view.state, view.epoch) for view in piece.partitions}
        if len(held) + len(specs) > CLAIMED_MAX:
            raise InvalidArgument(
                f"the data directory claims more than {CLAIMED_MAX} partitions and operators",
                remedy="check what runs there, and its version",
                replica=piece.info.name,
                directory=directory,
            )
        noted.claim = Claim(noted.claim.replica, noted.claim.directory, noted.claim.ledger, specs, held)
        noted.whole = piece.last
        if len(self._by_directory) > CLAIMANTS_MAX:
            forgotten = self._by_directory.pop(next(iter(self._by_directory)))
            log.warning(
                "more than %d data directories have partitions that the ledger does not know; the report of %s, silent "
                "for longest, is forgotten",
                CLAIMANTS_MAX,
                forgotten.info.name,
            )

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
        """Seconds until every running replica should have sent a heartbeat. A controller with an empty ledger waits for
        that long before it creates partitions."""
        return max(0.0, self._heard_from - self._clock.monotonic())

    def foreign(self, replica: str, directory: str) -> bool:
        """Notes a heartbeat of a replica of another ledger. Returns whether the replica's report is complete; otherwise
        the replica may still be opening its partitions.
        """
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
        noted = self._by_directory.pop(directory, None)
        if noted is None:
            return False
        self._by_directory[directory] = noted
        noted.at = self._clock.monotonic()
        return noted.whole

    def present(self) -> list[Claimant]:
        """Returns the claimants that have completed their reports and still send heartbeats, sorted by name."""
        since = self._present_since()
        there = [noted for noted in self._by_directory.values() if noted.whole and noted.at >= since]
        return sorted(there, key=lambda noted: (noted.info.name, noted.home.directory))

    def _present_since(self) -> float:
        return self._clock.monotonic() - self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max

    def check_free(self, operator: str, ledger: str) -> None:
        """Checks that an operator can be created. Raises PartitionsClaimed if a replica has, or may have, partitions of
        the operator."""
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
                remedy="start the controller with the ledger that they belong to; if that ledger is lost, `stateflow "
                "adopt` records their partitions in this controller's ledger (`--dry-run` shows them first)",
                operator=operator,
                replicas=" ".join(sorted(found)),
                ledger=ledger or None,
            )


# -- Registration ----------------------------------------------------------------------------------------------------


class Registration:
    """Answers registrations and heartbeats."""

    def __init__(self, context: ControllerContext, claims: Claims, takeovers: Takeovers) -> None:
        self._context, self._claims, self._takeovers = context, claims, takeovers
        self._cluster, self._members, self._names = context.cluster, context.members, context.names
        #: held from when a name is checked until its process has a lease, or its new directory is recorded
        self._naming = asyncio.Lock()

    async def register(self, arrival: Arrival) -> Admitted | None:
        """Registers a replica. Returns None, and changes nothing, if its ticket is void.

        Raises NameTaken, InvalidArgument, HoldLost.
        """
        info, context = arrival.info, self._context
        views = self._members.said(info.name, arrival.ticket, arrival.partitions)
        if views is None:
            return None
        if arrival.more:
            return Admitted()
        async with self._naming:
            self._names.check(info, arrival.home, {view.partition for view in views})
            if not self._is_good(arrival):
                return None
            await context.record(steps.register, info, arrival.home)
            context.check_leads()
            if not self._is_good(arrival):
                return None
            self._members.registered(info.name, arrival.incarnation, arrival.ticket)
        dropped = self._dropped(views)
        unknown = self._unknown(views)
        self._claims.registered(Piece(info, arrival.home, arrival.belongs_to, (), unknown, first=True))
        superseded = self._takeovers.registered(info.name, views)
        log.info("replica %s at %s (%s) registered", info.name, info.site, info.address)
        return Admitted([deployed.spec for deployed in self._cluster.deployed.values()], superseded, dropped)

    def _is_good(self, arrival: Arrival) -> bool:
        name = arrival.info.name
        return self._members.is_good(name, arrival.ticket, self._cluster.assigned(name))

    def heard(self, beat: Beat) -> Answer:
        """Answers a heartbeat. Raises NameTaken, InvalidArgument."""
        name, own = beat.info.name, self._context.ledger_id
        known = self._members.beat(name, beat.incarnation)
        adopted = beat.belongs_to if beat.belongs_to in self._cluster.adopted else ""
        claimed = self._claims.heard(beat.home.directory)
        if beat.belongs_to and not adopted and beat.belongs_to != own:
            self._names.note(beat.info, beat.home, self._foreign(beat.belongs_to))
            return Answer(claimed=self._claims.foreign(name, beat.home.directory))
        if known:
            self._members.says(name, beat.alone)  # only from the registered process, not from another one of the name
            self._members.runs(name, beat.version)
            ended = [copy for copy in beat.incoming if self._is_over(copy)]
            return Answer(True, self._context.settings.lease_s, ended, self._followers(name, beat.outgoing))
        self._names.check(beat.info, beat.home)
        if beat.opening:
            self._members.opens(name)
            return Answer()
        ticket = self._members.issue(name, self._context.new_id(), self._cluster.assigned(name))
        return Answer(ticket=ticket, claimed=claimed, adopted=adopted)

    def _foreign(self, ledger: str) -> ForeignLedger:
        return ForeignLedger(
            "the replica belongs to a different ledger than this controller",
            remedy=f"start the controller with ledger {ledger}; if that ledger is lost, `stateflow adopt` records its "
            "replicas' partitions in this controller's ledger (`--dry-run` shows them first)",
            ledger=self._context.ledger_id,
            belongs_to=ledger,
        )

    def _is_over(self, copy: Incoming) -> bool:
        """Tells whether an incoming copy is over: its move is not open, and no takeover can use it.

        A copy of an operator that is not deployed is not over, because a controller whose ledger is empty must not end
        copies.
        """
        if copy.partition.operator not in self._cluster.deployed or self._takeovers.concerns(copy.partition):
            return False
        return all(open_move.planned.move_id != copy.move_id for open_move in self._cluster.open_moves.values())

    def _followers(self, owner: str, copies: Sequence[Incoming]) -> list[NamedFollower]:
        """Returns, for each copy, the name of the replica that was told to make it; empty: no replica was told."""
        if not copies:
            return []
        told = {
            (planned.partition, planned.move_id): planned
            for planned in (open_move.planned for open_move in self._cluster.open_moves.values())
            if planned.source == owner and isinstance(planned, PlannedMove | PlannedStandby)
        }
        return [_named(copy, told.get((copy.partition, copy.move_id))) for copy in copies]

    def claim(self, piece: Piece) -> None:
        """Notes one piece of a replica's report on partitions that this ledger does not know."""
        if piece.belongs_to == self._context.ledger_id:  # the replica knows what is deployed, not what is planned
            piece = piece.only(self._unknown(piece.partitions))
        self._claims.note(piece)

    def _unknown(self, views: Iterable[PartitionView]) -> list[PartitionView]:
        """Returns those views whose operator this ledger does not have and never had."""
        cluster = self._cluster
        have = cluster.deployed.keys() | cluster.planned.keys()
        return [
            view
            for view in views
            if view.partition.operator not in have and view.epoch > cluster.undeployed.get(view.partition.operator, 0)
        ]

    def _dropped(self, views: Iterable[PartitionView]) -> dict[str, int]:
        """Returns which undeployed operators a registering replica still has: operator → newest epoch to delete.

        Args:
            views: what the replica has.
        """
        undeployed, held = self._cluster.undeployed, [(view.partition.operator, view.epoch) for view in views]
        gone = {operator for operator, epoch in held if epoch <= undeployed.get(operator, 0)}
        return {operator: undeployed[operator] for operator in sorted(gone)}

    async def replace(self, replica: str, directory: str) -> tuple[str, int]:
        """Gives a name to another data directory. The former directory is refused from now on, whatever it contains.

        Returns the new directory, and the number of partitions that the former one had. Raises InvalidArgument if the
        name or directory is not known, and NameTaken while a replica of the name may serve.
        """
        async with self._context.planning, self._naming:
            directory = self._names.successor(replica, directory)
            await self._context.record(steps.rehome, replica, directory)
            self._names.replaced(replica)
        partitions = len(self._cluster.assigned(replica))
        log.warning(
            "replica %s now has data directory %s; its former directory had %d partitions",
            replica,
            directory,
            partitions,
        )
        return directory, partitions


def _named(copy: Incoming, planned: Copy | None) -> NamedFollower:
    if planned is None:
        return NamedFollower(copy.partition, copy.move_id)
    return NamedFollower(copy.partition, copy.move_id, planned.target, isinstance(planned, PlannedStandby))


# -- Adoption --------------------------------------------------------------------------------------------------------


class Adopter:
    """Adopts operators that replicas have into a ledger that does not know them."""

    def __init__(self, context: ControllerContext, claims: Claims) -> None:
        self._context, self._claims = context, claims

    async def adopt(self, dry_run: bool, partial: bool) -> list[AdoptedOperator]:
        """Adopts every operator that replicas report and the ledger does not know, and returns what was found.

        Everything is checked before the first record, and recorded as one step.

        Args:
            dry_run: only return what was found.
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
        ledgers = sorted({claim.ledger for claim in claims} - {"", context.ledger_id})
        parts = [partial(steps.register, info=each.info, home=each.home) for each in there]
        for each in found:
            assert each.spec is not None
            owners = assignment(each, claims)
            parts.append(partial(steps.adopt, spec=each.spec, owners=owners, granted=each.granted))
        parts += [partial(steps.adopt_ledger, ledger=ledger) for ledger in ledgers]
        # one step: an adoption that ended in between could not be repeated, as its first operator would be known
        await context.record(steps.together, *parts)
        for claimant in there:
            context.members.expect(claimant.info.name)
        for each in found:
            log.warning(
                "operator %s adopted: %d partitions, %d missing", each.operator, len(each.owners), len(each.missing)
            )
        for ledger in ledgers:
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
