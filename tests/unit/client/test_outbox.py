"""The outbox: what it logs is there for the next process, in order and within its bound."""

from __future__ import annotations

import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from stateflow.client.outbox import FILE, GROUP_BYTES, GROUP_PARTS, Base, Outbox
from stateflow.errors import (
    DataDirLocked,
    DiskRefused,
    OperatorFailed,
    OutboxDamaged,
    OutboxForeign,
    OutboxFull,
    StateflowError,
)
from tests.applying import rows_of, word_of, words

#: limit up to which each number is taken by itself
ALONE = 10**9


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "somewhere" / "outbox"


@pytest.fixture
def outbox(directory: Path) -> Iterator[Outbox]:
    found = Outbox(directory, "Op", "s", 10_000)
    yield found
    found.close()


def reopened(directory: Path, bytes_max: int = 10_000) -> Outbox:
    return Outbox(directory, "Op", "s", bytes_max)


def log(outbox: Outbox, number: int, *partitions: int, attempted: tuple[int, ...] = ()) -> None:
    rows = words({p: b"%d for %d" % (number, p) for p in partitions})
    outbox.log(number, rows, attempted, None, [])


def queue(outbox: Outbox, partition: int) -> list[tuple[int, bytes, bool]]:
    """Takes out all that is left of a partition's queue, one batch after the other."""
    found = []
    while (part := outbox.next(partition, ALONE)) is not None:
        found.append((part.number, word_of(part.rows, partition), part.attempted))
        outbox.delivered([(partition, part.number)])
    return found


def test_what_was_logged_is_there_in_order_for_the_next_process(outbox: Outbox, directory: Path) -> None:
    assert (outbox.newest, outbox.size, outbox.next(0)) == (-1, 0, None)
    log(outbox, 0, 0, 2, attempted=(0,))
    log(outbox, 1, 2)
    outbox.log(2, words({0: b"", 2: b""}), [], 77, [(0, 0)])
    bytes_ = outbox.size
    outbox.close()
    again = reopened(directory)
    assert again.newest == 2
    assert again.parts() == {0: 1, 2: 3}
    assert again.size == bytes_
    first = again.next(0)
    assert first is not None
    assert (first.number, first.watermark_us, first.rows.rows, list(first.rows)) == (2, 77, None, [0])
    assert again.next(2, ALONE) is not None
    assert queue(again, 2) == [(0, b"0 for 2", True), (1, b"1 for 2", False), (2, b"", False)]
    assert queue(again, 0) == [(2, b"", True)]
    assert again.size == 0
    assert again.newest == 2
    again.close()
    assert reopened(directory).newest == 2, "no number is given twice"


def test_batches_go_together_and_again_as_they_went(outbox: Outbox, directory: Path) -> None:
    for number in range(5):
        log(outbox, number, 0, attempted=(0,) if number == 0 else ())
    outbox.log(5, words({0: b"5"}), [], 77, [])
    log(outbox, 6, 0)

    def sent(of: Outbox) -> tuple[int, int, list[bytes], int | None, bool]:
        part = of.next(0)
        assert part is not None
        assert part.rows.rows is not None
        return part.number, part.parts, part.rows.rows["word"].to_pylist(), part.watermark_us, part.attempted

    assert sent(outbox) == (0, 1, [b"0 for 0"], None, True), "it was sent by itself"
    outbox.delivered([(0, 0)])
    together = [b"%d for 0" % number for number in range(1, 5)] + [b"5"]
    assert sent(outbox) == (5, 5, together, 77, False), "a promise counts behind its rows, and before those that follow"
    log(outbox, 7, 0)
    outbox.close()
    again = reopened(directory)
    assert sent(again) == (5, 5, together, 77, True)
    part = again.next(0)
    assert part is not None
    again.apart(part)
    assert [each[0] for each in queue(again, 0)] == [1, 2, 3, 4, 5, 6, 7]
    assert again.size == 0
    again.close()


