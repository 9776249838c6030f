"""Registers replicas under their names, renews their leases, and records the partitions that they report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reconfig.controller import steps
from reconfig.controller.claims import Claims, Piece
from reconfig.controller.context import ControllerContext
from reconfig.controller.deployments import Leaving
from reconfig.controller.folds import Home
from reconfig.controller.takeovers import Takeovers
from reconfig.decisions.failover import NOTHING, Said
from stateflow.errors import ForeignLedger
from stateflow.partition.control import PartitionView, Superseded
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A copy that is under way to a replica."""

    partition: PartitionId
    move_id: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A replica's heartbeat.

    ``belongs_to``: the ledger that its data directory belongs to; empty: none yet. ``incoming``: copies that it is
    receiving. ``opening``: it is starting, and registers when it has opened its partitions. ``alone``: partitions that
    it may serve without a controller. ``version``: version of stateflow.
    """

    info: ReplicaInfo
    home: Home
    incarnation: str
    belongs_to: str = ""
    incoming: Sequence[Incoming] = ()
    opening: bool = False
    alone: Said = NOTHING
    version: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a heartbeat.

    ``known``: the lease is renewed for ``lease_s``; otherwise the replica registers with ``ticket``. ``ended``: those
    of its incoming copies that are over. ``claimed``: the replica has already reported all partitions that the ledger
    does not know. ``adopted``: the ledger that the replica belongs to, if this ledger has adopted that one.
    """

    known: bool = False
    lease_s: float = 0.0
    ended: Sequence[Incoming] = ()
    ticket: str = ""
    claimed: bool = False
    adopted: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A replica's description of itself when it registers, or a piece of one. ``more``: further pieces follow."""

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

    ``superseded``: partitions that the replica seals before its first heartbeat. ``dropped``: operator → epoch; the
    replica first deletes partitions of that epoch and older.
    """

    operators: Sequence[OperatorSpec] = ()
    superseded: Sequence[Superseded] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)


class Registration:
    def __init__(self, context: ControllerContext, claims: Claims, leaving: Leaving, takeovers: Takeovers) -> None:
        self._context, self._claims, self._leaving, self._takeovers = context, claims, leaving, takeovers
        self._cluster, self._members, self._names = context.cluster, context.members, context.names

    async def register(self, arrival: Arrival) -> Admitted | None:
        """Registers a replica. Returns None if its ticket is void; nothing is noted then.

        Raises NameTaken, HoldLost.
        """
        info, context = arrival.info, self._context
        views = self._members.said(info.name, arrival.ticket, arrival.partitions)
        if views is None:
            return None
        if arrival.more:
            return Admitted()
        self._names.check(info, arrival.home, {view.partition for view in views})
        if not self._is_good(arrival):
            return None
        await context.record(steps.register, info, arrival.home)
        context.check_leads()
        if not self._is_good(arrival):
            return None
        self._members.registered(info.name, arrival.incarnation, arrival.ticket)
        dropped = self._leaving.dropped(views)
        unknown = self._unknown(views)
        self._claims.registered(Piece(info, arrival.home, arrival.belongs_to, (), unknown, first=True))
        superseded = self._takeovers.registered(info.name, views)
        log.info("replica %s at %s (%s) registered", info.name, info.site, info.address)
        return Admitted([deployed.spec for deployed in self._cluster.deployed.values()], superseded, dropped)

    def _is_good(self, arrival: Arrival) -> bool:
        name = arrival.info.name
        return self._members.is_good(name, arrival.ticket, self._cluster.assigned(name))

    def heard(self, beat: Beat) -> Answer:
        """Answers a heartbeat. Raises NameTaken."""
        name, own = beat.info.name, self._context.ledger_id
        known = self._members.beat(name, beat.incarnation)
        adopted = beat.belongs_to if beat.belongs_to in self._cluster.adopted else ""
        claimed = self._claims.heard(beat.home.directory)
        if beat.belongs_to and not adopted and beat.belongs_to != own:
            self._names.note(beat.info, beat.home, self._foreign(beat.belongs_to))
            return Answer(claimed=self._claims.foreign(name, beat.home.directory))
        if known:
            self._members.says(name, beat.alone)  # only from the known incarnation, no other process of the name
            self._members.runs(name, beat.version)
            ended = [copy for copy in beat.incoming if self._is_over(copy)]
            return Answer(True, self._context.settings.lease_s, ended)
        self._names.check(beat.info, beat.home)
        if beat.opening:
            self._members.opens(name)
            return Answer()
        ticket = self._members.issue(name, self._context.new_id(), self._cluster.assigned(name))
        return Answer(ticket=ticket, claimed=claimed, adopted=adopted)

    def _foreign(self, ledger: str) -> ForeignLedger:
        return ForeignLedger(
            "the replica belongs to a different ledger than this controller",
            remedy="start the controller with that ledger; if it is lost, `stateflow adopt --dry-run` shows what its "
            "replicas have, and `stateflow adopt` adds it to this one",
            ledger=self._context.ledger_id,
            belongs_to=ledger,
        )

    def _is_over(self, copy: Incoming) -> bool:
        """Tells whether an incoming copy is over: its move is not open, and no takeover can use it.

        A copy of an operator that is not deployed is not over, because an empty ledger must end none.
        """
        if copy.partition.operator not in self._cluster.deployed or self._takeovers.concerns(copy.partition):
            return False
        return all(open_move.planned.move_id != copy.move_id for open_move in self._cluster.open_moves.values())

    def claim(self, piece: Piece) -> None:
        """Notes one piece of a replica's report on partitions that this ledger does not know."""
        if piece.belongs_to == self._context.ledger_id:  # the replica knows what is deployed, not what is planned
            piece = piece.only(self._unknown(piece.partitions))
        self._claims.note(piece)

    def _unknown(self, views: Iterable[PartitionView]) -> list[PartitionView]:
        """Returns the views of operators that this ledger does not have and never had."""
        cluster = self._cluster
        have = cluster.deployed.keys() | cluster.planned.keys()
        return [
            view
            for view in views
            if view.partition.operator not in have and view.epoch > cluster.undeployed.get(view.partition.operator, 0)
        ]

    async def replace(self, replica: str, directory: str) -> tuple[str, int]:
        """Gives a name to another data directory. The former directory is refused from now on, whatever it has.

        Returns the directory, and the number of partitions that the former one had. Raises InvalidArgument, NameTaken.
        """
        async with self._context.planning:
            directory = self._names.successor(replica, directory)
            await self._context.record(steps.rehome, replica, directory)
            self._names.replaced(replica)
        partitions = len(self._cluster.assigned(replica))
        log.warning(
            "replica %s now has data directory %s; the former one had %d partitions",
            replica,
            directory,
            partitions,
        )
        return directory, partitions
