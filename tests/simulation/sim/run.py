"""Runs one seed, from the first process to the last check."""

from __future__ import annotations

import gc
import logging
from random import Random
from unittest.mock import patch

from reconfig.decisions.plan import PlannedMove, PlannedTakeover
from stateflow import transitions
from stateflow.replica.executor import ErrorThrottle
from tests.simulation.sim import flow
from tests.simulation.sim.controllers import NAMES, Reader
from tests.simulation.sim.damage import Damage
from tests.simulation.sim.doubles import Doubles
from tests.simulation.sim.gateway import RIVALS, Gateway
from tests.simulation.sim.loop import Process, Stuck
from tests.simulation.sim.oracle import Violation
from tests.simulation.sim.parts import Parts
from tests.simulation.sim.workload import Client, Mover, make_source
from tests.simulation.sim.world import REPLICAS, SETTLE_S, World

BUSY_S = 6.0  # faults and moves begin within this time
BATCHES = 8


class Nemesis:
    """Injects faults at random times and places. Every fault ends before the last checks."""

    def __init__(self, world: World, names: list[str]) -> None:
        self._world, self._names = world, names
        self._random = Random(world.random.random())

    def plan(self) -> None:
        random = self._random
        kinds = [
            kind
            for kind in (self.kill, self.kill_at_write, self.power, self.pause, self.cut, self.outage)
            if random.random() < 0.6
        ]
        for _ in range(random.choice((0, 1, 2, 3, 5, 8)) if kinds else 0):
            self._world.loop.at(0.5 + random.random() * BUSY_S, None, random.choice(kinds))

        for _ in range(self._world.person.choice((1, 2, 3)) if self._world.manual else 0):
            self._world.loop.at(1 + self._world.person.random() * BUSY_S, None, self.isolate)

    def isolate(self) -> None:
        """Cuts a replica off from all controllers until its lease has lapsed; its clients still reach it."""
        world, person = self._world, self._world.person
        name, until = person.choice(REPLICAS), self._world.loop.now + 5 + 8 * person.random()
        world.log(f"{name} is cut off")
        world.counts.cuts += 1
        for each in world.controllers.names:
            world.net.cut(name, each)
            world.loop.at(until, None, self._heal, name, each)

    def _later(self, work: object, *arguments: object) -> None:
        delay = self._random.choice((0.1, 1.0, 6.0, 12.0)) * self._random.random()
        self._world.loop.at(self._world.loop.now + delay, None, work, *arguments)  # type: ignore[arg-type]

    def kill(self) -> None:
        name = self._random.choice(self._names)
        self._world.kill(name)
        self._later(self._world.start, name)

    def kill_at_write(self) -> None:
        """Kills a replica in the middle of its next action, between two writes."""
        name = self._random.choice(REPLICAS)
        process = self._world.programs[name].process
        if process is not None and process.alive:
            process.writes_left = self._random.randrange(40)
            self._later(self._revive, name, process)

    def _revive(self, name: str, process: Process) -> None:
        if process.alive and process.writes_left is not None:
            self._later(self._revive, name, process)
        else:
            self._world.start(name)

    def power(self) -> None:
        name = self._random.choice(REPLICAS)
        self._world.power_loss(name)
        self._later(self._world.start, name)

    def outage(self) -> None:
        """Kills, stops or cuts off a replica until its lease has lapsed; then the replica returns with its data."""
        name = self._random.choice(REPLICAS)
        program, until = self._world.programs[name], self._world.loop.now + 4 + 8 * self._random.random()
        match self._random.choice(("killed", "stopped", "cut")):
            case "killed":
                self._world.kill(name)
                self._world.loop.at(until, None, self._world.start, name)
            case "stopped" if program.process is not None and program.process.alive and not program.process.stopped:
                self._world.log(f"{name} is stopped")
                self._world.counts.pauses += 1
                program.process.stop()
                self._world.loop.at(until, None, self._go_on, program.process)
            case "cut":
                self._world.log(f"{name} and controller are cut")
                self._world.counts.cuts += 1
                self._world.net.cut(name, "controller")
                self._world.loop.at(until, None, self._heal, name, "controller")

    def pause(self) -> None:
        process = self._world.programs[self._random.choice(self._names)].process
        if process is not None and process.alive and not process.stopped:
            self._world.log(f"{process.name} is stopped")
            self._world.counts.pauses += 1
            process.stop()
            self._later(self._go_on, process)

    def _go_on(self, process: Process) -> None:
        self._world.log(f"{process.name} goes on")
        process.go_on()

    def cut(self) -> None:
        one, two = self._random.sample(self._names, 2)
        self._world.log(f"{one} and {two} are cut")
        self._world.counts.cuts += 1
        self._world.net.cut(one, two)
        self._later(self._heal, one, two)

    def _heal(self, one: str, two: str) -> None:
        self._world.log(f"{one} and {two} are healed")
        self._world.net.heal(one, two)


