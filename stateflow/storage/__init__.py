"""Where a partition's bytes live. One store per (operator, partition); RocksDB, or memory for tests."""

from stateflow.storage.memory import MemoryStore
from stateflow.storage.rocks import RocksEngine, RocksStore
from stateflow.storage.store import PartitionStore

__all__ = ["MemoryStore", "PartitionStore", "RocksEngine", "RocksStore"]
