"""Trials of an operator's new version on all stored state, before it serves. A trial changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.errors import DecodeError, EncodeError, OperatorFailed, SchemaMismatch
from stateflow.operator.operator import Operator, describe
from stateflow.partition import verification
from stateflow.partition.verification import pieces
from stateflow.partitioner import partition_of
from stateflow.state.cells import CELL, COUNT, pack_cell, row_part, split_address
from stateflow.types import PartitionId
from tests.unit.partition import test_replica_redeploy
from tests.unit.partition.test_replica_redeploy import Cluster

FAILING = """
    def migrate_state(self, version, old):
        raise RuntimeError("no such column")
"""
OPENED = """
    def open(self, ctx):
        self.by = 10

    def migrate_state(self, version, old):
        self.s.value = {"was": [each * self.by for each in old.s]}
"""


def check(cluster: Cluster, cls: type[Operator]) -> list[int]:
    """Returns the pieces of each partition, tried as the controller lets replicas do before it records the version."""
    assert cluster.spec is not None
    spec, trials = describe(cls, 2).after(cluster.spec), cluster.node.trials
    found = []
    for partition in (PartitionId("Op", number) for number in (0, 1)):
        loaded = trials.load(spec)
        if not trials.is_needed(spec, loaded, partition):
            continue
        verification = trials.begin(spec, loaded, partition)
        assert verification is not None
        try:
            found.append(sum(1 for _ in iter(verification.step, False)))
        finally:
            trials.end(verification)
    assert not list(cluster.node._registry.snapshots.iterdir())
    return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.syspath_prepend(tmp_path)
    made = Cluster(tmp_path)
    yield made
    made.node.close()


def test_a_migration_that_fails_is_refused_before_it_serves(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0, 1)
    with pytest.raises(
        OperatorFailed,
        match=r"migrate_state\(\) raised RuntimeError: no such column .*deploy again, or roll back: .*upgrade Op --to",
    ) as raised:
        check(cluster, cluster.install("s = state.value(dict)", version=2, more=FAILING))
    assert raised.value.where["key"] == "'k0'"
    cluster.install("s = state.value(list[int])", "self.s.value += [2]")
    cluster.send(0)
    assert cluster.read("s") == [[1, 2], [1]], "the version that was deployed serves on"


def test_a_migration_is_tried_as_it_will_run_and_changes_nothing(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0, 1)
    cls = cluster.install("s = state.value(dict)", version=2, more=OPENED)
    check(cluster, cls)
    cluster.deploy(cls)
    assert cluster.read("s") == [{"was": [10]}] * 2


def test_what_a_migration_makes_of_a_state_must_fit_it(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0)
    more = "\n    def migrate_state(self, version, old):\n        self.s.value = str(old.s)\n"
    with pytest.raises(EncodeError, match=r"partition=0"):
        check(cluster, cluster.install("s = state.value(dict)", version=2, more=more))


def test_a_migration_has_the_replicas_limit_of_values(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    small = test_replica_redeploy.SETTINGS.model_copy(update={"value_bytes_max": 100})
    monkeypatch.setattr(test_replica_redeploy, "SETTINGS", small)
    cluster.deploy(cluster.install("s = state.value(str)", "self.s.value = 'a'"))
    cluster.send(0)
    more = "\n    def migrate_state(self, version, old):\n        self.s.value = old.s * 200\n"
    cls = cluster.install("s = state.value(str)", version=2, more=more)
    with pytest.raises(EncodeError, match="200 bytes"):
        check(cluster, cls)
    cluster.deploy(cls)
    with pytest.raises(EncodeError, match="200 bytes"):
        cluster.send(0)


POINT = "s = state.value(Point)"
LARGE = "self.s.value = self.s.value or Point(2**53 + 1)"
LIFTED = """
    def migrate_state(self, version, old):
        self.s.value = Point(float(old.s["x"]))
"""


def test_values_that_a_wider_field_does_not_hold_are_found_before_it_serves_and_its_remedies_work(
    cluster: Cluster,
) -> None:
    cluster.deploy(cluster.install(POINT, LARGE))
    cluster.send(0, 1)
    with pytest.raises(DecodeError, match=r"declare it as int \| float, which reads both, or write migrate_state and"):
        check(cluster, cluster.install(POINT, point="x: float"))
    both = cluster.install(POINT, point="x: int | float")
    check(cluster, both)
    cluster.deploy(both)
    assert [point.x for point in cluster.read("s")] == [2**53 + 1] * 2
    lifted = cluster.install(POINT, point="x: float", version=2, more=LIFTED)
    check(cluster, lifted)
    cluster.deploy(lifted)
    assert [point.x for point in cluster.read("s")] == [float(2**53)] * 2


@pytest.mark.parametrize("remedy", ["both", "migrate_state"])
def test_a_value_that_cannot_be_read_can_be_after_each_of_its_remedies(cluster: Cluster, remedy: str) -> None:
    """A value that cannot be decoded can be read after either remedy.

    Declaring the old type alone was refused with schema_mismatch, as other values had been stored with the new one
    meanwhile.
    """
    cluster.deploy(cluster.install(POINT, LARGE))
    cluster.send(0, 1)
    cluster.deploy(cluster.install(POINT, "self.s.value = Point(0.5)", point="x: float"))
    cluster.send(0)
    with pytest.raises(DecodeError, match=r"declare it as int \| float, .* or write migrate_state and raise"):
        cluster.read("s")
    if remedy == "both":
        mended = cluster.install(POINT, point="x: int | float")
        expected = [0.5, 2**53 + 1]
    else:
        mended = cluster.install(POINT, point="x: float", version=2, more=LIFTED)
        expected = [0.5, float(2**53)]
    check(cluster, mended)
    cluster.deploy(mended)
    assert [point.x for point in cluster.read("s")] == expected


ONE_FAILS = """
    def migrate_state(self, version, old):
        if {condition}:
            raise RuntimeError("not this one")
        self.s.value = {{}}
