"""Simulates duplicates: a second replica with the name of another, and a controller with an empty ledger.

The second replica has an empty data directory. The controller may register it only if the name has no state to lose;
the second replica is then killed at once. If a move to the name is under way by then, the first replica is refused, and
an administrator runs ``stateflow replace`` for it. While the controller has the empty ledger, a user deploys the
operator again; later the controller gets its former ledger back.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import TYPE_CHECKING

import grpc.aio

from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.wire import message_of
from tests.simulation.sim.disk import Disk
from tests.simulation.sim.ledger import MemoryLedger
from tests.simulation.sim.loop import Process

if TYPE_CHECKING:
    from tests.simulation.sim.world import World

SHARE = 0.15  # share of seeds that have a duplicate, for each of the two kinds
REPLACED_S = 30.0  # seconds after which the administrator no longer expects the refused replica to register by itself


class Doubles:
    def __init__(self, world: World, busy_s: float) -> None:
        self._world, self._busy_s = world, busy_s
        self._random = Random(f"{world.seed}:doubles")
        self._double: Process | None = None
        self._operator: Process | None = None
        self._stranger: Process | None = None

    def plan(self) -> None:
        from tests.simulation.sim.world import REPLICAS  # not above: this module is part of a world

        random, loop = self._random, self._world.loop
        if random.random() < SHARE:
            begin = 0.5 + random.random() * self._busy_s
            loop.at(begin, None, self._begin_double, random.choice(REPLICAS))
            loop.at(begin + 8 * random.random(), None, self._end_double)
        # NOT COVERED: two controllers in one list of addresses that have different ledgers. Replicas follow the
        # controller whose ledger they know. The other one gets no claims of replicas, and so may deploy the operator
        # (seed 946, without the second condition).
        if random.random() < SHARE and len(self._world.controllers.names) == 1:
            begin = 4 + random.random() * self._busy_s  # the operator is deployed by then
            loop.at(begin, None, self._begin_blank)
            loop.at(begin + 6 * random.random(), None, self._end_blank)

    def end(self) -> None:
        self._end_double()
        self._end_blank()

    # -- a second replica ---------------------------------------------------------------------------------

    def _begin_double(self, name: str) -> None:
        from tests.simulation.sim.world import Program

        world = self._world
        world.log(f"a second {name} starts")
        world.counts.doubles += 1
        world.disks["double"] = Disk(Random(f"{world.seed}:double"), "double")

        async def boot(process: Process) -> None:
            await world.boot_replica(process, program, name)

        program = Program("double", boot, starts=1)
        process = program.process = self._double = Process(world.loop, "double", 0.0, 0.0)
        process.killed = lambda: world.killed(program)
        world.loop.spawn(process, world.guarded(boot(process)))

        def registered(incarnation: str) -> None:  # moves planned from here on may have the second replica as target
            if incarnation == "double-1":
                world.log(f"the second {name} was let in")
                self._end_double()
                self._operator = Process(world.loop, "operator", 0.0, 0.0)
                world.loop.spawn(self._operator, world.guarded(self._replace(name)))
            elif incarnation.startswith(f"{name}-") and self._operator is not None and self._operator.alive:
                self._operator.die()

        world.registered = registered

    async def _replace(self, name: str) -> None:
        """Asks each controller in turn to replace the name, without end, as the error `name_taken` advises."""
        addresses = self._world.controllers.addresses().split(",")
        controllers = [controller_pb2_grpc.ControllerServiceStub(self._world.net.connect(each)) for each in addresses]
        while True:
            await asyncio.sleep(REPLACED_S)
            for controller in controllers:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await controller.Replace(cpb.ReplaceRequest(replica=name), timeout=10)

    def _end_double(self) -> None:
        if self._double is not None and self._double.alive:
            self._double.die()

    # -- an empty ledger ----------------------------------------------------------------------------------

    def _begin_blank(self) -> None:
        from tests.simulation.sim.world import REPLICAS

        world = self._world
        cluster = world.controller.cluster if world.controller is not None else None
        if cluster is None or "Flow" not in cluster.deployed or not set(REPLICAS) <= cluster.roster.replicas.keys():
            return  # no state can be lost yet, or a replica has not registered yet and so belongs to no ledger
        world.log("the controller gets an empty ledger")
        world.counts.blanks += 1
        world.kill("controller")
        world.blank = MemoryLedger(world.ledger.now, "empty")
        world.start("controller")
        self._stranger = Process(world.loop, "stranger", 0.0, 0.0)
        world.loop.spawn(self._stranger, world.guarded(self._deploy()))

    async def _deploy(self) -> None:
        stub = controller_pb2_grpc.ControllerServiceStub(self._world.net.connect("controller:1"))
        while self._world.blank is not None:
            await asyncio.sleep(0.5 + self._random.random())
            try:
                await stub.Deploy(message_of(cpb.DeployRequest, spec=self._world.spec), timeout=10)
            except grpc.aio.AioRpcError:
                continue

    def _end_blank(self) -> None:
        world = self._world
        if world.blank is None:
            return
        world.log("the controller gets its ledger back")
        if self._stranger is not None and self._stranger.alive:
            self._stranger.die()
        world.kill("controller")
        world.blank = None
        world.start("controller")
