"""The workload of a simulated cluster: clients of a dense and a sparse source, and a user who moves partitions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc.aio

from reconfig.decisions.failover import Why
from stateflow.errors import (
    BatchIncomplete,
    OperatorNotDeployed,
    PositionGap,
    StaleBatch,
    StateflowError,
    Unavailable,
)
from stateflow.partition.positions import Batch
from stateflow.router.session import BatchSession, Refresh, RoutingTable, Send, Wait, table_of
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.apply import Answers, BatchRows, Replies, requests_of
from stateflow.rpc.faults import remote_error
from stateflow.rpc.wire import message_of
from stateflow.types import PartitionId, ReplicaInfo
from tests.simulation.sim import parts
from tests.simulation.sim.controllers import Asked
from tests.simulation.sim.flow import PARTITIONS, messages, sorted_rows
from tests.simulation.sim.loop import Process
from tests.simulation.sim.oracle import Violation
from tests.simulation.sim.streams import Streams
from tests.simulation.sim.world import REPLICAS, World

#: sizes at which requests are split: into pieces of a partition's rows, into one message per partition, or not at all
CHUNK_BYTES = (150, 400, 1 << 20)


@dataclass
class Source:
    """Batches of a source, and how many of them are done. A query stores the latter in its own checkpoint."""

    name: str
    dense: bool
    batches: list[tuple[dict[int, bytes], int | None]] = field(default_factory=list)  # rows, watermark
    done: int = 0

    @property
    def finished(self) -> bool:
        return self.done == len(self.batches)


def make_source(world: World, name: str, dense: bool, count: int) -> Source:
    random, pool = world.random, messages()
    source = Source(name, dense)
    watermark: int | None = None
    for number in range(count):
        rows = {p: random.choice(pool[p]) for p in range(PARTITIONS) if random.random() < (0.5 if dense else 0.4)}
        if dense:
            rows = {p: rows.get(p, b"") for p in range(PARTITIONS)}
        elif not rows:
            rows = {0: b""}
        if random.random() < 0.4:
            watermark = number * 1_500_000
        source.batches.append((rows, watermark))
    return source


class Client:
    """One run of the program that sends a source's batches. It routes them with the real BatchSession."""

    def __init__(self, world: World, process: Process, source: Source, sink: parts.Parts | None = None) -> None:
        self._world, self._process, self._source, self._sink = world, process, source, sink
        self._table: RoutingTable | None = None
        self._controller = Asked(world)
        self._streams = Streams(world)
        self._pauses = Random(f"{world.seed}:{source.name}:pauses")

    async def run(self) -> None:
        source, random = self._source, self._world.random
        while not source.finished:
            number = source.done
            rows, watermark = source.batches[number]
            try:
                if self._sink is not None:
                    await self._check(number)
                    rows = self._sink.of(number, rows)
                await self._send(number, rows, watermark)
            except (Unavailable, OperatorNotDeployed):  # a controller whose ledger is empty raises the latter
                await asyncio.sleep(0.1)
                continue
            except BatchIncomplete as incomplete:
                self._again(incomplete, number)
                continue
            except PositionGap as gap:
                await self._fill(gap, number)
                continue
            source.done += 1
            await asyncio.sleep(random.expovariate(1 / 0.4))

    async def _send(self, number: int, rows: dict[int, bytes], watermark: int | None) -> None:
        source = self._source
        batch = Batch(source.name, number, sparse=not source.dense, watermark_us=watermark)
        for partition, output in (await self._route(batch, sorted_rows(rows))).items():
            self._world.answered(partition, batch, output)

    async def _fill(self, gap: PositionGap, number: int) -> None:
        """Resends acknowledged batches that a partition has lost, and so reports as a gap.

        Args:
            gap: the partition's error.
            number: the batch that the partition refused; the batches before it are resent.
        """
        world, source = self._world, self._source
        partition = int(gap.where["partition"])
        world.serving(PartitionId("Flow", partition))
        found = world.oracle.newest(PartitionId("Flow", partition), source.name)
        if not world.oracle.lost or world.acknowledge == "standby":
            raise Violation(f"a gap without a loss: {gap}")
        if gap.remedy != f"rewind the source to batch {found + 1}":
            raise Violation(f"the batch to rewind to is {found + 1}: {gap}")
        world.log(f"{source.name} rewinds partition {partition} to {found + 1}")
        for missing in range(found + 1, number):
            rows, watermark = source.batches[missing]
            try:
                await self._send(missing, {partition: rows[partition]}, watermark)
            except (Unavailable, PositionGap, StaleBatch):  # what is lost has changed; the next gap says how
                return

    async def _check(self, number: int) -> None:
        """Checks that the previous batch was sent whole. Raises BatchIncomplete, Unavailable."""
        if number == 0:
            return
        await self._refresh(None)
        if self._table is None:
            raise Unavailable("no table yet", remedy="-")
        replies: dict[int, Any] = {}
        for partition, route in enumerate(self._table.routes):
            stub = replica_pb2_grpc.ReplicaServiceStub(self._world.net.connect(route.address))
            try:
                request = parts.request(self._source.name, partition)
                replies[partition] = await stub.Positions(request, timeout=2)
            except grpc.aio.AioRpcError as error:
                raise Unavailable(str(remote_error(error, route.address)), remedy="-") from None
        try:
            parts.check(self._source.name, number, replies)
        except PositionGap:
            # a lost batch ends the query, too, and its restart mends the sink; each partition reports its gap when it
            # gets its next batch
            assert self._sink is not None
            self._sink.mended = True

    def _again(self, incomplete: BatchIncomplete, number: int) -> None:
        """Repeats the query from the previous batch on, with a sink that evaluates whole batches."""
        world, sink = self._world, self._sink
        assert sink is not None
        if (sink.mended or number <= sink.since) and not world.oracle.lost:
            raise Violation(f"a batch that was sent whole counts as incomplete: {incomplete}")
        world.log(f"{self._source.name} is put back: {incomplete}")
        world.counts.incomplete += not sink.mended
        sink.mended = True
        self._source.done = number - 1

    async def _route(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> dict[int, bytes]:
        """Routes a batch like stateflow.router.Router, but without threads. Returns partition → output."""
        loop = self._world.loop
        while self._table is None:
            await self._refresh(None)
        session = BatchSession(self._table, rows, 30.0, self._pauses)
        answered = asyncio.Event()
        while not session.done:
            wait = math.inf
            for instruction in session.poll(loop.time()):
                match instruction:
                    case Send():
                        self._stream(instruction, batch, rows, after, session, answered)
                    case Refresh():
                        await self._refresh(session)
                        wait = 0.0
                    case Wait(seconds):
                        wait = max(0.0, seconds)
            if session.done:
                break
            if wait > 0:
                answered.clear()
                try:
                    await asyncio.wait_for(answered.wait(), None if wait == math.inf else wait)
                except TimeoutError:
                    pass
        return session.result()

    async def _refresh(self, session: BatchSession | None) -> None:
        try:
            reply = await self._controller.ask("GetDeployment", cpb.GetDeploymentRequest(operator="Flow"), 10)
        except grpc.aio.AioRpcError as error:
            if session is not None:
                session.not_refreshed(remote_error(error, "controller"))
            await asyncio.sleep(0.2)
            return
        infos = [ReplicaInfo(r.name, r.site, r.address, r.weight) for r in reply.replicas]
        table = table_of("Flow", reply.version, [infos[i] for i in reply.owners], list(reply.epochs))
        if session is None:
            self._table = table
        else:
            session.refreshed(table)

    def _stream(
        self,
        send: Send,
        batch: Batch,
        rows: BatchRows,
        after: Mapping[int, int] | None,
        session: BatchSession,
        answered: asyncio.Event,
    ) -> None:
        world, address = self._world, send.address

        def tell(answers: Answers) -> None:
            for partition, outcome in answers:
                if not isinstance(outcome, StateflowError) and not batch.rewind:  # a rewind repeats an earlier answer
                    world.answered(partition, batch, outcome.output)
                if not session.awaits(partition, address):
                    continue
                if isinstance(outcome, StateflowError):
                    session.refused(partition, outcome, world.loop.time())
                else:
                    session.answered(partition, outcome.output, outcome.replayed)
            answered.set()

        requests = requests_of("Flow", batch, rows, send.parts, CHUNK_BYTES[batch.number % 3], after)
        self._streams.call(address, requests, Replies(address, [partition for partition, _ in send.parts], tell))


class Mover:
    """A user who deploys the operator and requests moves, and sometimes cancels, pauses, edits or retries one."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._controller = Asked(world)

    async def run(self, for_s: float) -> None:
        world, random = self._world, self._world.random
        begun: list[str] = []
        deploy = message_of(cpb.DeployRequest, spec=world.spec, failover="manual" if world.manual else "")
        while not await self._asked("Deploy", deploy, 30):
            await asyncio.sleep(0.3)
        standby = cpb.StandbyRequest(operator="Flow", count=world.standbys)
        while not await self._asked("Standby", standby):
            await asyncio.sleep(0.3)
        until = world.loop.now + for_s
        while world.loop.now < until:
            await asyncio.sleep(random.expovariate(1 / 0.8))
            budget = random.choice((None, None, 20, 200))
            strategy = "auto" if budget else random.choice(("auto", "fluid", "batched", "pause-and-copy", "on-demand"))
            request = cpb.MigrateRequest(
                operator="Flow",
                partitions=random.sample(range(PARTITIONS), random.choice((1, 1, 2))),
                to=random.choice((*REPLICAS, "edge")),
                options=cpb.MoveOptions(max_pause_ms=budget, strategy=strategy, limit=random.choice((None, None, 1))),
            )
            if world.manual and world.person.random() < 0.1:
                failover = world.person.choice(("automatic", "manual"))
                await self._asked("Deploy", message_of(cpb.DeployRequest, spec=world.spec, failover=failover))
            reply = await self._asked("Migrate", request)
            if reply is not None:
                begun.append(reply.id)
                await self._interfere(begun)
        await asyncio.sleep(2)
        # moves whose budget cannot be met would wait for a long time, and paused ones for ever
        for reconfiguration in begun:
            while await self._cancel(reconfiguration) is None:
                await asyncio.sleep(0.5)

    async def give_up(self) -> None:
        """Orders takeovers, once a second, of partitions that their owners have lost and of which a copy exists.

        Returns at once with automatic failover, which needs no orders.
        """
        world = self._world
        while world.manual:
            await asyncio.sleep(1)
            controller = world.controller
            orphans = {} if controller is None else controller.takeovers._orphans
            lost = [each.partition for each, orphan in orphans.items() if orphan.why is Why.MISSING]
            if lost:
                request = cpb.TakeOverLostRequest(operator="Flow", partitions=lost, accept_loss=True)
                await self._asked("TakeOver", request)

    async def _interfere(self, begun: list[str]) -> None:
        """Cancels, pauses or edits the newest move, or retries an earlier one."""
        random, newest = self._world.random, begun[-1]
        what = random.random()
        if what < 0.2:
            await asyncio.sleep(random.expovariate(1 / 0.2))
            await self._cancel(newest)
        elif what < 0.35:
            await self._asked("PauseReconfiguration", cpb.ReconfigurationRequest(id=newest))
            await asyncio.sleep(random.expovariate(1 / 0.3))
            if random.random() < 0.7:  # otherwise ``run`` cancels it while it is paused
                await self._asked("EditReconfiguration", cpb.EditRequest(id=newest, limit=random.choice((0, 2))))
                await self._asked("ResumeReconfiguration", cpb.ReconfigurationRequest(id=newest))
        elif what < 0.45:
            request = cpb.ReconfigurationRequest(id=random.choice(begun), cancelled=random.random() < 0.5)
            if (again := await self._asked("RetryReconfiguration", request)) is not None:
                begun.append(again.id)

    async def _cancel(self, reconfiguration: str) -> Any:
        return await self._asked("CancelReconfiguration", cpb.ReconfigurationRequest(id=reconfiguration))

    async def _asked(self, method: str, request: Any, timeout: float = 10) -> Any:
        """Sends a request once. Returns the answer, None if the request was refused or lost."""
        try:
            return await self._controller.ask(method, request, timeout)
        except grpc.aio.AioRpcError:
            return None