"""


def test_every_key_is_tried_and_the_one_that_fails_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is tried, and the error names the one that fails.

    A sample of keys used to let others through, and each of their batches failed later.
    """
    monkeypatch.setattr(verification, "PIECE_KEYS", 2)
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [int(row.k)]"))
    keys = [n for n in range(100) if partition_of(str(n), 2) == 0][:7]
    for n in keys:
        cluster.send(0, key=str(n))
    more = ONE_FAILS.format(condition=f"old.s == [{keys[-1]}]")
    with pytest.raises(OperatorFailed, match=r"not this one.*partition=0") as raised:
        check(cluster, cluster.install("s = state.value(dict)", version=2, more=more))
    assert raised.value.where["key"] == repr(str(keys[-1]))
    more = ONE_FAILS.format(condition="old.s == [101]")
    assert check(cluster, cluster.install("s = state.value(dict)", version=2, more=more)) == [4]


def test_what_a_version_does_not_change_is_not_read(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0)
    assert check(cluster, cluster.install("s = state.value(list[int]); n = state.counter()")) == []


ON_TIMER = "\n    def on_timer(self, timer, ctx): ...\n"


def test_a_version_that_does_not_answer_stored_timers_is_refused_before_it_serves(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("", "ctx.set_timer(2**60, name='end')", more=ON_TIMER))
    cluster.send(0)
    quiet = cluster.install("")
    with pytest.raises(OperatorFailed, match=r"timers are stored, .* has no on_timer\(\) .*partition=0"):
        check(cluster, quiet)
    cluster.send(0)  # the partition is open now
    with pytest.raises(OperatorFailed, match="timers are stored"):
        check(cluster, quiet)
    assert check(cluster, cluster.install("", more=ON_TIMER)) == []


WINDOWED = """
    event_time = "k"
    def on_timer(self, timer, ctx): ...
    from datetime import timedelta
    from stateflow import SessionWindows, SlidingWindows, TumblingWindows
    {windows}
"""
TUMBLING, SESSIONS = "TumblingWindows(timedelta(hours=1))", "SessionWindows(timedelta(hours=1), print)"


@pytest.mark.parametrize(("before", "after"), [(TUMBLING, SESSIONS), (SESSIONS, TUMBLING)])
def test_windows_of_another_kind_under_a_name_of_open_ones_are_refused_before_they_serve(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setattr(verification, "PIECE_KEYS", 1)
    opening = "ctx.timestamp = 0; self.visits.of(ctx)"
    cluster.deploy(cluster.install("", opening, more=WINDOWED.format(windows=f"visits = {before}")))
    cluster.send(0)
    with pytest.raises(SchemaMismatch, match=r"windows 'visits' are .*partition=0.*another name"):
        check(cluster, cluster.install("", opening, more=WINDOWED.format(windows=f"visits = {after}")))
    both = f"visits = {before}; others = {after}"
    assert check(cluster, cluster.install("", opening, more=WINDOWED.format(windows=both))) == [1]


TAGS = [bytes([number]) * 8 for number in (1, 2)]
KEYS = [f"k{number:03d}".encode() for number in range(50)]
CELLS = {
    space + tag + row_part(key): pack_cell(b"v" * 10)
    for space in (CELL, COUNT)
    for tag, some in zip(TAGS, (KEYS, KEYS[::2]), strict=True)
    for key in some
}


@pytest.mark.parametrize(("keys_max", "bytes_max", "sizes"), [(20, 1 << 20, [20, 20, 10]), (1000, 1, [1] * 50)])
def test_each_piece_has_some_keys_with_the_cells_of_all_states(
    monkeypatch: pytest.MonkeyPatch, keys_max: int, bytes_max: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(verification, "PIECE_KEYS", keys_max)
    monkeypatch.setattr(verification, "PIECE_BYTES", bytes_max)
    found = list(pieces(DictReader(CELLS), TAGS))
    assert [piece.keys for piece in found] == sizes
    keys = iter(KEYS)
    for piece in found:
        mine = [next(keys) for _ in range(piece.keys)]
        for tag, here in zip(TAGS, (mine, [key for key in mine if key in KEYS[::2]]), strict=True):
            assert [split_address(address)[0] for address, _ in piece.scan(CELL + tag)] == here
            assert [split_address(address)[0] for address, _ in piece.scan(COUNT + tag)] == here
            for key in here:
                assert len(list(piece.scan(CELL + tag + row_part(key)))) == 1
                assert piece.get(CELL + tag + row_part(key)) == pack_cell(b"v" * 10)


def test_what_is_no_cell_is_read_from_the_store() -> None:
    (piece,) = pieces(DictReader(CELLS | {b"rx": b"described"}), TAGS)
    assert (piece.get(b"rx"), list(piece.scan(b"r"))) == (b"described", [(b"rx", b"described")])


class DictReader:
    def __init__(self, cells: dict[bytes, bytes]) -> None:
        self._cells = cells

    def get(self, cell: bytes, /) -> bytes | None:
        return self._cells.get(cell)

    def scan(self, prefix: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(each for each in self._cells.items() if each[0].startswith(prefix)))
