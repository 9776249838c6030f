"""Sinks of a dense source that evaluate only some partitions of each batch, so that the other tasks never run."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from stateflow.router import Reached, session
from stateflow.rpc import replica_pb2 as rpb
from tests.simulation.sim.flow import PARTITIONS


@dataclass
class Parts:
    """The part of each batch that a sink evaluates.

    From batch ``since`` on, only the partitions ``visited`` get their rows, until the loss is noticed and the sink is
    ``mended``. The partitions are the same for all batches, as with ``batch.take(5)``. So the other partitions get no
    later batch that would show them a gap.
    """

    since: int
    visited: tuple[int, ...]
    mended: bool = field(default=False)

    @classmethod
    def drawn(cls, seed: int, batches: int) -> Parts | None:
        """Draws the part for a seed. Three of four seeds have none, and get None.

        ``since`` is never the last batch, as only a later batch shows the loss.
        """
        random = Random(f"{seed}:parts")
        if random.random() >= 0.25:
            return None
        return cls(
            random.randrange(batches - 1), tuple(random.sample(range(PARTITIONS), random.randrange(1, PARTITIONS)))
        )

    def of(self, number: int, rows: dict[int, bytes]) -> dict[int, bytes]:
        """Returns the part of a batch's rows that the sink sends."""
        if self.mended or number < self.since:
            return rows
        return {partition: rows[partition] for partition in self.visited}


def request(source: str, partition: int) -> rpb.PositionsRequest:
    return rpb.PositionsRequest(operator="Flow", source=source, partitions=[partition])


def check(source: str, number: int, replies: dict[int, Any]) -> None:
    """Checks that the previous batch was sent whole, as every task does before it sends its own part.

    Args:
        number: the batch that the task is about to send.
        replies: partition → its reply to a request for positions.

    Raises:
        BatchIncomplete, PositionGap: the previous batch was not sent whole, or a partition has lost batches.
    """
    found = {p: Reached(reply.positions[p]) for p, reply in replies.items() if p in reply.positions}
    session.check_whole("Flow", source, number, PARTITIONS, found)
