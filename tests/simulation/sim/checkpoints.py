"""Concurrent restores, uploads and collections on one real :class:`CheckpointStore`, in an order that a seed decides.

Every actor runs until its next operation on the store; then the seed chooses the actor that runs next. The actors are
owners that take checkpoints, some of which do not know that they have lost the partition; successors that restore a
checkpoint (the newest or an older one, of this store or another) and then own the partition; and collections with
several retentions. Actors may die between two operations, and the store's clock may jump ahead by the life of a mark.

Three rules are checked. A restored state is the state of the checkpoint. The newest checkpoint can be restored whenever
no actor is publishing. When a successor begins to serve, the state that it restored is in the store, as its disk may be
lost at any time.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import xxhash

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, ManifestFile, Retention, collect
from stateflow.checkpoint.backend import Objects, Stored, Throttle
from stateflow.checkpoint.catalog import MARK_LIFE_S, Catalog
from stateflow.errors import CheckpointCorrupt, StateflowError
from stateflow.types import PartitionId
from tests.simulation.sim.oracle import Violation

P = PartitionId("Op", 0)
ROUNDS = 6
#: number of different contents; they are few, so that an actor uploads again content that was collected
CONTENTS = 5


class Ended(BaseException):
    """Raised in an actor's thread when its process is killed."""


class Memory:
    """A backend in memory, which outlives all actors and has its own clock."""

    piece_bytes = 0

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.now_us = 1_000_000_000

    def create(self, name: str, data: bytes) -> None:
        if name in self.objects:
            raise FileExistsError(name)
        self.now_us += 1000
        self.objects[name] = data, self.now_us

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        self.now_us += 1000
        self.objects[name] = path.read_bytes(), self.now_us

    def read(self, name: str) -> bytes:
        try:
            return self.objects[name][0]
        except KeyError:
            raise FileNotFoundError(name) from None

    def chunks(self, name: str) -> Iterator[bytes]:
        yield self.read(name)

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        file.write(self.read(name))

    def list(self, prefix: str) -> list[Stored]:
        return [Stored(n, len(d), when) for n, (d, when) in self.objects.items() if n.startswith(f"{prefix}/")]

    def stat(self, name: str) -> Stored | None:
        found = self.objects.get(name)
        return None if found is None else Stored(name, len(found[0]), found[1])

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class Actor:
    """A thread that pauses before each operation on the store until the scheduler resumes it."""

    def __init__(self, name: str, work: Callable[[Actor], None], memory: Memory) -> None:
        self.name, self.memory = name, memory
        self.go, self.still = threading.Semaphore(0), threading.Semaphore(0)
        self.killed = self.over = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()
        self.still.acquire()

    def _run(self, work: Callable[[Actor], None]) -> None:
        try:
            self.wait()
            work(self)
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - the scheduler raises it
            self.failure = error
        finally:
            self.over = True
            self.still.release()

    def wait(self) -> None:
        self.still.release()
        self.go.acquire()
        if self.killed:
            raise Ended

    def step(self) -> None:
        self.go.release()
        self.still.acquire()

    def store(self, memory: Memory | None = None) -> CheckpointStore:
        made = CheckpointStore("sim", backend=memory or self.memory, codec=Codec())
        made.objects = _InTurn(self, memory or self.memory)
        made.catalog = Catalog(made.objects, made.codec)
        return made


class _InTurn(Objects):
    def __init__(self, actor: Actor, memory: Memory) -> None:
        super().__init__(memory, "sim")
        self._actor = actor

    def _call(self, timeout_s: float, work: Any, *arguments: Any, **_: Any) -> Any:
        self._actor.wait()
        try:
            return work(*arguments)
        except Exception as error:  # noqa: BLE001 - as the real class does
            raise self._meaning(error) from None

    def download(self, name: str, file: BinaryIO, size: int) -> None:
        self._call(0.0, self._backend.download, name, file, size)


@dataclass
class Owned:
    """State that the owner has on its disk."""

    epoch: int
    sequence: int
    content: int


