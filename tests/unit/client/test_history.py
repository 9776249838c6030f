"""A client's knowledge of its partitions, against a plain model, with losses anywhere and clients that restart."""

from __future__ import annotations

import tracemalloc
import zlib
from random import Random

import msgpack
import pyarrow as pa
import pytest

from stateflow.client.history import PLAIN_MAX, History, Sent, _Kept
from stateflow.errors import DecodeError, PositionGap
from stateflow.partition.layout import Session
from stateflow.rpc.apply import BatchRows
from tests.applying import words

ME = Session(5, "me")
EVERYTHING = 1 << 30


def history(partitions: int = 3, bytes_max: int = EVERYTHING) -> History:
    return History("Op", "s", partitions, bytes_max)


def batch(number: int, *partitions: int, size: int = 10) -> Sent:
    return Sent(number, words({p: bytes([number % 256]) * size for p in partitions}))


def sent(h: History, *batches: Sent) -> None:
    for each in batches:
        h.acknowledged(each)


def test_what_partitions_must_contain() -> None:
    h = history()
    assert h.after(0, [0, 1], rewind=False) == {}
    sent(h, batch(0, 0), batch(1, 0, 1), batch(2, 0))
    assert h.after(3, [0, 1, 2], rewind=False) == {0: 2, 1: 1}
    assert h.after(1, [0, 1], rewind=False) == {0: 1, 1: 1}, "only a replay"
    h.heard({0: 0, 1: 1})
    assert h.lost == {0}
    assert h.after(3, [0, 1], rewind=False) == {0: 2, 1: 1}
    assert h.after(1, [0, 1], rewind=True) == {0: 0, 1: 1}


def test_what_is_sent_again_is_what_each_partition_lacks_in_order() -> None:
    h = history()
    sent(h, batch(0, 0, 1), batch(1, 0), batch(2, 1, 2), batch(3, 0, 1), batch(4, 2))
    h.heard({0: 0, 1: 2, 2: 4})
    assert [(b.number, set(b.rows)) for b in h.missing()] == [(1, {0}), (3, {0, 1})]
    for each in h.missing():
        h.acknowledged(each)
    assert (h.lost, h.missing()) == (set(), [])
    h.heard({0: 3, 1: -1, 2: 4})
    assert [(b.number, set(b.rows)) for b in h.missing()] == [(0, {1}), (2, {1}), (3, {1})]


def test_what_is_not_kept_is_named() -> None:
    shared = batch(0, 0).rows.schema
    h = history(bytes_max=3 * _Kept.of(batch(0, 0), shared).size + len(shared))
    sent(h, *(batch(n, n % 2) for n in range(10)))
    h.heard({0: 6, 1: 9})
    assert [b.number for b in h.missing()] == [8]
    h.heard({0: 8, 1: 3})
    with pytest.raises(PositionGap, match="from 5 on") as caught:
        h.missing()
    assert (caught.value.where["expected"], caught.value.where["partitions"]) == (5, "1")


def test_no_more_partitions_of_batches_are_remembered_than_there_is_room_for() -> None:
    """The log of 65,536 batches took 2 GB for an operator with 1024 partitions."""
    h = History("Op", "s", 500, EVERYTHING, 4_000)
    sent(h, *(batch(n, *range(500)) for n in range(10)))
    assert len(h._log) == len(h._kept) == 3
    h.heard(dict.fromkeys(range(500), 6) | {1: 7})
    assert [(b.number, len(b.rows)) for b in h.missing()] == [(7, 499), (8, 500), (9, 500)]
    h.heard(dict.fromkeys(range(500), 5))
    with pytest.raises(PositionGap, match="from 6 on"):
        h.missing()


def test_nothing_is_kept_of_batches_without_rows() -> None:
    """Batches without rows have no size, so that any number of them was kept."""
    h = history()
    sent(h, *(batch(n) for n in range(10)), batch(10, 0))
    assert list(h._kept) == list(h._log) == [10]
    assert h.position == 10
    h.heard({})
    assert [b.number for b in h.missing()] == [10]


def test_what_is_kept_takes_no_more_memory_than_is_counted() -> None:
    """Only the values of rows were counted: batches of one row took 15 times the limit."""
    column = pa.array(["a"])
    rows = pa.RecordBatch.from_arrays([column] * 8, [f"c{number}" for number in range(8)])
    h, count = history(), 500
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()
        for number in range(count):
            copy = rows.take(pa.array([0]))
            sent(h, Sent(number, BatchRows(copy.schema.serialize().to_pybytes(), copy, [0], [1])))
        del copy
        after = tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()
    finally:
        tracemalloc.stop()
    assert sum(after) - sum(before) < h._kept_bytes + h._log_bytes


