"""A round of failover: what happens to other partitions while it waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.context import Leadership
from reconfig.controller.controller import Controller
from reconfig.controller.executor import Running, RunRegistry
from reconfig.controller.folds import Home, RestoreBook, Roster
from reconfig.controller.placing import GivingUp
from reconfig.controller.takeovers import Orphan, Takeovers
from reconfig.decisions import failover as f
from reconfig.decisions.plan import PlannedMove, PlannedRestore, PlannedTakeover
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost, OperatorNotDeployed, Unavailable
from stateflow.ledger import Ledger
from stateflow.partition.control import Cancelled, PartitionView, Progress
from stateflow.partition.lifecycle import State
from stateflow.settings import ControllerSettings
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo, StrategyName
from tests.writing import Written, deploy, write

FIRST, SECOND = PartitionId("Op", 0), PartitionId("Op", 1)


def takeovers(epoch: int) -> Takeovers:
    """Makes the takeovers of a cluster in which ``a`` owns both partitions at ``epoch``."""
    deployed = {"Op": SimpleNamespace(assignment=SimpleNamespace(owner=lambda _: ("a", epoch)))}

    def operator(name: str) -> Any:
        if name not in deployed:
            raise OperatorNotDeployed(f"{name} is not deployed", remedy="deploy it")
        return deployed[name]

    cluster: Any = SimpleNamespace(
        roster=Roster(),
        finished=[],
        restores=RestoreBook(),
        open_moves={},
        distrusted=set(),
        epochs_seen={},
        epochs_granted={},
        deployed=deployed,
        operator=operator,
        assigned=lambda _: {PartitionId("Op", n): epoch for n in (0, 1)},
    )
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    context: Any = SimpleNamespace(cluster=cluster, members=SimpleNamespace(session=lambda _: "s"), clock=clock)
    nothing: Any = SimpleNamespace(undeployed=lambda _: None)
    executor: Any = SimpleNamespace(queue=SimpleNamespace(leave=lambda _: None), undeployed=lambda _: None)
    return Takeovers(context, nothing, executor, nothing)


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_owner_that_comes_back_while_another_partition_is_taken_over(epoch: int) -> None:
    made = takeovers(1)
    made._orphans |= {FIRST: Orphan(1, f.Why.LAPSED), SECOND: Orphan(epoch - 1, f.Why.LAPSED)}
    started = []

    async def start(partition: PartitionId) -> None:
        started.append(partition)
        made._orphans.pop(SECOND)

    made._start = start  # type: ignore[method-assign]
    asyncio.run(made._tick())
    assert started == [FIRST]
    assert set(made._orphans) == {FIRST}


@pytest.mark.parametrize("gone", [False, True])
def test_an_operator_that_is_undeployed_while_a_source_is_asked_whether_it_sealed(gone: bool) -> None:
    """An operator that is undeployed meanwhile leaves no orphan.

    Its partition used to stay an orphan for ever.
    """
    made = takeovers(1)

    async def cancel(*_: object) -> Cancelled:
        if gone:
            made._context.cluster.deployed.clear()
            made.undeployed("Op")
        return Cancelled(sealed=True)

    made._context.replicas = SimpleNamespace(cancel=cancel)  # type: ignore[assignment]
    asyncio.run(made._settle_fence("a", FIRST, 1, "m1"))
    assert made._orphans == ({} if gone else {FIRST: Orphan(1, f.Why.SEALED, "m1")})


def test_an_undeployed_operator_is_forgotten_everywhere() -> None:
    made, told = takeovers(1), list[tuple[str, str]]()
    made._standbys = SimpleNamespace(undeployed=lambda name: told.append(("standbys", name)))  # type: ignore[assignment]
    made._executor = SimpleNamespace(undeployed=lambda name: told.append(("moves", name)))  # type: ignore[assignment]
    made._orphans[FIRST] = Orphan(1, f.Why.LAPSED)
    made.undeployed("Op")
    assert not made._orphans
    assert told == [("standbys", "Op"), ("moves", "Op")]


def test_an_orphan_of_an_operator_that_is_gone_keeps_no_other_from_its_turn() -> None:
    made = takeovers(1)
    gone = PartitionId("Gone", 0)
    made._orphans |= {gone: Orphan(1, f.Why.SEALED), FIRST: Orphan(1, f.Why.LAPSED), SECOND: Orphan(1, f.Why.LAPSED)}
    started = []

    async def start(partition: PartitionId) -> None:
        started.append(partition)
        raise Unavailable("no replica answers", remedy="start one")

    made._start = start  # type: ignore[method-assign]
    asyncio.run(made._tick())
    assert started == [FIRST, SECOND]
    assert set(made._orphans) == {FIRST, SECOND}


def test_what_a_dead_node_had_goes_to_all_of_the_others_and_not_to_one() -> None:
    """Partitions of a dead node are spread over all others.

    Partitions on their way to a node are not in its assignment yet: all of them used to go to the node with the fewest.
    """
    made = takeovers(1)
    replicas = {name: ReplicaInfo(name, "edge", "x:1") for name in ("a", "b", "c")}
    context: Any = made._context
    context.cluster.roster.replicas = replicas
    context.cluster.owned_counts = lambda: {"a": 8, "b": 2, "c": 1}
    context.cluster.maintained = dict
    context.cluster.deployed["Op"].sites = ()
    context.alive = lambda: {name: info for name, info in replicas.items() if name != "a"}
    made._standbys = SimpleNamespace(copies=lambda _: [])  # type: ignore[assignment]
    went = []
    for number in range(7):
        choice = made.choice(partition := PartitionId("Op", number))
        assert choice is not None
        went.append(choice.target)
        made._runners[partition] = SimpleNamespace(planned=SimpleNamespace(target=choice.target))  # type: ignore[assignment]
    assert went == ["c", "b", "c", "b", "c", "b", "c"]
    coming = made.choice(PartitionId("Op", 7), {"b": 3})
    assert coming is not None
    assert coming.target == "c"


def test_standbys_have_their_turn_whatever_becomes_of_take_overs() -> None:
    made = takeovers(1)

    async def scenario() -> None:
        reconciled = asyncio.Event()

        async def tick() -> None:
            raise Unavailable("no replica answers", remedy="start one")

        async def reconcile() -> None:
            reconciled.set()

        made._tick, made._standbys.reconcile = tick, reconcile  # type: ignore[method-assign]
        watching = asyncio.create_task(made.watch())
        await asyncio.wait_for(reconciled.wait(), 10)
        watching.cancel()

    asyncio.run(scenario())


def test_a_restore_that_is_planned_while_a_takeover_waits_for_its_turn_comes_first() -> None:
    """A takeover that waited for the lock of plans does not begin beside the restore that was planned meanwhile.

    Both used to make a replica the owner, and no controller could read the ledger once the restore was recorded last.
    """
    made = takeovers(1)
    context: Any = made._context
    context.cluster.changes = list
    context.cluster.failovers = SimpleNamespace(is_manual=lambda _: False)
    made._orphans[FIRST] = Orphan(1, f.Why.MISSING)
    chosen = []
    made.choice = lambda partition, *_: chosen.append(partition)  # type: ignore[method-assign]

    async def scenario() -> None:
        context.planning = asyncio.Lock()
        assert made._is_due(FIRST)
        async with context.planning:
            starting = asyncio.create_task(made._start(FIRST))
            await asyncio.sleep(0)
            restore = PlannedRestore("r", FIRST, "a", "b", 2)
            context.cluster.restores.records[restore.item_id] = restore, None
        await starting

    asyncio.run(scenario())
    assert not chosen
    assert FIRST in made._orphans, "it is taken over if the restore fails"


def test_moves_hear_of_a_source_that_comes_back_without_the_partition() -> None:
    """Moves hear of a source that comes back without the partition.

    The source's lease does not lapse, and it cannot say what it sealed: a move past its fence used to wait for its
    answer for ever, and the takeover for the move.
    """
    made = takeovers(1)
    told = []

    def moving(partition: PartitionId, source: str) -> Any:
        planned = SimpleNamespace(partition=partition, source=source)
        return SimpleNamespace(planned=planned, source_gone=lambda: told.append((partition, source)))

    made._runs.moving = lambda: [moving(FIRST, "a"), moving(SECOND, "a"), moving(FIRST, "b")]  # type: ignore[method-assign]
    made.registered("a", [PartitionView(SECOND, State.OWNED, 1, 0)])
    assert told == [(FIRST, "a")]
    assert made._orphans == {FIRST: Orphan(1, f.Why.MISSING)}


@pytest.mark.parametrize("term_ends", [False, True])
def test_an_error_that_is_no_event_ends_no_take_over(tmp_path: Path, term_ends: bool) -> None:
    """An unexpected error does not end a takeover.

    The takeover used to be reported as FAILED while its record stood open, and no controller carried it out before the
    next restart.
    """
    planned = PlannedTakeover("t", FIRST, "a", "b", 1, 2, How.CHECKPOINT)
    attempts: list[f.Phase] = []

    async def scenario(cluster: Written) -> str:
        over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        runs = RunRegistry(cluster)
        settings = ControllerSettings(takeover_retry_s=0.001)
        clock = SimpleNamespace(monotonic=lambda: 0.0, now_us=lambda: 1)
        context: Any = SimpleNamespace(
            cluster=cluster, over=over, settings=settings, clock=clock, spawn=asyncio.create_task
        )

        async def nothing(*_: object) -> None: ...

        class Taking(Takeovers):
            def _runner(self, running: Running, planned: PlannedTakeover, machine: f.Takeover) -> Any:
                async def run(first: list[f.Instruction] | None) -> None:
                    attempts.append(machine.phase)
                    if len(attempts) == 1:
                        write(cluster, steps.grant, planned)
                        if term_ends:
                            over.set_result(None)
                            raise HoldLost("over", remedy="none")
                        raise ZeroDivisionError
                    write(cluster, steps.move_owned, planned, {})

                running.runners = []
                return SimpleNamespace(planned=planned, machine=machine, run=run, report=SimpleNamespace(note=""))

        standbys: Any = SimpleNamespace(hand_over=nothing)
        made = Taking(context, runs, SimpleNamespace(), standbys)  # type: ignore[arg-type]
        made._orphans[FIRST] = Orphan(1, f.Why.LAPSED)
        running, runner = made._prepare(planned, f.Takeover(FIRST, 2))
        await asyncio.wait_for(made._run(running, runner, None), 10)
        return str(running.state)

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        spec = OperatorSpec("Op", "m:Op", 1, ("k",), b"", "{}")
        deploy(cluster, spec, {0: "a"})
        write(cluster, steps.plan_moves, [planned])
        state = asyncio.run(scenario(cluster))
        if term_ends:
            assert (state, attempts) == ("RUNNING", [f.Phase.PLANNED])
        else:
            assert (state, attempts) == ("COMPLETED", [f.Phase.PLANNED, f.Phase.GRANTED])
            assert not cluster.open_moves


def test_what_goes_wrong_with_one_replica_keeps_no_other_from_being_replaced() -> None:
    made = takeovers(1)
    made._orphans[SECOND] = Orphan(1, f.Why.LAPSED)
    looked_at, started = [], []

    async def lapsed(name: str) -> None:
        looked_at.append(name)
        if name == "a":
            raise KeyError(name)

    async def start(partition: PartitionId) -> None:
        started.append(partition)

    made._context.members.lapsed = lambda _: True  # type: ignore[method-assign]
    made._context.members.is_opening = lambda _: False  # type: ignore[method-assign]
    made._context.names = SimpleNamespace(awaited=lambda _: False)  # type: ignore[assignment]
    made._context.cluster.roster.replicas |= {name: ReplicaInfo(name, "s", f"{name}:1") for name in "ab"}
    made._lapsed, made._start = lapsed, start  # type: ignore[method-assign]
    asyncio.run(made._tick())
    assert (looked_at, started) == (["a", "b"], [SECOND])


def test_an_owner_that_comes_back_during_a_command_keeps_its_other_partitions() -> None:
    """An owner that comes back while one partition is taken over by command keeps those that were not begun.

    Another replica used to own them, too, while their owner served. The accepted loss counted for ever: under manual
    failover, later takeovers of the partition needed no command.
    """
    made = takeovers(1)
    context: Any = made._context
    context.cluster.deployed["Op"].spec = SimpleNamespace(partitions=2)
    context.cluster.failovers = SimpleNamespace(is_manual=lambda _: True)
    context.members.lapsed, context.check_not_restored = lambda _: True, lambda _: None
    made._runs.moving = list  # type: ignore[method-assign]
    started = []

    async def start(partition: PartitionId) -> None:
        if partition in made._orphans:
            started.append(partition)
        if partition == FIRST:
            made.registered("a", [PartitionView(each, State.OWNED, 1, 0) for each in (FIRST, SECOND)])

    made._start = start  # type: ignore[method-assign]
    assert asyncio.run(GivingUp(context, made._runs, made).by_command("Op", [], accepted=True)) == []
    assert started == [FIRST]
    assert not made._orphans
    made.registered("a", [PartitionView(FIRST, State.OWNED, 1, 0)])
    lack = made.lack(SECOND)
    assert lack is not None
    assert (lack.why, lack.by_command) == (f.Why.MISSING, True)


class Failing:
    """Takeovers of FIRST, each of which fails. Attributes: ``now`` is the clock's time; ``retry_s`` the first delay."""

    def __init__(self) -> None:
        self.made = made = takeovers(1)
        context: Any = made._context
        context.cluster.assigned = lambda _: {}
        self.now, context.settings = 0.0, ControllerSettings()
        self.retry_s = context.settings.takeover_retry_s
        context.clock = SimpleNamespace(monotonic=lambda: self.now)
        context.over = SimpleNamespace(done=lambda: False)
        context.cluster.history = {"t": SimpleNamespace(state="FAILED")}
        made._runs = SimpleNamespace(settle=lambda *_: None)  # type: ignore[assignment]
        made._to_its_end = self._ended  # type: ignore[method-assign]
        made._orphans[FIRST] = Orphan(1, f.Why.LAPSED)

    @staticmethod
    async def _ended(_: Any, runner: Any, __: Any) -> Any:
        return runner

    @property
    def wait(self) -> float:
        """Delay of the next attempt, as a multiple of the first delay."""
        return (self.made._not_before[FIRST] - self.now) / self.retry_s

    def fails(self, target: str) -> float:
        """Lets a takeover by the target fail, and returns the wait for the next one."""
        planned = PlannedTakeover("t", FIRST, "a", target, 1, 2, How.CHECKPOINT)
        runner: Any = SimpleNamespace(planned=planned, machine=SimpleNamespace(error=None))
        running: Any = SimpleNamespace(id="t")
        asyncio.run(self.made._run(running, runner, None))
        return self.wait


