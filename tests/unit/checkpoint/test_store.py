"""The checkpoint store: content-addressed, newest by name, and torn or damaged objects are found."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile, Retention, SiteCache
from stateflow.checkpoint.backend import Backend, FsspecBackend, LocalBackend, Objects, Throttle
from stateflow.checkpoint.catalog import MARK_LIFE_S, Found, Mark, blob_name, digest_of, manifest_name, parse_name
from stateflow.checkpoint.codec import KEY_VARIABLE, Codec, configured_key
from stateflow.checkpoint.collecting import collect, is_dead, to_drop, to_sweep, whose_turn
from stateflow.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointNewer,
    ExtraMissing,
    InvalidArgument,
    StateflowError,
    Unavailable,
    WrongKey,
)
from stateflow.partition.change_feed import FileDigests, base_digest
from stateflow.storage import RocksEngine, RocksStore
from stateflow.types import PartitionId
from tests.contract.backends import Counting, P, Silent, Torn, Wrapper, content_of, manifest_of, small

COUNT = 20_000


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "checkpoints"))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksEngine(8 << 20, 8 << 20).open(tmp_path / "db", create=True)
    store.apply(Mutations(puts=[(b"%06d" % n, b"value %d" % n * 5) for n in range(COUNT)]))
    yield store
    store.close()


def saved(store: CheckpointStore, directory: Path, epoch: int = 1, sequence: int = 1) -> Manifest:
    return store.save(manifest_of(directory, epoch, sequence), directory).manifest


def blobs(store: CheckpointStore) -> dict[str, Path]:
    return {path.name: path for path in Path(store.url).glob("blobs/*/*")}


def test_restore_equals(checkpoints: CheckpointStore, db: RocksStore, tmp_path: Path) -> None:
    db.snapshot(tmp_path / "snapshot")
    content = dict(db.scan(b""))
    manifest = saved(checkpoints, tmp_path / "snapshot", sequence=7)
    db.apply(Mutations(clears=[(b"0", b"9")]))
    (newest,) = checkpoints.newest(P)
    assert newest == manifest
    checkpoints.restore(newest, tmp_path / "restored")
    restored = RocksEngine(8 << 20, 8 << 20).open(tmp_path / "restored")
    assert dict(restored.scan(b"")) == content
    assert len(content) == COUNT
    restored.close()
    files = FileDigests().files(tmp_path / "snapshot")
    assert base_digest(files, 7) == newest.digest, "what was uploaded is what was hashed"


def test_unchanged_files_are_not_uploaded_again(checkpoints: CheckpointStore, db: RocksStore, tmp_path: Path) -> None:
    db.snapshot(tmp_path / "one")
    first = checkpoints.save(manifest_of(tmp_path / "one", sequence=1), tmp_path / "one")
    assert first.bytes_new == first.bytes_total == sum(file.size for file in first.manifest.files)
    sst = {file.digest for file in first.manifest.files if file.name.endswith(".sst")}
    assert sst
    times = {digest: blobs(checkpoints)[digest].stat().st_mtime_ns for digest in sst}
    db.apply(Mutations(puts=[(b"one more", b"x")]))
    db.snapshot(tmp_path / "two")
    second = checkpoints.save(manifest_of(tmp_path / "two", sequence=2), tmp_path / "two")
    assert sst < {file.digest for file in second.manifest.files}
    assert 0 < second.bytes_new < second.bytes_total / 5
    assert second.bytes_total > first.bytes_total * 0.9
    assert {digest: blobs(checkpoints)[digest].stat().st_mtime_ns for digest in sst} == times
    for manifest in checkpoints.newest(P):  # both checkpoints can be restored
        checkpoints.restore(manifest, tmp_path / f"restored-{manifest.sequence}")


def test_of_two_savers_at_once_the_one_that_refuses_more_clients_publishes_too(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, directory = CheckpointStore(checkpoints.url), small(tmp_path, f="1")
    manifest, real, raced = manifest_of(directory), checkpoints.objects.create, list[str]()

    def create(name: str, data: bytes) -> None:
        if name.startswith("manifests/") and not raced:
            raced.append(name)
            other.save(manifest, directory)
        real(name, data)

    monkeypatch.setattr(checkpoints.objects, "create", create)
    checkpoints.save(replace(manifest, stopped_us=7), directory)
    assert raced
    assert [each.stopped_us for each in checkpoints.newest(P)] == [7, 0]


def test_a_savepoint_that_is_made_again_refuses_the_clients_that_are_refused_by_then(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    directory = small(tmp_path, f="1")
    manifest = manifest_of(directory, partitions=1, partition=PartitionId("Op", 0))
    checkpoints.save(manifest, directory, savepoint="s")
    checkpoints.save(replace(manifest, stopped_us=7), directory, savepoint="s")
    assert [each.stopped_us for each in checkpoints.savepoint("s")] == [7]
    checkpoints.save(replace(manifest, stopped_us=3), directory, savepoint="s")
    assert [each.stopped_us for each in checkpoints.savepoint("s")] == [7]


@pytest.mark.parametrize("kind", ["directory", "memory"])
@pytest.mark.parametrize(
    "name", ["", ".", "..", "year-end/", "year-end/Op", "./year-end", "year-end/../golden", "year~1"]
)
def test_what_is_not_the_name_of_a_savepoint_names_none(kind: str, name: str, tmp_path: Path) -> None:
    """An invalid name is refused. It used to stand for all savepoints, or for one operator in a savepoint."""
    store = CheckpointStore(f"memory://{tmp_path}" if kind == "memory" else str(tmp_path / "store"), codec=Codec())
    other = CheckpointStore(str(tmp_path / "other"), codec=Codec())
    directory = small(tmp_path, a="x")
    for partition, kept in enumerate(("year-end", "year-end-2", "golden")):
        manifest = manifest_of(directory, partition=PartitionId("Op", partition))
        store.save(manifest, directory, savepoint=kept)
    there = store.savepoints()
    for use in (store.savepoint, store.delete_savepoint, store.catalog.savepoints, lambda it: store.export(it, other)):
        with pytest.raises(InvalidArgument, match="is not a valid savepoint name: use letters, digits"):
            use(name)
    if name:
        with pytest.raises(InvalidArgument, match="is not a valid savepoint name"):
            other.save(manifest, directory, savepoint=name)
    assert store.savepoints() == there
    assert not (tmp_path / "other").exists(), "nothing is written first"
    assert [each.partition for each in store.savepoint("year-end")] == [0]


def test_a_savepoint_lacks_what_is_not_listed_whichever_partitions_are_wanted(tmp_path: Path) -> None:
    backend = Counting(LocalBackend(tmp_path / "store"))
    store, directory = CheckpointStore("x", backend=backend, codec=Codec()), small(tmp_path, a="x")
    for number in (0, 1, 3):
        store.save(manifest_of(directory, partition=PartitionId("Op", number), partitions=4), directory, savepoint="s")
    for wanted in ([0], [2], [0, 3], [7], None):
        backend.done.clear()
        with pytest.raises(CheckpointMissing, match=r"savepoint 's' lacks partitions \[2\]"):
            store.savepoint("s", "Op", wanted)
        read = [name for operation, name in backend.done if operation == "read" and name.startswith("savepoints/")]
        assert len(read) == (3 if wanted is None else len(wanted))
    store.save(manifest_of(directory, partition=PartitionId("Op", 2), partitions=4), directory, savepoint="s")
    assert [each.partition for each in store.savepoint("s", "Op", [1, 2])] == [1, 2]
    assert store.savepoint("s", "Op", [7]) == []
    with pytest.raises(CheckpointMissing, match="no savepoint 's'"):
        store.savepoint("s", "Other", [1])


def test_a_savepoint_that_is_made_again_names_the_blobs_that_are_there(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    directory = small(tmp_path, f="1")
    manifest = manifest_of(directory, partitions=1, partition=PartitionId("Op", 0))
    first = checkpoints.save(manifest, directory, savepoint="s").manifest
    kept = Path(checkpoints.url) / "blobs" / first.files[0].blob
    content = kept.read_bytes()
    kept.unlink()
    kept.with_name(kept.name + ".g1").write_bytes(content)
    again = replace(first, files=(replace(first.files[0], blob=first.files[0].blob + ".g1"),))
    checkpoints._keep_as(again, "s")
    (named,) = checkpoints.savepoint("s")
    checkpoints.restore(named, tmp_path / "restored")


def manifest_path(store: CheckpointStore) -> Path:
    return max(Path(store.url).glob("manifests/Op/p00003/*.json"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data.replace(b"edge-0", b"edge-1"),
        lambda data: data.replace(b'sequence\\": 2', b'sequence\\": 9'),
        lambda data: b"[]",
        lambda data: b"null",
        lambda data: b"7",
        lambda data: b'{"body": 7, "checksum": "x"}',
        lambda data: b'{"body": null, "checksum": null}',
        lambda data: b"\xff\xfe\x00",
        lambda data: bytes(len(data)),
    ],
)
def test_a_torn_manifest_is_passed_over(checkpoints: CheckpointStore, tmp_path: Path, damage: Any) -> None:
    good = saved(checkpoints, small(tmp_path, f="1"), 1, 1)
    torn = saved(checkpoints, small(tmp_path, f="2"), 1, 2)
    path = manifest_path(checkpoints)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert list(checkpoints.newest(P)) == [good]
    with pytest.raises(CheckpointCorrupt) as caught:
        Manifest.decode(path.read_bytes(), "here")
    assert caught.value.where["place"] == "here"
    passed_over: list[StateflowError] = []
    assert next(checkpoints.newest(P, passed_over)) == good
    assert [error.code for error in passed_over] == ["checkpoint_corrupt"]
    again = saved(checkpoints, small(tmp_path, f="2"), 1, 2)
    assert again == torn, "a torn one does not hinder"
    assert list(checkpoints.newest(P)) == [again, good]


def test_a_format_of_a_newer_program_is_refused(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """A newer format is refused: falling back to an older checkpoint would lose what the newer one has."""
    saved(checkpoints, small(tmp_path, f="1"), 1, 1)
    saved(checkpoints, small(tmp_path, f="2"), 1, 2)
    path = manifest_path(checkpoints)
    body = json.dumps({**json.loads(json.loads(path.read_bytes())["body"]), "format": 99})
    path.write_text(json.dumps({"body": body, "checksum": xxhash.xxh3_128_hexdigest(body.encode())}))
    with pytest.raises(CheckpointNewer, match="format 99"):
        next(checkpoints.newest(P))


def test_a_manifest_of_the_first_format_is_read(tmp_path: Path) -> None:
    body = json.dumps(
        {
            "format": 1,
            "operator": "Op",
            "partition": 3,
            "epoch": 1,
            "sequence": 2,
            "digest": "d",
            "positions": {"s": 2},
            "created_us": 5,
            "replica": "r",
            "files": [{"name": "a", "size": 1, "digest": "abcd"}],
        }
    )
    data = json.dumps({"body": body, "checksum": xxhash.xxh3_128_hexdigest(body.encode())}).encode()
    manifest = Manifest.decode(data, "x")
    assert manifest.files == (ManifestFile("a", 1, "abcd", "ab/abcd"),)
    assert (manifest.order, manifest.watermark_us, manifest.partitions) == ((1, 2), None, 0)


def test_a_file_name_cannot_lead_elsewhere(tmp_path: Path) -> None:
    for name in ("../x", "/etc/passwd", "a/b", "", ".", ".."):
        manifest = Manifest("Op", 3, 1, 1, "d", {}, 0, "r", (ManifestFile(name, 1, "ab", "ab/ab"),))
        with pytest.raises(CheckpointCorrupt):
            Manifest.decode(manifest.encode(), "x")


def test_a_corrupt_blob_is_found(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    manifest = saved(checkpoints, small(tmp_path, a="aaaa", b="bbbb"))
    bad = next(file for file in manifest.files if file.name == "b")
    blobs(checkpoints)[bad.digest].write_text("bbbx")
    with pytest.raises(CheckpointCorrupt, match="does not match its size and digest") as caught:
        checkpoints.restore(manifest, tmp_path / "restored")
    assert bad.digest in caught.value.what
    assert caught.value.where == {"operator": "Op", "partition": 3, "epoch": 1, "sequence": 1}


def test_a_missing_blob_is_found(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    manifest = saved(checkpoints, small(tmp_path, a="aaaa"))
    blobs(checkpoints)[manifest.files[0].digest].unlink()
    with pytest.raises(CheckpointCorrupt, match="is missing"):
        checkpoints.restore(manifest, tmp_path / "restored")


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["compressed", "encrypted"])
def test_a_torn_encoded_blob_is_not_taken_for_there(tmp_path: Path, key: bytes | None) -> None:
    """A torn encoded blob is uploaded again, on a store whose put is not atomic.

    The plain size tells nothing about an encoded blob, so any size used to count as complete, for ever.
    """
    torn = Torn(LocalBackend(tmp_path / "store"), 0, tmp_path)
    store = CheckpointStore("test", backend=torn, codec=Codec("zstd", key))
    saved(store, small(tmp_path, a="a" * 999), sequence=1)
    directory = small(tmp_path, a="a" * 999, b="b" * 999)
    torn.left = 2  # writes of the save: its hold, then the blob
    with pytest.raises(Unavailable):
        saved(store, directory, sequence=2)
    whole = {file.blob for file in next(store.newest(P)).files}
    (half,) = {stored.name.removeprefix("blobs/") for stored in store.blobs()} - whole
    manifest = saved(store, directory, sequence=2)
    assert half not in {file.blob for file in manifest.files}
    store.restore(manifest, tmp_path / "restored")
    assert content_of(tmp_path / "restored") == content_of(directory)
    count = len(store.blobs())
    other = store.save(manifest_of(directory, partition=PartitionId("Op", 4)), directory)
    assert (len(store.blobs()), other.bytes_new) == (count + 1, 999), "what is whole is not uploaded once more"


def test_two_files_of_one_content_are_one_blob_beside_a_torn_mark(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Two files of one content share one blob.

    The second file used to be given another name, under which nothing was uploaded.
    """
    saved(checkpoints, small(tmp_path, a="x"), sequence=1)
    checkpoints.objects.create("condemned/torn.json", b'["torn')
    directory = small(tmp_path, a="same", b="same")
    checkpoints.restore(saved(checkpoints, directory, sequence=2), tmp_path / "restored")
    assert content_of(tmp_path / "restored") == content_of(directory)