def test_a_rewind_by_hand_leaves_nothing_out() -> None:
    h = history(bytes_max=0)
    sent(h, batch(0, 0, 1), batch(1, 0), batch(2, 1), batch(5, 0), batch(6, 1))
    h.heard({0: 0, 1: 2})
    for number in (2, 5, 6):
        with pytest.raises(PositionGap, match="from 1 on"):
            h.rewinding(number)
    for number, partition in ((0, 0), (1, 0), (2, 1)):
        h.rewinding(number)
        sent(h, batch(number, partition))
    with pytest.raises(PositionGap, match="from 3 on"):
        h.rewinding(6)
    h.rewinding(5)  # numbers 3 and 4 were never used
    sent(h, batch(5, 0))
    h.rewinding(6)
    sent(h, batch(6, 1))
    assert not h.incomplete


def test_a_successor_knows_what_its_predecessor_was_acknowledged() -> None:
    h = history()
    sent(h, batch(0, 0), batch(1, 1))
    known = h.known(ME, 2, [2])
    after = history()
    after.resume({1: 1, 2: 2}, [History("Op", "s", 3, 0).known(ME, 1, [1]), known])
    assert (after.lost, after.position) == ({0}, 2)
    with pytest.raises(PositionGap, match="from 0 on"):
        after.missing()
    quiet = history()
    quiet.resume({0: 0, 1: 1}, [h.known(ME, 2, [1, 2])])
    assert (quiet.incomplete, quiet.position) == (False, 2), "batch 2 was perhaps never acknowledged"
    told = history()
    told.resume({0: 0, 1: 1}, [h.known(ME, 2, [1, 2])], acknowledged=2)
    assert told.lost == {1, 2}
    unsure = history()
    unsure.resume({0: 0, 1: 1, 2: 2}, [known], acknowledged=4)
    assert unsure.lost == set()
    with pytest.raises(PositionGap, match="from 3 on"):
        unsure.missing()
    for number in (3, 4):
        unsure.rewinding(number)
        sent(unsure, batch(number, 0))
    assert not unsure.incomplete


def packed(behind: object, among: object, number: object = 2, id: object = "me", version: int = 2) -> bytes:
    if version == 1:
        return bytes(msgpack.packb([1, 5, id, number, behind, among]))
    return bytes(msgpack.packb([version, 5, id, number, zlib.compress(msgpack.packb([behind, among]))]))


@pytest.mark.parametrize(
    "known",
    [
        b"",
        msgpack.packb([2, "?"]),
        packed([0, 0, 0], b"\0\0\1", version=3),
        packed([0, 0], b"\0\1"),
        packed([0, 0, 0], b"\0\1"),
        packed([0, 0, 0, 0], b"\0\1\0\0"),
        packed([0, 0, 0], 7),
        packed(7, b"\0\0\1"),
        packed([0, "a", 0], b"\0\0\1"),
        packed([0, True, 0], b"\0\0\1"),
        packed([0, -1, 0], b"\0\0\1"),
        packed([0, 4, 0], b"\0\0\1"),
        packed([0, 0, 0], b"\0\0\1", number="2"),
        packed([0, 0, 0], b"\0\0\1", id=7),
        packed([0, 0, 0], [3], version=1),
        packed([0, 0, 0], [-1], version=1),
        packed([0, 0, 0], ["0"], version=1),
        packed([], [], version=1),
    ],
    ids=str,
)
def test_what_no_client_writes_is_refused(known: bytes) -> None:
    with pytest.raises(DecodeError, match="the record of the source's last client cannot be read"):
        history().resume({0: 0}, [history().known(ME, 1, [1]), known])


def test_what_the_release_before_wrote_is_read() -> None:
    h = history()
    h.resume({1: 1}, [packed([3, 1, 0], [2], version=1)])
    assert (h.lost, h.position) == ({2}, 2)


@pytest.mark.parametrize(("partitions", "version"), [(3, 1), (PLAIN_MAX, 1), (PLAIN_MAX + 1, 2)])
def test_the_release_before_reads_what_an_operator_of_not_too_many_partitions_stores(
    partitions: int, version: int
) -> None:
    h = History("Op", "s", partitions, 1 << 20)
    sent(h, batch(0, 0), batch(1, 1))
    known = h.known(ME, 2, [2, 0])
    assert msgpack.unpackb(known)[0] == version
    if version == 1:
        behind = [2, 1, *[3] * (partitions - 2)]
        assert msgpack.unpackb(known) == [1, ME.generation_us, ME.id, 2, behind, [2, 0]]
    after = History("Op", "s", partitions, 1 << 20)
    after.resume({1: 1, 2: 2}, [known])
    assert (after.lost, after.position) == ({0}, 2)


def test_a_client_with_a_history_for_each_partition_needs_memory_for_one() -> None:
    """Each had numbers of all partitions, and sent them with each batch: 409 MB for an operator of 4,096 partitions."""
    tracemalloc.start()
    try:
        h = History("Op", "s", 65_536, 1 << 20, only=7)
        h.resume({7: 3}, [])
        sent(h, batch(4, 7))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert h.known(ME, 5, [7]) == b""
    assert h.after(5, [7], rewind=False) == {7: 4}
    h.heard({7: 3})
    assert [each.number for each in h.missing()] == [4]


