"""Verifications and trials: their caller may leave at any moment, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import OperatorFailed, OperatorStuck, SchemaMismatch
from stateflow.operator.operator import describe
from stateflow.partition import verification
from stateflow.partition.control import Verification
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.verification import Copy
from stateflow.partitioner import partition_of
from stateflow.replica.checkpoints import TrialShell, VerifyShell
from stateflow.replica.executor import Threads
from stateflow.types import OperatorSpec
from tests.unit.partition.test_replica import P
from tests.unit.partition.test_replica_redeploy import Cluster

WITHIN_S = 10.0


class Slow:
    """A verifier whose snapshot is there once ``go`` is set."""

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


# -- trials ---------------------------------------------------------------------------------------------------

GATE = threading.Event()
MIGRATE = """
    def migrate_state(self, version, old):
        from tests.unit.replica.test_checkpoints_verifying import BEGUN, CLOCK, GATE
        BEGUN.set()
        {does}
"""
BEGUN = threading.Event()
CLOCK = ManualClock(1)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yields one replica, with state in partition 1 of 2."""
    monkeypatch.syspath_prepend(tmp_path)
    GATE.clear()
    BEGUN.clear()
    made = Cluster(tmp_path)
    made.deploy(made.install("s = state.value(list[int])", "self.s.value = [1]"))
    made.send(1)
    yield made
    GATE.set()
    made.node.close()


def _version(cluster: Cluster, does: str, limit_s: float = 0.0) -> OperatorSpec:
    cls = cluster.install("s = state.value(dict)", version=2, more=MIGRATE.format(does=does))
    cluster.node.settings = cluster.node.settings.model_copy(update={"batch_timeout_s": limit_s})
    assert cluster.spec is not None
    return describe(cls, 2).after(cluster.spec)


def _shell(cluster: Cluster) -> TrialShell:
    return TrialShell(cluster.node, SYSTEM_CLOCK, Threads())


async def _run(cluster: Cluster, spec: OperatorSpec) -> list[int]:
    return [each async for each in _shell(cluster).run(spec, [0, 1, 2])]


def _snapshots(cluster: Cluster) -> list[Path]:
    return list(cluster.node._registry.snapshots.iterdir())


async def _none_left(cluster: Cluster) -> None:
    """Waits until no snapshot is left: a snapshot is removed after its thread has finished."""
    while _snapshots(cluster):
        await asyncio.sleep(0.01)


def test_each_partition_that_is_owned_here_is_tried(cluster: Cluster) -> None:
    spec = _version(cluster, "self.s.value = {}")

    async def run() -> None:
        assert await _run(cluster, spec) == [0, 1]
        await asyncio.wait_for(_none_left(cluster), WITHIN_S)

    asyncio.run(run())


def test_what_a_version_fails_with_is_told(cluster: Cluster) -> None:
    spec = _version(cluster, "raise ValueError('no')")

    async def run() -> None:
        with pytest.raises(OperatorFailed, match=r"migrate_state\(\) raised ValueError: no .*partition=1"):
            await _run(cluster, spec)
        await asyncio.wait_for(_none_left(cluster), WITHIN_S)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("does", "said"),
    [("while True: pass", "was interrupted"), ("GATE.wait()", r"cannot be interrupted.*\n.*GATE\.wait")],
)
def test_a_migration_that_does_not_return_is_refused(cluster: Cluster, does: str, said: str) -> None:
    """A migration that does not return is refused.

    It used to hold a thread of the replica until the controller's deadline; with four of them, no files were read any
    more.
    """
    spec = _version(cluster, does, limit_s=0.1)

    async def run() -> None:
        with pytest.raises(OperatorStuck, match=f"(?s){said}"):
            await _run(cluster, spec)
        await asyncio.wait_for(_none_left(cluster), WITHIN_S)

    asyncio.run(run())


def test_a_migration_that_is_longer_than_a_batch_may_be_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration that takes longer than a batch may is refused.

    It will be part of one batch, which would be interrupted each time, and nothing would be served.
    """
    monkeypatch.setattr(verification, "PIECE_KEYS", 1)
    for number in range(3):
        cluster.send(1, key=next(key for key in (f"{number}-{n}" for n in range(99)) if partition_of(key, 2) == 1))
    clock = ManualClock(1)
    spec = _version(cluster, "self.s.value = CLOCK.advance(2) or {}", limit_s=3.0)
    monkeypatch.setitem(globals(), "CLOCK", clock)

    async def run() -> None:
        with pytest.raises(OperatorStuck, match=r"longer to migrate .* than a batch may take, 3 s"):
            async for _ in TrialShell(cluster.node, clock, Threads()).run(spec, [1]):
                pass

    asyncio.run(run())


@pytest.mark.parametrize("does", ["while not GATE.is_set(): pass", "GATE.wait()"])
def test_a_trial_that_nobody_waits_for_is_ended(cluster: Cluster, does: str) -> None:
    spec = _version(cluster, does)

    async def run() -> None:
        asked = asyncio.create_task(_run(cluster, spec))
        assert await asyncio.to_thread(BEGUN.wait, WITHIN_S)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(_none_left(cluster), WITHIN_S)

    asyncio.run(run())
    assert not GATE.is_set(), "the operator was given up, it did not return"


def test_a_partition_that_cannot_be_read_is_left_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that cannot be read does not keep a version that mends the operator from being accepted."""
    spec = _version(cluster, "self.s.value = {}")

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cluster.node.verifier, "begin", broken)
    assert asyncio.run(_run(cluster, spec)) == [0]


def test_states_that_cannot_become_those_of_the_version_are_refused(cluster: Cluster) -> None:
    cls = cluster.install("s = state.value(dict)")
    assert cluster.spec is not None
    with pytest.raises(SchemaMismatch):
        asyncio.run(_run(cluster, describe(cls, 2).after(cluster.spec)))
