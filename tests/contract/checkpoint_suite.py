"""Contract of checkpoint stores on any backend. Test classes inherit it and define the fixture ``backend``."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, Retention, SiteCache, collect
from stateflow.checkpoint.backend import CHUNK_BYTES, Backend
from stateflow.checkpoint.catalog import MARK_LIFE_S
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import CheckpointCorrupt, CheckpointMissing, StaleCheckpoint, StateflowError, Unavailable
from stateflow.types import PartitionId
from tests.contract.backends import (
    Counting,
    Failing,
    Later,
    Lying,
    P,
    Silent,
    Slow,
    Steps,
    Torn,
    content_of,
    manifest_of,
    small,
)

KEY = bytes(range(32))


class BackendContract:
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        raise NotImplementedError

    def test_create_is_exclusive(self, backend: Backend) -> None:
        backend.create("a/b/one", b"first")
        with pytest.raises(FileExistsError):
            backend.create("a/b/one", b"second")
        assert backend.read("a/b/one") == b"first"

    def test_one_of_many_creators_wins(self, backend: Backend) -> None:
        won: list[bytes] = []
        start = threading.Barrier(8)

        def create(data: bytes) -> None:
            start.wait()
            try:
                backend.create("a/contested", data)
                won.append(data)
            except FileExistsError:
                pass

        threads = [threading.Thread(target=create, args=(b"%d" % n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert backend.read("a/contested") == won[0]

    def test_upload_replaces_and_chunks_give_it_back(self, backend: Backend, tmp_path: Path) -> None:
        large = tmp_path / "large"
        large.write_bytes(bytes(range(256)) * (CHUNK_BYTES // 256) + b"and some more")
        sent: list[int] = []
        backend.upload("x/large", small(tmp_path, a="short") / "a", lambda _: None)
        backend.upload("x/large", large, sent.append)
        pieces = list(backend.chunks("x/large"))
        assert b"".join(pieces) == large.read_bytes()
        assert max(map(len, pieces)) <= CHUNK_BYTES
        assert sum(sent) == large.stat().st_size
        with (tmp_path / "again").open("wb", buffering=0) as file:
            backend.download("x/large", file, large.stat().st_size)
        assert (tmp_path / "again").read_bytes() == large.read_bytes()

    def test_an_empty_object(self, backend: Backend, tmp_path: Path) -> None:
        backend.upload("x/empty", small(tmp_path, a="") / "a", lambda _: None)
        assert list(backend.chunks("x/empty")) == []
        assert backend.read("x/empty") == b""

    def test_list_stat_and_delete(self, backend: Backend) -> None:
        assert backend.list("f") == []
        assert backend.stat("f/one") is None
        backend.create("f/one", b"1")
        backend.create("f/g/two", b"22")
        backend.create("ff/three", b"333")
        assert {(s.name, s.size) for s in backend.list("f")} == {("f/one", 1), ("f/g/two", 2)}
        stat = backend.stat("f/g/two")
        assert stat is not None
        assert (stat.name, stat.size) == ("f/g/two", 2)
        assert abs(stat.modified_us - SYSTEM_CLOCK.now_us()) < 3600e6
        backend.delete("f/one")
        backend.delete("f/one")
        assert [s.name for s in backend.list("f")] == ["f/g/two"]

    def test_what_is_not_there(self, backend: Backend, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            backend.read("nothing/here")
        with pytest.raises(FileNotFoundError):
            list(backend.chunks("nothing/here"))
        with (tmp_path / "nothing").open("wb", buffering=0) as file, pytest.raises(FileNotFoundError):
            backend.download("nothing/here", file, 1)


class CheckpointContract(BackendContract):
    @pytest.fixture
    def store(self, backend: Backend) -> CheckpointStore:
        store = store_of(backend)
        store.check(first_use=True)
        return store

    def test_what_is_saved_is_restored(self, store: CheckpointStore, tmp_path: Path) -> None:
        directory = small(tmp_path, a="aaaa", b="bb", empty="")
        saved = store.save(manifest_of(directory, 2, 7), directory)
        assert (saved.bytes_new, saved.bytes_total) == (6, 6)
        assert list(store.newest(P)) == [saved.manifest]
        assert saved.manifest == replace(manifest_of(directory, 2, 7), files=saved.manifest.files)
        store.restore(saved.manifest, tmp_path / "restored")
        assert content_of(tmp_path / "restored") == content_of(directory)

    def test_newest_first_by_epoch_then_sequence(self, store: CheckpointStore, tmp_path: Path) -> None:
        orders = [(1, 1), (1, 2), (1, 10), (2, 3), (2, 100), (10, 0)]
        for number, order in enumerate(orders):
            put(store, tmp_path, *order, f=f"{number}")
        assert [manifest.order for manifest in store.newest(P)] == orders[::-1]
        assert list(store.newest(PartitionId("Op", 30))) == []
        assert list(store.newest(PartitionId("Other", 3))) == []

    @pytest.mark.parametrize("order", [(2, 4), (1, 5), (1, 99)])
    def test_stale_is_refused_and_nothing_is_written(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path, order: tuple[int, int]
    ) -> None:
        put(store, tmp_path, 2, 5, f="new")
        before = {stored.name for stored in backend.list("")}
        with pytest.raises(StaleCheckpoint) as caught:
            put(store, tmp_path, *order, f="late")
        assert caught.value.where == {"operator": "Op", "partition": 3}
        assert {stored.name for stored in backend.list("")} == before

    def test_a_zombie_that_looked_before_never_becomes_the_newest(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        """A former owner lists the manifests before the new owner publishes, and publishes after it.

        The checkpoint of the former owner is then not the newest, as it has the lower epoch.
        """
        new_owner = small(tmp_path, f="new owner")

        class Overtaken(Steps):
            def after(self, operation: str, name: str) -> None:
                if operation == "list" and name.startswith("manifests") and not self.done:
                    self.done.append((operation, name))
                    store.save(manifest_of(new_owner, 3, 1), new_owner)

        put(store_of(Overtaken(backend)), tmp_path, 2, 900, f="old owner")
        assert [manifest.order for manifest in store.newest(P)] == [(3, 1), (2, 900)]

    def test_saving_again_what_is_there_changes_nothing(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        first = put(store, tmp_path, 1, 1, f="x")
        before = {(stored.name, stored.modified_us) for stored in backend.list("")}
        assert put(store, tmp_path, 1, 1, f="x") == first
        assert {(stored.name, stored.modified_us) for stored in backend.list("")} == before

    def test_saving_again_heals_what_was_lost(self, store: CheckpointStore, backend: Backend, tmp_path: Path) -> None:
        manifest = put(store, tmp_path, 1, 1, a="x", b="y")
        backend.delete(f"blobs/{manifest.files[0].blob}")
        put(store, tmp_path, 1, 1, a="x", b="y")
        check_newest(store, tmp_path, {"a": b"x", "b": b"y"})

    def test_another_state_at_the_same_sequence_is_refused(self, store: CheckpointStore, tmp_path: Path) -> None:
        """A checkpoint with the sequence of an earlier one, but with another state, is refused.

        That happens if a machine loses its last commits in a power failure, and other commits get their numbers.
        """
        directory = small(tmp_path, a="x")
        store.save(manifest_of(directory, state_digest="one"), directory)
        store.save(manifest_of(directory), directory)
        for other in ({"state_digest": "two"}, {"positions": {"s": 7}}, {"watermark_us": 8}):
            with pytest.raises(StaleCheckpoint):
                store.save(manifest_of(directory, **other), directory)

    def test_unchanged_files_are_not_uploaded_again(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        put(store, tmp_path, 1, 1, a="same", b="one")
        counting = Counting(backend)
        directory = small(tmp_path, a="same", b="two", c="one")
        saved = store_of(counting).save(manifest_of(directory, 2, 2), directory)
        assert saved.bytes_new == 3, "of another replica, at another epoch, under another name"
        assert sum(operation == "upload" for operation, _ in counting.done) == 1
        other = PartitionId("Op", 4)
        assert store.save(manifest_of(directory, partition=other), directory).bytes_new == 0

    def test_nothing_is_left_beside_the_checkpoint(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        put(store, tmp_path, 1, 1, a="a")
        assert {stored.name.partition("/")[0] for stored in backend.list("")} == {"STORE", "blobs", "manifests"}

    # -- faults ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("lost", [False, True])
    def test_whichever_operation_fails_the_next_attempt_succeeds(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path, lost: bool
    ) -> None:
        """A save succeeds after an earlier attempt failed at any one operation.

        Args:
            lost: the failed operation was done, but its answer was lost.
        """
        put(store, tmp_path, 1, 1, a="first", b="kept")
        failed = 0
        for at in range(1, 100):
            directory = small(tmp_path, a=f"second {at}", b="kept")
            manifest = manifest_of(directory, 1, 1 + at)
            faulty = Failing(backend, at, lost=lost)
            try:
                store_of(faulty).save(manifest, directory)
            except Unavailable:
                failed += 1
                assert next(store.newest(P)).order in ((1, at), (1, 1 + at))
            check_newest(store, tmp_path)
            assert store.save(manifest, directory).manifest.order == (1, 1 + at)
            check_newest(store, tmp_path, content_of(directory))
            if faulty.left > 0:
                break
        assert failed >= 7, "list, read, intent, condemned, blob, manifest, …"

    def test_whichever_write_is_torn_the_newest_valid_one_is_restored(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        put(store, tmp_path, 1, 1, a="first", b="kept")
        for at in range(1, 10):
            directory = small(tmp_path, a=f"second {at}", b="kept")
            manifest = manifest_of(directory, 1, 1 + at)
            torn = Torn(backend, at, tmp_path)
            try:
                store_of(torn).save(manifest, directory)
            except Unavailable:
                check_newest(store, tmp_path)
            store.save(manifest, directory)
            check_newest(store, tmp_path, content_of(directory))
            if torn.left > 0:
                break
        else:
            raise AssertionError

    def test_a_store_that_answers_wrongly_is_never_believed(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        manifest = put(store, tmp_path, 1, 1, a="content " * 100, b="x")
        for seed in range(20):
            lying = store_of(Lying(backend, seed))
            with pytest.raises(CheckpointCorrupt):
                lying.restore(manifest, tmp_path / f"restored-{seed}")
            passed_over: list[StateflowError] = []
            with contextlib.suppress(CheckpointCorrupt):  # the flipped bit may be in the store's marker
                for read in lying.newest(P, passed_over):
                    assert read == manifest, "a flip that JSON does not see"
            with contextlib.suppress(CheckpointCorrupt):
                assert collect(lying, Retention()).blobs_deleted == 0
        check_newest(store, tmp_path, {"a": b"content " * 100, "b": b"x"})

    def test_a_silent_store_is_not_waited_for(self, backend: Backend, tmp_path: Path) -> None:
        silent = Silent(backend)
        store = CheckpointStore("silent", backend=silent, codec=Codec(), timeout_s=0.05)
        try:
            with pytest.raises(Unavailable, match="did not answer within"):
                put(store, tmp_path, 1, 1, a="a")
        finally:
            silent.answer.set()

    def test_a_slow_store_is_waited_for(self, backend: Backend, tmp_path: Path) -> None:
        turns = 0

        def wait() -> None:
            nonlocal turns
            turns += 1

        put(store_of(Slow(backend, wait)), tmp_path, 1, 1, a="a")
        assert turns >= 7
        check_newest(store_of(backend), tmp_path, {"a": b"a"})

    # -- encodings ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "codec", [Codec("zstd"), Codec("none", KEY), Codec("zstd", KEY)], ids=["zstd", "encrypted", "both"]
    )
    def test_encoded_blobs(self, backend: Backend, tmp_path: Path, codec: Codec) -> None:
        text = "compressible " * 1000
        store = CheckpointStore("encoded", backend=backend, codec=codec)
        manifest = put(store, tmp_path, 1, 1, a=text, empty="")
        check_newest(store, tmp_path, {"a": text.encode(), "empty": b""})
        assert put(store, tmp_path, 1, 2, a=text, empty="").files == manifest.files
        stored = b"".join(backend.read(each.name) for each in backend.list(""))
        assert text.encode() not in stored
        assert (b"edge-0" in stored) is (codec.suffix == ".zst"), "what is said of an encrypted one is encrypted too"

    def test_encodings_side_by_side(self, store: CheckpointStore, backend: Backend, tmp_path: Path) -> None:
        put(store, tmp_path, 1, 1, a="plain")
        other = CheckpointStore("zstd", backend=backend, codec=Codec("zstd"))
        directory = small(tmp_path, a="plain")
        assert other.save(manifest_of(directory, 1, 2), directory).bytes_new == 5
        for manifest in store.newest(P):
            store.restore(manifest, tmp_path / f"restored-{manifest.sequence}")
            assert content_of(tmp_path / f"restored-{manifest.sequence}") == {"a": b"plain"}

    # -- savepoints -----------------------------------------------------------------------------------------

    def test_a_savepoint_outlives_its_checkpoint_until_it_is_deleted(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        directory = small(tmp_path, a="kept")
        store.save(manifest_of(directory, 1, 1, PartitionId("Op", 0)), directory, savepoint="before-upgrade")
        for sequence in range(2, 6):
            newer = small(tmp_path, a=f"{sequence}")
            store.save(manifest_of(newer, 1, sequence, PartitionId("Op", 0)), newer)
        assert collect(store, Retention(keep=1)).checkpoints_dropped == 4
        assert store.savepoints() == {"before-upgrade": [PartitionId("Op", 0)]}
        (manifest,) = store.savepoint("before-upgrade")
        store.restore(manifest, tmp_path / "restored")
        assert content_of(tmp_path / "restored") == {"a": b"kept"}
        assert store.delete_savepoint("before-upgrade") == 1
        assert collect(store, Retention(keep=1)).blobs_deleted == 1
        with pytest.raises(CheckpointMissing):
            store.savepoint("before-upgrade")

    def test_a_savepoint_is_exported_to_another_store(self, store: CheckpointStore, tmp_path: Path) -> None:
        directory = small(tmp_path, a="moves", b="too")
        store.save(manifest_of(directory, 4, 9, PartitionId("Op", 0)), directory, savepoint="s1")
        other = CheckpointStore(str(tmp_path / "elsewhere"), codec=Codec("zstd", KEY))
        assert store.export("s1", other) == 8
        assert store.export("s1", other) == 0, "twice is once"
        (manifest,) = other.savepoint("s1")
        other.restore(manifest, tmp_path / "restored")
        assert content_of(tmp_path / "restored") == content_of(directory)

    def test_a_savepoint_with_a_partition_missing(self, store: CheckpointStore, tmp_path: Path) -> None:
        directory = small(tmp_path, a="half")
        store.save(manifest_of(directory, partition=PartitionId("Op", 0), partitions=2), directory, savepoint="s1")
        with pytest.raises(CheckpointMissing, match=r"lacks partitions \[1\]"):
            store.savepoint("s1")
        newer = small(tmp_path, a="other")
        with pytest.raises(StaleCheckpoint, match="already exists"):
            store.save(manifest_of(newer, 1, 2, PartitionId("Op", 0)), newer, savepoint="s1")

    # -- collecting -----------------------------------------------------------------------------------------

    def test_what_nobody_needs_goes(self, store: CheckpointStore, backend: Backend, tmp_path: Path) -> None:
        for sequence in range(1, 6):
            put(store, tmp_path, 1, sequence, own=f"{sequence}", shared="always")
        expected = collect(store, Retention(keep=2), dry_run=True)
        assert len(store.blobs()) == 6
        report = collect(store, Retention(keep=2))
        assert (report.checkpoints_dropped, report.blobs_deleted, report.bytes_deleted) == (3, 3, 3)
        assert replace(expected, dry_run=False) == report
        assert [manifest.sequence for manifest in store.newest(P)] == [5, 4]
        for manifest in store.newest(P):
            store.restore(manifest, tmp_path / f"restored-{manifest.sequence}")
        assert {stored.name.partition("/")[0] for stored in backend.list("")} == {"STORE", "blobs", "manifests"}

    def test_an_upload_beside_a_collection_loses_nothing(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        """An upload loses nothing if it runs before any one operation of a collection.

        The upload uses a blob that the store has, but that no manifest refers to.
        """
        for at in range(1, 60):
            directory = small(tmp_path, f="garbage that comes back", g=f"{at}")
            (tmp_path / "orphan").write_text("garbage that comes back")
            orphan = manifest_of(directory).files[0].digest
            backend.upload(f"blobs/{orphan[:2]}/{orphan}", tmp_path / "orphan", lambda _: None)

            class Between(Steps):
                def before(self, operation: str, name: str, at: int = at, directory: Path = directory) -> None:
                    self.done.append((operation, name))
                    if len(self.done) == at:
                        store.save(manifest_of(directory, 1, at), directory)

            between = Between(backend)
            collect(store_of(between), Retention(keep=1))
            if len(between.done) < at:
                break
            check_newest(store, tmp_path, content_of(directory))
        else:
            raise AssertionError

    def test_a_collection_beside_an_upload_loses_nothing(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        """An upload loses nothing if a whole collection runs before any one of its operations."""
        for at in range(1, 60):
            directory = small(tmp_path, f="garbage that comes back", g=f"{at}")
            (tmp_path / "orphan").write_text("garbage that comes back")
            orphan = manifest_of(directory).files[0].digest
            backend.upload(f"blobs/{orphan[:2]}/{orphan}", tmp_path / "orphan", lambda _: None)

            class Between(Steps):
                def before(self, operation: str, name: str, at: int = at) -> None:
                    self.done.append((operation, name))
                    if len(self.done) == at:
                        collect(store, Retention(keep=1))

            between = Between(backend)
            store_of(between).save(manifest_of(directory, 1, at), directory)
            check_newest(store, tmp_path, content_of(directory))
            collect(store, Retention(keep=1))
            check_newest(store, tmp_path, content_of(directory))
            if len(between.done) < at:
                break
        else:
            raise AssertionError

    def test_two_collections_and_an_upload_step_by_step(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        """An upload loses nothing if it and a second collection run in the middle of a first collection.

        They run before the first, second, … deletion, listing or read of the first collection: among others, between
        the time at which that collection condemns blobs and reads the marks, and its first deletion.
        """
        sequence = 0
        for step in ("delete", "list", "read"):
            for number in range(1, 12):
                sequence += 1
                directory = small(tmp_path, f=f"comes back {step}", g=f"{step}{number}")
                orphan = manifest_of(directory).files[0].digest
                backend.upload(f"blobs/{orphan[:2]}/{orphan}", directory / "f", lambda _: None)

                class Between(Steps):
                    def before(
                        self,
                        operation: str,
                        name: str,
                        step: str = step,
                        number: int = number,
                        sequence: int = sequence,
                        directory: Path = directory,
                    ) -> None:
                        if operation == step:
                            self.done.append((operation, name))
                            if len(self.done) == number:
                                collect(store, Retention(keep=1))
                                store.save(manifest_of(directory, 1, sequence), directory)

                between = Between(backend)
                collect(store_of(between), Retention(keep=1))
                if len(between.done) < number:
                    break
                check_newest(store, tmp_path, content_of(directory))

    def test_what_dead_processes_left_is_tidied_up_a_day_later(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        put(store, tmp_path, 1, 1, a="a")
        directory = small(tmp_path, b="never published")
        with pytest.raises(Unavailable):
            store_of(_FailingAtManifest(backend)).save(manifest_of(directory, 1, 2), directory)
        backend.create("condemned/dead.json", b'["torn')
        assert collect(store, Retention()).blobs_deleted == 0, "its upload could be under way"
        later = store_of(Later(backend, MARK_LIFE_S + 60))
        assert collect(later, Retention()).blobs_deleted == 1
        assert {stored.name.partition("/")[0] for stored in backend.list("")} == {"STORE", "blobs", "manifests"}

    def test_blobs_of_an_unreadable_manifest_are_kept(
        self, store: CheckpointStore, backend: Backend, tmp_path: Path
    ) -> None:
        put(store, tmp_path, 1, 1, a="one")
        put(store, tmp_path, 1, 2, a="two")
        (newest, _) = store.catalog.checkpoints(P)
        backend.delete(newest.name)
        backend.create(newest.name, b"torn")
        (tmp_path / "orphan").write_text("orphan")
        backend.upload("blobs/ab/abcd", tmp_path / "orphan", lambda _: None)
        report = collect(store, Retention())
        assert (report.blobs_deleted, report.unreadable) == (0, [newest.name])
        assert report.held_up
        report = collect(store, Retention(), drop_corrupt=True)
        assert (report.blobs_deleted, report.held_up, report.checkpoints_dropped) == (2, "", 1)
        check_newest(store, tmp_path, {"a": b"one"})

    # -- a site's cache -------------------------------------------------------------------------------------

    def test_a_cache_serves_what_it_has_and_is_never_believed(self, backend: Backend, tmp_path: Path) -> None:
        manifest = put(store_of(backend), tmp_path, 1, 1, a="aaaa", b="bbbb")
        cache = SiteCache(tmp_path / "cache", 1 << 20)
        counting = Counting(backend)
        near = CheckpointStore("near", backend=counting, codec=Codec(), cache=cache)

        def fetched() -> int:
            return sum(name.startswith("blobs/") for _, name in counting.done)

        near.restore(manifest, tmp_path / "first")
        assert fetched() == 2
        for path in (tmp_path / "cache").glob("*/*"):
            if path.read_text() == "bbbb":
                path.write_text("bbbx")
        near.restore(manifest, tmp_path / "second")
        assert fetched() == 3, "one blob came from the cache"
        backend.delete(f"blobs/{manifest.files[0].blob}")
        backend.delete(f"blobs/{manifest.files[1].blob}")
        near.restore(manifest, tmp_path / "third")
        for name in ("first", "second", "third"):
            assert content_of(tmp_path / name) == {"a": b"aaaa", "b": b"bbbb"}


class _FailingAtManifest(Failing):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, 0)

    def before(self, operation: str, name: str) -> None:
        if (operation == "create" and name.startswith("manifests")) or operation == "delete":
            raise self.error


def store_of(backend: Backend) -> CheckpointStore:
    return CheckpointStore("test", backend=backend, codec=Codec())


def put(store: CheckpointStore, folder: Path, epoch: int, sequence: int, **content: str) -> Manifest:
    directory = small(folder, **content)
    return store.save(manifest_of(directory, epoch, sequence), directory).manifest


def check_newest(store: CheckpointStore, folder: Path, content: dict[str, bytes] | None = None) -> None:
    """Asserts that the newest readable checkpoint can be restored, and has this content if one is given."""
    manifest = next(store.newest(P))
    target = folder / f"check-{len(list(folder.iterdir()))}"
    store.restore(manifest, target)
    if content is not None:
        assert content_of(target) == content
