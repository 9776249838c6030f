"""Several controllers that share one ledger, and their faults.

Controllers are stopped for a while, or cut off from replicas. The ledger's clock jumps. In an outage, one controller or
all cannot reach the ledger, can only read it, or do not learn whether their commits succeeded. These faults have random
generators of their own, so that they change no other choice of the run.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import grpc.aio

from reconfig.controller.context import Leadership, Writer
from reconfig.controller.controller import Controller
from reconfig.controller.following import Following
from reconfig.controller.leading import Leading
from reconfig.controller.service import ControllerService
from stateflow.errors import NotLeading
from stateflow.ledger import Holder
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc
from stateflow.rpc.clients import Seen
from stateflow.rpc.faults import remote_error
from stateflow.rpc.wire import AFTER_KEY, newest_of
from tests.simulation.sim.flow import PARTITIONS
from tests.simulation.sim.ledger import Handle, Outage
from tests.simulation.sim.loop import Process
from tests.simulation.sim.net import Methods
from tests.simulation.sim.oracle import Violation

if TYPE_CHECKING:
    from tests.simulation.sim.world import World

NAMES = ("controller", "controller-b", "controller-c")
SECOND, THIRD = 0.6, 0.25  # shares of the seeds that have a second controller, and a third


class Controllers:
    """Controllers of a world.

    Attributes:
        names: names of all controllers, whether they run or not.
        leading: name → the controller's part in the election, for each controller that runs.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.seed}:controllers")
        drawn = self._random.random()
        self.names = NAMES[: 1 + (drawn < SECOND) + (drawn < THIRD)]
        self.leading: dict[str, Leading] = {}
        self._outages = Random(f"{world.seed}:outages")
        self._until = {how: dict.fromkeys(self.names, 0.0) for how in Outage}

    @property
    def leader(self) -> Controller | None:
        serving = [
            each
            for each in self.leading.values()
            if each.serving is not None and each._ledger.id == self._world.ledger.id
        ]
        newest = max(serving, key=lambda each: each.serving.context.term, default=None)  # type: ignore[union-attr]
        return None if newest is None else newest.serving

    def addresses(self) -> str:
        return ",".join(f"{name}:1" for name in self.names)

    def meets(self, name: str, how: Outage) -> bool:
        return self._world.loop.now < self._until[how][name]

    async def boot(self, process: Process) -> None:
        from tests.simulation.sim.world import CONTROLLER, Clock

        world, name = self._world, process.name
        clock = Clock(process)
        pauses = Random(f"{world.seed}:{name}/{world.programs[name].starts}:pauses")
        chosen = world.blank if world.blank is not None and name == NAMES[0] else world.ledger
        ledger: Any = Handle(chosen, lambda how: self.meets(name, how), world.loop.may_switch, self._random)
        me = Holder(f"{name}/{world.programs[name].starts}", name, f"{name}:1", 1)

        def gone(other: Holder) -> bool:
            return other.host == name and other.id != me.id

        def make(leadership: Leadership, writer: Writer, grace_s: float) -> Controller:
            world.log(f"{name} leads, term {leadership.term}")
            connect: Any = world.net.connect
            server = Controller(
                ledger,
                CONTROLLER,
                clock,
                connect,
                world.new_id,
                leadership=leadership,
                writer=writer,
                grace_s=grace_s,
                random=pauses,
            )
            register = server.members.registered

            def registered(name: str, incarnation: str, ticket: str) -> None:
                register(name, incarnation, ticket)
                world.registered(incarnation)

            server.members.registered = registered  # type: ignore[method-assign]
            return server

        leading = Leading(ledger, me, gone, CONTROLLER, clock, make, pauses)
        following = Following(ledger, CONTROLLER, clock, lambda: leading.leads, leading.who)
        world.loop.create_task(world.guarded(following.run()))
        methods = Methods()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(ControllerService(leading, following), methods)
        world.net.serve(process, methods.handlers)
        self.leading[name] = leading
        await leading.run()

    # -- faults -------------------------------------------------------------------------------------------

    def plan(self, until: float) -> None:
        random, loop = self._random, self._world.loop
        for _ in range(self._outages.choice((1, 1, 2, 3))):  # every seed has an outage
            loop.at(0.5 + self._outages.random() * until, None, self._outage)
        kinds = [k for k in (self._stop, self._jump, self._cut) if random.random() < 0.5]
        for _ in range(random.choice((0, 0, 1, 2, 4)) if kinds else 0):
            loop.at(0.5 + random.random() * until, None, random.choice(kinds))

    def mend(self) -> None:
        self._until = {how: dict.fromkeys(self.names, 0.0) for how in Outage}

    def _span_s(self) -> float:
        return self._random.choice((0.05, 0.5, 2.0, 6.0, 12.0)) * self._random.random()

    def _outage(self) -> None:
        """Begins an outage of the ledger for one controller or all; some last longer than every hold and lease."""
        random = self._outages
        names = random.choice((self.names, self.names, self.names[:1], self.names[-1:]))
        how = random.choice((Outage.AWAY, Outage.AWAY, Outage.READ_ONLY, Outage.UNCERTAIN))
        self._world.counts.outages += 1
        until = self._world.loop.now + random.choice((0.05, 0.5, 2.0, 6.0, 20.0, 40.0)) * random.random()
        self._world.log(f"the ledger is {how.value} for {names} until {until:.4f}")
        for name in names:
            self._until[how][name] = max(self._until[how][name], until)

    def _stop(self) -> None:
        """Stops a controller, if possible one that leads, for about as long as its hold lasts."""
        leads = [name for name, each in self.leading.items() if each.serving is not None]
        name = self._random.choice(leads or list(self.names))
        process = self._world.programs[name].process
        if process is None or not process.alive or process.stopped:
            return
        self._world.log(f"{name} is stopped")
        self._world.counts.pauses += 1
        process.stop()
        self._world.loop.at(self._world.loop.now + 1 + 8 * self._random.random(), None, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        self._world.log(f"{process.name} goes on")
        process.go_on()

    def _jump(self) -> None:
        """Makes the database's clock jump."""
        self._world.clock_skew_s += self._random.choice((-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0))
        self._world.log("the database's clock jumps")

    def _cut(self) -> None:
        """Cuts a controller off from some replicas, which may still reach other controllers."""
        from tests.simulation.sim.world import REPLICAS

        name = self._random.choice(self.names)
        for replica in self._random.sample(REPLICAS, self._random.choice((1, 2, 3))):
            self._world.log(f"{name} and {replica} are cut")
            self._world.counts.cuts += 1
            self._world.net.cut(name, replica)
            self._world.loop.at(self._world.loop.now + self._span_s(), None, self._world.net.heal, name, replica)


class Reader:
    """Asks random controllers who owns the partitions, like a client that remembers the newest answer it has seen.

    Reports a violation if an answer has an older epoch than an earlier answer.
    """

    def __init__(self, world: World) -> None:
        names = world.controllers.names
        self._world, self._random = world, Random(f"{world.seed}:reader")
        self._stubs = [controller_pb2_grpc.ControllerServiceStub(world.net.connect(f"{name}:1")) for name in names]
        self._seen, self._epochs = Seen(), [0] * PARTITIONS

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / 0.4))
            metadata = ((AFTER_KEY, str(self._seen.record)),)
            request = cpb.GetDeploymentRequest(operator="Flow")
            call = self._random.choice(self._stubs).GetDeployment(request, timeout=3.0, metadata=metadata)
            try:
                answer = await call
            except grpc.aio.AioRpcError:
                continue
            if self._world.blank is None and self._seen.takes(*newest_of(call.trailing)):
                self._told(answer)

    def _told(self, answer: cpb.Deployment) -> None:
        counts = self._world.counts
        counts.reads += 1
        counts.followed += answer.HasField("follower")
        epochs = list(answer.epochs)
        if any(epoch < before for epoch, before in zip(epochs, self._epochs, strict=True)):
            who = answer.follower.address or "the one that leads"
            self._world.fail(Violation(f"{who} tells of epochs {epochs}, {self._epochs} were seen before"))
        self._epochs = epochs


class Asked:
    """Calls the controller that leads, on behalf of a process of the world."""

    def __init__(self, world: World) -> None:
        names = world.controllers.names
        self._stubs = [controller_pb2_grpc.ControllerServiceStub(world.net.connect(f"{name}:1")) for name in names]
        self._at = 0

    async def ask(self, method: str, request: Any, timeout: float) -> Any:
        """Calls a method at one controller after another until one of them leads. Raises AioRpcError."""
        for left in reversed(range(len(self._stubs))):
            try:
                return await getattr(self._stubs[self._at], method)(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                self._at = (self._at + 1) % len(self._stubs)
                if not left or not isinstance(remote_error(error, "controller"), NotLeading):
                    raise
        raise AssertionError
