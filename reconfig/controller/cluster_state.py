"""The controller's durable state: a fold over the ledger's records.

==============================  ============================================================================
item                            records
==============================  ============================================================================
``replica/<name>/<n>``          NEW {site, address, weight, directory, place}: a replica registered, from this data
                                directory at this place; records of earlier versions have neither of the two
``directory/<name>/<n>``        NEW {directory}: the name belongs to this data directory; the former one's data is lost
``forget/<name>/<n>``           NEW {}: the replica is forgotten; a replica that comes under the name is a new one
``operator/<name>``             NEW {spec, owners, sites}, PROCESSING, PROCESSED (every partition was created) |
                                FAILED {error} (what was created is deleted);
                                ``operator/<name>/<epoch>`` once it was undeployed: its first epoch
``upgrade/<name>/<n>``          NEW {spec}: another version of a deployed operator, for all its partitions
``sites/<operator>/<n>``        NEW {sites}: from now on, only replicas at these sites may have it; empty: all replicas.
                                Partitions elsewhere stay until they move. Operators of earlier versions name no sites
``undeploy/<name>/<epoch>``     NEW {}: the operator is undeployed, with all its state at this epoch or an older one
``move/<id>/<partition>``       NEW {operator, partition, source, target, epoch, …}, PROCESSING (its turn has come),
                                PROCESSED {epoch, report} (the target owns) | FAILED {error} (rolled back)
``retarget/move/<id>/<p>/<n>``  NEW {target, reason}: the move, which had not begun, gets another target
``restore/<id>/<partition>``    NEW {operator, partition, owner, target, epoch, url, …}, PROCESSING,
                                PROCESSED {epoch, report} (the target owns) | FAILED {error}
``restores/<id>``               a batch of the board, whose entities are the restores of one command
``unrestore/<id>``              NEW {}: restores of the batch that have not begun are cancelled
``grant/<operator>/<p>/<epoch>``  NEW {move}: this epoch is promised to that move's target, and to no other replica
``adopt/<operator>``            NEW {spec, replicas, owners, epochs, granted}: what replicas had of an operator that the
                                ledger did not know; owners are indices into replicas
``adopted/<ledger>``            NEW {}: replicas that belong to that ledger belong to this one from now on
``failover/<operator>/<n>``     NEW {failover}: from now on ``manual``: its owners serve it while no controller answers,
                                and take-overs begin only by command; or ``automatic``
``standbys/<operator>/<n>``     NEW {count}: number of standbys of each partition wanted from now on
``reconfiguration/<id>``        a batch of the board, see docs/ledger.md, whose entities are its moves
``pause/<id>/<n>``              NEW {paused}: moves of the reconfiguration that have not begun wait; or go on. Only for
                                reconfigurations that an earlier version began
``edit/<id>/<n>``               NEW {limit, per_node, per_link}: limits on its moves at a time, from now on
``cancel/<id>``                 NEW {}: moves of the reconfiguration that are not fenced yet are rolled back
``maintenance/<node>/<n>``      NEW {since_us, until_us, one_of}: the node is in maintenance; {}: not any more
``autopilot/<n>``               NEW {policies, max_pause_ms, cool_down_s, moves_per_minute}: from now on these policies
                                move partitions; no policies: the autopilot is off
``job/<name>/<n>``              NEW {schedule, do, …, paused}: the job's definition from now on; {}: it is deleted
``run/<job>/<µs>``              NEW {operators}, PROCESSING, PROCESSED | FAILED {reconfigurations, note}: a run for
                                that time; records of earlier versions name no operators
``stage/<job>/<µs>/<operator>``  NEW {reconfigurations, error}: what that run began for an operator, or why it did not
``controller/<name>/<n>``       NEW {site, labels}: a controller that led, of earlier versions; without effect
``stood/<id>``                  NEW {ms}: how long the operator was stopped while the moves of a reconfiguration ran
``agent/<name>/<n>``            NEW {site, address, labels, cores, …, directory, place}: an agent registered
``dismiss/<name>/<n>``          NEW {}: the agent is forgotten, with the replicas that it should have
``spawn/<replica>/<n>``         NEW {agent, running, generation, workers, weight, memory_bytes}: the agent should have
                                the replica like this from now on, until the replica is forgotten
``roll/<id>``                   a batch of the board, {site, limit}: replicas are restarted, a few at a time
``rolled/<id>/<node>``          an entity of a roll
``unroll/<id>``                 NEW {}: restarts of the roll that have not begun are cancelled
``sweep/<id>``                  a batch of the board, {chore, site, limit, operator, scope}: the chore is done at each
                                node, until the partitions of the scope are done
``swept/<id>/<node>``           an entity of a sweep; the last one, ``(moved)``, has the partitions that moved meanwhile
``unsweep/<id>``                NEW {}: nodes of the sweep that have not begun are cancelled
==============================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reconfig.controller.batch_book import APP, Batch, Recorded, because, begun, ended, entry, retaken, taken_up
from reconfig.controller.folds import JobBook, Outcome, RestoreBook, SweepBook
from reconfig.controller.roster import Home, Roster
from reconfig.decisions.failover import Failover, Failovers
from reconfig.decisions.jobs import Job, Run, RunState, Stage
from reconfig.decisions.joining import AutopilotSettings
from reconfig.decisions.plan import Limits, limits_of
from reconfig.decisions.sweeps import Chore, Maintenance, Plan
from reconfig.decisions.work import Change, Planned, PlannedMove, PlannedRestore, PlannedStandby, planned_of, to_payload
from stateflow.assignment import Assignment
from stateflow.errors import REPORT_LINE, InvariantBroken, LeaseLost, Locked, OperatorNotDeployed, WriteUncertain
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger import Entry, Ledger, Record, RecordState
from stateflow.ledger.batches import BatchStatus
from stateflow.transitions import check
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo


@dataclass(slots=True)
class Deployed:
    """A deployed operator.

    ``first_epoch``: the first epoch of this deployment; older ones belong to a former operator of the same name.
    ``sites``: the sites to which it is confined; empty: not confined. ``versions``: oldest first, the last one serves.
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
    planned: Planned
    record: Record
    granted: bool = False


