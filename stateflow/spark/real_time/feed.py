"""Sends rows of one source partition to an operator's partitions, by their offsets.

Sans-io, as :mod:`stateflow.client.delivery`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from stateflow.client.delivery import Delivery, Step, Steps
from stateflow.client.history import History
from stateflow.errors import InvalidArgument
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.layout import Session

T = TypeVar("T")
#: partition → output, see :mod:`stateflow.runtime.output`
Outputs: TypeAlias = dict[int, bytes]
#: most visits in one epoch
_VISITS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """Step that asks for the kept outputs of batches behind ``after``: partition → (batch, output), in order."""

    after: int


FeedStep: TypeAlias = Step | Kept
FeedSteps: TypeAlias = Generator[FeedStep, Any, T]


class _Source:
    """A source of one attempt of a task.

    Args:
        settled: batch up to which outputs are no longer wanted.
        bytes_max: bytes of rows that are kept for partitions that lose them.
    """

    def __init__(
        self, operator: str, source: str, partitions: int, session: Session, settled: int, bytes_max: int
    ) -> None:
        self._history = History(operator, source, partitions, bytes_max)
        self._delivery = Delivery(self._history, session, lambda: None, settled)
        self._settled = settled

    def _open(self) -> FeedSteps[deque[tuple[int, int, bytes]]]:
        """Opens the source. Returns (batch, partition, output) of the kept outputs, by batch."""
        yield from self._delivery.open()
        if self._history.incomplete:  # losses of this epoch come again; Visits detects losses of others
            yield from self._delivery.accept_loss()
        kept: dict[int, list[tuple[int, bytes]]] = yield Kept(self._settled)
        return deque(sorted((batch, p, output) for p, found in kept.items() for batch, output in found))

    def verify(self) -> Steps[None]:
        """Sends again what partitions lost of what this attempt sent.

        Raises PositionGap where those rows are no longer kept: another attempt sends them.
        """
        return self._delivery.verify()

    def _sent(self, rows: BatchRows, number: int, watermark_us: int | None = None) -> Steps[Outputs]:
        return self._delivery.deliver(rows, number, False, watermark_us, dict)


class Feed(_Source):
    """Rows of a source partition that one attempt of a task sends in one epoch.

    Args:
        first: offset of the first row that Spark gives in the epoch.
    """

    def __init__(
        self, operator: str, source: str, partitions: int, session: Session, first: int, bytes_max: int
    ) -> None:
        super().__init__(operator, source, partitions, session, first, bytes_max)
        self._first = self._next = first
        self._kept: deque[tuple[int, int, bytes]] = deque()
        self._contained = np.zeros(0, np.int64)
        self._ahead = 0  # newest batch that any partition has from earlier attempts

    def open(self) -> FeedSteps[None]:
        """Opens the source. Raises SourceRetired."""
        self._kept = yield from self._open()
        self._contained = np.array(self._history.contained, np.int64)
        self._ahead = int(self._contained.max())

    def apply(
        self, offsets: np.ndarray[Any, Any], partitions: np.ndarray[Any, Any], rows: pa.Table
    ) -> FeedSteps[list[Outputs]]:
        """Sends the next rows, with the offset and the partition of each.

        Returns outputs in the order in which they are to be given. Raises InvalidArgument for offsets that do not rise.
        """
        if int(offsets[0]) < self._next or np.any(offsets[1:] <= offsets[:-1]):
            raise InvalidArgument(
                f"offsets of {self._history.source} do not increase: {int(offsets[0])} after {self._next - 1}",
                remedy="name the columns of source partition and offset with position=, and put no shuffle or "
                "union between source and operator",
                operator=self._history.operator,
            )
        number = self._next = int(offsets[-1]) + 1
        outputs: list[Outputs] = []
        while self._kept and self._kept[0][0] <= number:
            _, partition, output = self._kept.popleft()
            outputs.append({partition: output})
        if int(offsets[0]) < self._ahead:
            fresh = offsets >= self._contained[partitions]
            if not fresh.any():
                return outputs
            rows, partitions = rows.filter(pa.array(fresh)), partitions[fresh]
        outputs.append((yield from self._sent(sorted_rows(rows, partitions), number)))
        return outputs


class Visits(_Source):
    """Visits of all partitions by one task: for timers and watermarks, and to mark the end of an epoch.

    A partition with an epoch's mark contains all of the epoch's rows. An older copy that replaced a newer one lacks the
    mark.
    """

    def __init__(
        self, operator: str, source: str, partitions: int, session: Session, epoch: int, bytes_max: int
    ) -> None:
        super().__init__(operator, source, partitions, session, epoch * _VISITS_MAX - 1, bytes_max)
        self._everywhere = BatchRows.visit(range(partitions))
        self._number, self._last = epoch * _VISITS_MAX, (epoch + 1) * _VISITS_MAX - 1

    def open(self) -> FeedSteps[list[Outputs]]:
        """Opens the source. Returns the outputs of an earlier attempt at the same epoch."""
        kept = yield from self._open()
        self._number = max(self._number, max(self._history.contained) + 1)
        return [{partition: output} for _, partition, output in kept]

    @property
    def marked(self) -> int:
        """Batch number of the mark of the epoch before; -1: none."""
        return self._settled

    @property
    def unmarked(self) -> list[int]:
        """Partitions without that mark."""
        return [number for number, batch in enumerate(self._history.contained) if batch < self._settled]

    def visit(self, watermark_us: int | None) -> FeedSteps[list[Outputs]]:
        """Visits all partitions, and returns their outputs.

        Does nothing once an attempt has begun to mark the epoch's end, as the mark has the epoch's last number.
        """
        if self._number > self._last:
            return []
        if self._number == self._last:
            raise InvalidArgument(
                f"an epoch reached the limit of {_VISITS_MAX} visits for its timers",
                remedy="shorten epochs with trigger(realTime=)",
            )
        outputs = yield from self._sent(self._everywhere, self._number, watermark_us)
        self._number += 1
        return [outputs]

    def end(self, watermark_us: int | None) -> FeedSteps[list[Outputs]]:
        """Sends the mark to partitions that no earlier attempt has marked."""
        left = [number for number, batch in enumerate(self._history.contained) if batch < self._last]
        return [(yield from self._sent(BatchRows.visit(left), self._last, watermark_us))] if left else []


def sorted_rows(rows: pa.Table, partitions: np.ndarray[Any, Any]) -> BatchRows:
    """Groups rows by partition, in the order in which they came."""
    order = np.argsort(partitions, kind="stable")
    numbers = partitions[order]
    last = np.flatnonzero(np.r_[numbers[1:] != numbers[:-1], True])
    whole = rows.take(pa.array(order)).combine_chunks().to_batches()[0]
    return BatchRows(rows.schema.serialize().to_pybytes(), whole, numbers[last].tolist(), (last + 1).tolist())
