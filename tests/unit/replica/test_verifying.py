"""Whoever asks for a verification may go at any moment: nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stateflow.replica.threads import Threads
from stateflow.replica.verifying import VerifyShell
from stateflow.runtime.control import Verification
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.verifying import Copy
from tests.unit.runtime.test_replica import P

WITHIN_S = 10.0


class Slow:
    """Its snapshot is there when ``go`` is set."""

    def __init__(self) -> None:
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def begin(self, *_: Any) -> Copy:
        self.begun.set()
        assert self.go.wait(WITHIN_S)
        return Copy(P, Path("snapshot"), 1, 5)

    def read(self, copy: Copy, stopped: Any) -> Verification:
        return Verification(copy.epoch, copy.sequence, True)

    def end(self, copy: Copy) -> None:
        self.ended.set()


async def _asked(verifier: Slow) -> tuple[VerifyShell, asyncio.Task[list[Verification]]]:
    shell = VerifyShell(cast(ReplicaNode, SimpleNamespace(verifier=verifier)), Threads())

    async def ask() -> list[Verification]:
        return [each async for each in shell.verify(P, None)]

    asked = asyncio.create_task(ask())
    assert await asyncio.to_thread(verifier.begun.wait, WITHIN_S)
    return shell, asked


def test_a_snapshot_is_read_and_dropped() -> None:
    async def run() -> list[Verification]:
        verifier = Slow()
        verifier.go.set()
        shell, asked = await _asked(verifier)
        found = await asked
        assert await asyncio.to_thread(verifier.ended.wait, WITHIN_S)
        shell.close()
        return found

    assert [(each.sequence, each.done) for each in asyncio.run(run())] == [(5, False), (5, True)]


def test_one_that_is_taken_for_nobody_is_dropped() -> None:
    async def run() -> None:
        verifier = Slow()
        shell, asked = await _asked(verifier)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        verifier.go.set()
        assert await asyncio.to_thread(verifier.ended.wait, WITHIN_S), "it would stay until the replica starts anew"
        shell.close()

    asyncio.run(run())