@dataclass(slots=True)
class ClusterState:
    """The cluster's state: folded from the ledger on start; afterwards each step appends records and folds them. Not
    thread-safe.

    ``on_record`` is called with every appended record: a second state that folds these equals this one.
    """

    ledger: Ledger
    newest: int = 0  # id of the newest folded record, including those of other applications
    roster: Roster = field(default_factory=Roster)
    deployed: dict[str, Deployed] = field(default_factory=dict)
    #: deployments that are planned but not finished
    planned: dict[str, tuple[Deployed, Record]] = field(default_factory=dict)
    open_moves: dict[str, OpenMove] = field(default_factory=dict)  # by item id
    restores: RestoreBook = field(default_factory=RestoreBook)
    finished: list[tuple[Planned, Record]] = field(default_factory=list)
    #: reconfigurations, the one of the newest record last; without standbys
    history: dict[str, Recorded] = field(default_factory=dict)
    undeployed: dict[str, int] = field(default_factory=dict)  # operator → newest epoch of the former deployment
    upgrades: dict[str, int] = field(default_factory=dict)  # number of upgrades by operator
    versions_us: dict[str, int] = field(default_factory=dict)  # time of each name's newest spec, even if undeployed
    epochs_granted: dict[PartitionId, int] = field(default_factory=dict)
    standbys: dict[str, int] = field(default_factory=dict)  # operator → standbys wanted
    standby_orders: int = 0
    failovers: Failovers = field(default_factory=Failovers)
    site_orders: int = 0
    retargets: dict[str, int] = field(default_factory=dict)  # number of records, by the move's item
    paused: set[str] = field(default_factory=set)  # reconfigurations
    pauses: dict[str, int] = field(default_factory=dict)  # number of records, by reconfiguration
    autopilot: AutopilotSettings = field(default_factory=AutopilotSettings)
    autopilot_orders: int = 0
    jobs: JobBook = field(default_factory=JobBook)
    sweeps: SweepBook = field(default_factory=SweepBook)
    adopted: set[str] = field(default_factory=set)  # ids of ledgers
    distrusted: set[str] = field(default_factory=set)  # moves whose source must not serve the partition it sealed
    #: epochs that replicas report and the ledger does not know, e.g. because it is an older copy
    epochs_seen: dict[PartitionId, int] = field(default_factory=dict)
    on_record: Callable[[Record], None] | None = None
    term: int | None = None  # term in which it writes
    author: str = ""  # author of what is written now; empty: this controller decided
    #: raises if nothing may be written any more, as no controller would carry out what was decided
    check: Callable[[], None] = lambda: None
    unsure: WriteUncertain | None = None  # set: this state may differ from the ledger, and must not be acted on
    validated: bool = False  # invariants are checked after each record, see :mod:`stateflow.transitions`

    @classmethod
    def read(
        cls, ledger: Ledger, mirror: ClusterState | None = None, term: int | None = None, validated: bool = False
    ) -> ClusterState:
        """Reads the ledger. ``mirror``: an empty state that folds the same records."""
        cluster = cls(ledger, term=term, validated=validated)
        for record in ledger.records(archived=True):
            cluster.fold(record)
            if mirror is not None:
                mirror.fold(record)
        return cluster

    def _append(self, item: str, state: RecordState, previous: Record | None, payload: Any = None) -> Record:
        return self._write(entry(item, state, previous, payload))[-1]

    def now_us(self) -> int:
        return self.ledger.clock.now_us()

    def _write(self, *entries: Entry) -> list[Record]:
        """Appends all records of a step in one transaction and folds them: a step that failed was not begun, and can be
        taken again. Raises WriteUncertain if the outcome is not known, and on every later write."""
        if self.unsure is not None:
            raise self.unsure
        if not entries:
            return []
        try:
            records = self.ledger.append(entries, lambda _: self.check(), self.term, self.author)
        except WriteUncertain as error:
            self.unsure = error
            raise
        for record in records:
            self.fold(record)
            if self.on_record is not None:
                self.on_record(record)
        return records

    def _plan(self, *plans: tuple[str, Any]) -> Record:
        """Records items, given as (item, payload), as planned and under way."""
        entries = []
        for item, payload in plans:
            new = entry(item, RecordState.NEW, None, payload)
            entries += [new, entry(item, RecordState.PROCESSING, new)]
        return self._write(*entries)[-1]

    def _end(self, record: Record, state: RecordState, payload: Any = None, with_it: Sequence[Entry] = ()) -> None:
        """Records the end of an item, and the entries ``with_it`` that follow. An item that has not begun is begun
        first.

        If a person has resolved any of these items by hand meanwhile, they are taken up again and ended as well, as
        the records must say what has happened.
        """
        item, schema = record.item_id, record.payload_schema
        begun = [taken_up(record)] if record.state is RecordState.NEW else []
        here = [*begun, entry(item, state, begun[0] if begun else record, payload, schema)]
        try:
            self._write(*here, *with_it)
        except LeaseLost as lost:
            again, anew = retaken(here[-1:]), retaken(with_it)
            for entries in ([*again, *with_it], [*here, *anew], [*again, *anew]):
                try:
                    self._write(*entries)
                    return
                except (LeaseLost, Locked):
                    continue  # an item that was not resolved cannot be taken up again
            raise lost

    def fold(self, record: Record) -> None:
        """Folds a record of the ledger. Records of other applications in a shared ledger change nothing."""
        self.newest = record.record_id
        if record.app.name != APP.name:
            return
        kind, _, rest = record.item_id.partition("/")
        FOLDS[kind](self, rest, record)
        if self.validated:
            check(self)

    def validate(self) -> None:
        """Checks the invariants. Raises InvariantBroken in a state that only a bug leads to."""
        for deployed in [*self.deployed.values(), *(plan for plan, _ in self.planned.values())]:
            deployed.assignment.validate()
        for words, where in self._broken():
            raise InvariantBroken(words, remedy=REPORT_LINE, **where)

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

    def register(self, info: ReplicaInfo, home: Home) -> None:
        self._write(*self.roster.registered(info, home))

    def replace(self, name: str, directory: str) -> None:
        """Gives a replica's name to another data directory."""
        self._write(self.roster.replaced(name, directory))

    def forget(self, name: str) -> None:
        self._write(self.roster.forgotten(name))

    def is_free(self, name: str) -> bool:
        """Tells whether no partition is assigned to the replica, or on its way to or from it."""
        plans = [deployed.assignment for deployed, _ in self.planned.values()]
        assignments = [*plans, *(deployed.assignment for deployed in self.deployed.values())]
        moves = [move.planned for move in self.open_moves.values()]
        restores = self.restores.under_way
        return not (
            any(name in assignment.owners for assignment in assignments)
            or any(name in (move.source, move.target) for move in moves)
            or any(name in (restore.owner, restore.target) for restore in restores)
        )

    # -- agents -------------------------------------------------------------------------------------------

    def register_agent(self, info: AgentInfo, home: Home) -> None:
        self._write(*self.roster.agent_registered(info, home))

    def dismiss(self, name: str) -> None:
        """Forgets an agent, and the replicas that it should have."""
        self._write(self.roster.dismissed(name))

    def spawn(self, wanted: Iterable[Spawned]) -> None:
        """Records what is wanted of replicas of agents, all in one transaction."""
        self._write(*map(self.roster.spawning, wanted))

    # -- operators ----------------------------------------------------------------------------------------

    def plan_deployment(self, spec: OperatorSpec, owners: dict[int, str], sites: Collection[str] = ()) -> Record:
        placed = [owners[p] for p in range(spec.partitions)]
        payload = {"spec": _spec_payload(spec), "owners": placed, "sites": list(sites)}
        burnt = self.undeployed.get(spec.name)
        return self._plan((f"operator/{spec.name}" + ("" if burnt is None else f"/{burnt + 1}"), payload))

    def upgrade(self, spec: OperatorSpec) -> None:
        """Records another version of a deployed operator, which holds for all its partitions from now on."""
        number = self.upgrades.get(spec.name, 0) + 1
        self._append(f"upgrade/{spec.name}/{number}", RecordState.NEW, None, {"spec": _spec_payload(spec)})

    def _fold_upgrade(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        self.upgrades[name] = int(number)
        self.deployed[name].follow(self._spec_of(name, record))

    def confine(self, name: str, sites: Collection[str]) -> None:
        self._append(f"sites/{name}/{self.site_orders + 1}", RecordState.NEW, None, {"sites": list(sites)})

    def _fold_sites(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        self.site_orders = max(self.site_orders, int(number))
        self.deployed[name].sites = tuple(record.payload["sites"])

    def finish_deployment(self, planned: Record) -> None:
        self._end(planned, RecordState.PROCESSED)

    def fail_deployment(self, planned: Record, error: dict[str, Any]) -> None:
        """Records that a deployment failed. No replica owns the partitions that were created."""
        self._end(planned, RecordState.FAILED, {"error": error})

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
        """Returns the spec of a record, with a time of recording later than those of all versions before it, whatever
        the clocks say. The time is the clock's if possible, so that the spec also counts as newer than those that
        replicas have from another ledger, or from the ledger of which this one is an older copy."""
        spec = OperatorSpec.from_json({"name": name, **record.payload["spec"]})
        newest_us = max(spec.recorded_us, self.versions_us.get(name, 0))
        self.versions_us[name] = max(record.timestamp_us, newest_us + 1)
        return replace(spec, recorded_us=self.versions_us[name])

    def newest_epoch(self, name: str) -> int:
        """Returns the newest epoch at which any partition of an operator is owned or was ever granted."""
        return max(self.next_epoch(PartitionId(name, p)) for p in range(self.operator(name).spec.partitions)) - 1

    def undeploy(self, name: str, epoch: int) -> None:
        """Records that an operator is undeployed.

        Args:
            epoch: see :meth:`newest_epoch`.
        """
        self._append(f"undeploy/{name}/{epoch}", RecordState.NEW, None, {})

    def _fold_undeploy(self, rest: str, record: Record) -> None:
        name, _, epoch = rest.rpartition("/")
        del self.deployed[name]
        self.standbys.pop(name, None)
        self.failovers.undeployed(name)
        self.sweeps.undeployed(name)
        self.undeployed[name] = int(epoch)

    def adopt(self, spec: OperatorSpec, owners: Mapping[int, tuple[str, int]], granted: Mapping[int, int]) -> None:
        """Records an operator as replicas have it.

        Args:
            owners: (replica, epoch) by partition.
            granted: the newest epoch that counts as granted, by partition.
        """
        numbers = range(spec.partitions)
        replicas = sorted({name for name, _ in owners.values()})
        index = {name: number for number, name in enumerate(replicas)}
        payload = {
            "spec": _spec_payload(spec),
            "replicas": replicas,
            "owners": [index[owners[p][0]] for p in numbers],
            "epochs": [owners[p][1] for p in numbers],
            "granted": [granted[p] for p in numbers],
        }
        self._append(f"adopt/{spec.name}", RecordState.NEW, None, payload)

    def _fold_adopt(self, name: str, record: Record) -> None:
        fields = record.payload
        owners = tuple(fields["replicas"][number] for number in fields["owners"])
        assignment = Assignment(name, 1, owners, tuple(fields["epochs"]))
        self.undeployed.pop(name, None)  # this ledger's epochs say nothing about those that another ledger granted
        self.deployed[name] = Deployed(self._spec_of(name, record), assignment)
        self.epochs_granted |= {PartitionId(name, p): epoch for p, epoch in enumerate(fields["granted"])}

    def adopt_ledger(self, ledger: str) -> None:
        if ledger not in self.adopted:
            self._append(f"adopted/{ledger}", RecordState.NEW, None, {})

    def _fold_adopted(self, ledger: str, record: Record) -> None:
        self.adopted.add(ledger)

    def operator(self, name: str) -> Deployed:
        """Returns a deployed operator. Raises OperatorNotDeployed."""
        try:
            return self.deployed[name]
        except KeyError:
            known = ", ".join(sorted(self.deployed)) or "none"
            raise OperatorNotDeployed(
                f"there is no operator {name!r} (deployed: {known})",
                remedy="deploy it with `stateflow deploy module:Class`",
            ) from None

    def confined(self) -> dict[str, tuple[str, ...]]:
        """Returns the sites of operators that are confined to some, by operator."""
        return {name: deployed.sites for name, deployed in self.deployed.items() if deployed.sites}

    def assigned(self, name: str) -> dict[PartitionId, int]:
        """Returns a replica's partitions, and the epochs at which it owns them."""
        return {
            PartitionId(operator, number): epoch
            for operator, deployed in self.deployed.items()
            for number, epoch in deployed.assignment.of(name).items()
        }

    def owned_counts(self) -> dict[str, int]:
        """Returns the number of partitions by replica, of all operators."""
        counts: dict[str, int] = {}
        for deployed in self.deployed.values():
            for owner in deployed.assignment.owners:
                counts[owner] = counts.get(owner, 0) + 1
        return counts

    # -- moves --------------------------------------------------------------------------------------------

    def next_epoch(self, partition: PartitionId) -> int:
        """Returns an epoch newer than any at which the partition is owned, or that was ever granted or reported."""
        _, epoch = self.operator(partition.operator).assignment.owner(partition.partition)
        return max(epoch, self.epochs_granted.get(partition, 0), self.epochs_seen.get(partition, 0)) + 1

    def changes(self) -> Iterator[Change]:
        """Yields the work under way by which partitions get another owner: moves and take-overs, but not standbys."""
        for open_move in self.open_moves.values():
            if not isinstance(open_move.planned, PlannedStandby):
                yield open_move.planned

    def plan_move(self, move: Planned) -> None:
        self.plan_moves([move])

    def plan_moves(self, moves: Iterable[Planned]) -> None:
        """Records a plan in one transaction. Standbys are in no batch, as they do not end."""
        moves = list(moves)
        entries = begun([move for move in moves if not isinstance(move, PlannedStandby)], self.now_us())
        for copy in moves:
            if isinstance(copy, PlannedStandby):
                new = entry(copy.item_id, RecordState.NEW, None, to_payload(copy))
                entries += [new, taken_up(new)]
        self._write(*entries)

    def retarget(self, move: PlannedMove, target: str, reason: str) -> None:
        """Gives a move that has not begun another target. ``reason``: for people."""
        number = self.retargets.get(move.item_id, 0) + 1
        self._append(f"retarget/{move.item_id}/{number}", RecordState.NEW, None, {"target": target, "reason": reason})

    def _fold_retarget(self, rest: str, record: Record) -> None:
        item, _, number = rest.rpartition("/")
        self.retargets[item] = int(number)
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

    def begin_moves(self, moves: Iterable[Planned]) -> None:
        """Records that the turn of these moves has come. Skips moves that have begun already, or ended."""
        waiting = [self.open_moves[move.item_id].record for move in moves if move.item_id in self.open_moves]
        entries = [taken_up(record) for record in waiting if record.state is RecordState.NEW]
        if entries:
            self._write(*entries)

    def grant(self, move: Planned) -> None:
        """Grants an epoch to a move. Raises Locked if the epoch was granted to another move."""
        item = f"grant/{move.partition.operator}/{move.partition.partition}/{move.granted_epoch}"
        self._append(item, RecordState.NEW, None, {"move": move.item_id, "target": move.target})

    def move_owned(self, move: Planned, report: dict[str, Any]) -> None:
        payload = {"epoch": move.granted_epoch, "owner": move.target, "report": report}
        self._end_move(move, RecordState.PROCESSED, payload)

    def move_aborted(self, move: Planned, error: dict[str, Any], report: dict[str, Any]) -> None:
        self._end_move(move, RecordState.FAILED, {"error": error, "report": report})

    def _end_move(self, move: Planned, state: RecordState, payload: dict[str, Any]) -> None:
        """Ends a move, and with the last move its batch."""
        record, recorded = self.open_moves[move.item_id].record, self.history.get(move.reconfiguration)
        over: list[Entry] = []
        if recorded is not None and recorded.batch is not None and recorded.is_last(move.item_id):
            status = BatchStatus.CANCELLED if recorded.cancelled else BatchStatus.DONE
            over = recorded.batch.to(status, self.now_us())
        self._end(record, state, ended(record, payload, state), over)

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
                planned = self.open_moves.pop(record.item_id).planned
                self.finished.append((planned, record))
                if (record.payload or {}).get("report", {}).get("distrusted"):
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

    # -- restores -----------------------------------------------------------------------------------------

    def plan_restores(self, restores: Iterable[PlannedRestore]) -> None:
        """Records a plan of restores in one transaction."""
        self._write(*self.restores.planned(restores, self.now_us()))

    def restore_owned(self, restore: PlannedRestore, epoch: int, report: dict[str, Any]) -> None:
        payload = {"epoch": epoch, "owner": restore.target, "report": report}
        self._end(*self._ends(restore, RecordState.PROCESSED, payload))

    def restore_failed(self, restore: PlannedRestore, granted: int, error: dict[str, Any]) -> None:
        """Records that a restore failed.

        Args:
            granted: the epoch for which the owner was asked to stop; 0: it was not asked.
        """
        self._end(*self._ends(restore, RecordState.FAILED, {"error": error, "granted": granted}))

    def _ends(
        self, restore: PlannedRestore, state: RecordState, payload: dict[str, Any]
    ) -> tuple[Record, RecordState, dict[str, Any], list[Entry]]:
        record, payload, over = self.restores.ends(restore, state, payload, self.now_us())
        return record, state, payload, over

    def call_off_restore(self, restore_id: str) -> None:
        self._write(*self.restores.called_off(restore_id))

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

    # -- standbys -----------------------------------------------------------------------------------------

    def want_standbys(self, operator: str, count: int) -> None:
        if self.standbys.get(operator, 0) != count:
            item = f"standbys/{operator}/{self.standby_orders + 1}"
            self._append(item, RecordState.NEW, None, {"count": count})

    def _fold_standbys(self, rest: str, record: Record) -> None:
        operator, _, number = rest.rpartition("/")
        self.standbys[operator] = record.payload["count"]
        self.standby_orders = max(self.standby_orders, int(number))

    def order_failover(self, operator: str, failover: Failover) -> None:
        if self.failovers.is_manual(operator) is not (failover is Failover.MANUAL):
            item = f"failover/{operator}/{self.failovers.count + 1}"
            self._append(item, RecordState.NEW, None, {"failover": failover.value})

    def _fold_failover(self, rest: str, record: Record) -> None:
        self.failovers.order(rest.rpartition("/")[0], Failover(record.payload["failover"]))

    def maintain(self, node: str, maintenance: Maintenance | None) -> None:
        """Records a node's maintenance; None: it has ended."""
        self._write(self.roster.maintaining(node, maintenance))

    def maintained(self) -> set[str]:
        """Returns the nodes that are in maintenance now."""
        now = self.now_us()
        return {node for node, each in self.roster.maintenance.items() if each.lasts(now)}

    def order_autopilot(self, orders: AutopilotSettings) -> None:
        if orders != self.autopilot:
            item = f"autopilot/{self.autopilot_orders + 1}"
            self._append(item, RecordState.NEW, None, orders.to_dict())

    def _fold_autopilot(self, rest: str, record: Record) -> None:
        self.autopilot = AutopilotSettings.of(record.payload)
        self.autopilot_orders = max(self.autopilot_orders, int(rest))

    # -- jobs ---------------------------------------------------------------------------------------------

    def define_job(self, name: str, job: Job | None) -> None:
        """Records a job's definition; None: the job is deleted."""
        item = f"job/{name}/{self.jobs.orders.get(name, 0) + 1}"
        self._append(item, RecordState.NEW, None, {} if job is None else job.to_payload())

    def begin_run(self, job: str, at_us: int, operators: Collection[str] = ()) -> Run:
        """Begins a run of a job.

        Args:
            operators: the operators that the run has a stage for.

        Raises IllegalRecord if a run for that time was begun before.
        """
        self._plan((f"run/{job}/{at_us}", {"operators": list(operators)}))
        return self.jobs.runs[job][-1]

    def end_stage(self, run: Run, stage: Stage) -> Run:
        payload = {"reconfigurations": list(stage.reconfigurations)} | ({"error": stage.error} if stage.error else {})
        self._append(f"stage/{run.id}/{stage.operator}", RecordState.NEW, None, payload)
        return self.jobs.run(run.id)

    def end_run(self, run: Run, state: RunState, reconfigurations: Collection[str], note: str) -> None:
        to = RecordState.PROCESSED if state is RunState.PROCESSED else RecordState.FAILED
        payload = {"reconfigurations": list(reconfigurations), "note": note}
        self._end(self.jobs.records[run.item_id], to, payload)

    def begun_by(self, mark: str) -> list[str]:
        """Returns the reconfigurations whose moves carry the mark of a job's run."""
        return [
            reconfiguration
            for reconfiguration, recorded in self.history.items()
            if any(
                isinstance(planned, PlannedMove) and planned.reason.partition(":")[0] == mark
                for planned, _ in recorded.moves.values()
            )
        ]

    # -- sweeps -------------------------------------------------------------------------------------------

    def plan_sweep(self, sweep_id: str, plan: Plan) -> None:
        self._write(*self.sweeps.planned(sweep_id, plan, self.now_us()))

    def begin_swept(self, sweep_id: str, node: str) -> bool:
        """Records that a node of a sweep begins; for a restart, also the command to its agent. Returns False if the
        node must not begin any more."""
        begun = self.sweeps.begun(sweep_id, node)
        if begun is None:
            return False
        restarted: list[Entry] = []
        if self.sweeps.there[sweep_id].chore is Chore.RESTART:
            spawned = self.roster.spawned[node]
            restarted = [self.roster.spawning(replace(spawned, generation=spawned.generation + 1))]
        self._write(begun, *restarted)
        return True

    def end_swept(self, sweep_id: str, node: str, outcome: Outcome, ms: int) -> None:
        self._write(*self.sweeps.ended(sweep_id, node, outcome, ms, self.now_us()))

    def call_off_sweep(self, sweep_id: str) -> None:
        self._write(*self.sweeps.called_off(sweep_id, self.now_us()))

    # -- batches ------------------------------------------------------------------------------------------

    def _fold_reconfiguration(self, reconfiguration: str, record: Record) -> None:
        recorded = self.history.setdefault(reconfiguration, Recorded(record.timestamp_us, by=record.author))
        if recorded.batch is None:
            recorded.batch = Batch(record, {})
        recorded.batch.fold(record)
        is_paused = recorded.batch.status is BatchStatus.PAUSED
        (self.paused.add if is_paused else self.paused.discard)(reconfiguration)

    def pause(self, reconfiguration: str, paused: bool) -> None:
        """Pauses a reconfiguration or lets it go on. Does nothing if it has ended."""
        recorded = self.history.get(reconfiguration)
        if (reconfiguration in self.paused) == paused or (recorded is not None and recorded.state.over):
            return
        if recorded is not None and recorded.batch is not None:
            status = BatchStatus.PAUSED if paused else BatchStatus.IN_PROGRESS
            self._write(*recorded.batch.to(status, self.now_us()))
        else:  # an earlier version began it
            item = f"pause/{reconfiguration}/{self.pauses.get(reconfiguration, 0) + 1}"
            self._append(item, RecordState.NEW, None, {"paused": paused})

    def _fold_pause(self, rest: str, record: Record) -> None:
        reconfiguration, _, number = rest.rpartition("/")
        self.pauses[reconfiguration] = int(number)
        (self.paused.add if record.payload["paused"] else self.paused.discard)(reconfiguration)

    def edit(self, reconfiguration: str, limits: Limits) -> None:
        recorded = self.history[reconfiguration]
        if limits != recorded.limits:
            item = f"edit/{reconfiguration}/{recorded.edits + 1}"
            self._append(item, RecordState.NEW, None, limits.to_payload())

    def _fold_edit(self, rest: str, record: Record) -> None:
        reconfiguration, _, number = rest.rpartition("/")
        recorded = self.history[reconfiguration]
        recorded.limits, recorded.edits = Limits.of(record.payload), int(number)

    def cancel(self, reconfiguration: str) -> None:
        """Records that moves of a reconfiguration that are not fenced yet must be rolled back, by this controller or
        a later one. Does nothing if the reconfiguration has ended."""
        recorded = self.history.get(reconfiguration)
        if recorded is not None and not recorded.cancelled and not recorded.state.over:
            self._append(f"cancel/{reconfiguration}", RecordState.NEW, None, {})

    def _fold_cancel(self, reconfiguration: str, record: Record) -> None:
        self.history[reconfiguration].cancelled = True

    def operator_downtime(self, reconfiguration: str, ms: float) -> None:
        self._append(f"stood/{reconfiguration}", RecordState.NEW, None, {"ms": ms})

    def _fold_downtime(self, reconfiguration: str, record: Record) -> None:
        self.history[reconfiguration].stood_ms = record.payload["ms"]

    def _fold_grant(self, rest: str, record: Record) -> None:
        operator, partition, epoch = rest.rsplit("/", 2)
        self.epochs_granted[PartitionId(operator, int(partition))] = int(epoch)
        self.open_moves[record.payload["move"]].granted = True


def _spec_payload(spec: OperatorSpec) -> dict[str, Any]:
    fields = spec.to_json()
    del fields["name"]  # the item has it
    return fields


#: folds of records, by the kind of their item
FOLDS: Mapping[str, Callable[[ClusterState, str, Record], None]] = {
    "replica": lambda cluster, rest, record: cluster.roster.fold_replica(rest, record),
    "directory": lambda cluster, rest, record: cluster.roster.fold_directory(rest, record),
    "forget": lambda cluster, rest, record: cluster.roster.fold_forget(rest, record),
    "operator": ClusterState._fold_operator,
    "upgrade": ClusterState._fold_upgrade,
    "sites": ClusterState._fold_sites,
    "undeploy": ClusterState._fold_undeploy,
    "move": ClusterState._fold_move,
    "restore": ClusterState._fold_restore,
    "restores": lambda cluster, rest, record: cluster.restores.fold_batch(rest, record),
    "unrestore": lambda cluster, rest, record: cluster.restores.fold_called_off(rest, record),
    "grant": ClusterState._fold_grant,
    "adopt": ClusterState._fold_adopt,
    "adopted": ClusterState._fold_adopted,
    "standbys": ClusterState._fold_standbys,
    "failover": ClusterState._fold_failover,
    "reconfiguration": ClusterState._fold_reconfiguration,
    "retarget": ClusterState._fold_retarget,
    "pause": ClusterState._fold_pause,
    "edit": ClusterState._fold_edit,
    "cancel": ClusterState._fold_cancel,
    "stood": ClusterState._fold_downtime,
    "agent": lambda cluster, rest, record: cluster.roster.fold_agent(rest, record),
    "dismiss": lambda cluster, rest, record: cluster.roster.fold_dismiss(rest, record),
    "spawn": lambda cluster, rest, record: cluster.roster.fold_spawn(rest, record),
    "autopilot": ClusterState._fold_autopilot,
    "maintenance": lambda cluster, rest, record: cluster.roster.fold_maintenance(rest, record),
    "job": lambda cluster, rest, record: cluster.jobs.fold_job(rest, record),
    "run": lambda cluster, rest, record: cluster.jobs.fold_run(rest, record),
    "stage": lambda cluster, rest, record: cluster.jobs.fold_stage(rest, record),
    "roll": lambda cluster, rest, record: cluster.sweeps.fold_sweep(rest, record),
    "rolled": lambda cluster, rest, record: cluster.sweeps.fold_task(rest, record),
    "unroll": lambda cluster, rest, record: cluster.sweeps.fold_called_off(rest, record),
    "sweep": lambda cluster, rest, record: cluster.sweeps.fold_sweep(rest, record),
    "swept": lambda cluster, rest, record: cluster.sweeps.fold_task(rest, record),
    "unsweep": lambda cluster, rest, record: cluster.sweeps.fold_called_off(rest, record),
    "controller": lambda *_: None,
}
