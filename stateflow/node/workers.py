"""Runs a node of several replicas: starts, watches, restarts and stops their processes.

Each worker is a replica with a part of the node's data directory. The first worker uses the directory itself, like a
single replica; the others use ``workers/<number>`` in it. When a node is started with fewer workers than before, the
surplus workers keep running until they own no partition.

The process that runs a node, or a single replica, claims the file ``NODE`` in the directory. Worker processes hold
``workers/LOCK`` for as long as they run, which may be longer than the node's own process runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar, cast

from stateflow.client import Cluster, ClusterStatus, ReplicaStatus
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    AlreadyThere,
    DataDirLocked,
    InvalidArgument,
    PortInUse,
    StateflowError,
    Unavailable,
)
from stateflow.fleet import Listening, NotReady, heard
from stateflow.node.supervising import SLOW_S, Balance, Seen, Supervision, is_spare
from stateflow.partition.environment import claim
from stateflow.rpc.clients import ReplicaClient
from stateflow.rpc.faults import unexpected
from stateflow.rpc.serving import reached_at
from stateflow.types import PORT_MAX, WORKER, PartitionId, node_of, ranges, worker_name, worker_of

log = logging.getLogger(__name__)
T = TypeVar("T")
WORKERS = "workers"
#: end of the name of a worker's directory that is being removed
GONE = ".gone"
#: seconds between two checks whether former workers have ended
ENDED_LOOK_S = 0.05
#: seconds between two checks whether partitions should move between workers
LOOK_S = 5.0
#: seconds for which the last lines of an ended worker are waited for, as its children may keep the pipe open
LAST_LINES_S = 1.0
#: seconds beyond the stop timeout after which a worker is killed; a replica needs less to end by itself
KILL_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """The settings of a node.

    Attributes:
        listen, advertise, metrics: addresses of the first worker; empty ``metrics``: no metrics are served.
        arguments: returns the command-line arguments of a worker, given its number, its listen address, its advertised
            address, and the address of its metrics.
    """

    name: str
    data_dir: Path
    controller: str
    listen: str
    advertise: str | None
    metrics: str
    arguments: Callable[[int, str, str | None, str], Sequence[str]]
    stop_timeout_s: float


def directory_of(data_dir: Path, number: int) -> Path:
    return data_dir / WORKERS / str(number) if number else data_dir


def left_behind(data_dir: Path, count: int) -> list[int]:
    """Returns the numbers of surplus workers, which may own partitions: workers of an earlier run, numbered ``count``
    or higher."""
    folder = data_dir / WORKERS
    found = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return sorted(number for number in found if number >= count)


def _remove(directory: Path) -> None:
    """Removes a worker's directory. If that is cut short, the next start finds no worker in the rest of it."""
    gone = directory.with_name(directory.name + GONE)
    try:
        directory.rename(gone)
    except OSError as error:
        log.warning("data directory %s is not removed: %s", directory, error)
        return
    shutil.rmtree(gone, ignore_errors=True)


def claim_node(data_dir: Path) -> TextIO:
    """Claims a directory, so that no other process runs a node or replica there until the result is closed.

    Raises DataDirLocked if one runs there, and InvalidArgument if the directory cannot be used.
    """
    return claim(data_dir, "NODE")


def claim_workers(data_dir: Path) -> TextIO:
    """Claims the lock that all workers of a node hold. The claim proves that no worker of a former run is running or
    starting.

    The caller has claimed the node before, and passes the lock on to each worker process that it starts. Raises
    DataDirLocked while workers of a former run are alive, and InvalidArgument if the directory cannot be used.
    """
    try:
        return claim(data_dir / WORKERS, "LOCK")
    except DataDirLocked as error:
        raise DataDirLocked(
            "workers of a former node still use the data directory",
            remedy="wait until they end; kill those that hang",
            path=data_dir,
            pids=_holders(data_dir),
        ) from error


