"""Contract of checkpoint stores: reads, adoptions and uploads that run at the same time as collections.

Test classes inherit the contract and define the fixture ``backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, Retention, collect
from stateflow.checkpoint.backend import Backend
from stateflow.checkpoint.catalog import MARK_LIFE_S
from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import CheckpointCorrupt, StaleCheckpoint, StateflowError, Unavailable
from tests.contract.backends import Later, P, Steps, content_of, manifest_of, small
from tests.contract.checkpoint_suite import BackendContract, check_newest, put, store_of

DEAD = MARK_LIFE_S + 60


class At(Steps):
    """A backend that calls ``work`` before the ``at``-th operation."""

    def __init__(self, inner: Backend, at: int, work: Callable[[], object]) -> None:
        super().__init__(inner)
        self._at, self._work = at, work

    def before(self, operation: str, name: str) -> None:
        self.done.append((operation, name))
        if len(self.done) == self._at:
            self._work()

    @property
    def over(self) -> bool:
        """Tells whether there were fewer than ``at`` operations, so that ``work`` was not called."""
        return len(self.done) < self._at

    @property
    def happened_leased(self) -> bool:
        """Tells whether the lease was written before ``work`` was called."""
        return ("create", "intents") in [(op, name.partition("/")[0]) for op, name in self.done[: self._at - 1]]


def put_back(store: CheckpointStore, folder: Path, old: Manifest, epoch: int) -> None:
    """Restores an older checkpoint as a replica does: finds, downloads, adopts and publishes it."""
    manifest = next(each for each in store.newest(P) if each.order == old.order)
    directory = folder / f"restored-{len(list(folder.iterdir()))}"
    store.restore(manifest, directory)
    with store.adopt(manifest, directory) as adoption:
        adoption.publish(epoch, "edge-1")


class LeasesContract(BackendContract):
    stride = 1

    def steps(self) -> range:
        return range(1, 100, self.stride)

    def test_a_collection_beside_a_restore_loses_nothing(self, backend: Backend, tmp_path: Path) -> None:
        """A restore of an older checkpoint loses nothing if a collection runs before any one of its operations."""
        store = store_of(backend)
        refused = restored = 0
        for at in self.steps():
            epoch = at * 10
            old = put(store, tmp_path, epoch, 1, a=f"old {at}", b=f"also old {at}")
            put(store, tmp_path, epoch, 2, a=f"new {at}")
            beside = At(backend, at, lambda: collect(store, Retention(keep=1)))
            try:
                put_back(store_of(beside), tmp_path, old, epoch + 1)
            except (StateflowError, StopIteration):
                refused += 1
                assert not beside.happened_leased, "what is leased is not collected"
                check_newest(store, tmp_path, {"a": f"new {at}".encode()})
                continue
            check_newest(store, tmp_path, {"a": f"old {at}".encode(), "b": f"also old {at}".encode()})
            collect(store, Retention(keep=1))
            check_newest(store, tmp_path, {"a": f"old {at}".encode(), "b": f"also old {at}".encode()})
            restored += 1
            if beside.over:
                break
        else:
            raise AssertionError
        assert restored * self.stride > 12
        assert refused <= 6, "it found what was there, and it was gone before it could be leased"

    def test_a_restore_beside_two_collections_loses_nothing(self, backend: Backend, tmp_path: Path) -> None:
        """A restore loses nothing if it runs, after another collection, before any one operation of a collection."""
        store = store_of(backend)
        for at in self.steps():
            epoch = at * 10
            old = put(store, tmp_path, epoch, 1, a=f"old {at}")
            put(store, tmp_path, epoch, 2, a=f"new {at}")
            failed: list[Exception] = []

            def beside(epoch: int = epoch, old: Manifest = old, failed: list[Exception] = failed) -> None:
                collect(store, Retention(keep=2))
                try:
                    put_back(store, tmp_path, old, epoch + 1)
                except (StateflowError, StopIteration) as error:
                    failed.append(error)

            first = At(backend, at, beside)
            collect(store_of(first), Retention(keep=1))
            if first.over:
                break
            check_newest(store, tmp_path, {"a": f"{'new' if failed else 'old'} {at}".encode()})
        else:
            raise AssertionError

    def test_a_collection_that_takes_it_for_dead_is_noticed(self, backend: Backend, tmp_path: Path) -> None:
        """An upload or a restore whose process a collection assumes to be dead is done again or refused.

        The collection assumes that because the store's clock jumps ahead while the upload or the restore is under way.
        """
        store = store_of(backend)
        for at in self.steps():
            epoch = at * 10
            put(store, tmp_path, epoch, 1, a=f"one {at}")
            directory = small(tmp_path, a=f"two {at}", b=f"garbage that comes back {at % 3}")
            beside = At(backend, at, lambda: collect(store_of(Later(backend, DEAD)), Retention(keep=1)))
            store_of(beside).save(manifest_of(directory, epoch, 2), directory)
            check_newest(store, tmp_path, content_of(directory))
            collect(store, Retention(keep=1))
            check_newest(store, tmp_path, content_of(directory))
            if beside.over:
                break
        else:
            raise AssertionError
        for at in self.steps():
            epoch = 10_000 + at * 10
            old = put(store, tmp_path, epoch, 1, a=f"old {at}")
            put(store, tmp_path, epoch, 2, a=f"new {at}")
            beside = At(backend, at, lambda: collect(store_of(Later(backend, DEAD)), Retention(keep=1)))
            try:
                put_back(store_of(beside), tmp_path, old, epoch + 1)
            except (StateflowError, StopIteration):
                put(store, tmp_path, epoch + 2, 3, a=f"again {at}")
            check_newest(store, tmp_path)
            if beside.over:
                break
        else:
            raise AssertionError

    def test_a_name_that_was_dropped_and_is_published_again_is_kept(self, backend: Backend, tmp_path: Path) -> None:
        """A checkpoint is kept that is saved again while a collection drops its old, unreadable manifest."""
        store = store_of(backend)
        put(store, tmp_path, 1, 1, a="one")
        (found,) = store.catalog.checkpoints(P)
        backend.delete(found.name)
        backend.create(found.name, b"torn")

        class Again(Steps):
            def after(self, operation: str, name: str) -> None:
                if (operation, name) == ("delete", found.name):
                    put(store, tmp_path, 1, 1, a="one")

        report = collect(store_of(Again(backend)), Retention(), drop_corrupt=True)
        assert (report.checkpoints_dropped, report.blobs_deleted) == (1, 0)
        check_newest(store, tmp_path, {"a": b"one"})

    def test_a_collection_without_its_mark_deletes_nothing_more(self, backend: Backend, tmp_path: Path) -> None:
        """A collection whose mark was deleted deletes no further blob.

        Another collection, whose clock is a day ahead, deletes the mark, as it assumes that the first one is dead. So
        the blobs that the first one condemned may be in use again.
        """
        store = store_of(backend)
        put(store, tmp_path, 1, 1, a="a", b="b", c="c")
        put(store, tmp_path, 1, 2, d="d")

        class Ahead(Steps):
            def after(self, operation: str, name: str) -> None:
                if operation == "delete" and name.startswith("blobs"):
                    for mark in backend.list("condemned"):
                        backend.delete(mark.name)

        with pytest.raises(Unavailable, match="took this one for dead"):
            collect(store_of(Ahead(backend)), Retention(keep=1))
        assert len(backend.list("blobs")) == 3, "of four one was deleted while the mark stood"
        assert collect(store, Retention(keep=1)).blobs_deleted == 2

    def test_what_a_collection_may_delete_yet_stays_condemned(self, backend: Backend, tmp_path: Path) -> None:
        """A blob stays condemned if its deletion got no answer, as the store may still delete it later.

        No manifest may refer to that object, so a checkpoint with the same content uploads it under another name.
        """
        store = store_of(backend)
        put(store, tmp_path, 1, 1, a="one")
        put(store, tmp_path, 1, 2, a="two")
        late: list[str] = []

        class Slow(Steps):
            def before(self, operation: str, name: str) -> None:
                if operation == "delete" and name.startswith("blobs"):
                    late.append(name)
                    raise TimeoutError

        with pytest.raises(Unavailable):
            collect(store_of(Slow(backend)), Retention(keep=1))
        put(store, tmp_path, 1, 3, a="one")
        (name,) = late
        backend.delete(name)
        check_newest(store, tmp_path, {"a": b"one"})
        collect(store_of(Later(backend, DEAD)), Retention(keep=1))
        assert not backend.list("condemned")
        check_newest(store, tmp_path, {"a": b"one"})

    def test_what_would_be_dropped_counts_as_gone(self, backend: Backend, tmp_path: Path) -> None:
        store = store_of(backend)
        put(store, tmp_path, 1, 1, a="one")
        put(store, tmp_path, 1, 2, a="two")
        would, done = (collect(store, Retention(keep=1), dry_run=dry) for dry in (True, False))
        assert (
            (would.checkpoints_dropped, would.blobs_deleted) == (1, 1) == (done.checkpoints_dropped, done.blobs_deleted)
        )

    def test_what_is_always_taken_for_dead_is_an_error(self, backend: Backend, tmp_path: Path) -> None:
        put(store_of(backend), tmp_path, 1, 1, a="one")

        class Hasty(Steps):
            def before(self, operation: str, name: str) -> None:
                if operation == "stat" and name.startswith("intents"):
                    collect(store_of(Later(backend, DEAD)), Retention())

        with pytest.raises(Unavailable, match="took this upload for abandoned"):
            put(store_of(Hasty(backend)), tmp_path, 1, 2, a="two")
        check_newest(store_of(backend), tmp_path, {"a": b"one"})

    def test_a_wrong_clock_of_the_collecting_machine_changes_nothing(self, backend: Backend, tmp_path: Path) -> None:
        store = store_of(backend)
        old = put(store, tmp_path, 1, 1, a="old")
        put(store, tmp_path, 1, 2, a="new")
        directory = tmp_path / "fetched"
        store.restore(old, directory)
        for wrong_s in (-3650 * 86400.0, 3650 * 86400.0):
            clock = ManualClock(int(SYSTEM_CLOCK.now_us() + wrong_s * 1e6))
            elsewhere = CheckpointStore("elsewhere", backend=backend, codec=Codec(), clock=clock)
            with store.adopt(old, directory) as adoption:
                kept = collect(elsewhere, Retention(keep=1, age_s=86400))
                assert (kept.checkpoints_dropped, kept.blobs_deleted) == (0, 0), "all are young"
                collect(elsewhere, Retention(keep=1))
                assert backend.stat(f"blobs/{old.files[0].blob}"), "it is leased"
                adoption.publish(2, "edge-1")
            check_newest(store, tmp_path, {"a": b"old"})

    def test_holds_of_readers_that_died_expire(self, backend: Backend, tmp_path: Path) -> None:
        store = store_of(backend)
        old = put(store, tmp_path, 1, 1, a="old")
        put(store, tmp_path, 1, 2, a="new")
        directory = tmp_path / "fetched"
        store.restore(old, directory)
        adoption = store.adopt(old, directory)  # the process that adopts ends here
        assert collect(store, Retention(keep=1)).blobs_deleted == 0
        assert collect(store_of(Later(backend, DEAD)), Retention(keep=1)).blobs_deleted == 1
        with pytest.raises(StaleCheckpoint, match="the lease on the fetched blobs is gone"):
            adoption.publish(2, "edge-1")
        check_newest(store, tmp_path, {"a": b"new"})

    def test_a_checkpoint_without_its_blobs_is_not_the_one_that_is_kept(self, backend: Backend, tmp_path: Path) -> None:
        store = store_of(backend)
        put(store, tmp_path, 1, 1, a="sound")
        broken = put(store, tmp_path, 1, 2, a="lost")
        backend.delete(f"blobs/{broken.files[0].blob}")
        report = collect(store, Retention(keep=1))
        assert report.checkpoints_dropped == 0
        assert len(report.incomplete) == 1
        assert [manifest.sequence for manifest in store.newest(P)] == [2, 1]

    def test_a_blob_that_is_longer_than_declared_is_not_copied(self, backend: Backend, tmp_path: Path) -> None:
        store = store_of(backend)
        manifest = put(store, tmp_path, 1, 1, a="short")
        blob = f"blobs/{manifest.files[0].blob}"
        backend.delete(blob)
        (tmp_path / "large").write_bytes(bytes(30 << 20))
        backend.upload(blob, tmp_path / "large", lambda _: None)
        with pytest.raises(CheckpointCorrupt):
            store.restore(manifest, tmp_path / "restored")
        assert (tmp_path / "restored" / "a").stat().st_size <= 8 << 20
