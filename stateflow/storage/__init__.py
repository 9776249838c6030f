"""Storage of a partition's bytes: one store per (operator, partition), in RocksDB, or in memory for tests."""

from stateflow.storage.store import MemoryStore, PartitionStore, RocksEngine, RocksStore

__all__ = ["MemoryStore", "PartitionStore", "RocksEngine", "RocksStore"]
