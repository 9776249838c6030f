"""Checkpoint store: upload what is missing, publish last; restore what is proved.

Publication is one exclusive new object. Its name orders it by (epoch, sequence), and a name that is taken is not
written again, so that neither a repeated nor a late upload changes what others read.

Collecting (:mod:`stateflow.checkpoint.collecting`) may run at any time. An upload first says which digests it relies
on, then reads which blobs are condemned; a collection condemns first and then reads what uploads rely on. Whichever
came second sees the other: the upload stores a condemned blob again under a name of its own, the collection spares
what an upload relies on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from stateflow.checkpoint.backend import Backend, Stored, Throttle
from stateflow.checkpoint.cache import SiteCache
from stateflow.checkpoint.catalog import BLOBS, CONDEMNED, INTENTS, TEMPORARY, Catalog, folder_of, savepoint_place
from stateflow.checkpoint.codec import Codec, key_from_environment
from stateflow.checkpoint.manifest import Manifest, ManifestFile, blob_name, manifest_name
from stateflow.checkpoint.objects import FULL, TIMEOUT_S, Objects, open_backend
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    InvalidArgument,
    StaleCheckpoint,
    StateflowError,
    Unavailable,
)
from stateflow.types import PartitionId, check_name

log = logging.getLogger(__name__)
#: marks older than this are of processes that died; no upload may take longer
MARK_LIFE_S = 24 * 3600.0
RESTORE_THREADS = 4
#: a file is hashed in pieces that stay in a core's cache
HASHED_BYTES = 256 << 10
#: what no waiting mends
_NEVER = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True, slots=True)
class Saved:
    """``bytes_new`` were uploaded, of ``bytes_total``; both of plain content."""

    manifest: Manifest
    bytes_new: int
    bytes_total: int


class CheckpointStore:
    """Thread-safe.

    Args:
        url: a directory or any fsspec URL.
        codec: by default no compression, encrypted when STATEFLOW_CHECKPOINT_KEY is set.
        cache: a site's copies of blobs in front of the store.
        create: make the directory when it is not there.
        backend: instead of what the URL names.
        options: for fsspec.

    Raises InvalidArgument, ExtraMissing; every method raises Unavailable when the store fails or is silent.
    """

    def __init__(
        self,
        url: str,
        *,
        codec: Codec | None = None,
        cache: SiteCache | None = None,
        create: bool = True,
        timeout_s: float = TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        backend: Backend | None = None,
        **options: Any,
    ) -> None:
        self.url = url
        self.codec = codec or Codec(key=key_from_environment())
        self.cache = cache
        self.clock = clock
        self.objects = Objects(backend or open_backend(url, create=create, **options), url, timeout_s)
        self.catalog = Catalog(self.objects, self.codec)

    def check_writable(self) -> None:
        """Raises InvalidArgument for a place where nothing can ever be written, Unavailable when it fails today."""
        probe = f"{TEMPORARY}/{uuid.uuid4().hex}"
        try:
            self.objects.create(probe, b"")
            self.objects.delete(probe)
        except (Unavailable, FileNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, Unavailable) else error
            if not isinstance(cause, _NEVER) and getattr(cause, "errno", None) != errno.EROFS:
                raise
            raise InvalidArgument(
                f"checkpoints cannot be kept there: {getattr(cause, 'strerror', None) or cause}",
                remedy="name a writable directory or fsspec URL",
                url=self.url,
            ) from error

    # -- saving -------------------------------------------------------------------------------------------

    def save(
        self, manifest: Manifest, directory: Path, *, savepoint: str = "", throttle: Throttle = lambda _: None
    ) -> Saved:
        """Upload what is missing of ``directory``, then publish.

        Args:
            savepoint: keep it under this name too, until that is deleted.

        Raises StaleCheckpoint unless it is the newest; when it is there already that is no error.
        """
        attempt = self._free_place(manifest)
        if isinstance(attempt, Saved):
            if savepoint:
                self.keep(attempt.manifest, savepoint)
            return attempt
        started = self.clock.monotonic()
        intent = self._intend(file.digest for file in manifest.files)
        try:
            earlier = next(self.catalog.newest(manifest.id), None)
            files, new = self._upload(manifest, directory, earlier, throttle)
            manifest = replace(manifest, files=files)
            self._check_age(started)
            self._publish(manifest, attempt)
            if savepoint:
                self._keep(manifest, savepoint)
        finally:
            self._forget(intent)
        return Saved(manifest, new, manifest.size)

    def _free_place(self, manifest: Manifest) -> int | Saved:
        """The first free attempt at its name, or what is there already, whole. Raises StaleCheckpoint."""
        attempt = 0
        for found in self.catalog.checkpoints(manifest.id):
            if found.order > manifest.order:
                raise _stale(manifest, found.order)
            if found.order < manifest.order:
                break
            attempt = max(attempt, found.attempt + 1)
            try:
                there = self.catalog.read(found)
            except (CheckpointCorrupt, FileNotFoundError):
                continue
            if not there.is_same_state(manifest):
                raise _stale(manifest, found.order)
            if all(self.objects.stat(f"{BLOBS}/{file.blob}") for file in there.files):
                return Saved(there, 0, there.size)
        return attempt

    def _upload(
        self, manifest: Manifest, directory: Path, earlier: Manifest | None, throttle: Throttle
    ) -> tuple[tuple[ManifestFile, ...], int]:
        marks = self.catalog.marks(CONDEMNED)
        trusted = all(mark.names is not None for mark in marks)  # a torn mark could condemn anything
        condemned = frozenset[str]().union(*(mark.names or () for mark in marks))
        suffix = self.codec.suffix
        known = {f.digest: f.blob for f in (earlier.files if earlier else ()) if self._suffix_of(f.blob) == suffix}
        here: dict[str, str] = {}
        new = 0
        files = []
        for file in manifest.files:
            blob = here.get(file.digest) or known.get(file.digest) or blob_name(file.digest, suffix)
            if not trusted or blob in condemned:
                blob = blob_name(file.digest, f"{suffix}.g{uuid.uuid4().hex[:8]}")
            if file.digest not in here and not self._has(blob, file):
                self._put(blob, directory / file.name, throttle)
                new += file.size
            here[file.digest] = blob
            if self.cache is not None:
                self.cache.put(file.digest, directory / file.name)
            files.append(replace(file, blob=blob))
        return tuple(files), new

    @staticmethod
    def _suffix_of(blob: str) -> str:
        """Of its name, without the generation."""
        _, *how = blob.rpartition("/")[2].split(".")
        return "".join(f".{part}" for part in how if not part.startswith("g"))

    def _has(self, blob: str, file: ManifestFile) -> bool:
        """Whether it is there, as far as its size tells; sizes of encoded ones tell nothing."""
        stored = self.objects.stat(f"{BLOBS}/{blob}")
        return stored is not None and (bool(self.codec.suffix) or stored.size == file.size)

    def _put(self, blob: str, path: Path, throttle: Throttle) -> None:
        name = f"{BLOBS}/{blob}"
        if not self.codec.suffix:
            self.objects.upload(name, path, throttle)
            return
        encoded = path.with_name(path.name + ".encoded")
        try:
            try:
                with path.open("rb", buffering=0) as source, encoded.open("wb") as out:
                    for data in self.codec.encode(iter(lambda: source.read(1 << 20), b"")):
                        out.write(data)
            except OSError as error:
                raise _no_room(error, path.parent) from error
            self.objects.upload(name, encoded, throttle)
        finally:
            encoded.unlink(missing_ok=True)

    def _intend(self, digests: Iterable[str]) -> str:
        name = f"{INTENTS}/{uuid.uuid4().hex}.json"
        self.objects.create(name, json.dumps(sorted(set(digests))).encode())
        return name

    def _forget(self, intent: str) -> None:
        try:
            self.objects.delete(intent)
        except (Unavailable, FileNotFoundError) as error:
            log.warning("an upload's mark stays for a day: %s", error)

    def _check_age(self, started: float) -> None:
        if self.clock.monotonic() - started > MARK_LIFE_S / 2:
            raise Unavailable(
                "the upload took too long to be sure that its blobs are still there",
                remedy="it is taken again; use a nearer store or more bandwidth",
                url=self.url,
            )

    def _publish(self, manifest: Manifest, attempt: int) -> None:
        name = f"{folder_of(manifest.id)}/{manifest_name(manifest.order, attempt)}"
        try:
            self.objects.create(name, self.codec.seal(manifest.encode()))
        except FileExistsError as error:  # somebody was faster, or an answer was lost
            there = self._free_place(manifest)
            if not isinstance(there, Saved):
                raise _stale(manifest, manifest.order) from error

    # -- savepoints ---------------------------------------------------------------------------------------

    def keep(self, manifest: Manifest, savepoint: str) -> None:
        """Make a published checkpoint part of a savepoint. Raises StaleCheckpoint when that has another one of it."""
        intent = self._intend(file.digest for file in manifest.files)
        try:
            self._keep(manifest, savepoint)
        finally:
            self._forget(intent)

    def adopt(self, manifest: Manifest, epoch: int, replica: str) -> None:
        """Publish a checkpoint once more as its new owner's first: nothing older can become the newest from here on.

        Raises StaleCheckpoint when a later owner was faster.
        """
        manifest = replace(manifest, epoch=epoch, replica=replica, created_us=self.clock.now_us())
        attempt = self._free_place(manifest)
        if isinstance(attempt, Saved):
            return
        intent = self._intend(file.digest for file in manifest.files)
        try:
            self._publish(manifest, attempt)
        finally:
            self._forget(intent)

    def _keep(self, manifest: Manifest, savepoint: str) -> None:
        place = savepoint_place(check_name("savepoint", savepoint), manifest.id)
        try:
            self.objects.create(place, self.codec.seal(manifest.encode()))
        except FileExistsError as error:
            there = Manifest.decode(self.codec.unseal(self.objects.read(place), place), place)
            if not there.is_same_state(manifest):
                raise StaleCheckpoint(
                    f"savepoint {savepoint} is there already, with another state of {manifest.id}",
                    remedy="use another name, or delete it first",
                    url=self.url,
                ) from error

    def savepoints(self) -> dict[str, list[PartitionId]]:
        """Partitions by savepoint."""
        names: dict[str, list[PartitionId]] = {}
        for found in self.catalog.savepoints():
            names.setdefault(found.savepoint, []).append(found.partition)
        return names

    def savepoint(self, name: str, operator: str | None = None) -> list[Manifest]:
        """Raises CheckpointMissing when there is none of that name, or not all partitions are in it."""
        found = [each for each in self.catalog.savepoints(name) if operator in (None, each.partition.operator)]
        manifests = [self.catalog.read(each) for each in found]
        expected = {(m.operator, p) for m in manifests for p in range(m.partitions)}
        missing = sorted(expected - {(m.operator, m.partition) for m in manifests})
        if not manifests or missing:
            raise CheckpointMissing(
                f"savepoint {name!r} lacks partitions {[p for _, p in missing]}"
                if missing
                else f"no savepoint {name!r}",
                remedy="see `stateflow savepoint list`",
                url=self.url,
                operator=operator,
            )
        return manifests

    def delete_savepoint(self, name: str) -> int:
        """How many partitions it had; its blobs go with the next collection. Raises CheckpointMissing."""
        found = self.catalog.savepoints(name)
        if not found:
            raise CheckpointMissing(f"no savepoint {name!r}", remedy="see `stateflow savepoint list`", url=self.url)
        for each in found:
            self.objects.delete(each.name)
        return len(found)

    def export(self, savepoint: str, to: CheckpointStore) -> int:
        """A savepoint and its blobs into another store, in that one's encoding; bytes copied. Every file is proved."""
        copied = 0
        for manifest in self.savepoint(savepoint):
            with tempfile.TemporaryDirectory(prefix="stateflow-export-") as folder:
                directory = Path(folder) / "files"
                self.restore(manifest, directory)
                intent = to._intend(file.digest for file in manifest.files)
                try:
                    files, new = to._upload(manifest, directory, None, lambda _: None)
                    to._keep(replace(manifest, files=files), savepoint)
                finally:
                    to._forget(intent)
                copied += new
        return copied

    # -- reading ------------------------------------------------------------------------------------------

    def newest(self, partition: PartitionId, passed_over: list[StateflowError] | None = None) -> Iterator[Manifest]:
        """Readable checkpoints of a partition, newest first; see :meth:`Catalog.newest`."""
        return self.catalog.newest(partition, passed_over)

    def blobs(self) -> list[Stored]:
        return self.objects.list(BLOBS)

    def restore(self, manifest: Manifest, directory: Path, *, durable: bool = False) -> None:
        """The files of a checkpoint into a directory, each proved by its digest.

        Args:
            durable: they survive power loss when this returns.

        Raises CheckpointCorrupt when a blob is missing or wrong; the directory is then not to be used.
        """
        directory.mkdir(parents=True, exist_ok=True)

        def one(file: ManifestFile) -> None:
            self.fetch(manifest, file, directory / file.name)
            if durable:
                _sync(directory / file.name)

        with ThreadPoolExecutor(RESTORE_THREADS, thread_name_prefix="restore") as pool:
            for done in [pool.submit(one, file) for file in manifest.files]:
                done.result()

    def fetch(self, manifest: Manifest, file: ManifestFile, path: Path) -> None:
        """One file of a checkpoint, proved by its digest. Raises CheckpointCorrupt."""
        try:
            if self.cache is not None and self.cache.get(file.digest, path):
                return
        except OSError as error:
            raise _no_room(error, path.parent) from error
        try:
            found = (self._copy if self.codec.is_plain(file.blob) else self._decode)(file, path)
        except FileNotFoundError as error:
            raise _corrupt(manifest, file, "is missing") from error
        except CheckpointCorrupt as error:
            raise _corrupt(manifest, file, "cannot be decoded") from error
        if found != (file.size, file.digest):
            raise _corrupt(manifest, file, "has other content than it should")
        if self.cache is not None:
            self.cache.put(file.digest, path)

    def _copy(self, file: ManifestFile, path: Path) -> tuple[int, str]:
        """Size and digest of what is in the file now: copied by the kernel, then read in pieces that stay in a core's
        cache. Passing it through Python costs another copy."""
        with _opened(path) as out:
            try:
                self.objects.download(f"{BLOBS}/{file.blob}", out, file.size)
            except Unavailable as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
                    raise _no_room(error.__cause__, path.parent) from error
                raise
        hasher, size, piece = xxhash.xxh3_128(), 0, memoryview(bytearray(HASHED_BYTES))
        with path.open("rb", buffering=0) as written:
            while count := written.readinto(piece):
                hasher.update(piece[:count])
                size += count
        return size, hasher.hexdigest()

    def _decode(self, file: ManifestFile, path: Path) -> tuple[int, str]:
        hasher, size = xxhash.xxh3_128(), 0
        with _opened(path) as out:
            for data in self.codec.decode(self.objects.chunks(f"{BLOBS}/{file.blob}"), file.blob):
                hasher.update(data)
                size += len(data)
                try:
                    out.write(data)
                except OSError as error:
                    raise _no_room(error, path.parent) from error
        return size, hasher.hexdigest()


def _opened(path: Path) -> FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:  # not a blob that is missing
        raise _no_room(error, path.parent) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stale(manifest: Manifest, there: tuple[int, int]) -> StaleCheckpoint:
    return StaleCheckpoint(
        f"checkpoint {there} is there, {manifest.order} is not newer",
        remedy="restore that one, or give this cluster a checkpoint URL of its own"
        if there[0] > manifest.epoch
        else "nothing to do",
        operator=manifest.operator,
        partition=manifest.partition,
    )


def _corrupt(manifest: Manifest, file: ManifestFile, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"blob {file.blob} ({file.name}) {what}",
        remedy="restore an older checkpoint",
        operator=manifest.operator,
        partition=manifest.partition,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
    )


def _no_room(error: OSError, directory: Path) -> Unavailable:
    return Unavailable(
        f"the local disk refuses: {error.strerror or error}", remedy="free space there and try again", path=directory
    )
