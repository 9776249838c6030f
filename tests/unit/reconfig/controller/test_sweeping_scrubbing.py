"""Scrubbing: when everything is read once more, and that it goes on when it cannot begin."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.sweeping import Scrubbing
from reconfig.decisions.sweeps import Chore
from stateflow.errors import InvalidArgument


def scrub(now_s: float, deployed_s: dict[str, float], began_s: float | None, under_way: bool = False) -> Scrubbing:
    book = SimpleNamespace(
        under_way=lambda chore: ["x"] * under_way if chore is Chore.VERIFY else [],
        whole_us={} if began_s is None else {Chore.VERIFY: int(began_s * 1e6)},
    )
    cluster = SimpleNamespace(
        deployed=dict.fromkeys(deployed_s),
        versions_us={name: int(at * 1e6) for name, at in deployed_s.items()},
        sweeps=book,
        now_us=lambda: int(now_s * 1e6),
    )
    settings = SimpleNamespace(verify_interval_s=0.02)
    context: Any = SimpleNamespace(cluster=cluster, settings=settings)
    return Scrubbing(context, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "deployed", "began", "under_way", "due"),
    [
        (100, {"Op": 0}, None, False, True),
        (50, {"Op": 0}, None, False, False),
        (500, {}, None, False, False),
        (500, {"Op": 0}, 450, False, False),
        (500, {"Op": 0}, 410, False, True),
        (500, {"Op": 0}, 410, True, False),
        (500, {"Op": 480, "Old": 1}, None, False, True),
        (500, {"Op": 0}, 9000, False, True),  # by a clock that was ahead, and was put back
        (500, {"Op": 9000}, None, False, True),
    ],
)
def test_when_it_is_due(now: int, deployed: Any, began: float | None, under_way: bool, due: bool) -> None:
    assert scrub(now, deployed, began, under_way).is_due(60) is due


def test_one_that_cannot_be_begun_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []

    async def begin(*asked: Any) -> str:
        begun.append(asked)
        if len(begun) == 1:
            raise InvalidArgument("there are no partitions to process", remedy="-")
        return "x"

    async def run() -> None:
        made = scrub(1e6, {"Op": 0}, None)
        made._sweeps = SimpleNamespace(begin=begin)  # type: ignore[assignment]
        watching = asyncio.create_task(made.watch())
        async with asyncio.timeout(30):
            while len(begun) < 2:
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(run())
    assert begun[:2] == [(Chore.VERIFY, "", 1)] * 2


def test_it_may_be_switched_off() -> None:
    made = scrub(1e6, {"Op": 0}, None)
    made._context.settings.verify_interval_s = 0  # type: ignore[misc]
    asyncio.run(made.watch())
