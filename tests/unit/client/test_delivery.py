"""Batches that fail: which batch is sent next, under which number, and what partitions make of it.

The partitions decide as real ones do (:class:`~stateflow.partition.positions.Positions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import xxhash

from stateflow.client.delivery import (
    AGAIN_MAX,
    OPENS_MAX,
    OUTPUTS_MAX,
    Deliver,
    Delivery,
    Look,
    Open,
    SameOperator,
    Step,
    perform,
)
from stateflow.client.history import History
from stateflow.errors import (
    BatchChanged,
    DiskFull,
    OperatorFailed,
    OperatorOutdated,
    OutOfMemory,
    PositionGap,
    SourceTaken,
    StaleBatch,
    StateflowError,
    Unavailable,
)
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import Batch, Positions
from stateflow.rpc.apply import BatchRows
from stateflow.types import PartitionId
from tests.applying import word_of, words

PARTITIONS = 3
ME = Session(5, "me")


class Cluster:
    """Partitions that record what they apply.

    ``errors``: by partition, the error that refuses its batches until it is taken out. ``applied``: by partition, rows
    in the order in which they were applied. ``outdated``: the error for a client of an operator that was undeployed.
    """

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}
        self.late: dict[int, BaseException] = {}  # as ``errors``, but the batch is applied
        self.silent: BaseException | None = None  # error for a client that opens the source
        self.outdated: BaseException | None = None
        self.applied: dict[int, list[Any]] = {p: [] for p in range(PARTITIONS)}
        self.positions = [Positions(PartitionId("Op", p), {}, {"s": ME}) for p in range(PARTITIONS)]
        self.outputs: dict[int, bytes] = {}
        self.sent: list[int] = []
        self.asked = self.starts = 0
        self.start()

    def start(self, bytes_max: int = 1 << 20, acknowledged: int | None = None) -> None:
        """Starts a new client, which knows only what partitions report."""
        self.starts += 1
        session = Session(ME.generation_us + self.starts, f"{ME.id}{self.starts}")
        self.delivery = Delivery(History("Op", "s", PARTITIONS, bytes_max), session, lambda: acknowledged)
        self._run(self.delivery.open())

    def keep(self, partition: int) -> tuple[Position | None, list[Any]]:
        return self.positions[partition].reached_by("s"), self.applied[partition][:]

    def put_back(self, partition: int, kept: tuple[Position | None, list[Any]]) -> None:
        position, applied = kept
        known = {} if position is None else {"s": position}
        self.positions[partition] = Positions(PartitionId("Op", partition), known, {"s": ME})
        self.applied[partition] = applied[:]

    def send(self, *partitions: int, rows: str = "", sequence: int | None = None, read: Any = dict, **more: Any) -> Any:
        messages = {p: (rows or "r").encode() for p in partitions}
        steps = self.delivery.deliver(words(messages), sequence, more.get("rewind", False), more.get("until"), read)
        return self._run(steps)

    def promise(self, watermark_us: int) -> Any:
        everywhere = BatchRows.visit(range(PARTITIONS))
        return self._run(self.delivery.deliver(everywhere, None, False, watermark_us, dict))

    def _run(self, steps: Any) -> Any:
        return perform(steps, self._do)

    def _said(self) -> dict[int, Position]:
        found = {p: each.reached_by("s") for p, each in enumerate(self.positions)}
        return {p: position for p, position in found.items() if position is not None and position.batch >= 0}

    def _do(self, step: Step) -> Any:
        if isinstance(step, Open):
            self.asked += 1
            if self.silent is not None:
                raise self.silent
            return self._said()
        if isinstance(step, Look):
            if self.silent is not None:
                raise self.silent
            return self._said()
        if isinstance(step, SameOperator):
            if self.outdated is not None:
                raise self.outdated
            return None
        assert isinstance(step, Deliver)
        self.sent.append(step.batch.number)
        found: dict[int, bytes] = {}
        error: BaseException | None = None
        for partition in step.rows:
            try:
                found[partition] = self._apply(partition, step.batch, word_of(step.rows, partition), step.after)
            except BaseException as caught:  # noqa: BLE001
                error = error or caught
        if error is not None:
            raise error
        return found

    def _apply(self, partition: int, batch: Batch, rows: bytes, after: Mapping[int, int]) -> bytes:
        if partition in self.errors:
            raise self.errors[partition]
        position = self.positions[partition]
        digest = xxhash.xxh3_64_intdigest(rows)
        if position.contains(batch):
            return b""
        if position.is_replay(batch, after.get(partition)):
            known = position.reached_by("s")
            assert known is not None
            position.check_digest(batch, known.digest, digest)
        else:
            position.reached("s", position.behind(batch, 1, 0, digest))
            self.applied[partition].append(rows.decode() or batch.watermark_us)
            self.outputs[partition] = b"%d of %s" % (batch.number, rows)
        if partition in self.late:
            raise self.late[partition]
        return self.outputs[partition]


def away() -> Unavailable:
    return Unavailable("the owner is away", remedy="-")


def poison() -> OperatorFailed:
    return OperatorFailed("process() raised", remedy="-")


def test_rows_that_failed_are_not_applied_twice_when_others_came_between() -> None:
    """Two threads send: the second batch waits until the fate of the first is known."""
    c = Cluster()
    c.errors[2] = away()
    with pytest.raises(Unavailable):
        c.send(1, 2, rows="a")
    with pytest.raises(Unavailable) as caught:
        c.send(1, rows="b")
    assert caught.value.where["unfinished_batch"] == 0
    assert (c.applied[1], c.delivery.history.position) == (["a"], -1), "b was not sent"
    c.errors.clear()
    assert c.send(1, rows="b") == {1: b"1 of b"}
    assert c.send(1, 2, rows="a") == {1: b"0 of a", 2: b"0 of a"}, "what it gave when it was finished"
    assert c.applied == {0: [], 1: ["a", "b"], 2: ["a"]}
    assert c.send(1, 2, rows="a")[1] == b"2 of a", "the next one is another"


@pytest.mark.parametrize("error", [poison(), OutOfMemory("-"), BatchChanged("-"), StateflowError("a fault")])
def test_a_batch_that_is_refused_for_what_it_is_holds_up_nobody(error: StateflowError) -> None:
    c = Cluster()
    c.errors[2] = error
    with pytest.raises(type(error)):
        c.send(1, 2, rows="a")
    assert c.send(1, rows="b") == {1: b"1 of b"}
    assert c.sent == [0, 1], "it is not tried again"
    c.errors.clear()
    for _ in range(2):
        with pytest.raises(StaleBatch, match="failed as batch 0; some or all") as caught:
            c.send(1, 2, rows="a")
        assert caught.value.where["batch"] == 0
        c.send(0, rows="c")
    assert c.applied[1] == ["a", "b"]
    c.send(2, rows="a")  # the caller's own decision
    c.send(1, 2, rows="a", sequence=100)  # sends everything once more
    assert c.applied[1] == ["a", "b", "a"]
    c.send(1, 2, rows="a")
    assert c.sent[-1] == 101


def test_a_batch_that_no_partition_took_is_a_new_one_later() -> None:
    c = Cluster()
    c.errors[1] = poison()
    with pytest.raises(OperatorFailed):
        c.send(1, rows="a")
    c.send(2, rows="b")
    c.errors.clear()
    c.send(1, rows="a")
    assert (c.sent, c.applied[1]) == ([0, 1, 2], ["a"])


def test_a_batch_that_was_away_first_and_is_refused_then() -> None:
    c = Cluster()
    c.errors[2] = away()
    with pytest.raises(Unavailable):
        c.send(1, 2, rows="a")
    c.errors[2] = poison()
    assert c.send(1, rows="b") == {1: b"1 of b"}
    with pytest.raises(StaleBatch):
        c.send(1, 2, rows="a")
    assert c.applied == {0: [], 1: ["a", "b"], 2: []}


def test_a_partition_that_cannot_be_asked_holds_up_no_other() -> None:
    """A partition that cannot be asked holds up no other, even if it is the one that refused a batch.

    The client assumes that the partition contains part of that batch.
    """
    c = Cluster()
    c.errors[2] = poison()
    with pytest.raises(OperatorFailed):
        c.send(2, rows="a")
    c.silent = away()
    c.send(1, rows="b")
    c.send(1, rows="c")
    c.errors.clear()
    assert c.send(2, rows="a") == {2: b"0 of a"}, "under its number, which no partition takes twice"
    assert c.applied == {0: [], 1: ["b", "c"], 2: ["a"]}


def test_equal_rows_much_later_are_other_rows() -> None:
    c = Cluster()
    c.errors[2] = poison()
    with pytest.raises(OperatorFailed):
        c.send(1, 2, rows="tick")
    c.errors.clear()
    for n in range(AGAIN_MAX):
        c.send(1, rows=str(n))
    with pytest.raises(StaleBatch):
        c.send(1, 2, rows="tick")
    c.send(1, rows="one more")
    assert c.send(1, 2, rows="tick")
    assert [each.count("tick") for each in c.applied.values()] == [0, 2, 2]


def test_a_disk_that_is_full_is_none_of_the_rows_fault() -> None:
    c = Cluster()
    c.errors[2] = DiskFull("-")
    with pytest.raises(DiskFull):
        c.send(1, 2, rows="a")
    with pytest.raises(DiskFull):
        c.send(1, rows="b")
    c.send(1, rows="b", sequence=7)
    assert c.applied[1] == ["a", "b"], "who numbers it himself has it go first"


def test_who_numbers_batches_himself_is_not_waited_for_and_nothing_of_it_comes_twice() -> None:
    c = Cluster()
    c.errors[2] = away()
    with pytest.raises(Unavailable):
        c.send(1, 2, rows="a")
    with pytest.raises(Unavailable):
        c.send(1, 2, rows="b", sequence=4)
    c.errors.clear()
    with pytest.raises(StaleBatch):
        c.send(1, 2, rows="a")
    assert c.sent[-2:] == [4, 0]
    assert c.applied == {0: [], 1: ["a", "b"], 2: ["b"]}
    assert c.send(1, 2, rows="b") == {1: b"4 of b", 2: b"4 of b"}


def test_a_batch_is_mended_under_its_number() -> None:
    c = Cluster()
    c.errors[2] = poison()
    with pytest.raises(OperatorFailed):
        c.send(1, 2, rows="a")
    c.errors.clear()
    c.send(0, rows="mended", sequence=0)
    c.send(2, rows="b")
    assert c.sent == [0, 0, 1]


def test_a_number_that_everybody_has_leaves_no_doubt() -> None:
    c = Cluster()
    c.send(1, rows="a")
    with pytest.raises(BatchChanged):
        c.send(1, rows="b", sequence=0)
    c.send(1, rows="b")
    assert (c.sent, c.applied[1]) == ([0, 0, 1], ["a", "b"])


def test_a_new_watermark_does_not_pass_for_the_one_that_failed() -> None:
    c = Cluster()
    c.errors[2] = away()
    with pytest.raises(Unavailable):
        c.promise(1)
    c.errors.clear()
    c.promise(2)
    assert c.applied == {p: [1, 2] for p in range(PARTITIONS)}
    assert c.sent == [0, 0, 1]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), ValueError("-")])
def test_outputs_that_the_caller_did_not_get_are_there_the_next_time(interrupt: BaseException) -> None:
    def read(_: Mapping[int, bytes]) -> None:
        raise interrupt

    c = Cluster()
    with pytest.raises(type(interrupt)):
        c.send(1, rows="a", read=read)
    assert c.send(1, rows="a") == {1: b"0 of a"}
    with pytest.raises(type(interrupt)):
        c.send(1, rows="b", read=read)
    c.send(1, rows="c")
    with pytest.raises(type(interrupt)):
        c.send(1, rows="b", read=read)
    assert c.send(1, rows="b") == {1: b"1 of b"}
    assert c.applied[1] == ["a", "b", "c"]


def test_outputs_that_are_kept_are_bounded_and_nothing_comes_twice_without_them() -> None:
    c = Cluster()
    c.late[1] = away()
    for n in range(OUTPUTS_MAX + 2):
        with pytest.raises(Unavailable):
            c.send(1, rows=str(n))
        c.late.clear()
        c.send(0, rows=f"between {n}")
        c.late[1] = away()
    c.late.clear()
    assert c.send(1, rows=str(OUTPUTS_MAX + 1)) == {1: b"%d of %d" % (2 * OUTPUTS_MAX + 2, OUTPUTS_MAX + 1)}
    for n in range(2):
        with pytest.raises(StaleBatch):
            c.send(1, rows=str(n))
    assert c.applied[1] == [str(n) for n in range(OUTPUTS_MAX + 2)]


def test_who_was_not_heard_of_by_all_asks_again() -> None:
    """A client that not all partitions answered asks again before it sends.

    Partitions that have not heard of this client would still accept its predecessor.
    """
    c = Cluster()
    c.silent = away()
    with pytest.raises(Unavailable):
        perform(c.delivery.verify(), c._do)
    asked = c.asked
    with pytest.raises(Unavailable):
        c.send(1)
    assert (c.asked, c.sent) == (asked + 1, [])
    c.silent = None
    c.send(1)
    assert (c.asked, c.sent) == (asked + 2, [0])
    c.send(1, rows="next")
    assert c.asked == asked + 2


@pytest.mark.parametrize("seed", range(300))
def test_what_is_sent_until_it_succeeds_is_applied_once(seed: int) -> None:
    """Callers in any order repeat their call until it succeeds, or until they are told that it cannot."""
    random = Random(seed)
    c = Cluster()
    partitions = {f"{n}": random.sample(range(PARTITIONS), random.randint(1, PARTITIONS)) for n in range(20)}
    waiting, told, refused = list(partitions), [], []
    rounds = 0
    while waiting:
        rounds += 1
        c.errors, c.late, c.silent = {}, {}, None
        if rounds < 300:
            for each in (c.errors, c.late):
                if random.random() < 0.3:
                    error = random.choice((away, away, poison, KeyboardInterrupt))()
                    each[random.randrange(PARTITIONS)] = error
            c.silent = away() if random.random() < 0.1 else None
        rows = random.choice(waiting[:4])
        try:
            c.send(*partitions[rows], rows=rows)
        except StaleBatch:
            refused.append(rows)
        except (StateflowError, KeyboardInterrupt):
            continue
        else:
            told.append(rows)
        waiting.remove(rows)
    for rows, where in partitions.items():
        counts = [c.applied[p].count(rows) for p in where]
        assert set(counts) == {1} if rows in told else set(counts) <= {0, 1}, (rows, c.applied)
    assert rounds < 400
    assert len(told) > len(refused)


BATCHES = ((0, 1, 2), (0,), (0, 1), (1, 2), (0, 1))


def sent_again(c: Cluster, gap: PositionGap) -> None:
    """Sends again from the expected batch on, as an application that keeps everything does."""
    number = gap.where["expected"]
    while number < len(BATCHES):
        try:
            c.send(*BATCHES[number], rows=str(number), sequence=number, rewind=True)
            number += 1
        except PositionGap as other:
            number = other.where["expected"]


def is_told(c: Cluster, left: Sequence[int]) -> bool:
    """Tells whether a new client refuses to go on. Asserts that it does if any partition left shows a loss.

    Args:
        left: by partition, how many of its batches are left.
    """
    has = [[n for n, among in enumerate(BATCHES) if p in among][: left[p]] for p in range(PARTITIONS)]
    newest = max((batches[-1] for batches in has if batches), default=-1)
    lost = {n for n in range(newest + 1) if any(n not in has[p] for p in BATCHES[n])}
    c.start(bytes_max=0)
    if not lost:
        c.delivery.history.rewinding(len(BATCHES))
        assert not c.delivery.history.incomplete
        return False
    with pytest.raises(PositionGap) as caught:
        c.send(*BATCHES[0], rows="new")
    # no later than the first missing batch; earlier where the client cannot know that a number had no rows for a
    # partition
    assert caught.value.where["expected"] <= min(lost)
    sent_again(c, caught.value)
    return True


COUNTS = [sum(p in among for among in BATCHES) for p in range(PARTITIONS)]


@pytest.mark.parametrize("left", list(product(*(range(count + 1) for count in COUNTS))), ids=str)
def test_whichever_partitions_lose_what_a_successor_is_told_as_long_as_one_knows(left: tuple[int, ...]) -> None:
    c = Cluster()
    kept = [[c.keep(p)] for p in range(PARTITIONS)]
    for number, among in enumerate(BATCHES):
        c.send(*among, rows=str(number))
        for p in among:
            kept[p].append(c.keep(p))
    whole = {p: applied[:] for p, applied in c.applied.items()}
    for p, count in enumerate(left):
        c.put_back(p, kept[p][count])
    if is_told(c, left):
        assert c.applied == whole
        for p in range(PARTITIONS):  # the client tracks what was sent again like what was sent first
            c.put_back(p, kept[p][left[p]])
            again = COUNTS[:]
            again[p] = left[p]
            assert is_told(c, again) == (left[p] < len(kept[p]) - 1)
            assert c.applied == whole


def test_a_batch_that_its_client_died_over_comes_before_any_other() -> None:
    c = Cluster()
    c.send(0, 1, 2, rows="0")
    c.errors[2] = away()
    with pytest.raises(Unavailable):
        c.send(0, 2, rows="1")
    c.errors.clear()
    c.start()
    with pytest.raises(PositionGap, match=r"batch 1, the last .* \(.*partitions=2\): .* sequence=1, or call accept"):
        c.send(0, rows="2")
    assert c.send(0, 2, rows="1", sequence=1) == {0: b"1 of 1", 2: b"1 of 1"}
    c.send(0, rows="2")
    assert c.applied == {0: ["0", "1", "2"], 1: ["0"], 2: ["0", "1"]}


def test_a_batch_that_its_client_died_over_may_be_given_up() -> None:
    c = Cluster()
    c.errors[2] = away()
    with pytest.raises(Unavailable):
        c.send(0, 2, rows="0")
    c.errors.clear()
    c.start()
    assert c._run(c.delivery.accept_loss()) == 0
    assert c.send(0, 2, rows="1") == {0: b"1 of 1", 2: b"1 of 1"}
    c.start()
    c.send(2, rows="2")
    assert c.applied == {0: ["0", "1"], 1: [], 2: ["1", "2"]}


def test_who_is_told_of_ever_newer_clients_gives_up() -> None:
    """A partition that named a newer client each time used to be asked for ever."""
    delivery = Delivery(History("Op", "s", PARTITIONS, 1 << 20), ME, lambda: None)
    asked: list[int] = []

    def newer(step: Step) -> Any:
        assert isinstance(step, Open)
        asked.append(step.session.generation_us)
        raise SourceTaken("it is another's", remedy="-", generation_us=str(step.session.generation_us))

    with pytest.raises(SourceTaken):
        perform(delivery.open(), newer)
    assert len(asked) == OPENS_MAX
    assert asked == sorted(set(asked))


@pytest.mark.parametrize("call", ["send", "verify"])
@pytest.mark.parametrize("bytes_max", [0, 1 << 20])
def test_an_operator_that_was_deployed_anew_gets_nothing_of_the_former_one(call: str, bytes_max: int) -> None:
    """The kept rows of the former operator were sent to the new one, whose state has to begin empty."""
    cluster = Cluster()
    cluster.start(bytes_max)
    cluster.send(0, 1)
    cluster.send(1, 2)
    for partition in range(PARTITIONS):
        cluster.put_back(partition, (None, []))
    cluster.outdated = OperatorOutdated("it was deployed anew", remedy="-")
    for _ in range(2):
        with pytest.raises(OperatorOutdated):
            cluster.send(1) if call == "send" else cluster._run(cluster.delivery.verify())
    assert cluster.applied == {p: [] for p in range(PARTITIONS)}
    cluster.start()
    cluster.send(1)
    assert cluster.applied == {0: [], 1: ["r"], 2: []}


def test_partitions_that_lost_everything_get_it_again_from_the_client_of_their_operator() -> None:
    cluster = Cluster()
    cluster.send(0, 1)
    cluster.send(1, 2)
    for partition in range(PARTITIONS):
        cluster.put_back(partition, (None, []))
    cluster.send(1, rows="new")
    assert cluster.applied == {0: ["r"], 1: ["r", "r", "new"], 2: ["r"]}