def test_a_replica_that_crashes_again_and_again_ends_no_delay() -> None:
    failing, waits = Failing(), list[float]()
    for name, helps in (("b", True), ("c", True), ("c", False), ("c", False), ("c", False), ("d", True)):
        waits.append(failing.fails("c"))
        failing.now += 1.0
        failing.made.registered(name, [])
        assert failing.made._is_due(FIRST) == helps
    assert waits == [1, 1, 1, 2, 4, 8]
    made = failing.made
    made._no_orphan(FIRST)
    kept = (made._came, made._failures, made._failed, made._not_before, made._tried)
    assert not any(FIRST in each for each in kept)


@pytest.mark.parametrize("how", ["restore", "serve-source"])
def test_a_move_that_was_given_up_is_given_up_under_the_next_leader_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A command that gives a move up is carried out by the next leader if its own term ends first.

    The move was stuck again; or it ended as if no command had been given, and its source served the copy that the
    command had rejected.
    """
    planned = PlannedMove("r", FIRST, "a", "b", 1, 2, StrategyName.WARM_UP)
    asked: list[str] = []

    class Silent:
        """Replicas of which only the target answers, and only to a cancellation."""

        async def cancel(self, name: str, _: object, **__: object) -> Cancelled:
            if name == "a":
                raise Unavailable("no answer", remedy="-")
            asked.append(name)
            return Cancelled()

        async def prepare(self, *_: object) -> AsyncGenerator[Progress]:
            await asyncio.Event().wait()
            yield Progress()

        async def close(self) -> None: ...

    async def commands(ledger: Ledger) -> None:
        """Gives the move up, in a term that ends before its runner hears of it."""
        controller = Controller(ledger, clock=ManualClock())
        monkeypatch.setattr(controller.runs, "stuck", lambda _: [SimpleNamespace(planned=planned)])
        await controller.takeovers.resolve("r", how)
        await controller.close()

    async def leads(ledger: Ledger) -> set[str]:
        controller = Controller(ledger, clock=ManualClock())
        controller.context.replicas = Silent()  # type: ignore[assignment]
        controller.resume()
        (runner,) = controller.runs.moving()
        await asyncio.wait_for(runner.ended.wait(), 10)
        await controller.close()
        return controller.cluster.distrusted

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        for name in "ab":
            write(cluster, steps.register, ReplicaInfo(name, "s", f"{name}:1"), Home())
        deploy(cluster, OperatorSpec("Op", "m:Op", 1, ("k",), b"", "{}"), {0: "a"})
        write(cluster, steps.plan_moves, [planned])
        write(cluster, steps.begin_moves, [planned])
        write(cluster, steps.grant, planned)
        asyncio.run(commands(ledger))
        assert asyncio.run(leads(ledger)) == ({planned.move_id} if how == "restore" else set())
        assert asked == ["b"]
        assert not Written.read(ledger).open_moves


def test_takeovers_that_fail_for_ever_are_tried_less_and_less_often() -> None:
    """A takeover was tried again every 80 s, for days, and each attempt stayed in the ledger and in memory."""
    failing = Failing()
    assert [failing.fails("c") for _ in range(13)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_takeovers_are_tried_at_many_targets_before_the_delays_grow_long() -> None:
    failing, targets = Failing(), "cdefghij"
    waits = [[failing.fails(target) for target in targets] for _ in range(7)]
    assert waits[0] == [1, 2, 4, 8, 16, 16, 16, 16]
    assert waits[1:] == [[wait] * len(targets) for wait in (16, 16, 16, 16, 32, 64)]


def test_a_replica_that_registers_once_more_shortens_a_long_delay() -> None:
    """The settings of such a replica may have been corrected, e.g. its store of checkpoints."""
    failing = Failing()
    failing.made.registered("c", [])
    for _ in range(9):
        failing.fails("c")
    failing.made.registered("c", [])
    assert failing.made._is_due(FIRST), "it is here for the first time since the takeovers fail"
    for _ in range(9):
        failing.fails("c")
    assert failing.wait == 256
    for passed in (0, 1):
        failing.now = passed * failing.retry_s
        failing.made.registered("c", [])
        assert failing.wait == 16 - passed


# -- cold starts --------------------------------------------------------------------------------------------

WAIT_S = 60.0


class Started:
    """A controller that has just begun to lead, after a cold start if ``wait_s``. ``a`` owns both partitions and is
    silent; ``b`` has registered.

    Attributes:
        begun: the takeovers that have begun, none of which is carried out.
    """

    def __init__(self, ledger: Ledger, wait_s: float = WAIT_S, rehomed: bool = False) -> None:
        cluster = Written(ledger)
        for name in "ab":
            write(cluster, steps.register, ReplicaInfo(name, "s", f"{name}:1"), Home(f"d-{name}", "here"))
        deploy(cluster, OperatorSpec("Op", "m:Op", 2, ("k",), b"", "{}"), {0: "a", 1: "a"})
        if rehomed:
            write(cluster, steps.rehome, "a", "another")
        self.clock = ManualClock()
        settings = ControllerSettings(cold_start_wait_s=wait_s)
        leadership = Leadership(cold_until=self.clock.monotonic() + wait_s)
        self.controller = Controller(ledger, settings, self.clock, leadership=leadership)
        self.made, self.members = self.controller.takeovers, self.controller.members
        self.registers("b")
        self.begun: list[PlannedTakeover] = []
        self.made._begin = lambda _, runner, __: self.begun.append(runner.planned)  # type: ignore[method-assign]

    def registers(self, name: str) -> None:
        self.members.issue(name, "t", {})
        self.members.registered(name, "i", "t")

    async def passes(self, seconds: float) -> list[How]:
        """Lets time pass, in which ``b`` sends heartbeats, and returns how takeovers begin meanwhile."""
        before = len(self.begun)
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            assert self.members.beat("b", "i")
            await self.made._tick()
        return [planned.how for planned in self.begun[before:]]

    @property
    def why(self) -> f.Why | None:
        lack = self.made.lack(FIRST)
        return None if lack is None else lack.why


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


BOTH = [How.CHECKPOINT] * 2
#: lease and margin, and the tick after it
LAPSE_S = 12


def test_after_a_cold_start_a_takeover_from_a_checkpoint_waits_for_the_owner(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica whose process needed longer than its lease to start lost its partitions to their newest checkpoints,
    without the batches acknowledged since."""

    async def scenario() -> None:
        started = Started(ledger)
        (deployment,) = started.controller.status().deployments
        lines = [str(each.error) for each in deployment.unserved]
        assert len(lines) == 1
        assert "a has not registered since the cluster was started; until " in lines[0]
        assert await started.passes(WAIT_S - 1) == []
        assert started.why is f.Why.COMING
        assert await started.passes(3) == BOTH
        await started.controller.context.close()

    asyncio.run(scenario())
    said = [record.message for record in caplog.records if " has not registered " in record.message]
    assert [line.partition(":")[0] for line in said] == [
        "a has not registered since this cold start", "a has not registered in time",
    ]  # fmt: skip


