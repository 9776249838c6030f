"""Reconfigurations: a restarted controller carries them on as they were planned."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import reconfigurations, steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import Running, RunRegistry
from reconfig.controller.folds import Home
from reconfig.controller.history import planned_report
from reconfig.controller.jobs import Jobs
from reconfig.controller.measuring import Heard
from reconfig.controller.reconfigurations import Ask, Reconfigurations
from reconfig.decisions import migration as m
from reconfig.decisions.jobs import Do, Job, Node
from reconfig.decisions.placement import Choice, MoveProposal
from reconfig.decisions.plan import STRATEGIES, Asked, Cause, Kind, PlannedMove, StrategyName
from reconfig.decisions.sweeps import Maintenance
from stateflow.clock import ManualClock
from stateflow.errors import InMaintenance, InvalidArgument, MoveConflict, NoRoom, StateflowError, Unavailable
from stateflow.ledger import Ledger
from stateflow.partition.control import DiskView, PartitionView
from stateflow.partition.lifecycle import State
from stateflow.schedule import Schedule
from stateflow.settings import ControllerSettings
from stateflow.types import MoveOptions, OperatorSpec, PartitionId, ReplicaInfo
from tests.writing import Written, deploy, write

SPEC = OperatorSpec("Op", "m:Op", 4, ("k",), b"", "[]")
ERROR = {"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}
OPTIONS = MoveOptions(max_bandwidth=4e6, strategy="fluid", order="hot-last")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Written]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        made = Written(ledger)
        deploy(made, SPEC, dict.fromkeys(range(4), "a"))
        yield made


def plan(cluster: Written) -> list[PlannedMove]:
    moves = [
        PlannedMove(
            "r",
            PartitionId("Op", n),
            "a",
            "b",
            1,
            2,
            StrategyName.FLUID,
            OPTIONS,
            30.0,
            4e6,
            Cause.DRAIN,
            Asked("b"),
            number,
        )
        for number, n in enumerate((3, 1, 2, 0))
    ]
    write(cluster, steps.plan_moves, moves)
    return moves


class Again:
    """A controller's reconfigurations, read from the ledger."""

    def __init__(self, cluster: Written) -> None:
        self.cluster = Written.read(cluster.ledger)
        self.registry = RunRegistry(self.cluster)
        self.runs: list[tuple[Running, dict[str, list[m.Instruction]]]] = []
        self.started: list[Any] = []
        members = SimpleNamespace(alive=lambda _: True)
        context: Any = SimpleNamespace(
            cluster=self.cluster,
            spawn=lambda _: None,
            members=members,
            planning=NoLock(),
            acquainted=self._acquainted,
            record=self._record,
            clock=ManualClock(1),
            settings=ControllerSettings(),
            new_id=iter("xyz").__next__,
            alive=dict,
            fit=self._fit,
            check_not_restored=lambda _: None,
            replicas=SimpleNamespace(learn=self._learn, views=self._views),
        )
        self.context = context
        self.learned: list[str] = []
        executor: Any = SimpleNamespace(
            run=lambda *run: self.runs.append(run), runner=self._runner, change_rates={}, bandwidth=0.0
        )
        self.reconfigurations = Reconfigurations(context, self.registry, executor)
        self.reconfigurations.resume_all()

    def _fit(self) -> dict[str, ReplicaInfo]:
        maintained = self.cluster.maintained()
        return {name: info for name, info in self.cluster.roster.replicas.items() if name not in maintained}

    async def _acquainted(self) -> None: ...

    async def _learn(self, name: str, spec: OperatorSpec) -> None:
        self.learned.append(name)

    async def _views(self, name: str, within_s: float) -> Any:
        raise Unavailable("it says nothing", remedy="-")

    async def _record(self, work: Any, *arguments: Any) -> Any:
        return write(self.cluster, work, *arguments)

    @staticmethod
    def _runner(_: Running, planned: PlannedMove, machine: m.Move) -> Any:
        report = replace(planned_report(planned), state=machine.phase)
        return SimpleNamespace(planned=planned, machine=machine, report=report)


