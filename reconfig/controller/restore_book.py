"""Restores, folded from the ledger's records; part of :mod:`reconfig.controller.cluster_state`.

The restores of one command are a batch of the board, whose entities are its partitions. The cluster's state knows what
follows for owners and epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reconfig.controller.batch_book import Batch, begun_batch, ended, entity, entry, taken_up
from reconfig.work import PlannedRestore, restore_of
from stateflow.ledger import Entry, Record, RecordState
from stateflow.ledger.batches import BatchStatus


@dataclass(slots=True)
class RestoreBook:
    """Restores under way, and failed ones.

    ``records``: newest record of each restore under way, by item. ``batches``: batches under way, by restore id.
    ``failed``: failed restores for which the owner may have stopped. ``cancelled``: ids of cancelled restores, whose
    waiting partitions do not begin.
    """

    records: dict[str, tuple[PlannedRestore, Record]] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    failed: list[PlannedRestore] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    @property
    def under_way(self) -> list[PlannedRestore]:
        return [planned for planned, _ in self.records.values()]

    # -- what is written ----------------------------------------------------------------------------------

    @staticmethod
    def planned(restores: Iterable[PlannedRestore], now_us: int) -> list[Entry]:
        """Returns the entries that plan restores. They begin at the same time."""
        entries: list[Entry] = []
        for planned in restores:
            batch = f"restores/{planned.restore_id}"
            if not entries:
                entries += begun_batch(batch, planned.partition.operator, "restore", now_us)
            entries += [new := entity(batch, planned), taken_up(new)]
        return entries

    def ends(
        self, planned: PlannedRestore, state: RecordState, payload: Mapping[str, Any], now_us: int
    ) -> tuple[Record, dict[str, Any], list[Entry]]:
        """Returns how a restore ends: the record it follows, its payload, and further entries.

        With the last restore of a batch, those entries end the batch.
        """
        record, batch = self.records[planned.item_id][1], self.batches.get(planned.restore_id)
        others = any(other.restore_id == planned.restore_id and other != planned for other in self.under_way)
        over: list[Entry] = []
        if batch is not None and not others:
            cancelled = planned.restore_id in self.cancelled
            over = batch.to(BatchStatus.CANCELLED if cancelled else BatchStatus.DONE, now_us)
        return record, ended(record, payload, state), over

    def called_off(self, restore_id: str) -> list[Entry]:
        """Returns the entry that cancels a restore; empty: it is cancelled already."""
        if restore_id in self.cancelled:
            return []
        return [entry(f"unrestore/{restore_id}", RecordState.NEW, None, {})]

    # -- what is read -------------------------------------------------------------------------------------

    def fold_batch(self, restore_id: str, record: Record) -> None:
        batch = self.batches.setdefault(restore_id, Batch(record, {}))
        batch.fold(record)
        if batch.status in (BatchStatus.DONE, BatchStatus.CANCELLED):
            del self.batches[restore_id]
            self.cancelled.discard(restore_id)

    def fold_one(self, record: Record) -> PlannedRestore:
        match record.state:
            case RecordState.NEW:
                planned = restore_of(record.item_id, record.payload)
                self.records[record.item_id] = planned, record
            case RecordState.PROCESSING:
                planned = self.records[record.item_id][0]
                self.records[record.item_id] = planned, record
            case RecordState.PROCESSED | RecordState.FAILED:
                planned = self.records.pop(record.item_id)[0]
                if record.state is RecordState.FAILED and record.payload.get("granted"):
                    self.failed.append(planned)
        return planned

    def fold_called_off(self, restore_id: str, _: Record) -> None:
        if restore_id in self.batches:
            self.cancelled.add(restore_id)