def _holders(data_dir: Path) -> str | None:
    """Returns the ids of the processes that have claimed a worker's directory; None: no process has.

    A process that has just started may not have claimed it yet.
    """
    found: list[str] = []
    for number in [0, *left_behind(data_dir, 1)]:
        directory = directory_of(data_dir, number)
        if (directory / "LOCK").exists():
            try:
                with contextlib.suppress(InvalidArgument):
                    claim(directory, "LOCK").close()
            except DataDirLocked as error:
                found.append(error.where["pid"])
    return ", ".join(found) or None


@contextlib.contextmanager
def nobody_in(data_dir: Path, stop_timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:
    """Keeps all processes of a node or replica out of a directory, so that it can be wiped.

    Waits for processes that are still ending. Raises DataDirLocked if they do not end, and InvalidArgument if the
    directory cannot be used.
    """
    until = clock.monotonic() + stop_timeout_s + KILL_AFTER_S
    with contextlib.ExitStack() as claims:
        for take in (claim_node, claim_workers):
            while True:
                try:
                    claims.callback(take(data_dir).close)
                    break
                except DataDirLocked:
                    if clock.monotonic() >= until:
                        raise
                time.sleep(ENDED_LOOK_S)
        yield


def behind(address: str, number: int) -> str:
    """Returns the address of worker ``number``: the first worker's ``address`` with its port increased by ``number``.

    An address without a port, or with port 0, stays unchanged. Raises InvalidArgument if there is no such port.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not int(port):
        return address
    if int(port) + number > PORT_MAX:
        raise InvalidArgument(
            f"no port is left for worker {number} after {address}",
            remedy=f"choose a port up to {PORT_MAX - number}: the workers of a node use consecutive ports",
        )
    return f"{host}:{int(port) + number}"


class Workers:
    """The workers of one node. Raises InvalidArgument if there are not enough ports for them.

    Args:
        count: number of workers to run.
    """

    def __init__(self, node: Node, count: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._node, self._count, self._clock = node, count, clock
        self._numbers = [*range(count), *left_behind(node.data_dir, count)]
        for number in self._numbers:
            behind(node.listen, number), behind(node.advertise or "", number), behind(node.metrics, number)
        self._supervision, self._balance = Supervision(count), Balance()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._addresses: dict[int, str] = {}
        self._pages: dict[int, str] = {}  # worker → address of its metrics
        self._errors: dict[int, StateflowError] = {}  # error with which a worker ended last
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._tried: set[int] = set()
        self._failing: NotReady | None = None  # not passed on yet
        self._lock: TextIO | None = None  # each worker holds it, too
        self._changed = asyncio.Event()
        self._said: dict[str, str] = {}

    async def run(
        self, stop: asyncio.Event, ready: Callable[[Listening], None], failing: Callable[[NotReady], None]
    ) -> None:
        """Runs the workers until ``stop``. Callers have claimed the node.

        Args:
            ready: called with the first worker's address when that worker is ready and the start of every other worker
                was attempted, and again when that address or addresses of metrics have changed. An attempt ends after
                ``SLOW_S``.
            failing: called after each death of the first worker at its start, from the ``HOPELESS``-th in a row on, and
                when it is not ready ``SLOW_S`` after its start, as long as ``ready`` was not called.

        Raises DataDirLocked if workers of a former node do not end, and Unavailable if every worker dies at every
        start.
        """
        stopping = asyncio.ensure_future(stop.wait())
        looking = None
        try:
            if not await self._wait_for_former(stop):
                return
            for path in (self._node.data_dir / WORKERS).glob(f"*{GONE}"):  # a removal that was cut short
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            for number in self._numbers:
                self._begin(number)
            looking = asyncio.create_task(self._look_again_and_again())
            said: Listening | None = None
            while not stop.is_set():
                for number in self._supervision.due(self._clock.monotonic()):
                    self._begin(number)
                for number in self._supervision.slow(self._clock.monotonic()):
                    self._is_slow(number)
                if self._supervision.is_hopeless():
                    raise self._hopeless()
                pages = {worker_name(self._node.name, number): page for number, page in sorted(self._pages.items())}
                if 0 in self._addresses and self._tried.issuperset(self._numbers):
                    listening = Listening(self._addresses[0], pages)
                    if said != listening:
                        said = listening
                        ready(said)
                if said is None and self._failing is not None:
                    failing(self._failing)
                self._failing = None
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([changed, stopping], timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
        finally:
            for task in (stopping, looking, *self._lives.values()):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*map(self._stop, list(self._processes)))
            if self._lock is not None:
                self._lock.close()

    async def _wait_for_former(self, stop: asyncio.Event) -> bool:
        """Waits until the workers of a killed node have ended. They end by themselves, but not at once.

        Returns False if this node is asked to stop before they have ended. Raises DataDirLocked if they do not end.
        """
        until = self._clock.monotonic() + self._node.stop_timeout_s + KILL_AFTER_S
        while not stop.is_set():
            try:
                self._lock = claim_workers(self._node.data_dir)
                return True
            except DataDirLocked:
                if self._clock.monotonic() >= until:
                    raise
            await asyncio.sleep(ENDED_LOOK_S)
        return False

    def _hopeless(self) -> Unavailable:
        errors = [self._errors[number] for number in range(self._count) if number in self._errors]
        why = f": {errors[0]}" if errors else ""
        return Unavailable(
            f"no worker of {self._node.name} starts{why}", remedy="remove the cause, and start the node again"
        )

    # -- processes ----------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        self._supervision.started(number, self._clock.monotonic())
        self._lives[number] = asyncio.create_task(self._live(number))

    async def _live(self, number: int) -> None:
        """Runs a worker's process from its start to its end."""
        name = worker_name(self._node.name, number)
        try:
            status = await self._run_process(number)
        except Exception as error:  # noqa: BLE001 - it is logged, and the worker is started again
            log.error("worker %s cannot be started: %s", name, unexpected(error))
            status = -1
            await self._stop(number)  # the process may run, with output that cannot be read
        self._tried.add(number)
        pause = self._supervision.died(number, self._clock.monotonic())
        if self._supervision.dies_at_every_start(number):
            why = self._errors.get(number, "see its log lines above")
            log.error("worker %s fails at every start (status %d), restarting in %.0f s: %s", name, status, pause, why)
            if number == 0:  # without its address, the node is never ready
                self._failing = self._failed(status)
        else:
            log.warning("worker %s ended (status %d), restarting in %.1f s", name, status, pause)
        self._changed.set()

    def _is_slow(self, number: int) -> None:
        """Names a worker that is not ready yet, and lets nothing wait for it any more."""
        since, process = f"has not been ready for {SLOW_S:.0f} s since its start", self._processes.get(number)
        pid = None if process is None else process.pid
        name = worker_name(self._node.name, number)
        log.warning("worker %s %s (process %s); it may hang, see its log lines", name, since, pid)
        self._tried.add(number)
        if number == 0:
            fault = Unavailable(
                f"the first worker of {self._node.name} {since}",
                remedy="wait if it opens many partitions; if it hangs, see the node's log, and kill its process",
                pid=pid,
            )
            self._failing = NotReady(self._supervision.deaths(0), fault)

    def _failed(self, status: int) -> NotReady:
        deaths, error = self._supervision.deaths(0), self._errors.get(0)
        why = "" if error is None else f": {error}"
        fault = Unavailable(
            f"the first worker of {self._node.name} has died at {deaths} starts in a row (status {status}){why}",
            remedy="remove the cause, see the node's log; the node goes on starting it, and its other workers serve",
        )
        return NotReady(deaths, fault)

    async def _run_process(self, number: int) -> int:
        listen = self._addresses.get(number) or behind(self._node.listen, number)
        figures = self._pages.get(number) or behind(self._node.metrics, number)
        arguments = self._node.arguments(number, listen, self._advertised(number), figures)
        assert self._lock is not None
        lock = self._lock.fileno()
        process = self._processes[number] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stateflow", *arguments, "--json", "--stop-with-parent", "--lock", str(lock)),
            pass_fds=(lock,),  # the worker could claim the lock itself only some time after its start
            stdin=asyncio.subprocess.PIPE,  # it closes when this process ends in any way, and the worker notices
            stdout=asyncio.subprocess.PIPE,  # one line; output of operators goes to standard error
            start_new_session=True,  # signals of a terminal reach it only through this process
        )
        assert process.stdout is not None
        self._errors.pop(number, None)
        self._hear(number, await process.stdout.readline())
        hearing = asyncio.create_task(self._hear_rest(number, process.stdout))
        try:
            status = await process.wait()
            await asyncio.wait([hearing], timeout=LAST_LINES_S)
            return status
        finally:
            hearing.cancel()

    async def _hear_rest(self, number: int, pipe: asyncio.StreamReader) -> None:
        """Keeps the error with which a worker ends after it has listened, which its log has, too."""
        with contextlib.suppress(ValueError):  # a line is too long
            async for line in pipe:
                if isinstance(said := heard(line), StateflowError):
                    self._errors[number] = said

    def _hear(self, number: int, line: bytes) -> None:
        """Reads a worker's first line of output: the worker's address, or the error with which its start failed."""
        name, said = worker_name(self._node.name, number), heard(line)
        if isinstance(said, Listening):
            self._addresses[number] = said.address
            self._pages |= {number: said.metrics[name]} if name in said.metrics else {}
            self._supervision.ready(number, self._clock.monotonic())
            self._tried.add(number)
            self._changed.set()
        elif isinstance(said, StateflowError):
            self._errors[number] = said
            if isinstance(said, PortInUse):  # the ports that it had before are in use: it may get others
                self._addresses.pop(number, None)
                self._pages.pop(number, None)
            log.error("worker %s cannot start: %s", name, said)

    async def _stop(self, number: int) -> None:
        process = self._processes.get(number)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._node.stop_timeout_s + KILL_AFTER_S)
        except TimeoutError:
            log.error("worker %s did not stop in time and is killed", worker_name(self._node.name, number))
            process.kill()
            await process.wait()

    # -- partitions ---------------------------------------------------------------------------------------

    async def _look_again_and_again(self) -> None:
        """Moves partitions from busy workers to others, and away from surplus workers, every ``LOOK_S`` seconds.

        Moves that cannot be made now are tried again the next time.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            with self._tolerant(""):
                await self._look(Cluster(self._node.controller))

    @contextlib.contextmanager
    def _tolerant(self, name: str) -> Iterator[None]:
        """Logs the error of work that is tried again later; the same error in succession is logged once.

        Args:
            name: worker concerned; empty: the whole node.
        """
        said = ""
        try:
            yield
        except StateflowError as error:
            said = str(error)
        except Exception:
            log.exception("moving partitions of %s failed, retrying later", name or self._node.name)
        if said and said != self._said.get(name):
            log.info("partitions of %s are not moved now, retrying later: %s", name or self._node.name, said)
        self._said[name] = said

    async def _look(self, cluster: Cluster) -> None:
        status = await aside(cluster.status)
        if status.follower is not None:
            raise Unavailable("no controller leads", remedy="start one if none runs; the node retries by itself")
        mine = {worker_of(each.name): each for each in status.replicas if self._is_mine(each)}
        for number in self._supervision.leaving():
            if number in mine:
                with self._tolerant(mine[number].name):
                    await self._leave(cluster, mine[number], status)
        for name in self._forgettable(status):
            with contextlib.suppress(StateflowError):  # it may still be part of a move; retried later
                await aside(partial(cluster.forget, name))
        await aside(partial(self._spread, cluster, [mine[n] for n in range(self._count) if n in mine], status))

    def _advertised(self, number: int) -> str | None:
        return behind(self._node.advertise, number) if self._node.advertise else None

    def _is_mine(self, replica: ReplicaStatus) -> bool:
        """Tells whether a replica is a live worker of this node, and not of another node with the same name."""
        number = worker_of(replica.name)
        if node_of(replica.name) != self._node.name or number not in self._numbers or not replica.alive:
            return False  # there may be no port, and so no address, for a worker of that number
        return replica.address == reached_at(self._advertised(number), self._addresses.get(number, ""))

    async def _leave(self, cluster: Cluster, worker: ReplicaStatus, status: ClusterStatus) -> None:
        if _is_moving(status, {worker.name}):
            return
        if worker.partitions:
            await aside(partial(cluster.drain, worker.name))
            return
        has = await aside(partial(ReplicaClient(worker.address).statistics, 1 << 62))
        epochs = {
            PartitionId(operator.name, number): epoch
            for operator in status.operators
            for number, epoch in enumerate(operator.epochs)
        }
        if not is_spare(has.partitions, epochs):
            raise Unavailable(
                "the worker still serves a partition, or has one whose new owner is not in the ledger",
                remedy="wait, the node tries again by itself; `stateflow status` shows the partitions' owners",
            )
        number = worker_of(worker.name)
        self._lives[number].cancel()
        self._supervision.ended(number)
        self._pages.pop(number, None)
        await self._stop(number)
        log.warning("worker %s no longer owns partitions and has stopped", worker.name)
        directory = directory_of(self._node.data_dir, number)
        if (directory / "evidence").exists():
            log.warning("data directory %s is kept: it contains quarantined copies", directory)
        else:
            await asyncio.to_thread(_remove, directory)

    def _forgettable(self, status: ClusterStatus) -> list[str]:
        """Returns the names of surplus workers that have ended, in this run or an earlier one, and whose lease has
        lapsed."""
        running, gone = set(self._numbers), set(self._supervision.gone())
        return [
            each.name
            for each in status.replicas
            if node_of(each.name) == self._node.name
            and (each.weight, each.partitions, each.alive) == (0, 0, False)
            and (worker_of(each.name) in gone or worker_of(each.name) not in running)
        ]

    def _spread(self, cluster: Cluster, workers: list[ReplicaStatus], status: ClusterStatus) -> None:
        names = {each.name for each in workers}
        if len(workers) < self._count or _is_moving(status, names):
            return
        owned = {
            (operator.name, number): owner
            for operator in status.operators
            for number, owner in enumerate(operator.owners)
            if owner in names
        }
        committed: dict[str, dict[PartitionId, int]] = {each.name: {} for each in workers}
        for each in workers:
            for has in ReplicaClient(each.address).statistics(1 << 62).partitions:
                if owned.get((has.operator, has.partition)) == each.name:
                    committed[each.name][PartitionId(has.operator, has.partition)] = has.sequence
        used = {each.name: processor_s(self._processes[worker_of(each.name)].pid) for each in workers}
        used_s = {name: seconds for name, seconds in used.items() if seconds is not None}
        by_target: dict[tuple[str, str], list[int]] = {}
        for partition, target in self._balance.look(Seen(self._clock.monotonic(), committed, used_s)).items():
            by_target.setdefault((partition.operator, target), []).append(partition.partition)
        for (operator_name, target), numbers in by_target.items():
            exactly = target if node_of(target) != target else f"{target}{WORKER}0"
            log.info("moving partitions %s of %s to worker %s", ranges(numbers), operator_name, target)
            with contextlib.suppress(AlreadyThere):
                cluster.migrate(operator_name, numbers, exactly)


def _is_moving(status: ClusterStatus, replicas: Collection[str]) -> bool:
    """Tells whether a move to or from one of the replicas is under way or planned."""
    return any(
        move.source in replicas or move.target in replicas
        for each in status.reconfigurations
        if not each.over
        for move in each.moves
        if move.state not in ("COMPLETED", "ABORTED")
    )


def processor_s(pid: int) -> float | None:
    """Returns the CPU seconds that a process of this machine has used; None: unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


async def aside(work: Callable[[], T]) -> T:
    """Runs work in a daemon thread and returns its result. Work that waits long for an answer does not delay the end of
    this process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await done
