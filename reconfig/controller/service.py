"""The controller's gRPC shell: membership, deployments, reconfigurations."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from reconfig import migration as m
from reconfig.budget import fixed_ms_of
from reconfig.controller.book import Book, Deployed, PlannedMove
from reconfig.controller.runner import Hooks, MoveRunner
from stateflow import ring
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    AlreadyDeployed,
    InvalidArgument,
    MoveAborted,
    MoveConflict,
    MoveUnknown,
    StateflowError,
    Unavailable,
    UnknownSite,
)
from stateflow.ledger import Ledger, RecordState
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import (
    OPTIONS,
    bind,
    remote_error,
    replica_of,
    replica_to_pb,
    spec_of,
    spec_to_pb,
    streaming,
    unary,
)
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
STRATEGIES = ("auto", "warm-up")
WATCH_INTERVAL_S = 0.1
PAUSES_REMEMBERED = 32
T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    incarnation: str
    heard_at: float


@dataclass(slots=True)
class _Running:
    """A reconfiguration: its moves in order, and who is woken when one changes."""

    message: cpb.Reconfiguration
    runners: list[MoveRunner] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ControllerServer(controller_pb2_grpc.ControllerServiceServicer):
    def __init__(self, ledger: Ledger, settings: ControllerSettings | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.settings = settings or ControllerSettings()
        self._clock = clock
        self._book = Book.read(ledger)
        self._records = ThreadPoolExecutor(1, thread_name_prefix="ledger")  # one: the book is not thread-safe
        self._members: dict[str, _Member] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._running: dict[str, _Running] = {}
        self._deploying, self._planning = asyncio.Lock(), asyncio.Lock()  # what was checked still holds when recorded
        self._slots = asyncio.Semaphore(self.settings.concurrent_moves)
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_REMEMBERED)
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- membership ---------------------------------------------------------------------------------------

    @unary
    async def Register(self, request: cpb.RegisterRequest, context: grpc.aio.ServicerContext) -> cpb.RegisterReply:
        info = replica_of(request.replica)
        await self._record(self._book.register, info, request.incarnation)
        self._members[info.name] = _Member(request.incarnation, self._clock.monotonic())
        self._warn_of_missing(info.name, list(request.partitions))
        log.info("replica %s at %s (%s) registered", info.name, info.site, info.address)
        return cpb.RegisterReply(
            operators=[spec_to_pb(deployed.spec) for deployed in self._book.deployed.values()],
            heartbeat_interval_s=self.settings.heartbeat_interval_s,
        )

    def _warn_of_missing(self, name: str, views: list[rpb.PartitionView]) -> None:
        held = {(view.operator, view.partition) for view in views}
        for operator, deployed in self._book.deployed.items():
            missing = [p for p in deployed.assignment.of(name) if (operator, p) not in held]
            if missing:
                log.error("state_missing: replica %s came without partitions %s of %s", name, missing, operator)

    @unary
    async def Heartbeat(self, request: cpb.HeartbeatRequest, context: grpc.aio.ServicerContext) -> cpb.HeartbeatReply:
        member = self._members.get(request.name)
        if member is None or member.incarnation != request.incarnation:
            return cpb.HeartbeatReply(known=False)
        member.heard_at = self._clock.monotonic()
        return cpb.HeartbeatReply(known=True)

    def _alive(self, name: str) -> bool:
        member = self._members.get(name)
        limit = self.settings.heartbeat_interval_s * self.settings.heartbeats_missed_max
        return member is not None and self._clock.monotonic() - member.heard_at <= limit

    # -- deployments --------------------------------------------------------------------------------------

    @unary
    async def Deploy(self, request: cpb.DeployRequest, context: grpc.aio.ServicerContext) -> cpb.Deployment:
        async with self._deploying:
            return await self._deploy(spec_of(request.spec), list(request.sites))

    async def _deploy(self, spec: OperatorSpec, sites: list[str]) -> cpb.Deployment:
        planned = self._book.planned.get(spec.name)
        existing = self._book.deployed.get(spec.name) or (planned[0] if planned else None)
        if existing is not None and existing.spec != spec:
            raise AlreadyDeployed(
                "another version of the operator is deployed",
                remedy="give this one another name, or deploy the same class with the same partitions",
                operator=spec.name,
                deployed=existing.spec.target,
                partitions=existing.spec.partitions,
            )
        if planned is not None:
            await self._create(*planned)
        if existing is not None:
            return self._deployment(self._book.operator(spec.name))
        candidates = [info for info in self._book.replicas.values() if self._alive(info.name)]
        if sites:
            for site in sites:
                self._check_site(site)
            candidates = [info for info in candidates if info.site in sites]
        owners = ring.propose(spec.name, range(spec.partitions), candidates)
        await self._check_loadable(spec, {owners[p] for p in owners})
        record = await self._record(self._book.plan_deployment, spec, owners)
        await self._create(self._book.planned[spec.name][0], record)
        return self._deployment(self._book.operator(spec.name))

    async def _check_loadable(self, spec: OperatorSpec, names: set[str]) -> None:
        """A replica that cannot load the code refuses here, before anything is decided."""
        for name in sorted(names):
            await self._call(name, lambda stub: stub.Create, rpb.CreateRequest(spec=spec_to_pb(spec)))

    async def _create(self, deployed: Deployed, record: Any) -> None:
        for name in sorted(set(deployed.assignment.owners)):
            request = rpb.CreateRequest(
                spec=spec_to_pb(deployed.spec), partitions=sorted(deployed.assignment.of(name)), epoch=1
            )
            await self._call(name, lambda stub: stub.Create, request)
        await self._record(self._book.finish_deployment, record)

    @unary
    async def GetDeployment(
        self, request: cpb.GetDeploymentRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Deployment:
        return self._deployment(self._book.operator(request.operator))

    def _deployment(self, deployed: Deployed) -> cpb.Deployment:
        names = sorted(set(deployed.assignment.owners))
        index = {name: number for number, name in enumerate(names)}
        return cpb.Deployment(
            spec=spec_to_pb(deployed.spec),
            version=deployed.assignment.version,
            replicas=[replica_to_pb(self._book.replicas[name]) for name in names],
            owners=[index[name] for name in deployed.assignment.owners],
            epochs=deployed.assignment.epochs,
        )

    @unary
    async def Status(self, request: cpb.StatusRequest, context: grpc.aio.ServicerContext) -> cpb.StatusReply:
        now = self._clock.monotonic()
        replicas = []
        for info in sorted(self._book.replicas.values(), key=lambda info: info.name):
            member = self._members.get(info.name)
            owned = sum(len(deployed.assignment.of(info.name)) for deployed in self._book.deployed.values())
            replicas.append(
                cpb.ReplicaStatus(
                    replica=replica_to_pb(info),
                    alive=self._alive(info.name),
                    last_heartbeat_s=now - member.heard_at if member else -1,
                    partitions=owned,
                )
            )
        return cpb.StatusReply(
            replicas=replicas,
            deployments=[self._deployment(deployed) for _, deployed in sorted(self._book.deployed.items())],
            reconfigurations=[running.message for running in self._running.values()],
        )

    # -- reconfigurations ---------------------------------------------------------------------------------

    @unary
    async def Migrate(self, request: cpb.MigrateRequest, context: grpc.aio.ServicerContext) -> cpb.Reconfiguration:
        deployed = self._book.operator(request.operator)
        strategy = request.strategy or "auto"
        if strategy not in STRATEGIES:
            raise InvalidArgument(f"there is no strategy {strategy!r}", remedy=f"use {' or '.join(STRATEGIES)}")
        if request.max_pause_ms < 0:
            raise InvalidArgument("a pause cannot be negative", remedy="give max_pause_ms in milliseconds")
        if not request.partitions:
            raise InvalidArgument("no partition is named", remedy="name at least one")
        async with self._planning:
            moves = self._plan(deployed, sorted(set(request.partitions)), request.to, request.max_pause_ms)
            for planned in moves:
                await self._record(self._book.plan_move, planned)
        message = cpb.Reconfiguration(
            id=moves[0].reconfiguration if moves else uuid.uuid4().hex[:12],
            operator=request.operator,
            state="RUNNING",
            max_pause_ms=request.max_pause_ms,
            created_us=self._clock.now_us(),
        )
        running = self._running[message.id] = _Running(message)
        for planned in moves:
            machine = MoveRunner.machine_for(planned, fixed_ms_of(self._pauses))
            running.runners.append(self._runner(running, planned, machine))
        message.moves.extend(runner.report for runner in running.runners)
        running.task = self._spawn(self._run(running))
        return message

    def _plan(self, deployed: Deployed, partitions: list[int], to: str, max_pause_ms: float) -> list[PlannedMove]:
        """Moves for those partitions that are not there already. Raises before anything is decided."""
        reconfiguration = uuid.uuid4().hex[:12]
        moves = []
        coming: dict[str, int] = {}
        for number in partitions:
            partition = PartitionId(deployed.spec.name, number)
            owner, epoch = deployed.assignment.owner(number)
            for open_move in self._book.open_moves.values():
                if open_move.planned.partition == partition:
                    raise MoveConflict(
                        "the partition is moving already",
                        remedy="wait for that move, or cancel it",
                        partition=partition,
                        reconfiguration=open_move.planned.reconfiguration,
                    )
            target = self._target(to, owner, coming)
            if target == owner:
                continue
            coming[target] = coming.get(target, 0) + 1
            moves.append(
                PlannedMove(
                    reconfiguration,
                    partition,
                    owner,
                    target,
                    epoch,
                    self._book.next_epoch(partition),
                    max_pause_ms,
                    "warm-up",
                )
            )
        return moves

    def _target(self, to: str, owner: str, coming: dict[str, int]) -> str:
        """A replica by its name, or the one of a site with the fewest partitions for its weight."""
        named = self._book.replicas.get(to)
        here = [named] if named else [info for info in self._book.replicas.values() if info.site == to]
        if not here:
            self._check_site(to)
        if any(info.name == owner for info in here):
            return owner
        alive = [info for info in here if self._alive(info.name)]
        if not alive:
            raise Unavailable(
                f"no replica of {to} answers",
                remedy="start it, or move to another",
                replicas=[i.name for i in here],
            )

        def load(info: ReplicaInfo) -> tuple[float, str]:
            owned = sum(len(deployed.assignment.of(info.name)) for deployed in self._book.deployed.values())
            return (owned + coming.get(info.name, 0)) / max(info.weight, 1), info.name

        return min(alive, key=load).name

    def _check_site(self, name: str) -> None:
        sites = sorted({info.site for info in self._book.replicas.values()})
        if name not in sites:
            replicas = sorted(self._book.replicas)
            raise UnknownSite(
                f"there is no site or replica {name!r}",
                remedy=f"use a site ({', '.join(sites) or 'none'}) or a replica ({', '.join(replicas) or 'none'})",
            )

    def _runner(self, running: _Running, planned: PlannedMove, machine: m.Move) -> MoveRunner:
        async def record_grant() -> None:
            await self._record(self._book.grant, planned)

        async def record_owned(report: dict[str, object]) -> None:
            await self._record(self._book.move_owned, planned, report)

        async def record_aborted(error: StateflowError, report: dict[str, object]) -> None:
            await self._record(self._book.move_aborted, planned, error.to_wire(), report)

        def changed() -> None:
            running.changed.set()
            running.changed = asyncio.Event()

        return MoveRunner(
            planned=planned,
            spec=self._book.operator(planned.partition.operator).spec,
            source=self._book.replicas[planned.source],
            target=self._book.replicas[planned.target],
            channel=self._channel,
            hooks=Hooks(record_grant, record_owned, record_aborted, lambda: None, changed),
            settings=self.settings,
            clock=self._clock,
            machine=machine,
        )

    async def _run(self, running: _Running, first: dict[str, list[m.Instruction]] | None = None) -> None:
        async def one(runner: MoveRunner) -> None:
            async with self._slots:
                await runner.run((first or {}).get(runner.planned.item_id))
                if runner.machine.phase is m.Phase.COMPLETED and runner.report.predicted_pause_ms:
                    predicted, actual = runner.report.predicted_pause_ms, runner.report.pause_ms
                    self._pauses.append((predicted - runner.machine.fixed_ms, actual))

        try:
            await asyncio.gather(*(one(runner) for runner in running.runners))
            failed = any(runner.machine.phase is not m.Phase.COMPLETED for runner in running.runners)
            self._settle(running, "FAILED" if failed else "COMPLETED")
        except Exception:
            log.exception("reconfiguration %s", running.message.id)
            self._settle(running, "FAILED")

    @staticmethod
    def _refresh(running: _Running) -> cpb.Reconfiguration:
        del running.message.moves[:]
        running.message.moves.extend(runner.report for runner in running.runners)
        return running.message

    def _settle(self, running: _Running, state: str) -> None:
        running.message.state = state
        self._refresh(running)
        running.changed.set()

    def _found(self, reconfiguration: str) -> _Running:
        try:
            return self._running[reconfiguration]
        except KeyError:
            raise MoveUnknown(
                f"there is no reconfiguration {reconfiguration!r}", remedy="see `stateflow status`"
            ) from None

    @unary
    async def GetReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        return self._refresh(self._found(request.id))

    @streaming
    async def WatchReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cpb.Reconfiguration]:
        running = self._found(request.id)
        while True:
            changed = running.changed
            report = self._refresh(running)
            over = report.state != "RUNNING"  # as it is sent: it may end while it is being sent
            yield report
            if over:
                return
            await changed.wait()
            if running.message.state == "RUNNING":
                await asyncio.sleep(WATCH_INTERVAL_S)  # moves change many times a second; watchers need not

    @unary
    async def CancelReconfiguration(
        self, request: cpb.ReconfigurationRequest, context: grpc.aio.ServicerContext
    ) -> cpb.Reconfiguration:
        running = self._found(request.id)
        for runner in running.runners:
            runner.cancel()
        return self._refresh(running)

    # -- after a restart ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Carry on with what the ledger says was under way."""
        for deployed, record in list(self._book.planned.values()):
            self._spawn(self._resume_deployment(deployed, record))
        by_reconfiguration: dict[str, list[str]] = {}
        for item, open_move in self._book.open_moves.items():
            by_reconfiguration.setdefault(open_move.planned.reconfiguration, []).append(item)
        for reconfiguration, items in by_reconfiguration.items():
            self._resume(reconfiguration, items)

    async def _resume_deployment(self, deployed: Deployed, record: Any) -> None:
        if record.state is RecordState.NEW:  # the process ended between its two records
            record = await self._record(self._book._append, record.item_id, RecordState.PROCESSING, record)
        while True:
            try:
                async with self._deploying:
                    if deployed.spec.name in self._book.planned:  # else somebody deployed it again meanwhile
                        await self._create(deployed, record)
                    return
            except StateflowError as error:
                log.warning("deployment of %s waits: %s", deployed.spec.name, error)
                await asyncio.sleep(self.settings.heartbeat_interval_s)

    def _resume(self, reconfiguration: str, items: list[str]) -> None:
        planned = [self._book.open_moves[item] for item in items]
        message = cpb.Reconfiguration(
            id=reconfiguration,
            operator=planned[0].planned.partition.operator,
            state="RUNNING",
            max_pause_ms=planned[0].planned.max_pause_ms,
            created_us=self._clock.now_us(),
        )
        running = self._running[reconfiguration] = _Running(message)
        first: dict[str, list[m.Instruction]] = {}
        for open_move in planned:
            move = open_move.planned
            if open_move.granted:
                machine, instructions = m.Move.resumed(move.epoch, move.granted_epoch, move.max_pause_ms)
            else:  # never granted: nobody can have sealed
                machine = MoveRunner.machine_for(move)
                instructions = machine.handle(
                    m.TargetFailed(MoveAborted("the controller was restarted during the move", remedy="start it again"))
                )
            first[move.item_id] = instructions
            running.runners.append(self._runner(running, move, machine))
        running.task = self._spawn(self._run(running, first))

    # -- checkpoints --------------------------------------------------------------------------------------

    @unary
    async def Checkpoint(
        self, request: rpb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> rpb.CheckpointReply:
        if request.operator:
            names = sorted(set(self._book.operator(request.operator).assignment.owners))
        else:
            names = [name for name in sorted(self._book.replicas) if self._alive(name)]
        started = self._clock.monotonic()
        total = rpb.CheckpointReply()
        for reply in await asyncio.gather(*(self._call(n, lambda s: s.Checkpoint, request, 600) for n in names)):
            total.partitions += reply.partitions
            total.bytes_new += reply.bytes_new
            total.bytes_total += reply.bytes_total
        total.duration_s = self._clock.monotonic() - started
        return total

    # -- plumbing -----------------------------------------------------------------------------------------

    async def _record(self, work: Callable[..., T], *arguments: Any) -> T:
        """One durable step of the book. They happen one after another, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._records, work, *arguments)

    async def _call(self, name: str, method: Callable[[Any], Any], request: Any, timeout_s: float | None = None) -> Any:
        info = self._book.replicas[name]
        stub = replica_pb2_grpc.ReplicaServiceStub(self._channel(info.address))
        try:
            return await method(stub)(request, timeout=timeout_s or self.settings.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise remote_error(error, f"{name} ({info.address})") from error

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return self._channels[address]

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for channel in self._channels.values():
            await channel.close()
        self._records.shutdown()
        self._book.ledger.close()


async def serve(
    ledger: Ledger,
    listen: str,
    settings: ControllerSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    ready: asyncio.Future[str] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a controller until ``stop``. Raises PortInUse."""
    server = grpc.aio.server(options=OPTIONS)
    shell = ControllerServer(ledger, settings, clock)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(shell, server)
    try:
        address = bind(server, listen)
        await server.start()
        shell.resume()
        if ready is not None:
            ready.set_result(address)
        await (stop or asyncio.Event()).wait()
        await server.stop(grace=1)
    finally:
        await shell.close()
