"""Sources that a client opens in many partitions of a replica: durable writes, and partitions that are elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import NotOwner, SourceTaken
from stateflow.partition.layout import Session
from stateflow.replica import service
from stateflow.replica.applying import Confirmations
from stateflow.replica.executor import BatchThread, Threads
from stateflow.replica.service import Sources
from tests.unit.partition.test_layout_commits import SPEC, Place, counted

OLD, NEW = Session(4, "b"), Session(5, "c")


def place_of(root: Path, acknowledge: str) -> Place:
    """Returns a replica with sixteen partitions that nobody has used since it started."""
    place = Place(root / "a", acknowledge=acknowledge)
    place.node.create(SPEC, range(16), 1)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = place_of(tmp_path, "fsync")
    yield made
    made.node.close()


def opened(place: Place, session: Session, partitions: Collection[int]) -> Any:
    async def ask() -> Any:
        batch_thread, threads = BatchThread(SYSTEM_CLOCK), Threads()
        confirmations = Confirmations(place.node, SYSTEM_CLOCK, lambda _: asyncio.Event())
        sources = Sources(place.node, threads, batch_thread, confirmations)
        try:
            return await sources.open("Op", "s", partitions, session)
        finally:
            batch_thread.stop()
            threads.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(("at_once", "syncs"), [(128, 1), (6, 3)])
def test_a_source_is_opened_with_one_sync_for_many_partitions(
    place: Place, monkeypatch: pytest.MonkeyPatch, at_once: int, syncs: int
) -> None:
    monkeypatch.setattr(service, "OPENED_AT_ONCE", at_once)
    place.send(0, 3)
    with monkeypatch.context() as patch:
        synced = counted(patch)
        found = opened(place, NEW, range(16))
    assert synced == ["log"] * syncs
    assert {partition: position.batch for partition, position in found.items()} == {3: 0}
    for partition in range(16):
        with pytest.raises(SourceTaken):
            opened(place, OLD, [partition])


def test_in_wal_mode_each_database_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, "wal")
    with monkeypatch.context() as patch:
        synced = counted(patch)
        opened(place, NEW, range(16))
    assert synced == ["database"] * 16
    place.node.close()


def test_partitions_that_are_elsewhere_cost_the_others_no_second_write(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotOwner, match=r"partition=Op/16"):
        opened(place, NEW, [16, *range(16), 17])
    with monkeypatch.context() as patch:
        synced = counted(patch)
        opened(place, NEW, range(16))
    assert synced == []
