"""Decommissioned executors: what becomes of their tasks, look by look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stateflow.reports import MoveReport, Reconfiguration
from stateflow.spark.inside import EMPTY_AGAIN_S, Departures, Leaving, ReplicaTask, Steps, sources_of
from stateflow.status import ClusterStatus, ReplicaStatus

BASE = "spark-abc123"
TASK = Leaving(task=7, number=1)


def replica(name: str, partitions: int, alive: bool = True) -> ReplicaStatus:
    return ReplicaStatus(f"{BASE}-{name}", "spark", "h:1", 1, alive, 0.1, partitions)


def look(departures: Departures, *replicas: ReplicaStatus, moving: Sequence[str] = (), now: float = 0.0) -> Steps:
    return departures.look([TASK], replicas, moving, now)


@pytest.fixture
def departures() -> Departures:
    return Departures(BASE)


def test_it_is_emptied_and_then_ended(departures: Departures) -> None:
    name = f"{BASE}-1"
    assert look(departures, replica("1", 2)) == Steps(empty=(name,))
    assert look(departures, replica("1", 1), moving=[name], now=1) == Steps(), "it is under way"
    assert look(departures, replica("1", 0), moving=[name], now=2) == Steps(), "the last one is not there yet"
    assert look(departures, replica("1", 0), now=3) == Steps(end=(7,))


def test_what_did_not_move_is_asked_for_again_later(departures: Departures) -> None:
    assert look(departures, replica("1", 2)).empty
    assert look(departures, replica("1", 2), now=EMPTY_AGAIN_S - 1) == Steps()
    assert look(departures, replica("1", 2), now=EMPTY_AGAIN_S).empty


def test_only_its_own_replica(departures: Departures) -> None:
    others = [replica("0", 3), replica("11", 3), replica("0-1", 3)]
    assert look(departures, *others, replica("1", 0)) == Steps(end=(7,))
    assert look(departures, *others, replica("1", 0, alive=False), replica("1-5", 2)).empty == (f"{BASE}-1-5",)


def test_one_that_is_silent_for_a_moment_is_not_ended(departures: Departures) -> None:
    assert look(departures, replica("1", 2, alive=False)) == Steps(empty=(f"{BASE}-1",))


def test_a_former_one_that_is_dead_does_not_count(departures: Departures) -> None:
    assert look(departures, replica("1", 2, alive=False), replica("1-5", 0)) == Steps(end=(7,))


def test_one_that_has_not_come_up_yet_is_ended(departures: Departures) -> None:
    assert look(departures) == Steps(end=(7,))


def test_who_has_something_on_its_way() -> None:
    def moved(source: str, state: str) -> MoveReport:
        return MoveReport("m", 0, source, "b", state, "copy")

    over = Reconfiguration("r1", "Op", "COMPLETED", (moved("a", "COMPLETED"),), 50.0)
    runs = Reconfiguration("r2", "Op", "RUNNING", (moved("c", "COMPLETED"), moved("d", "PLANNED")), 50.0)
    assert sources_of(ClusterStatus((), (), (over, runs))) == {"d"}


def test_names(tmp_path: Path) -> None:
    task = ReplicaTask("h:1", "app", "abc123", "", insecure=False)
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert task.name(first, 1, None) == f"{BASE}-1"
    assert task.name(first, 1, 9) == f"{BASE}-1", "with its directory it is who it was"
    assert task.name(second, 1, 9) == f"{BASE}-1-9"


def test_a_name_that_a_full_disk_kept_from_being_written_is_chosen_again(tmp_path: Path) -> None:
    task = ReplicaTask("h:1", "app", "abc123", "", insecure=False)
    (tmp_path / "REPLICA").write_text("")
    assert task.name(tmp_path, 1, 9) == f"{BASE}-1-9"
    assert task.name(tmp_path, 1, 12) == f"{BASE}-1-9"
