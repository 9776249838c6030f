"""Count the product's files that its main walks enter: a row, a checkpoint, a move, an append to the ledger.

    python -m tests.walks             # make walks: the table; status 1 where a walk is over its limit
    python -m tests.walks --files     # the files of each walk, too
    python -m tests.walks --write     # writes the table into CONTRIBUTING.md, too

A file is entered when one of its functions is called or goes on after a wait. Files that are only imported do not
count, nor does generated code. :data:`LIMITS` says how many files each walk may enter.

A controller and two replicas run in this process, each as its own program would start it: with gRPC on the loopback
interface, RocksDB and SQLite on disk, and default settings. A walk is done once before it is traced, so that first-time
work does not count.

Attribution
    Every call belongs to the participant in whose task it runs. A thread belongs to the participant that started it.

What repeats with time does not count
    Its intervals are an hour long. Loops whose interval is fixed, such as the watchdog of batches, were there before
    the first request; their tasks are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any
from unittest import mock

import reconfig
import stateflow
from reconfig.controller import server as controller
from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster, StreamClient
from stateflow.clock import SystemClock
from stateflow.ledger import App, Entry, Ledger, RecordState
from stateflow.partition.registry import Lease
from stateflow.partition.replica import ReplicaNode
from stateflow.partitioner import partition_of
from stateflow.replica import server as replica
from stateflow.settings import ControllerSettings, ReplicaSettings
from stateflow.types import ReplicaInfo
from tests.unit.operators import Count

#: walk → the most files it may enter. These numbers only shrink
LIMITS = {
    "row, at the client": 19,
    "row, at the replica": 35,
    "checkpoint, at a replica": 21,
    "move, at the controller": 35,
    "move, at the source": 27,
    "move, at the target": 26,
    "append to the ledger": 6,
}
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
HEADER = "| walk | files | limit | rooms |\n"
PACKAGES = tuple(Path(package.__file__ or "").parent for package in (stateflow, reconfig))
SOURCE, TARGET, CONTROLLER, CLIENT = "source", "target", "controller", "client"
#: longer than any measurement, in seconds
NEVER_S = 3600.0
#: time without a call after which the participants have done what a walk left to do, in seconds
QUIET_S = 0.05
#: longest wait for anything, in seconds
PATIENCE_S = 60.0
PARTITIONS = 8


# -- Tracing ---------------------------------------------------------------------------------------------------------


def product_file(file: str) -> str | None:
    """Returns a file of the product as a path that begins with its package; None: not the product's, or generated."""
    path = Path(file)
    for package in PACKAGES:
        if path.is_relative_to(package) and "_pb2" not in path.name:
            return str(path.relative_to(package.parent))
    return None


class Tracer:
    """Records which files of the product each participant enters. ``background``: tasks that do not count."""

    def __init__(self) -> None:
        self.background: set[asyncio.Task[Any]] = set()
        self._participant: ContextVar[str] = ContextVar("participant", default="")
        self._entered: set[tuple[str, str]] = set()
        self._calls = 0
        self._recording = False
        self._files: dict[str, str | None] = {}  # by the names that code objects have for them

    def belongs_to(self, participant: str) -> None:
        """Attributes the calling task or thread, and all that it starts from now on, to a participant."""
        self._participant.set(participant)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Traces this thread and those that are started from now on; whatever traced this thread before is paused."""
        before, threads_before, start = sys.gettrace(), threading.gettrace(), threading.Thread.start

        def start_and_inherit(thread: threading.Thread) -> None:
            run, participant = thread.run, self._participant.get()

            def run_for_participant() -> None:
                self._participant.set(participant)
                run()

            thread.run = run_for_participant  # type: ignore[method-assign]
            start(thread)

        with mock.patch.object(threading.Thread, "start", start_and_inherit):
            threading.settrace(self._called)
            sys.settrace(self._called)
            try:
                yield
            finally:
                sys.settrace(before)
                threading.settrace(threads_before)

    def recorded(self, work: Callable[[], object]) -> dict[str, set[str]]:
        """Returns participant → files entered by ``work`` and by what it leaves to do."""
        self._entered.clear()
        self._recording = True
        try:
            work()
            self._wait_until_quiet()
        finally:
            self._recording = False
        files: dict[str, set[str]] = {}
        for participant, file in self._entered:
            files.setdefault(participant, set()).add(file)
        return files

    def _wait_until_quiet(self) -> None:
        before, deadline = -1, time.monotonic() + PATIENCE_S
        while self._calls != before and time.monotonic() < deadline:
            before = self._calls
            time.sleep(QUIET_S)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._recording:
            return
        name = frame.f_code.co_filename
        if name not in self._files:
            self._files[name] = product_file(name)
        file = self._files[name]
        if file is None or self._is_background():
            return
        self._calls += 1
        self._entered.add((self._participant.get(), file))

    def _is_background(self) -> bool:
        loop = asyncio._get_running_loop()
        return loop is not None and asyncio.current_task(loop) in self.background


# -- Participants ----------------------------------------------------------------------------------------------------


class SkippingClock(SystemClock):
    """A clock that can skip time: a new controller deploys nothing before its second heartbeat interval is over."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