def test_a_blob_that_is_uploaded_again_is_never_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second upload of a blob replaces it atomically.

    It used to be unlinked and linked anew: a process killed in between left other checkpoints without their blob.
    """
    backend, path = LocalBackend(tmp_path / "store"), tmp_path / "blob"
    path.write_text("torn")
    backend.upload("blobs/ab/abcd", path, lambda _: None)
    path.write_text("whole")
    link, linked = Path.hardlink_to, []

    def killed(self: Path, target: Path) -> None:
        linked.append(self)
        if len(linked) == 2:
            raise KeyboardInterrupt
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", killed)
    with contextlib.suppress(KeyboardInterrupt):
        backend.upload("blobs/ab/abcd", path, lambda _: None)
    assert backend.read("blobs/ab/abcd") == b"whole"
    assert [stored.name for stored in backend.list("")] == ["blobs/ab/abcd"]


@pytest.mark.parametrize("operation", ["create", "upload"])
def test_the_folders_of_an_object_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Every new folder on the way to an object has its entry synced, in its parent."""
    synced: list[Path] = []
    monkeypatch.setattr("stateflow.checkpoint.backend._sync_folder", synced.append)
    (tmp_path / "content").write_bytes(b"")
    store = LocalBackend(tmp_path / "new" / "store")
    if operation == "create":
        store.create("manifests/Op/object", b"")
    else:
        store.upload("manifests/Op/object", tmp_path / "content", lambda _: None)
    assert {*store.root.parents[:2], store.root, store.root / "manifests", store.root / "manifests/Op"} <= {*synced}


