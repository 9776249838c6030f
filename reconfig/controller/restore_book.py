"""Restores, as the ledger's records have them: those of one command are a batch of the board, whose entities are its
partitions; part of :mod:`reconfig.controller.cluster_state`, which knows what follows for owners and epochs."""

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
    """``records``: of what is under way, by item. ``batches``: those under way, by restore id. ``failed``: whose owner
    may have stopped for them. ``cancelled``: ids; what has not begun of them does not."""

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
        """They begin when they are planned."""
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
        """The record it ends, what the one of its end holds, and what follows: with the last one its batch ends."""
        record, batch = self.records[planned.item_id][1], self.batches.get(planned.restore_id)
        others = any(other.restore_id == planned.restore_id and other != planned for other in self.under_way)
        over: list[Entry] = []
        if batch is not None and not others:
            cancelled = planned.restore_id in self.cancelled
            over = batch.to(BatchStatus.CANCELLED if cancelled else BatchStatus.DONE, now_us)
        return record, ended(record, payload, state), over

    def called_off(self, restore_id: str) -> list[Entry]:
        """Nothing where it is called off already."""
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
