"""Verification reads a partition whole, reports what is wrong with it, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore, Codec
from stateflow.partition.control import Verification
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.verification import FAULTS_MAX, Stopped, Verifier
from stateflow.state import declarations_of
from stateflow.state.cells import CELL, encode_row_key, pack_cell, row_part
from tests.unit.operators import Count
from tests.unit.partition.test_replica import P, Two


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    made.send(made.a, *range(6))
    yield made
    made.close()


def verified(node: ReplicaNode) -> Verification:
    copy = node.verifier.begin(P)
    assert copy is not None
    try:
        return node.verifier.read(copy)
    finally:
        node.verifier.end(copy)


def put(node: ReplicaNode, *entries: tuple[bytes, bytes]) -> None:
    local = node._registry.local(P)
    node._registry.store(local).apply(Mutations(puts=list(entries)))


def total_of(key: str) -> bytes:
    return CELL + declarations_of(Count)["total"].tag + row_part(encode_row_key(key))


def sorted_file(two: Two) -> Path:
    two.a._registry.store(two.a._registry.local(P)).flush()
    return max((two.root / "a" / "operators").rglob("*.sst"), key=lambda path: path.stat().st_size)


def test_a_sound_partition_is_what_its_checkpoint_says(two: Two) -> None:
    found = verified(two.a)
    assert (found.done, found.faults, found.epoch) == (True, [], 1)
    assert found.cells >= 3
    assert found.bytes_read > 0
    saved = two.a.checkpointer.take(P, CheckpointStore(str(two.root / "store"), codec=Codec()))
    assert saved is not None
    assert (found.digest, found.sequence) == (saved.manifest.state_digest, saved.manifest.sequence)
    assert list((two.root / "a" / "snapshots").iterdir()) == []
    assert two.states(two.a) == {"k0": 3, "k1": 5, "k2": 7}


def test_what_is_not_owned_here_is_not_read(two: Two) -> None:
    assert two.b.verifier.begin(P) is None
    assert two.a.verifier.begin(P, standby_of=0) is None, "it owns it, and does not follow"


def test_a_copy_that_follows_is_read_at_the_moment_of_its_owner(two: Two) -> None:
    base = two.warm(two.a, two.b, "m")
    assert two.b.verifier.begin(P, standby_of=0, wait_s=0.0) is None, "nothing has arrived"
    two.b.receiver.open_incoming(P, "m", base)
    two.send(two.a, 7)
    owned = verified(two.a)
    late = two.b.verifier.begin(P, standby_of=owned.sequence, wait_s=0.01)
    assert late is not None
    assert late.sequence < owned.sequence
    two.follow(two.a, two.b, "m", base, base.sequence)
    copy = two.b.verifier.begin(P, standby_of=owned.sequence)
    assert copy is not None
    found = two.b.verifier.read(copy)
    assert (found.sequence, found.digest, found.faults) == (owned.sequence, owned.digest, [])
    two.b.verifier.end(late)
    two.b.verifier.end(copy)


def test_a_flipped_byte_is_found_and_what_is_read_from_memory_goes_on(two: Two) -> None:
    file = sorted_file(two)
    assert two.states(two.a) == {"k0": 3, "k1": 5, "k2": 7}
    data = bytearray(file.read_bytes())
    data[len(data) // 50] ^= 0xFF
    file.write_bytes(data)
    found = verified(two.a)
    assert found.digest == ""
    (fault,) = found.faults
    assert fault.code == "state_damaged"
    assert "checksum mismatch" in fault.what
    assert fault.remedy == (
        "restore the partition with `stateflow checkpoint restore Op 0`; if only a standby's copy is damaged, begin a "
        "new standby instead"
    )
    assert two.states(two.a) == {"k0": 3, "k1": 5, "k2": 7}


def test_a_cell_that_does_not_decode_is_named(two: Two) -> None:
    put(two.a, (total_of("k1"), pack_cell(b"no number")))
    found = verified(two.a)
    (fault,) = found.faults
    assert fault.code == "undecodable_value"
    assert (fault.where["state"], fault.where["key"]) == ("total", "k1")
    assert found.digest, "all of it could be read"


def test_of_many_the_first_are_named_and_all_are_counted(two: Two) -> None:
    put(two.a, *((total_of(f"x{number}"), b"\x7f") for number in range(FAULTS_MAX + 4)))
    found = verified(two.a)
    assert len(found.faults) == FAULTS_MAX + 1
    assert f"{FAULTS_MAX + 4} state cells" in found.faults[-1].what


def test_what_is_not_declared_is_looked_at_for_its_format(two: Two) -> None:
    put(two.a, (CELL + b"dropped!" + row_part(b"k"), pack_cell(b"anything")))
    assert verified(two.a).faults == []
    put(two.a, (CELL + b"dropped!" + row_part(b"k"), b""))
    assert "unknown format" in verified(two.a).faults[0].what


def test_it_is_as_slow_as_it_is_told_and_ends_when_nobody_waits(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    registry: Any = two.a._registry
    now = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(registry, "settings", registry.settings.model_copy(update={"verify_bytes_per_s": 100}))
    verifier = Verifier(registry, sleep)
    copy = verifier.begin(P)
    assert copy is not None
    monkeypatch.setattr(registry, "clock", Clock())
    monkeypatch.setattr(registry, "served_at", float("-inf"))
    found = verifier.read(copy)
    assert sum(slept) == pytest.approx(found.bytes_read / 100, abs=0.1)
    with pytest.raises(Stopped):
        verifier.read(copy, lambda: True)
    verifier.end(copy)