class Overtaken(Wrapper):
    """A backend in which a collection removes all leases once a savepoint was created, and which then checks before
    each operation that the savepoint is there."""

    savepoint = ""
    repeated = 0

    def before(self, operation: str, name: str) -> None:
        if self.savepoint:
            self.repeated += name == self.savepoint
            assert self.inner.stat(self.savepoint) is not None, (operation, name)

    def after(self, operation: str, name: str) -> None:
        if operation == "create" and name.startswith("savepoints/") and not self.savepoint:
            self.savepoint = name
            for lease in self.inner.list("intents"):
                self.inner.delete(lease.name)
            for blob in self.inner.list("blobs"):
                self.inner.delete(blob.name)


def test_a_savepoint_that_is_published_again_is_never_away(tmp_path: Path) -> None:
    """A savepoint whose blobs a collection removed is replaced, and not deleted first, where a kill would lose it."""
    backend = Overtaken(LocalBackend(tmp_path / "store"))
    store = CheckpointStore("overtaken://", backend=backend, codec=Codec())
    directory = small(tmp_path, f="1")
    store.save(manifest_of(directory, partition=PartitionId("Op", 0)), directory, savepoint="kept")
    assert backend.repeated
    (manifest,) = store.savepoint("kept")
    store.restore(manifest, tmp_path / "restored")


