from __future__ import annotations

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stateflow.changes import ChangeSet, Mutations, chain, net
from stateflow.errors import TransferCorrupt
from stateflow.partition.change_feed import NO_CHANGES
from stateflow.storage import MemoryStore

EXAMPLE = ChangeSet(
    "Delay",
    3,
    epoch=2,
    sequence=17,
    source="sensor",
    position=16,
    mutations=Mutations(puts=[(b"k", b"v"), (b"", b"")], deletes=[b"gone"], clears=[(b"a", b"b")]),
)
octets = st.binary(max_size=12)
change_sets = st.builds(
    ChangeSet,
    st.text(max_size=8),
    st.integers(0, 65_535),
    st.integers(0, 1 << 60),
    st.integers(0, 1 << 60),
    st.text(max_size=8),
    st.integers(-1, 1 << 60),
    st.builds(
        Mutations,
        st.lists(st.tuples(octets, octets), max_size=4),
        st.lists(octets, max_size=4),
        st.lists(st.tuples(octets, octets), max_size=4),
    ),
)


@given(change_sets)
def test_round_trip(change_set: ChangeSet) -> None:
    again = ChangeSet.decode(change_set.encode())
    assert again == change_set
    assert again.encode() == change_set.encode()


def test_the_format_of_version_1_stays_readable() -> None:
    written = bytes.fromhex(
        "9a01a544656c6179030211a673656e736f7210"
        + "91" + "92" + "c40161" + "c40162"
        + "91" + "c404676f6e65"
        + "92" + "92" + "c4016b" + "c40176" + "92" + "c400" + "c400"
    )  # fmt: skip
    assert ChangeSet.decode(written + xxhash.xxh64_digest(written)) == EXAMPLE
    assert EXAMPLE.encode()[:-8] == written


def test_every_flipped_bit_is_noticed() -> None:
    data = EXAMPLE.encode()
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(TransferCorrupt):
                ChangeSet.decode(bytes(broken))


def test_every_cut_is_noticed() -> None:
    data = EXAMPLE.encode()
    for length in range(len(data)):
        with pytest.raises(TransferCorrupt):
            ChangeSet.decode(data[:length])
    with pytest.raises(TransferCorrupt):
        ChangeSet.decode(data + b"\0")


def test_another_version_is_named() -> None:
    body = msgpack.packb([2, "Op", 0, 1, 1, "s", 0, [], [], []])
    with pytest.raises(TransferCorrupt, match="format 2, this program reads 1"):
        ChangeSet.decode(body + xxhash.xxh64_digest(body))


def test_mutations_know_whether_they_are_empty() -> None:
    assert not Mutations()
    assert Mutations(puts=[(b"", b"")])
    assert Mutations(deletes=[b""])
    assert Mutations(clears=[(b"", b"")])


def _encoded(count: int) -> list[bytes]:
    return [ChangeSet("Op", 0, 1, n, "s", n, Mutations(puts=[(b"k", str(n).encode())])).encode() for n in range(count)]


def _fold(sets: list[bytes], start: bytes = NO_CHANGES) -> bytes:
    for each in sets:
        start = chain(start, each)
    return start


def test_a_chain_knows_what_came_and_in_which_order() -> None:
    sets = _encoded(5)
    whole = _fold(sets)
    assert whole == _fold(sets[3:], _fold(sets[:3]))
    others = [sets[:4], sets[1:], [*sets[:2], sets[3], sets[2], sets[4]], [*sets, sets[4]], []]
    digests = {_fold(other) for other in others}
    assert whole not in digests
    assert len(digests) == len(others)
    assert len(whole) == 16
    assert _fold(sets, bytes(15) + b"\1") != whole


keys = st.text("abc", max_size=3).map(str.encode)
writes = st.builds(
    Mutations,
    st.lists(st.tuples(keys, octets), max_size=4),
    st.lists(keys, max_size=3),
    st.lists(st.tuples(keys, keys).map(lambda ends: (min(ends), max(ends))), max_size=2),
)


@given(writes, st.lists(writes, max_size=8))
def test_what_several_change_sets_come_to(before: Mutations, several: list[Mutations]) -> None:
    one_by_one, at_once = MemoryStore(), MemoryStore()
    for mutations in (before, *several):
        one_by_one.apply(mutations)
    at_once.apply(before)
    at_once.apply(net(several))
    assert list(at_once.scan(b"")) == list(one_by_one.scan(b""))


def test_of_a_key_that_is_written_again_and_again_one_value_is_left() -> None:
    several = [Mutations(puts=[(b"k", bytes([n])), (b"l", b"x")], clears=[(b"m", b"n")]) for n in range(100)]
    assert net(several) == Mutations([(b"k", bytes([99])), (b"l", b"x")], [], [(b"m", b"n")])
