"""Kills, full disks and bit rot: the newest valid checkpoint restores to exactly the state at its position."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stateflow.checkpoint import CheckpointStore, Codec
from stateflow.errors import CheckpointCorrupt, CheckpointMissing, Unavailable
from tests.integration import checkpoint_worker as w
from tests.integration.mounts import Mount

pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("action", "how"),
    [(action, how) for action in ("take", "gc", "restore") for how in ("before", "after")] + [("restore", "local")],
)
def test_killed_at_every_step(action: str, how: str, tmp_path: Path) -> None:
    """A kill before or after any operation of the store, or at any step of the replica, leaves a usable checkpoint."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.checkpoint_worker", action, how, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 7, "steps"


def test_a_flipped_bit_in_any_object(tmp_path: Path) -> None:
    """A checkpoint with a flipped bit in an object is skipped, or the bit does not matter; the restored state is
    right."""
    w.prepare(tmp_path)
    store = w.store_at(tmp_path)
    seed = 20130101
    rng = random.Random(seed)
    for number, stored in enumerate(sorted(store.objects.list(""), key=lambda each: each.name)):
        path = tmp_path / "store" / stored.name
        whole = path.read_bytes()
        if not whole:
            continue
        spoiled = bytearray(whole)
        spoiled[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoiled)
        node = w.node_at(tmp_path / f"restored-{number}", "b")
        try:
            node.restorer.prepare(w.SPEC, w.P, "r", store, None)
        except CheckpointMissing:  # the object is part of all checkpoints
            assert stored.name.startswith("blobs/")
        except CheckpointCorrupt:
            assert stored.name == "STORE"
        else:
            restored = node.restorer.own(w.P, "r", 9)
            assert w.state_of(node) == w.expected(restored.positions["s"]), f"seed {seed}, {stored.name}"
        node.close()
        path.write_bytes(whole)
    assert w.check_newest(tmp_path, 2, "end") == 2


def test_a_full_store_keeps_what_it_has_and_says_what_to_do(mount: Mount, tmp_path: Path) -> None:
    full_disk = mount("small", 3 << 20)
    w.prepare(tmp_path)
    (full_disk / "store").mkdir()
    store = CheckpointStore(str(full_disk / "store"), codec=Codec())
    node = w.node_at(tmp_path)
    assert node.checkpointer.take(w.P, store) is not None
    (full_disk / "ballast").write_bytes(bytes(shutil.disk_usage(full_disk).free - 8192))
    w.send(node, 4)
    with pytest.raises(Unavailable, match="No space left") as caught:
        node.checkpointer.take(w.P, store)
    assert "gc" in caught.value.remedy
    assert next(store.newest(w.P)).positions == {"s": 3}
    assert w.state_of(node) == w.expected(4), "the stream goes on"
    w.send(node, 5)
    (full_disk / "ballast").unlink()
    assert node.checkpointer.take(w.P, store) is not None
    assert next(store.newest(w.P)).positions == {"s": 5}
    node.close()


def test_a_full_data_directory_refuses_a_restore_and_serves_on(mount: Mount, tmp_path: Path) -> None:
    full_disk = mount("small", 3 << 20)
    w.prepare(tmp_path)
    store = w.store_at(tmp_path)
    node = w.node_at(full_disk, "b")
    (full_disk / "ballast").write_bytes(bytes(max(0, shutil.disk_usage(full_disk).free - 4096)))
    with pytest.raises(Unavailable, match="0 are free"):
        node.restorer.prepare(w.SPEC, w.P, "r", store, None)
    (full_disk / "ballast").unlink()
    node.restorer.prepare(w.SPEC, w.P, "r", store, None)
    node.restorer.own(w.P, "r", 2)
    assert w.state_of(node) == w.expected(2)
    node.close()