class Incomplete(Wrapper):
    """A store that answers the first read of an object in this folder with a few bytes, and no error."""

    def __init__(self, inner: Backend, folder: str) -> None:
        super().__init__(inner)
        self._folder, self._left = folder, 1

    def _cut(self, name: str) -> bool:
        cut = self._left > 0 and name.startswith(self._folder)
        self._left -= cut
        return cut

    def read(self, name: str) -> bytes:
        return self.inner.read(name)[: 5 if self._cut(name) else None]

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        self.inner.download(name, file, expected)
        if self._cut(name):
            file.truncate(5)

    def chunks(self, name: str) -> Iterator[bytes]:
        whole = b"".join(self.inner.chunks(name))
        yield whole[: -5 if self._cut(name) else None]


@pytest.mark.parametrize("codec", [Codec(), Codec("zstd"), Codec(key=bytes(32)), Codec("zstd", bytes(32))])
@pytest.mark.parametrize("folder", ["manifests", "blobs"])
def test_an_incomplete_answer_does_not_make_a_checkpoint_damaged(tmp_path: Path, folder: str, codec: Codec) -> None:
    """A restore must not fall back to an older checkpoint because of it."""
    kept = LocalBackend(tmp_path / "far")
    saved(CheckpointStore("far", backend=kept, codec=codec), small(tmp_path, a="the older"), 1, 1)
    newest = saved(CheckpointStore("far", backend=kept, codec=codec), small(tmp_path, a="the newer"), 1, 2)
    store = CheckpointStore("far", backend=Incomplete(kept, folder), codec=codec)
    with pytest.raises(Unavailable, match=r"returned [0-9]+ of the [0-9]+ bytes"):
        store.restore(next(store.newest(P)), tmp_path / "first")
    assert next(store.newest(P)) == newest
    store.restore(newest, tmp_path / "second")
    assert content_of(tmp_path / "second") == {"a": b"the newer"}


class Repeating(Wrapper):
    """A store whose answers to ``create`` are lost. Its client repeats the call, which finds the object."""

    def after(self, operation: str, name: str) -> None:
        if operation == "create":
            raise FileExistsError(name)


def test_an_object_that_a_client_creates_twice_is_its_own(tmp_path: Path) -> None:
    store = CheckpointStore("far", backend=Repeating(LocalBackend(tmp_path / "far")))
    store.check_writable()
    for sequence in (1, 2, 3):
        directory = small(tmp_path, a=f"state {sequence}")
        manifest = store.save(manifest_of(directory, 1, sequence), directory, savepoint=f"s{sequence}").manifest
    store.delete_savepoint("s1")
    report = collect(store, Retention(1))
    assert (report.checkpoints_dropped, report.blobs_deleted) == (2, 1)
    store.restore(manifest, tmp_path / "restored")
    assert content_of(tmp_path / "restored") == {"a": b"state 3"}
    assert [path for folder in ("intents", "condemned", "tmp") for path in (tmp_path / "far" / folder).iterdir()] == []


class Deleting(Wrapper):
    """A store in which someone else deletes savepoints as soon as they are listed."""

    def after(self, operation: str, name: str) -> None:
        if operation == "list":
            for each in self.inner.list("savepoints"):
                self.inner.delete(each.name)


