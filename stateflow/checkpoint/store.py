"""Checkpoint store: a save uploads missing blobs and then publishes; a restore verifies every file.

A save writes a lease, uploads and publishes, and starts over if the lease is gone before or after the publication. To
publish a checkpoint is to create one object, its manifest. The name of the manifest orders it by (epoch, sequence), and
an existing name is never written again, so that neither a repeated nor a late upload changes what others read.

A restore reports a file (:class:`Fetching`) only when it is written, verified by its digest and, if it is to be
durable, on disk. The new owner of a partition publishes an adopted checkpoint as its first one (:class:`Adoption`).

Collections (:mod:`stateflow.checkpoint.collecting`) may run at any time. Leases (:mod:`stateflow.checkpoint.catalog`)
keep them from deleting blobs that are being uploaded, read or adopted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from stateflow.checkpoint.backend import (
    TEMPORARY,
    TIMEOUT_S,
    Backend,
    Objects,
    SiteCache,
    Stored,
    Throttle,
    is_full,
    open_backend,
    place_of,
    write_whole,
)
from stateflow.checkpoint.catalog import (
    BLOBS,
    CONDEMNED,
    Catalog,
    Known,
    Lease,
    Manifest,
    ManifestFile,
    another,
    blob_name,
    corrupt,
    folder_of,
    incomplete,
    make_marker,
    manifest_name,
    missing,
    no_savepoint,
    read_marker,
    savepoint_place,
    stale,
    suffix_of,
)
from stateflow.checkpoint.codec import Codec, configured_key
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.durable import sync
from stateflow.errors import (
    CheckpointCorrupt,
    InvalidArgument,
    StaleCheckpoint,
    StateflowError,
    Unavailable,
)
from stateflow.private import masked
from stateflow.types import PartitionId, check_name

log = logging.getLogger(__name__)
#: maximum of attempts at an upload whose lease a collection removed
ATTEMPTS = 3
RESTORE_THREADS = 4
#: errors that do not go away with time
_NEVER = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
#: bytes hashed at a time, few enough to stay in a core's cache
HASHED_BYTES = 256 << 10
#: context that is entered when a file is written and left when it is verified; it syncs the file, for example
Written = Callable[[Path], AbstractContextManager[None]]


def in_memory(_: Path) -> AbstractContextManager[None]:
    """A ``Written`` that does nothing, for files that need not survive power loss."""
    return nullcontext()


class Fetching:
    """Fetches files of checkpoints from one store.

    Args:
        cache: a site's copies, tried before the store; None: no cache.
    """

    def __init__(self, objects: Objects, codec: Codec, cache: SiteCache | None) -> None:
        self._objects, self._codec, self._cache = objects, codec, cache

    def fetch(self, manifest: Manifest, file: ManifestFile, path: Path, written: Written = in_memory) -> None:
        """Fetches one file of a checkpoint and verifies it by its digest. Raises CheckpointCorrupt, Unavailable.

        Args:
            written: context that is entered once the file is written, and left before it counts as fetched.
        """
        try:
            if self._cache is not None and self._cache.get(file.digest, path):
                with written(path):
                    return
        except OSError as error:
            raise no_room(error, path.parent) from error
        try:
            found = (self._copy if self._codec.is_plain(file.blob) else self._decode)(file, path, written)
        except FileNotFoundError as error:
            raise corrupt(manifest, file, "is missing") from error
        except CheckpointCorrupt as error:
            raise corrupt(manifest, file, "cannot be decoded") from error
        if found != (file.size, file.digest):
            raise corrupt(manifest, file, "does not match its size and digest")
        if self._cache is not None:
            self._cache.put(file.digest, path)

    def _check_whole(self, file: ManifestFile, read: int) -> None:
        """Checks that a blob of which too little was read is really too short. Raises Unavailable if the store has more
        of it: an older checkpoint must not be taken because of one incomplete answer."""
        stored = self._objects.stat(f"{BLOBS}/{file.blob}")
        if stored is not None and read < stored.size:
            raise incomplete(file.blob, read, stored.size, self._objects.url)

    def _copy(self, file: ManifestFile, path: Path, written: Written) -> tuple[int, str]:
        """Copies a plain blob; returns size and digest of the copy.

        The kernel copies the blob. Then the copy is hashed in pieces that stay in a core's cache, while the disk writes
        it. Passing the data through Python would cost another copy.
        """
        with _opened(path) as out:
            try:
                self._objects.download(f"{BLOBS}/{file.blob}", out, file.size)
            except Unavailable as error:
                if is_full(error.__cause__):
                    raise no_room(error.__cause__, path.parent) from error
                raise
        hasher, size, piece = xxhash.xxh3_128(), 0, memoryview(bytearray(HASHED_BYTES))
        with written(path), path.open("rb", buffering=0) as copied:
            while count := copied.readinto(piece):
                hasher.update(piece[:count])
                size += count
        if size < file.size:
            self._check_whole(file, size)
        return size, hasher.hexdigest()

    def _decode(self, file: ManifestFile, path: Path, written: Written) -> tuple[int, str]:
        hasher, size, read = xxhash.xxh3_128(), 0, 0

        def encoded() -> Iterator[bytes]:
            nonlocal read
            for data in self._objects.chunks(f"{BLOBS}/{file.blob}"):
                read += len(data)
                yield data

        with _opened(path) as out:
            try:
                for data in self._codec.decode(encoded(), file.blob):
                    hasher.update(data)
                    size += len(data)
                    if size > file.size:  # wrong content, of any length
                        break
                    try:
                        write_whole(out, data)
                    except OSError as error:
                        raise no_room(error, path.parent) from error
            except CheckpointCorrupt:
                self._check_whole(file, read)
                raise
        if size < file.size:
            self._check_whole(file, read)
        with written(path):
            return size, hasher.hexdigest()


def _opened(path: Path) -> FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:  # raised as no_room: a FileNotFoundError would pass for a missing blob
        raise no_room(error, path.parent) from error


@contextmanager
def synced(disk: Executor, path: Path) -> Iterator[None]:
    syncing = disk.submit(sync, path)
    yield
    syncing.result()


def no_room(error: OSError, directory: Path) -> Unavailable:
    return Unavailable(
        f"cannot write to the local disk: {error.strerror or error}",
        remedy="check that the directory is writable and has free space, then try again",
        path=directory,
    )


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of a save. ``bytes_new`` of ``bytes_total`` were uploaded; both count plain content."""

    manifest: Manifest
    bytes_new: int
    bytes_total: int


