"""Leases as replicas and the controller count them, who takes over, and the table in reconfig/decisions/failover.py."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.controller.members import Members
from reconfig.decisions import failover as f
from reconfig.decisions.failover import Choice, Standby, Takeover
from stateflow.clock import ManualClock
from stateflow.errors import InvalidTransition, InvariantBroken, LeaseLost, StateMissing
from stateflow.partition.registry import Lease
from stateflow.settings import ControllerSettings
from stateflow.types import How, PartitionId, ReplicaInfo
from tests.instructions import names

P = PartitionId("Op", 0)
OWNER = ReplicaInfo("a", "cloud", "a:1")
B, C = ReplicaInfo("b", "edge", "b:1"), ReplicaInfo("c", "cloud", "c:1")


# -- leases -------------------------------------------------------------------------------------------------


def test_a_lease_counts_from_when_the_heartbeat_was_sent() -> None:
    lease = Lease.none()
    with pytest.raises(LeaseLost):
        lease.check(0.0)
    lease.granted(sent_at=10.0, duration_s=3.0)
    lease.check(12.9)
    lease.granted(sent_at=9.0, duration_s=3.0)  # a late answer to an older heartbeat
    lease.check(12.9)
    with pytest.raises(LeaseLost):
        lease.check(13.0)
    lease.granted(14.0, 3.0)
    lease.check(16.0)
    lease.revoke()
    with pytest.raises(LeaseLost):
        lease.check(16.0)
    Lease().check(1e12)


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.95, 1.05),
    st.lists(st.floats(0.1, 2.0), max_size=20),
    st.floats(0.1, 30),
)
def test_a_replica_stops_before_the_controller_acts(
    there: float, back: float, drift: float, waits: list[float], silence: float
) -> None:
    """A replica's lease ends before the controller acts.

    This holds for any delay of messages, and for a clock that is slow or fast within the margin.
    """
    settings = ControllerSettings(lease_s=3.0, lease_margin=0.1)
    true = 0.0
    clock = ManualClock()
    members = Members(["a"], settings, clock)
    members.issue("a", "t", {})
    members.registered("a", "i", "t")
    lease = Lease.none()
    for wait in waits:
        sent_at = true * drift  # by the replica's clock
        clock.advance(there)
        true += there
        if not members.beat("a", "i"):
            break
        clock.advance(back)
        true += back
        lease.granted(sent_at, settings.lease_s)
        clock.advance(wait)
        true += wait
        if members.lapsed("a"):
            members.expel("a")
    clock.advance(silence)
    true += silence
    if members.lapsed("a"):
        with pytest.raises(LeaseLost):
            lease.check(true * drift)


def test_members() -> None:
    clock = ManualClock()
    members = Members(["old"], ControllerSettings(lease_s=10, lease_margin=0.1), clock)
    assert not members.alive("old"), "it was not heard since this controller started"
    assert not members.lapsed("old"), "its lease may have been renewed by the one before"
    assert not members.beat("old", "i1")
    clock.advance(11.1)
    assert members.lapsed("old")
    members.issue("old", "t1", {})
    members.registered("old", "i1", "t1")
    assert members.alive("old")
    assert members.beat("old", "i1")
    assert not members.beat("old", "i0"), "another incarnation"
    assert not members.lapsed("old")
    members.expel("old")
    assert not members.beat("old", "i1"), "it must register first, and hear what it lost"
    assert not members.alive("old")
    assert members.heard_s("new") == -1
    assert not members.lapsed("new")


def test_a_ticket_is_good_once_and_only_for_what_it_was_issued_for() -> None:
    members = Members([], ControllerSettings(), ManualClock())
    mine = {PartitionId("Op", 0): 3}
    assert not members.is_good("a", "t1", mine), "nobody issued it"
    members.issue("a", "t1", mine)
    assert members.is_good("a", "t1", mine)
    assert not members.is_good("b", "t1", mine)
    assert not members.is_good("a", "t1", {}), "it lost a partition since"
    assert not members.is_good("a", "t1", {PartitionId("Op", 0): 4}), "it owns it anew since"
    members.issue("a", "t2", mine)
    assert not members.is_good("a", "t1", mine), "there is a newer one"
    assert members.session("a") == ""
    members.registered("a", "i", "t2")
    assert members.session("a") == "t2"
    assert not members.is_good("a", "t2", mine), "it is used up"
    members.expel("a")
    assert members.session("a") == "", "it has to register before anything is asked of it"


# -- successors ---------------------------------------------------------------------------------------------


def test_the_successor_that_loses_least() -> None:
    alive = {"b": B, "c": C}
    standbys = [Standby("b", "m1", True, 7), Standby("c", "m2", True, 9), Standby("d", "m3", True, 99)]
    assert f.choose(OWNER, True, standbys, {**alive, "a": OWNER}, {}) == Choice("a", How.LOCAL)
    assert f.choose(OWNER, True, standbys, alive, {}) == Choice("c", How.STANDBY, "m2"), "the owner is not there"
    warming = [Standby("b", "m1", False, 7)]
    assert f.choose(OWNER, False, warming, alive, {}) == Choice("c", How.CHECKPOINT), "its own site first"
    assert f.choose(OWNER, False, [], {"b": B}, {}) == Choice("b", How.CHECKPOINT)
    assert f.choose(OWNER, False, [], {}, {}) is None


@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.builds(Standby, st.sampled_from("bcd"), st.just("m"), st.booleans(), st.integers(0, 9)), max_size=4),
    st.sets(st.sampled_from("bc")),
)
def test_after_a_cold_start_only_what_a_checkpoint_would_replace_waits_for_its_owner(
    may_come: bool, accepted: bool, standbys: list[Standby], names: set[str]
) -> None:
    """A takeover waits if it would be one from a checkpoint, or none, unless the loss was accepted by command.

    Whatever does not wait is chosen as ever.
    """
    alive = {info.name: info for info in (B, C) if info.name in names}
    choice = f.choose(OWNER, True, standbys, alive, {})
    waits = f.waits(may_come, accepted, standbys, alive)
    assert waits == (may_come and not accepted and (choice is None or choice.how is How.CHECKPOINT))


# -- the machine --------------------------------------------------------------------------------------------

ERROR = StateMissing("no checkpoint")


def takeover(*events: f.Event) -> Takeover:
    machine = Takeover(P, 6)
    for event in events:
        machine.handle(event)
    return machine


GRANTED = (f.Begin(), f.GrantRecorded())


def test_a_smooth_take_over() -> None:
    machine = Takeover(P, 6)
    said = [names(machine.handle(e)) for e in (*GRANTED, f.TargetOwned(6), f.OwnedRecorded())]
    assert said == [["RecordGrant"], ["TakeOver"], ["RecordOwned"], []]
    assert machine.phase is f.Phase.COMPLETED


def test_silence_decides_nothing() -> None:
    machine = takeover(*GRANTED)
    for _ in range(20):
        assert names(machine.handle(f.TargetUnknown())) == ["Retry(TakeOver)"]
    assert machine.phase is f.Phase.GRANTED


def test_a_refusal_is_made_certain_before_another_epoch_is_granted() -> None:
    machine = takeover(*GRANTED)
    assert names(machine.handle(f.TargetRefused(ERROR))) == ["CancelTarget"]
    assert names(machine.handle(f.TargetUnknown())) == ["Retry(CancelTarget)"]
    assert names(machine.handle(f.TargetCancelled())) == ["RecordAborted"]
    assert (machine.phase, machine.error) == (f.Phase.ABANDONED, ERROR)


def test_an_ownership_wins_over_its_cancellation() -> None:
    machine = takeover(*GRANTED, f.TargetRefused(ERROR))
    assert names(machine.handle(f.TargetOwned(6))) == ["RecordOwned"]
    assert names(machine.handle(f.TargetGone())) == []


@pytest.mark.parametrize("events", [(f.Begin(),), GRANTED, (*GRANTED, f.TargetRefused(ERROR))], ids=len)
def test_a_successor_that_dies_is_given_up(events: tuple[f.Event, ...]) -> None:
    assert names(takeover(*events).handle(f.TargetGone())) == ["RecordAborted"]


def test_an_ownership_at_another_epoch_is_a_fault() -> None:
    with pytest.raises(InvalidTransition, match=r"GRANTED.*a bug in stateflow, please report it"):
        takeover(*GRANTED).handle(f.TargetOwned(7))


def test_after_a_restart_what_was_granted_is_asked_for_again() -> None:
    machine, first = Takeover.resumed(P, 6, granted=True)
    assert names(first) == ["TakeOver"]
    assert names(machine.handle(f.TargetOwned(6))) == ["RecordOwned"]
    machine, first = Takeover.resumed(P, 6, granted=False)
    assert names(first) == ["RecordGrant"]


def test_instructions_carry_the_granted_epoch_and_the_error() -> None:
    machine = takeover(f.Begin())
    assert machine.handle(f.GrantRecorded()) == [f.TakeOver(6)]
    assert machine.handle(f.TargetUnknown()) == [f.Retry(f.TakeOver(6))]
    machine.handle(f.TargetRefused(ERROR))
    (recorded,) = machine.handle(f.TargetCancelled())
    assert isinstance(recorded, f.RecordAborted)
    assert recorded.error is ERROR
    assert takeover(*GRANTED).handle(f.TargetOwned(6)) == [f.RecordOwned(6)]


def test_a_state_that_no_history_leads_to_is_named() -> None:
    machine = takeover(*GRANTED, f.TargetRefused(ERROR))
    machine.validate()
    machine.error = None
    with pytest.raises(InvariantBroken, match="refused it"):
        machine.validate()
    abandoned = takeover(*GRANTED, f.TargetGone())
    abandoned.validate()
    abandoned.error = None
    with pytest.raises(InvariantBroken, match="has an error"):
        abandoned.validate()


def test_no_event_leads_to_a_state_that_is_wrong() -> None:
    """Every state that a takeover can reach, by any events in any order, is valid."""
    events = [
        f.Begin(), f.GrantRecorded(), f.TargetOwned(6), f.TargetOwned(7), f.TargetRefused(ERROR), f.TargetCancelled(),
        f.TargetUnknown(), f.TargetGone(), f.OwnedRecorded(),
    ]  # fmt: skip
    assert {type(event) for event in events} == set(f.TABLE.events)
    reached: set[tuple[f.Phase, bool, bool]] = set()
    ways = [takeover(), Takeover.resumed(P, 6, granted=True)[0]]
    while ways:
        machine = ways.pop()
        machine.validate()
        state = machine.phase, machine.cancelling, machine.error is not None
        if state not in reached:
            reached.add(state)
            for event in events:
                after = dataclasses.replace(machine, story=machine.story.copy())
                with contextlib.suppress(InvalidTransition):
                    after.handle(event)
                ways.append(after)
    assert {phase for phase, _, _ in reached} == set(f.Phase)


# -- why a partition is not served --------------------------------------------------------------------------


def test_partitions_of_one_reason_are_told_together_and_with_a_command() -> None:
    missing = f.Lack("a", f.Why.MISSING, "there is no checkpoint to restore it from")
    lacks = {PartitionId("Op", p): missing for p in (5, 3, 4)} | {
        PartitionId("Op", 9): f.Lack("b", f.Why.LAPSED),
        PartitionId("Op", 10): f.Lack("b", f.Why.SILENT),
        PartitionId("Ap", 0): f.Lack("b", f.Why.OPENING),
        PartitionId("Op", 11): f.Lack("b", f.Why.COMING, until_us=90_400_000),
    }
    said = [(operator, numbers, lack.owner, str(error)) for operator, numbers, lack, error in f.unserved(lacks)]
    assert [(operator, numbers, owner) for operator, numbers, owner, _ in said] == [
        ("Ap", [0], "b"), ("Op", [3, 4, 5], "a"), ("Op", [9], "b"), ("Op", [10], "b"), ("Op", [11], "b"),
    ]  # fmt: skip
    lines = [line for *_, line in said]
    assert lines[0] == "unavailable: b is starting (operator=Ap partitions=0): wait until it has started"
    assert lines[1] == (
        "state_missing: a registered without these partitions: its data directory does not hold their current state; "
        "no takeover: there is no checkpoint to restore it from (operator=Op partitions=3-5): start a with the data "
        "directory that has them, or restore them: `stateflow checkpoint restore Op 3-5 --from STORE`; if they are "
        "lost for good, start empty: `stateflow undeploy Op --delete-state`, then deploy again"
    )
    assert lines[2] == (
        "unavailable: the lease of b has lapsed; its partitions are being taken over (operator=Op partitions=9): wait"
    )
    assert lines[3].endswith("when its lease has lapsed (operator=Op partitions=10): check that it runs")
    assert lines[4] == (
        "unavailable: b has not registered since the cluster was started; until 1970-01-01T00:01:30+00:00 its "
        "partitions wait for it, because a checkpoint may lack acknowledged batches (operator=Op partitions=11): check "
        "that b runs with its data directory; if it is gone for good, `stateflow takeover Op 11 --accept-loss` gives "
        "them to others"
    )


def test_who_is_at_the_sites_of_a_confined_operator_comes_first() -> None:
    alive = {"b": B, "c": C}
    assert f.choose(OWNER, False, [], alive, {}, {B.site}) == Choice("b", How.CHECKPOINT), "not the owner's site"
    assert f.choose(OWNER, False, [], {"c": C}, {}, {B.site}) == Choice("c", How.CHECKPOINT), "nobody there answers"
    standbys = [Standby("b", "m1", True, 5), Standby("c", "m2", True, 5)]
    assert f.choose(OWNER, False, standbys, alive, {}, {B.site}) == Choice("b", How.STANDBY, "m1")
    standbys = [Standby("b", "m1", True, 3), Standby("c", "m2", True, 5)]
    assert f.choose(OWNER, False, standbys, alive, {}, {B.site}) == Choice("c", How.STANDBY, "m2"), "loses less"
    assert f.choose(OWNER, False, standbys[1:], alive, {}, {B.site}) == Choice("c", How.STANDBY, "m2"), "loses less"


def test_of_standbys_that_lose_the_same_the_one_that_a_checkpoint_would_go_to() -> None:
    alive = {"b": B, "c": C, "d": ReplicaInfo("d", "cloud", "d:1")}
    equal = [Standby(name, f"m-{name}", True, 7) for name in "bcd"]
    assert f.choose(OWNER, False, equal, alive, {"d": 1}) == Choice("c", How.STANDBY, "m-c"), "its site, and least load"
    assert f.choose(OWNER, False, equal, alive, {"c": 1}) == Choice("d", How.STANDBY, "m-d")
    assert f.choose(OWNER, False, equal, alive, {}, tried={"c": 1, "d": 1}) == Choice("b", How.STANDBY, "m-b")


def test_nothing_newer_is_given_up_for_the_sake_of_a_maintenance() -> None:
    alive = {"b": B, "c": C}
    older = [Standby("b", "m1", True, 6), Standby("c", "m2", True, 7)]
    assert f.choose(OWNER, False, older, alive, {}, (), {"c"}) == Choice("c", How.STANDBY, "m2"), "it has more"
    equal = [Standby("b", "m1", True, 7), Standby("c", "m2", True, 7)]
    assert f.choose(OWNER, False, equal, alive, {}, {C.site}, {"c"}) == Choice("b", How.STANDBY, "m1")
    assert f.choose(OWNER, False, [], alive, {}, (), {"c"}) == Choice("b", How.CHECKPOINT)
    assert f.choose(OWNER, False, [], {"c": C}, {}, (), {"c"}) == Choice("c", How.CHECKPOINT), "to be served first"
    failed = {"c": 1}
    assert f.choose(OWNER, False, [], alive, {}, tried=failed) == Choice("b", How.CHECKPOINT), "not where it failed"
    assert f.choose(OWNER, False, [], alive, {}, {C.site}, tried=failed) == Choice("c", How.CHECKPOINT), (
        "but at its site"
    )
    assert f.choose(OWNER, False, [], alive, {}, tried={"b": 1, "c": 1}) == Choice("c", How.CHECKPOINT), "in turns"
    assert f.choose(OWNER, True, equal, {**alive, "a": OWNER}, {}, (), {"a"}) == Choice("a", How.LOCAL)
