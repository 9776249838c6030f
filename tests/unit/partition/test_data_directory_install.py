"""A copy becomes the partition whole or not at all, however it came here and wherever that is cut short."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stateflow.checkpoint import CheckpointStore, Codec, Manifest
from stateflow.checkpoint.catalog import Catalog
from stateflow.errors import MoveAborted, MoveUnknown, StaleEpoch, StateDamaged, TooFewFiles, Unavailable
from stateflow.partition.data_directory import INCOMING, PART, RECEIVED, UNFINISHED, Copies, owned_mark
from stateflow.partition.environment import Environment
from stateflow.partition.lifecycle import State
from stateflow.partition.replica import ReplicaNode
from stateflow.storage import RocksStore
from stateflow.types import PartitionId
from tests.unit.partition.test_replica import P, Two
from tests.unit.partition.test_takeover import C, end_of_standby, followed

Seen = tuple[State, int]
ABSENT = State.ABSENT, 0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def home(two: Two, name: str) -> Path:
    return two.root / name / "operators" / "Op" / "p00000"


# -- a kill at each step ----------------------------------------------------------------------------------------------


class Kills:
    """Copies of a replica's data directory, each as a kill before or after one change of a file leaves it."""

    CHANGES = (
        (Environment, "sync"),
        (RocksStore, "apply"),
        (Path, "unlink"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "write_bytes"),
    )

    def __init__(self, two: Two, name: str) -> None:
        self._two, self._name = two, name
        self._copies: list[Path] = []

    def during(self, work: Callable[[], Any]) -> list[Seen]:
        """Runs ``work``, and returns what a start finds in each of the copies, in order."""
        with pytest.MonkeyPatch.context() as patch:
            for cls, name in self.CHANGES:
                patch.setattr(cls, name, self._cut(getattr(cls, name)))
            work()
        return [self._found(copy) for copy in self._copies]

    def _cut(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            self._copy()
            done = change(*arguments, **named)
            self._copy()
            return done

        return changed

    def _copy(self) -> None:
        copy = self._two.root / f"killed-{len(self._copies)}"
        shutil.copytree(self._two.root / self._name, copy, ignore=shutil.ignore_patterns("LOCK"))
        self._copies.append(copy)

    def _found(self, copy: Path) -> Seen:
        node = ReplicaNode(self._two.infos[self._name], copy)
        lifecycle = node.lifecycle(P)
        found = lifecycle.state, lifecycle.epoch
        if lifecycle.state is State.OWNED:
            assert len(list((copy / "operators" / "Op" / "p00000").iterdir())) == 1, "and nothing is beside it"
            assert not list(copy.rglob(INCOMING)) + list(copy.rglob(UNFINISHED))
            node.reader.scan(P, "total")
        assert not (copy / "evidence").exists()
        node.close()
        shutil.rmtree(copy)
        return found


Way = tuple[str, Callable[[], Any], Seen, Seen]


def created(two: Two) -> Way:
    return "b", lambda: two.b.create(two.spec, [0], 5), ABSENT, (State.OWNED, 5)


def moved(two: Two) -> Way:
    two.send(two.a, 1, 2)
    return "b", lambda: two.move(two.a, two.b, "m1", 1), ABSENT, (State.OWNED, 2)


def moved_back(two: Two) -> Way:
    two.leave_a()
    return "a", lambda: two.move(two.b, two.a, "m2", 2), (State.SEALED, 2), (State.OWNED, 3)


def taken_from_a_standby(two: Two) -> Way:
    followed(two)
    return "b", lambda: two.b.successor.from_standby(P, "t1", 2, "s1"), ABSENT, (State.OWNED, 2)


def moved_to_a_standby(two: Two) -> Way:
    followed(two)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, standby_move="s1")
    return "b", lambda: two.b.receiver.own(P, "s1", end_of_standby(two)), ABSENT, (State.OWNED, 2)


