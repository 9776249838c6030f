"""Sinks that evaluate a part of each batch: tasks of a dense source that never run, batch after batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from stateflow.router import Reached, reached
from stateflow.rpc import replica_pb2 as rpb
from tests.simulation.sim.flow import PARTITIONS


@dataclass
class Parts:
    """From batch ``since`` on only ``visited`` partitions get theirs, until somebody notices. As ``batch.take(5)`` it
    is always the same part, so that no partition that is passed over ever sees a gap."""

    since: int
    visited: tuple[int, ...]
    mended: bool = field(default=False)

    @classmethod
    def drawn(cls, seed: int, batches: int) -> Parts | None:
        """For a seed of four. The last batch is whole or noticed by nobody: what comes next is another start."""
        random = Random(f"{seed}:parts")
        if random.random() >= 0.25:
            return None
        return cls(
            random.randrange(batches - 1), tuple(random.sample(range(PARTITIONS), random.randrange(1, PARTITIONS)))
        )

    def of(self, number: int, rows: dict[int, bytes]) -> dict[int, bytes]:
        """What of a batch is sent."""
        if self.mended or number < self.since:
            return rows
        return {partition: rows[partition] for partition in self.visited}


def request(source: str, partition: int) -> rpb.PositionsRequest:
    return rpb.PositionsRequest(operator="Flow", source=source, partitions=[partition])


def check(source: str, number: int, replies: dict[int, Any]) -> None:
    """As every task does before it sends anything. Raises BatchIncomplete, PositionGap."""
    found = {p: Reached(reply.positions[p]) for p, reply in replies.items() if p in reply.positions}
    reached.check_whole("Flow", source, number, PARTITIONS, found)
