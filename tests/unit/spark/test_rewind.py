"""Rewinds of a Spark checkpoint to a batch: what is taken out of it, and which rewinds are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.clock import ManualClock
from stateflow.errors import InvalidArgument
from stateflow.spark import rewind
from stateflow.spark.rewind import last_planned, plan_rewind, ran_in_micro_batches, take_out_left


def checkpoint_of(planned: int, finished: int, oldest: int = 0) -> set[str]:
    names = {"metadata"}
    for folder, last in (("offsets", planned), ("commits", finished)):
        for number in range(oldest, last + 1):
            names |= {f"{folder}/{number}", f"{folder}/.{number}.crc"}
    return names


def test_offsets_up_to_it_and_commits_below_it_stay() -> None:
    plan = plan_rewind(checkpoint_of(6, 5), 4)
    assert set(checkpoint_of(6, 5)) - set(plan.moved) == checkpoint_of(4, 3)
    assert plan.last_batch == 6
    plain = [name for name in plan.moved if "." not in name]
    assert plain == ["commits/5", "commits/4", "offsets/6", "offsets/5"], "newest first: it can be cut short anywhere"


def test_state_versions_behind_it_go() -> None:
    kept = ["state/0/0/3.delta", "state/0/0/4.zip", "state/0/0/4_ab-cd.changelog", "state/0/_metadata/metadata"]
    gone = ["state/0/0/5.delta", "state/0/1/17.snapshot", "state/0/0/left/5_ab-cd.changelog", "state/0/0/5.zip"]
    plan = plan_rewind(checkpoint_of(6, 6) | set(kept) | set(gone), 4)
    assert set(gone) <= set(plan.moved)
    assert not set(kept) & set(plan.moved)


LEFT = {
    "offsets/.0.3c2de6a1-6f6c-4ad1-8a3b-3f6f7a0b9c1d.tmp",
    "offsets/..0.3c2de6a1-6f6c-4ad1-8a3b-3f6f7a0b9c1d.tmp.crc",
    "commits/.0.9c2de6a1-6f6c-4ad1-8a3b-3f6f7a0b9c1d.tmp",
}


def test_what_a_killed_spark_left_goes() -> None:
    """Leftovers of a killed Spark are taken out, as no first batch can start beside them."""
    assert set(plan_rewind({"metadata", *LEFT, "sources/0/.0.tmp"}, 0).moved) == LEFT
    assert set(plan_rewind(checkpoint_of(2, 1) | LEFT, 2).moved) == LEFT
    with pytest.raises(InvalidArgument, match="there is no batch 1"):
        plan_rewind({"metadata", *LEFT}, 1)


def test_it_is_taken_out_where_a_query_is_about_to_start(tmp_path: Path) -> None:
    def make(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()

    assert take_out_left(tmp_path / "none") == ()
    assert take_out_left("s3://bucket/checkpoint") == ()
    make("metadata", *LEFT)
    assert set(take_out_left(tmp_path)) == LEFT
    assert not any((tmp_path / name).exists() for name in LEFT)
    assert len([path for path in (tmp_path / "_rewound").rglob("*") if path.is_file()]) == len(LEFT), (
        "nothing is deleted"
    )
    assert take_out_left(tmp_path) == ()
    make("offsets/0", *LEFT)
    assert take_out_left(tmp_path) == (), "Spark does not care, and a query that runs may be about to rename it"


def test_the_last_finished_batch_tells_in_which_mode_a_query_ran(tmp_path: Path) -> None:
    assert not ran_in_micro_batches("s3://bucket/checkpoint")
    assert not ran_in_micro_batches(tmp_path / "none")
    commits = tmp_path / "commits"
    commits.mkdir()
    assert not ran_in_micro_batches(tmp_path), "nothing is finished"
    (commits / "9").write_text('v2\n{"nextBatchWatermarkMs":0}')
    (commits / ".10.crc").write_text("v1")
    assert not ran_in_micro_batches(f"file://{tmp_path}"), "an epoch"
    (commits / "10").write_text('v1\n{"nextBatchWatermarkMs":0}')
    assert ran_in_micro_batches(f"file://{tmp_path}")


def test_the_last_planned_batch_of_a_query_is_found(tmp_path: Path) -> None:
    assert last_planned("s3://bucket/checkpoint") is None
    assert last_planned(tmp_path) is None
    for metadata in ("", "[]", "{}", "no JSON"):
        (tmp_path / "metadata").write_text(metadata)
        assert last_planned(tmp_path) is None
    (tmp_path / "metadata").write_text('{"id":"q-1"}')
    assert last_planned(f"file://{tmp_path}") == ("q-1", -1)
    (tmp_path / "offsets").mkdir()
    for name, content in (("9", "v1"), ("10", "v1"), (".11.crc", "c"), ("11", "")):
        (tmp_path / "offsets" / name).write_text(content)
    assert last_planned(tmp_path) == ("q-1", 10), "a power failure left the newest entry empty"


@pytest.mark.parametrize("to", [2, 3])
def test_an_entry_without_bytes_goes_and_says_nothing(to: int) -> None:
    """An entry without bytes, as a power failure leaves it, is taken out and counts as no entry."""
    empty = {"offsets/3"}
    plan = plan_rewind(checkpoint_of(3, 2), to, empty=empty)
    assert set(checkpoint_of(3, 2)) - set(plan.moved) == checkpoint_of(min(to, 2), to - 1)
    assert plan.last_batch == 2
    with pytest.raises(InvalidArgument, match="there is no batch 4"):
        plan_rewind(checkpoint_of(3, 3), 4, empty=empty)
    both = plan_rewind(checkpoint_of(3, 3), 3, empty={"offsets/3", "commits/3"})
    assert sorted(both.moved) == ["commits/.3.crc", "commits/3", "offsets/.3.crc", "offsets/3"]
    with pytest.raises(InvalidArgument, match="lacks the offsets or the commit of the batch before batch 3"):
        plan_rewind(checkpoint_of(3, 3), 3, empty={"commits/2"})
    with pytest.raises(InvalidArgument, match="is not the checkpoint directory"):
        plan_rewind(checkpoint_of(0, -1), 0, empty={"offsets/0"})


def test_entries_without_bytes_are_found_on_disk(tmp_path: Path) -> None:
    for name in checkpoint_of(2, 1) | {"sources/0/0"}:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("v1")
    (tmp_path / "offsets/2").write_text("")
    assert rewind(tmp_path, 2).moved == ("offsets/.2.crc", "offsets/2")
    rewind(tmp_path, 2, apply=True)
    assert not (tmp_path / "offsets/2").exists()
    assert rewind(tmp_path, 2).moved == ()


def test_to_the_first_batch_and_to_where_it_is() -> None:
    assert "commits/0" in plan_rewind(checkpoint_of(2, 2), 0).moved
    assert plan_rewind(checkpoint_of(2, 2), 3).moved == ()
    assert plan_rewind(checkpoint_of(2, 1), 2).moved == ()


@pytest.mark.parametrize(
    ("files", "to"),
    [
        (set(), 0),
        ({"metadata"}, 0),
        (checkpoint_of(3, 3) - {"metadata"}, 1),
        (checkpoint_of(3, 3), 5),
        (checkpoint_of(3, 3), -1),
        (checkpoint_of(30, 30, oldest=10), 10),
        (checkpoint_of(30, 30, oldest=10), 3),
        (checkpoint_of(3, 3) - {"commits/1"}, 2),
    ],
)
def test_what_cannot_be(files: set[str], to: int) -> None:
    with pytest.raises(InvalidArgument):
        plan_rewind(files, to)


def test_a_sinks_log() -> None:
    plain = {str(number) for number in range(13)}
    log = plain | {"9.compact", ".3.crc"}
    assert plan_rewind(checkpoint_of(12, 12), 11, log).sink_moved == ("12", "11")
    assert set(plan_rewind(checkpoint_of(12, 12), 3, log).sink_moved) == (
        {str(number) for number in range(3, 13)} | {"9.compact", ".3.crc"}
    )
    with pytest.raises(InvalidArgument, match="no longer has an entry of its own for batch 1"):
        plan_rewind(checkpoint_of(12, 12), 3, log - {"1"})
    assert plan_rewind(checkpoint_of(12, 12), 11, log - {"1"}).sink_moved == ("12", "11")


def test_nothing_is_deleted(tmp_path: Path) -> None:
    for name in checkpoint_of(3, 3):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    rewind(tmp_path, 2, apply=True, clock=ManualClock(0))
    aside = tmp_path / "_rewound" / "19700101T000000.000000Z"
    assert (aside / "commits" / "3").read_text() == "commits/3"
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file() and aside not in p.parents}
    assert left == checkpoint_of(2, 1)
    for name in ("commits/2", "commits/3", "offsets/3"):
        (aside / name).rename(tmp_path / name)
    assert rewind(tmp_path, 4).moved == (), "moved back it is as it was"


@pytest.mark.parametrize("place", ["s3://bucket/checkpoint", "/nonexistent/dir"])
def test_places_that_cannot_be(place: str) -> None:
    with pytest.raises(InvalidArgument, match="on this machine"):
        rewind(place, 1)
