"""Directories that a replica finds at its start: nothing that might be state is removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stateflow.changes import Mutations
from stateflow.errors import OperatorNotImportable, StateDamaged, StateMissing, TooFewFiles
from stateflow.operator.operator import describe
from stateflow.partition import layout
from stateflow.partition.data_directory import INCOMING, UNFINISHED, Quarantine
from stateflow.partition.environment import Environment
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.sources import SkippedBatches
from stateflow.settings import ReplicaSettings
from stateflow.storage import RocksEngine
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.unit.operators import Count
from tests.unit.test_durable import out_of_files

P = PartitionId("Op", 0)
SPEC = describe(Count, 2, "Op")
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])


class Place:
    """A data directory and its current replica."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "operators" / "Op" / "p00000"
        self.node: ReplicaNode | None = None

    def start(self) -> ReplicaNode:
        self.stop()
        self.node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), self.root, ReplicaSettings())
        return self.node

    def stop(self) -> None:
        if self.node is not None:
            self.node.close()
            self.node = None

    def copy(self, name: str, ownership: layout.Ownership | None, **puts: bytes) -> Path:
        """Makes a database as an accident may have left it there."""
        store = RocksEngine().open(self.home / name, create=True)
        entries = [(key.encode(), value) for key, value in puts.items()]
        if ownership is not None:
            entries.append((layout.OWNERSHIP, ownership.encode()))
        store.apply(Mutations(puts=[(b"x", b"y"), *entries]), sync=True)
        store.close()
        return self.home / name

    @property
    def aside(self) -> list[str]:
        return sorted(path.name for path in (self.root / "evidence" / "Op" / "p00000").glob("*"))

    @property
    def copies(self) -> list[str]:
        return sorted(path.name for path in self.home.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "a")
    place.start().create(SPEC, [0], 1)
    yield place
    place.stop()


def owned(epoch: int, replica: str = "a") -> layout.Ownership:
    return layout.Ownership(replica, State.OWNED, epoch, "m")


def rows(*values: int) -> bytes:
    message = pa.record_batch([["k"] * len(values), list(values)], schema=SCHEMA).serialize()
    return bytes(message)


def send(node: ReplicaNode, number: int) -> Applied:
    applied = apply_to(node, P, 1, Batch("s", number), bytes(SCHEMA.serialize()), rows(number))
    assert isinstance(applied, Applied)
    return applied


@pytest.mark.parametrize(
    ("owner", "marked", "aside"),
    [
        (None, True, False),  # a transfer that was cut short
        ("b", True, False),  # the same: the base names the source as its owner
        (None, False, True),  # of unknown origin
        ("b", False, True),  # another replica's copy that was put here
    ],
)
def test_a_copy_that_is_not_owned_goes_only_where_it_is_known_to_be_unfinished(
    place: Place, owner: str | None, marked: bool, aside: bool
) -> None:
    place.stop()
    copy = place.copy("m7-1", (owner and owned(5, owner)) or None)
    if marked:
        (copy / INCOMING).touch()
    node = place.start()
    assert node.lifecycle(P).state is State.OWNED
    assert place.copies == ["created-1"]
    assert place.aside == (["m7-1-1"] if aside else [])


@pytest.mark.parametrize("below", ["operators", "operators/Op", "operators/Op/p00000", "evidence", "commits"])
def test_a_start_that_cannot_list_a_directory_ends_and_the_next_one_finds_all(place: Place, below: str) -> None:
    assert place.node is not None
    send(place.node, 0)
    place.stop()
    (place.root / "evidence").mkdir(exist_ok=True)
    with out_of_files(place.root / below), pytest.raises(OSError, match="Too many open files"):
        place.start()
    node = place.start()
    assert node.lifecycle(P).state is State.OWNED
    assert place.aside == []
    assert send(node, 1).sequence == 2


def test_skipped_batches_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path) -> None:
    environment = Environment(ReplicaSettings())
    with out_of_files(tmp_path), pytest.raises(OSError, match="Too many open files"):
        SkippedBatches(tmp_path, environment, durable=True).find()
    with out_of_files(tmp_path), pytest.raises(OSError, match="Too many open files"):
        Quarantine(tmp_path, environment).partitions("Op")