class CheckpointStore:
    """Checkpoints and savepoints in one place. Thread-safe.

    Args:
        url: a directory or any fsspec URL.
        codec: by default no compression, encrypted when STATEFLOW_CHECKPOINT_KEY is set.
        cache: a site's copies of blobs in front of the store.
        create: make the directory when it does not exist.
        backend: used instead of the one that the URL names.
        options: passed to fsspec.

    Raises InvalidArgument, ExtraMissing; every method raises Unavailable when the store fails or does not answer.
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
        self.url = masked(url)
        self.place = self.url if backend is not None else masked(place_of(url))
        self.codec = codec or Codec(key=configured_key())
        self.cache = cache
        self.clock = clock
        self.objects = Objects(backend or open_backend(url, create=create, **options), self.url, timeout_s)
        self.catalog = Catalog(self.objects, self.codec)
        self._create = create
        self._id = ""
        self._note: Path | None = None
        self._keep: Callable[[Known], None] = lambda _: None
        self._warned = False

    # -- which store it is ----------------------------------------------------------------------------------

    def remember(self, known: Known | None, keep: Callable[[Known], None], note: Path) -> None:
        """Accepts only the store that was used before. No store is created in place of a missing one.

        Args:
            known: the store used before; None: no store was.
            keep: called when the store is used for the first time, with a record to store. Pass this record as
                ``known`` the next time.
            note: file in which ``keep`` stores the record; errors name the file.
        """
        self._note, self._keep = note, keep
        if known is not None:
            self._create = False
            if known.place == self.place:
                self._id = known.id

    def check(self, *, first_use: bool = False) -> str:
        """Checks that the store exists and is still the same one, and returns its id.

        Operations on the whole store begin with this check.

        Args:
            first_use: make the marker of a store that was never used before.

        Raises CheckpointStoreMissing, CheckpointCorrupt for a marker that cannot be read.
        """
        found = read_marker(self.objects)
        if found is None and first_use and self._create and not self._id:
            found = make_marker(self.objects)
            log.info("checkpoint store %s created in %s", found, self.url)
        if found is None:
            raise missing(self.url)
        if found != self._id:
            if self._id:
                raise another(self.url, found, self._id, self._note)
            self._keep(Known(self.place, found))
            self._id = found
        return found

    def check_writable(self) -> None:
        """Writes and deletes a probe object.

        Raises InvalidArgument for a place that can never be written, Unavailable if writing fails this time.
        """
        probe = f"{TEMPORARY}/{uuid.uuid4().hex}"
        try:
            self.check(first_use=True)
            self.objects.create_own(probe, b"")
            self.objects.delete(probe)
        except (Unavailable, FileNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, Unavailable) else error
            if not isinstance(cause, _NEVER) and getattr(cause, "errno", None) != errno.EROFS:
                raise
            raise InvalidArgument(
                f"checkpoints cannot be stored at this URL: {getattr(cause, 'strerror', None) or cause}",
                remedy="name a writable directory or fsspec URL",
                url=self.url,
            ) from error

    # -- saving -------------------------------------------------------------------------------------------

    def save(
        self, manifest: Manifest, directory: Path, *, savepoint: str = "", throttle: Throttle = lambda _: None
    ) -> Saved:
        """Uploads the files of ``directory`` that the store lacks, then publishes the checkpoint.

        Args:
            savepoint: keep the checkpoint under this name too, until the savepoint is deleted; empty: do not.

        Raises StaleCheckpoint if the store has a newer checkpoint of the partition, or another state at the same epoch
        and sequence; InvalidArgument for an invalid savepoint name. To save the same checkpoint again is no error.
        """
        if savepoint:
            check_name("savepoint", savepoint)
        self.check(first_use=True)
        there = self._free_place(manifest)
        if isinstance(there, Saved) and not savepoint:
            return there

        def publish(whole: Manifest, again: bool) -> None:
            place = self._free_place(manifest, again=True) if again else there
            if not isinstance(place, Saved):
                self._publish(whole, place)
            if savepoint:
                self._keep_as(whole, savepoint, again)

        earlier = next(self.catalog.newest(manifest.id), None)
        return self._secure(manifest, directory, earlier, throttle, publish)

    def _secure(
        self,
        manifest: Manifest,
        directory: Path,
        earlier: Manifest | None,
        throttle: Throttle,
        publish: Callable[[Manifest, bool], None],
    ) -> Saved:
        """Uploads and publishes, and makes sure that no garbage collection took this process for dead.

        Args:
            publish: called with the manifest of the uploaded blobs, and whether an earlier attempt must be published
                again, with other blobs.
        """
        uploaded = 0
        for again in range(ATTEMPTS):
            with self._lease(manifest) as lease:
                files, new = self._upload(manifest, directory, earlier, throttle)
                uploaded += new
                whole = replace(manifest, files=files)
                if not lease.stands():
                    continue
                with lease.publishing():
                    publish(whole, again > 0)
                if lease.stands():
                    return Saved(whole, uploaded, whole.size)
        raise Unavailable(
            "garbage collections repeatedly took this upload for abandoned",
            remedy="use a nearer store or more bandwidth, and check the store's clock; the checkpoint is taken again",
            url=self.url,
        )

    def _lease(self, manifest: Manifest) -> Lease:
        return Lease(self.objects, (file.digest for file in manifest.files))

    @contextmanager
    def leased(self, manifest: Manifest) -> Iterator[None]:
        """Protects the blobs that a manifest names from collections.

        If no lease can be written (no permission, no space), the blobs may be collected while they are read. The read
        then raises an error; it never returns incomplete data.
        """
        try:
            lease = self._lease(manifest)
        except Unavailable as error:
            if not self._warned:
                log.warning("checkpoint store: no lease written, blobs may be deleted while they are read: %s", error)
            self._warned = True
            yield
            return
        with lease:
            yield

    def _free_place(self, manifest: Manifest, *, again: bool = False) -> int | Saved:
        """Returns the first free attempt of the manifest, or the checkpoint if the store has it with all its blobs.

        Raises StaleCheckpoint. ``again``: return no existing checkpoint, because its blobs may have been collected.
        """
        attempt = 0
        for found in self.catalog.checkpoints(manifest.id):
            if found.order > manifest.order:
                raise stale(manifest, found.order)
            if found.order < manifest.order:
                break
            attempt = max(attempt, found.attempt + 1)
            try:
                there = self.catalog.read(found)
            except (CheckpointCorrupt, FileNotFoundError):
                continue
            if not there.is_same_state(manifest):
                raise stale(manifest, found.order)
            if there.stopped_us < manifest.stopped_us:  # a takeover from it would accept the refused clients again
                continue
            if not again and self.catalog.has_blobs(there):
                return Saved(there, 0, there.size)
        return attempt

    def _upload(
        self, manifest: Manifest, directory: Path, earlier: Manifest | None, throttle: Throttle
    ) -> tuple[tuple[ManifestFile, ...], int]:
        marks = self.catalog.marks(CONDEMNED)
        trusted = all(mark.names is not None for mark in marks)  # a torn mark could condemn any blob
        condemned = frozenset[str]().union(*(mark.names or () for mark in marks))
        suffix = self.codec.suffix
        known = {f.digest: f.blob for f in (earlier.files if earlier else ()) if suffix_of(f.blob) == suffix}
        here: dict[str, str] = {}
        new = 0
        files = []
        for file in manifest.files:
            if file.digest not in here:
                blob = known.get(file.digest) or blob_name(file.digest, suffix)
                if not trusted or blob in condemned:
                    blob = self._generation_of(file)
                named = known.get(file.digest) == blob
                here[file.digest], uploaded = self._put(blob, file, directory / file.name, throttle, named=named)
                new += file.size if uploaded else 0
            if self.cache is not None:
                self.cache.put(file.digest, directory / file.name)
            files.append(replace(file, blob=here[file.digest]))
        return tuple(files), new

    def _put(self, blob: str, file: ManifestFile, path: Path, throttle: Throttle, *, named: bool) -> tuple[str, bool]:
        """Uploads a blob unless the store has it, judging by its size. Returns its name, and whether it was uploaded.

        Args:
            named: a manifest of this store names the blob, so that it was completely uploaded before.
        """
        stored = self.objects.stat(f"{BLOBS}/{blob}")
        if not self.codec.suffix:
            if stored is not None and stored.size == file.size:
                return blob, False
            self.objects.upload(f"{BLOBS}/{blob}", path, throttle)
            return blob, True
        if stored is not None and named:
            return blob, False
        encoded = path.with_name(path.name + ".encoded")
        try:
            try:
                with path.open("rb", buffering=0) as source, encoded.open("wb") as out:
                    for data in self.codec.encode(iter(lambda: source.read(1 << 20), b"")):
                        out.write(data)
            except OSError as error:
                raise no_room(error, path.parent) from error
            if stored is not None:
                if stored.size == encoded.stat().st_size:
                    return blob, False
                # the blob is torn, or was compressed by another version, and others may rely on it
                blob = self._generation_of(file)
            self.objects.upload(f"{BLOBS}/{blob}", encoded, throttle)
        finally:
            encoded.unlink(missing_ok=True)
        return blob, True

    def _generation_of(self, file: ManifestFile) -> str:
        """Returns a new blob name for the same content."""
        return blob_name(file.digest, f"{self.codec.suffix}.g{uuid.uuid4().hex[:8]}")

    def _publish(self, manifest: Manifest, attempt: int) -> None:
        for _ in range(ATTEMPTS):
            name = f"{folder_of(manifest.id)}/{manifest_name(manifest.order, attempt)}"
            with contextlib.suppress(FileExistsError):  # another process was faster, or an answer was lost
                self.objects.create(name, self.codec.seal(manifest.encode()))
                return
            there = self._free_place(manifest)
            if isinstance(there, Saved):
                return
            attempt = there
        raise stale(manifest, manifest.order)

    # -- savepoints ---------------------------------------------------------------------------------------

    def adopt(self, manifest: Manifest, directory: Path) -> Adoption:
        """Makes the blobs of a checkpoint, of this store or another, available in this one.

        Missing and condemned blobs are uploaded from ``directory``, which has all of its files. The partition's new
        owner then publishes the adoption.
        """
        self.check(first_use=True)
        lease = self._lease(manifest)
        try:
            earlier = manifest if not self.codec.suffix or self.catalog.has_manifest(manifest) else None
            files, _ = self._upload(manifest, directory, earlier, lambda _: None)
        except BaseException:
            lease.release()
            raise
        return Adoption(self, replace(manifest, files=files), lease)

    def _keep_as(self, manifest: Manifest, savepoint: str, again: bool = False) -> None:
        place = savepoint_place(savepoint, manifest.id)
        try:
            self.objects.create(place, self.codec.seal(manifest.encode()))
        except FileExistsError as error:
            there = Manifest.decode(self.codec.unseal(self.objects.read(place), place), place)
            if not there.is_same_state(manifest):
                raise StaleCheckpoint(
                    f"savepoint {savepoint} already exists with another state of {manifest.id}",
                    remedy="use another name, or delete it first",
                    url=self.url,
                ) from error
            # otherwise a restore could fail, or accept clients that were refused
            if again or there.stopped_us < manifest.stopped_us or not self.catalog.has_blobs(there):
                whole = replace(manifest, stopped_us=max(manifest.stopped_us, there.stopped_us))
                # replaced at once: a kill behind a deletion would lose the savepoint
                with tempfile.TemporaryDirectory(prefix="stateflow-savepoint-") as folder:
                    path = Path(folder) / "manifest"
                    try:
                        path.write_bytes(self.codec.seal(whole.encode()))
                    except OSError as full:
                        raise no_room(full, path.parent) from full
                    self.objects.upload(place, path, lambda _: None)

    def savepoints(self) -> dict[str, list[PartitionId]]:
        """Returns the partitions of each savepoint, by its name."""
        self.check()
        names: dict[str, list[PartitionId]] = {}
        for found in self.catalog.savepoints():
            names.setdefault(found.savepoint, []).append(found.partition)
        return names

    def savepoint(
        self, name: str, operator: str | None = None, partitions: Collection[int] | None = None
    ) -> list[Manifest]:
        """Returns the manifests of a savepoint, of one operator or all, and of some partitions or all.

        No other manifests are read. Raises InvalidArgument, and CheckpointMissing if there is no such savepoint, or it
        lacks partitions, wanted or not.
        """
        self.check()
        listed = [each for each in self.catalog.savepoints(name) if operator in (None, each.partition.operator)]
        wanted = [each for each in listed if partitions is None or each.partition.partition in partitions]
        try:
            manifests = [self.catalog.read(each) for each in wanted or listed[:1]]  # any one knows how many there are
        except FileNotFoundError as error:  # the savepoint was deleted since it was listed
            raise no_savepoint(name, self.url, operator) from error
        expected = {PartitionId(each.operator, number) for each in manifests for number in range(each.partitions)}
        missing = sorted(expected - {each.partition for each in listed})
        if not manifests or missing:
            raise no_savepoint(name, self.url, operator, [each.partition for each in missing])
        return manifests if wanted else []

    def delete_savepoint(self, name: str) -> int:
        """Deletes a savepoint and returns how many partitions it had. Raises InvalidArgument, CheckpointMissing.

        The next collection removes its blobs.
        """
        self.check()
        if not (found := self.catalog.savepoints(name)):
            raise no_savepoint(name, self.url)
        for each in found:
            self.objects.delete(each.name)
        return len(found)

    def export(self, savepoint: str, to: CheckpointStore) -> int:
        """Copies a savepoint and its blobs to another store, in that store's encoding. Returns the bytes copied.

        Every file is verified by its digest. Raises InvalidArgument, CheckpointMissing before it writes anything.
        """
        manifests = self.savepoint(savepoint)
        if to.check(first_use=True) == self.check():
            raise InvalidArgument(
                "source and target store are the same", remedy="name another store with --to", url=self.url
            )
        copied = 0
        for manifest in manifests:
            with tempfile.TemporaryDirectory(prefix="stateflow-export-") as folder:
                directory = Path(folder) / "files"
                self.restore(manifest, directory)
                saved = to._secure(
                    manifest, directory, None, lambda _: None, lambda made, again: to._keep_as(made, savepoint, again)
                )
                copied += saved.bytes_new
        return copied

    # -- reading ------------------------------------------------------------------------------------------

    def newest(self, partition: PartitionId, passed_over: list[StateflowError] | None = None) -> Iterator[Manifest]:
        """Yields readable checkpoints of a partition, newest first; see :meth:`Catalog.newest`."""
        self.check()
        return self.catalog.newest(partition, passed_over)

    def has(self, manifest: Manifest) -> bool:
        """Returns whether the store still has a checkpoint. False: it was collected."""
        return any(found.order == manifest.order for found in self.catalog.checkpoints(manifest.id))

    def blobs(self) -> list[Stored]:
        return self.objects.list(BLOBS)

    def restore(self, manifest: Manifest, directory: Path, *, durable: bool = False) -> None:
        """Writes the files of a checkpoint to a directory and verifies each by its digest.

        Args:
            durable: the files survive power loss when this returns.

        Raises CheckpointCorrupt if a blob is missing or wrong; the directory must then not be used.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.check_room(manifest, directory)

        with (
            self.leased(manifest),
            ThreadPoolExecutor(RESTORE_THREADS, thread_name_prefix="syncing") as disk,
            ThreadPoolExecutor(RESTORE_THREADS, thread_name_prefix="restore") as pool,
        ):
            written: Written = partial(synced, disk) if durable else in_memory

            def one(file: ManifestFile) -> None:
                self.fetch(manifest, file, directory / file.name, written)

            for done in [pool.submit(one, file) for file in manifest.files]:
                done.result()

    @staticmethod
    def check_room(manifest: Manifest, directory: Path) -> None:
        """Checks before a restore that the disk has room for it. Raises Unavailable."""
        free = shutil.disk_usage(directory).free
        if manifest.size > free:
            raise Unavailable(
                f"the checkpoint has {manifest.size} bytes, {free} are free",
                remedy="free space there and try again",
                path=directory,
                partition=manifest.id,
            )

    def fetch(self, manifest: Manifest, file: ManifestFile, path: Path, written: Written = in_memory) -> None:
        """Fetches one file of a checkpoint and verifies it by its digest. Raises CheckpointCorrupt, Unavailable.

        Args:
            written: context that is entered once the file is written, and left before it counts as fetched.
        """
        Fetching(self.objects, self.codec, self.cache).fetch(manifest, file, path, written)


