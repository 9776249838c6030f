"""Real stores, driven by a state machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from stateflow.changes import Mutations
from stateflow.storage import MemoryStore, PartitionStore, RocksEngine


class Backend:
    """One partition's store in a directory of its own. It holds nothing but ``cells``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._root = Path(tempfile.mkdtemp(prefix="stateflow-property-"))
        self._engine = RocksEngine(8 << 20, 8 << 20)
        self._copies = 0
        self._store: PartitionStore
        if kind == "memory":
            self._store = MemoryStore()
        else:
            self._store = self._engine.open(self._root / "0", create=True)

    def get(self, cell: bytes) -> bytes | None:
        return self._store.get(cell)

    def scan(self, prefix: bytes) -> Any:
        return self._store.scan(prefix)

    def scan_from(self, start: bytes, end: bytes) -> Any:
        return self._store.scan_from(start, end)

    def apply(self, mutations: Mutations) -> None:
        self._store.apply(mutations)

    @property
    def cells(self) -> dict[bytes, bytes]:
        return dict(self._store.scan(b""))

    def flush(self) -> None:
        self._store.flush()

    def checkpoint_and_restore(self) -> None:
        """Replaces the store by a copy made from a checkpoint, and closes the original."""
        self._copies += 1
        copy = self._root / str(self._copies)
        self._store.snapshot(copy)
        self._store.close()
        self._store = MemoryStore.open(copy) if self._kind == "memory" else self._engine.open(copy)

    def destroy(self) -> None:
        self._store.close()
        shutil.rmtree(self._root)
