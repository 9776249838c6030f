"""The contract of a partition store; tests/contract/ holds every implementation to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from stateflow.changes import Mutations


def prefix_end(prefix: bytes) -> bytes | None:
    """Smallest key greater than every key with ``prefix``; None when there is none (all bytes 0xff)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


class PartitionStore(Protocol):
    """Ordered bytes → bytes. ``apply`` is atomic: after a crash all of it is there, or nothing."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries whose key starts with ``prefix``, in byte order, as of some moment since the call."""
        ...

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries of ``[start, end)``, in byte order, as of some moment since the call."""
        ...

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        """Clears, then deletes, then puts. With ``sync`` it survives power loss once this returns,
        without it the end of this process (kill -9) only."""
        ...

    def sync(self) -> None:
        """Everything applied survives power loss once this returns. No error once closed."""
        ...

    def snapshot(self, directory: Path) -> None:
        """A consistent, openable copy in ``directory``, which must not exist yet."""
        ...

    def flush(self) -> None:
        """Get buffered writes into files, so that the next ``snapshot`` has less to do. No error once closed."""
        ...

    def entries(self) -> int | None:
        """How many there are, estimated, without reading them; None where that cannot be told. What was overwritten or
        deleted may count yet, and what is not in files may not."""
        ...

    def close(self) -> None: ...