def test_an_owner_that_registers_within_the_wait_keeps_its_partitions(ledger: Ledger) -> None:
    async def scenario() -> None:
        started = Started(ledger)
        assert await started.passes(40) == []
        started.registers("a")
        started.made.registered("a", [PartitionView(each, State.OWNED, 1, 0) for each in (FIRST, SECOND)])
        assert started.why is None
        assert await started.passes(LAPSE_S - 2) == []
        assert await started.passes(3) == BOTH, "it was heard, and is silent: failover is as fast as ever"
        await started.controller.context.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("case", ["no cold start", "another directory", "standby"])
def test_what_does_not_wait_is_taken_over_when_the_lease_has_lapsed(case: str, ledger: Ledger) -> None:
    async def scenario() -> None:
        started = Started(ledger, 0.0 if case == "no cold start" else WAIT_S, case == "another directory")
        how = How.CHECKPOINT
        if case == "standby":
            copies = [f.Standby("b", "m", True, 3)]
            started.made._standbys.copies, how = lambda _: copies, How.STANDBY  # type: ignore[method-assign]
        assert await started.passes(LAPSE_S) == [how, how]
        await started.controller.context.close()

    asyncio.run(scenario())


def test_a_command_does_not_wait(ledger: Ledger) -> None:
    async def scenario() -> None:
        started = Started(ledger)
        assert await started.passes(LAPSE_S) == []
        started.made.give_up(FIRST, "a", 1)
        await started.made.begin(FIRST)
        assert [(planned.partition, planned.how) for planned in started.begun] == [(FIRST, How.CHECKPOINT)]
        await started.controller.context.close()

    asyncio.run(scenario())


