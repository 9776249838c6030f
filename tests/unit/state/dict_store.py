"""The simplest possible store."""

from __future__ import annotations

from collections.abc import Iterator

from stateflow.changes import Mutations


class DictStore:
    """A store of cells in a dict that counts its calls."""

    def __init__(self) -> None:
        self.cells: dict[bytes, bytes] = {}
        self.gets = 0
        self.scans = 0

    def get(self, cell: bytes) -> bytes | None:
        self.gets += 1
        return self.cells.get(cell)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.scans += 1
        for cell in sorted(self.cells):
            if cell.startswith(prefix):
                yield cell, self.cells[cell]

    def apply(self, mutations: Mutations) -> None:
        for start, end in mutations.clears:
            for cell in [cell for cell in self.cells if start <= cell < end]:
                del self.cells[cell]
        for cell in mutations.deletes:
            self.cells.pop(cell, None)
        self.cells.update(mutations.puts)

    def asked(self) -> tuple[int, int]:
        """Returns (gets, scans) since the last call."""
        counts = self.gets, self.scans
        self.gets = self.scans = 0
        return counts