def test_what_does_not_fit_together_goes_apart(directory: Path) -> None:
    outbox = Outbox(directory, "Op", "s", 1 << 30)
    other = rows_of({0: pa.record_batch([[1]], names=["n"])})
    large = b"x" * (GROUP_BYTES // 3)
    for number, rows in enumerate([words({0: b"a"}), words({0: b""}), other, *[words({0: large})] * 4]):
        outbox.log(number, rows, [], None, [])
    found = []
    while (part := outbox.next(0)) is not None:
        found.append((part.number, part.parts))
        outbox.delivered([(0, part.number)])
    assert found == [(1, 2), (2, 1), (4, 2), (6, 2)]
    for number in range(7, 7 + GROUP_PARTS + 1):
        log(outbox, number, 0)
    part = outbox.next(0)
    assert part is not None
    assert part.parts == GROUP_PARTS
    outbox.close()


def test_only_batches_that_go_together_are_read(directory: Path) -> None:
    outbox = Outbox(directory, "Op", "s", 1 << 30)
    for number in range(9):
        outbox.log(number, words({0: b"x" * (GROUP_BYTES // 3)}), [], None, [])
    read: list[tuple[object, ...]] = []
    outbox._db.row_factory = lambda _, row: read.append(row) or row
    part = outbox.next(0)
    assert part is not None
    assert part.parts == 2
    assert len(read) == 3, "the third one would exceed the limit"
    outbox.close()


def test_of_a_batch_that_has_no_room_nothing_is_kept(directory: Path) -> None:
    small = Outbox(directory, "Op", "s", 1_000)
    log(small, 0, 0, attempted=(0,))
    before = (small.parts(), small.size)
    for _ in range(2):
        with pytest.raises(OutboxFull, match="0 of them have not been retrieved"):
            small.log(1, words(dict.fromkeys(range(50), b"x" * 20)), [], None, [(0, 0)])
        assert (small.parts(), small.size) == before
        assert small.newest == 0
    small.log(1, words({0: b"more"}), [], None, [(0, 0)])
    assert small.parts() == {0: 1}
    small.close()


def test_outputs_and_what_was_refused_are_kept_until_they_are_taken(outbox: Outbox, directory: Path) -> None:
    log(outbox, 0, 0, 1)
    log(outbox, 1, 0, 1)
    for number, output in enumerate((b"made of 0", b"")):
        assert outbox.next(0, ALONE) is not None
        outbox.forwarded(0, number, output)
    refused = outbox.next(1, ALONE)
    assert refused is not None
    outbox.refuse(refused, OperatorFailed("process() raised", remedy="mend it", partition=1))
    held = (outbox.parts(), outbox.size)
    outbox.close()
    again = reopened(directory)
    assert (again.parts(), again.size) == held
    assert again.parts() == {1: 1}
    up_to, outputs = again.outputs()
    assert outputs == [b"made of 0"]
    mark, (one,) = again.refusals()
    assert one.rows == [{"word": b"0 for 1"}]
    assert isinstance(one.error, OperatorFailed)
    assert one.error.what == "process() raised"
    log(again, 2, 0)
    assert again.next(0) is not None
    again.forwarded(0, 2, b"made of 2")
    again.taken("output", up_to)
    again.taken("refused", mark)
    assert again.outputs()[1] == [b"made of 2"]
    assert again.refusals()[1] == []
    assert again.next(1) is not None
    again.log(3, words({}), [], None, [(1, 1)], {"output": again.outputs()[0]})
    assert again.size == 0
    again.close()


def test_a_lane_and_its_clients_are_remembered(outbox: Outbox, directory: Path) -> None:
    assert outbox.sender(3) == Base(None, -1)
    log(outbox, 0, 3, 4)
    outbox.delivered([(3, 0)])
    assert outbox.sender(3) == Base(None, 0)
    outbox.base(3, Base(17, 0))
    log(outbox, 1, 3)
    outbox.delivered([(3, 1)])
    refused = outbox.next(4)
    assert refused is not None
    outbox.refuse(refused, OperatorFailed("no", remedy="-"))
    outbox.begin("one", b"as it is")
    outbox.begin("two", b"as it is")
    outbox.close()
    again = reopened(directory)
    assert again.sender(3) == Base(17, 1)
    assert again.sender(4) == Base(None, -1), "what was refused is not contained"
    assert again.sessions() == {"one", "two"}
    assert again.deployment == b"as it is"
    again.close()


def test_it_is_one_clients_of_one_source(outbox: Outbox, directory: Path) -> None:
    with pytest.raises(DataDirLocked):
        reopened(directory)
    outbox.close()
    for operator, source in (("Other", "s"), ("Op", "other")):
        with pytest.raises(OutboxForeign, match="this outbox has"):
            Outbox(directory, operator, source, 10_000)
    reopened(directory).close()


@pytest.mark.parametrize("at", [0, 0.3, 0.6, 0.95])
def test_what_is_damaged_is_not_believed(outbox: Outbox, directory: Path, at: float) -> None:
    """Damage anywhere is found when the outbox is opened or read, unless it hits nothing that the outbox needs."""
    for number in range(20):
        log(outbox, number, 0, 1)
    outbox.close()
    path = directory / FILE
    data = bytearray(path.read_bytes())
    start = int(at * len(data))
    data[start : start + 400] = bytes(byte ^ 0xA5 for byte in data[start : start + 400])
    path.write_bytes(data)
    try:
        with closing(reopened(directory)) as damaged:
            found = [(partition, *row) for partition in (0, 1) for row in queue(damaged, partition)]
    except OutboxDamaged:
        return
    assert found == [(p, n, b"%d for %d" % (n, p), False) for p in (0, 1) for n in range(20)], "none is lost silently"


def test_a_byte_that_changed_in_a_row_is_noticed(outbox: Outbox, directory: Path) -> None:
    log(outbox, 0, 0, 1)
    log(outbox, 1, 0)
    outbox.forwarded(1, 0, b"an output of some length")
    outbox.close()
    path = directory / FILE
    data = path.read_bytes()
    assert b"0 for 0" in data
    path.write_bytes(data.replace(b"0 for 0", b"1 for 0").replace(b"some length", b"sore length"))
    damaged = reopened(directory)
    for ask in (lambda: damaged.next(0), damaged.outputs):
        with pytest.raises(OutboxDamaged):
            ask()
    damaged.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_is_wiped_while_it_is_used_takes_nothing_more(
    outbox: Outbox, directory: Path, replaced: bool
) -> None:
    """A wiped directory takes no more batches: they would be lost with the process, without an error."""
    log(outbox, 0, 0)
    shutil.rmtree(directory)
    if replaced:
        reopened(directory).close()
    with pytest.raises(OutboxDamaged, match="it was removed or replaced"):
        log(outbox, 1, 0)
    assert outbox.newest == 0


def test_a_disk_that_cannot_be_written_is_named(directory: Path) -> None:
    directory.parent.mkdir()
    directory.write_text("a file in its place")
    with pytest.raises(DiskRefused):
        reopened(directory)


def test_a_disk_without_room_takes_nothing(outbox: Outbox) -> None:
    log(outbox, 0, 0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    outbox._bytes_max = 1 << 30
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    try:
        with pytest.raises(StateflowError) as caught:
            outbox.log(1, words({0: b"x" * (1 << 20)}), [], None, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.code in ("disk_full", "disk_refused")
    assert outbox.newest == 0
    assert queue(outbox, 0) == [(0, b"0 for 0", False)]


def test_an_outbox_of_a_later_format_is_left_alone(outbox: Outbox, directory: Path) -> None:
    outbox.close()
    with sqlite3.connect(directory / FILE) as db:
        db.execute("UPDATE meta SET value = 2 WHERE key = 'format'")
    db.close()
    with pytest.raises(OutboxForeign, match="format 2"):
        reopened(directory)