class NoLock:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


def test_rounds_strategy_and_what_has_ended(cluster: Written) -> None:
    moves = plan(cluster)
    write(cluster, steps.grant, moves[0])
    write(cluster, steps.move_owned, moves[0], {"pause_ms": 3.0})
    write(cluster, steps.grant, moves[1])
    again = Again(cluster)
    ((running, first),) = again.runs
    assert running.strategy is STRATEGIES[StrategyName.FLUID]
    assert [[runner.planned for runner in round_] for round_ in running.rounds] == [[move] for move in moves[1:]]
    fence = m.Fence(2, cold=True, pause_ms=0.0, max_pause_ms=0.0)
    assert first == {moves[1].item_id: [fence]}
    report = running.report()
    assert [(move.partition, move.state) for move in report.moves] == [
        (3, "COMPLETED"),
        (1, "FENCED"),
        (2, "WAITING"),
        (0, "WAITING"),
    ]
    assert (report.kind, report.strategy, report.state) == ("drain", "fluid", "RUNNING")
    assert report.created_us == cluster.history["r"].created_us
    assert {runner.machine.kind for round_ in running.rounds[1:] for runner in round_} == {Kind.COLD}


def test_a_pause_outlives_its_controller(cluster: Written) -> None:
    moves = plan(cluster)
    write(cluster, steps.grant, moves[0])

    async def scenario() -> None:
        first = Again(cluster)
        ((running, _),) = first.runs
        assert (await first.reconfigurations.pause("r")).state == "PAUSED"
        assert not first.registry.goes_on("r")
        second = Again(cluster)
        ((running, granted),) = second.runs
        assert running.report().state == "PAUSED"
        assert not second.registry.goes_on("r")
        assert list(granted) == [moves[0].item_id], "what was granted goes on"
        await second.reconfigurations.pause("r")
        assert (await second.reconfigurations.resume("r")).state == "RUNNING"
        assert second.registry.goes_on("r")
        ((running, _),) = Again(cluster).runs
        assert running.report().state == "RUNNING"

    asyncio.run(scenario())


