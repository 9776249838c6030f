"""Fences: their report of the time in which rows were still processed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.clock import ManualClock
from stateflow.errors import MoveUnknown
from stateflow.partition.control import Fence
from stateflow.partition.lifecycle import Lifecycle, State
from stateflow.replica.executor import Threads
from stateflow.replica.transfer_out import Fencer
from stateflow.types import ReplicaInfo
from tests.unit.partition.test_replica import P

FENCE = Fence(P, "m", 2, ReplicaInfo("b", "b", "b:1"), cold=True)


class Partition:
    """A partition whose running batch takes ``batch_s``. A busy event loop hears of the seal ``late_s`` later."""

    def __init__(self, batch_s: float, late_s: float = 0.0, then: State = State.SEALED) -> None:
        self.clock, self.batch_s, self.late_s, self.then = ManualClock(), batch_s, late_s, then
        self.state, self.began = State.OWNED, 0.0
        self.sender = SimpleNamespace(fence=self._fence, is_followed=lambda *_: True)

    def _fence(self, *_: Any, **__: Any) -> bool:
        if not self.batch_s:
            self.state, self.began = State.SEALED, self.clock.monotonic()
            return True
        self.state = State.FENCING
        return False

    def lifecycle(self, _: object) -> Lifecycle:
        return Lifecycle(P, self.state, 1)

    def quiet_in(self, *_: object) -> float:
        return 0.0

    def sequence(self, _: object) -> int:
        return 0

    def sealed_at(self, _: object) -> float:
        return self.began

    def next(self, _: object) -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        if self.state is State.FENCING:  # the batch ends, and another thread seals the partition
            self.clock.advance(self.batch_s)
            self.state, self.began = self.then, self.clock.monotonic()
            self.clock.advance(self.late_s)
        return event

    def fenced(self) -> float:
        async def asked() -> float:
            threads = Threads()
            try:
                return await Fencer(self, self.clock, threads, self).fence(FENCE)  # type: ignore[arg-type]
            finally:
                threads.close()

        return asyncio.run(asked())


def test_rows_are_processed_until_the_seal_and_not_until_the_event_loop_hears_of_it() -> None:
    """Rows count as processed until the seal: otherwise a target that owned meanwhile would show no pause."""
    assert Partition(batch_s=0.010, late_s=5.0).fenced() == pytest.approx(10.0)


def test_without_a_batch_in_hand_it_is_sealed_at_once() -> None:
    assert Partition(batch_s=0.0).fenced() == 0.0


def test_what_was_sealed_before_it_was_asked_kept_nobody_waiting() -> None:
    partition = Partition(batch_s=0.0)
    partition.clock.advance(7.0)
    partition.fenced()
    partition._fence = partition.sender.fence = lambda *_, **__: True  # type: ignore[method-assign]
    partition.clock.advance(3.0)
    assert partition.fenced() == 0.0


def test_a_fence_that_is_cancelled_meanwhile_says_so() -> None:
    with pytest.raises(MoveUnknown):
        Partition(batch_s=0.010, then=State.OWNED).fenced()
