"""Restores: when the controller gives up one whose target was asked to own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.controller import Controller
from reconfig.controller.folds import Home
from reconfig.controller.registration import Arrival, Beat
from reconfig.controller.restores import Request, Restores
from reconfig.decisions.plan import PlannedRestore
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost, MoveConflict, MoveUnknown, ReleaseMismatch, StateflowError, Unavailable
from stateflow.ledger import Ledger
from stateflow.operator.operator import describe
from stateflow.partition.control import Cancellation, Cancelled, Restore, Restored
from stateflow.release import FIRST, VERSION
from stateflow.reports import RestoredPartition
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.unit.operators import Count

PLANNED = PlannedRestore("r", PartitionId("Op", 0), "a", "b", 2, "file:///s", "", "", -1)
AWAY = Unavailable("no answer from b", remedy="see it")
REFUSED = MoveConflict("the partition is moving", remedy="wait")
OWNS, DOES_NOT = Cancelled(owned=True), Cancelled()
DONE = Restored(2, 0, {}, 0)


def outcome(
    answers: list[Any], leads: Callable[[], None] = lambda: None, seen: dict[PartitionId, int] | None = None
) -> Restored:
    """Returns the outcome of a restore's last step.

    Args:
        answers: the target's answers in order; those that answer a cancellation are Cancelled.
        seen: newest epochs that the controller has seen; None: none.
    """

    async def answer(kind: type) -> Any:
        given = answers.pop(0)
        if isinstance(given, StateflowError):
            raise given
        assert isinstance(given, kind)
        return given

    async def end(_: object) -> None: ...

    replicas = SimpleNamespace(
        fetch=lambda *_: answer(Restored), own=lambda *_: answer(Restored), cancel=lambda *_: answer(Cancelled)
    )
    members = SimpleNamespace(alive=lambda _: True, lapsed=lambda _: False)
    settings = SimpleNamespace(restore_patience_s=0.0)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    context: Any = SimpleNamespace(
        replicas=replicas,
        members=members,
        settings=settings,
        clock=clock,
        cluster=SimpleNamespace(epochs_seen={} if seen is None else seen),
        check_leads=leads,
        pause=lambda: asyncio.sleep(0),
    )

    async def own() -> Restored:
        order = Restore("r", describe(Count, 4), PLANNED.partition, 2)
        result, _ = await Restores(context, end)._own(PLANNED, order, DONE)
        return result

    result = asyncio.run(own())
    assert not answers
    return result


@pytest.mark.parametrize(
    "answers",
    [
        [DONE],
        [AWAY, DONE],
        [AWAY, REFUSED, OWNS, DONE],
        [AWAY, REFUSED, AWAY, REFUSED, OWNS, DONE],
    ],
)
def test_a_target_that_may_own_is_not_given_up(answers: list[Any]) -> None:
    assert outcome(answers).epoch == 2


@pytest.mark.parametrize("answers", [[REFUSED], [AWAY, REFUSED, DOES_NOT], [AWAY, REFUSED, AWAY, REFUSED, DOES_NOT]])
def test_a_target_that_refuses_and_does_not_own_is(answers: list[Any]) -> None:
    with pytest.raises(MoveConflict):
        outcome(answers)


def test_the_next_owner_gets_a_newer_epoch_than_a_failed_restore_may_have_published() -> None:
    """The next owner's checkpoints are newer than the one that a failed restore published.

    The target's epoch, from a store whose checkpoints are newer than the partition, was forgotten with the restore.
    """
    seen = {PLANNED.partition: 1}
    with pytest.raises(MoveConflict):
        outcome([MoveUnknown("forgotten", remedy="-"), Restored(51, 0, {}, 0), REFUSED], seen=seen)
    assert seen == {PLANNED.partition: 51}


def test_the_target_of_a_failed_restore_discards_what_it_fetched() -> None:
    """The target used to keep a whole copy, which was never owned, until it restarted."""
    said: list[object] = []

    async def answer(name: str, order: Any, *_: object) -> Restored:
        said.append((name, order.restore_id))
        return DONE

    async def refuse(*_: object) -> None:
        raise REFUSED

    async def record(step: object, *_: object) -> None:
        said.append(step)

    async def cancel(name: str, wanted: Cancellation, *, at_once: bool) -> Cancelled:
        said.append((name, wanted))
        if at_once:
            raise AWAY
        return DOES_NOT

    context: Any = SimpleNamespace(
        replicas=SimpleNamespace(fetch=answer, own=refuse, cancel=cancel),
        members=SimpleNamespace(alive=lambda _: True),
        settings=SimpleNamespace(restore_patience_s=0.0),
        clock=SimpleNamespace(monotonic=lambda: 0.0),
        cluster=SimpleNamespace(
            operator=lambda _: SimpleNamespace(spec=describe(Count, 4)),
            restores=SimpleNamespace(cancelled=()),
            epochs_seen={},
        ),
        record=record,
    )

    async def run() -> RestoredPartition:
        return await Restores(context, lambda _: asyncio.sleep(0))._run_one(replace(PLANNED, owner="b"))

    assert asyncio.run(run()).fault is REFUSED
    assert said == [("b", "r"), steps.restore_failed, ("b", Cancellation(PLANNED.partition, "r"))]


def test_a_term_that_is_over_asks_nobody() -> None:
    def leads() -> None:
        raise HoldLost("the term is over")

    with pytest.raises(HoldLost):
        outcome([AWAY, REFUSED], leads)


def test_a_replica_that_would_ignore_that_sources_stop_is_refused() -> None:
    versions = {"a": VERSION, "b": FIRST.version, "silent": ""}
    context: Any = SimpleNamespace(
        cluster=None, members=SimpleNamespace(alive=lambda _: True, version=versions.__getitem__)
    )
    restores = Restores(context, lambda _: asyncio.sleep(0))
    restores._check_stops_sources("a")
    restores._check_stops_sources("silent")
    with pytest.raises(ReleaseMismatch, match=r"stateflow 0\.1\.0 of replica b cannot stop sources"):
        restores._check_stops_sources("b")


def test_an_owner_that_counts_as_stopped_gets_no_lease_by_a_late_heartbeat(tmp_path: Path) -> None:
    """An owner whose lease has lapsed has to register, and is told then that it lost the partition.

    Its heartbeat used to renew the lease after the restore had found it lapsed.
    """
    clock, home = ManualClock(), Home("d1", "here")
    info = ReplicaInfo("a", "cloud", "a:1")
    spec = OperatorSpec("Op", "m:Op", 1, ("k",), b"", "[]")

    async def scenario(ledger: Ledger) -> None:
        controller = Controller(ledger, ControllerSettings(), clock)
        try:
            beat = Beat(info, home, "i1")
            ticket = controller.registration.heard(beat).ticket
            await controller.registration.register(Arrival(info, home, "", "i1", ticket, []))
            *_, planned = await controller.context.record(steps.plan_deployment, spec, {0: "a"})
            await controller.context.record(steps.finish_deployment, planned)
            assert controller.registration.heard(beat).known
            assert not controller.restores._serves_no_more(PLANNED)
            clock.advance(60)
            assert controller.restores._serves_no_more(PLANNED)
            assert not controller.registration.heard(beat).known
            assert controller.restores._serves_no_more(PLANNED)
        finally:
            await controller.close()

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        asyncio.run(scenario(ledger))


def test_no_password_is_kept_of_a_restore_that_is_refused() -> None:
    """A refused restore leaves nothing behind; the password of its URL stayed in memory."""

    def refuse(_: PartitionId) -> None:
        raise REFUSED

    deployed = SimpleNamespace(
        spec=OperatorSpec("Op", "m:Op", 1, ("k",), b"", "[]"), assignment=SimpleNamespace(owner=lambda _: ("a", 1))
    )
    cluster = SimpleNamespace(operator=lambda _: deployed, owned_counts=dict)
    context: Any = SimpleNamespace(
        cluster=cluster, members=SimpleNamespace(alive=None), new_id=lambda: "r", check_not_restored=refuse
    )

    async def plan() -> None:
        restores = Restores(context, lambda _: asyncio.sleep(0))
        with pytest.raises(MoveConflict):
            await restores.plan(Request("Op", url="s3://bucket?key=me&secret=hush"))
        with pytest.raises(MoveConflict):
            await restores.plan(Request("Op", url="https://me:hush@store/x"))
        assert not restores._urls

    asyncio.run(plan())
