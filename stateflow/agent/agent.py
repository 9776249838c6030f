"""An agent: the process that starts, watches and ends the replicas of one machine, as the controller orders.

An agent claims its data directory, so that no other agent uses it. Two loops then run until the agent is asked to end:

* The *heartbeat* reports the machine, the data directory and the state of each replica to the controller. The
  controller sets the interval; a change is reported at once. The answer contains the wanted replicas. The
  agent checks the ledger and the term of the answer, writes the orders to the file ``AGENT``, and only then obeys them.
  Without a valid answer the agent keeps its last orders, and asks another controller if there are several. An agent
  without replicas follows any ledger.
* The *converging loop* carries out the actions of :class:`~stateflow.agent.converging.Convergence`: it starts, ends and
  kills processes. No replica starts while a former process holds its directory. A replica is killed if its memory
  cannot be limited as ordered. A thread for each process reads the process's address, and waits for the process's end.

When the agent is asked to end, it first ends its replicas. If the agent is killed, its replicas notice this by their
standard input, and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import IO

from stateflow.agent import processes as limiting
from stateflow.agent.converging import Begin, Convergence, End, Kill
from stateflow.agent.processes import Limits, Reader, Store
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    DataDirLocked,
    InvalidArgument,
    StateflowError,
    Unavailable,
)
from stateflow.fleet import (
    AgentInfo,
    Beat,
    Child,
    Command,
    DesiredState,
    Directory,
    Launcher,
    Listening,
    NotReady,
    Spawned,
    Started,
    heard,
)
from stateflow.metrics.figures import Target, Values
from stateflow.partition.control import Command as Commanded
from stateflow.partition.control import FencingGuard
from stateflow.partition.environment import Closable, claim, place_of
from stateflow.release import VERSION
from stateflow.rpc.clients import ControllerCaller, Round, addresses_of
from stateflow.rpc.faults import unexpected
from stateflow.rpc.secure import check_reach
from stateflow.rpc.serving import CallLimits, add_agent_service, add_health, bind, new_server, reached_at
from stateflow.rpc.wire import connect
from stateflow.schedule import jittered
from stateflow.settings import ServerSettings


class Figures:
    """An agent's metrics.

    ``ends``: number of processes that ended without being asked to. ``obeyed_at``: time at which the agent last obeyed
    a controller, in monotonic seconds; before that, the time at which the agent began.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ends = 0
        self.obeyed_at = clock.monotonic()

    def of(self, info: AgentInfo, children: Sequence[Child], disk_free_bytes: int) -> Values:
        running = [child.spawned for child in children if child.spawned.running]
        return {
            "stateflow_info": {("agent", info.name, info.site, VERSION): 1},
            "stateflow_agent_replicas": Counter((child.state.lower(),) for child in children),
            "stateflow_agent_replica_ends_total": {(): self.ends},
            "stateflow_agent_controller_seconds": {(): self._clock.monotonic() - self.obeyed_at},
            "stateflow_agent_disk_free_bytes": {(): disk_free_bytes},
            "stateflow_agent_memory_bytes": {
                ("all",): info.memory_bytes,
                ("promised",): sum(each.memory_bytes for each in running),
            },
            "stateflow_agent_cores": {("all",): info.cores, ("workers",): sum(each.workers for each in running)},
        }


def targets_of(info: AgentInfo, pages: Callable[[], Mapping[str, str]], own: str) -> list[Target]:
    """Returns the targets that the page ``/sd`` lists for Prometheus.

    Args:
        pages: returns the addresses at which replicas serve metrics, worker → host:port.
        own: host:port of the agent's metrics.
    """
    labels = {"agent": info.name, "site": info.site}
    replicas = [Target(page, {"replica": replica, **labels}) for replica, page in pages().items()]
    return [Target(own, labels), *replicas]


log = logging.getLogger(__name__)
#: seconds between heartbeats until a controller sets the interval
BEAT_S = 1.0
#: while a caller follows a log: seconds without new lines after which an empty message is sent, and seconds between two
#: checks for new lines
ALIVE_S, LOOK_S = 5.0, 0.25
#: seconds for which the last lines of an ended process are waited for, as its children may keep the pipe open
LAST_LINES_S = 1.0

