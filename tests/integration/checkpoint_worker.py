"""Kill -9 at every step: a process of its own that forks one child per step and checks what each left behind.

A child is killed before or after its n-th store operation, or n-th local step. Another child does the check, so that no
database is ever open in the process that forks.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - pyarrow imports it at first use: each of the children would
import pyarrow as pa
import pytest

from stateflow.checkpoint import CheckpointStore, Codec, Retention, collect
from stateflow.checkpoint.backend import Backend, LocalBackend
from stateflow.errors import StaleCheckpoint
from stateflow.operator.operator import describe
from stateflow.partition.checkpoints import verify
from stateflow.partition.environment import Environment
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.storage import RocksEngine
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.contract.backends import Killing
from tests.unit.operators import Count

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
P = PartitionId("Op", 0)
SPEC = describe(Count, 1, "Op")
#: no reserve, because the disks of some tests are smaller than the default one
SETTINGS = ReplicaSettings(block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20, disk_reserve_bytes=0)


def node_at(root: Path, name: str = "a") -> ReplicaNode:
    return ReplicaNode(ReplicaInfo(name, "site", f"{name}:1"), root / name, SETTINGS)


def store_at(root: Path, wrap: Callable[[Backend], Backend] = lambda backend: backend) -> CheckpointStore:
    backend = LocalBackend(root / "store")
    return CheckpointStore(str(root / "store"), codec=Codec(), backend=wrap(backend))


def rows(batch: int) -> list[dict[str, Any]]:
    return [{"k": f"k{n % 7}", "v": batch * 100 + n} for n in range(20)]


def send(node: ReplicaNode, batch: int) -> None:
    data = pa.RecordBatch.from_pylist(rows(batch), schema=SCHEMA).serialize().to_pybytes()
    epoch = node.lifecycle(P).epoch
    assert isinstance(apply_to(node, P, epoch, Batch("s", batch), SCHEMA.serialize().to_pybytes(), data), Applied)


def expected(last_batch: int) -> dict[str, int]:
    totals: dict[str, int] = {}
    for batch in range(last_batch + 1):
        for row in rows(batch):
            totals[row["k"]] = totals.get(row["k"], 0) + row["v"]
    return totals


def state_of(node: ReplicaNode) -> dict[Any, Any]:
    return {key: value for key, _, value in node.reader.scan(P, "total")}


def check_newest(root: Path, at_least: int, folder: str) -> int:
    """Checks that the newest valid checkpoint is proved and restores to exactly the state at its position.

    Returns the position.
    """
    store = store_at(root)
    manifest = next(store.newest(P))
    found = verify(store, manifest)
    assert not found.error, found.error
    assert found.proved
    last = manifest.positions["s"]
    assert last >= at_least
    node = node_at(root / folder, "checker")
    node.restorer.prepare(SPEC, P, "check", store, None)
    node.restorer.own(P, "check", 1)
    assert state_of(node) == expected(last)
    node.close()
    return last


# -- what children do -----------------------------------------------------------------------------------------


def prepare(root: Path) -> None:
    node, store = node_at(root), store_at(root)
    node.create(SPEC, [0], 1)
    for batch in range(3):
        send(node, batch)
        node.checkpointer.take(P, store)
    send(node, 3)
    node.close()


def take(root: Path, wrap: Callable[[Backend], Backend]) -> None:
    node = node_at(root)
    node.checkpointer.take(P, store_at(root, wrap))
    node.close()


def after_take(root: Path) -> None:
    check_newest(root, 2, "one")
    node = node_at(root)
    assert state_of(node) == expected(3), "the stream does not notice"
    send(node, 4)
    node.checkpointer.take(P, store_at(root))
    node.close()
    assert check_newest(root, 4, "two") == 4


def gc(root: Path, wrap: Callable[[Backend], Backend]) -> None:
    collect(store_at(root, wrap), Retention(1))


def after_gc(root: Path) -> None:
    assert check_newest(root, 2, "one") == 2
    report = collect(store_at(root), Retention(1))
    assert report.checkpoints_kept == 1
    assert check_newest(root, 2, "two") == 2
    take(root, lambda backend: backend)
    assert check_newest(root, 3, "three") == 3


def restore(root: Path, wrap: Callable[[Backend], Backend]) -> None:
    node, store = node_at(root, "b"), store_at(root, wrap)
    node.restorer.prepare(SPEC, P, "r1", store, store)
    node.restorer.own(P, "r1", 2)
    node.close()


def after_restore(root: Path) -> None:
    node = node_at(root, "b")
    if node.lifecycle(P).state is State.OWNED:
        assert state_of(node) == expected(2)
    else:
        assert node.lifecycle(P).state is State.ABSENT
    store = store_at(root)
    node.restorer.prepare(SPEC, P, "r1", store, store)
    owned = node.restorer.own(P, "r1", 2)
    assert owned.positions == {"s": 2}
    assert state_of(node) == expected(2)
    send(node, 3)
    node.checkpointer.take(P, store)
    node.close()
    zombie = node_at(root)
    with pytest.raises(StaleCheckpoint):
        zombie.checkpointer.take(P, store)
    zombie.close()
    assert next(store.newest(P)).epoch == node.lifecycle(P).epoch
    assert check_newest(root, 3, "one") == 3


ACTIONS = {"take": (take, after_take), "gc": (gc, after_gc), "restore": (restore, after_restore)}


def kill_at_local_step(at: int) -> None:
    """Makes this process kill itself at its ``at``-th local step: before or after an open, a sync or a removal."""
    left = at

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            for _ in range(2):  # before the work and after it
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if _ == 0:
                    result = work(*arguments, **named)
            return result

        return run

    RocksEngine.open = counted(RocksEngine.open)  # type: ignore[method-assign]
    Environment.sync = counted(Environment.sync)  # type: ignore[method-assign]
    Path.unlink = counted(Path.unlink)  # type: ignore[method-assign]
    Environment.remove_tree = counted(Environment.remove_tree)  # type: ignore[method-assign]


# -- the process that forks -----------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Runs ``work`` in a forked child and returns its exit status; negative: the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent sees the status
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def doomed(action: str, how: str, place: Path, at: int) -> None:
    if how == "local":
        kill_at_local_step(at)
        ACTIONS[action][0](place, lambda backend: backend)
    else:
        ACTIONS[action][0](place, lambda backend: Killing(backend, at, after=how == "after"))


def main(action: str, how: str, root: Path) -> int:
    assert in_child(partial(prepare, root / "before")) == 0
    for killed in range(200):
        place = root / str(killed)
        shutil.copytree(root / "before", place)
        status = in_child(partial(doomed, action, how, place, killed + 1))
        assert status in (0, -signal.SIGKILL), status
        assert in_child(partial(ACTIONS[action][1], place)) == 0, f"killed {how} step {killed + 1} of {action}"
        if status == 0:
            print(killed)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
