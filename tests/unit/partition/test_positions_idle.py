"""The watermark over sources some of which fall silent: when a source stops counting, and when it counts again."""

from __future__ import annotations

import pytest

from stateflow.partition.layout import read_watermark
from stateflow.partition.positions import Batch, sources_in
from stateflow.partition.processor import PartitionProcessor
from tests.unit.operators import Count
from tests.unit.partition.test_positions_retirement import DAY, SCHEMA_BYTES, One
from tests.unit.partition.test_processor_batches import P, message

HOUR = DAY // 24


class Sources(One):
    def watermark(self, source: str, number: int, watermark_us: int, later_us: int = HOUR) -> int | None:
        """Sends a batch of ``source`` with its watermark, and returns the partition's watermark."""
        self.send(source, number, watermark_us=watermark_us, later_us=later_us)
        return read_watermark(self.store)

    def promised(self) -> dict[str, int | None]:
        return {view.source: view.watermark_us for view in sources_in(self.store)}


def test_a_source_that_is_gone_holds_the_watermark_for_the_time_out_only() -> None:
    of = Sources()
    of.watermark("gone", 0, 100)
    reached = [of.watermark("busy", n, 1000 + n) for n in range(26)]
    assert reached[:23] == [100] * 23, "a day is 24 hours"
    assert reached[23:] == [1023, 1024, 1025]
    assert of.promised() == {"gone": None, "busy": 1025}


def test_without_a_time_out_it_holds_it_for_good() -> None:
    of = Sources(watermark_idle_us=0)
    of.watermark("gone", 0, 100)
    assert {of.watermark("busy", n, 1000 + n) for n in range(30)} == {100}


def test_one_that_comes_back_counts_again_and_time_does_not_go_back() -> None:
    of = Sources()
    of.watermark("gone", 0, 100)
    for n in range(25):
        of.watermark("busy", n, 1000 + n)
    assert of.watermark("gone", 1, 200) == 1024
    assert of.watermark("busy", 25, 5000) == 1024
    assert of.watermark("gone", 2, 3000) == 3000


def test_a_time_when_nobody_sent_does_not_count() -> None:
    of = Sources()
    of.watermark("one", 0, 100)
    of.watermark("other", 0, 200)
    assert of.watermark("other", 1, 5000, later_us=3 * DAY) == 100, "the cluster was down, say"
    assert of.watermark("other", 2, 5001) == 100
    assert of.watermark("one", 1, 4000) == 4000


def test_nor_does_one_before_the_partition_was_opened_here() -> None:
    of = Sources()
    of.watermark("one", 0, 100)
    for n in range(23):
        of.watermark("other", n, 1000)
    of.start()
    assert of.watermark("other", 23, 1000, later_us=HOUR) == 100


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_decided_is_not_decided_anew(restarted: bool) -> None:
    of = Sources()
    of.watermark("gone", 0, 100)
    for n in range(25):
        of.watermark("busy", n, 1000 + n)
    if restarted:
        of.start()
    assert of.watermark("busy", 24, 9999) == 1024, "the newest batch again is what it was"
    assert of.watermark("busy", 25, 2000) == 2000, "also where it is opened anew: the source counts no more"
    follower = PartitionProcessor(Count, P, of.copy, epoch=2)
    assert follower.reached("gone").watermark_us is None  # type: ignore[union-attr]


def test_a_batch_that_failed_decides_nothing() -> None:
    of = Sources()
    of.watermark("gone", 0, 100)
    for n in range(23):
        of.watermark("busy", n, 1000)

    class Broken(BaseException):
        pass

    class Refuses:
        def begin_commit(self) -> None:
            raise Broken

        def end_commit(self) -> None: ...

    before = dict(of.store.scan(b""))
    of.now_us += HOUR
    with pytest.raises(Broken):
        batch = Batch("busy", 23, sparse=True, watermark_us=1000)
        of.processor.apply(batch, SCHEMA_BYTES, message([("a", 1)]), of.now_us, guard=Refuses())
    assert dict(of.store.scan(b"")) == before
    of.now_us -= HOUR
    assert of.watermark("gone", 1, 900) == 900, "it came in time after all"


def test_where_all_that_have_one_are_silent_the_watermark_stays() -> None:
    of = Sources()
    of.watermark("gone", 0, 100)
    for n in range(30):
        of.send("without", n, later_us=HOUR)
    assert read_watermark(of.store) == 100


def test_one_that_is_retired_at_once_is_not_kept() -> None:
    of = Sources(idle_us=DAY, watermark_idle_us=DAY)
    of.watermark("gone", 0, 100)
    reached = [of.watermark("busy", n, 1000) for n in range(25)]
    assert (reached[-1], of.kept()["gone"]) == (1000, True)
    of.start()
    assert not of.processor.reached("gone")
