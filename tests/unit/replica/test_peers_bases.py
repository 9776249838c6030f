"""Sources of base files: leftovers of an earlier attempt do no harm."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, ManifestFile
from stateflow.clock import SYSTEM_CLOCK
from stateflow.partition.change_feed import BaseFile
from stateflow.partition.environment import RateLimit
from stateflow.replica.peers import Store
from stateflow.types import PartitionId

DATA = b"rows" * 1000
DIGEST = xxhash.xxh3_128_hexdigest(DATA)


def test_a_file_comes_from_the_store_though_a_process_was_killed_while_it_came(tmp_path: Path) -> None:
    """A file that a killed process had begun is fetched anew.

    Each later attempt used to take it for a bug in stateflow.
    """
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "000001.sst").write_bytes(DATA)
    store = CheckpointStore(str(tmp_path / "store"), codec=Codec())
    store.check(first_use=True)
    partition = PartitionId("Op", 0)
    manifest = Manifest(
        operator="Op",
        partition=0,
        epoch=1,
        sequence=1,
        digest="d" * 32,
        positions={},
        created_us=1,
        replica="a",
        files=(ManifestFile("000001.sst", len(DATA), DIGEST),),
    )
    store.save(manifest, tmp_path / "base")
    path = tmp_path / f"{DIGEST}.part"
    left = tmp_path / f"{DIGEST}.part.stored"
    left.mkdir()
    (left / "000001.sst").write_bytes(b"half")

    async def run() -> bool:
        with ThreadPoolExecutor(1) as executor:
            source = Store(store, partition, executor, RateLimit(0.0), SYSTEM_CLOCK)
            return await source.fetch(BaseFile("000001.sst", len(DATA), DIGEST), path)

    assert asyncio.run(run())
    assert path.read_bytes() == DATA
    assert not left.exists()
