"""The cluster's state, rebuilt from the reports of replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reconfig.controller import steps
from reconfig.controller.folds import Home
from reconfig.decisions.failover import EPOCHS_SKIPPED, Claim, Held, assignment, claimants, find
from stateflow.errors import ForeignLedger, StaleTerm
from stateflow.ledger import Ledger
from stateflow.partition.control import Command, FencingGuard
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.writing import Written, write

TWICE = "several data directories have the replica name a"
SPEC = OperatorSpec("Op", "m:Op", 3, ("k",), b"", "[]")


def claim(replica: str, spec: OperatorSpec | None = SPEC, directory: str = "", **held: tuple[str, int]) -> Claim:
    partitions = {PartitionId("Op", int(name[1:])): Held(*each) for name, each in held.items()}
    return Claim(replica, directory or f"d-{replica}", "l1", {} if spec is None else {spec.name: spec}, partitions)


def test_the_owner_at_the_greatest_epoch_has_it() -> None:
    claims = [
        claim("a", p0=("OWNED", 1), p1=("SEALED", 2), p2=("OWNED", 3)),
        claim("b", p1=("OWNED", 2), p2=("OWNED", 4), p0=("WARMING", 0)),
        claim("c", None, p2=("FENCING", 5), p0=("SEALED", 1)),
    ]
    (found,) = find(claims, set())
    assert found.whole
    assert found.owners == {0: ("a", 1), 1: ("b", 2), 2: ("c", 5)}
    assert set(found.granted.values()) == {5 + EPOCHS_SKIPPED}
    assert assignment(found, claims) == found.owners
    assert find(claims, {"Op"}) == []


def test_what_is_missing_or_only_sealed_is_not_owned() -> None:
    claims = [claim("a", p0=("OWNED", 7)), claim("b", p1=("SEALED", 3), p2=("WARMING", 0))]
    (found,) = find(claims, set())
    assert not found.whole
    assert (found.owners, found.sealed, found.missing) == ({0: ("a", 7)}, {1: ("b", 3)}, [2])
    given = assignment(found, claims)
    assert given[1] == ("b", 2), "older than what is sealed there, so that it is served again"
    assert given[2][0] in ("a", "b")
    (found,) = find(
        [claim("a", p0=("SEALED", 4), p1=("OWNED", 1), p2=("OWNED", 1)), claim("b", p0=("OWNED", 2))], set()
    )
    assert found.sealed == {0: ("a", 4)}, "it went on behind what b has"


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ([claim("a", p0=("OWNED", 2)), claim("b", p0=("OWNED", 2))], "Op/0 is owned by a and b, both at epoch 2"),
        (
            [claim("a", p0=("OWNED", 2)), claim("a", directory="x", p1=("OWNED", 2))],
            "several data directories have the replica name a",
        ),
        ([claim("a", None, p0=("OWNED", 2))], "no replica has the operator's description"),
        (
            [claim("a", p0=("OWNED", 2)), claim("b", replace(SPEC, partitions=4), p1=("OWNED", 2))],
            "replicas disagree on the number of partitions",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_not_adopted(claims: list[Claim], says: str) -> None:
    (found,) = find(claims, set())
    assert found.conflicts == [says]
    assert found.spec is None
    assert not found.whole


def test_copies_on_their_way_claim_nothing() -> None:
    claims = [claim("a", p0=("WARMING", 0))]
    assert claimants(claims, "Op") == {}
    assert find(claims, set()) == []


def test_an_adopted_operator_is_folded_and_its_epochs_go_on_beyond(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        claims = [claim("a", p0=("OWNED", 7), p2=("OWNED", 1)), claim("b", p1=("OWNED", 3))]
        for name in ("a", "b"):
            write(cluster, steps.register, ReplicaInfo(name, "x", f"{name}:1"), Home(f"d-{name}", "here"))
        (found,) = find(claims, set())
        write(cluster, steps.adopt, SPEC, assignment(found, claims), found.granted)
        write(cluster, steps.adopt_ledger, "l1")
        write(cluster, steps.adopt_ledger, "l1")
        again = Written.read(ledger)
        assert again.adopted == {"l1"}
        for each in (cluster, again):
            assert each.operator("Op").spec == replace(SPEC, recorded_us=each.versions_us["Op"])
            assert each.operator("Op").assignment.owners == ("a", "b", "a")
            assert each.operator("Op").assignment.epochs == (7, 3, 1)
            assert each.next_epoch(PartitionId("Op", 2)) == 7 + EPOCHS_SKIPPED + 1


def test_a_replica_follows_a_ledger_that_adopted_its_own_whatever_the_term() -> None:
    kept: list[tuple[str, int]] = []
    authority = FencingGuard(("l1", 9), lambda ledger, term: kept.append((ledger, term)), alone=False)
    with pytest.raises(ForeignLedger, match="stateflow adopt"):
        authority.check_answer("l2", 1)
    with pytest.raises(ForeignLedger):
        authority.obey(Command("l2", 1, "s"), adopted="l0")
    authority.obey(Command("l2", 1, "s"), adopted="l1")
    assert kept == [("l2", 1)]
    with pytest.raises(ForeignLedger):
        authority.check_answer("l1", 10)
    with pytest.raises(StaleTerm):
        authority.check_answer("l2", 0)


def test_the_newest_version_is_adopted_though_most_replicas_missed_it() -> None:
    former, newest = replace(SPEC, recorded_us=1), replace(SPEC, target="mod:Newer", recorded_us=2)
    claims = [
        claim("a", former, p0=("OWNED", 1)),
        claim("b", former, p1=("OWNED", 1)),
        claim("c", newest, p2=("OWNED", 1)),
    ]
    (found,) = find(claims, set())
    assert found.spec == newest
