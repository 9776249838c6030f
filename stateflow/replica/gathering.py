"""Shares that come one by one, put together for being applied together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from stateflow.errors import StateflowError
from stateflow.runtime.arrow import BatchReader, read_schema
from stateflow.runtime.positions import Share
from stateflow.runtime.shares import Part, Shares, digest_of


def gathered(shares: Sequence[Share]) -> tuple[Shares, list[int], dict[int, StateflowError]]:
    """(those that can be read, the place of each, what is wrong with the others by place). Args: shares: one at least,
    whole, of one batch."""
    first = shares[0]
    parts: list[Part] = []
    rows: list[pa.RecordBatch] = []
    places: list[int] = []
    wrong: dict[int, StateflowError] = {}
    reader: BatchReader | None = None
    reached = 0
    for place, share in enumerate(shares):
        start = reached
        if share.rows:
            try:
                reader = reader or BatchReader(read_schema(share.schema))
                rows.append(reader.read(share.rows))
            except StateflowError as error:
                wrong[place] = error
                continue
            reached += rows[-1].num_rows
        digest = digest_of(share.batch, share.schema, share.rows)
        known = share.batch.known
        parts.append(Part(share.partition.partition, share.epoch, start, reached, share.after, digest, known))
        places.append(place)
    whole = pa.concat_batches(rows) if len(rows) > 1 else rows[0] if rows else None
    batch = replace(first.batch, known=b"")
    return Shares(first.partition.operator, batch, first.schema, whole, parts), places, wrong
