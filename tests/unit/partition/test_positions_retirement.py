"""Retired sources: what is left of them, who may come back, and what is never retired."""

from __future__ import annotations

from typing import Any

import pytest

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import BatchChanged, PositionGap, SourceRetired, SourceTaken, StaleBatch
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition import layout
from stateflow.partition.layout import Attempt, Position, Session
from stateflow.partition.positions import INITIAL, SPARED_RUN_US, SPARED_US, Batch, Retention, Retired, idle, sources_in
from stateflow.partition.processor import PartitionProcessor
from stateflow.state.cells import LATEST_US
from stateflow.storage import MemoryStore
from tests.unit.operators import Count
from tests.unit.partition.test_processor_batches import SCHEMA, P, message

SCHEMA_BYTES = SCHEMA.serialize().to_pybytes()
DAY = 86_400_000_000
START = 1_700_000_000_000_000


class One:
    """A partition, its clock, and a copy that follows by change sets."""

    def __init__(self, **retention: int) -> None:
        self.store, self.copy = MemoryStore(), MemoryStore()
        self.now_us = START
        self.retention = Retention(**retention)
        self.start()

    def start(self) -> None:
        self.processor = PartitionProcessor(
            Count, P, self.store, epoch=1, retention=self.retention, on_commit=lambda _, encode: self.follow(encode())
        )

    def follow(self, change_set: bytes) -> None:
        self.copy.apply(ChangeSet.decode(change_set).mutations)

    def send(
        self,
        source: str,
        number: int,
        *,
        sparse: bool = True,
        later_us: int = 1,
        after: int | None = None,
        opens: Session | None = None,
        digest: int | None = None,
        rows: int = 1,
        **more: Any,
    ) -> bytes:
        self.now_us += later_us
        if opens is not None:
            self.processor.open_source(source, opens)
            more["session"] = opens
        batch = Batch(source, number, sparse=sparse, **more)
        sent = message([("a", 1)] * rows) if rows else b""
        output = self.processor.apply(batch, SCHEMA_BYTES, sent, self.now_us, after, digest=digest).output
        assert dict(self.store.scan(b"")) == dict(self.copy.scan(b"")), "a follower has the same"
        return output

    def kept(self) -> dict[str, bool]:
        """Returns for each source whether it is retired."""
        return {view.source: view.retired for view in sources_in(self.store)}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_source_that_was_silent_for_long_is_retired_and_may_come_back(restarted: bool) -> None:
    one = One()
    one.send("old", 4, opens=Session(7, "x"), event_us=5)
    one.send("busy", 0, later_us=DAY)
    one.send("busy", 1, later_us=6 * DAY - 1_000)
    assert one.kept() == {"old": False, "busy": False}
    one.send("busy", 2, later_us=2_000)
    assert one.kept() == {"old": True, "busy": False}
    assert {key for key, _ in one.store.scan(b"m") if key.endswith(b"old")} == {layout.RETIRED + b"old"}
    if restarted:
        one.start()
    with pytest.raises(SourceRetired, match="continue with batch 5"):
        one.send("old", 4)
    with pytest.raises(StaleBatch):
        one.send("old", 3)
    with pytest.raises(SourceTaken):
        one.send("old", 5, session=Session(6, "x"))
    with pytest.raises(PositionGap):
        one.send("old", 9, after=6)
    assert one.send("old", 3, rewind=True) == b""
    assert one.kept()["old"]
    with pytest.raises(
        PositionGap, match="does not know this client"
    ):  # the tombstone may be older than what the client knows
        one.send("old", 5, session=Session(7, "x"), after=4)
    one.send("old", 5, opens=Session(7, "x"), after=4)
    assert one.kept() == {"old": False, "busy": False}
    with pytest.raises(SourceTaken):
        one.send("old", 6, session=Session(6, "x"))
    one.start()
    with pytest.raises(SourceTaken):
        one.send("old", 6, session=Session(6, "x"))
    assert one.send("busy", 2), "the newest output of one that was not retired is there"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_client_of_a_retired_source_fences_the_old_one(restarted: bool) -> None:
    one = One()
    one.send("s", 4, opens=Session(7, "x"))
    assert one.processor.retire("s")
    assert not one.processor.retire("s")
    assert not one.processor.retire("nobody")
    one.processor.open_source("s", Session(8, "y"))
    if restarted:
        one.start()
    assert one.kept() == {"s": True}
    with pytest.raises(SourceTaken):
        one.send("s", 5, session=Session(7, "x"))
    with pytest.raises(SourceRetired):
        one.send("s", 4, opens=Session(8, "y"))
    one.send("s", 5, session=Session(8, "y"), after=4)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("prefix", ["query:", "batch:", "real-time:", "a client's "])
