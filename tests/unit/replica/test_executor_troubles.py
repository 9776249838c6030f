"""A replica's background duties go on after any error, and a replica ends if one of its duties ends nevertheless."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stateflow.cli import processes
from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import StateflowError
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition.replica import ReplicaNode
from stateflow.replica import executor, server
from stateflow.replica.applying import Applier
from stateflow.replica.checkpoints import CheckpointShell
from stateflow.replica.executor import ErrorThrottle
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo

#: longer than any test takes, in seconds
LONG_S = 30.0
SOON_S = 0.001
NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


class Failing:
    """A call in each round of a duty, which fails in the first rounds."""

    def __init__(self, *errors: BaseException, then: object = None) -> None:
        self.errors, self.then, self.reached = list(errors), then, asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        self._loop.call_soon_threadsafe(self.reached.set)
        return self.then


async def goes_on(duty: Any, failing: Failing) -> None:
    task = asyncio.create_task(duty)
    reached = asyncio.create_task(failing.reached.wait())
    await asyncio.wait([task, reached], timeout=LONG_S, return_when=asyncio.FIRST_COMPLETED)
    assert failing.reached.is_set(), task
    task.cancel()


# -- each duty ------------------------------------------------------------------------------------------------


def test_batches_are_watched_on_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LOOK_S", SOON_S)

    async def run() -> None:
        failing = Failing(NO_ROOM, RuntimeError("a fault"))
        node = SimpleNamespace(
            settings=ReplicaSettings(batch_timeout_s=LONG_S),
            batches=SimpleNamespace(
                running=SimpleNamespace(keeps_waiting=lambda _: False, overdue=failing, active=list)
            ),
            served_at=0.0,
        )
        applier = Applier(cast(ReplicaNode, node), SYSTEM_CLOCK, lambda _: asyncio.Event(), lambda _: None)
        await goes_on(applier.watch.run(), failing)

    asyncio.run(run())


def test_a_batch_that_takes_too_long_is_counted() -> None:
    run = SimpleNamespace(interrupt=lambda: None, ended=True)

    async def look() -> None:
        running = SimpleNamespace(keeps_waiting=lambda _: False, overdue=lambda _: run)
        node = SimpleNamespace(settings=ReplicaSettings(), batches=SimpleNamespace(running=running))
        applier = Applier(cast(ReplicaNode, node), SYSTEM_CLOCK, lambda _: asyncio.Event(), lambda _: None)
        await applier.watch._look(1.0)

    before = LIMIT_HITS.count("batch_seconds")
    asyncio.run(look())
    assert LIMIT_HITS.count("batch_seconds") == before + 1


@pytest.mark.parametrize("taken", [True, False])
def test_the_thread_of_a_batch_that_was_taken_away_is_left_although_its_seal_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    monkeypatch.setattr(executor, "INTERRUPTS", 1)
    batch: Any = SimpleNamespace(partition=PartitionId("Op", 0), interrupt=lambda: None, ended=False, left=False)

    async def run() -> None:
        began, held = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        batches = SimpleNamespace(running=SimpleNamespace(take_away=Failing(NO_ROOM)), refusal=lambda _: None)
        node = SimpleNamespace(settings=ReplicaSettings(), batches=batches)
        applier = Applier(cast(ReplicaNode, node), SYSTEM_CLOCK, lambda _: asyncio.Event(), lambda _: None)
        batch.taken = taken

        def hold() -> None:
            loop.call_soon_threadsafe(began.set)
            held.wait(LONG_S)

        stuck = asyncio.create_task(applier.batch_thread.between_batches(hold))
        await asyncio.wait_for(began.wait(), LONG_S)
        try:
            await applier.watch.end(batch)
            await asyncio.wait_for(applier.batch_thread.between_batches(lambda: None), LONG_S)
            with pytest.raises(StateflowError, match="did not finish"):
                await stuck
        finally:
            held.set()

    if taken:
        asyncio.run(run())
        assert batch.left
    else:
        with pytest.raises(OSError, match="No space"):
            asyncio.run(run())
        assert not batch.left


def test_what_nobody_reads_is_dropped_after_any_error() -> None:
    async def run() -> None:
        failing = Failing(NO_ROOM, RuntimeError("a fault"))

        async def in_files(work: Any) -> Any:
            return work()

        node = SimpleNamespace(
            settings=SimpleNamespace(transfer_timeout_s=SOON_S), sender=SimpleNamespace(drop_unread=failing)
        )
        await goes_on(server._drop_unread(cast(Any, node), cast(Any, SimpleNamespace(in_files=in_files))), failing)

    asyncio.run(run())


@pytest.mark.parametrize("duty", ["periodically", "tidily"])
def test_checkpoints_are_looked_after_on_after_any_error(duty: str) -> None:
    async def run() -> None:
        failing = Failing(NO_ROOM, RuntimeError("a fault"), then=({}, []))
        settings = SimpleNamespace(checkpoint_interval_s=SOON_S, checkpoint_tidy_interval_s=SOON_S)
        node: Any = SimpleNamespace(settings=settings, owned=failing)
        shell: Any = CheckpointShell(node, None, SYSTEM_CLOCK, Random(0))

        async def take(*_: Any, **__: Any) -> Any:
            return {}, []

        shell._take, shell._tidy, shell._own_store = take, failing, lambda: None
        await goes_on(getattr(shell, duty)(), failing)
        shell.close()

    asyncio.run(run())


def test_each_kind_of_trouble_is_said_once_until_a_round_goes_well(caplog: pytest.LogCaptureFixture) -> None:
    throttle = ErrorThrottle(logging.getLogger("stateflow.test"), "it is not done")
    for error in (NO_ROOM, NO_ROOM, ValueError("odd"), ValueError("odd"), NO_ROOM, None, NO_ROOM):
        with throttle.survived():
            if error is not None:
                raise error
    said = [(each.getMessage().split(":")[1].strip(), bool(each.exc_info)) for each in caplog.records]
    assert said == [("disk_full", False), ("ValueError", True), ("disk_full", False), ("disk_full", False)]
    with pytest.raises(asyncio.CancelledError), throttle.survived():
        raise asyncio.CancelledError


# -- all of them ----------------------------------------------------------------------------------------------


async def _fails() -> None:
    raise NO_ROOM


async def _returns() -> None:
    pass


@pytest.mark.parametrize(("duty", "code", "what"), [(_fails, "disk_full", "No space"), (_returns, "error", "_returns")])
@pytest.mark.thorough
def test_a_replica_whose_duty_ended_by_itself_ends(
    duty: Callable[[], Any],
    code: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopped: list[bool] = []

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)

    monkeypatch.setattr(server, "duties", lambda *_: [other(), duty()])

    async def run() -> None:
        node = ReplicaNode(ReplicaInfo("a", "s", "", 1), tmp_path / "a", recover=False)
        stop = asyncio.Event()
        serving = server.serve(node, "127.0.0.1:0", "127.0.0.1:1", random=Random(0), stop=stop)
        with pytest.raises(StateflowError, match=what) as caught:
            await asyncio.wait_for(serving, LONG_S)
        assert caught.value.code == code
        assert stop.is_set()

    asyncio.run(run())
    assert stopped == [True]
    assert any(each.levelno == logging.CRITICAL and duty.__name__ in each.getMessage() for each in caplog.records)


def test_a_process_that_stops_by_itself_ends_in_time_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(processes, "_end_as_it_is", lambda _: ended.set())
    processes._Stop(SOON_S).set()
    assert ended.wait(LONG_S)


def test_a_process_says_how_long_its_end_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(processes, "_end_as_it_is", lambda _: None)
    monkeypatch.setattr(processes, "SYSTEM_CLOCK", clock)
    stop = processes._Stop(SOON_S)
    with caplog.at_level(logging.INFO, logger="stateflow"):
        stop.say_over()  # it ends for another reason
        stop.set()
        clock.advance(1.5)
        stop.say_over()
    assert [each.getMessage() for each in caplog.records] == [f"shutdown took 1.5 s of at most {SOON_S:g} s"]
