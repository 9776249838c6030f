"""Identity of stores by their marker: an unmounted store is not taken for a new one, nor another for the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stateflow.checkpoint import CheckpointStore, Codec, Known, Retention, collect
from stateflow.checkpoint.backend import LocalBackend
from stateflow.checkpoint.catalog import MARKER
from stateflow.cli.checkpoint import try_out
from stateflow.errors import CheckpointCorrupt, CheckpointStoreMissing, InvalidArgument, StateflowError
from stateflow.operator.operator import describe
from stateflow.partition.data_directory import NOTE
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.contract.backends import manifest_of, small
from tests.unit.operators import Count

P = PartitionId("Op", 0)


class Replica:
    """A replica's data directory over several starts."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    def checkpoint(self, url: str) -> int:
        """Takes a checkpoint as a replica started with this store does, and returns the checkpoint's epoch."""
        node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), self.data_dir, ReplicaSettings())
        try:
            store = CheckpointStore(url)
            node.remember(store)
            try_out(store)
            if not node.owned():
                node.create(describe(Count, 1, "Op"), [0], 1)
            saved = node.checkpointer.take(P, store)
            assert saved is not None
            return saved.manifest.epoch
        finally:
            node.close()


def test_a_store_that_is_not_mounted_is_not_made_anew(tmp_path: Path) -> None:
    replica, mounted = Replica(tmp_path / "a"), tmp_path / "mnt"
    assert replica.checkpoint(str(mounted)) == 1
    mounted.rename(tmp_path / "unmounted")
    for empty in (False, True):
        if empty:
            mounted.mkdir()
        with pytest.raises(CheckpointStoreMissing, match="check that it is mounted"):
            replica.checkpoint(str(mounted))
        assert mounted.exists() is empty
        assert not empty or not list(mounted.iterdir()), "nothing is written"
    mounted.rmdir()
    (tmp_path / "unmounted").rename(mounted)
    assert replica.checkpoint(str(mounted)) == 1


def test_unmounted_while_it_runs(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "mnt"))
    directory = small(tmp_path, a="a")
    store.save(manifest_of(directory), directory)
    (tmp_path / "mnt").rename(tmp_path / "away")
    (tmp_path / "mnt").mkdir()
    for ask in (
        lambda: store.save(manifest_of(directory, 1, 2), directory),
        lambda: store.adopt(manifest_of(directory, 1, 2), directory),
        lambda: list(store.newest(P)),
        lambda: collect(store, Retention()),
        store.savepoints,
        store.check_writable,
    ):
        with pytest.raises(CheckpointStoreMissing):
            ask()
    assert not list((tmp_path / "mnt").iterdir())


def test_another_store_in_its_place_is_refused_until_that_is_meant(tmp_path: Path) -> None:
    replica, place = Replica(tmp_path / "a"), tmp_path / "mnt"
    replica.checkpoint(str(place))
    shutil.rmtree(place)
    other = CheckpointStore(str(place)).check(first_use=True)
    with pytest.raises(CheckpointStoreMissing, match=f"remove {tmp_path}/a/{NOTE}") as caught:
        replica.checkpoint(str(place))
    assert caught.value.where["found"] == other
    (tmp_path / "a" / NOTE).unlink()
    assert replica.checkpoint(str(place)) == 1


def test_a_store_has_many_spellings_and_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, place = Replica(tmp_path / "a"), tmp_path / "mnt"
    replica.checkpoint(str(place))
    note = (tmp_path / "a" / NOTE).read_text()
    (tmp_path / "link").symlink_to(place)
    monkeypatch.chdir(tmp_path)
    for spelling in (f"{place}/", f"file://{place}", "mnt", f"{tmp_path}/link", f"{tmp_path}/link/../mnt/"):
        replica.checkpoint(spelling)
        assert (tmp_path / "a" / NOTE).read_text() == note
    place.rename(tmp_path / "away")
    place.mkdir()
    for spelling in (f"{place}/", f"file://{place}", "mnt", f"{tmp_path}/link"):
        with pytest.raises(CheckpointStoreMissing):
            replica.checkpoint(spelling)


def test_a_new_place_is_made_explicitly(tmp_path: Path) -> None:
    replica = Replica(tmp_path / "a")
    replica.checkpoint(str(tmp_path / "one"))
    with pytest.raises(CheckpointStoreMissing, match="stateflow checkpoint init"):
        replica.checkpoint(str(tmp_path / "two"))
    CheckpointStore(str(tmp_path / "two")).check(first_use=True)
    replica.checkpoint(str(tmp_path / "two"))
    shutil.rmtree(tmp_path / "two")
    with pytest.raises(CheckpointStoreMissing):
        replica.checkpoint(str(tmp_path / "two"))


def test_two_replicas_make_one_store(tmp_path: Path) -> None:
    class Overtaken(LocalBackend):
        def create(self, name: str, data: bytes) -> None:
            if name == MARKER and not (self.root / MARKER).exists():
                LocalBackend.create(self, name, data.replace(b'"id"', b'"id" '))
                other.append(CheckpointStore("x", backend=LocalBackend(self.root), codec=Codec()).check())
            LocalBackend.create(self, name, data)

    other: list[str] = []
    store = CheckpointStore("x", backend=Overtaken(tmp_path / "mnt"), codec=Codec())
    assert [store.check(first_use=True)] == other


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"id": 7, "format": 1}', b"[" * 100_000, b"\xff", b'{"id": "x"}'])
def test_a_damaged_marker_is_said(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MARKER).write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="marker") as caught:
        CheckpointStore(str(tmp_path)).check(first_use=True)
    assert len(str(caught.value).splitlines()) == 1


def test_where_no_store_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in ("file", "file/below"):
        with pytest.raises(InvalidArgument):
            CheckpointStore(str(tmp_path / url))
    with pytest.raises(CheckpointStoreMissing, match="does not exist"):
        CheckpointStore(str(tmp_path / "nowhere"), create=False)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be read is an error.

    If it counted as empty, a collection would delete all that its manifests name.
    """
    store = CheckpointStore(str(tmp_path / "mnt"))
    directory = small(tmp_path, a="a")
    store.save(manifest_of(directory), directory)
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("manifests/Op"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StateflowError, match="Permission denied"):
        collect(store, Retention())
    monkeypatch.undo()
    assert len(store.blobs()) == 1


def test_what_is_known_of_a_store_has_no_password(tmp_path: Path) -> None:
    kept: list[Known] = []
    store = CheckpointStore("memory://ann:hunter2@bucket/identity", codec=Codec())
    store.remember(None, kept.append, tmp_path / NOTE)
    store.check(first_use=True)
    assert kept
    assert "hunter2" not in f"{kept} {store.url} {store.place}"
    with pytest.raises(StateflowError) as caught:
        list(CheckpointStore("memory://ann:hunter2@bucket/nothing", create=False).newest(P))
    assert "hunter2" not in str(caught.value)
