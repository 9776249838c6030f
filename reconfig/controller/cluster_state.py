"""The controller's durable state: a fold over the ledger's records.

A controller that starts, the leader and followers use the same fold, :data:`EVENTS`: a record changes the state as the
table says for the kind of its item. Nothing else changes the state. :mod:`reconfig.controller.steps` decides what is
recorded. The module does no I/O.

==============================  ============================================================================
item                            records
==============================  ============================================================================
``replica/<name>/<n>``          NEW {site, address, weight, directory, place}: a replica registered, from this data
                                directory at this place; records of earlier versions lack directory and place
``directory/<name>/<n>``        NEW {directory}: the name belongs to this data directory; data in the former one is lost
``forget/<name>/<n>``           NEW {}: the replica is forgotten; a replica that registers under the name later is new
``operator/<name>``             NEW {spec, owners, sites}, PROCESSING, PROCESSED (every partition was created) |
                                FAILED {error} (what was created is deleted). If the operator was undeployed
                                before, the item is ``operator/<name>/<epoch>``, with its first epoch
``upgrade/<name>/<n>``          NEW {spec}: another version of a deployed operator, for all its partitions
``sites/<operator>/<n>``        NEW {sites}: from now on, only replicas at these sites may own it; empty: all replicas.
                                Partitions elsewhere stay until they move. Operators of earlier versions name no sites
``undeploy/<name>/<epoch>``     NEW {}: the operator is undeployed, with all its state at this epoch or an older one
``move/<id>/<partition>``       NEW {operator, partition, source, target, epoch, …}, PROCESSING (the move begins),
                                PROCESSED {epoch, report} (the target owns) | FAILED {error} (rolled back)
``retarget/move/<id>/<p>/<n>``  NEW {target, reason}: the move, which had not begun, gets another target
``resolve/move/<id>/<p>/<n>``   NEW {how}: the move, whose seal cannot be proved, is given up. With ``restore``, its
                                source must not serve what it sealed; with ``serve-source`` it may. An optional
                                item, see :class:`Event`
``restore/<id>/<partition>``    NEW {operator, partition, owner, target, epoch, url, …}, PROCESSING,
                                PROCESSED {epoch, report} (the target owns) | FAILED {error}
``restores/<id>``               a batch of the board, whose entities are the restores of one command
``unrestore/<id>``              NEW {}: restores of the batch that have not begun are cancelled
``grant/<operator>/<p>/<epoch>``  NEW {move}: this epoch is promised to that move's target, and to no other replica
``adopt/<operator>``            NEW {spec, replicas, owners, epochs, granted}: an operator that the ledger lacked,
                                rebuilt from the reports of replicas; owners are indices into replicas
``adopted/<ledger>``            NEW {}: replicas that belong to that ledger belong to this one from now on
``failover/<operator>/<n>``     NEW {failover}: the failover mode from now on, ``automatic`` or ``manual``. With manual
                                failover, owners serve the operator while no controller answers, and
                                takeovers begin only by command
``standbys/<operator>/<n>``     NEW {count}: number of standbys of each partition wanted from now on
``reconfiguration/<id>``        a batch of the board, see docs/ledger.md, whose entities are its moves
``pause/<id>/<n>``              NEW {paused}: moves of the reconfiguration that have not begun wait, or no longer wait.
                                Only for reconfigurations that an earlier version began
``edit/<id>/<n>``               NEW {limit, per_node, per_link}: limits on its moves at a time, from now on
``cancel/<id>``                 NEW {}: moves of the reconfiguration that are not fenced yet are rolled back
``maintenance/<node>/<n>``      NEW {since_us, until_us, one_of}: the node is in maintenance; {}: no longer
``autopilot/<n>``               NEW {policies, max_pause_ms, cool_down_s, moves_per_minute}: from now on these policies
                                move partitions; no policies: the autopilot is off
``job/<name>/<n>``              NEW {schedule, do, …, paused}: the job's definition from now on; {}: the job is deleted
``run/<job>/<µs>``              NEW {operators}, PROCESSING, PROCESSED | FAILED {reconfigurations, note}: the run
                                for that time; records of earlier versions name no operators
``stage/<job>/<µs>/<operator>``  NEW {reconfigurations, error}: what that run began for an operator, or why nothing
``controller/<name>/<n>``       NEW {site, labels}: a controller became leader; only earlier versions record this, and
                                it has no effect
``stood/<id>``                  NEW {ms}: how long the operator was stopped while the moves of a reconfiguration ran
``agent/<name>/<n>``            NEW {site, address, labels, cores, …, directory, place}: an agent registered
``dismiss/<name>/<n>``          NEW {}: the agent is forgotten, with the replicas that it should run
``spawn/<replica>/<n>``         NEW {agent, running, generation, workers, weight, memory_bytes}: the agent should run
                                the replica like this from now on, until the replica is forgotten
``roll/<id>``                   a batch of the board, {site, limit}: replicas are restarted, a few at a time
``rolled/<id>/<node>``          an entity of a roll: the restart of one node
``unroll/<id>``                 NEW {}: restarts of the roll that have not begun are cancelled
``sweep/<id>``                  a batch of the board, {chore, site, limit, operator, scope}: the chore is done at each
                                node, until the partitions of the scope are done
``swept/<id>/<node>``           an entity of a sweep: the chore at one node; the last one, ``(moved)``, is for
                                partitions that moved during the sweep
``unsweep/<id>``                NEW {}: nodes of the sweep that have not begun are cancelled
==============================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from reconfig.controller.folds import JobBook, RestoreBook, Roster, SweepBook
from reconfig.controller.history import APP, APPS, OPTIONAL, Batch, Recorded, because
from reconfig.decisions.failover import Failover, Failovers
from reconfig.decisions.plan import Change, Limits, Planned, PlannedMove, PlannedStandby, limits_of, planned_of
from reconfig.decisions.policies import AutopilotSettings
from stateflow.errors import REPORT_LINE, InvariantBroken, OperatorNotDeployed
from stateflow.ledger.records import App, Record, RecordState
from stateflow.ledger.rules import BatchStatus
from stateflow.ring import Assignment
from stateflow.status import MaintenanceReport
from stateflow.transitions import check
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo


@dataclass(slots=True)
class Deployed:
    """A deployed operator.

    Attributes:
        first_epoch: the first epoch of this deployment; older ones belong to a former operator of the same name.
        sites: the sites at which the operator is allowed; empty: all.
        versions: the deployed versions, oldest first; the last one serves.
    """

    spec: OperatorSpec
    assignment: Assignment
    first_epoch: int = 1
    sites: tuple[str, ...] = ()
    versions: list[OperatorSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = self.versions or [self.spec]

    def follow(self, spec: OperatorSpec) -> None:
        """Makes ``spec`` the operator's version."""
        self.spec = spec
        self.versions.append(spec)

    def may_be_at(self, info: ReplicaInfo) -> bool:
        return not self.sites or info.site in self.sites