# -- Resources of the machine ----------------------------------------------------------------------------------------


def cores() -> int:
    """Returns the number of cores that this process may use."""
    try:
        return max(len(os.sched_getaffinity(0)), 1)
    except AttributeError:
        return os.cpu_count() or 1


def memory_bytes(group: Path | None) -> int:
    """Returns the memory of the machine, or the least limit of the control group and those that contain it; 0:
    unknown."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    allowed = [whole]
    for each in () if group is None else (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # "max"; the root and what contains it have no limit
            allowed.append(int((each / "memory.max").read_text()))
    return min(allowed)


def disk_bytes(directory: Path) -> tuple[int, int]:
    """Returns (size, free bytes) of the disk that holds a directory."""
    usage = shutil.disk_usage(directory)
    return usage.total, usage.free


# -- The agent -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of an agent.

    Attributes:
        listen: host:port of the agent; replicas listen at the same host, each on its own port.
        advertise: host at which others reach the agent and its replicas.
        cores, memory_bytes: resources that replicas may use; 0: all of the machine.
        environment: environment variables of replicas.
        metrics: host:port of the agent's metrics; those of replicas are served at other ports of the same host; empty:
            no metrics are served.
    """

    name: str
    site: str
    controller: str
    data_dir: Path
    listen: str
    advertise: str
    labels: Mapping[str, str]
    cores: int
    memory_bytes: int
    stop_timeout_s: float
    environment: Mapping[str, str]
    metrics: str = ""


