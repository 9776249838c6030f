"""A node of several replicas: their processes, started, watched, started again and ended together.

Each worker is a replica with a part of the node's data directory: the first has the directory itself, as a replica
alone has, the others have ``workers/<number>`` in it. Fewer workers than there were run on until they own nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import AlreadyThere, StateflowError, Unavailable
from stateflow.node.supervising import Supervision, spread
from stateflow.rpc.clients import ReplicaClient
from stateflow.types import PartitionId, node_of, worker_name

log = logging.getLogger(__name__)
WORKERS = "workers"
#: how often it is looked whether partitions should go from one worker to another
LOOK_S = 5.0
#: whoever was asked to stop and has not is killed; longer than a replica takes by itself
KILL_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """``arguments``: of a worker, by its number and the address it listens at if it has been there before."""

    name: str
    data_dir: Path
    controller: str
    arguments: Callable[[int, str], Sequence[str]]
    stop_timeout_s: float


def directory_of(data_dir: Path, number: int) -> Path:
    return data_dir / WORKERS / str(number) if number else data_dir


def left_behind(data_dir: Path, count: int) -> list[int]:
    """Workers of an earlier, larger number that may own something."""
    folder = data_dir / WORKERS
    found = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return sorted(number for number in found if number >= count)


def behind(address: str, number: int) -> str:
    """Where the worker ``number`` listens, or is reached, where the first one does so at ``address``: so many ports
    further, at any where that one takes any."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}" if port.isdigit() and int(port) else address


class Workers:
    """Of one node. Args: count: so many are wanted."""

    def __init__(self, node: Node, count: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._node, self._count, self._clock = node, count, clock
        self._supervision = Supervision(count)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._addresses: dict[int, str] = {}
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._died = asyncio.Event()

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Until ``stop``. Raises Unavailable when no worker starts, however often."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            numbers = [*range(self._count), *left_behind(self._node.data_dir, self._count)]
            await asyncio.gather(*map(self._start, numbers))
            if 0 in self._addresses:
                ready(self._addresses[0])
            looks_at = self._clock.monotonic() + LOOK_S
            while not stop.is_set():
                for number in self._supervision.due(self._clock.monotonic()):
                    await self._start(number)
                    if number == 0 and self._addresses.get(0) and not stop.is_set():
                        ready(self._addresses[0])
                if self._supervision.is_hopeless():
                    raise Unavailable(
                        f"no worker of {self._node.name} starts", remedy="see why above, and start the node again"
                    )
                if self._clock.monotonic() >= looks_at:
                    await self._look()
                    looks_at = self._clock.monotonic() + LOOK_S
                died = asyncio.ensure_future(self._died.wait())
                await asyncio.wait([died, stopping], timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                died.cancel()
                self._died.clear()
        finally:
            stopping.cancel()
            await self._stop_all()

    # -- processes ----------------------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        """Waits until it is ready, or has ended."""
        arguments = self._node.arguments(number, self._addresses.get(number, ""))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "stateflow"),
            *arguments,
            *("--json", "--stop-with-parent"),
            stdin=asyncio.subprocess.PIPE,  # whose end it sees when this process ends, however that does
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # what a terminal sends reaches it through here
        )
        self._processes[number] = process
        self._supervision.started(number, self._clock.monotonic())
        self._watching[number] = asyncio.create_task(self._watch(number, process))
        assert process.stdout is not None
        line = await process.stdout.readline()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            self._addresses[number] = json.loads(line)["address"]

    async def _watch(self, number: int, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        name = worker_name(self._node.name, number)
        pause = self._supervision.died(number, self._clock.monotonic())
        if self._supervision.dies_at_every_start(number):
            log.error("worker %s dies at every start (status %d): see why above; again in %.0f s", name, status, pause)
        else:
            log.warning("worker %s ended (status %d): it is started again in %.1f s", name, status, pause)
        self._died.set()

    async def _stop_all(self) -> None:
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*map(self._stop, list(self._processes)))

    async def _stop(self, number: int) -> None:
        process = self._processes[number]
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._node.stop_timeout_s + KILL_AFTER_S)
        except TimeoutError:
            log.error("worker %s did not stop and is killed", worker_name(self._node.name, number))
            process.kill()
            await process.wait()

    # -- partitions ---------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Partitions go from busy workers to those that are not, and away from those that leave. What cannot be asked
        or done now is looked at again."""
        try:
            for number in self._supervision.leaving():
                await self._leave(number)
            await asyncio.to_thread(self._spread)
        except StateflowError as error:
            log.info("partitions stay where they are in %s for now: %s", self._node.name, error)

    async def _leave(self, number: int) -> None:
        name = worker_name(self._node.name, number)
        cluster = Cluster(self._node.controller)
        status = await asyncio.to_thread(cluster.status)
        owned = {replica.name: replica.partitions for replica in status.replicas}
        if name not in owned:
            return
        if owned[name]:
            if not any(each.state == "RUNNING" for each in status.reconfigurations):
                await asyncio.to_thread(cluster.drain, name)
            return
        self._watching[number].cancel()
        self._supervision.ended(number)
        await self._stop(number)
        log.warning("worker %s owns nothing any more and has ended", name)
        await self._forget(name)
        directory = directory_of(self._node.data_dir, number)
        if (directory / "evidence").exists():
            log.warning("%s stays: it holds what could not be served", directory)
        else:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _forget(self, name: str) -> None:
        """When its lease has lapsed; else people may."""
        with contextlib.suppress(StateflowError):
            await asyncio.to_thread(Cluster(self._node.controller).forget, name)

    def _spread(self) -> None:
        cluster = Cluster(self._node.controller)
        status = cluster.status()
        if any(each.state == "RUNNING" for each in status.reconfigurations):
            return
        here = {worker_name(self._node.name, number) for number in range(self._count)}
        mine = [each for each in status.replicas if each.name in here]
        if len(mine) < self._count or not all(each.alive for each in mine):
            return
        rates: dict[PartitionId, float] = {}
        for each in mine:
            for partition in ReplicaClient(each.address).statistics(1 << 62).partitions:
                rates[PartitionId(partition.operator, partition.partition)] = partition.batch_rate
        loads: dict[str, dict[PartitionId, float]] = {each.name: {} for each in mine}
        for operator in status.operators:
            for number, owner in enumerate(operator.owners):
                if owner in loads:
                    partition_id = PartitionId(operator.name, number)
                    loads[owner][partition_id] = rates.get(partition_id, 0.0)
        by_target: dict[tuple[str, str], list[int]] = {}
        for partition_id, target in spread(loads).items():
            by_target.setdefault((partition_id.operator, target), []).append(partition_id.partition)
        for (operator_name, target), numbers in by_target.items():
            exactly = target if node_of(target) != target else f"{target}~0"
            log.info("%d partitions of %s go to worker %s", len(numbers), operator_name, target)
            with contextlib.suppress(AlreadyThere):
                cluster.migrate(operator_name, numbers, exactly)
