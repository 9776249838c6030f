"""Members: how long the controller waits for a replica that is expected."""

from __future__ import annotations

from reconfig.controller.members import Members
from stateflow.settings import ControllerSettings

SETTINGS = ControllerSettings(lease_s=10, opening_timeout_s=30)


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> int:
        return round(self.now * 1e6)


def members() -> tuple[Members, HandClock]:
    clock = HandClock()
    found = Members(["a"], SETTINGS, clock)
    found.issue("a", "t", {})
    found.registered("a", "i1", "t")
    return found, clock


def test_who_says_nothing_is_not_waited_for() -> None:
    found, _ = members()
    assert not found.is_opening("a")
    found.opens("b")
    assert not found.is_opening("b")


def test_it_is_waited_for_while_it_is_heard() -> None:
    found, clock = members()
    for _ in range(5):
        clock.now += 5
        found.opens("a")
        assert found.is_opening("a")
    assert found.lapsed("a"), "that it comes gives it no lease"
    clock.now += 10.1
    assert not found.is_opening("a")


def test_it_is_not_waited_for_longer_for_saying_it_often_or_from_several_processes() -> None:
    found, clock = members()
    for _ in range(31):
        found.opens("a")
        clock.now += 1
    found.opens("a")
    assert not found.is_opening("a")


def test_once_it_registered_the_next_start_has_all_the_time_again() -> None:
    found, clock = members()
    found.opens("a")
    clock.now += 29
    found.issue("a", "t2", {})
    found.registered("a", "i2", "t2")
    assert not found.is_opening("a")
    clock.now += 5
    found.opens("a")
    assert found.is_opening("a")


def test_who_was_there_before_has_as_long_to_be_heard_as_ever() -> None:
    """A replica known from before the controller's start is expected as long as any other.

    So the first command after a change of controllers does not find that no replica answers.
    """
    clock = HandClock()
    found = Members(["a", "b"], SETTINGS, clock)
    assert found.expects()
    for name in ("a", "b"):
        assert found.expects()
        found.issue(name, name, {})
        found.registered(name, "first", name)
    assert not found.expects()
    found = Members(["gone"], SETTINGS, clock)
    clock.now += found.silence_s
    assert found.expects()
    clock.now += 0.1
    assert not found.expects()
    assert not Members([], SETTINGS, clock).expects()


def test_a_lease_that_has_lapsed_is_renewed_by_a_registration_only() -> None:
    """A heartbeat does not renew a lease that has lapsed: decisions rely on the lapse.

    A restore whose owner's lease had lapsed let its target own the partition, while a late heartbeat gave the owner
    another lease; so did a takeover by command. Both served the partition.
    """
    found, clock = members()
    clock.now += 11.1
    assert found.lapsed("a")
    assert not found.beat("a", "i1")
    assert found.lapsed("a")
    assert not found.alive("a")
    found.issue("a", "t2", {})
    found.registered("a", "i1", "t2")
    assert found.beat("a", "i1")


def test_after_a_cold_start_a_replica_may_come_until_it_has_or_the_wait_is_over() -> None:
    clock = HandClock()
    found = Members("abc", SETTINGS, clock, cold_until=clock.now + 60)
    assert found.cold_until_us == 160_000_000
    found.opens("a")
    assert found.may_come("a"), "it has said that it comes, and has not registered"
    found.issue("a", "t", {})
    found.registered("a", "i1", "t")
    found.expect("b")  # it said what it has, and its operators were adopted
    clock.now += 59.9
    assert [name for name in "abc" if found.may_come(name)] == ["c"]
    found.expel("a")
    assert not found.may_come("a"), "whatever became of it"
    clock.now += 0.1
    assert not found.may_come("c")


def test_without_a_cold_start_no_replica_may_come() -> None:
    found = Members("a", SETTINGS, HandClock())
    assert not found.may_come("a")
    assert found.cold_until_us == 0