def test_a_savepoint_that_is_deleted_while_it_is_read_is_missing(tmp_path: Path) -> None:
    """The error was a bare FileNotFoundError."""
    directory = small(tmp_path, a="state")
    CheckpointStore(str(tmp_path / "cp")).save(manifest_of(directory, 1, 1), directory, savepoint="s")
    store = CheckpointStore("far", backend=Deleting(LocalBackend(tmp_path / "cp")))
    with pytest.raises(CheckpointMissing, match="no savepoint 's'"):
        store.savepoint("s")


class Late(Wrapper):
    """A store that gets a manifest in this folder only when :meth:`arrive` is called. Its writer got no answer."""

    def __init__(self, inner: Backend, folder: str) -> None:
        super().__init__(inner)
        self._folder, self._sent = folder, dict[str, bytes]()

    def create(self, name: str, data: bytes) -> None:
        if name.startswith(self._folder):
            self._sent[name] = data
            raise TimeoutError
        self.inner.create(name, data)

    def arrive(self) -> None:
        for name, data in self._sent.items():
            self.inner.create(name, data)


@pytest.mark.parametrize("way", ["save", "savepoint", "export", "adopt"])
def test_a_manifest_that_arrives_late_names_blobs_that_are_there(tmp_path: Path, way: str) -> None:
    """A publication without an answer may be carried out later, and a collection may run before that."""
    inner = LocalBackend(tmp_path / "store")
    late = Late(inner, "savepoints/" if way in ("savepoint", "export") else "manifests/")
    store, sound = (CheckpointStore("test", backend=backend, codec=Codec()) for backend in (late, inner))
    elsewhere = CheckpointStore(str(tmp_path / "elsewhere"))
    directory = small(tmp_path, a="state")
    manifest = manifest_of(directory, partition=PartitionId("Op", 0))
    elsewhere.save(manifest, directory, savepoint="s")
    with pytest.raises(Unavailable):
        if way == "export":
            elsewhere.export("s", store)
        elif way == "adopt":
            with store.adopt(manifest, directory) as adoption:
                adoption.publish(2, "edge-1")
        else:
            store.save(manifest, directory, savepoint="s" if way == "savepoint" else "")
    for found in sound.catalog.checkpoints():  # a savepoint must stand without the checkpoint
        sound.objects.delete(found.name)
    collect(sound, Retention(keep=1))
    late.arrive()
    (made,) = sound.newest(manifest.id) if late.list("manifests") else sound.savepoint("s")
    sound.restore(made, tmp_path / "restored")
    assert content_of(tmp_path / "restored") == {"a": b"state"}


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Lets no file grow beyond ``size`` bytes: a write that crosses it stores only a part, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("way", ["plain", "fsspec", "zstd", "cache"])
def test_a_file_that_is_cut_off_by_a_full_disk_is_no_checkpoint(tmp_path: Path, way: str) -> None:
    """A write to a disk that becomes full stores the beginning of its data, without an error."""
    content = "0" * 100_000
    cache = SiteCache(tmp_path / "cache", 1 << 20) if way == "cache" else None
    url = f"memory://{tmp_path.name}-full" if way == "fsspec" else str(tmp_path / "checkpoints")
    store = CheckpointStore(url, codec=Codec("zstd" if way == "zstd" else "none"), cache=cache)
    manifest = saved(store, small(tmp_path, a=content))
    with files_end_at(60_000), pytest.raises(Unavailable, match="cannot write to the local disk"):
        store.restore(manifest, tmp_path / "restored")
    store.restore(manifest, tmp_path / "again")
    assert content_of(tmp_path / "again") == {"a": content.encode()}


def test_a_cache_of_another_user_is_read_and_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(str(tmp_path / "checkpoints"), cache=SiteCache(tmp_path / "cache", 1 << 20))
    manifest = saved(store, small(tmp_path, a="aaaa"))

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refused)
    store.restore(manifest, tmp_path / "cached")
    [cached] = (tmp_path / "cache").glob("*/*")
    cached.unlink()
    cached.mkdir()  # cannot be read, as a file without rights or on a failing disk
    store.restore(manifest, tmp_path / "fetched")
    assert content_of(tmp_path / "cached") == content_of(tmp_path / "fetched") == {"a": b"aaaa"}


def test_a_cache_on_a_file_system_that_became_read_only_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path / "checkpoints"), cache=SiteCache(tmp_path / "cache", 1 << 20))
    unlink = Path.unlink

    def read_only(path: Path, missing_ok: bool = False) -> None:
        if tmp_path / "cache" in path.parents:  # Linux refuses this before it looks for the file
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(path, missing_ok)

    monkeypatch.setattr(shutil, "copyfile", lambda _, to: read_only(to))
    monkeypatch.setattr(Path, "unlink", read_only)
    manifest = saved(store, small(tmp_path, a="aaaa"))
    store.restore(manifest, tmp_path / "restored")
    assert content_of(tmp_path / "restored") == {"a": b"aaaa"}