class Agent:
    """An agent, which runs the replicas of one machine as the controller orders.

    Raises DataDirLocked or InvalidArgument if the agent cannot use its data directory.

    Args:
        random: varies the intervals of heartbeats; None: a generator with a fixed seed, for tests.
    """

    def __init__(
        self,
        config: Config,
        limits: Limits,
        launcher: Launcher,
        random: Random | None = None,
    ) -> None:
        self._config, self._limits, self._launcher, self._clock = config, limits, launcher, SYSTEM_CLOCK
        self._random = random or Random(0)
        self._claimed = _claim(config.data_dir)
        try:
            self._store = Store(config.data_dir, config.name)
        except BaseException:
            self._claimed.close()
            raise
        self._incarnation = uuid.uuid4().hex
        self._authority = self._obeying(self._store.kept.ledger, self._store.kept.term)
        # longer than a node needs to end, because a node waits for its workers
        self._convergence = Convergence(config.stop_timeout_s + 15)
        self._convergence.want(self._store.kept.wanted)
        self._processes: dict[str, Started] = {}
        self._waiting: set[str] = set()  # replicas whose former process has not ended
        self._place = place_of(config.data_dir)
        self._changed, self._told = asyncio.Event(), asyncio.Event()
        self._said = ""
        self._figures = Figures(SYSTEM_CLOCK)

    def _obeying(self, ledger: str, term: int) -> FencingGuard:
        return FencingGuard((ledger, term), lambda *_: None, alone=False)

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Runs the agent until ``stop`` is set, and then ends the agent's replicas.

        Raises PortInUse, InsecureRefused, BadCertificate.

        Args:
            ready: gets the address at which the agent listens.
        """
        call_limits = CallLimits(ServerSettings())
        server, page = new_server(call_limits), None
        add_agent_service(server, self._logs)
        add_health(server)
        tasks: list[asyncio.Task[None]] = []
        try:
            check_reach(addresses_of(self._config.controller))
            address = bind(server, self._config.listen, self._config.advertise)
            await server.start()
            info = self._info(reached_at(self._config.advertise, address))
            if self._config.metrics:
                from stateflow.metrics.page import Page  # imported only if metrics are wanted

                made = partial(self._said_figures, info, call_limits)
                targets = partial(targets_of, info, self._convergence.pages)
                page = Page(self._config.metrics, made, asyncio.get_running_loop(), targets=targets)
            ready(address)
            tasks = [asyncio.create_task(self._beat(info)), asyncio.create_task(self._converge())]
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for task in done - {stopping}:
                await task  # raises, because these tasks end only with an error
        finally:
            for task in tasks:
                task.cancel()
            await self._end_all()
            if page is not None:
                await asyncio.to_thread(page.close)
            await server.stop(grace=1)
            self._claimed.close()

    async def _said_figures(self, info: AgentInfo, call_limits: CallLimits) -> Values:
        _, free = await asyncio.to_thread(disk_bytes, self._config.data_dir)
        return self._figures.of(info, self._convergence.children(), free) | call_limits.figures()

    def _info(self, address: str) -> AgentInfo:
        config, group = self._config, limiting.own_group()
        return AgentInfo(
            config.name,
            config.site,
            address,
            dict(config.labels),
            config.cores or cores(),
            config.memory_bytes or memory_bytes(group),
            disk_bytes(config.data_dir)[0],
            VERSION,
            platform.python_version(),
            self._limits.kind,
        )

    # -- the controller -----------------------------------------------------------------------------------

    async def _beat(self, info: AgentInfo) -> None:
        """Reports the agent's state at intervals, and obeys the answers."""
        addresses = addresses_of(self._config.controller)
        turn = Round(addresses, addresses[0])
        callers: dict[str, ControllerCaller] = {}
        async with contextlib.AsyncExitStack() as stack:
            while True:
                interval_s, asked, failed = BEAT_S, turn.asked, False
                try:
                    if asked not in callers:
                        channel = await stack.enter_async_context(connect(asked))
                        callers[asked] = ControllerCaller(channel, asked)
                    orders = await callers[asked].beat(await self._beat_of(info))
                    await self._obey(orders, asked)
                    interval_s = orders.heartbeat_interval_s
                except StateflowError as error:
                    self._say(f"no valid orders from the controller at {asked}: {error}", error.code)
                    failed = turn.go_on(error)
                except Exception as error:  # noqa: BLE001 - it is logged, and the next heartbeat may succeed
                    self._say(
                        f"the controller's orders cannot be carried out: {unexpected(error)}", type(error).__name__
                    )
                if failed:  # another controller may lead
                    continue
                turn = Round(addresses, turn.asked)
                with contextlib.suppress(TimeoutError):  # a change of a replica's state is reported at once
                    await asyncio.wait_for(self._told.wait(), jittered(interval_s, self._random))
                self._told.clear()

    async def _beat_of(self, info: AgentInfo) -> Beat:
        _, free = await asyncio.to_thread(disk_bytes, self._config.data_dir)
        kept = self._store.kept
        ledger = kept.ledger if kept.wanted else ""  # an agent without replicas follows any ledger
        return Beat(
            info,
            Directory(kept.id, self._place, ledger),
            self._incarnation,
            free,
            self._convergence.children(),
            kept.term if ledger else 0,
        )

    async def _obey(self, orders: DesiredState, asked: str) -> None:
        """Obeys the controller's orders, after writing them to disk.

        Raises StaleTerm, ForeignLedger, OSError; then the former orders stay in force.
        """
        kept = self._store.kept
        adopted = orders.adopted
        if orders.ledger != kept.ledger and not kept.wanted:
            adopted = kept.ledger
        self._authority.check_answer(orders.ledger, orders.term, adopted)
        await asyncio.to_thread(self._store.keep, orders.ledger, orders.term, orders.wanted)
        self._authority.obey(Commanded(orders.ledger, orders.term, self._incarnation), adopted)
        self._convergence.want(orders.wanted)
        self._figures.obeyed_at = self._clock.monotonic()
        self._changed.set()
        if self._said != "":
            log.info("the agent again carries out orders of the controller at %s", asked)
            self._said = ""

    def _say(self, line: str, key: str) -> None:
        """Logs a line, unless the last one logged had the same key."""
        if key != self._said:
            self._said = key
            log.warning("%s", line)

    # -- processes ----------------------------------------------------------------------------------------

    async def _converge(self) -> None:
        while True:
            for spawned in self._act(self._clock.monotonic()):
                await self._begin(spawned)
            if self._changed.is_set():
                self._changed.clear()
                continue
            wait_s = self._convergence.next_at() - self._clock.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wait_s == float("inf") else max(wait_s, 0.0))
            self._changed.clear()

    def _act(self, now: float) -> list[Spawned]:
        """Ends and kills the processes that are due. Returns the replicas to start.

        This function must not await anything, because the actions already count as carried out.
        """
        begins = []
        for action in self._convergence.actions(now):
            self._told.set()
            match action:
                case Begin(spawned):
                    begins.append(spawned)
                case End(name):
                    log.info("replica %s is stopping", name, extra={"replica": name})
                    self._launcher.stop(self._processes[name])
                case Kill(name):
                    log.error("replica %s did not stop in time and is killed", name, extra={"replica": name})
                    self._launcher.kill(self._processes[name])
        return begins

    async def _begin(self, spawned: Spawned) -> None:
        name, now = spawned.replica, self._clock.monotonic()
        directory = self._config.data_dir / "replicas" / name
        unlimited: StateflowError | None = None
        try:
            busy = await asyncio.to_thread(_is_busy, directory)
            if busy is not None:
                self._convergence.busy(name, now)
                if name not in self._waiting:  # it is looked at four times a second
                    self._waiting.add(name)
                    log.warning(
                        "replica %s waits until its former process has ended (process %s); kill it if it hangs",
                        name,
                        busy.where["pid"],
                        extra={"replica": name},
                    )
                return
            self._waiting.discard(name)
            process = self._processes[name] = self._launcher.start(self._command(spawned, directory))
        except Exception as error:  # noqa: BLE001 - it concerns this replica alone, and is reported
            self._died(name, None, error if isinstance(error, StateflowError) else unexpected(error))
            return
        try:
            self._limits.apply(name, process.process.pid, spawned.memory_bytes, spawned.workers)
        except OSError as error:  # the replica must not run without the ordered limit
            self._launcher.kill(process)
            unlimited = unexpected(error)
        log.info("replica %s started (process %d)", name, process.process.pid, extra={"replica": name})
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop, name, process, unlimited), daemon=True).start()

    def _command(self, spawned: Spawned, directory: Path) -> Command:
        config, name = self._config, spawned.replica
        host = config.listen.rpartition(":")[0]
        figures = f"{config.metrics.rpartition(':')[0]}:0" if config.metrics else ""
        arguments = [
            *("replica", "--name", name, "--site", config.site, "--controller", config.controller),
            *("--data-dir", str(directory), "--listen", f"{host}:0"),
            *("--weight", str(spawned.weight), "--workers", str(spawned.workers)),
            *("--advertise", config.advertise, "--metrics", figures),  # as variables they would apply to all replicas
            *("--json", "--stop-with-parent"),
        ]
        return Command(name, arguments, config.environment, self._log_of(name))

    def _watch(
        self, loop: asyncio.AbstractEventLoop, name: str, process: Started, unlimited: StateflowError | None
    ) -> None:
        """Watches a process from its start to its end, in a thread.

        Args:
            unlimited: why the process's memory could not be limited, so that it was killed; None: it was limited.
        """

        def tell(done: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
                loop.call_soon_threadsafe(done)

        errors: list[StateflowError] = []

        def hear(said: Listening | NotReady | StateflowError) -> None:
            if isinstance(said, StateflowError):
                errors.append(said)
            else:
                tell(partial(self._hears, name, process, said))

        popen = process.process
        assert popen.stdout is not None
        hearing = threading.Thread(target=_hear, args=(popen.stdout, hear), daemon=True)
        hearing.start()
        status = popen.wait()
        hearing.join(LAST_LINES_S)
        if popen.stdin is not None:
            with contextlib.suppress(OSError):
                popen.stdin.close()
        tell(partial(self._died, name, status, unlimited or (errors[-1] if errors else None)))

    def _hears(self, name: str, process: Started, said: Listening | NotReady) -> None:
        if self._processes.get(name) is not process:  # it has ended, and may have been started again
            return
        if isinstance(said, NotReady):
            self._convergence.fails(name, said.fault, said.deaths)
            log.warning("replica %s is not ready: %s", name, said.fault, extra={"replica": name})
            self._told.set()
        else:
            self._ready(name, said)

    def _ready(self, name: str, said: Listening) -> None:
        address = reached_at(self._config.advertise, said.address)
        self._convergence.ready(name, address, self._clock.monotonic())
        self._convergence.serves(name, said.metrics)
        self._changed.set()
        self._told.set()

    def _died(self, name: str, status: int | None, fault: StateflowError | None) -> None:
        self._processes.pop(name, None)
        self._limits.forget(name)
        if fault is None and status is not None:
            fault = Unavailable(_how(status), remedy=f"see `stateflow logs {name}`", replica=name)
        pause = self._convergence.ended(name, self._clock.monotonic(), fault)
        if pause is None:
            log.info("replica %s has stopped", name, extra={"replica": name})
        else:
            self._figures.ends += 1
            log.warning("replica %s: %s; restarting in %.1f s", name, fault, pause, extra={"replica": name})
        self._changed.set()
        self._told.set()

    async def _end_all(self) -> None:
        """Ends all replicas, and waits until they have ended.

        Otherwise they would end on their own, but only after this process.
        """
        for name in self._convergence.processes():
            if name not in self._processes:  # the replica was about to start when this process was asked to end
                self._convergence.ended(name, self._clock.monotonic())
        self._convergence.want([])
        while self._convergence.processes():
            now = self._clock.monotonic()
            self._act(now)
            wait_s = self._convergence.next_at() - now
            self._changed.clear()
            if self._convergence.processes():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), None if wait_s == float("inf") else max(wait_s, 0.0))

    # -- logs ---------------------------------------------------------------------------------------------

    def _log_of(self, name: str) -> Path:
        return self._config.data_dir / "logs" / f"{name}.log"

    async def _logs(self, command: Commanded, replica: str, lines: int, follow: bool) -> AsyncIterator[bytes]:
        self._authority.check(command)
        if not any(each.spawned.replica == replica for each in self._convergence.children()):
            raise InvalidArgument(f"the agent has no replica {replica!r}", remedy="see `stateflow agent list`")
        reader = Reader(self._log_of(replica))
        try:
            for piece in await asyncio.to_thread(lambda: list(reader.last(lines))):
                yield piece
            silent_s = 0.0
            while follow:
                data = await asyncio.to_thread(reader.more)
                if data:
                    silent_s = 0.0
                    yield data
                    continue
                if silent_s >= ALIVE_S:
                    silent_s = 0.0
                    yield b""
                await asyncio.sleep(LOOK_S)
                silent_s += LOOK_S
        finally:
            reader.close()


def _claim(directory: Path) -> Closable:
    """Claims the agent's data directory. Raises DataDirLocked, InvalidArgument."""
    try:
        return claim(directory, "LOCK")
    except DataDirLocked as error:
        raise DataDirLocked(
            "another agent holds the data directory",
            remedy="stop that agent, or give this one its own --data-dir",
            **error.where,
        ) from error


def _hear(pipe: IO[str], told: Callable[[Listening | NotReady | StateflowError], None]) -> None:
    """Reads a process's output, and passes each line that names addresses, or says why there are none or why the
    process ends, to ``told``. Runs in a thread."""
    with pipe:
        for line in pipe:
            said = heard(line)
            if said is not None:
                told(said)


def _is_busy(directory: Path) -> DataDirLocked | None:
    """Returns the error that names the former process if it still holds a replica's directory, otherwise None. Raises
    InvalidArgument."""
    for name in ("NODE", "LOCK"):
        if (directory / name).exists():
            try:
                claim(directory, name).close()
            except DataDirLocked as error:
                return error
    return None


def _how(status: int) -> str:
    return f"its process was killed by signal {-status}" if status < 0 else f"its process exited with status {status}"
