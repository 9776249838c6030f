"""Sources of base files: leftovers of an earlier attempt do no harm, nor does a store that cannot be read."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from stateflow.checkpoint import CheckpointStore, Codec, Manifest, ManifestFile, catalog
from stateflow.checkpoint.backend import LocalBackend
from stateflow.clock import SYSTEM_CLOCK
from stateflow.partition.change_feed import BaseFile
from stateflow.partition.environment import RateLimit
from stateflow.replica.peers import TELLING_BYTES, Nearest, Store
from tests.contract.backends import Counting

DATA = b"rows" * 1000
DIGEST = xxhash.xxh3_128_hexdigest(DATA)
MANIFEST = Manifest(
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


def test_a_file_comes_from_the_store_though_a_process_was_killed_while_it_came(tmp_path: Path) -> None:
    """A file that a killed process had begun is fetched anew.

    Each later attempt used to take it for a bug in stateflow.
    """
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "000001.sst").write_bytes(DATA)
    store = CheckpointStore(str(tmp_path / "store"), codec=Codec())
    store.save(MANIFEST, tmp_path / "base")
    path = tmp_path / f"{DIGEST}.part"
    left = tmp_path / f"{DIGEST}.part.stored"
    left.mkdir()
    (left / "000001.sst").write_bytes(b"half")

    async def run() -> bool:
        with ThreadPoolExecutor(1) as executor:
            source = Store(store, MANIFEST.id, executor, RateLimit(0.0), SYSTEM_CLOCK)
            return await source.fetch(BaseFile("000001.sst", len(DATA), DIGEST), path)

    assert asyncio.run(run())
    assert path.read_bytes() == DATA
    assert not left.exists()


class Source:
    """The source replica, which has every file."""

    name, waited_s = "peer", 0.0

    async def fetch(self, file: BaseFile, path: Path) -> bool:
        path.write_bytes(DATA)
        return True


@pytest.mark.parametrize("damage", ["wrong_key", "checkpoint_newer"])
def test_what_cannot_be_read_in_the_store_comes_from_the_source_replica(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint with another key or of a later version used to fail the move, though the source has every file."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "000001.sst").write_bytes(DATA)
    backend = Counting(LocalBackend(tmp_path / "store"))
    with monkeypatch.context() as later:
        if damage == "checkpoint_newer":
            later.setattr(catalog, "FORMAT", catalog.FORMAT + 1)
        codec = Codec(key=b"k" * 32 if damage == "wrong_key" else None)
        CheckpointStore("x", backend=backend, codec=codec).save(MANIFEST, tmp_path / "base")
    backend.done.clear()

    async def run() -> list[str]:
        with ThreadPoolExecutor(1) as executor:
            store = CheckpointStore("x", backend=backend, codec=Codec())
            source = Store(store, MANIFEST.id, executor, RateLimit(0.0), SYSTEM_CLOCK)
            nearest = Nearest([source, Source()], SYSTEM_CLOCK)
            files = [BaseFile(f"00000{number}.sst", TELLING_BYTES, DIGEST) for number in range(3)]
            return [await nearest.fetch(file, tmp_path / file.name) for file in files]

    assert asyncio.run(run()) == ["peer"] * 3
    assert [record.getMessage().partition(f"{damage}: ")[0] for record in caplog.records] == [
        "base file 000000.sst not usable from the checkpoint store, fetching it from the source replica: "
    ]
    assert [operation for operation, name in backend.done if name.startswith("manifests/")] == ["list", "read"]
