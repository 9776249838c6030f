"""Choice and timing of partitions to try: two owners, of which one does not answer."""

from __future__ import annotations

from stateflow.client.forwarding import AGAIN_S, AGAIN_S_MAX, State, Ways
from stateflow.errors import PositionGap, Unavailable

OWNERS = "aabbb"
GAP = PositionGap("-", expected=0)


def away() -> Unavailable:
    return Unavailable("-", remedy="-")


def ways() -> Ways:
    return Ways(len(OWNERS), OWNERS.__getitem__)


def tried(found: Ways, partition: int, now: float) -> None:
    """Tries a partition in vain."""
    found.failed(partition, away(), now)
    found.release(partition)


def test_what_waits_for_nothing_is_sent_at_once_and_what_waits_comes_first() -> None:
    found = ways()
    assert found.come([0, 3]) == [0, 3]
    assert found.come([0, 1]) == [1], "one is on its way to 0"
    for partition in (0, 1, 3):
        found.took(partition, 1)
        found.release(partition)
    assert [way.state for way in found] == [State.AWAY, *[State.IDLE] * 4], "the second one waits for 0"
    assert found.come([0, 1]) == [1]
    assert found.due(0.0) == [0]
    assert found.due(0.0) == [], "it is busy"
    found.took(0, 2)
    found.release(0)
    assert found.come([0]) == [0]


def test_nothing_is_at_rest_until_whoever_sends_has_gone() -> None:
    """A sender keeps its ways from being at rest until it has released its partition.

    When a flush ended as the last stored batch was taken, the next batch was stored behind that sender.
    """
    found = ways()
    assert found.at_rest
    found.come([0])
    assert not found.at_rest
    found.took(0, 1)
    assert not found.at_rest, "what comes now would be stored"
    found.release(0)
    assert found.at_rest
    found.come([1])
    tried(found, 1, 0.0)
    assert not found.at_rest, "one is stored"


def test_of_an_owner_that_does_not_answer_one_is_tried_less_and_less_often() -> None:
    found, now = ways(), 100.0
    for partition in found.come(range(5)):
        tried(found, partition, now)
    assert found.pause_s(now) == AGAIN_S
    assert found.due(now) == []
    pauses = []
    for _ in range(8):
        pause = found.pause_s(now)
        assert pause is not None
        now += pause
        due = found.due(now)
        assert sorted(OWNERS[partition] for partition in due) == ["a", "b"], "one of each"
        for partition in due:
            tried(found, partition, now)
        pauses.append(pause)
    assert pauses == sorted(pauses)
    assert pauses[-1] == AGAIN_S_MAX


def test_when_it_answers_the_others_follow_at_once() -> None:
    found = ways()
    for partition in found.come(range(5)):
        tried(found, partition, 0.0)
    one, other = found.due(10.0)
    found.took(other, 1)
    found.release(other)
    tried(found, one, 10.0)
    assert [OWNERS[partition] for partition in found.due(10.0)] == ["b"], "one of those that are left"
    assert found.pause_s(10.0) == 0.01 if found[4].state is State.AWAY else AGAIN_S


def test_what_is_wrong_with_one_partition_holds_up_no_other() -> None:
    found = ways()
    for partition in found.come(range(5)):
        found.failed(partition, GAP, 0.0)
        found.release(partition)
    assert found.due(1.0) == [0, 1, 2, 3, 4]


def test_those_of_a_former_process_are_tried_at_once_one_of_each_owner() -> None:
    found = ways()
    for partition in range(5):
        found.begin(partition, 3)
    assert found.come([0]) == []
    assert found[0].waiting == 4
    assert found.due(0.0) == [0, 2]
    found.took(0, 4)
    found.release(0)
    assert found.due(0.0) == [1]


def test_all_are_tried_at_once_when_somebody_waits_for_them() -> None:
    found = ways()
    for partition in found.come([0, 2]):
        tried(found, partition, 0.0)
    assert found.due(0.1) == []
    found.at_once()
    assert found.due(0.1) == [0, 2]
    assert found.pause_s(0.1) is None, "until something changes"