def kept_of_a_standby(two: Two) -> Way:
    followed(two)
    two.a.sender.snapshot(P, "m1")
    assert two.a.sender.fence(P, "m1", 2, C)
    assert two.b.receiver.own(P, "s1", end_of_standby(two)) is None
    return "b", lambda: two.b.cancel(P, "s1"), ABSENT, (State.SEALED, 2)


def taken_from_what_was_sealed(two: Two) -> Way:
    two.send(two.a, 1)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    return "a", lambda: two.a.successor.from_local(P, "t1", 3), (State.SEALED, 2), (State.OWNED, 3)


def checkpoint_of_one_that_lost_its_disk(two: Two) -> CheckpointStore:
    """Makes a checkpoint of ``b`` at epoch 2, whose record names ``b``, and empties the disk of ``b``."""
    two.leave_a()
    store = CheckpointStore(str(two.root / "store"), codec=Codec())
    two.b.checkpointer.take(P, store)
    two.b.close()
    shutil.rmtree(home(two, "b"))
    two.start("b")
    return store


def taken_from_a_checkpoint(two: Two) -> Way:
    store = checkpoint_of_one_that_lost_its_disk(two)
    take = partial(two.b.successor.from_checkpoint, two.spec, P, "t1", 5, store)
    return "b", take, ABSENT, (State.OWNED, 5)


def restored(two: Two) -> Way:
    two.send(two.a, 1, 2)
    store = CheckpointStore(str(two.root / "store"), codec=Codec())
    two.a.checkpointer.take(P, store)

    def restore() -> None:
        two.a.restorer.prepare(two.spec, P, "r", store, store)
        two.a.restorer.own(P, "r", 2)

    return "a", restore, (State.OWNED, 1), (State.OWNED, 2)


@pytest.mark.parametrize(
    "way",
    [
        created,
        moved,
        moved_back,
        moved_to_a_standby,
        kept_of_a_standby,
        taken_from_a_standby,
        taken_from_what_was_sealed,
        taken_from_a_checkpoint,
        restored,
    ],
)
def test_a_kill_at_any_step_leaves_what_was_here_before_or_the_whole_copy(two: Two, way: Callable[[Two], Way]) -> None:
    name, work, before, after = way(two)
    found = Kills(two, name).during(work)
    before_it = found.count(before)
    assert 0 < before_it < len(found)
    assert found == [before] * before_it + [after] * (len(found) - before_it)
    lifecycle = two.nodes[name].lifecycle(P)
    assert (lifecycle.state, lifecycle.epoch) == after


# -- failures ---------------------------------------------------------------------------------------------------------


def fails_once(patch: pytest.MonkeyPatch, cls: type, name: str, error: Exception, when: Any = None) -> None:
    """Lets the first call of a method, or the first for which ``when`` holds, raise."""
    whole, failed = getattr(cls, name), []

    def once(*arguments: Any, **named: Any) -> Any:
        if not failed and (when is None or when(*arguments)):
            failed.append(None)
            raise error
        return whole(*arguments, **named)

    patch.setattr(cls, name, once)


