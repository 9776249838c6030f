"""A simulated cluster: controllers, three replicas, the clients of two sources, and a user who moves partitions.

Controllers and replicas run the product's code on :mod:`loop`, :mod:`net` and :mod:`disk`. Each participant is a
:class:`Program`, which can be killed and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pyarrow as pa

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.controller import Controller
from reconfig.decisions.plan import ReconfigurationState
from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import NotOwner, StateflowError
from stateflow.ledger import RecordState
from stateflow.operator.operator import describe
from stateflow.partition import layout
from stateflow.partition.batches import Answers, Batches
from stateflow.partition.layout import Session, read_sequence
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.positions import Batch
from stateflow.partition.reading import Reader
from stateflow.partition.registry import Lease
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Frame
from stateflow.partition.sources import SkippablePartition, SkippedBatches
from stateflow.replica.membership import say_opening
from stateflow.replica.server import duties, recover
from stateflow.replica.service import ReplicaService
from stateflow.rpc import replica_pb2_grpc
from stateflow.settings import ControllerSettings, ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.simulation.sim import flow
from tests.simulation.sim.controllers import NAMES, Controllers
from tests.simulation.sim.disk import Disk, Environment, Path, Store
from tests.simulation.sim.ledger import MemoryLedger
from tests.simulation.sim.loop import Crashed, Process, SimLoop
from tests.simulation.sim.net import Methods, Network
from tests.simulation.sim.oracle import Oracle, Plan, Violation, may_commit

REPLICAS = ("cloud-0", "edge-0", "edge-1")
SPECS = {cls: describe(cls, flow.PARTITIONS, "Flow") for cls in (flow.Flow, flow.Hearing)}
DRIFT_MAX = 0.01
APART_S = 7200.0  # largest difference between the clocks of two processes
SETTLE_S = 600.0
CONTROLLER = ControllerSettings(
    heartbeat_interval_s=1.0,
    lease_s=3.0,
    rpc_timeout_s=10.0,
    retry_interval_s=0.25,
    takeover_retry_s=1.0,
    opening_timeout_s=6.0,
    cold_start_wait_s=10.0,
    hold_s=3.0,
    debug_validate=True,
)
#: share of the replicas' starts that are slow: some take longer than a lease, some longer than the controllers wait
SLOW_STARTS = 0.25
REPLICA = {
    acknowledge: ReplicaSettings(
        heartbeat_interval_s=1.0,
        hold_timeout_s=5.0,
        transfer_timeout_s=10.0,
        acknowledge=acknowledge,
        commit_log_bytes_max=16 << 10,
        debug_validate=True,
    )
    for acknowledge in ("wal", "fsync", "standby")
}


class Clock:
    """The clock of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic(self) -> float:
        return self._process.local(self._process.loop.now)

    def now_us(self) -> int:
        return 1_000_000_000 + round(self.monotonic() * 1e6)


class WatchedBatches(Batches):
    """Notes in the running job which batches it applies or skips, for the oracle."""

    loop: SimLoop

    def apply(self, slices: BatchSlices, answers: Answers) -> None:
        noted: dict[PartitionId, tuple[Batch, bytes]] = {}
        for part in slices.parts:
            batch, count = slices.batch, part.stop - part.start
            rows = pa.concat_batches([slices.rows.slice(part.start, count)]).serialize().to_pybytes() if count else b""
            noted[PartitionId(slices.operator, part.partition)] = batch, rows
        with self._noted(noted):
            super().apply(slices, answers)

    def skip(self, frame: Frame) -> list[int]:
        job = self.loop.job
        assert job is not None
        job.notes["passing"] = frame.operator, frame.batch
        try:
            return super().skip(frame)
        finally:
            job.notes.clear()

    def open_source(
        self, partitions: Collection[PartitionId], source: str, session: Session, settled: int | None = None
    ) -> dict[PartitionId, int | NotOwner]:
        with self._noted(dict.fromkeys(partitions, (Batch(source, -1, sparse=True, session=session), b""))):
            return super().open_source(partitions, source, session, settled)

    @contextlib.contextmanager
    def _noted(self, what: dict[PartitionId, tuple[Batch, bytes]]) -> Iterator[None]:
        job = self.loop.job
        assert job is not None
        job.notes["applies"] = what
        try:
            yield
        finally:
            job.notes.clear()


