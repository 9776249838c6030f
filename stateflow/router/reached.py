"""Positions that a source has reached in the partitions of an operator, and what follows from them. Sans-io."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stateflow.errors import BatchIncomplete, PositionGap


@dataclass(frozen=True, slots=True)
class Reached:
    """Position of a source in one partition.

    ``batch``: the last batch that it contains. ``event_us``: newest event time, µs, that the source had reported up to
    that batch. ``event_before_us``: the same up to the batch before.
    """

    batch: int
    event_us: int | None = None
    event_before_us: int | None = None


def newest_event_us(reached: Mapping[int, Reached], batch: int) -> int | None:
    """Returns the newest event time, µs, among all rows of a source before ``batch``; None without rows.

    The result is the same for every attempt of a batch, even if some partitions contain the batch already.
    """
    times = [each.event_us if each.batch < batch else each.event_before_us for each in reached.values()]
    return max((time for time in times if time is not None), default=None)


def check_whole(operator: str, source: str, batch: int, partitions: int, reached: Mapping[int, Reached]) -> None:
    """Checks that every partition contains the batch before ``batch``.

    For a source that visits all partitions with each batch.

    Call it before any part of ``batch`` is sent: a partition that was left out cannot report it while it is left out
    again. Partitions that have seen nothing of the source are not in ``reached``.

    Raises BatchIncomplete where some partitions end with the batch before and the others right before that one, so that
    it can be sent again; PositionGap where something else is missing: a part of the state was lost.
    """
    last = [reached[partition].batch if partition in reached else -1 for partition in range(partitions)]
    oldest = min(last)
    if oldest >= batch - 1:
        return
    where = {"operator": operator, "source": source, "partition": last.index(oldest), "expected": oldest + 1}
    have = last.count(batch - 1)
    if oldest == batch - 2 and max(last) == batch - 1:
        raise BatchIncomplete(
            f"batch {batch} was sent, but batch {batch - 1} is in only {have} of {partitions} partitions",
            remedy="make the query's sink evaluate each batch completely, as take, first, show and isEmpty do not; "
            f"then rewind: stateflow spark rewind CHECKPOINT --to-batch {batch - 1} --apply",
            **where,
        )
    raise PositionGap(
        f"batch {batch} was sent, the state expects batch {oldest + 1}",
        remedy=f"rewind the source to batch {oldest + 1}",
        **where,
    )
