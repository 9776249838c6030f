"""Which batches a partition contains, and so what is to become of one that is sent to it. Sans-io."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stateflow.errors import BatchChanged, OperatorUsedTwice, PositionGap, StaleBatch, TasksMerged
from stateflow.runtime.layout import UNKNOWN_ATTEMPT, Attempt, Position
from stateflow.types import PartitionId

#: sources whose names begin so are not the user's
RESERVED = "stateflow:"
#: the source whose rows are not processed but become the operator's first state
INITIAL = "stateflow:initial"
#: what the source of one run of a batch DataFrame begins with
BATCH_RUN = "batch:"
#: the source of the change set that migrates a partition's state; its number is the new state version
MIGRATION = "stateflow:migration"


@dataclass(frozen=True, slots=True)
class Batch:
    """Where rows come from. ``number`` rises by one per batch; a *sparse* source may skip numbers.

    ``rewind``: an older batch is sent again, for partitions that lost it; those that contain it skip it, and have
    its output no more.

    ``watermark_us``: this source promises no older rows from its next batch on, µs; None: it makes no promise.
    ``event_us``: the newest event time among the rows its sender has, for all partitions, µs.
    ``attempt``: who sends it, where that is known.
    """

    source: str
    number: int
    sparse: bool = False
    watermark_us: int | None = None
    attempt: Attempt = UNKNOWN_ATTEMPT
    event_us: int | None = None
    rewind: bool = False


class Positions:
    """Of one partition, by source."""

    def __init__(self, partition: PartitionId, known: Mapping[str, Position]) -> None:
        self.partition = partition
        self._known = dict(known)

    def last(self, source: str) -> int | None:
        """The last batch of ``source`` the partition contains; None when it has seen none."""
        known = self._known.get(source)
        return None if known is None else known.batch

    def rows(self, source: str) -> int:
        """Of its last batch."""
        return self._known[source].rows

    def contains(self, batch: Batch) -> bool:
        """One that is sent again in a rewind, with later ones behind it."""
        last = self.last(batch.source)
        return batch.rewind and last is not None and batch.number < last

    def is_replay(self, batch: Batch, after: int | None) -> bool:
        """Whether it is the newest one again. ``after``: see :meth:`~stateflow.runtime.host.PartitionHost.apply`.

        Raises StaleBatch, PositionGap, OperatorUsedTwice or TasksMerged.
        """
        last = self.last(batch.source)
        if batch.source == INITIAL and self._known.keys() - {INITIAL}:
            if last is not None and batch.number <= last:
                return True
            raise StaleBatch(
                "the operator has processed rows already",
                remedy="load initial state before the first query or stream starts",
                operator=self.partition.operator,
                partition=self.partition.partition,
            )
        if batch.number == last:
            self._refuse_others(self._known[batch.source].attempt, batch.attempt)
            return True
        where = {
            "operator": self.partition.operator,
            "partition": self.partition.partition,
            "source": batch.source,
        }
        if last is not None and batch.number < last:
            raise StaleBatch(
                f"batch {batch.number} was sent after batch {last}",
                remedy="only the newest batch can be replayed; start the query from its latest checkpoint",
                **where,
            )
        expected = 0 if last is None else last + 1
        if batch.number != expected and not batch.sparse:
            raise PositionGap(
                f"batch {batch.number} was sent, the state expects batch {expected}",
                remedy=f"rewind the source to batch {expected}",
                expected=expected,
                **where,
            )
        if after is not None and after >= expected:  # a sparse source may skip, but not what was acknowledged
            raise PositionGap(
                f"batch {after} was acknowledged, the state contains none after {expected - 1}",
                remedy=f"send the batches from {expected} on again, with rewind",
                expected=expected,
                **where,
            )
        return False

    def _refuse_others(self, earlier: Attempt, now: Attempt) -> None:
        """A retry is welcome to the stored output; somebody else, who has other rows, is not."""
        if not now.run or earlier.run != now.run:
            return
        if earlier.use != now.use:
            raise OperatorUsedTwice(
                "the operator is applied twice in one query",
                remedy="pass a different source= to each apply_operator",
                operator=self.partition.operator,
            )
        if earlier.task == now.task and earlier.call != now.call:
            raise TasksMerged(
                "Spark runs several tasks of the operator as one, as it does for a coalesce right behind it",
                remedy="put .repartition(n) between the operator and the coalesce",
                operator=self.partition.operator,
            )

    def check_rows(self, batch: Batch, now: int) -> None:
        """Of a replay with ``now`` rows. The stored output is of the rows that came first; given to Spark for others,
        those would be lost silently.

        A query's replay may lack rows, as its source may skip what is gone; one run of a batch DataFrame may not.
        Raises BatchChanged.
        """
        then = self._known[batch.source].rows
        if now > then or (now < then and batch.source.startswith(BATCH_RUN)):
            raise BatchChanged(
                f"batch {batch.number} had {then} row(s) when it was applied, and has {now} now",
                remedy="other rows need another source= or query; a source and the stages behind it must replay",
                operator=self.partition.operator,
                partition=self.partition.partition,
                source=batch.source,
            )

    def watermark_us(self, batch: Batch) -> int | None:
        """The minimum over the sources that have one, this batch's with it; None when none has."""
        watermarks = {source: position.watermark_us for source, position in self._known.items()}
        if batch.watermark_us is not None:
            watermarks[batch.source] = max(batch.watermark_us, watermarks.get(batch.source) or batch.watermark_us)
        return min((watermark for watermark in watermarks.values() if watermark is not None), default=None)

    def behind(self, batch: Batch, rows: int) -> Position:
        """The source's position once the batch is applied."""
        before = self._known.get(batch.source, Position(-1))
        promised = [w for w in (batch.watermark_us, before.watermark_us) if w is not None]
        events = [e for e in (before.event_us, batch.event_us) if e is not None]
        return Position(
            batch.number,
            max(promised, default=None),
            rows,
            batch.attempt,
            max(events, default=None),
            before.event_before_us if before.batch == batch.number else before.event_us,
        )

    def reached(self, source: str, position: Position) -> None:
        """It is committed."""
        self._known[source] = position