class WatchedPasses(SkippedBatches):
    """Notes in the running job for which partitions it records or settles skipped batches, for the oracle."""

    loop: SimLoop

    def _write(self, operator: str, source: str, numbers: list[int], *args: Any) -> None:
        passed, positions, kind = args
        noted = [
            (PartitionId(operator, number), each.epoch, positions[of])
            for number, each, of in zip(numbers, passed, kind, strict=True)
        ]
        with self._noted("passes", noted):
            super()._write(operator, source, numbers, *args)

    def settle(self, local: SkippablePartition, *args: Any) -> None:
        with self._noted("settles", local.id):
            super().settle(local, *args)

    @contextlib.contextmanager
    def _noted(self, what: str, value: Any) -> Iterator[None]:
        job = self.loop.job
        notes = self.loop.notes if job is None else job.notes
        before = notes.get(what)
        notes[what] = value
        try:
            yield
        finally:
            notes[what] = before


class Node(ReplicaNode):
    """A replica that reports the changes of its partitions to the world."""

    def __init__(self, world: World, process: Process, info: ReplicaInfo, environment: Environment) -> None:
        self._world, self._process = world, process
        settings = REPLICA[world.acknowledge]
        super().__init__(
            info,
            environment.home,
            settings,
            Clock(process),
            environment,
            Lease.none(),
            recover=False,  # type: ignore[arg-type]
        )
        durable = {"wal": False, "fsync": True}.get(settings.acknowledge)
        self._registry.skipped_batches = WatchedPasses(environment.home, environment, durable)  # type: ignore[arg-type]
        self._registry.skipped_batches.loop = process.loop
        self.batches = WatchedBatches(self._registry, self.lease, self.sender, self.cache)
        self.batches.loop = process.loop
        self.reader = Reader(self._registry, self.batches)

    @property
    def leased(self) -> bool:
        """Tells whether the replica itself finds that it may serve now."""
        return self.lease.holds(self._process.local(self._process.loop.now), "Flow")

    @property
    def heard(self) -> bool:
        """Tells whether the replica's lease has not lapsed by the replica's own clock."""
        return self._process.local(self._process.loop.now) < self.lease.until

    def on_change(self, listener: Callable[[PartitionId], None]) -> None:
        def changed(partition: PartitionId) -> None:
            if self._process.alive:
                self._world.changed(self, partition)
                listener(partition)

        super().on_change(changed)


def contents(local: LocalPartition) -> dict[bytes, bytes]:
    """Returns the entries of a partition's database, whether it is open or not."""
    assert isinstance(local.directory, Path)
    return local.store.entries() if isinstance(local.store, Store) else local.directory.look()


@dataclass
class Program:
    """A program, which may run several times: each run is a process."""

    name: str
    boot: Callable[[Process], Coroutine[Any, Any, None]]
    process: Process | None = None
    power_lost: bool = False
    starts: int = 0
    drift: float = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive


