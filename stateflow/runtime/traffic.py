"""Traffic of a partition, for placement: how much came, and from where. Counted, and forgotten with the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from stateflow.types import NAME

#: sites that are counted separately; rows of other sites count like rows without one
SITES_MAX = 64


@dataclass(slots=True)
class Traffic:
    """Rows that came for a partition: ``rows`` since this process first served it, ``bytes`` of them as Arrow has them,
    and ``origins``, how many named which site. The numbers only grow: two readings give a rate.
    """

    rows: int = 0
    bytes: float = 0.0
    origins: dict[str, int] = field(default_factory=dict)

    def came(self, rows: int, row_bytes: float, site: str) -> None:
        """Counts rows of ``row_bytes`` each. ``site``: their origin; empty: unknown, or each row names its own."""
        self.rows += rows
        self.bytes += rows * row_bytes
        if site:
            self._add(site, rows)

    def came_from(self, origins: Mapping[str, int]) -> None:
        """Counts how many of the rows that came named which site."""
        for site, rows in origins.items():
            self._add(site, rows)

    def _add(self, site: str, rows: int) -> None:
        if site in self.origins or len(self.origins) < SITES_MAX:
            self.origins[site] = self.origins.get(site, 0) + rows


class Origins:
    """Sites of rows that came together, as one of their columns names them. The column is read once, and counted part
    by part. A value that is no site's name does not count, nor does a column that is missing or not text.
    """

    def __init__(self, rows: pa.RecordBatch, column: str) -> None:
        index = rows.schema.get_field_index(column)
        self._sites: list[str] = []
        if index < 0 or not _is_text(rows.schema.field(index).type):
            return
        encoded = rows.column(index).dictionary_encode()
        values = len(encoded.dictionary)
        # a column that names no sites may have as many values as rows: the first ones are enough to look at
        number_of = np.full(values + 1, SITES_MAX, np.int64)
        for place, site in enumerate(encoded.dictionary[:SITES_MAX].to_pylist()):
            if NAME.holds(site):
                number_of[place] = len(self._sites)
                self._sites.append(site)
        self._numbers = number_of[encoded.indices.fill_null(values).to_numpy(zero_copy_only=False)]

    def of(self, start: int, stop: int) -> dict[str, int]:
        """Returns site → number of the rows from ``start`` to before ``stop`` that name it, never 0."""
        if not self._sites:
            return {}
        counts = np.bincount(self._numbers[start:stop], minlength=len(self._sites))[: len(self._sites)].tolist()
        return {site: count for site, count in zip(self._sites, counts, strict=True) if count}


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
