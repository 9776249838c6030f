"""When the controller gives a restore up whose target was asked to own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.cluster_state import PlannedRestore
from reconfig.controller.restores import Restores
from stateflow.errors import HoldLost, MoveConflict, StateflowError, Unavailable
from stateflow.rpc import replica_pb2 as rpb
from stateflow.types import PartitionId

PLANNED = PlannedRestore("r", PartitionId("Op", 0), "a", "b", 2, "file:///s", "", "", -1)
AWAY = Unavailable("no answer from b", remedy="see it")
REFUSED = MoveConflict("the partition is moving", remedy="wait")
OWNS, DOES_NOT = rpb.FenceReply(owned=True), rpb.FenceReply()
DONE = rpb.RestoreReply(epoch=2)


def outcome(answers: list[Any], leads: Callable[[], None] = lambda: None) -> rpb.RestoreReply:
    """Of the last step. Args: answers: of the target, one after another; of Cancel where they are FenceReplies."""

    async def call(name: str, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, StateflowError):
            raise answer
        assert isinstance(answer, rpb.FenceReply) == isinstance(request, rpb.CancelRequest)
        return answer

    async def end(_: object) -> None: ...

    members = SimpleNamespace(alive=lambda _: True, lapsed=lambda _: False)
    settings = SimpleNamespace(restore_patience_s=0.0, retry_interval_s=0.0)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    context: Any = SimpleNamespace(
        call=call, members=members, settings=settings, clock=clock, cluster=SimpleNamespace(), check_leads=leads
    )

    async def own() -> rpb.RestoreReply:
        request = rpb.RestoreRequest(restore_id="r", epoch=2)
        result, _ = await Restores(context, end)._own(PLANNED, request, rpb.RestoreReply(epoch=2))
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


def test_a_term_that_is_over_asks_nobody() -> None:
    def leads() -> None:
        raise HoldLost("the term is over")

    with pytest.raises(HoldLost):
        outcome([AWAY, REFUSED], leads)