class Participants:
    """A controller and two replicas, in one thread with one event loop. ``address``: of the controller."""

    def __init__(self, directory: Path, tracer: Tracer) -> None:
        self._directory, self._tracer, self._clock = directory, tracer, SkippingClock()
        self._ready: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="participants", daemon=True)

    def __enter__(self) -> Participants:
        self._thread.start()
        self.address = self._ready.result(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        settings = ControllerSettings(
            heartbeat_interval_s=NEVER_S,
            follow_interval_s=NEVER_S,
            lease_s=10 * NEVER_S,
            hold_s=10 * NEVER_S,
            rpc_timeout_s=PATIENCE_S,
        )
        leads: asyncio.Future[str] = self._loop.create_future()
        ledger = Ledger(f"sqlite:///{self._directory / 'ledger.db'}")
        controlling = controller.serve(ledger, "127.0.0.1:0", settings, clock=self._clock, ready=leads, stop=self._stop)
        serving = [self._started(CONTROLLER, controlling)]
        address = await _first(leads, serving)
        for name in (SOURCE, TARGET):
            ready: asyncio.Future[Any] = self._loop.create_future()
            serving.append(self._started(name, self._replica(name, address, ready)))
            await _first(ready, serving)
        self._ready.set_result(address)
        await asyncio.gather(*serving)

    def _replica(self, name: str, address: str, ready: asyncio.Future[Any]) -> Coroutine[Any, Any, None]:
        settings = ReplicaSettings(
            heartbeat_interval_s=NEVER_S, checkpoint_interval_s=0, transfer_timeout_s=4 * NEVER_S
        )
        store = CheckpointStore(f"file://{self._directory / 'checkpoints'}")
        info = ReplicaInfo(name, name, "", 1)
        node = ReplicaNode(info, self._directory / name, settings, lease=Lease.none(), recover=False)
        node.remember(store)
        return replica.serve(
            node, "127.0.0.1:0", address, random=Random(0), checkpoints=store, ready=ready, stop=self._stop
        )

    def _started(self, name: str, program: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        context = copy_context()
        context.run(self._tracer.belongs_to, name)
        return self._loop.create_task(program, context=context)

    def settle(self, cluster: Cluster) -> None:
        """Waits until both replicas have registered. What runs by then counts as background."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(bool(each.alive) for each in cluster.status().replicas) < 2:
            assert time.monotonic() < deadline, "replicas do not register"
            time.sleep(QUIET_S)
        self._clock.skipped_s = 2 * NEVER_S

        async def tasks() -> set[asyncio.Task[Any]]:
            return asyncio.all_tasks() - {asyncio.current_task()}

        self._tracer.background |= asyncio.run_coroutine_threadsafe(tasks(), self._loop).result(PATIENCE_S)


async def _first(ready: asyncio.Future[Any], serving: list[asyncio.Task[None]]) -> Any:
    """Returns what makes a participant ready. Raises the error of one that ended instead."""
    await asyncio.wait([ready, *serving], return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        next(task for task in serving if task.done()).result()
    return await ready


# -- Walks -----------------------------------------------------------------------------------------------------------


def measured() -> dict[str, set[str]]:
    """Returns walk → files that it enters."""
    with tempfile.TemporaryDirectory() as place, _undisturbed():
        directory, tracer, walks = Path(place), Tracer(), dict[str, set[str]]()
        with tracer.installed(), Participants(directory, tracer) as participants:
            copy_context().run(_walk_in_cluster, participants, tracer, walks)
            copy_context().run(_append, directory, tracer, walks)
    return walks


def _walk_in_cluster(participants: Participants, tracer: Tracer, walks: dict[str, set[str]]) -> None:
    tracer.belongs_to(CLIENT)
    cluster = Cluster(participants.address)
    participants.settle(cluster)
    cluster.deploy(Count, PARTITIONS)
    owners = cluster.status().operators[0].owners
    here = [number for number, owner in enumerate(owners) if owner == SOURCE]
    keys = {partition_of((key,), PARTITIONS): key for key in map(str, range(100))}
    with cluster.stream(Count.__name__, "walks") as stream:
        _walk_by_row(stream, keys[here[0]], tracer, walks)
        stream.send([{"k": keys[number], "v": 1} for number in here])

        cluster.checkpoint()
        stream.send([{"k": keys[number], "v": 1} for number in here])
        walks["checkpoint, at a replica"] = _twice(tracer, cluster.checkpoint)[SOURCE]

        moving = iter(here)
        files = _twice(tracer, lambda: cluster.migrate(Count.__name__, [next(moving)], TARGET).wait())
        for participant in (CONTROLLER, SOURCE, TARGET):
            walks[f"move, at the {participant}"] = files[participant]


def _walk_by_row(stream: StreamClient, key: str, tracer: Tracer, walks: dict[str, set[str]]) -> None:
    files = _twice(tracer, lambda: stream.send([{"k": key, "v": 1}]))
    walks["row, at the client"], walks["row, at the replica"] = files[CLIENT], files[SOURCE]


def _append(directory: Path, tracer: Tracer, walks: dict[str, set[str]]) -> None:
    tracer.belongs_to("ledger")
    items = map(str, range(100))
    with Ledger(f"sqlite:///{directory / 'items.db'}") as ledger:

        def append() -> None:
            ledger.append([Entry(next(items), App("walks"), RecordState.NEW, None, {"rows": 1})])

        walks["append to the ledger"] = _twice(tracer, append)["ledger"]


def _twice(tracer: Tracer, walk: Callable[[], object]) -> dict[str, set[str]]:
    """Returns participant → files of a walk that has been done once before."""
    tracer.recorded(walk)
    return tracer.recorded(walk)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps what depends on chance out of the count, and undoes what replicas set for their whole process.

    The collector runs finalizers in whichever participant it interrupts; whether a message is formatted depends on who
    listens.
    """
    interval, thresholds, collecting = sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()
    disabled = logging.root.manager.disable
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        if collecting:
            gc.enable()


# -- The table -------------------------------------------------------------------------------------------------------


def room_of(file: str) -> str:
    """Returns the package of a file by its last name."""
    return Path(file).parent.name


def table_of(walks: Mapping[str, set[str]]) -> str:
    """Renders the walks as CONTRIBUTING.md shows them."""
    rows = [HEADER, "|---|---|---|---|\n"]
    for walk, files in walks.items():
        rooms = sorted(Counter(map(room_of, files)).items(), key=lambda room: (-room[1], room[0]))
        shown = ", ".join(f"{room} {count}" for room, count in rooms)
        rows.append(f"| {walk} | {len(files)} | {LIMITS[walk]} | {shown} |\n")
    return "".join(rows)


def table_in(page: Path = PAGE) -> str:
    """Returns the table that a page has."""
    _, header, rest = page.read_text().partition(HEADER)
    return header + rest.partition("\n\n")[0] + "\n"


def write_table(walks: Mapping[str, set[str]], page: Path = PAGE) -> None:
    page.write_text(page.read_text().replace(table_in(page), table_of(walks)))


def over_limit(walks: Mapping[str, set[str]]) -> list[str]:
    """Describes each walk that enters more files than it may."""
    return [
        f"{walk}: {len(files)} files, at most {LIMITS[walk]}: {' '.join(sorted(files))}"
        for walk, files in walks.items()
        if len(files) > LIMITS[walk]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="print the files of each walk, too")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}, too")
    asked = parser.parse_args()
    walks = measured()
    for walk, files in walks.items():
        print(f"{walk:26} {len(files):3} files, at most {LIMITS[walk]}")
        if asked.files:
            print(*(f"    {file}" for file in sorted(files)), sep="\n")
    if asked.write:
        write_table(walks)
    over = over_limit(walks)
    print(*over, sep="\n", end="\n" if over else "")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
