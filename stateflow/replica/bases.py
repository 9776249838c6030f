"""Sources of a move's base files: the source replica, or the checkpoint store when that is faster.

The speed is measured: the first large enough files try each source, then the faster one is used. Files are addressed by
digest and verified when the base is complete, so any source may send them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile
from stateflow.clock import Clock
from stateflow.errors import CheckpointCorrupt, TransferCorrupt, Unavailable
from stateflow.partition.change_feed import BaseFile
from stateflow.partition.data_directory import STORED
from stateflow.partition.environment import RateLimit
from stateflow.replica.peers import SourceReplica
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: smallest file whose transfer time tells how fast a source is
TELLING_BYTES = 256 << 10
DAMAGED_MAX = 3
#: manifests read for one partition, newest first: files that have left the newest checkpoint are in the previous one
MANIFESTS_READ = 2


class BaseSource(Protocol):
    name: str
    waited_s: float  # by its rate limit, in total

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        """Brings a file to ``path``, which may hold its beginning already. Returns False if the source lacks it.

        Raises Unavailable if the source does not answer, and the source's own errors.
        """
        ...


class Peer:
    """The move's source replica, over its Fetch stream.

    Bytes go to the file as they arrive, so that the next attempt resumes after them.

    Args:
        silence_s: the source is given up after this long without a byte. The duration of a file has no limit.
        arrived: called with the size of each piece, in bytes.
    """

    name = "peer"

    def __init__(
        self,
        source: SourceReplica,
        snapshot_id: str,
        rate_limit: RateLimit,
        clock: Clock,
        silence_s: float,
        arrived: Callable[[int], None],
    ) -> None:
        self._source, self._snapshot_id = source, snapshot_id
        self._rate_limit, self._clock = rate_limit, clock
        self._silence_s, self._arrived = silence_s, arrived
        self.waited_s = 0.0

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        for attempt in range(1, DAMAGED_MAX + 1):
            try:
                await self._stream(file, path)
                return True
            except TransferCorrupt:
                if attempt == DAMAGED_MAX:
                    raise
        raise AssertionError

    async def _stream(self, file: BaseFile, path: Path) -> None:
        begun = path.stat().st_size if path.exists() else 0
        try:
            async with aclosing(self._source.fetch(self._snapshot_id, file.name, begun)) as pieces:
                with path.open("ab") as out:
                    while (piece := await self._next(pieces)) is not None:
                        data, checksum = piece
                        if xxhash.xxh64_intdigest(data) != checksum:
                            raise _corrupt("a piece of a base file arrived damaged", file, begun)
                        if begun + len(data) > file.size:
                            raise _corrupt(f"a base file is longer than its {file.size} bytes", file, begun)
                        out.write(data)
                        begun += len(data)
                        self._arrived(len(data))
                        wait = self._rate_limit.wait_s(self._clock.monotonic(), len(data))
                        if wait:
                            self.waited_s += wait
                            await asyncio.sleep(wait)
        except TimeoutError as error:
            raise Unavailable(
                f"{self._source.address} accepted but sent no data of a base file for {self._silence_s:g} s",
                remedy="check the source replica and the network; the bytes received are kept for the next attempt",
                file=file.name,
                arrived=f"{begun} of {file.size} bytes",
            ) from error
        if begun != file.size:
            raise _corrupt(f"a base file ended before its {file.size} bytes arrived", file, begun)

    async def _next(self, pieces: AsyncIterator[tuple[bytes, int]]) -> tuple[bytes, int] | None:
        """Returns the next piece; None: there are no more. Raises TimeoutError after ``silence_s``."""
        async with asyncio.timeout(self._silence_s):  # wait_for() would keep an error and its frames in a cycle
            return await anext(pieces, None)


def _corrupt(what: str, file: BaseFile, offset: int) -> TransferCorrupt:
    return TransferCorrupt(what, remedy="the file is fetched again", file=file.name, offset=offset)


class Store:
    """The checkpoint store, with the files of the partition's newest checkpoints by digest."""

    name = "store"

    def __init__(
        self,
        checkpoints: CheckpointStore,
        partition: PartitionId,
        executor: Executor,
        rate_limit: RateLimit,
        clock: Clock,
    ) -> None:
        self._checkpoints, self._partition, self._executor = checkpoints, partition, executor
        self._rate_limit, self._clock = rate_limit, clock
        self._known: dict[str, tuple[Manifest, ManifestFile]] | None = None
        self.waited_s = 0.0

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._executor, self._fetch, file, path)
        except (Unavailable, CheckpointCorrupt) as error:
            log.warning(
                "base file %s not usable from the checkpoint store, fetching it from the source replica: %s",
                file.name,
                error,
            )
            return False
        if found and (wait := self._rate_limit.wait_s(self._clock.monotonic(), file.size)):
            self.waited_s += wait
            await asyncio.sleep(wait)
        return found

    def _fetch(self, file: BaseFile, path: Path) -> bool:
        if self._known is None:
            newest = list(itertools.islice(self._checkpoints.newest(self._partition), MANIFESTS_READ))
            self._known = {each.digest: (manifest, each) for manifest in reversed(newest) for each in manifest.files}
        if file.digest not in self._known:
            return False
        manifest, stored = self._known[file.digest]
        scratch = path.with_name(path.name + STORED)
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # a process that was killed left it
            scratch.mkdir(parents=True)
            self._checkpoints.fetch(manifest, stored, scratch / stored.name)  # no hold: if deleted, the source has it
            (scratch / stored.name).replace(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return True


@dataclass(slots=True)
class _Speed:
    bytes_: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.bytes_ / self.seconds if self.seconds > 0 else 0.0


class Nearest:
    """Chooses among sources; the last one has every file."""

    def __init__(self, sources: Sequence[BaseSource], clock: Clock) -> None:
        self._sources = list(sources)
        self._clock = clock
        self._speeds = {source.name: _Speed() for source in self._sources}
        self.fetched = {source.name: 0 for source in self._sources}

    async def fetch(self, file: BaseFile, path: Path) -> str:
        """Fetches a file from the preferred source that has it, and returns the source's name."""
        for source in self._order(file, path):
            waited, started = source.waited_s, self._clock.monotonic()
            begun = path.stat().st_size if path.exists() else 0
            if await source.fetch(file, path):
                speed = self._speeds[source.name]
                speed.bytes_ += file.size - begun
                speed.seconds += self._clock.monotonic() - started - (source.waited_s - waited)
                self.fetched[source.name] += file.size
                return source.name
        raise TransferCorrupt("no source has the base file", remedy="the transfer restarts", file=file.name)

    def _order(self, file: BaseFile, path: Path) -> list[BaseSource]:
        everything = self._sources[-1]
        if file.size < TELLING_BYTES or path.exists():  # too small to measure, or begun with the peer
            return [everything]
        unknown = [source for source in self._sources if not self._speeds[source.name].bytes_]
        if unknown:
            return [*unknown, *(source for source in self._sources if source not in unknown)]
        return sorted(self._sources, key=lambda source: -self._speeds[source.name].rate)

    @property
    def bandwidth(self) -> float:
        """Bytes a second from the peer, without the waits of its rate limit; 0: too few bytes came to tell."""
        speed = self._speeds[self._sources[-1].name]
        return speed.rate if speed.bytes_ >= TELLING_BYTES else 0.0
