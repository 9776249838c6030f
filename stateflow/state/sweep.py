"""A walk over the stored cells of states with ttl, a portion at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stateflow.state.cells import range_end
from stateflow.state.spec import CellReader


class Sweep:
    """Walks over cells in portions.

    It remembers where it stopped, not what it saw: cells may come and go between two calls.

    Args:
        heads: address prefixes of the cells to walk over.
    """

    def __init__(self, reader: CellReader, heads: Iterable[bytes]) -> None:
        self._reader = reader
        self._heads = sorted(heads)
        self._seen = b""

    def add(self, head: bytes) -> None:
        self._heads = sorted({*self._heads, head})

    def next(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Returns up to ``limit`` cells after those of the last call. Fewer: this is the end; the next call starts
        over."""
        found: list[tuple[bytes, bytes]] = []
        for head in self._heads:
            if self._seen >= range_end(head):
                continue
            for cell in self._behind(head):
                if len(found) >= limit:
                    self._seen = found[-1][0] if found else self._seen
                    return found
                found.append(cell)
        self._seen = b""
        return found

    def _behind(self, head: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the cells under ``head`` that were not seen in this round."""
        seen = self._seen
        if not seen.startswith(head):
            yield from self._reader.scan(head)
            return
        scan_from = getattr(self._reader, "scan_from", None)
        if scan_from is not None:
            yield from scan_from(seen + b"\x00", range_end(head))
            return
        for cell in self._reader.scan(head):
            if cell[0] > seen:
                yield cell