def test_retry_has_all_that_was_asked(cluster: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    for move in plan(cluster):
        write(cluster, steps.move_aborted, move, ERROR, {})
    again = Again(cluster)
    assert again.runs == []

    async def start(_: Any, *arguments: Any) -> None:
        again.started.append(arguments)

    monkeypatch.setattr(Reconfigurations, "_start", start)
    asyncio.run(again.reconfigurations.retry("r"))
    ((planned, bandwidth_max, options, cause, asked, _),) = again.started
    assert bandwidth_max == OPTIONS.max_bandwidth, "fluid moves one at a time"
    targets = {transfer.partition.partition: transfer.target for round_ in planned.rounds for transfer in round_}
    assert (targets, options, cause, asked) == (dict.fromkeys((3, 1, 2, 0), "b"), OPTIONS, Cause.DRAIN, Asked("b"))


def test_a_retry_gives_nothing_to_a_node_in_maintenance(cluster: Written) -> None:
    """A retry is refused as a migration is; it moved the partitions to a node that receives none."""
    for name in "ab":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    for move in plan(cluster):
        write(cluster, steps.move_aborted, move, ERROR, {})
    write(cluster, steps.maintain, "b", Maintenance(1))
    again = Again(cluster)
    for asked in (again.reconfigurations.retry("r"), again.reconfigurations.migrate("Op", [0], "b", OPTIONS)):
        with pytest.raises(InMaintenance, match="b is in maintenance"):
            asyncio.run(asked)
    assert not again.cluster.open_moves


def test_no_node_is_in_maintenance_while_partitions_are_on_their_way_to_it(cluster: Written) -> None:
    """A maintenance is refused while partitions move to its node: they came after all others had left it."""
    for name in "abc":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    moves = plan(cluster)
    again = Again(cluster)
    with pytest.raises(MoveConflict, match="a partition is moving to the node"):
        asyncio.run(again.reconfigurations.drain("b", OPTIONS, maintenance=Ask()))
    assert not again.cluster.maintained()
    for move in moves:
        write(again.cluster, steps.move_aborted, move, ERROR, {})
    asyncio.run(again.reconfigurations.drain("b", OPTIONS, maintenance=Ask()))
    assert again.cluster.maintained() == {"b"}


def test_nothing_moves_to_a_replica_that_its_agent_stops(cluster: Written) -> None:
    """A replica that is to be stopped receives nothing, though it answers; its partitions would wait for a takeover."""
    for name in "ab":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    again = Again(cluster)
    again.context.fit = lambda: {"a": again.cluster.roster.replicas["a"]}
    with pytest.raises(Unavailable, match="no replica of b that may receive partitions answers"):
        asyncio.run(again.reconfigurations.migrate("Op", [0], "b", OPTIONS))
    assert not again.cluster.open_moves


@pytest.mark.parametrize("standbys", [0, 1, 2])
def test_no_maintenance_ends_the_last_copy_that_is_wanted(
    cluster: Written, standbys: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Maintenance never ends the last wanted copy: one standby is enough to acknowledge.

    A node that owns nothing is in maintenance as soon as that is recorded.
    """
    for name in ("a", "b", "c"):
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    write(cluster, steps.want_standbys, "Op", standbys)
    again = Again(cluster)

    def maintained(node: str) -> set[str]:
        asyncio.run(again.reconfigurations.drain(node, OPTIONS, maintenance=Ask()))
        return again.cluster.maintained()

    assert maintained("c") == {"c"}
    assert ("Op has at most 1 of 2 standbys without node c" in caplog.text) == (standbys == 2)
    if standbys:
        with pytest.raises(Unavailable, match=r"besides b, only one replica .*standby Op 0"):
            maintained("b")
        assert again.cluster.maintained() == {"c"}
    else:
        assert maintained("b") == {"b", "c"}


def test_what_is_stale_is_not_fetched_and_keeps_no_other_from_being_heard(
    cluster: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposed moves for an operator or a replica that is gone are skipped, and all others are heard."""
    for name in ("a", "b"):
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    again = Again(cluster)
    proposals = [
        MoveProposal(PartitionId("Op", 1), "a", "z", "w"),
        MoveProposal(PartitionId("No", 0), "a", "b", "w"),
        MoveProposal(PartitionId("Op", 0), "a", "b", "w"),
    ]
    asked: list[Choice] = []

    async def noted(_: Any, choice: Choice, before: Heard, __: float) -> Heard:
        asked.append(choice)
        return before

    async def start(*_: Any) -> None: ...

    monkeypatch.setattr(reconfigurations, "heard", noted)
    monkeypatch.setattr(Reconfigurations, "_start", start)
    asyncio.run(again.reconfigurations.place(proposals, OPTIONS, Cause.AUTOPILOT))
    assert asked == [Choice({PartitionId("Op", 0): "b"})]
    assert again.learned == ["b"]


class Watched:
    """A planning lock that shows whether it is held."""

    held = False

    async def __aenter__(self) -> None:
        self.held = True

    async def __aexit__(self, *_: object) -> None:
        self.held = False


def test_no_replica_is_asked_while_take_overs_wait_for_the_lock(
    cluster: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are asked without the lock, also where another target is chosen while the first is asked."""
    for name in "abc":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    again = Again(cluster)
    lock = again.context.planning = Watched()
    again.context.alive = lambda: again.cluster.roster.replicas
    chosen, asked, started = ["b"], list[tuple[str, bool]](), list[Any]()

    async def learn(name: str, spec: OperatorSpec) -> None:
        asked.append((name, lock.held))
        chosen[:] = ["c"]

    async def views(name: str, within_s: float) -> Any:
        asked.append((name, lock.held))
        raise Unavailable("it says nothing", remedy="-")

    async def start(_: Any, planned: Any, *rest: Any) -> None:
        assert lock.held
        started.extend((each.partition.partition, each.target) for round_ in planned.rounds for each in round_)

    monkeypatch.setattr(Reconfigurations, "_start", start)
    monkeypatch.setattr(Reconfigurations, "migrating", lambda *_: Choice({PartitionId("Op", 0): chosen[0]}))
    again.context.replicas = SimpleNamespace(learn=learn, views=views)
    asyncio.run(again.reconfigurations.migrate("Op", [0], "edge", OPTIONS))
    assert started == [(0, "c")]
    assert {name for name, _ in asked} == {"a", "b", "c"}
    assert not any(held for _, held in asked)


def test_what_a_target_lacks_is_said_before_anything_is_recorded(cluster: Written) -> None:
    for name in "ab":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    again = Again(cluster)

    async def learn(name: str, spec: OperatorSpec) -> None:
        raise InvalidArgument(f"{name} has not the module", remedy="install it")

    again.context.replicas.learn = learn
    with pytest.raises(InvalidArgument, match="b has not the module"):
        asyncio.run(again.reconfigurations.migrate("Op", [0], "b", OPTIONS))
    assert not again.cluster.open_moves


def three(cluster: Written) -> Again:
    """Returns the reconfigurations of a cluster of three replicas, of which ``a`` owns everything."""
    for name in "abc":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    again = Again(cluster)
    again.context.alive = again.context.fit
    return again


def proposed(**targets: str) -> list[MoveProposal]:
    return [MoveProposal(PartitionId("Op", int(n[1:])), "a", target, "why") for n, target in targets.items()]


def open_targets(again: Again) -> dict[int, str]:
    planned = [open_move.planned for open_move in again.cluster.open_moves.values()]
    return {each.partition.partition: each.target for each in planned}


@pytest.mark.parametrize("of_policies", [True, False])
def test_without_a_command_a_target_that_refuses_is_avoided_and_the_other_moves_begin(
    cluster: Written, of_policies: bool
) -> None:
    again = three(cluster)
    asked: list[str] = []

    async def learn(name: str, spec: OperatorSpec) -> None:
        asked.append(name)
        if name == "b":
            raise InvalidArgument(f"{name} has not the module", remedy="install it")

    async def step() -> None:
        if of_policies:
            moves = proposed(p0="b", p1="c")
            await again.reconfigurations.place(moves, OPTIONS, Cause.AUTOPILOT, in_part=True)
        else:
            await again.reconfigurations.rebalance("", OPTIONS, in_part=True)

    again.context.replicas.learn = learn
    asyncio.run(step())
    begun = open_targets(again)
    assert set(begun.values()) == {"c"}
    assert again.reconfigurations.avoided() == {"Op": {"b"}}
    for record in list(again.cluster.open_moves.values()):
        write(again.cluster, steps.move_aborted, record.planned, ERROR, {})
    asked.clear()
    asyncio.run(step())
    assert open_targets(again) == begun
    assert asked == ["c"], "b is not asked again so soon"


def test_a_rebalance_leaves_out_what_silent_owners_have_and_says_so(
    cluster: Written, caplog: pytest.LogCaptureFixture
) -> None:
    deploy(cluster, replace(SPEC, name="Other"), dict.fromkeys(range(4), "c"))
    again = three(cluster)
    again.context.members.alive = lambda name: name != "c"
    fit = again.context.fit
    again.context.fit = lambda: {name: info for name, info in fit().items() if name != "c"}
    choice = again.reconfigurations.rebalancing("")
    assert choice.left == {PartitionId("Other", n): "c does not answer" for n in range(4)}
    asyncio.run(again.reconfigurations.rebalance("", OPTIONS))
    moves = [open_move.planned for open_move in again.cluster.open_moves.values()]
    assert {(move.partition.operator, move.source, move.target, move.reason) for move in moves} == {
        ("Op", "a", "b", "others stay: c does not answer")
    }
    assert "rebalance leaves out partitions: c does not answer" in caplog.text


def test_without_a_command_a_target_receives_what_it_has_room_for(cluster: Written) -> None:
    again = three(cluster)

    async def views(name: str, within_s: float) -> Any:
        there = [PartitionView(PartitionId("Op", n), State.OWNED, 1, 0, bytes=100 * (n + 1)) for n in range(4)]
        return (there, DiskView()) if name == "a" else ([], DiskView(room_bytes=350))

    again.context.replicas.views = views
    moves = proposed(p0="b", p1="c", p2="b", p3="b")
    with pytest.raises(NoRoom, match="b: "):
        asyncio.run(again.reconfigurations.place(moves, OPTIONS, Cause.REBALANCE))
    assert not again.cluster.open_moves
    asyncio.run(again.reconfigurations.place(moves, OPTIONS, Cause.AUTOPILOT, in_part=True))
    assert open_targets(again) == {0: "b", 1: "c"}
    assert again.reconfigurations.avoided() == {"Op": {"b"}}


@pytest.mark.parametrize("strategy", ["warm-up", "stop-and-restart", "fluid", "batched", "on-demand"])
@pytest.mark.parametrize("operators", [1, 2])
def test_a_bandwidth_is_that_of_all_copies_together_whichever_operators_they_are_of(
    cluster: Written, operators: int, strategy: str
) -> None:
    """A bandwidth is shared by all copies.

    Each rebalanced operator used to be given the whole of it.
    """
    for name in "ab":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    if operators == 2:
        other = replace(SPEC, name="Other", partitions=8)
        deploy(cluster, other, dict.fromkeys(range(8), "a"))
    again = Again(cluster)
    options = MoveOptions(max_bandwidth=6e4, strategy=strategy)
    asyncio.run(again.reconfigurations.rebalance("", options))
    moves = [open_move.planned for open_move in again.cluster.open_moves.values()]
    assert {move.partition.operator for move in moves} == ({"Op", "Other"} if operators == 2 else {"Op"})
    at_once = {name: Counter(m.round for m in moves if m.partition.operator == name) for name in ("Op", "Other")}
    most = sum(max(rounds.values(), default=0) for rounds in at_once.values())
    if strategy == "warm-up":
        most = min(most, ControllerSettings().concurrent_moves)
    assert most * moves[0].bandwidth_max == pytest.approx(6e4)
    assert {move.bandwidth_max for move in moves} == {moves[0].bandwidth_max}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"do": Do.DRAIN, "to": "nobody"}, "there is no site or replica 'nobody'"),
        ({"do": Do.DRAIN, "to": "edge"}, "'edge' is a site.*name a replica"),
        ({"do": Do.MIGRATE, "to": "nobody", "partitions": (0,)}, "there is no site or replica 'nobody'"),
        ({"do": Do.MIGRATE, "to": "b", "partitions": (0, 9)}, "9"),
    ],
)
def test_a_job_for_what_there_is_not_is_refused_when_it_is_made(
    cluster: Written, asked: dict[str, Any], said: str
) -> None:
    """A job that names what does not exist is refused when it is created.

    It used to be accepted, and failed with each run.
    """
    for name in "ab":
        write(cluster, steps.register, ReplicaInfo(name, "edge", f"{name}:1"), Home())
    again = Again(cluster)
    again.context.check_site = lambda name: ControllerContext.check_site(again.context, name)
    nothing: Any = None
    jobs = Jobs(again.context, again.registry, again.reconfigurations, nothing, nothing, Node("ctl"))
    with pytest.raises(StateflowError, match=said):
        asyncio.run(jobs.create(Job("nightly", Schedule.parse("every 1h"), operator="Op", **asked)))
    assert not again.cluster.jobs.there