@dataclass
class Counts:
    seeds: int = 0
    events: int = 0
    commits: int = 0
    crashes: int = 0
    power_losses: int = 0
    pauses: int = 0
    cuts: int = 0
    moves_completed: int = 0
    moves_aborted: int = 0
    takeovers: int = 0
    batches_lost: int = 0
    skipped_batches: int = 0
    settles: int = 0
    doubles: int = 0
    blanks: int = 0
    reads: int = 0  # answers that the reader got, from any controller
    followed: int = 0  # of these, answers from a controller that does not lead
    incomplete: int = 0
    rewinds: int = 0
    rivals: int = 0
    outages: int = 0
    virtual_s: float = 0.0

    def add(self, other: Counts) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class World:
    seed: int
    trace: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(seeds=1))

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.standbys = int(self.random.random() < 0.5)
        self.acknowledge = self.random.choice(("wal", "fsync", "standby") if self.standbys else ("wal", "fsync"))
        self._slow = Random(f"{self.seed}:opening")
        self.person = Random(f"{self.seed}:failover")  # for choices of the user who orders failovers
        self.manual = self.person.random() < 0.3
        self.damaged = 0  # copies that are not mended yet
        self.loop = SimLoop(self.random)
        self.net = Network(self.loop)
        self.net.log = self.log
        operator = flow.Hearing if self.seed % 2 else flow.Flow
        self.spec = SPECS[operator]
        self.oracle = Oracle(self.acknowledge, operator)
        self.clock_skew_s = 0.0
        self.ledger = MemoryLedger(lambda: self.loop.now + self.clock_skew_s)
        self.blank: MemoryLedger | None = None  # while it is set, the first controller uses this ledger, see doubles.py
        self.disks = {name: Disk(self.random, name) for name in REPLICAS}
        self.nodes: dict[str, Node] = {}  # the replicas that run, by name
        self.programs: dict[str, Program] = {}
        self.failure: BaseException | None = None
        self.sessions: dict[str, Session] = {}  # source → session of the newest client that began
        self.opened_by: dict[str, Session] = {}  # source → session of the newest client that all partitions accepted
        #: called with the incarnation of each replica that a controller has registered
        self.registered: Callable[[str], None] = lambda incarnation: None
        self._ids = 0
        self.controllers = Controllers(self)
        for name in self.controllers.names:
            self.add(name, self.controllers.boot)
        for name in REPLICAS:
            self.add(name, self._boot_replica)

    def log(self, what: str) -> None:
        self.trace.append(f"{self.loop.now:10.4f} {what}")

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self.log(f"VIOLATION {error!r}")

    # -- programs -----------------------------------------------------------------------------------------

    def add(self, name: str, boot: Callable[[Process], Coroutine[Any, Any, None]]) -> Program:
        random = self.random if name not in NAMES[1:] else Random(f"{self.seed}:{name}")
        drift = random.uniform(-DRIFT_MAX, DRIFT_MAX)
        program = self.programs[name] = Program(name, boot, drift=drift)
        return program

    def start(self, name: str) -> None:
        program = self.programs[name]
        if program.running:
            return
        program.starts += 1
        process = program.process = Process(self.loop, name, program.drift, self.random.random() * APART_S)
        process.killed = lambda: self.killed(program)
        self.log(f"{name} starts")
        self.loop.spawn(process, self.guarded(program.boot(process)))

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - no program may end with an error
            self.fail(error)

    def killed(self, program: Program) -> None:
        self.log(f"{program.name} is killed")
        self.counts.crashes += 1
        assert program.process is not None
        self.nodes.pop(program.name, None)
        self.controllers.leading.pop(program.name, None)
        self.net.ended(program.process)

    def kill(self, name: str) -> None:
        program = self.programs[name]
        if program.running:
            assert program.process is not None
            program.process.die()

    def power_loss(self, name: str) -> None:
        self.kill(name)
        self.log(f"{name} loses power")
        self.counts.power_losses += 1
        self.programs[name].power_lost = True
        self.disks[name].power_loss()

    @property
    def controller(self) -> Controller | None:
        """The controller that leads; None if none leads."""
        return self.controllers.leader

    def new_id(self) -> str:
        self._ids += 1
        return f"m{self._ids}"

    async def _boot_replica(self, process: Process) -> None:
        await self.boot_replica(process, self.programs[process.name], process.name)

    async def boot_replica(self, process: Process, program: Program, asks_for: str) -> None:
        """Runs a replica until it has recovered and serves, and starts its further duties.

        Args:
            asks_for: the name under which the replica registers.
        """
        name = process.name
        info = ReplicaInfo(asks_for, asks_for.rpartition("-")[0], f"{name}:1")
        environment = Environment(process, self.disks[name], logs=self.acknowledge != "wal")
        if environment.logs:
            environment.logged = lambda commit: self._wrote(
                process, commit.partition, ChangeSet.decode(commit.change_set).mutations
            )
            environment.wrote = lambda store, mutations: self._passed(process)
        else:
            environment.wrote = lambda store, mutations: self._wrote(process, store, mutations)
        node = Node(self, process, info, environment)
        beats = Random(f"{self.seed}:{name}/{program.starts}:heartbeats")
        service = ReplicaService(node, None, Clock(process), self.net.connect, beats)  # type: ignore[arg-type]
        if self._slow.random() < SLOW_STARTS:
            saying = self.loop.create_task(say_opening(service.member(info), self.controllers.addresses()))
            await asyncio.sleep(2 * CONTROLLER.opening_timeout_s * self._slow.random())
            saying.cancel()
        await recover(service, info, self.controllers.addresses(), asyncio.Event())
        self.nodes[name] = node
        for local in node._registry.local_partitions():
            if local.lifecycle.state is State.OWNED:
                epoch, entries = local.lifecycle.epoch, contents(local)
                sequence = int.from_bytes(entries.get(layout.SEQUENCE, b""), "big")
                held = {
                    s: each.batch for s, each in node._registry.skipped_batches.held(local, epoch, sequence).items()
                }
                self.oracle.owned(local.id, name, epoch, entries, self._plan_of(local.id, epoch))
                self.oracle.opened(local.id, epoch, sequence, held, program.power_lost)
                self.oracle.changed(local.id, self.nodes)
        program.power_lost = False
        methods = Methods()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(service, methods)
        self.net.serve(process, methods.handlers)
        for duty in duties(service, info, self.controllers.addresses(), f"{name}-{program.starts}"):
            self.loop.create_task(self.guarded(duty))

    # -- reports to the oracle ----------------------------------------------------------------------------

    def _wrote(self, process: Process, where: PartitionId | Store, mutations: Mutations) -> None:
        if self._passed(process):
            return
        notes = self._notes
        applies = notes.get("applies")
        if not any(key == layout.SEQUENCE for key, _ in mutations.puts):
            return
        node = self.nodes[process.name]
        if (settled := notes.get("settles")) is not None:
            epoch = node.lifecycle(settled).epoch
            self.log(f"{process.name} settles {settled} at {epoch}")
            self.serving(settled)
            self._check(lambda: self.oracle.settled(settled, process.name, epoch, mutations))
            return
        if applies is None:
            return
        partition = next(
            local.id for local in node._registry.local_partitions() if local.id == where or local.store is where
        )
        batch, rows = applies[partition]
        epoch = node.lifecycle(partition).epoch
        self.log(f"{process.name} commits {batch.source} {batch.number} to {partition} at {epoch}")
        self.serving(partition)
        if batch.number < 0:
            self._check(lambda: self.oracle.taken(partition, process.name, epoch, batch, mutations))
        else:
            written, source = dict(mutations.puts), batch.source.encode()
            if layout.OUTPUT + source not in written or layout.POSITION + source not in written:
                self.fail(Violation(f"a commit to {partition} without its output or position"))
                return
            position = written[layout.POSITION + source]
            now_us = layout.Position.decode(position).at_us
            self._check(lambda: self.oracle.committed(partition, process.name, epoch, batch, rows, now_us, mutations))
        self._check(lambda: self.oracle.changed(partition, self.nodes))

    @property
    def _notes(self) -> dict[str, Any]:
        """Notes of the running job, or of the loop if no job runs."""
        job = self.loop.job
        return self.loop.notes if job is None else job.notes

    def _passed(self, process: Process) -> bool:
        """Reports to the oracle the skipped batches that this write records. Returns whether it records any."""
        skipped_batches = self._notes.get("passes")
        if skipped_batches is None:
            return False
        _, batch = self._notes["passing"]
        for partition, epoch, position in skipped_batches:
            self.log(f"{batch.source} {batch.number} passes {partition} at {process.name} at {epoch}")
            self.serving(partition)
            self._check(partial(self.oracle.passed, partition, process.name, epoch, batch, position.at_us))
        return True

    def changed(self, node: Node, partition: PartitionId) -> None:
        lifecycle = node.lifecycle(partition)
        self.log(f"{node.info.name} {partition} {lifecycle.state} {lifecycle.epoch} {lifecycle.move_id}")
        if lifecycle.state is State.OWNED:
            entries, plan = contents(node._registry.local(partition)), self._plan_of(partition, lifecycle.epoch)
            self._check(lambda: self.oracle.owned(partition, node.info.name, lifecycle.epoch, entries, plan))
        self._check(lambda: self.oracle.changed(partition, self.nodes))

    def serving(self, partition: PartitionId) -> None:
        """Reports to the oracle every replica that has a lease and may commit to the partition."""
        for name, node in self.nodes.items():
            lifecycle = node.lifecycle(partition)
            if may_commit(lifecycle) and node.leased:
                epoch = lifecycle.epoch
                self._check(lambda: self.oracle.serves(partition, name, epoch, self._given_up(partition, epoch)))  # noqa: B023

    def _given_up(self, partition: PartitionId, epoch: int) -> bool:
        """Tells whether, by the ledger, the changes of owner to all later epochs have failed."""
        newest = self.oracle.epochs.get(partition, 0)
        for later in range(epoch + 1, newest + 1):
            for grant in self.ledger.records(f"grant/{partition}/{later}"):
                if self.ledger.head(grant.payload["move"]).state is not RecordState.FAILED:
                    return False
        return True

    def _plan_of(self, partition: PartitionId, epoch: int) -> Plan:
        for grant in self.ledger.records(f"grant/{partition}/{epoch}"):
            planned = next(self.ledger.records(grant.payload["move"])).payload
            between = range(planned["epoch"] + 1, epoch)
            abandoned = any(True for e in between for _ in self.ledger.records(f"grant/{partition}/{e}"))
            over = self.ledger.head(grant.payload["move"]).state is RecordState.FAILED
            return Plan(planned["epoch"], planned["how"] or "MOVE", abandoned, over)
        return Plan()

    def takes(self, source: str, session: Session) -> None:
        """Records that a client begins with this session."""
        self.sessions[source] = max(self.sessions.get(source, session), session)

    def has(self, source: str, session: Session) -> None:
        """Records that all partitions have accepted this session."""
        self.opened_by[source] = max(self.opened_by.get(source, session), session)

    def answered(self, partition: int, batch: Any, output: bytes) -> None:
        self._check(lambda: self.oracle.answered(PartitionId("Flow", partition), batch.source, batch.number, output))

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as error:
            self.fail(error)

    # -- in the end ---------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Tells whether the cluster is at rest: there is a leader, and no start, change or copy is under way."""
        if self.controller is None or self.damaged:
            return False
        if any(self.programs[name].running and name not in self.nodes for name in REPLICAS):
            return False  # a replica still recovers its data
        if not all(self.nodes[name].heard for name in REPLICAS if name in self.nodes):
            return False  # a replica has no lease, and may not know which partitions it no longer owns
        cluster = self.controller.cluster
        if any(cluster.changes()):
            return False
        if cluster.planned or "Flow" not in cluster.deployed or not self._copies_follow:
            return False
        return not any(r.state is ReconfigurationState.RUNNING for r in self.controller.runs.running.values())

    @property
    def _copies_follow(self) -> bool:
        """Tells whether each partition has the wanted number of standbys, all with every commit of the owner."""
        assert self.controller is not None
        if self.controller.cluster.standbys.get("Flow", 0) != self.standbys:
            return False
        return all(len(self._copies(PartitionId("Flow", p))) == self.standbys for p in range(flow.PARTITIONS))

    def _copies(self, partition: PartitionId) -> list[tuple[str, Store]]:
        """Returns (replica, store) of each standby of a partition that has every commit of the owner."""
        assert self.controller is not None
        owner = self.controller.cluster.operator("Flow").assignment.owner(partition.partition)[0]
        serving = self.nodes[owner]._registry.local(partition).store if owner in self.nodes else None
        if not isinstance(serving, Store) or serving.closed:
            return []
        found = []
        for copy in self.controller.standbys.copies(partition):
            if copy.replica in self.nodes:
                incoming = self.nodes[copy.replica]._registry.local(partition).incoming
                if incoming is None or incoming.move_id != copy.move_id or not isinstance(incoming.store, Store):
                    continue
                if not incoming.store.closed and read_sequence(incoming.store) == read_sequence(serving):
                    found.append((copy.replica, incoming.store))
        return found

    def check_end(self, sent: dict[int, dict[tuple[str, int], bytes]], mended: Collection[str]) -> None:
        """Checks the cluster at the end of a run. Raises Violation.

        Args:
            sent: partition → (source, number) → rows, for every batch that clients sent.
            mended: see :meth:`Oracle.compare`.
        """
        assert self.controller is not None
        cluster = self.controller.cluster
        assignment = cluster.operator("Flow").assignment
        self._check_ended()
        folded = ClusterState(cluster.now_us, validated=True)
        for record in self.ledger.records(archived=True):
            folded.fold(record)
        for node in self.nodes.values():
            if all(
                local.mutex._mutex._owner is None for local in node._registry.local_partitions()
            ):  # otherwise a partition is being changed
                node._registry.validate()
        if (folded.roster.replicas, folded.epochs_granted, folded.operator("Flow").assignment) != (
            cluster.roster.replicas,
            cluster.epochs_granted,
            assignment,
        ):
            raise Violation("the controller's cluster is not the fold of its ledger")
        for number in range(flow.PARTITIONS):
            partition = PartitionId("Flow", number)
            owners = [
                (name, node.lifecycle(partition).epoch)
                for name, node in self.nodes.items()
                if node.lifecycle(partition).state is State.OWNED
            ]
            if owners != [assignment.owner(number)]:
                raise Violation(f"{partition} is owned by {owners}, the ledger says {assignment.owner(number)}")
            copies = dict(self._copies(partition))
            for name, node in self.nodes.items():
                if node.lifecycle(partition).state in (State.WARMING, State.FENCING) and name not in copies:
                    raise Violation(f"{name} still has {partition} {node.lifecycle(partition).state}")
            self.serving(partition)  # needed if the partition got no batch since its owner restarted
            local = self.nodes[owners[0][0]]._registry.local(partition)
            self.oracle.compare(partition, contents(local), sent[number], mended)
            if len(copies) != self.standbys:
                raise Violation(f"{partition} has {sorted(copies)} as standbys, {self.standbys} are wanted")
            for name, copy in copies.items():
                if not self.oracle.same(copy.entries(), contents(local)):
                    raise Violation(f"the standby of {partition} at {name} differs from its owner's")

    def _check_ended(self) -> None:
        """Checks that all moves, takeovers, restores and reconfigurations have ended, in the ledger and at the leader.

        Raises Violation.
        """
        assert self.controller is not None
        cluster = self.controller.cluster
        moves = [item for item, move in cluster.open_moves.items() if move.planned.strategy != "standby"]
        reports = [name for name, running in self.controller.runs.running.items() if not running.over]
        if stranded := [*moves, *cluster.restores.records, *cluster.planned, *reports]:
            raise Violation(f"never ended: {stranded}")


__all__ = ["REPLICAS", "Counts", "Crashed", "Program", "StateflowError", "World"]