def test_a_database_that_cannot_be_listed_is_not_synced(tmp_path: Path) -> None:
    with out_of_files(tmp_path), pytest.raises(OSError, match="Too many open files"):
        Environment(ReplicaSettings()).sync_database(tmp_path)


def test_a_batch_that_cannot_open_its_database_costs_nothing(place: Place) -> None:
    assert place.node is not None
    send(place.node, 0)
    registry = place.node._registry
    registry.close_store(registry.local(P))
    with out_of_files(place.home), pytest.raises(TooFewFiles):
        send(place.node, 1)
    assert place.aside == []
    assert send(place.node, 1).sequence == 2


def test_a_mark_that_outlived_its_ownership_says_nothing(place: Place) -> None:
    place.stop()
    (place.copy("m7-1", owned(2)) / INCOMING).touch()
    node = place.start()
    assert (node.lifecycle(P).state, node.lifecycle(P).epoch) == (State.OWNED, 2)
    assert place.copies == ["m7-1"]


def test_of_what_is_sealed_and_its_copy_on_the_way_back_the_original_counts(place: Place) -> None:
    place.stop()
    sealed = layout.Ownership("a", State.SEALED, 3, "m2", "b", "site", "b:1")
    place.copy("m9-sealed", sealed)
    (place.copy("m9-way-back", sealed) / INCOMING).touch()
    node = place.start()
    assert node.lifecycle(P).state is State.SEALED
    assert place.copies == ["m9-sealed"]


def test_a_restore_under_way_is_removed(place: Place) -> None:
    place.stop()
    (place.copy("restored-r1-1", owned(9)) / UNFINISHED).touch()
    assert place.start().lifecycle(P).epoch == 1
    assert place.copies == ["created-1"]
    assert place.aside == []


def test_a_damaged_copy_is_put_aside_and_the_partition_is_not_here(place: Place) -> None:
    place.stop()
    for number in (1, 2):  # the second copy is quarantined under another name
        (place.home / "created-1" / "CURRENT").unlink()
        node = place.start()
        assert node.lifecycle(P).state is State.ABSENT
        assert len(place.aside) == number
        with pytest.raises(StateMissing, match="its copy is quarantined"):
            node.create(SPEC, [0], 1)
        place.stop()
        place.copy("created-1", owned(1))


def test_a_directory_nothing_was_written_to_is_no_evidence(place: Place) -> None:
    place.stop()
    (place.home / "created-9").mkdir()
    (place.home / "created-9" / "LOCK").touch()
    place.start()
    assert place.copies == ["created-1"]
    assert place.aside == []


def test_damage_met_by_a_batch_seals_the_partition_off(place: Place) -> None:
    node = place.node
    assert node is not None
    for number in range(3):
        send(node, number)
    node.checkpointer._registry.store(node._registry.local(P)).flush()
    place.stop()
    sst = next((place.home / "created-1").glob("*.sst"))
    node = place.start()
    assert node.lifecycle(P).state is State.OWNED
    sst.write_bytes(sst.read_bytes()[:-60] + bytes(60))
    with pytest.raises(StateDamaged, match="the database files are corrupt") as caught:
        send(node, 3)
    assert "evidence" in caught.value.remedy
    assert node.lifecycle(P).state is State.ABSENT
    assert node.lost_some
    assert place.aside == ["created-1-1"]
    with pytest.raises(StateDamaged):  # until another replica owns the partition
        send(node, 3)


def test_an_operator_that_speaks_of_corruption_costs_nothing(place: Place) -> None:
    """Only errors that the database raises count as damage."""
    node = place.node
    assert node is not None
    send(node, 0)

    def process(*_: object) -> None:
        raise Exception("Corruption: of the youth")

    processor = node._registry.local(P).processor
    assert processor is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(processor._instance.operator), "process", process)
        with pytest.raises(Exception, match="of the youth"):
            send(node, 1)
    assert node.lifecycle(P).state is State.OWNED
    send(node, 1)


def test_an_operator_whose_code_is_gone_costs_itself_only(place: Place) -> None:
    place.stop()
    file = place.root / "operators" / "Op" / "operator.json"
    file.write_text(file.read_text().replace("tests.unit.operators:", "no_such_module:"))
    node = place.start()
    assert node.lifecycle(P).state is State.OWNED
    with pytest.raises(OperatorNotImportable):
        send(node, 0)