def test_the_target_of_a_takeover_is_waited_for_after_a_cold_start_as_an_owner_is(ledger: Ledger) -> None:
    """The target may own the partition since before the cluster was stopped, with batches acknowledged by it alone."""

    async def scenario() -> None:
        started = Started(ledger)
        gone: list[str] = []
        planned = PlannedTakeover("t", FIRST, "b", "a", 1, 2, How.CHECKPOINT)
        runner: Any = SimpleNamespace(planned=planned, target_gone=lambda: gone.append("a"))
        started.made._runners[FIRST] = runner
        await started.passes(WAIT_S - 1)
        assert not gone
        await started.passes(2)
        assert gone
        await started.controller.context.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["restore", "serve-source"])
@pytest.mark.parametrize("resolved_first", [True, False])
def test_a_source_that_registers_before_its_move_has_failed_serves_no_copy_that_was_rejected(
    resolved_first: bool, how: str, ledger: Ledger
) -> None:
    """A source can register with its sealed copy after the command and before the move has FAILED, if the leader
    changes meanwhile; or before the command. It served the copy in both cases, whatever the command said.
    """
    move = PlannedMove("r", FIRST, "a", "b", 1, 2, StrategyName.WARM_UP)
    views = [PartitionView(FIRST, State.SEALED, 2, 5, move_id=move.move_id), PartitionView(SECOND, State.OWNED, 1, 0)]

    async def scenario() -> None:
        started = Started(ledger, 0.0)
        record = started.controller.context.record
        for step in (steps.plan_moves, steps.begin_moves):
            await record(step, [move])
        await record(steps.grant, move)
        if resolved_first:
            await record(steps.resolve, [move], how)
        started.registers("a")
        started.made.registered("a", views)
        if not resolved_first:
            await record(steps.resolve, [move], how)
        await started.made._tick()
        assert not started.begun, "the move ends first"
        await record(steps.move_aborted, move, {"code": "move_aborted", "what": "given up"}, {})
        assert started.why is (f.Why.MISSING if how == "restore" else f.Why.SEALED)
        await started.made._tick()
        assert [each.how for each in started.begun] == [How.CHECKPOINT if how == "restore" else How.LOCAL]
        await started.controller.close()

    asyncio.run(scenario())