def test_an_output_that_is_dropped_is_gone_and_its_batch_stays(prefix: str, restarted: bool) -> None:
    one, source = One(), f"{prefix}1"
    kept = [one.send(source, 0, sparse=False), one.send(source, 1, sparse=False)]
    assert all(kept)
    before = dict(one.store.scan(b""))
    assert one.processor.drop_output(source, 1, apply=False) == len(kept[1])
    for batch, name in ((2, source), (1, "nobody"), *(() if prefix in ("batch:", "real-time:") else ((0, source),))):
        assert one.processor.drop_output(name, batch, apply=True) == 0
    assert dict(one.store.scan(b"")) == before
    assert one.processor.drop_output(source, 1, apply=True) == len(kept[1])
    if restarted:
        one.start()
    assert one.processor.drop_output(source, 1, apply=True) == 0
    assert one.send(source, 1, sparse=False) == b"", "contained, and a retry is told of no rows"
    assert one.send(source, 2, sparse=False)
    if prefix == "batch:":
        assert one.send(source, 0, sparse=False) == kept[0], "others are kept"


def test_no_output_is_dropped_of_a_source_that_is_retired_or_passed_by() -> None:
    one = One()
    one.send("s", 4)
    assert one.processor.retire("s")
    assert one.processor.drop_output("s", 4, apply=True) == 0
    one.send("t", 4)
    one.processor.adopt({"t": Position(5)})
    assert one.processor.drop_output("t", 5, apply=True) == one.processor.drop_output("t", 4, apply=True) == 0


@pytest.mark.parametrize(("prefix", "spared_us"), [("batch:", SPARED_RUN_US), ("query:", SPARED_US)])
def test_too_many_sources_are_too_many_but_not_those_of_a_moment_ago(prefix: str, spared_us: int) -> None:
    one = One(sources_max=3)
    for n in range(8):
        one.send(f"{prefix}{n}", 0, sparse=False)
    one.send("near", 0, later_us=spared_us - 1000)
    assert list(one.kept().values()) == [False] * 9
    before = LIMIT_HITS.count("sources")
    one.send("next", 0, later_us=1000)
    assert LIMIT_HITS.count("sources") == before + 7
    assert sum(not retired for retired in one.kept().values()) == 3
    assert not one.kept()["next"]
    with pytest.raises(SourceRetired):
        one.send(f"{prefix}0", 0, sparse=False)


def test_a_promise_ends_by_age_only() -> None:
    position = Position(0, watermark_us=1, at_us=0)
    ended = Position(0, watermark_us=LATEST_US, at_us=0)
    many = Retention(idle_us=10 * SPARED_US, sources_max=1)
    assert idle([("a", position), ("b", ended)], 9, 2 * SPARED_US, many) == ["b"]
    assert idle([("a", position), ("b", ended)], 9, 10 * SPARED_US, many) == ["a", "b"]
    assert idle([("a", position)], 1, 1 << 60, Retention(idle_us=0)) == []
    assert idle([("a", position)], 1, -5, many) == []


def test_a_retired_source_holds_no_watermark_back() -> None:
    one = One()
    one.send("slow", 0, watermark_us=10)
    one.send("fast", 0, watermark_us=50)
    assert int.from_bytes(one.store.get(layout.WATERMARK) or b"", "big") == 10
    one.processor.retire("slow")
    one.send("fast", 1, watermark_us=60)
    assert int.from_bytes(one.store.get(layout.WATERMARK) or b"", "big") == 60


def test_tombstones_are_bounded_and_what_nobody_knows_is_not_taken_for_new() -> None:
    one = One(retired_max=8)
    for n in range(40):
        one.send(f"s{n}", 3, opens=Session(START + n, "x"))
        one.processor.retire(f"s{n}")
        assert sum(one.kept().values()) <= 8
    assert one.kept()["s39"]
    one.start()
    for more in ({"after": 3}, {"session": Session(START + 1, "x")}, {"sparse": False}):
        with pytest.raises(SourceRetired, match="too long ago"):
            one.send("s0", 4, **more)
    one.send("new", 0, sparse=False)
    one.send("new-client", 0, opens=Session(START + DAY, "x"))


def test_initial_state_comes_before_rows_also_of_sources_that_are_gone() -> None:
    one = One()
    one.send("s", 0)
    one.processor.retire("s")
    one.start()
    with pytest.raises(StaleBatch, match="has already processed rows"):
        one.send(INITIAL, 0)
    assert not one.processor.retire(INITIAL)


def test_positions_without_a_time_get_one() -> None:
    """A position that an older version wrote without a time is not retired for that: its idle time begins now."""
    one = One()
    one.send("s", 0)
    stored = Position.decode(one.store.get(layout.POSITION + b"s") or b"")
    for key in (one.store, one.copy):
        old = Position(stored.batch, stored.watermark_us, stored.rows).encode()
        key.apply(Mutations(puts=[(layout.POSITION + b"s", old)]))
    one.start()
    for number in range(3):
        one.send("other", number)
    assert one.kept() == {"other": False, "s": False}
    one.send("other", 3, later_us=8 * DAY)
    assert one.kept() == {"other": False, "s": True}


def test_a_tombstone_reads_what_it_wrote() -> None:
    for each in (Retired(-1, 5), Retired(3, 5, Session(1, "x"), -7)):
        assert Retired.decode(each.encode()) == each
    assert len(Retired(1 << 40, START, Session(START, "0123456789abcdef"), START).encode()) < 64