def simulate(seed: int) -> World:
    """Runs a seed to its end, and returns its world. ``failure`` of the world is the error, None if there was none."""
    logging.disable(logging.CRITICAL)
    gc.disable()  # the collector would call finalisers at times that differ between runs, and some reach the loop
    world = World(seed)
    try:
        with (
            patch.object(ErrorThrottle, "unforeseen", lambda _, error: world.fail(error)),
            patch.object(transitions, "report", lambda error: world.fail(Violation(str(error)))),
        ):
            _run(world)
    except (Violation, Stuck) as error:
        world.fail(error)
    finally:
        flow.step = lambda: None
        world.counts.events = world.loop.events
        world.counts.commits, world.counts.batches_lost = world.oracle.commits, world.oracle.lost
        world.counts.skipped_batches, world.counts.settles = world.oracle.skipped_batches, world.oracle.settles
        world.counts.virtual_s = world.loop.now
        for program in world.programs.values():
            if program.process is not None:
                program.process.alive = False
                for job in list(program.process.sliced):
                    world.loop.resume(job)
        world.loop.close()
        logging.disable(logging.NOTSET)
    return world


def _run(world: World) -> None:
    flow.step = world.loop.may_switch
    sources = [make_source(world, "query", True, BATCHES), make_source(world, "stream", False, BATCHES)]

    sink = Parts.drawn(world.seed, BATCHES)

    dense, sparse = sources

    async def query(process: Process) -> None:
        await Client(world, process, dense, sink).run()

    async def stream(process: Process) -> None:
        await Gateway(world, process, sparse).run()

    world.add(dense.name, query)
    world.add(sparse.name, stream)
    moved = [False]

    async def move(process: Process) -> None:
        mover = Mover(world, process)
        await mover.run(BUSY_S)
        moved[0] = True
        await mover.give_up()

    world.add("mover", move)

    async def read(process: Process) -> None:
        await Reader(world).run()

    for name in world.programs:
        world.start(name)
    if len(world.controllers.names) > 1:
        world.add("reader", read)
        world.start("reader")
    nemesis = Nemesis(world, [*(n for n in world.programs if n not in ("mover", "reader", *NAMES[1:]))])
    nemesis.plan()
    rival = Random(f"{world.seed}:rival")
    if rival.random() < RIVALS:
        world.counts.rivals += 1
        world.add("rival", stream)
        world.loop.at(1 + rival.random() * BUSY_S, None, world.start, "rival")
    doubles = Doubles(world, BUSY_S)
    doubles.plan()
    Damage(world).plan(BUSY_S)
    world.controllers.plan(BUSY_S)

    def done() -> bool:
        if world.failure is not None:
            return True
        return moved[0] and all(s.finished for s in sources) and world.quiet and world.loop.now > BUSY_S + 2

    world.loop.run(done, SETTLE_S)
    if world.failure is not None:
        return
    if not done():
        left = [s.name for s in sources if not s.finished]
        raise Violation(f"not over after {SETTLE_S:.0f} s: {left or 'moves'}")
    doubles.end()
    # starts every process, and waits until late messages have arrived
    world.net.heal_all()
    world.controllers.mend()
    for name, program in world.programs.items():
        world.start(name)
        assert program.process is not None
        program.process.writes_left = None
        if program.process.stopped:
            program.process.go_on()
    settled = world.loop.now + 6
    world.loop.run(lambda: world.failure is not None or (world.loop.now > settled and world.quiet), settled + SETTLE_S)
    if world.failure is not None:
        return
    audited = [False]

    async def audit(process: Process) -> None:
        await Gateway(world, process, sparse).audit()
        audited[0] = True

    world.add("audit", audit)
    world.start("audit")
    world.loop.run(lambda: world.failure is not None or (audited[0] and world.quiet), world.loop.now + SETTLE_S)
    if world.failure is not None:
        return
    if not audited[0]:
        raise Violation(f"what partitions lost of {sparse.name} is not there again after {SETTLE_S:.0f} s")
    sent = {
        p: {(s.name, n): rows[p] for s in sources for n, (rows, _) in enumerate(s.batches) if p in rows}
        for p in range(flow.PARTITIONS)
    }
    world.check_end(sent, mended=[sparse.name])
    assert world.controller is not None
    for planned, record in world.controller.cluster.finished:
        if isinstance(planned, PlannedTakeover):
            world.counts.takeovers += record.state == "PROCESSED"
        elif isinstance(planned, PlannedMove):
            world.counts.moves_completed += record.state == "PROCESSED"
            world.counts.moves_aborted += record.state == "FAILED"