class World:
    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(f"{seed}:checkpoints")
        self.folder = folder
        self.memory, self.elsewhere = Memory(), Memory()
        self.history: dict[tuple[int, int], int] = {}  # (epoch, sequence) → content, for all states ever owned
        self.current = Owned(1, 0, 0)
        self.granted = 1
        self.restored = self.collected = self.refused = self.killed = 0
        self._files = 0
        self.history[1, 0] = 0

    # -- actions -------------------------------------------------------------------------------------------

    def directory(self, content: int) -> Path:
        self._files += 1
        directory = self.folder / f"d{self._files}"
        directory.mkdir()
        (directory / "a").write_text(f"content {content}")
        return directory

    def manifest(self, owned: Owned, directory: Path) -> Manifest:
        data = (directory / "a").read_bytes()
        file = ManifestFile("a", len(data), xxhash.xxh3_128_hexdigest(data))
        where = {"s": owned.content}
        return Manifest("Op", 0, owned.epoch, owned.sequence, "", where, 0, "r", (file,), partitions=1, key=("k",))

    def owner(self, actor: Actor) -> None:
        """Takes a few checkpoints of the state that this actor owns, or believes that it owns.

        The actor changes the state only while it really owns it.
        """
        owned = replace(self.current)
        for _ in range(self.random.randint(1, 4)):
            if self.current.epoch == owned.epoch:
                owned = replace(owned, sequence=owned.sequence + 1, content=self.random.randrange(CONTENTS))
                self.history[owned.epoch, owned.sequence] = owned.content
                self.current = replace(owned)
            directory = self.directory(owned.content)
            try:
                actor.store().save(self.manifest(owned, directory), directory)
            except StateflowError:
                self.refused += 1

    def restorer(self, actor: Actor) -> None:
        """Restores the newest or an older checkpoint, of this store or another, and becomes the owner."""
        foreign = self.random.random() < 0.3
        source = actor.store(self.elsewhere if foreign else self.memory)
        own = actor.store()
        back = self.random.choice((0, 0, 1, 2))
        try:
            found = list(source.newest(P))
        except StateflowError:
            return
        for manifest in found[min(back, len(found) - 1) :] if found else ():
            self._files += 1
            directory = self.folder / f"d{self._files}"
            try:
                source.restore(manifest, directory)
                adoption = own.adopt(manifest, directory)
            except CheckpointCorrupt:
                continue  # the checkpoint was collected
            except StateflowError:
                return
            content = int((directory / "a").read_text().split()[1])
            if content != manifest.positions["s"]:
                raise Violation(f"{manifest.order} was restored to {content}")
            self.granted += 1
            epoch = self.granted
            try:
                adoption.publish(epoch, actor.name)
            except StateflowError:
                self.refused += 1
                return
            if epoch > self.current.epoch:  # this actor serves from here on
                self.current = Owned(epoch, manifest.sequence, content)
                self.history[epoch, manifest.sequence] = content
                self.restored += 1
                self.check_newest()
            adoption.release()
            return

    def collector(self, actor: Actor) -> None:
        try:
            report = collect(actor.store(), Retention(keep=self.random.choice((1, 1, 2))))
            self.collected += report.blobs_deleted
        except StateflowError:
            self.refused += 1

    # -- invariants ----------------------------------------------------------------------------------------

    def check_newest(self) -> None:
        """Checks that the newest checkpoint can be restored, and is at least as new as the owner's epoch.

        Raises Violation.
        """
        here = CheckpointStore("sim", backend=self.memory, codec=Codec())
        here.objects = _Quiet(self.memory)
        here.catalog = Catalog(here.objects, here.codec)
        newest = next(here.newest(P), None)
        if newest is None:
            if len(self.history) > 1 and self.current.epoch > 1:
                raise Violation("there is no checkpoint although something was restored")
            return
        if newest.epoch < self.current.epoch:
            raise Violation(f"epoch {self.current.epoch} is served, and the newest checkpoint is {newest.order}")
        self._files += 1
        directory = self.folder / f"d{self._files}"
        try:
            here.restore(newest, directory)
        except CheckpointCorrupt as error:
            raise Violation(f"the newest checkpoint {newest.order} cannot be restored: {error}") from error
        if int((directory / "a").read_text().split()[1]) != newest.positions["s"]:
            raise Violation(f"the newest checkpoint {newest.order} is not what it was")

    # -- running -------------------------------------------------------------------------------------------

    def run(self) -> None:
        random = self.random
        for memory in (self.memory, self.elsewhere):
            self._drain([Actor("setup", partial(self._first, memory), memory)])
        works = [("owner", self.owner), ("restore", self.restorer), ("gc", self.collector)]
        for _ in range(ROUNDS):
            kinds = random.choices(works, k=random.randint(2, 5))
            self._drain([Actor(name, work, self.memory) for name, work in kinds], random.random() < 0.5)
            self.check_newest()

    def _first(self, memory: Memory, actor: Actor) -> None:
        store = actor.store(memory)
        store.check(first_use=True)
        directory = self.directory(0)
        store.save(self.manifest(Owned(1, 0, 0), directory), directory)

    def _drain(self, actors: list[Actor], faults: bool = False) -> None:
        random = self.random
        left = list(actors)
        try:
            while left:
                actor = random.choice(left)
                if faults and random.random() < 0.005:
                    actor.killed = True
                    self.killed += 1
                if faults and random.random() < 0.03:
                    self.memory.now_us += int((MARK_LIFE_S + 1) * 1e6)
                for _ in range(random.choice((1, 1, 2, 8))):
                    if not actor.over:
                        actor.step()
                if actor.over:
                    left.remove(actor)
                    if actor.failure is not None:
                        raise actor.failure
        finally:
            for actor in left:
                actor.killed = True
                while not actor.over:
                    actor.step()


class _Quiet(Objects):
    def __init__(self, memory: Memory) -> None:
        super().__init__(memory, "sim")

    def _call(self, timeout_s: float, work: Any, *arguments: Any, **_: Any) -> Any:
        return work(*arguments)

    def create(self, name: str, data: bytes) -> None:
        """Creates no object: a check only reads."""

    def delete(self, name: str) -> None: ...

    def download(self, name: str, file: BinaryIO, size: int) -> None:
        self._backend.download(name, file, size)


def simulate(seed: int) -> World:
    """Runs a seed in a temporary folder, and returns its world. Raises Violation."""
    folder = Path(tempfile.mkdtemp(prefix="stateflow-sim-"))
    logging.disable(logging.CRITICAL)
    world = World(seed, folder)
    try:
        world.run()
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)
    return world
