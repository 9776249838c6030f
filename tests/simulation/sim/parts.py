"""Sinks that evaluate only a part of each batch, so that tasks of a dense source never run, batch after batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from stateflow.router import Reached, session
from stateflow.rpc import replica_pb2 as rpb
from tests.simulation.sim.flow import PARTITIONS


@dataclass
class Parts:
    """The part that a sink evaluates.

    From batch ``since`` on only the partitions ``visited`` get their rows, until the loss is noticed. As with
    ``batch.take(5)`` the part is always the same, so that no skipped partition ever sees a gap.
    """

    since: int
    visited: tuple[int, ...]
    mended: bool = field(default=False)

    @classmethod
    def drawn(cls, seed: int, batches: int) -> Parts | None:
        """Draws parts for one seed of four; None for the others.

        Never from the last batch on: only a later batch would notice.
        """
        random = Random(f"{seed}:parts")
        if random.random() >= 0.25:
            return None
        return cls(
            random.randrange(batches - 1), tuple(random.sample(range(PARTITIONS), random.randrange(1, PARTITIONS)))
        )

    def of(self, number: int, rows: dict[int, bytes]) -> dict[int, bytes]:
        """Returns the part of a batch that is sent."""
        if self.mended or number < self.since:
            return rows
        return {partition: rows[partition] for partition in self.visited}


def request(source: str, partition: int) -> rpb.PositionsRequest:
    return rpb.PositionsRequest(operator="Flow", source=source, partitions=[partition])


def check(source: str, number: int, replies: dict[int, Any]) -> None:
    """Checks that the batch before was whole, as every task does before it sends.

    Raises BatchIncomplete, PositionGap.
    """
    found = {p: Reached(reply.positions[p]) for p, reply in replies.items() if p in reply.positions}
    session.check_whole("Flow", source, number, PARTITIONS, found)
