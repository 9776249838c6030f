"""Reports of replicas whose partitions the ledger does not know are remembered, up to a bound."""

from __future__ import annotations

import pytest

from reconfig.controller import registration
from reconfig.controller.folds import Home
from reconfig.controller.registration import Claims, Piece
from stateflow.clock import ManualClock
from stateflow.errors import InvalidArgument, PartitionsClaimed
from stateflow.partition.control import PartitionView
from stateflow.partition.lifecycle import State
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo

INTERVAL_S = ControllerSettings().heartbeat_interval_s


def report(number: int, *partitions: int, first: bool = True, last: bool = True) -> Piece:
    views = [PartitionView(PartitionId(f"Op{number}", each), State.OWNED, 1, 0) for each in partitions]
    info = ReplicaInfo(f"r{number}", "site", f"r:{number}")
    return Piece(info, Home(f"d{number}"), "elsewhere", (), views, first=first, last=last)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def claims(clock: ManualClock) -> Claims:
    return Claims(ControllerSettings(), clock)


def test_a_claim_forbids_the_creation_of_its_operator(claims: Claims) -> None:
    claims.note(report(1, 0))
    with pytest.raises(PartitionsClaimed):
        claims.check_free("Op1", "")
    claims.check_free("Op2", "")


def test_of_too_many_directories_the_one_silent_for_longest_is_forgotten(
    claims: Claims, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "CLAIMANTS_MAX", 3)
    for number in range(3):
        claims.note(report(number, 0))
        clock.advance(INTERVAL_S)
    assert claims.heard("d0")
    claims.note(report(3, 0))
    assert "the report of r1, silent for longest, is forgotten" in caplog.text
    assert not claims.heard("d1")
    assert [each.info.name for each in claims.present()] == ["r0", "r2", "r3"]
    claims.note(report(1, 0))
    assert claims.heard("d1"), "one that comes back reports again"
    assert not claims.heard("d2")


def test_a_report_goes_on_where_it_was(claims: Claims) -> None:
    claims.note(report(1, 0, last=False))
    assert not claims.heard("d1")
    claims.note(report(1, 1, first=False))
    assert claims.heard("d1")
    (found,) = claims.present()
    assert [each.partition for each in found.claim.held] == [0, 1]


def test_one_directory_claims_no_more_than_any_replica_has(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "CLAIMED_MAX", 4)
    claims.note(report(1, 0, 1, last=False))
    with pytest.raises(InvalidArgument, match="claims more than 4 partitions and operators"):
        claims.note(report(1, 2, 3, 4, first=False))
    assert not claims.heard("d1"), "its report is not complete"
    with pytest.raises(PartitionsClaimed):
        claims.check_free("Op1", "")
