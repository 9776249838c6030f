"""A sparse source whose client resends lost batches by itself; two such clients may run at the same time.

The client is the real :class:`~stateflow.client.delivery.Delivery`. The application stores how many batches are
acknowledged, and itself resends the batches that its client no longer keeps. When a client starts, the application
names it the newest acknowledged batch only if no partition has that batch or a newer one, as only the application then
knows of the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import grpc.aio

from stateflow.client.delivery import Deliver, Delivery, Look, Open, SameOperator, Steps
from stateflow.client.history import History
from stateflow.errors import OperatorNotDeployed, PositionGap, SourceTaken, StateflowError, Unavailable
from stateflow.partition.layout import Position, Session
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.faults import remote_error
from stateflow.rpc.wire import message_of, positions_of
from stateflow.types import PartitionId
from tests.simulation.sim.flow import PARTITIONS, sorted_rows
from tests.simulation.sim.loop import Process
from tests.simulation.sim.oracle import Violation
from tests.simulation.sim.workload import Client, Source
from tests.simulation.sim.world import Clock, World

#: share of seeds in which a second client of the source starts beside the first
RIVALS = 0.3


class Gateway(Client):
    """One run of the application: its client, and the part of a rewind that the application does itself."""

    def __init__(self, world: World, process: Process, source: Source) -> None:
        super().__init__(world, process, source)
        self._random = Random(f"{world.seed}:{process.name}:{world.programs[process.name].starts}")
        # clients with a slow clock, or with a history of zero bytes, must work as well
        bytes_max = self._random.choice((0, 8_000, 1 << 20))
        history = History("Flow", source.name, PARTITIONS, bytes_max)
        session = Session(Clock(process).now_us(), f"{self._random.getrandbits(64):016x}")
        self._delivery = Delivery(history, session, self._acknowledged)
        self._opened = False
        self._newest = -1  # newest batch that any partition had when the client last asked

    async def run(self) -> None:
        source = self._source
        while not source.finished:
            try:
                if not self._opened:
                    await self._open_once()
                    continue  # batches of an earlier client may have been acknowledged meanwhile
                await self._one(source.done)
            except (Unavailable, OperatorNotDeployed):  # a controller whose ledger is empty raises the latter
                await asyncio.sleep(0.1)
                continue
            except SourceTaken:
                newest = self._world.sessions.get(source.name)
                if newest is None or newest <= self._delivery.session:
                    raise Violation(f"{self._process.name} is refused although no later client began") from None
                self._world.log(f"{self._process.name} has lost its source")
                return
            await asyncio.sleep(self._random.expovariate(1 / 0.4))

    async def audit(self) -> None:
        """Resends the batches that partitions have lost, at the end of a run."""
        while True:
            try:
                await self._open_once()
                await self._perform(self._delivery.verify())
                return
            except PositionGap as gap:
                await self._rewind(int(gap.where["expected"]), len(self._source.batches))
            except Unavailable:
                await asyncio.sleep(0.1)

    async def _open_once(self) -> None:
        if not self._opened:
            await self._perform(self._delivery.open())
            self._opened = True

    def _acknowledged(self) -> int | None:
        newest = self._source.done - 1
        return newest if newest > self._newest else None

    async def _one(self, number: int) -> None:
        source = self._source
        try:
            await self._deliver(number)
        except PositionGap as gap:
            await self._rewind(int(gap.where["expected"]), number)
            return
        source.done = max(source.done, number + 1)

    async def _deliver(self, number: int, rewind: bool = False) -> None:
        rows, watermark = self._source.batches[number]
        steps = self._delivery.deliver(sorted_rows(rows), number, rewind, watermark, dict)
        await self._perform(steps)

    async def _rewind(self, oldest: int, number: int) -> None:
        """Resends batches that the client cannot resend, as it no longer keeps them or an earlier client sent them.

        Args:
            oldest: the first batch to resend.
            number: the batch after the last one to resend.
        """
        if not self._world.oracle.lost or self._world.acknowledge == "standby":
            raise Violation(f"a gap without a loss: batch {oldest} is asked for before {number}")
        if taken := self._delivery.history.taken:
            self._world.log(f"{self._process.name} gives up what a former client's batches took the place of")
            self._world.oracle.given_up |= {PartitionId("Flow", partition) for partition in taken}
            await self._perform(self._delivery.accept_loss())
            return
        self._world.log(f"{self._process.name} sends again {oldest} to {number - 1}")
        self._world.counts.rewinds += 1
        while oldest < number:
            try:
                await self._deliver(oldest, rewind=True)
                oldest += 1
            except PositionGap as gap:  # the partition lost more meanwhile
                oldest = int(gap.where["expected"])
            except Unavailable:
                await asyncio.sleep(0.1)

    # -- steps --------------------------------------------------------------------------------------------

    async def _perform(self, steps: Steps[Any]) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    assert not isinstance(step, Look), "this application numbers its batches"
                    came: Any = None
                    if isinstance(step, Open):
                        came = await self._open(step)
                    elif not isinstance(step, SameOperator):  # no operator is undeployed here
                        came = await self._apply(step)
                except StateflowError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(came)
        except StopIteration as end:
            return end.value

    async def _open(self, step: Open) -> dict[int, Position]:
        self._world.takes(self._source.name, step.session)
        await self._refresh(None)
        if self._table is None:
            raise Unavailable("no table yet", remedy="-")
        found: dict[int, Position] = {}
        by_address: dict[str, list[int]] = {}
        for partition, route in enumerate(self._table.routes):
            by_address.setdefault(route.address, []).append(partition)
        for address, partitions in by_address.items():
            stub = replica_pb2_grpc.ReplicaServiceStub(self._world.net.connect(address))
            asked = rpb.PositionsRequest(operator="Flow", source=self._source.name, partitions=partitions)
            try:
                request = message_of(rpb.OpenSourceRequest, asked=asked, session=step.session)
                found |= positions_of(await stub.OpenSource(request, timeout=2))
            except grpc.aio.AioRpcError as error:
                meant = remote_error(error, address)
                raise meant if isinstance(meant, SourceTaken) else Unavailable(str(meant), remedy="-") from None
        self._world.has(self._source.name, step.session)
        self._newest = max((position.batch for position in found.values()), default=-1)
        return found

    async def _apply(self, step: Deliver) -> Mapping[int, bytes]:
        batch, opened = step.batch, self._world.opened_by.get(self._source.name)
        assert batch.session is not None
        outputs = await self._route(batch, step.rows, step.after)
        if opened is not None and opened > batch.session:
            raise Violation(f"{self._process.name} is answered although {self._source.name} belonged to a later client")
        return outputs