@dataclass(slots=True)
class OpenMove:
    """A move, takeover or standby that has not ended. ``resolution``: how a command gave it up; empty: none did."""

    planned: Planned
    record: Record
    granted: bool = False
    resolution: str = ""


@dataclass(slots=True)
class ClusterState:
    """The cluster's state, folded from the ledger. Not thread-safe.

    ``now_us`` is the ledger's clock. ``numbers`` has the number of the newest item of each series, such as the
    registrations of one replica, see :class:`Event`.
    """

    now_us: Callable[[], int]
    newest: int = 0  # id of the newest folded record, including those of other applications
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)  # by series and name
    roster: Roster = field(default_factory=Roster)
    deployed: dict[str, Deployed] = field(default_factory=dict)
    #: deployments that are planned but not finished
    planned: dict[str, tuple[Deployed, Record]] = field(default_factory=dict)
    open_moves: dict[str, OpenMove] = field(default_factory=dict)  # by item id
    restores: RestoreBook = field(default_factory=RestoreBook)
    finished: list[tuple[Change, Record]] = field(default_factory=list)
    #: reconfigurations by id, in the order of their newest records; moves that create standbys are left out
    history: dict[str, Recorded] = field(default_factory=dict)
    undeployed: dict[str, int] = field(default_factory=dict)  # operator → newest epoch of the former deployment
    versions_us: dict[str, int] = field(default_factory=dict)  # time of each name's newest spec, even if undeployed
    epochs_granted: dict[PartitionId, int] = field(default_factory=dict)
    standbys: dict[str, int] = field(default_factory=dict)  # operator → standbys wanted
    failovers: Failovers = field(default_factory=Failovers)
    paused: set[str] = field(default_factory=set)  # reconfigurations
    autopilot: AutopilotSettings = field(default_factory=AutopilotSettings)
    jobs: JobBook = field(default_factory=JobBook)
    sweeps: SweepBook = field(default_factory=SweepBook)
    adopted: set[str] = field(default_factory=set)  # ids of ledgers
    distrusted: set[str] = field(default_factory=set)  # moves whose source must not serve the partition it sealed
    #: epochs that replicas report and the ledger lacks, e.g. because its database was restored from a backup
    epochs_seen: dict[PartitionId, int] = field(default_factory=dict)
    validated: bool = False  # invariants are checked after each record, see :mod:`stateflow.transitions`

    def fold(self, record: Record) -> None:
        """Folds a record of the ledger. Records of other applications in a shared ledger change nothing."""
        self.newest = record.record_id
        if record.app.name not in APPS:
            return
        kind, _, rest = record.item_id.partition("/")
        if record.app.name == OPTIONAL.name and kind not in EVENTS:
            return
        event = EVENTS[kind]
        if event.series:
            name, _, number = rest.rpartition("/")
            series = event.series_of(name)
            # counted, because registrations of early versions end in a random word
            self.numbers[series] = max(self.numbers.get(series, 0) + 1, int(number) if number.isdecimal() else 0)
        event.fold(self, rest, record)
        if self.validated:
            check(self)

    def next_item(self, kind: str, name: str = "") -> str:
        """Returns the id of a new item of a numbered kind: its number follows the newest one of its series."""
        number = self.numbers.get(EVENTS[kind].series_of(name), 0) + 1
        return f"{kind}/{name}/{number}" if name else f"{kind}/{number}"

    def validate(self) -> None:
        """Checks the invariants. Raises InvariantBroken if one is violated, which only a bug can cause."""
        for deployed in [*self.deployed.values(), *(plan for plan, _ in self.planned.values())]:
            deployed.assignment.validate()
        for words, where in self._broken():
            raise InvariantBroken(f"an invariant is broken: {words}", remedy=REPORT_LINE, **where)

    def _broken(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (invariant that does not hold, where)."""
        for name in self.deployed.keys() & self.planned.keys():
            yield "an operator is either deployed or planned", {"operator": name}
        for name, deployed in [*self.deployed.items(), *((name, plan) for name, (plan, _) in self.planned.items())]:
            assignment, spec = deployed.assignment, deployed.spec
            if (spec.name, assignment.operator, spec.partitions) != (name, name, len(assignment.owners)):
                yield "an assignment covers its operator's partitions", {"operator": name}
            if unknown := set(assignment.owners) - self.roster.replicas.keys():
                yield "owners are registered", {"operator": name, "replicas": ", ".join(sorted(unknown))}
            if min(assignment.epochs, default=1) < deployed.first_epoch or (
                deployed.first_epoch <= self.undeployed.get(name, 0)
            ):
                yield "epochs are newer than those of the undeployed operator", {"operator": name}
        if lost := self.standbys.keys() - self.deployed.keys():
            yield "standbys belong to deployed operators", {"operator": ", ".join(sorted(lost))}
        for spawned in self.roster.spawned.values():
            if spawned.agent not in self.roster.agents:
                yield "a spawned replica has a known agent", {"replica": spawned.replica}
        for restore in self.restores.under_way:
            if not self._exists(restore.partition):
                yield "a restored partition exists", {"restore": restore.restore_id}
        changing: set[PartitionId] = set()
        for open_move in self.open_moves.values():
            planned = open_move.planned
            where = {"partition": planned.partition, "move": planned.move_id}
            if not self._exists(planned.partition):
                yield "a moved partition exists", where
                continue
            if unknown := {planned.source, planned.target} - self.roster.replicas.keys():
                yield "source and target are registered", where | {"replicas": ", ".join(sorted(unknown))}
            epoch = self.deployed[planned.partition.operator].assignment.epochs[planned.partition.partition]
            if isinstance(planned, PlannedStandby):
                if planned.source == planned.target:
                    yield "a standby is not on its owner", where
                continue
            if planned.partition in changing:
                yield "a partition has one move at a time", where
            changing.add(planned.partition)
            if not planned.granted_epoch > max(planned.epoch, epoch):
                yield "the granted epoch is newer than the owned one", where
            if open_move.granted and self.epochs_granted.get(planned.partition, 0) < planned.granted_epoch:
                yield "granted epochs are recorded", where

    def _exists(self, partition: PartitionId) -> bool:
        deployed = self.deployed.get(partition.operator)
        return deployed is not None and 0 <= partition.partition < deployed.spec.partitions

    # -- replicas -----------------------------------------------------------------------------------------

    def is_free(self, name: str, standbys: bool = True) -> bool:
        """Tells whether the replica is free: it owns no partition, and none is moving to or from it.

        Args:
            standbys: a copy to or from the replica, which follows an owner and does not end by itself, counts as well.
        """
        plans = [deployed.assignment for deployed, _ in self.planned.values()]
        assignments = [*plans, *(deployed.assignment for deployed in self.deployed.values())]
        moves = [move.planned for move in self.open_moves.values()] if standbys else list(self.changes())
        restores = self.restores.under_way
        return not (
            any(name in assignment.owners for assignment in assignments)
            or any(name in (move.source, move.target) for move in moves)
            or any(name in (restore.owner, restore.target) for restore in restores)
        )

    def names_used(self) -> set[str]:
        """Returns the names of all replicas that ever registered or were ever assigned to an agent."""
        return {name for series, name in self.numbers if series in ("replica", "spawn")}

    def maintained(self) -> set[str]:
        """Returns the nodes that are in maintenance now."""
        now = self.now_us()
        return {node for node, each in self.roster.maintenance.items() if each.lasts(now)}

    def maintenance_reports(self) -> tuple[MaintenanceReport, ...]:
        """Returns the nodes that are in maintenance now, by name."""
        lasting = self.maintained()
        return tuple(
            MaintenanceReport(node, each.one_of, each.since_us, each.until_us)
            for node, each in sorted(self.roster.maintenance.items())
            if node in lasting
        )

    # -- operators ----------------------------------------------------------------------------------------

    def _fold_upgrade(self, rest: str, record: Record) -> None:
        name = rest.rpartition("/")[0]
        self.deployed[name].follow(self._spec_of(name, record))

    def _fold_sites(self, rest: str, record: Record) -> None:
        self.deployed[rest.rpartition("/")[0]].sites = tuple(record.payload["sites"])

    def _fold_operator(self, rest: str, record: Record) -> None:
        name, _, epoch = rest.partition("/")
        match record.state:
            case RecordState.NEW:
                spec = self._spec_of(name, record)
                owners = dict(enumerate(record.payload["owners"]))
                first = int(epoch or 1)
                sites = tuple(record.payload.get("sites", ()))
                self.planned[name] = Deployed(spec, Assignment.initial(name, owners, first), first, sites), record
            case RecordState.PROCESSING:
                self.planned[name] = self.planned[name][0], record
            case RecordState.PROCESSED:
                self.deployed[name] = self.planned.pop(name)[0]
            case RecordState.FAILED:
                self.undeployed[name] = self.planned.pop(name)[0].first_epoch

    def _spec_of(self, name: str, record: Record) -> OperatorSpec:
        """Returns the spec of a record. Its recording time is the record's timestamp or, if that is not later than the
        newest earlier version, one microsecond after that version. The timestamp also makes the spec newer than specs
        that replicas know from another ledger, or from records that were lost when this ledger's database was restored
        from a backup.
        """
        spec = OperatorSpec.from_json({"name": name, **record.payload["spec"]})
        newest_us = max(spec.recorded_us, self.versions_us.get(name, 0))
        self.versions_us[name] = max(record.timestamp_us, newest_us + 1)
        return replace(spec, recorded_us=self.versions_us[name])

    def newest_epoch(self, name: str) -> int:
        """Returns the newest epoch at which any partition of an operator was ever owned, granted or reported."""
        return max(self.next_epoch(PartitionId(name, p)) for p in range(self.operator(name).spec.partitions)) - 1

    def _fold_undeploy(self, rest: str, record: Record) -> None:
        name, _, epoch = rest.rpartition("/")
        del self.deployed[name]
        self.standbys.pop(name, None)
        self.failovers.undeployed(name)
        self.sweeps.undeployed(name)
        self.undeployed[name] = int(epoch)

    def _fold_adopt(self, name: str, record: Record) -> None:
        fields = record.payload
        owners = tuple(fields["replicas"][number] for number in fields["owners"])
        assignment = Assignment(name, 1, owners, tuple(fields["epochs"]))
        self.undeployed.pop(name, None)  # this ledger's epochs say nothing about those that another ledger granted
        self.deployed[name] = Deployed(self._spec_of(name, record), assignment)
        self.epochs_granted |= {PartitionId(name, p): epoch for p, epoch in enumerate(fields["granted"])}

    def _fold_adopted(self, ledger: str, record: Record) -> None:
        self.adopted.add(ledger)

    def operator(self, name: str) -> Deployed:
        """Returns a deployed operator. Raises OperatorNotDeployed if there is none of this name."""
        try:
            return self.deployed[name]
        except KeyError:
            known = ", ".join(sorted(self.deployed)) or "none"
            raise OperatorNotDeployed(
                f"there is no operator {name!r} (deployed: {known})",
                remedy="deploy it with `stateflow deploy module:Class`",
            ) from None

    def allowed_sites(self) -> dict[str, tuple[str, ...]]:
        """Returns, by operator, the allowed sites of each operator that is not allowed at all sites."""
        return {name: deployed.sites for name, deployed in self.deployed.items() if deployed.sites}

    def assigned(self, name: str) -> dict[PartitionId, int]:
        """Returns the partitions that a replica owns, with their epochs."""
        return {
            PartitionId(operator, number): epoch
            for operator, deployed in self.deployed.items()
            for number, epoch in deployed.assignment.of(name).items()
        }

    def owned_counts(self) -> dict[str, int]:
        """Returns the number of partitions that each replica owns, over all operators."""
        counts: dict[str, int] = {}
        for deployed in self.deployed.values():
            for owner in deployed.assignment.owners:
                counts[owner] = counts.get(owner, 0) + 1
        return counts

    # -- moves --------------------------------------------------------------------------------------------

    def next_epoch(self, partition: PartitionId) -> int:
        """Returns an epoch newer than every epoch at which the partition was owned, granted or reported."""
        _, epoch = self.operator(partition.operator).assignment.owner(partition.partition)
        return max(epoch, self.epochs_granted.get(partition, 0), self.epochs_seen.get(partition, 0)) + 1

    def becomes_owner(self, replica: str, partition: PartitionId, epoch: int) -> bool:
        """Tells whether a move or restore under way makes the replica own the partition at this epoch.

        A move's target owns the partition at the granted epoch; a restore's target owns it at the planned epoch or a
        newer one.
        """
        return any(
            move.planned.partition == partition
            and (move.planned.target, move.planned.granted_epoch) == (replica, epoch)
            for move in self.open_moves.values()
        ) or any(
            restore.partition == partition and restore.target == replica and restore.epoch <= epoch
            for restore in self.restores.under_way
        )

    def changes(self) -> Iterator[Change]:
        """Yields the work under way that changes owners: moves and takeovers, but not standbys."""
        for open_move in self.open_moves.values():
            if not isinstance(open_move.planned, PlannedStandby):
                yield open_move.planned

    def _fold_retarget(self, rest: str, record: Record) -> None:
        item = rest.rpartition("/")[0]
        open_move = self.open_moves[item]
        assert isinstance(open_move.planned, PlannedMove)
        planned = replace(
            open_move.planned,
            target=record.payload["target"],
            reason=because(open_move.planned, record.payload["reason"]),
        )
        open_move.planned = planned
        recorded = self.history[planned.reconfiguration]
        recorded.moves[item] = planned, recorded.moves[item][1]

    def _fold_resolve(self, rest: str, record: Record) -> None:
        self.open_moves[rest.rpartition("/")[0]].resolution = record.payload["how"]

    def _fold_move(self, rest: str, record: Record) -> None:
        match record.state:
            case RecordState.NEW:
                planned = planned_of(record.item_id, record.payload)
                self.open_moves[record.item_id] = OpenMove(planned, record)
                self._remember(planned, record)
            case RecordState.PROCESSING:
                self.open_moves[record.item_id].record = record
                self._remember(self.open_moves[record.item_id].planned, record)
            case RecordState.PROCESSED | RecordState.FAILED:
                open_move = self.open_moves.pop(record.item_id)
                planned = open_move.planned
                if not isinstance(planned, PlannedStandby):  # one that fails is made again and again
                    self.finished.append((planned, record))
                if record.state is RecordState.FAILED and open_move.resolution == "restore":
                    self.distrusted.add(planned.move_id)
                if (record.payload or {}).get("report", {}).get("distrusted"):  # all that release 0.1 recorded
                    self.distrusted.add(planned.move_id)
                self._remember(planned, record)
                if record.state is RecordState.PROCESSED:
                    deployed = self.operator(planned.partition.operator)
                    deployed.assignment = deployed.assignment.moved(
                        planned.partition.partition, planned.target, planned.granted_epoch
                    )

    def _remember(self, planned: Planned, record: Record) -> None:
        if not isinstance(planned, PlannedStandby):
            began = Recorded(record.timestamp_us, by=record.author)
            recorded = self.history.pop(planned.reconfiguration, None) or began
            if isinstance(planned, PlannedMove) and not recorded.moves:
                recorded.limits = limits_of(planned.options)
            recorded.moves[record.item_id] = planned, record
            self.history[planned.reconfiguration] = recorded

    def _fold_restore(self, rest: str, record: Record) -> None:
        restore = self.restores.fold_one(record)
        partition, granted = restore.partition, self.epochs_granted.get(restore.partition, 0)
        if record.state is RecordState.NEW:
            self.epochs_granted[partition] = max(granted, restore.epoch)
        elif record.state is RecordState.FAILED and record.payload.get("granted", 0):
            self.epochs_granted[partition] = max(granted, record.payload["granted"])
        elif record.state is RecordState.PROCESSED:
            deployed, epoch = self.operator(partition.operator), record.payload["epoch"]
            deployed.assignment = deployed.assignment.moved(partition.partition, restore.target, epoch)
            self.sweeps.restored(partition)

    # -- orders -------------------------------------------------------------------------------------------

    def _fold_standbys(self, rest: str, record: Record) -> None:
        self.standbys[rest.rpartition("/")[0]] = record.payload["count"]

    def _fold_failover(self, rest: str, record: Record) -> None:
        self.failovers.order(rest.rpartition("/")[0], Failover(record.payload["failover"]))

    def _fold_autopilot(self, rest: str, record: Record) -> None:
        self.autopilot = AutopilotSettings.of(record.payload)

    # -- reconfigurations ---------------------------------------------------------------------------------

    def begun_by(self, mark: str) -> list[str]:
        """Returns the reconfigurations that a job's run began: the reason of one of their moves begins with the run's
        mark.
        """
        return [
            reconfiguration
            for reconfiguration, recorded in self.history.items()
            if any(
                isinstance(planned, PlannedMove) and planned.reason.partition(":")[0] == mark
                for planned, _ in recorded.moves.values()
            )
        ]

    def _fold_reconfiguration(self, reconfiguration: str, record: Record) -> None:
        recorded = self.history.setdefault(reconfiguration, Recorded(record.timestamp_us, by=record.author))
        if recorded.batch is None:
            recorded.batch = Batch(record, {})
        recorded.batch.fold(record)
        is_paused = recorded.batch.status is BatchStatus.PAUSED
        (self.paused.add if is_paused else self.paused.discard)(reconfiguration)

    def _fold_pause(self, rest: str, record: Record) -> None:
        reconfiguration = rest.rpartition("/")[0]
        (self.paused.add if record.payload["paused"] else self.paused.discard)(reconfiguration)

    def _fold_edit(self, rest: str, record: Record) -> None:
        self.history[rest.rpartition("/")[0]].limits = Limits.of(record.payload)

    def _fold_cancel(self, reconfiguration: str, record: Record) -> None:
        self.history[reconfiguration].cancelled = True

    def _fold_downtime(self, reconfiguration: str, record: Record) -> None:
        self.history[reconfiguration].downtime_ms = record.payload["ms"]

    def _fold_grant(self, rest: str, record: Record) -> None:
        operator, partition, epoch = rest.rsplit("/", 2)
        self.epochs_granted[PartitionId(operator, int(partition))] = int(epoch)
        self.open_moves[record.payload["move"]].granted = True


class Event(NamedTuple):
    """A kind of item: the fold of its records, and how its items are numbered.

    Attributes:
        fold: changes the cluster's state as a record says.
        series: name of the kind's series. Items end in a number, and all kinds of one series are numbered together;
            empty: the items of this kind have no numbers.
        of_each: each name of the series is numbered separately, rather than all names together.
        app: the application whose records the items are. It is OPTIONAL for kinds that release 0.1 lacks: it skips
            their records, and could not read the ledger otherwise. Such an item has one record, which is NEW.
    """

    fold: Callable[[ClusterState, str, Record], None]
    series: str = ""
    of_each: bool = True
    app: App = APP

    def series_of(self, name: str) -> tuple[str, str]:
        return self.series, name if self.of_each else ""


#: the fold of the ledger: what a record changes, by the kind of its item
EVENTS: Mapping[str, Event] = {
    "replica": Event(lambda cluster, rest, record: cluster.roster.fold_replica(rest, record), "replica"),
    "directory": Event(lambda cluster, rest, record: cluster.roster.fold_directory(rest, record), "replica"),
    "forget": Event(lambda cluster, rest, record: cluster.roster.fold_forget(rest, record), "replica"),
    "operator": Event(ClusterState._fold_operator),
    "upgrade": Event(ClusterState._fold_upgrade, "upgrade"),
    "sites": Event(ClusterState._fold_sites, "sites", of_each=False),
    "undeploy": Event(ClusterState._fold_undeploy),
    "move": Event(ClusterState._fold_move),
    "restore": Event(ClusterState._fold_restore),
    "restores": Event(lambda cluster, rest, record: cluster.restores.fold_batch(rest, record)),
    "unrestore": Event(lambda cluster, rest, record: cluster.restores.fold_called_off(rest, record)),
    "grant": Event(ClusterState._fold_grant),
    "adopt": Event(ClusterState._fold_adopt),
    "adopted": Event(ClusterState._fold_adopted),
    "standbys": Event(ClusterState._fold_standbys, "standbys", of_each=False),
    "failover": Event(ClusterState._fold_failover),
    "reconfiguration": Event(ClusterState._fold_reconfiguration),
    "retarget": Event(ClusterState._fold_retarget, "retarget"),
    "resolve": Event(ClusterState._fold_resolve, "resolve", app=OPTIONAL),  # APP's in ledgers of early versions
    "pause": Event(ClusterState._fold_pause, "pause"),
    "edit": Event(ClusterState._fold_edit, "edit"),
    "cancel": Event(ClusterState._fold_cancel),
    "stood": Event(ClusterState._fold_downtime),
    "agent": Event(lambda cluster, rest, record: cluster.roster.fold_agent(rest, record), "agent"),
    "dismiss": Event(lambda cluster, rest, record: cluster.roster.fold_dismiss(rest, record), "agent"),
    "spawn": Event(lambda cluster, rest, record: cluster.roster.fold_spawn(rest, record), "spawn"),
    "autopilot": Event(ClusterState._fold_autopilot, "autopilot", of_each=False),
    "maintenance": Event(
        lambda cluster, rest, record: cluster.roster.fold_maintenance(rest, record), "maintenance", of_each=False
    ),
    "job": Event(lambda cluster, rest, record: cluster.jobs.fold_job(rest, record), "job"),
    "run": Event(lambda cluster, rest, record: cluster.jobs.fold_run(rest, record)),
    "stage": Event(lambda cluster, rest, record: cluster.jobs.fold_stage(rest, record)),
    "roll": Event(lambda cluster, rest, record: cluster.sweeps.fold_sweep(rest, record)),
    "rolled": Event(lambda cluster, rest, record: cluster.sweeps.fold_task(rest, record)),
    "unroll": Event(lambda cluster, rest, record: cluster.sweeps.fold_called_off(rest, record)),
    "sweep": Event(lambda cluster, rest, record: cluster.sweeps.fold_sweep(rest, record)),
    "swept": Event(lambda cluster, rest, record: cluster.sweeps.fold_task(rest, record)),
    "unsweep": Event(lambda cluster, rest, record: cluster.sweeps.fold_called_off(rest, record)),
    "controller": Event(lambda *_: None),
}
