"""A store in a dict, for tests and harnesses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import msgpack

from stateflow.changes import Mutations
from stateflow.storage.store import prefix_end

_FILE = "store.msgpack"


class MemoryStore:
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