def test_a_creation_that_failed_can_be_repeated(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database used to stay open, and could not be opened again by the same process."""
    fails_once(monkeypatch, RocksStore, "apply", OSError(errno.ENOSPC, "no space left on device"))
    with pytest.raises(OSError, match="no space"):
        two.b.create(two.spec, [0], 5)
    assert two.b.lifecycle(P).state is State.ABSENT
    assert list(home(two, "b").iterdir()) == []
    two.b.create(two.spec, [0], 5)
    two.send(two.b, 1, epoch=5)


def test_a_takeover_that_found_no_room_for_its_mark_writes_it_when_repeated(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark used to be missing, so that the copy, if it was damaged later, seemed never to have been owned."""
    followed(two)
    full, mark = OSError(errno.ENOSPC, "no space left on device"), owned_mark("t1")
    fails_once(monkeypatch, Path, "write_bytes", full, lambda path, _: path.name == mark)
    with pytest.raises(OSError, match="no space"):
        two.b.successor.from_standby(P, "t1", 2, "s1")
    assert two.b.lifecycle(P).move_id == "s1", "nothing has happened yet"
    assert two.b.successor.from_standby(P, "t1", 2, "s1").epoch == 2
    (copy,) = home(two, "b").iterdir()
    assert (copy / mark).exists()


def test_a_takeover_that_was_cancelled_leaves_no_mark(two: Two) -> None:
    followed(two)
    local = two.b._registry.local(P)
    assert two.b.cancel(P, "t1")
    with pytest.raises(MoveAborted):
        two.b._registry.copies.adopt(local, "t1")
    assert local.incoming is not None
    assert not (local.incoming.directory / owned_mark("t1")).exists()


def test_a_restored_copy_whose_commit_is_not_durable_does_not_count(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark comes back when its removal cannot be synced.

    The former owner goes on, and the next start would have found the restored copy with the newer epoch.
    """
    name, _, before, after = restored(two)
    store = CheckpointStore(str(two.root / "store"), codec=Codec())
    two.a.restorer.prepare(two.spec, P, "r", store, store)

    def commits(_: Environment, paths: list[Path]) -> bool:
        return paths[0].name.startswith("restored-") and not (paths[0] / UNFINISHED).exists()

    fails_once(monkeypatch, Environment, "sync", OSError(errno.EIO, os.strerror(errno.EIO)), commits)
    with pytest.raises(OSError, match="Input/output"):
        two.a.restorer.own(P, "r", 2)
    kills = Kills(two, name)
    kills._copy()
    assert kills.during(lambda: None) == [before]
    two.a.restorer.own(P, "r", 2)
    assert (two.a.lifecycle(P).state, two.a.lifecycle(P).epoch) == after


def test_an_ownership_that_cannot_be_is_not_written(two: Two) -> None:
    """A seal with an epoch that is not newer leaves no record; it used to be durable before it was refused."""
    followed(two)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, standby_move="s1")
    seal = end_of_standby(two)
    two.b._registry.local(P).lifecycle.epoch = 2
    with pytest.raises(StaleEpoch):
        two.b.receiver.own(P, "s1", seal)
    assert two.restart("b").lifecycle(P).state is State.ABSENT


def test_files_of_interrupted_transfers_go_with_any_installation(two: Two) -> None:
    """After a takeover, such files used to stay, and to keep the disk space of files that the database had replaced."""
    followed(two)
    received = home(two, "b") / RECEIVED
    received.mkdir()
    (received / "digest").touch()
    two.b.successor.from_standby(P, "t1", 2, "s1")
    assert [path.name for path in home(two, "b").iterdir()] == ["s1-1"]


def test_a_directory_of_another_copy_is_never_taken(two: Two) -> None:
    local, copies = two.b._registry.local(P), two.b._registry.copies
    (local.home / "m1-1").mkdir(parents=True)
    assert copies.part(local, "m1").name == "m1-2" + PART


def test_a_takeover_passes_over_a_checkpoint_that_is_no_database(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    store = checkpoint_of_one_that_lost_its_disk(two)
    fails_once(monkeypatch, Environment, "open", StateDamaged("corrupt", remedy="-"))
    with pytest.raises(Exception, match="no checkpoint to restore from"):
        two.b.successor.from_checkpoint(two.spec, P, "t1", 5, store)
    assert list(home(two, "b").iterdir()) == []
    assert two.b.successor.from_checkpoint(two.spec, P, "t1", 5, store).epoch == 5


def test_a_machine_that_cannot_open_it_says_nothing_of_a_checkpoint(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint is no remedy for too few files; one used to be restored."""
    store = checkpoint_of_one_that_lost_its_disk(two)
    fails_once(monkeypatch, Environment, "open", TooFewFiles("too few", remedy="-"))
    with pytest.raises(TooFewFiles):
        two.b.restorer.prepare(two.spec, P, "r", store, store)
    assert two.b.restorer.prepare(two.spec, P, "r", store, store).epoch == 3


def test_the_last_checkpoint_of_what_was_taken_over_is_known(two: Two) -> None:
    """The first checkpoint of the new owner uploads nothing."""
    store = checkpoint_of_one_that_lost_its_disk(two)
    two.b.successor.from_checkpoint(two.spec, P, "t1", 5, store)
    assert two.b._registry.local(P).checkpointed == (store.url, 5, 2)


def test_a_mark_goes_at_the_start_after_its_installation(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise damage to the copy would be taken for damage to one that was never owned."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        two.leave_a()
    (copy,) = home(two, "b").glob("m1-*")
    assert Copies.is_incoming(copy)
    assert two.restart("b").lifecycle(P).state is State.OWNED
    assert not Copies.is_incoming(copy)


def test_what_was_fetched_goes_with_the_next_request_where_the_store_fell_silent(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request used to leave one more open copy on the disk."""
    store = checkpoint_of_one_that_lost_its_disk(two)
    fails_once(
        monkeypatch, Catalog, "checkpoints", Unavailable("silent", remedy="-"), lambda *_: home(two, "b").exists()
    )
    with pytest.raises(Unavailable):
        two.b.restorer.prepare(two.spec, P, "r", store, store)
    with pytest.raises(MoveUnknown):
        two.b.restorer.own(P, "r", 3)
    two.b.restorer.prepare(two.spec, P, "r", store, store)
    two.b.restorer.own(P, "r", 3)
    assert len(list(home(two, "b").iterdir())) == 1


def test_a_restore_leaves_the_reserve(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore used to fill the disk to its last byte."""
    store = checkpoint_of_one_that_lost_its_disk(two)
    needed = next(store.newest(P)).size + two.b.settings.disk_reserve_bytes
    free = needed - 1
    monkeypatch.setattr(Environment, "free_bytes", lambda *_: free)
    with pytest.raises(Unavailable, match=f"bytes, {free} are free"):
        two.b.restorer.prepare(two.spec, P, "r", store, store)
    with pytest.raises(Unavailable, match=f"bytes, {free} are free"):
        two.b.successor.from_checkpoint(two.spec, P, "t1", 5, store)
    assert list(home(two, "b").iterdir()) == []
    free = needed
    assert two.b.restorer.prepare(two.spec, P, "r", store, store).epoch == 3


def test_restores_at_once_leave_room_for_each_other(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two restores at once used to fetch what had room for one. What one has fetched is no longer free."""
    store = checkpoint_of_one_that_lost_its_disk(two)
    manifest, reserve, restore = next(store.newest(P)), two.b.settings.disk_reserve_bytes, CheckpointStore.restore
    copies, registry, free = two.b._registry.copies, two.b._registry, manifest.size * 2 + reserve - 1
    refused: list[str] = []

    def another(number: int) -> None:
        copies.fetch(registry.local(PartitionId("Op", number)), "r", manifest, store, None).store.close()

    def with_others(self: CheckpointStore, wanted: Manifest, directory: Path, *, durable: bool) -> None:
        nonlocal free
        if len(refused) == 2:
            restore(self, wanted, directory, durable=durable)
            return
        with pytest.raises(Unavailable, match="are free") as error:
            another(1)
        refused.append(str(error.value))
        restore(self, wanted, directory, durable=durable)
        free -= manifest.size
        with pytest.raises(Unavailable, match="are free") as error:
            another(2)
        refused.append(str(error.value))
        free += 1
        another(3)

    monkeypatch.setattr(Environment, "free_bytes", lambda *_: free)
    monkeypatch.setattr(CheckpointStore, "restore", with_others)
    another(0)
    assert f"other_restores={manifest.size})" in refused[0]
    assert "other_restores" not in refused[1]
