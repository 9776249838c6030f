"""Work on partitions is done by their current owners, and a failing replica holds up no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import sweeping
from reconfig.controller.folds import MOVED, Outcome, Task
from reconfig.controller.sweeping import FAILURES_MAX, FAULTS_MAX, Covering, Piece
from reconfig.decisions.sweeps import Chore
from stateflow.errors import InvalidArgument, StateDamaged, StateflowError, Unavailable
from stateflow.ledger.rules import EntityStatus
from stateflow.types import PartitionId, ReplicaInfo

AWAY = Unavailable("it is away", remedy="wait")


class Fleet:
    """Two nodes, of which one has two workers. ``fails``: errors by partition."""

    def __init__(self, owners: dict[str, tuple[str, ...]]) -> None:
        self.owners, self.dead = owners, set[str]()
        self.done: list[tuple[str, str]] = []
        self.fails: dict[str, StateflowError] = {}
        replicas = {name: ReplicaInfo(name, site, "x:1") for name, site in (("a", "s"), ("a~1", "s"), ("b", "t"))}
        deployed = {name: SimpleNamespace(assignment=SimpleNamespace(owners=names)) for name, names in owners.items()}
        self.cluster: Any = SimpleNamespace(
            deployed=deployed, roster=SimpleNamespace(replicas=replicas), operator=lambda name: deployed[name]
        )
        self.known: Any = SimpleNamespace(cancelled=False, tasks={})
        self.cluster.sweeps = SimpleNamespace(there={"s": self.known})

    def context(self) -> Any:
        return SimpleNamespace(
            cluster=self.cluster,
            members=SimpleNamespace(alive=lambda name: name not in self.dead),
            clock=SimpleNamespace(monotonic=asyncio.get_running_loop().time),
            pause=lambda: asyncio.sleep(0.01),
            acquainted=lambda: asyncio.sleep(0),
            check_leads=lambda: None,
            check_site=lambda site: None,
            spawn=asyncio.ensure_future,
        )

    async def do(self, name: str, partition: PartitionId) -> Piece | None:
        if (error := self.fails.get(str(partition))) is not None:
            raise error
        self.done.append((name, str(partition)))
        return Piece({"bytes_new": 2})

    def carry(self, node: str, left: dict[str, list[int]], failed: tuple[str, ...] = ()) -> Outcome:
        self.known.left = lambda: left
        self.known.of = lambda status: [Task(each, None, EntityStatus.FAILED) for each in failed]  # type: ignore[arg-type]

        async def scenario() -> Outcome | None:
            return await Covering(self.context(), Chore.CHECKPOINT, self.do).carry("s", node, None)

        outcome = asyncio.run(scenario())
        assert outcome is not None
        return outcome


def replaced(context: Any, now: list[float]) -> Any:
    context.clock = SimpleNamespace(monotonic=lambda: now[0])
    return context


def test_a_plan_is_of_what_is_there_now() -> None:
    fleet = Fleet({"Op": ("a", "a~1", "b"), "Other": ("b",)})

    async def plan(*given: Any) -> Any:
        return Covering(fleet.context(), Chore.VERIFY, fleet.do).plan(*given)

    assert asyncio.run(plan("", 2, "")).scope == {"Op": [0, 1, 2], "Other": [0]}
    assert asyncio.run(plan("", 2, "")).nodes == ("a", "b")
    assert asyncio.run(plan("s", 1, "")).scope == {"Op": [0, 1], "Other": []}
    assert asyncio.run(plan("b", 1, "Op")).nodes == ("b",)
    with pytest.raises(InvalidArgument, match="no partitions to process"):
        asyncio.run(plan("s", 1, "Other"))


def test_a_node_does_what_its_workers_own() -> None:
    fleet = Fleet({"Op": ("a", "a~1", "b", "a")})
    outcome = fleet.carry("a", {"Op": [0, 1, 2]})
    assert fleet.done == [("a", "Op/0"), ("a~1", "Op/1")]
    assert (outcome.done, dict(outcome.counts)) == ({"Op": [0, 1]}, {"partitions": 2, "bytes_new": 4})


def test_a_partition_that_fails_holds_up_no_other_of_its_node() -> None:
    fleet = Fleet({"Op": ("a", "a", "a")})
    fleet.fails = {"Op/1": StateDamaged("it is damaged", remedy="restore it")}
    outcome = fleet.carry("a", {"Op": [0, 1, 2]})
    assert outcome.done == {"Op": [0, 2]}
    assert outcome.error == "Op/1 at a: state_damaged: it is damaged: restore it"
    assert [(each.partition, each.replica, each.undone) for each in outcome.faults] == [(1, "a", True)]


def test_a_replica_that_fails_and_fails_is_asked_no_more() -> None:
    fleet = Fleet({"Op": ("a",) * 9})
    fleet.fails = {f"Op/{number}": AWAY for number in range(9)}
    outcome = fleet.carry("a", {"Op": list(range(9))})
    assert len(outcome.faults) == FAILURES_MAX
    assert outcome.error.endswith(f"; and {FAILURES_MAX - 1} more")


def test_of_a_node_where_all_is_damaged_some_are_told_one_by_one() -> None:
    fleet = Fleet({"Op": ("a",) * (FAULTS_MAX + 20)})

    async def do(name: str, partition: PartitionId) -> Piece | None:
        return Piece({}, ("damaged",))

    fleet.do = do  # type: ignore[method-assign]
    outcome = fleet.carry("a", {"Op": list(range(FAULTS_MAX + 20))})
    assert len(outcome.faults) == FAULTS_MAX
    assert not any(each.undone for each in outcome.faults)
    assert outcome.error == f"Op/0 at a: damaged; and {FAULTS_MAX + 19} more"


def test_one_that_does_not_answer_is_not_asked() -> None:
    fleet = Fleet({"Op": ("b", "b")})
    fleet.dead = {"b"}
    outcome = fleet.carry("b", {"Op": [0, 1]})
    assert "b does not answer" in outcome.error
    assert len(outcome.faults) == 1


def test_what_moved_is_done_where_it_is_but_not_at_a_node_that_failed() -> None:
    fleet = Fleet({"Op": ("a", "b", "a"), "Gone": ()})
    outcome = fleet.carry(MOVED, {"Op": [0, 1], "Gone": [4]}, failed=("b",))
    assert fleet.done == [("a", "Op/0")]
    assert (outcome.done, outcome.error) == ({"Op": [0]}, "")


def test_what_nobody_serves_is_said_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "PATIENCE_S", 0.05)
    fleet = Fleet({"Op": ("a", "a")})
    fleet.fails = {"Op/1": AWAY}
    outcome = fleet.carry(MOVED, {"Op": [0, 1]})
    assert outcome.done == {"Op": [0]}
    assert outcome.error == "Op/1 at a: no replica served it for 0.05 s"
    assert [each.undone for each in outcome.faults] == [True]


def test_what_is_away_is_waited_for_after_others_were_done_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping, "PATIENCE_S", 1.0)
    fleet, now = Fleet({"Op": ("a", "a")}), [0.0]
    fleet.fails = {"Op/0": AWAY}
    do = fleet.do

    async def slowly(name: str, partition: PartitionId) -> Piece | None:
        piece = await do(name, partition)
        if partition.partition == 1:
            now[0] += 100.0
            del fleet.fails["Op/0"]
        return piece

    fleet.do, context = slowly, fleet.context  # type: ignore[method-assign]
    fleet.context = lambda: replaced(context(), now)  # type: ignore[method-assign]
    outcome = fleet.carry(MOVED, {"Op": [0, 1]})
    assert (outcome.done, outcome.error) == ({"Op": [1, 0]}, "")


def test_what_is_cancelled_is_not_gone_on_with() -> None:
    fleet = Fleet({"Op": ("a", "a")})
    fleet.known.cancelled = True
    assert fleet.carry("a", {"Op": [0, 1]}) == Outcome(cancelled=True)
    assert fleet.done == []