# -- runs of batch DataFrames --------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
def test_each_piece_of_a_run_is_told_again(restarted: bool) -> None:
    one = One()
    outputs = [one.send("batch:r", number, sparse=False, digest=number) for number in range(3)]
    assert len(set(outputs)) == 3
    if restarted:
        one.start()
    sequence = one.processor.sequence
    assert [one.send("batch:r", number, sparse=False, digest=number) for number in range(3)] == outputs
    assert one.processor.sequence == sequence
    with pytest.raises(PositionGap):
        one.send("batch:r", 4, sparse=False)
    for number in range(2):
        one.send("query:r", number, sparse=False)
    with pytest.raises(StaleBatch):
        one.send("query:r", 0, sparse=False)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_piece_with_other_rows_is_refused(number: int) -> None:
    one = One()
    for each in range(3):
        one.send("batch:r", each, sparse=False, digest=each)
    with pytest.raises(BatchChanged, match="as many tasks= as before"):
        one.send("batch:r", number, sparse=False, digest=9)
    with pytest.raises(BatchChanged, match=r"had 1 row\(s\) when it was applied, and has 2 now"):
        one.send("batch:r", number, sparse=False, rows=2, attempt=Attempt(use="u"))
    with pytest.raises(BatchChanged, match=r"had 1 row\(s\) when it was applied, and has 0 now"):
        one.send("batch:r", number, sparse=False, rows=0, attempt=Attempt(use="u"))


def test_all_that_is_kept_of_a_run_goes_when_it_is_retired() -> None:
    one = One()
    size = sum(len(one.send("batch:r", number, sparse=False)) for number in range(3))
    one.send("batch:rest", 0, sparse=False)
    views = {view.source: view for view in sources_in(one.store)}
    assert views["batch:r"].bytes >= size
    assert len(list(one.store.scan(layout.PIECE))) == 4
    one.processor.retire("batch:r")
    assert [key[4:14] for key, _ in one.store.scan(layout.PIECE)] == [b"batch:rest"]
    for number in range(3):
        with pytest.raises(SourceRetired):
            one.send("batch:r", number, sparse=False)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_that_was_retired_goes_on_but_tells_no_piece_from_before(restarted: bool) -> None:
    """A retired run goes on, but gives no output for a piece from before.

    This includes a piece equal to the newest one, and one without rows: the newest output would be taken for theirs.
    """
    one = One()
    for number in range(3):
        one.send("batch:r", number, sparse=False, digest=7)
    one.processor.retire("batch:r")
    outputs = [one.send("batch:r", number, sparse=False, digest=7) for number in (3, 4)]
    if restarted:
        one.start()
    assert [one.send("batch:r", number, sparse=False, digest=7) for number in (3, 4)] == outputs
    before = dict(one.store.scan(b""))
    for number in range(3):
        with pytest.raises(
            SourceRetired, match=f"batch {number} was applied, but its output is gone since its source was retired"
        ):
            one.send("batch:r", number, sparse=False, digest=7)
        with pytest.raises(SourceRetired):
            one.send("batch:r", number, sparse=False, rows=0)
    assert dict(one.store.scan(b"")) == before


def test_no_rows_come_to_a_piece_that_brought_none() -> None:
    """Rows are refused for a piece of a run that had none: a task of a run has all of its rows.

    They are accepted for a query's batch, whose task may not have been given its rows.
    """
    one = One()
    use = Attempt(use="u")
    one.send("query:r", 0, sparse=False, rows=0, attempt=use)
    assert one.send("query:r", 0, sparse=False, rows=1, attempt=use)
    one.send("batch:r", 0, sparse=False, rows=0, attempt=use)
    before = dict(one.store.scan(b""))
    with pytest.raises(BatchChanged, match=r"had 0 row\(s\) when it was applied, and has 1 now"):
        one.send("batch:r", 0, sparse=False, rows=1, attempt=use)
    assert dict(one.store.scan(b"")) == before


def test_of_a_client_only_the_newest_output_is_kept_whatever_it_calls_its_source() -> None:
    one = One()
    session = Session(START, "c")
    first = one.send("batch:mine", 0, opens=session)
    second = one.send("batch:mine", 1, session=session)
    assert first != second == one.send("batch:mine", 1, session=session)
    assert [value for _, value in one.store.scan(layout.OUTPUT)] == [second]
    assert not list(one.store.scan(layout.PIECE))
    with pytest.raises(StaleBatch):
        one.send("batch:mine", 0, session=session)


def test_what_an_earlier_version_kept_of_a_run_is_told_again() -> None:
    """A run's output that an earlier version kept is given again.

    Earlier versions kept the output of its only batch where a query's is.
    """
    one = One()
    output = one.send("batch:r", 0, sparse=False)
    ((key, value),) = one.store.scan(layout.PIECE)
    assert layout.Piece.decode(value).output == output
    one.store.apply(Mutations(deletes=[key], puts=[(layout.OUTPUT + b"batch:r", output)]))
    one.copy.apply(Mutations(deletes=[key], puts=[(layout.OUTPUT + b"batch:r", output)]))
    one.start()
    assert one.send("batch:r", 0, sparse=False) == output
