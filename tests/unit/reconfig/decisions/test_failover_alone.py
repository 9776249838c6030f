"""Serving without a controller: who may, and what the leading controller knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions.failover import NOTHING, Failover, Failovers, Said
from stateflow.errors import InvalidArgument, LeaseLost
from stateflow.partition.registry import Lease

MANUAL, AUTOMATIC = Failover.MANUAL, Failover.AUTOMATIC


def test_orders() -> None:
    failovers = Failovers()
    assert not failovers.may_be_alone("Op", None)
    failovers.order("Op", MANUAL)
    assert failovers.may_be_alone("Op", NOTHING)
    assert failovers.manual() == {"Op"}
    failovers.order("Op", AUTOMATIC)
    assert failovers.may_be_alone("Op", None), "nothing was heard of it in this term"
    assert failovers.may_be_alone("Op", Said(1, frozenset({"Op"})))
    assert failovers.may_be_alone("Op", NOTHING), "it may have been told meanwhile"
    assert not failovers.may_be_alone("Op", Said(2, frozenset()))
    failovers.order("Op", MANUAL)
    failovers.undeployed("Op")
    assert not failovers.is_manual("Op")
    assert failovers.may_be_alone("Op", Said(3, frozenset({"Op"})))
    assert not failovers.may_be_alone("Other", Said(1, frozenset()))
    with pytest.raises(InvalidArgument, match="use automatic or manual"):
        Failover.named("sometimes")


@dataclass
class Cluster:
    """A replica and its leading controller: heartbeats and answers arrive or are lost, and terms change."""

    failovers: Failovers = field(default_factory=Failovers)
    said: Said | None = None
    kept: Said = NOTHING  # the replica's own record
    late: list[Said] = field(default_factory=list)  # heartbeats in flight

    def step(self, what: str) -> None:
        match what:
            case "manual" | "automatic":
                if self.failovers.is_manual("Op") is not (what == "manual"):
                    self.failovers.order("Op", Failover(what))
            case "another leads":
                self.said = None
            case "heartbeat":
                self.said = self.kept
                self.kept = Said(self.failovers.count, self.failovers.manual())
            case "answer is lost":
                self.said = self.kept
            case "heartbeat is late":
                self.late.append(self.kept)
            case "late one arrives":
                if self.late:
                    self.said = self.late.pop(0)


STEPS = (
    *("manual", "automatic", "another leads", "heartbeat"),
    *("answer is lost", "heartbeat is late", "late one arrives"),
)


@given(st.lists(st.sampled_from(STEPS), max_size=30))
def test_whatever_is_lost_or_late_it_is_known_what_a_replica_may_serve(steps: list[str]) -> None:
    cluster = Cluster()
    for step in steps:
        cluster.step(step)
        if "Op" in cluster.kept.operators:
            assert cluster.failovers.may_be_alone("Op", cluster.said)


@given(st.lists(st.sampled_from(STEPS), max_size=30))
def test_one_that_was_heard_twice_may_not(steps: list[str]) -> None:
    cluster = Cluster()
    for step in [*steps, "automatic", "heartbeat", "heartbeat"]:
        cluster.step(step)
    assert not cluster.failovers.may_be_alone("Op", cluster.said)


def test_a_lease_is_not_needed_by_one_that_nobody_answers() -> None:
    lease = Lease.none()
    lease.alone = frozenset({"Op"})
    assert not lease.holds(1.0, "Op"), "it has not asked yet"
    lease.unanswered()
    lease.check(1.0, "Op")
    with pytest.raises(LeaseLost):
        lease.check(1.0, "Other")
    assert lease.serves_some(1.0)
    lease.granted(1.0, 3.0)
    lease.check(2.0, "Other")
    assert not lease.holds(4.5, "Op"), "it was heard, and was stopped since then"
    lease.unanswered()
    lease.check(4.5, "Op")
    lease.revoke()
    with pytest.raises(LeaseLost):
        lease.check(4.5, "Op")
