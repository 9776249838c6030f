"""Room for new replicas: all that a request asks for are placed, or none."""

from __future__ import annotations

import pytest

from reconfig.controller.agents import Offer, place
from stateflow.errors import NoRoom
from stateflow.fleet import AgentInfo, Request, Spawned

MIB = 1 << 20
WORKER, DISK = 256 * MIB, 1024 * MIB


def offer(name: str, cores: int = 4, memory_mib: int = 4096, disk_mib: int = 10_240, *has: Spawned) -> Offer:
    return Offer(AgentInfo(name, "edge", f"{name}:1", {}, cores, memory_mib * MIB), disk_mib * MIB, list(has))


def placed(request: Request, *offers: Offer) -> list[str]:
    return place(offers, request, WORKER, DISK)


def test_they_are_spread_by_cores_left() -> None:
    assert placed(Request("edge", 4), offer("a"), offer("b", 2)) == ["a", "a", "b", "a"]
    assert (
        placed(Request("edge", 2), offer("a", 4, 4096, 10_240, Spawned("a-0", "a", workers=3)), offer("b")) == ["b"] * 2
    )


def test_what_is_stopped_takes_no_cores_and_no_memory() -> None:
    stopped = Spawned("a-0", "a", running=False, workers=4, memory_bytes=4096 * MIB)
    assert placed(Request("a", 4), offer("a", 4, 4096, 10_240, stopped)) == ["a"] * 4


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (Request("a", 5), "room for 4 of 5 .* 0 of 4 cores are left, 1 are needed"),
        (Request("a", 2, workers=3), "room for 1 of 2 .* 1 of 4 cores are left, 3 are needed"),
        (Request("a", 3, memory_bytes=2048 * MIB), "room for 2 of 3 .* 0 of 4096 MiB of memory .* 2048 are"),
        (Request("a", 1, memory_bytes=5000 * MIB), "room for 0 of 1"),
    ],
)  # fmt: skip
def test_no_room(request_: Request, what: str) -> None:
    with pytest.raises(NoRoom, match=what):
        placed(request_, offer("a"))


def test_a_worker_takes_memory_and_a_replica_disk_though_nothing_was_said() -> None:
    with pytest.raises(NoRoom, match="a: 88 of 600 MiB of memory are left, 256 are needed"):
        placed(Request("a", 3), offer("a", 9, 600))
    with pytest.raises(NoRoom, match="1500 MiB of disk are free, 2048 are needed"):
        placed(Request("a", 2), offer("a", 9, 4096, 1500))
