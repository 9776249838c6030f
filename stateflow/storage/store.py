"""Contract of a partition store, to which tests/contract/ holds every implementation, and a store in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgpack

from stateflow.changes import Mutations

_FILE = "store.msgpack"


def prefix_end(prefix: bytes) -> bytes | None:
    """Returns the smallest key greater than every key with ``prefix``; None: there is none (all bytes 0xff)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


class PartitionStore(Protocol):
    """Ordered bytes → bytes. ``apply`` is atomic: after a crash all of it is there, or none."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields entries whose key starts with ``prefix``, in byte order, as of some moment since the call."""
        ...

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields entries of ``[start, end)``, in byte order, as of some moment since the call."""
        ...

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        """Applies clears, then deletes, then puts.

        With ``sync`` the change survives power loss once this returns; without it only a kill -9 of this process.
        """
        ...

    def sync(self) -> None:
        """Makes everything applied survive power loss. No error once closed."""
        ...

    def snapshot(self, directory: Path) -> None:
        """Writes a consistent, openable copy to ``directory``, which must not exist yet."""
        ...

    def flush(self) -> None:
        """Writes buffered changes to files, so that the next ``snapshot`` is faster. No error once closed."""
        ...

    def entries(self) -> int | None:
        """Estimates the number of entries without reading them; None: no estimate is possible.

        Overwritten or deleted entries may still count, and entries that are not in files may be missing.
        """
        ...

    def close(self) -> None: ...


class MemoryStore:
    """A store in a dict, for tests and harnesses."""

    def __init__(self, entries: dict[bytes, bytes] | None = None) -> None:
        self._entries = dict(entries or {})

    @classmethod
    def open(cls, directory: Path) -> MemoryStore:
        """Opens what ``snapshot`` wrote."""
        return cls(msgpack.unpackb((directory / _FILE).read_bytes()))

    def get(self, key: bytes) -> bytes | None:
        return self._entries.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([(key, self._entries[key]) for key in self._range(prefix, prefix_end(prefix))])

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([(key, self._entries[key]) for key in self._range(start, end)])

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        for start, end in mutations.clears:
            for key in self._range(start, end):
                del self._entries[key]
        for key in mutations.deletes:
            self._entries.pop(key, None)
        self._entries.update(mutations.puts)

    def sync(self) -> None:
        pass

    def snapshot(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / _FILE).write_bytes(msgpack.packb(self._entries))

    def flush(self) -> None:
        pass

    def entries(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        pass

    def _range(self, start: bytes, end: bytes | None) -> list[bytes]:
        keys = sorted(self._entries)
        return keys[bisect_left(keys, start) : None if end is None else bisect_left(keys, end)]
