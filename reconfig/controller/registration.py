"""Who is in the cluster, and under which name: replicas register, keep their leases, and say what they have."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reconfig.alone import NOTHING, Said
from reconfig.controller.claims import Claims, Piece
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.leaving import Leaving
from reconfig.controller.roster import Home
from reconfig.controller.takeovers import Superseded, Takeovers
from stateflow.errors import ForeignLedger
from stateflow.runtime.view import PartitionView
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A copy that is under way to a replica."""

    partition: PartitionId
    move_id: str


@dataclass(frozen=True, slots=True)
class Beat:
    """``belongs_to``: the ledger that its data directory belongs to. ``opening``: it is starting, and registers when it
    knows what it has. ``alone``: what it may serve without a controller. ``version``: of stateflow."""

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
    """Of one that is ``known`` its lease is renewed; another one registers, with the ``ticket``.

    ``ended``: of the copies that it named. ``claimed``: what its data directory has that the ledger does not know was
    said already. ``adopted``: the ledger that it belongs to, where this one has taken over what that knew.
    """

    known: bool = False
    lease_s: float = 0.0
    ended: Sequence[Incoming] = ()
    ticket: str = ""
    claimed: bool = False
    adopted: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a replica says of itself when it registers, or a piece of that, where ``more`` follows."""

    info: ReplicaInfo
    home: Home
    belongs_to: str
    incarnation: str
    ticket: str
    partitions: Sequence[PartitionView]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """``superseded``: to be sealed before its first heartbeat. ``dropped``: operator → newest epoch of what is to be
    deleted before that."""

    operators: Sequence[OperatorSpec] = ()
    superseded: Sequence[Superseded] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)


class Registration:
    def __init__(self, context: ControllerContext, claims: Claims, leaving: Leaving, takeovers: Takeovers) -> None:
        self._context, self._claims, self._leaving, self._takeovers = context, claims, leaving, takeovers
        self._cluster, self._members, self._names = context.cluster, context.members, context.names

    async def register(self, arrival: Arrival) -> Admitted | None:
        """None: its ticket is used or not the newest, and nothing was noted. Raises NameTaken, HoldLost."""
        info, context = arrival.info, self._context
        views = self._members.said(info.name, arrival.ticket, arrival.partitions)
        if views is None:
            return None
        if arrival.more:
            return Admitted()
        self._names.check(info, arrival.home, {view.partition for view in views})
        if not self._is_good(arrival):
            return None
        await context.record(ClusterState.register, info, arrival.home)
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
        """Raises NameTaken."""
        name, own = beat.info.name, self._context.ledger_id
        known = self._members.beat(name, beat.incarnation)
        adopted = beat.belongs_to if beat.belongs_to in self._cluster.adopted else ""
        claimed = self._claims.heard(beat.home.directory)
        if beat.belongs_to and not adopted and beat.belongs_to != own:
            self._names.note(beat.info, beat.home, self._foreign(beat.belongs_to))
            return Answer(claimed=self._claims.foreign(name, beat.home.directory))
        if known:
            self._members.says(name, beat.alone)  # of this incarnation, and no other one of its name
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
            "the replica belongs to another ledger than this controller's",
            remedy="start the controller with that ledger; if it is lost, `stateflow adopt --dry-run` shows what its "
            "replicas have, and `stateflow adopt` takes it into this one",
            ledger=self._context.ledger_id,
            belongs_to=ledger,
        )

    def _is_over(self, copy: Incoming) -> bool:
        """A copy is wanted as long as its move is open, and where it may take over for an owner that is gone. Who does
        not know the operator, in an empty ledger, ends nothing of it."""
        if copy.partition.operator not in self._cluster.deployed or self._takeovers.concerns(copy.partition):
            return False
        return all(open_move.planned.move_id != copy.move_id for open_move in self._cluster.open_moves.values())

    def claim(self, piece: Piece) -> None:
        """A piece of what a replica has of which its controller's ledger knows nothing."""
        if piece.belongs_to == self._context.ledger_id:  # it was told what is deployed, not what is about to be
            piece = piece.only(self._unknown(piece.partitions))
        self._claims.note(piece)

    def _unknown(self, views: Iterable[PartitionView]) -> list[PartitionView]:
        """Those of operators that this ledger has not, and never had."""
        cluster = self._cluster
        have = cluster.deployed.keys() | cluster.planned.keys()
        return [
            view
            for view in views
            if view.partition.operator not in have and view.epoch > cluster.undeployed.get(view.partition.operator, 0)
        ]

    async def replace(self, replica: str, directory: str) -> tuple[str, int]:
        """A name is another data directory's from now on. The former one is refused, whatever it has.

        Returns the directory, and how many partitions the former one had. Raises InvalidArgument, NameTaken."""
        async with self._context.planning:
            directory = self._names.successor(replica, directory)
            await self._context.record(ClusterState.replace, replica, directory)
            self._names.replaced(replica)
        partitions = len(self._cluster.assigned(replica))
        log.warning(
            "replica %s is the data directory %s from now on; the former one had %d partitions",
            replica,
            directory,
            partitions,
        )
        return directory, partitions
