"""Helpers of integration tests: waiting for conditions, and a plain model of the operator under test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stateflow.client import Cluster, StreamClient
from stateflow.errors import StateflowError, Unavailable
from stateflow.testing import LocalCluster

if TYPE_CHECKING:
    from typer.testing import Result

T = TypeVar("T")
Text = TypeVar("Text", str, bytes)
POLL_S = 0.02
#: factor of this machine, as tests/gate.py measured it
SLOWNESS = float(os.environ.get("STATEFLOW_TEST_SLOWNESS", "1"))


def eventually(ask: Callable[[], T], what: str, timeout_s: float = 120.0) -> T:
    """Returns the first true answer of ``ask``; Unavailable counts as not yet. Raises AssertionError.

    ``timeout_s``: on a quiet machine; multiplied by ``SLOWNESS``.
    """
    timeout_s *= SLOWNESS
    deadline = time.monotonic() + timeout_s
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = ask()
        except Unavailable as error:
            last = error
        else:
            if last:
                return last
        time.sleep(POLL_S)
    raise AssertionError(f"{what}: not within {timeout_s} s, last {last!r}")


@contextlib.contextmanager
def ending(process: subprocess.Popen[Text]) -> Iterator[subprocess.Popen[Text]]:
    """Kills a process at the end of the block, also where the test fails."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def command(*words: str) -> Result:
    """Runs a command in this process; a process of its own would take seconds to start."""
    from typer.testing import CliRunner  # programs that tests start import this module, and need no commands

    from stateflow.cli.app import app

    return CliRunner().invoke(app, list(words))


def told(*words: str, status: int = 0) -> Any:
    """Runs a command with ``--json``. Returns its answer."""
    result = command(*words, "--json")
    assert result.exit_code == status, (result.stdout, result.stderr)
    return json.loads(result.stdout)


class Model:
    """Expected state and outputs of ``Tally``."""

    def __init__(self) -> None:
        self.n: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.by_tag: dict[tuple[str, str], int] = {}

    def apply(self, rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
        outputs = []
        for row in rows:
            key, value = row["k"], row["v"]
            self.n[key] = self.n.get(key, 0) + 1
            self.total[key] = self.total.get(key, 0) + value
            tag = key, f"t{value % 5}"
            self.by_tag[tag] = self.by_tag.get(tag, 0) + value
            outputs.append((key, self.n[key], self.total[key]))
        return sorted(outputs)

    def check(self, cluster: Cluster, operator: str = "Tally", keys: str = "") -> None:
        """Compares every state, as read from the cluster, with the model. ``keys``: only keys with this prefix."""
        assert read(cluster, operator, "n", keys) == {(key, None): n for key, n in self.n.items()}
        assert read(cluster, operator, "total", keys) == {(key, None): total for key, total in self.total.items()}
        assert read(cluster, operator, "by_tag", keys) == self.by_tag
        assert set(read(cluster, operator, "tags", keys)) == set(self.by_tag)


def read(cluster: Cluster, operator: str, state: str, keys: str = "") -> dict[tuple[Any, Any], Any]:
    rows = cluster.read_state(operator, state).to_pylist()
    found = {(r["key"], r["map_key"]): r["value"] for r in rows if str(r["key"]).startswith(keys)}
    assert len(found) == sum(str(r["key"]).startswith(keys) for r in rows), "an entry in two partitions"
    return found


def outputs(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    return sorted((row["k"], row["n"], row["total"]) for row in rows)


def rows_of(prefix: str, batch: int, count: int = 40, keys: int = 20) -> list[dict[str, Any]]:
    return [{"k": f"{prefix}{(batch * 7 + i) % keys}", "v": batch * count + i} for i in range(count)]


class Streaming:
    """A thread that streams batches into ``Tally`` and into the model until it is stopped."""

    def __init__(self, stream: StreamClient, prefix: str) -> None:
        self.stream = stream
        self.model = Model()
        self.batches = 0
        self.longest_s = 0.0  # longest time of a batch
        self.error: BaseException | None = None
        self._prefix = prefix
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                rows = rows_of(self._prefix, self.batches)
                started = time.monotonic()
                assert outputs(self.stream.send(rows)) == self.model.apply(rows)
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                self.batches += 1
        except BaseException as error:  # noqa: BLE001 - raised again by stop()
            self.error = error

    def __enter__(self) -> Streaming:
        self._thread.start()
        return self

    def more(self, batches: int = 3) -> None:
        """Waits until so many further batches are acknowledged."""
        goal = self.batches + batches
        eventually(lambda: self.error or self.batches >= goal, f"{batches} more batches")
        if self.error:
            raise self.error

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join(90)
        if self.error and kind is None:
            raise self.error
        assert not self._thread.is_alive(), "the stream hangs"


def check_owners(local: LocalCluster, operator: str = "Tally") -> None:
    """Checks that each partition has exactly one owner, which is the one that the controller names."""
    cluster = local.cluster
    status = cluster.status()
    (deployed,) = [o for o in status.operators if o.name == operator]
    held: dict[int, list[tuple[str, int]]] = {p: [] for p in range(deployed.partitions)}
    for replica in status.replicas:
        for view in cluster.replica_stats(replica.address).partitions:
            if view.operator == operator and view.state in ("OWNED", "FENCING"):
                held[view.partition].append((replica.name, view.epoch))
    named = {p: [(owner, deployed.epochs[p])] for p, owner in enumerate(deployed.owners)}
    assert held == named


def settled(local: LocalCluster) -> bool:
    return all(r.state != "RUNNING" for r in local.cluster.status().reconfigurations)


def wait_alive(local: LocalCluster, *names: str) -> None:
    def alive() -> bool:
        return set(names) <= {r.name for r in local.cluster.status().replicas if r.alive}

    eventually(alive, f"{names} alive")


def manifests(directory: Path, operator: str) -> list[Path]:
    return sorted((directory / "checkpoints" / "manifests" / operator).rglob("*.json"))


def flip_byte(file: Path, at: float) -> None:
    """Inverts one byte of a file. ``at``: its place, from 0 to 1."""
    data = bytearray(file.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 0xFF
    file.write_bytes(data)


def damage_table(local: LocalCluster, owner: str, partition: int) -> None:
    """Damages a byte near the beginning of the largest SST file of Tally's partition."""
    files = (local.data_dir / owner / "operators" / "Tally" / f"p{partition:05d}").rglob("*.sst")
    flip_byte(max(files, key=lambda path: path.stat().st_size), 0.02)


def one_line(error: StateflowError) -> str:
    line = str(error)
    assert len(line.splitlines()) == 1, line
    assert line.startswith(f"{error.code}: ")
    return line