class Kept:
    """A site's cache of 1600 bytes, with the number of times that a process listed its directory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.listed, self._number = folder / "cache", 0, 0
        self._source, rglob = folder / "source", Path.rglob

        def counted(path: Path, pattern: str) -> Iterator[Path]:
            self.listed += 1
            return rglob(path, pattern)

        monkeypatch.setattr(Path, "rglob", counted)

    def opened(self) -> SiteCache:
        return SiteCache(self.folder, 1600)

    def put(self, cache: SiteCache, size: int = 10) -> str:
        self._number += 1
        self._source.write_bytes(b"%010d" % self._number + bytes(size - 10))
        digest = xxhash.xxh3_128_hexdigest(self._source.read_bytes())
        cache.put(digest, self._source)
        return digest

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*/*"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch)


def test_a_cache_is_listed_only_now_and_then(kept: Kept) -> None:
    """A listing of ten thousand files takes longer than all else that stores one."""
    cache = kept.opened()
    for _ in range(150):
        kept.put(cache)
    assert kept.listed <= 15, "a sixteenth of its limit is ten files"
    for _ in range(150):
        kept.put(cache)
        assert kept.bytes() <= 1600
    assert kept.listed <= 35, "a cache that is full is listed no more often"
    assert kept.bytes() >= 1500


def test_a_file_as_large_as_the_cache_is_kept(kept: Kept, tmp_path: Path) -> None:
    cache = kept.opened()
    for _ in range(5):
        kept.put(cache)
    assert cache.get(kept.put(cache, size=1600), tmp_path / "got")


def test_a_cache_that_two_processes_share_keeps_its_limit(kept: Kept) -> None:
    caches = kept.opened(), kept.opened()
    for number in range(600):
        kept.put(caches[number % 2])
        assert kept.bytes() <= 1600 + 1600 // 16, "each knows of what the other stored a sixteenth later"
    kept.put(kept.opened())
    assert kept.bytes() <= 1600, "what was there at its start counts"


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="it is empty"):  # and not the working directory
        CheckpointStore("")
    with pytest.raises(InvalidArgument):
        CheckpointStore(str(tmp_path / "file" / "below"))
    with pytest.raises((InvalidArgument, ExtraMissing)):
        CheckpointStore("nosuchprotocol://bucket/x")


class Filled(Wrapper):
    """A store on a disk that has room for this number of bytes."""

    room = 1 << 30

    def _take(self, size: int) -> None:
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size

    def create(self, name: str, data: bytes) -> None:
        self._take(len(data))
        self.inner.create(name, data)

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        self._take(path.stat().st_size)
        self.inner.upload(name, path, throttle)

    def delete(self, name: str) -> None:
        stored = self.inner.stat(name)
        self.room += stored.size if stored else 0
        self.inner.delete(name)


def test_a_full_store_is_collected(tmp_path: Path) -> None:
    """A probe of the clock and the mark of a collection need room, and the error of a full store says to collect."""
    backend = Filled(LocalBackend(tmp_path / "store"))
    store = CheckpointStore("full", backend=backend, codec=Codec())
    for sequence in range(1, 10):
        newest = saved(store, small(tmp_path, a=f"state {sequence}", b="the same"), sequence=sequence)
    expired_us = store.catalog.checkpoints()[0].modified_us - int(MARK_LIFE_S * 1e6)
    for name, when_us in (("dead", expired_us - 60_000_000), ("live", expired_us + 60_000_000)):
        store.objects.create(f"intents/{name}.json", b"[]")
        os.utime(tmp_path / "store" / f"intents/{name}.json", ns=(0, when_us * 1000))
    backend.room = 0
    with pytest.raises(Unavailable, match="No space left") as caught:
        saved(store, small(tmp_path, a="another"), sequence=10)
    assert "stateflow checkpoint gc" in caught.value.remedy
    assert collect(store, Retention(1, age_s=3600), dry_run=True).checkpoints_dropped == 0, "all are young"
    assert collect(store, Retention(1), dry_run=True).blobs_deleted == 8
    report = collect(store, Retention(1))
    assert (report.checkpoints_dropped, report.blobs_deleted, report.blobs_kept) == (8, 8, 2)
    assert [each.name for each in store.objects.list("intents")] == ["intents/live.json"]
    assert not store.objects.list("condemned")
    store.restore(newest, tmp_path / "restored")
    saved(store, small(tmp_path, a="another"), sequence=10)


def test_a_full_store_of_which_nothing_can_be_dropped_says_so(tmp_path: Path) -> None:
    backend = Filled(LocalBackend(tmp_path / "store"))
    store = CheckpointStore("full", backend=backend, codec=Codec())
    saved(store, small(tmp_path, a="state"))
    (tmp_path / "unused").write_bytes(b"")
    backend.upload("blobs/ab/abcd", tmp_path / "unused", lambda _: None)
    backend.room = 0
    with pytest.raises(Unavailable) as caught:
        collect(store, Retention(1))
    assert caught.value.what == "the checkpoint store has no room for the list of the blobs that are to be deleted"
    assert "checkpoint gc" not in caught.value.remedy
    backend.room = 1000
    assert collect(store, Retention(1)).blobs_deleted == 1


names = st.text("ab", min_size=1, max_size=5)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)
stored = st.builds(blob_name, digests, st.sampled_from(["", ".zst", ".zst.0123456789abcdef", ".g01234567"]))
files = st.builds(ManifestFile, names, st.integers(0, 1 << 40), digests, stored)
manifests = st.builds(
    Manifest,
    operator=names,
    partition=st.integers(0, 65_535),
    epoch=st.integers(1, 1 << 38),
    sequence=st.integers(0, 1 << 50),
    digest=names,
    positions=st.dictionaries(st.text(max_size=5), st.integers(-1, 1 << 60), max_size=3),
    created_us=st.integers(0, 1 << 60),
    replica=names,
    files=st.lists(files, max_size=3, unique_by=lambda file: file.name).map(tuple),
    watermark_us=st.none() | st.integers(-(1 << 60), 1 << 60),
    key=st.lists(names, max_size=2).map(tuple),
    tags=st.lists(st.just({"name": "count", "kind": "counter", "coders": ["int64"], "tag": "1f"}), max_size=2),
    stopped_us=st.integers(0, 1 << 60),
)


@given(manifests)
def test_manifest_round_trip(manifest: Manifest) -> None:
    assert Manifest.decode(manifest.encode(), "x") == manifest


@given(manifests)
def test_an_older_release_reads_a_manifest_without_its_added_fields(manifest: Manifest) -> None:
    outer = json.loads(manifest.encode())
    assert not {"tags", "stopped_us"} & (body := json.loads(outer["body"])).keys()
    assert body["format"] == 2
    older = json.dumps({name: outer[name] for name in ("body", "checksum")}).encode()
    assert Manifest.decode(older, "x") == replace(manifest, tags=[], stopped_us=0)


@given(manifests)
def test_a_manifest_that_has_only_tags_added_is_read(manifest: Manifest) -> None:
    outer = json.loads(manifest.encode())
    added = json.dumps({"tags": manifest.tags})
    outer |= {"added": added, "added_checksum": xxhash.xxh3_128_hexdigest(added.encode())}
    assert Manifest.decode(json.dumps(outer).encode(), "x") == replace(manifest, stopped_us=0)


@given(manifests, st.data())
def test_every_flipped_byte_of_a_manifest_is_noticed(manifest: Manifest, data: st.DataObject) -> None:
    encoded = bytearray(manifest.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        # the flip changed nothing that JSON decodes, as in a \u escape
        assert Manifest.decode(bytes(encoded), "x") == manifest
    except CheckpointCorrupt:
        pass


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**16 - 1), st.integers(0, 99))
def test_names_order_manifests(epoch: int, sequence: int, attempt: int) -> None:
    assert parse_name(manifest_name((epoch, sequence), attempt)) == ((epoch, sequence), attempt)
    assert digest_of(blob_name("abcd", ".zst.0011223344556677.g12345678")) == "abcd"


# -- retention ------------------------------------------------------------------------------------------------


def found(sequence: int, age_s: float = 0.0, now_us: int = 10**12) -> Found:
    return Found(f"m{sequence}", P, (1, sequence), 0, now_us - int(age_s * 1e6))


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 5))
def test_retention_keeps_the_newest_that_can_be_read(all_: set[int], torn: set[int], keep: int) -> None:
    checkpoints = [found(number) for number in all_]
    readable = {f"m{number}" for number in all_ - torn}
    dropped = {each.order[1] for each in to_drop(checkpoints, readable, Retention(keep), 10**12)}
    kept = sorted(all_ - torn, reverse=True)[:keep]
    assert not dropped & set(kept)
    if len(kept) == keep:
        assert dropped == {number for number in all_ if number < min(kept)}
    else:
        assert not dropped, "too few that can be read to drop anything"


def test_the_owner_of_what_was_published_last_collects() -> None:
    other = replace(found(1, age_s=5.0), partition=PartitionId("Other", 3))
    assert whose_turn([]) is None
    assert whose_turn([found(9, age_s=9.0), other]) == other.partition, "whatever its order"
    assert whose_turn([replace(other, name="a"), replace(found(1, age_s=5.0), name="b")]) == P, "one of two at once"


def test_retention_by_age() -> None:
    checkpoints = [found(number, age_s=100.0 - 10 * number) for number in range(10)]
    readable = {each.name for each in checkpoints}
    dropped = to_drop(checkpoints, readable, Retention(1, age_s=35.0), 10**12)
    assert sorted(each.order[1] for each in dropped) == [0, 1, 2, 3, 4, 5, 6]
    assert to_drop(checkpoints, readable, Retention(1, age_s=1e9), 10**12) == []


@pytest.mark.parametrize(("keep", "age_s"), [(0, 0.0), (-1, 0.0), (1, -1.0), (1, float("nan"))])
def test_retention_that_cannot_be(keep: int, age_s: float) -> None:
    with pytest.raises(InvalidArgument):
        Retention(keep, age_s)


def test_what_is_swept() -> None:
    now_us = 10**15
    blobs = {"aa/aaa": 1, "bb/bbb.zst": 2, "cc/ccc.g1": 3, "dd/ddd": 4}
    hold = Mark("i", now_us, frozenset({"bbb"}))
    assert to_sweep(blobs, {"aa/aaa"}, [hold]) == {"cc/ccc.g1": 3, "dd/ddd": 4}
    assert to_sweep(blobs, {"aa/aaa"}, []) == {"bb/bbb.zst": 2, "cc/ccc.g1": 3, "dd/ddd": 4}
    assert to_sweep(blobs, {"aa/aaa"}, [Mark("i", now_us, None)]) is None
    assert is_dead(Mark("i", now_us - int((MARK_LIFE_S + 1) * 1e6), None), now_us)
    assert not is_dead(Mark("i", now_us - int((MARK_LIFE_S - 1) * 1e6), None), now_us)


# -- keys -----------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_not_taken_for_damage(tmp_path: Path) -> None:
    url = str(tmp_path / "encrypted")
    store = CheckpointStore(url, codec=Codec("none", bytes(32)))
    manifest = saved(store, small(tmp_path, a="secret"))
    for codec in (Codec("none", bytes([1] * 32)), Codec()):
        other = CheckpointStore(url, codec=codec)
        with pytest.raises(WrongKey, match=KEY_VARIABLE):
            next(other.newest(P))
        with pytest.raises(WrongKey):
            other.restore(manifest, tmp_path / f"restored-{codec.suffix}")
    for path in blobs(store).values():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        store.restore(manifest, tmp_path / "restored")


@given(st.binary(max_size=5000), st.integers(0, 10_000), st.booleans())
def test_encoded_content_is_all_or_damaged(content: bytes, cut: int, compressed: bool) -> None:
    codec = Codec("zstd" if compressed else "none", bytes(32))
    encoded = b"".join(codec.encode([content]))
    name = f"ab/abc{codec.suffix}"
    assert b"".join(codec.decode([encoded[:20], encoded[20:]], name)) == content
    if cut < len(encoded):
        with pytest.raises(CheckpointCorrupt):
            b"".join(codec.decode([encoded[:cut]], name))


def test_several_frames() -> None:
    codec = Codec("none", bytes(32))
    content = bytes(range(256)) * (3 << 12)
    encoded = b"".join(codec.encode([content[:100], content[100:]]))
    assert b"".join(codec.decode([encoded], f"a{codec.suffix}")) == content
    frame = (1 << 20) + 16
    swapped = encoded[:28] + encoded[28 + frame : 28 + 2 * frame] + encoded[28 : 28 + frame] + encoded[28 + 2 * frame :]
    for bad in (swapped, encoded[: 28 + frame], encoded[:28] + encoded[28 + frame :]):
        with pytest.raises(CheckpointCorrupt):
            b"".join(codec.decode([bad], f"a{codec.suffix}"))


@pytest.mark.parametrize("text", ["short", "zz" * 32, "00" * 31])
def test_keys_that_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, text)
    with pytest.raises(InvalidArgument, match=KEY_VARIABLE):
        configured_key()
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    assert configured_key() == bytes.fromhex("ab" * 32)


# -- links that are slow --------------------------------------------------------------------------------------


class _Dribbling(LocalBackend):
    """A backend that sends a file in pieces, with pauses between them.

    ``stops``: pieces after which it waits for good.
    """

    piece_bytes = 0

    def __init__(self, root: Path, stops: int = 1000) -> None:
        super().__init__(root)
        self.stops, self.ended = stops, threading.Event()

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        for number in range(8):
            self.ended.wait(60 if number == self.stops else 0.2)
            throttle(1)
        super().upload(name, path, throttle)


def test_an_upload_may_take_longer_than_a_store_may_be_silent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    objects = Objects(_Dribbling(tmp_path / "store"), "slow", timeout_s=1.0)
    objects.upload("a/b", tmp_path / "file", lambda _: None)
    assert objects.read("a/b") == b"content"


def test_an_upload_of_which_nothing_moves_any_more_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    backend = _Dribbling(tmp_path / "store", stops=2)
    try:
        with pytest.raises(Unavailable, match="did not answer within 1 s"):
            Objects(backend, "silent", timeout_s=1.0).upload("a/b", tmp_path / "file", lambda _: None)
    finally:
        backend.ended.set()


def calling() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "checkpoint store"}


def test_calls_that_hang_cost_no_more_than_a_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount whose server is gone blocks each call for good, and every checkpoint makes further calls."""
    silent, earlier = Silent(LocalBackend(tmp_path / "store")), calling()
    objects = Objects(silent, "far", timeout_s=0.0)
    try:
        for _ in range(40):
            with pytest.raises(Unavailable) as caught:
                objects.read("object")
        hung = calling() - earlier
        assert len(hung) == 8
        assert caught.value.what == "8 earlier calls to the checkpoint store have not returned yet"
    finally:
        silent.answer.set()
    for thread in hung:
        thread.join()
    monkeypatch.setattr(objects, "_timeout_s", 60.0)
    objects.create("object", b"content")
    assert objects.read("object") == b"content"


class HangingFiles(MemoryFileSystem):
    """A file system in memory in which a put of this one object blocks until ``answer`` is set."""

    protocol = "hanging"
    entered, answer = threading.Event(), threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if path.endswith("hung"):
            self.entered.set()
            self.answer.wait()
        super().pipe_file(path, value, mode=mode)


def test_a_put_that_hangs_holds_up_no_other_object(tmp_path: Path) -> None:
    backend = FsspecBackend(HangingFiles(), f"/{tmp_path.name}-hanging")
    try:
        with pytest.raises(Unavailable):
            Objects(backend, "far", timeout_s=0.0).create("manifests/hung", b"")
        HangingFiles.entered.wait()
        objects = Objects(backend, "far")
        objects.create("manifests/other", b"content")
        assert objects.read("manifests/other") == b"content"
    finally:
        HangingFiles.answer.set()