def test_a_loss_that_is_accepted_is_forgotten() -> None:
    h = history(bytes_max=0)
    sent(h, batch(0, 0), batch(1, 0), batch(2, 1))
    h.heard({1: 2})
    assert h.accept_loss() == 0
    assert not h.incomplete
    assert h.after(3, [0, 1], rewind=False) == {1: 2}
    assert history().accept_loss() is None


def test_what_was_given_up_is_not_sent_again_after_another_loss() -> None:
    """Batches that were given up are not sent again after another loss.

    Their rows may have been sent under other numbers.
    """
    h = history()
    sent(h, batch(0, 0, 1), batch(1, 0), batch(2, 0, 1), batch(3, 1))
    h.heard({0: 0, 1: 3})
    assert h.accept_loss() == 1
    sent(h, batch(4, 0), batch(5, 0))
    h.heard({0: 0, 1: 0})
    assert [(b.number, set(b.rows)) for b in h.missing()] == [(2, {1}), (3, {1}), (4, {0}), (5, {0})]
    assert h._kept_bytes == sum(each.size for each in h._kept.values())
    h.let_go()
    with pytest.raises(PositionGap, match="from 2 on"):
        h.missing()
    h.heard({0: 0, 1: 3})
    with pytest.raises(PositionGap, match="from 4 on"):
        h.missing()


def test_what_a_former_client_took_the_place_of_is_not_sent_again_after_another_loss() -> None:
    h = history()
    h.resume({0: 4, 1: 4}, [])
    sent(h, batch(5, 0, 1), batch(6, 0))
    h.heard({0: 6, 1: 5}, others={0})
    assert h.accept_loss() == 5
    sent(h, batch(7, 0))
    h.heard({0: 4, 1: 4})
    assert [(b.number, set(b.rows)) for b in h.missing()] == [(5, {1}), (7, {0})]


def test_a_former_client_that_was_let_in_again_is_told_of() -> None:
    """Two clients sent under the same numbers, and only one batch of each number was applied: the client reports it."""
    h = history()
    h.resume({0: 4, 1: 4}, [])
    sent(h, batch(5, 0, 1))
    h.heard({0: 4, 1: 5}, others={0})
    assert h.lost == {0}
    assert [each.number for each in h.missing()] == [5], "nobody has sent anything there since"
    h.heard({0: 6, 1: 5}, others={0})
    for asked in (h.missing, lambda: h.rewinding(5)):
        with pytest.raises(PositionGap, match="an earlier client") as caught:
            asked()
        assert (caught.value.where["expected"], caught.value.where["partitions"]) == (5, "0")
    assert h.taken == {0}
    assert h.incomplete
    assert h.accept_loss() == 5
    assert not h.incomplete
    assert h.position == 6, "numbers that are taken are not used again"
    sent(h, batch(7, 0))
    h.heard({0: 7, 1: 5})
    assert not h.incomplete


@pytest.mark.parametrize("seed", range(200))
def test_acknowledged_is_contained_in_the_end(seed: int) -> None:
    """Batches that were acknowledged are in the partitions at the end.

    Partitions are lists of batches that accept what real ones would, and lose suffixes at any time.
    """
    random = Random(seed)
    count = random.choice((1, 3, 8))
    state: list[list[int]] = [[] for _ in range(count)]
    of_batch: dict[int, list[int]] = {}
    h = history(count, random.choice((0, 60, EVERYTHING)))

    def asked() -> dict[int, int]:
        return {p: has[-1] for p, has in enumerate(state) if has}

    def apply(each: Sent, rewind: bool) -> bool:
        """Sends a batch to its partitions. Returns False if a partition refused it."""
        after = h.after(each.number, each.rows, rewind)
        whole = True
        for p in each.rows:
            if random.random() < 0.05:
                del state[p][random.randrange(len(state[p]) + 1) :]
            last = state[p][-1] if state[p] else -1
            if last >= each.number:
                assert rewind or last == each.number
            elif after.get(p, -1) > last:
                whole = False
            else:
                state[p].append(each.number)
        if whole:
            h.acknowledged(each)
        return whole

    def by_hand(first: int, last: int) -> None:
        while True:
            for number in range(first, last + 1):
                h.rewinding(number)
                if not apply(batch(number, *of_batch[number]), True):
                    h.heard(asked())
                    try:
                        h.rewinding(number)
                    except PositionGap as gap:
                        first = gap.where["expected"]
                    else:
                        first = number
                    break
            else:
                return

    def mend(last: int) -> None:
        h.heard(asked())
        while h.incomplete:
            try:
                if not all(apply(each, True) for each in h.missing()):
                    h.heard(asked())
            except PositionGap as gap:
                by_hand(gap.where["expected"], last)

    for number in range(30):
        of_batch[number] = sorted(random.sample(range(count), random.randint(1, count)))
        while not apply(batch(number, *of_batch[number]), False):
            mend(number - 1)
    mend(29)
    for p in range(count):
        assert state[p] == [n for n, partitions in of_batch.items() if p in partitions]
