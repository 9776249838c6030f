"""Clients of controllers, replicas, agents and checkpoint stores, and the answers of hostile servers to them.

Each client must end within a time, with a result or a StateflowError of one line. It writes nothing outside of its
directory, and its memory has a limit. :mod:`tests.fuzz.servers` has the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import random
import shutil
import struct
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from reconfig.controller import replicas as controlling
from stateflow.agent import processes
from stateflow.agent.agent import Agent, Config
from stateflow.agent.processes import Rlimits
from stateflow.checkpoint import CheckpointStore
from stateflow.checkpoint.backend import LocalBackend
from stateflow.client import Cluster, StreamClient
from stateflow.client import cluster as cluster_module
from stateflow.client import commands as commands_module
from stateflow.client import reading as reading_module
from stateflow.client import stream as stream_module
from stateflow.clock import SYSTEM_CLOCK
from stateflow.code.bundles import BundleStore
from stateflow.dashboard.watching import checkpoints as counted
from stateflow.errors import StateflowError
from stateflow.fleet import Command as Launched
from stateflow.fleet import Directory, Started
from stateflow.operator.operator import describe
from stateflow.partition.change_feed import BaseFile
from stateflow.partition.control import Cancellation, Command, Fence, PartitionView, Preparation, Restore, TakeOver
from stateflow.partition.environment import RateLimit
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.replica import peers, transfer_in
from stateflow.replica.executor import Threads
from stateflow.replica.membership import stay_registered
from stateflow.replica.peers import Bundles, Controller, Heartbeat, Peer, RoundTrips, SourceReplica, Unanswered
from stateflow.replica.service import ReplicaService
from stateflow.replica.transfer_in import IncomingTransfer
from stateflow.router import Router
from stateflow.router.router import Asked
from stateflow.router.session import check_whole, newest_event_us
from stateflow.rpc import clients, cluster_client, replica_pb2
from stateflow.rpc.apply import BatchRows
from stateflow.rpc.clients import AgentCaller, ControllerCaller, ReplicaClient
from stateflow.rpc.wire import connect, message_of
from stateflow.settings import ControllerSettings, ReplicaSettings, RouterSettings
from stateflow.types import How, ReplicaInfo
from tests.contract.backends import manifest_of, small
from tests.fuzz.makers import Outcome
from tests.fuzz.pages import watched
from tests.fuzz.servers import DIGEST, PARTITION, SHORT_S, SPEC, Hostile, HostileStore, sound_source
from tests.unit.operators import Count
from tests.unit.partition.test_replica import P

#: seconds within which a client must end, and the number of entries that are taken from what it yields
ENDS_WITHIN_S = 20.0
TAKEN = 40
#: bytes by which the memory of this process may grow
MEMORY_MAX = 1 << 30
OWN = ReplicaInfo("r-0", "edge", "127.0.0.1:1")
HERE = Directory("d" * 32, "/here", "")
COMMAND = Command("l", 1, "s")

# -- Clients ---------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """The server of clients, and the directory in which they may write."""

    server: Hostile
    home: Path
    loop: asyncio.AbstractEventLoop
    chance: random.Random
    count: int = 0

    @property
    def address(self) -> str:
        return self.server.address

    def new(self) -> Path:
        """Returns a new directory for one client."""
        self.count += 1
        folder = self.home / str(self.count)
        folder.mkdir()
        return folder

    def waits(self, coroutine: Awaitable[Any]) -> Any:
        async def ended() -> Any:
            return await asyncio.wait_for(coroutine, ENDS_WITHIN_S)

        return asyncio.run_coroutine_threadsafe(ended(), self.loop).result(2 * ENDS_WITHIN_S)


def _some(found: Iterable[Any]) -> list[Any]:
    return list(islice(found, TAKEN))


async def _some_of(found: AsyncIterator[Any]) -> list[Any]:
    taken = []
    async for each in found:
        taken.append(each)
        if len(taken) == TAKEN:
            break
    return taken


Client = Callable[[World], None]
Use = Callable[[Cluster], object]
#: uses of a cluster's client
COMMANDS: dict[str, Use] = {
    "status": lambda c: (c.status(measured=True), c.status().without_share()),
    "operator": lambda c: c.operator("Tally"),
    "deploy": lambda c: c._client.deploy(SPEC, ["edge"]),
    "put_bundle": lambda c: c._client.put_bundle(DIGEST, b"x"),
    "versions": lambda c: c.versions("Tally"),
    "upgrade": lambda c: c.upgrade("Tally", 1),
    "take_over": lambda c: c.take_over("Tally", [1], accept_loss=True),
    "sources": lambda c: c.sources("Tally"),
    "retire_source": lambda c: c.retire_source("Tally", "s"),
    "drop_output": lambda c: c.drop_output("Tally", "s", 3, apply=True),
    "migrate": lambda c: _some(c.migrate("Tally", [0, 1], "cloud-0").progress()),
    "rebalance": lambda c: c.rebalance(),
    "propose": lambda c: c.propose("ring"),
    "place": lambda c: c.place("load"),
    "autopilot": lambda c: (c.autopilot_orders(), c.autopilot("load")),
    "create_job": lambda c: c.create_job("j", "every 3600", "rebalance"),
    "jobs": lambda c: (c.jobs(), c.job("j"), c.run_job("j"), c.job_run("j/1"), c.change_job("j", "pause")),
    "replace": lambda c: c.replace("r-0"),
    "undeploy": lambda c: c.undeploy("Tally", delete_state=True),
    "adopt": lambda c: c.adopt(dry_run=True),
    "drain": lambda c: (c.drain("r-0"), c.maintain("r-0", for_s=5.0), c.end_maintenance("r-0")),
    "would": lambda c: (c.would_migrate("Tally", [0], "edge"), c.would_drain("r-0"), c.would_take_over("Tally")),
    "agents": lambda c: c.agents(),
    "spawn": lambda c: _some(c.spawn("edge", count=2).progress()),
    "stop_replica": lambda c: _some(c.stop_replica("r-0").progress()),
    "restart_all": lambda c: _some(c.restart_all().progress()),
    "logs": lambda c: _some(c.logs("r-0")),
    "forget": lambda c: (c.forget("r-0"), c.forget_agent("gw")),
    "standby": lambda c: c.standby("Tally", 1),
    "reconfigurations": lambda c: c.reconfigurations(),
    "reconfiguration": lambda c: (
        c.reconfiguration("x"),
        c.pause("x"),
        c.resume("x"),
        c.edit("x", limit=2),
    ),
    "cancel": lambda c: c.cancel("x"),
    "resolve": lambda c: (c.resolve("x", "restore"), c.retry("x")),
    "checkpoint": lambda c: (c.checkpoint("Tally"), _some(c.checkpoint_all().progress()), c.sweep("x")),
    "savepoint": lambda c: c.savepoint("s", "Tally"),
    "restore": lambda c: (c.restore("Tally", [0]), c.cancel_restore("x")),
    "read_state": lambda c: c.read_state("Tally", "n").to_pylist(),
    "scan_state": lambda c: _some(c.scan_state("Tally", "n: value(int64)", whole=False)),
    "readable_states": lambda c: c.readable_states("Tally").exact("n", "Tally"),
}
QUICK = RouterSettings(unavailable_timeout_s=0.3, backoff_initial_s=0.01, backoff_max_s=0.02, stall_s=0.1)


def a_command(world: World) -> None:
    name = world.chance.choice(list(COMMANDS))
    COMMANDS[name](Cluster(world.address))


def a_stream(world: World) -> None:
    with StreamClient(world.address, "Tally", "s", settings=QUICK) as stream:
        for number in range(world.chance.choice((1, 3))):
            stream.send([{"k": f"k{each}", "v": each} for each in range(number + 3)])
        stream.advance_watermark(7)
        stream.verify()
        stream.accept_loss()


def a_forwarder(world: World) -> None:
    folder = world.new() / "outbox"
    for _ in range(2):
        cluster = Cluster(world.address)
        with cluster.forwarding("Tally", "g", folder, settings=QUICK, patience_s=0.2) as forwarding:
            forwarding.send([{"k": f"k{each}", "v": each} for each in range(5)])
            forwarding.advance_watermark(7)
            forwarding.forwarded(), forwarding.refused(), forwarding.waiting()
            with contextlib.suppress(StateflowError):
                forwarding.flush(0.1)
            forwarding.accept_loss()


def a_task(world: World) -> None:
    """Asks as a task of a query does before it sends."""
    router = Router(world.address, "Tally", QUICK, silence_s=SHORT_S)
    reached = Asked(router, "s", 4, 0.2).answers()
    newest_event_us(reached, 4)
    check_whole("Tally", "s", 4, router.spec.partitions, reached)
    everywhere = BatchRows.visit(range(router.spec.partitions))
    router.deliver(Batch("s", 4, watermark_us=5), everywhere, {0: 3})


def a_replica(world: World) -> None:
    client = ReplicaClient(world.address, SHORT_S)
    uses: list[Callable[[], object]] = [
        lambda: client.positions("Tally", "s", [0, 1]),
        client.begin_positions("Tally", "s", [0, 1], 4),
        lambda: _some(client.outputs("Tally", "s", [0], 2)),
        lambda: client.sources("Tally", [0, 3]),
        lambda: client.retire_source("Tally", "s", [0]),
        lambda: client.drop_output("Tally", "s", 1, [0], True),
        lambda: client.statistics(0, sizes=True),
        lambda: _some(client.scan("Tally", "n", [0])),
    ]
    world.chance.choice(uses)()


def a_source(world: World) -> None:
    async def use() -> None:
        async with connect(world.address) as channel:
            source = SourceReplica(channel, world.address, SHORT_S)
            match world.chance.randrange(5):
                case 0:
                    await source.snapshot(PARTITION, "m")
                case 1:
                    await _some_of(source.follow("s", 0, 1 << 16))
                case 2:
                    await source.confirm("s", 3)
                case 3:
                    await RoundTrips(connect, SYSTEM_CLOCK).measure([world.address])
                case _:
                    peer = Peer(source, "s", RateLimit(0), SYSTEM_CLOCK, SHORT_S, lambda _: None)
                    await peer.fetch(BaseFile("000012.sst", 5000, DIGEST), world.new() / "file")

    world.waits(use())


def a_transfer(world: World) -> None:
    home, chance = world.new() / "data", world.chance
    settings = ReplicaSettings(
        resume_timeout_s=0.1, transfer_timeout_s=SHORT_S, block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20
    )
    node = ReplicaNode(ReplicaInfo("b", "site", "b:1"), home, settings)
    source = ReplicaInfo("a", "site", world.address)
    move = Preparation("m", describe(Count, 1, "Op"), P, source, 1, standby=chance.random() < 0.1)

    async def use() -> None:
        with ThreadPoolExecutor(2) as files, ThreadPoolExecutor(2) as quick:
            async with connect(world.address) as channel:
                peer = SourceReplica(channel, world.address, settings.transfer_timeout_s)
                transfer = IncomingTransfer(node, move, peer, files, quick, SYSTEM_CLOCK)
                with contextlib.suppress(TimeoutError):  # a standby goes on for good
                    async with asyncio.timeout(0.5 if move.standby else ENDS_WITHIN_S / 2) as limit:
                        async for report in transfer.run():
                            message_of(replica_pb2.MoveProgress, report)
                            if report.fault is not None:
                                raise report.fault
                if limit.expired() and not move.standby:
                    raise AssertionError("a transfer does not end")

    try:
        world.waits(use())
    finally:
        node.close()
        shutil.rmtree(home, ignore_errors=True)


def a_heartbeat(world: World) -> None:
    view = PartitionView(PARTITION, State.OWNED, 1, 1)

    async def use() -> None:
        async with connect(world.address) as channel:
            controller = Controller(channel, world.address)
            match world.chance.randrange(4):
                case 0:
                    await controller.heartbeat(Heartbeat(OWN, HERE, "i"))
                case 1:
                    await controller.register(OWN, HERE, "i", COMMAND, [view])
                case 2:
                    await controller.claim(OWN, HERE, [SPEC], [view])
                case _:
                    threads = Threads()
                    bundles = Bundles(BundleStore(world.new()), threads)
                    bundles.controller = controller
                    try:
                        await bundles.ensure(replace(SPEC, bundle="f" * 64))
                    finally:
                        threads.close()

    try:
        world.waits(use())
    except Unanswered as error:
        raise error.meant from error


def a_membership(world: World) -> None:
    """Lets a replica with a partition obey a controller for a moment."""
    home = world.new() / "data"
    settings = ReplicaSettings(heartbeat_interval_s=0.002, block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20)
    node = ReplicaNode(OWN, home, settings)
    node.create(describe(Count, 2, "Tally"), [0, 1], 1)

    async def use() -> None:
        service = ReplicaService(node, None)
        staying = asyncio.create_task(stay_registered(service.member(OWN), world.address, "i"))
        await asyncio.wait([staying], timeout=0.15)
        if staying.done():
            raise AssertionError("a replica has left its cluster") from staying.exception()
        staying.cancel()
        await asyncio.wait([staying])
        await service.close()

    world.waits(use())
    shutil.rmtree(home, ignore_errors=True)


class Idle:
    """A launcher that starts nothing."""

    def start(self, spec: Launched) -> Started:
        child: Any = SimpleNamespace(pid=os.getpid(), stdin=None, stdout=io.StringIO(), poll=lambda: 0, wait=lambda: 0)
        return Started(spec, child)

    def stop(self, handle: Started) -> None: ...

    kill = stop

    def is_running(self, handle: Started) -> bool:
        return False


def _limited(_: int, __: int, limits: tuple[int, int]) -> None:
    try:
        struct.pack("qq", *limits)  # as the system would be asked
    except struct.error as error:
        raise OverflowError("Python int too large to convert to C long") from error


def an_agent(world: World) -> None:
    folder = world.new() / "agent"
    launcher: Any = Idle()
    config = Config("gw", "edge", world.address, folder, "127.0.0.1:0", "", {}, 4, 0, 5.0, {})

    async def use() -> None:
        agent = Agent(config, Rlimits(), launcher)
        info = agent._info("127.0.0.1:1")
        try:
            async with connect(world.address) as channel:
                caller = ControllerCaller(channel, world.address)
                for _ in range(4):
                    orders = await caller.beat(await agent._beat_of(info))
                    await agent._obey(orders, world.address)
                    for spawned in agent._act(0.0)[:20]:
                        await agent._begin(spawned)
                await _some_of(AgentCaller(channel, world.address).logs(COMMAND, "r-0", 5, False))
        finally:
            agent._claimed.close()

    with mock.patch.object(processes.resource, "prlimit", _limited):
        world.waits(use())
    shutil.rmtree(folder, ignore_errors=True)


def a_controller(world: World) -> None:
    """Lets a controller call a replica."""
    infos = {"a": ReplicaInfo("a", "s", world.address), "b": ReplicaInfo("b", "s", "127.0.0.1:1")}
    state: Any = SimpleNamespace(roster=SimpleNamespace(replicas=infos))
    members: Any = SimpleNamespace(session=lambda _: "s", may_serve=lambda _: False)
    settings = ControllerSettings(rpc_timeout_s=SHORT_S, retry_interval_s=0.01)
    spec, fence = SPEC, Fence(PARTITION, "m", 2, infos["b"])
    restore = Restore("x", spec, PARTITION, 3)

    async def use() -> None:
        def command(_: str) -> Command:
            return COMMAND

        made = controlling.Replicas(
            state, members, settings, SYSTEM_CLOCK, connect, command, lambda _: None, random.Random(1)
        )
        source = replace(infos["b"])
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: made.learn("a", spec),
            lambda: made.check("a", spec, 4),
            lambda: _some_of(made.try_out("a", spec, [0, 1])),
            lambda: made.create("a", spec, [0], 1, 4),
            lambda: made.drop("a", "Tally", 1),
            lambda: made.hold("a", "Tally", 0.0),
            lambda: made.views("a", SHORT_S),
            lambda: made.round_trips_ms("a", ["a", "b"], SHORT_S),
            lambda: _some_of(made.prepare("a", Preparation("m", spec, PARTITION, source, 1), "")),
            lambda: made.fence("a", fence),
            lambda: made.cancel("a", Cancellation(PARTITION, "m")),
            lambda: made.release("a", PARTITION, "m", 2, infos["b"]),
            lambda: made.take_over("a", TakeOver(spec, PARTITION, "m", 2, How.CHECKPOINT)),
            lambda: made.checkpoint("a", "Tally", [0], "s"),
            lambda: _some_of(made.verify("a", PARTITION)),
            lambda: made.fetch("a", restore),
            lambda: made.own("a", restore),
            lambda: made.surrender("a", fence),
        ]
        try:
            await world.chance.choice(uses)()
        finally:
            await made.close()

    world.waits(use())


def a_store(world: World) -> None:
    sound, folder, chance = world.home / "store", world.new(), world.chance
    if not sound.exists():
        sound.mkdir()
        directory = small(sound, a="a", b="b" * 5000)
        store = CheckpointStore(str(sound / "store"))
        for sequence in (1, 2):
            saved = manifest_of(directory, 1, sequence, partitions=0)
            store.save(saved, directory, savepoint="s" if sequence == 1 else "")
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    directory = folder / "snapshot-0"
    manifest = manifest_of(directory, 1, 2, partitions=0)
    backend = HostileStore(LocalBackend(folder / "store"), chance)
    backend.wrong = world.server.wrong
    store = CheckpointStore("x://y", backend=backend, timeout_s=5.0)
    uses: list[Callable[[], object]] = [
        lambda: [store.restore(each, folder / f"to-{each.sequence}") for each in _some(store.newest(manifest.id))],
        lambda: [store.restore(each, folder / "to") for each in store.savepoint("s")],
        store.savepoints,
        lambda: counted(store),
        lambda: store.has(manifest),
        store.blobs,
        lambda: store.delete_savepoint("s"),
        lambda: store.save(replace(manifest, sequence=3), directory),
        lambda: [store.catalog.read(each) for each in store.catalog.checkpoints()],
        lambda: store.catalog.marks("intents"),
    ]
    try:
        chance.choice(uses)()
    except FileNotFoundError:  # it was listed, and is not there: callers pass over it
        pass
    finally:
        shutil.rmtree(folder)


#: clients, and how often each is driven
CLIENTS: dict[Client, float] = {
    a_command: 40,
    a_replica: 15,
    a_source: 10,
    a_heartbeat: 8,
    a_controller: 15,
    a_stream: 4,
    a_forwarder: 2,
    a_task: 6,
    a_transfer: 4,
    a_store: 4,
    an_agent: 3,
    a_membership: 0.5,
}


# -- Runs ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Shortens the time limits of clients, and the limits of what they read."""

    def twice(*_: object) -> Iterator[float | None]:
        return iter((0.0, None))

    short = {
        clients: ("CALL_TIMEOUT_S", "READ_TIMEOUT_S", "BEAT_TIMEOUT_S", "OPEN_TIMEOUT_S", "DEPLOY_TIMEOUT_S"),
        cluster_client: ("DEPLOY_TIMEOUT_S", "PLAN_TIMEOUT_S", "LONG_TIMEOUT_S"),
        peers: ("CALL_TIMEOUT_S", "PART_TIMEOUT_S", "WITHIN_S"),
        controlling: ("CREATE_TIMEOUT_S", "DROP_TIMEOUT_S", "TAKE_OVER_TIMEOUT_S", "CHECKPOINT_TIMEOUT_S"),
        commands_module: ("POLL_S",),
    }
    with contextlib.ExitStack() as stack:
        for module, names in short.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, SHORT_S))
        for where in (reading_module, cluster_module, stream_module):
            stack.enter_context(mock.patch.object(where, "backoff", twice))
        for where, name, value in (
            (controlling, "RESTORE_TIMEOUT_S", SHORT_S),
            (commands_module, "POLL_S", 0.001),
            (stream_module, "Router", functools.partial(Router, silence_s=SHORT_S)),
            (cluster_module, "Router", functools.partial(Router, silence_s=SHORT_S)),
            (transfer_in, "RETRY_INTERVAL_S", 0.01),
            (transfer_in, "OUTLAST_INTERVAL_S", 0.01),
            (peers, "PACKED_MAX", 100_000),
            (clients, "JOINED_BYTES_MAX", 1 << 20),
            (clients, "LISTED_MAX", 1000),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(mock.patch.dict(os.environ, {"STATEFLOW_CLIENT_CONNECT_TIMEOUT_S": "0"}))
        yield


@contextlib.contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yields the event loop of a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(ENDS_WITHIN_S)
        loop.close()


def run(count: int, seed: int, folder: Path, uses: Sequence[Client] = tuple(CLIENTS), wrong: float = 0.0) -> Outcome:
    """Drives clients ``count`` times in all.

    Args:
        wrong: share of the calls that get an answer that is not sound; 0: another one for each use of a client.
    """
    chance, outcome = random.Random(seed), Outcome()
    home = folder / "home"
    home.mkdir(parents=True)
    server = Hostile(chance)
    server.sound |= sound_source(folder / "source")
    serving = server.serve()
    beside = _beside(home)
    before = _memory()
    try:
        with hurried(), _loop() as loop, watched("grpc") as logged:
            world = World(server, home, loop, chance)
            weights = [CLIENTS.get(use, 1.0) for use in uses]
            for _ in range(count):
                (use,) = chance.choices(uses, weights)
                server.wrong = wrong or chance.choice((0.03, 0.3, 1.0))
                _drive(use, world, outcome)
            outcome.wrong += logged
    finally:
        serving.stop(None)
    outcome.wrong += [f"a client did not leave a list without end: {each}" for each in server.endless]
    outcome.wrong += [f"it was written: {path}" for path in sorted(_beside(home) - beside)]
    if (grown := _memory() - before) > MEMORY_MAX:
        outcome.wrong.append(f"this process has grown by {grown >> 20} MiB")
    return outcome


def _drive(use: Client, world: World, outcome: Outcome) -> None:
    said: Future[BaseException | None] = Future()

    def drive() -> None:
        try:
            use(world)
        except BaseException as error:  # noqa: BLE001 - it is judged
            said.set_result(error)
        else:
            said.set_result(None)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    try:
        error = said.result(3 * ENDS_WITHIN_S)
    except TimeoutError:
        where = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0])[-12:])
        outcome.wrong.append(f"{use.__name__} does not end:\n{where}")
        return
    outcome.said[f"{use.__name__} {'read' if error is None else getattr(error, 'code', type(error).__name__)}"] += 1
    if isinstance(error, StateflowError):
        if not str(error).isprintable():
            outcome.wrong.append(f"{use.__name__}: not said in one line: {str(error)[:2000]!r}")
        if type(error) is StateflowError and "Error" in error.what:
            outcome.wrong.append(f"{use.__name__}: an error that nobody meant: {_whole(error)}")
    elif error is not None:
        outcome.wrong.append(f"{use.__name__}: {_whole(error)}")


def _whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def _beside(home: Path) -> set[Path]:
    """Returns what is beside a directory, and in the directory of this process."""
    here = set(Path.cwd().glob("[!.]*"))
    return here | {path for path in home.parent.rglob("*") if home not in (path, *path.parents)}


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")
