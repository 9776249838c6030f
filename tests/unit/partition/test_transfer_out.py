"""Followers of a partition at its source: how many there may be, what they may confirm, and who speaks for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.errors import Busy, InvalidArgument, NotAllowed
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.security.roles import Identity, Role
from tests.unit.partition.test_replica import SETTINGS, P, Two

LIMIT = SETTINGS.followers_max


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


# -- what may be confirmed ----------------------------------------------------------------------------------


def test_a_standby_that_lies_confirms_nothing_that_it_was_not_sent(two: Two) -> None:
    two.send(two.a, 1)
    sender = two.a.sender
    base = sender.snapshot(P, "s1", True)
    two.send(two.a, 2)
    two.send(two.a, 3)
    for sequence in (2, 3, 1 << 40):
        with pytest.raises(InvalidArgument, match=f"up to {sequence}, but was sent only those up to 1"):
            sender.confirm(base.snapshot_id, sequence)
    assert not sender.confirmed(P, 2)
    sender.confirm(base.snapshot_id, base.sequence)
    reading = sender.change_log(base.snapshot_id).read(base.sequence, 1)
    assert len(reading.change_sets) == 1, "one of two was sent"
    with pytest.raises(InvalidArgument, match="up to 3, but was sent only those up to 2"):
        sender.confirm(base.snapshot_id, 3)
    sender.confirm(base.snapshot_id, 2)
    assert sender.confirmed(P, 2)
    assert not sender.confirmed(P, 3)


def test_the_fullest_change_log_counts(two: Two) -> None:
    sender = two.a.sender
    assert two.a.limits_used()["change_log_bytes"] == 0.0
    base = sender.snapshot(P, "s1", True)
    two.send(two.a, 1)
    log = sender.change_log(base.snapshot_id)
    assert log.bytes > 0
    assert two.a.limits_used()["change_log_bytes"] == log.bytes / two.a.settings.change_log_bytes_max
    log.read(base.sequence, 1 << 20)
    sender.confirm(base.snapshot_id, 1)
    assert two.a.limits_used()["change_log_bytes"] == 0.0


# -- how many -----------------------------------------------------------------------------------------------


def test_the_copies_of_a_partition_are_bounded(two: Two) -> None:
    sender, before = two.a.sender, LIMIT_HITS.count("followers")
    for number in range(LIMIT):
        sender.snapshot(P, f"s{number}")
    with pytest.raises(Busy, match=f"{LIMIT} copies follow this partition already") as caught:
        sender.snapshot(P, "one-more")
    assert LIMIT_HITS.count("followers") == before + 1
    assert two.a.limits_used()["followers"] == 1.0
    assert caught.value.retryable
    assert "STATEFLOW_REPLICA_FOLLOWERS_MAX" in caught.value.remedy
    assert len(list((two.root / "a" / "snapshots").iterdir())) == LIMIT, "nothing was written for it"
    assert sender.followers() == {"Op": LIMIT}
    sender.snapshot(P, "s0")  # it begins again, in place of its former copy
    assert sender.followers() == {"Op": LIMIT}
    sender.cancel(P, "s0", 1)
    sender.snapshot(P, "one-more")


def test_the_target_of_a_sealed_partition_is_let_in_beside_all_others(two: Two) -> None:
    """The target is let in, because a sealed partition is served again only by its target."""
    for number in range(LIMIT):
        two.a.sender.snapshot(P, f"s{number}")
    two.send(two.a, 1)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    assert two.a.sender.snapshot(P, "m1").sequence == 1


# -- who ----------------------------------------------------------------------------------------------------


def test_a_copy_belongs_to_its_follower(two: Two) -> None:
    sender = two.a.sender
    base = sender.snapshot(P, "s1", True, follower="b~1")
    sender.check_follower(Identity(Role.NODE, "b"), "Confirm", base.snapshot_id)
    for who in (Identity(Role.NODE, "c"), Identity(Role.AGENT, "a"), Identity(Role.NODE, "b~1")):
        with pytest.raises(NotAllowed, match=f"{who} may not call Confirm for this copy: it is for b~1"):
            sender.check_follower(who, "Confirm", base.snapshot_id)
    nobodys = sender.snapshot(P, "s2", True)
    with pytest.raises(NotAllowed):
        sender.check_follower(Identity(Role.NODE, "b"), "Confirm", nobodys.snapshot_id)


def test_a_fence_names_the_target_of_its_move(two: Two) -> None:
    sender = two.a.sender
    assert sender.fenced_for(P, "m1") == ""
    assert sender.fence(P, "m1", 2, two.b.info, cold=True)
    assert (sender.fenced_for(P, "m1"), sender.fenced_for(P, "m2")) == ("b", "")
    assert two.restart("a").sender.fenced_for(P, "m1") == "b"