class Adoption:
    """A checkpoint whose blobs are in a store, protected by a lease until :meth:`release`. The partition's new owner
    publishes the checkpoint before that."""

    def __init__(self, store: CheckpointStore, manifest: Manifest, lease: Lease) -> None:
        self.url = store.url
        self._store, self._manifest, self._lease = store, manifest, lease

    def publish(self, epoch: int, replica: str) -> None:
        """Durably publishes the checkpoint as the new owner\'s first. No older one can become the newest after that.

        The call may be repeated. Raises StaleCheckpoint if a later owner was faster, or if the blobs may have been
        collected; in the latter case, adopt the checkpoint again.
        """
        store = self._store
        store.check()
        manifest = replace(self._manifest, epoch=epoch, replica=replica, created_us=store.clock.now_us())
        self._check_stands()
        place = store._free_place(manifest)
        if not isinstance(place, Saved):
            with self._lease.publishing():
                store._publish(manifest, place)
        self._check_stands()

    def _check_stands(self) -> None:
        if not self._lease.stands():
            raise StaleCheckpoint(
                "the lease on the fetched blobs is gone, they may have been collected",
                remedy="none needed: the checkpoint is fetched again",
                partition=self._manifest.id,
            )

    def release(self) -> None:
        self._lease.release()

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
