"""Confirmations by standbys, for ``acknowledge=standby``.

Which replica is asked whether a standby has a batch when its partition moves meanwhile, and what a client may be told
before a standby has the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import NotOwner, StandbyMissing
from stateflow.partition.change_feed import SnapshotInfo
from stateflow.partition.layout import Session
from stateflow.partition.lifecycle import Lifecycle, State
from stateflow.partition.local_partition import acknowledgement, moved
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.applying import Confirmations
from stateflow.replica.executor import BatchThread, Threads
from stateflow.replica.service import Sources
from stateflow.types import ReplicaInfo
from tests.unit.partition.test_replica import P, Two

SEQUENCE = 7
TARGET = ReplicaInfo("b", "b", "b:1")
#: longer than any test takes, in seconds
LONG_S = 600.0


# -- the decision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
def test_what_a_standby_confirmed_is_acknowledged_wherever_the_partition_is(state: State) -> None:
    assert acknowledgement(SEQUENCE, True, Lifecycle(P, state, 1)) == SEQUENCE


@pytest.mark.parametrize("state", State)
def test_what_nobody_confirmed_is_waited_for_only_where_it_is_served(state: State) -> None:
    lifecycle = Lifecycle(P, state, 1, successor=TARGET if state is State.SEALED else None)
    said = acknowledgement(SEQUENCE, False, lifecycle)
    if state in (State.OWNED, State.FENCING):
        assert said is None
    elif state is State.SEALED:
        assert said is TARGET
    else:
        assert isinstance(said, NotOwner)
        assert said.retryable


def test_a_seal_for_nobody_known_is_no_place_to_ask() -> None:
    assert isinstance(acknowledgement(SEQUENCE, False, Lifecycle(P, State.SEALED, 1)), NotOwner)


def test_a_redirect_names_the_owner_and_its_epoch() -> None:
    where = moved(TARGET, 4).where
    assert (where["owner"], where["address"], where["epoch"]) == ("b", "b:1", 4)


# -- at a replica ---------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def confirm_sent(node: ReplicaNode, base: SnapshotInfo, sequence: int) -> None:
    """Confirms what a standby was sent."""
    node.sender.change_log(base.snapshot_id).read(base.sequence, 1 << 20)
    node.sender.confirm(base.snapshot_id, sequence)


def asked(node: ReplicaNode, applied: Any, meanwhile: Callable[[], object], wait_s: float = LONG_S) -> Any:
    """Returns the answer for a batch that is applied and not confirmed, when ``meanwhile`` happens."""

    async def ask() -> Any:
        changed = asyncio.Event()
        node.on_change(lambda _: changed.set())
        confirmations = Confirmations(node, SYSTEM_CLOCK, lambda _: changed)
        said = asyncio.create_task(confirmations.of(P, applied.sequence, SYSTEM_CLOCK.monotonic() + wait_s))
        await asyncio.sleep(0)
        assert not said.done()
        meanwhile()
        return await asyncio.wait_for(said, 10)

    return asyncio.run(ask())


def test_a_sealed_owner_hands_the_question_on_with_the_partition(two: Two) -> None:
    applied = two.send(two.a, 1)
    said = asked(two.a, applied, lambda: two.a.sender.fence(P, "m1", 2, two.b.info, cold=True))
    assert said == two.b.info


def test_a_former_owner_that_follows_by_now_says_that_it_is_not_the_owner(two: Two) -> None:
    applied = two.send(two.a, 1)

    def leaves_and_is_prepared() -> None:
        two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
        two.a.receiver.prepare(two.spec, P, "s2", 2)

    said = asked(two.a, applied, leaves_and_is_prepared)
    assert isinstance(said, NotOwner)
    assert two.a.lifecycle(P).state is State.WARMING


def test_a_standby_that_confirms_is_enough(two: Two) -> None:
    base = two.a.sender.snapshot(P, "s1", True)
    applied = two.send(two.a, 1)
    assert asked(two.a, applied, lambda: confirm_sent(two.a, base, applied.sequence)) is None


def test_without_a_standby_it_is_said(two: Two) -> None:
    applied = two.send(two.a, 1)
    assert isinstance(asked(two.a, applied, lambda: None, wait_s=0.01), StandbyMissing)


def opened(node: ReplicaNode, wait_s: float, meanwhile: Callable[[asyncio.Task[Any]], object]) -> None:
    """Lets a client of source "s" in, and does ``meanwhile`` once the partition knows it."""
    node.settings = node.settings.model_copy(update={"acknowledge": "standby", "hold_timeout_s": wait_s})
    before = node.sequence(P)

    async def open_source() -> None:
        changed = asyncio.Event()
        batch_thread, threads = BatchThread(SYSTEM_CLOCK), Threads()
        sources = Sources(node, threads, batch_thread, Confirmations(node, SYSTEM_CLOCK, lambda _: changed))
        opening = asyncio.create_task(sources.open("Op", "s", [0], Session(1, "newer")))
        try:
            while node.sequence(P) == before:
                await asyncio.sleep(0.001)
            meanwhile(opening)
            changed.set()
            await asyncio.wait_for(opening, 10)
        finally:
            batch_thread.stop()
            threads.close()

    asyncio.run(open_source())


def test_a_client_is_let_in_when_a_standby_has_what_it_is_told(two: Two) -> None:
    """A client is let in once a standby has all that the client is told.

    No standby has the batches of its predecessor yet. The client would take them for acknowledged, and ask its
    application for them when the standby takes over.
    """
    base = two.a.sender.snapshot(P, "s1", True)
    two.send(two.a, 1)

    def confirm(opening: asyncio.Task[Any]) -> None:
        assert not opening.done()
        confirm_sent(two.a, base, two.a.sequence(P))

    opened(two.a, LONG_S, confirm)


def test_it_is_not_enough_that_a_standby_has_its_predecessors_batches(two: Two) -> None:
    """A standby needs the client's session, too, to take over; its predecessor's batches are not enough."""
    base = two.a.sender.snapshot(P, "s1", True)
    applied = two.send(two.a, 1)
    with pytest.raises(StandbyMissing):
        opened(two.a, 0.01, lambda _: confirm_sent(two.a, base, applied.sequence))
