"""C1: cost of durability: latency during a checkpoint, bytes of an incremental checkpoint, and speed of restoring.

*Stall.* Batches are sent open loop, at 25 % of the measured saturation of one replica. The latency of a batch counts
from the time at which the batch was scheduled. Latency is measured without a checkpoint, and then while a complete
checkpoint runs (snapshot, hashes, state digest, upload).

*Increments.* In each round, 1 % of the keys get a new payload, and then a checkpoint is taken. The keys are chosen
anew in each round, or are always the same. There are enough rounds to include compactions.

*Restoring.* Partitions are restored (fetched, proved, opened and owned). The speed is compared with that of copying and
syncing the same files.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
import zstandard

from benchmarks.operators import Keep
from benchmarks.record import Correctness, Record, Target, ratio, spread
from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.errors import StateflowError
from stateflow.operator.operator import describe
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.checkpoints import RESTORES_AT_ONCE
from stateflow.settings import ReplicaSettings
from stateflow.testing import LocalCluster
from stateflow.types import PartitionId, ReplicaInfo

PARTITIONS = 8
PAYLOAD_BYTES = 1000
LOAD = 0.25
SCHEMA = pa.schema([("k", pa.int64()), ("payload", pa.binary())])
BATCH_ROWS = 100
LOAD_ROWS = 4000
STALL_MS_MAX, INCREMENT_MAX, RESTORE_MIN = 10.0, 0.05, 0.7


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None) -> Record:
    keys = (128 << 20) // PAYLOAD_BYTES if quick else (1 << 30) // PAYLOAD_BYTES
    repeats, increments, baseline_s = (2, 40, 5.0) if quick else (5, 60, 20.0)
    failures: list[str] = []
    wanted = set(only or ("stall", "increments", "restore", "compression"))
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as folder:
        bench = _Bench(Path(folder), keys, seed)
        with bench.cluster:
            bench.load()
            figures: dict[str, Any] = {}
            if "stall" in wanted:
                try:
                    figures["stall"] = bench.stall(repeats, baseline_s)
                except (StateflowError, RuntimeError) as error:
                    failures.append(f"stall: {error}")
            if "increments" in wanted:
                figures["increments"] = {how: bench.increments(how, increments) for how in ("uniform", "skewed")}
            bench.local.checkpoint("Keep")
        if "restore" in wanted:
            figures["restore"] = bench.restore(repeats)
        if "compression" in wanted:
            figures["compression"] = bench.compression()
        lost, more = bench.compare()
    added = figures.get("stall", {}).get("added_p99_ms", {}).get("median")
    restoring = figures.get("restore", {}).get("ratio", {}).get("median")
    targets = [Target("p99 stall over the baseline, ms", added, STALL_MS_MAX, "at_most")]
    for how in ("uniform", "skewed"):
        mean = figures.get("increments", {}).get(how, {}).get("mean")
        targets.append(Target(f"bytes for 1 % changed, {how}, share of full", mean, INCREMENT_MAX, "at_most"))
    targets.append(Target("restore MB/s against plain copy", restoring, RESTORE_MIN, "at_least"))
    settings = {
        "quick": quick,
        "keys": keys,
        "payload_bytes": PAYLOAD_BYTES,
        "partitions": PARTITIONS,
        "load": LOAD,
        "repeats": repeats,
        "increments": increments,
    }
    # the operator has no event time, so no row can be late
    correctness = Correctness(lost=lost, duplicated=more, late=0, state_equal=lost == more == 0)
    return Record(experiment, figures, targets, correctness, settings, seed, failures)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Bench:
    def __init__(self, root: Path, keys: int, seed: int) -> None:
        self.root = root
        self.keys = keys
        self.random = random.Random(seed)
        self.expected: dict[int, int] = {}
        self.cluster = LocalCluster(
            Keep, sites={"solo": 1}, partitions=PARTITIONS, data_dir=root / "cluster", checkpoint_interval_s=0
        )

    @property
    def local(self) -> Any:
        return self.cluster.cluster

    def rows(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns a row with a new payload for each key.

        Half of a payload is noise and half is text; :meth:`compression` measures how well the files compress.
        """
        rows = []
        for key in keys:
            payload = self.random.randbytes(PAYLOAD_BYTES // 2) + b"%020d some text " % key * (PAYLOAD_BYTES // 68)
            self.expected[key] = xxhash.xxh64_intdigest(payload)
            rows.append({"k": key, "payload": payload})
        return rows

    def load(self) -> None:
        self.stream = self.cluster.stream("Keep", source="bench", schema=SCHEMA)
        for first in range(0, self.keys, LOAD_ROWS):
            self.stream.send(self.rows(range(first, min(self.keys, first + LOAD_ROWS))))
        _say(f"{self.keys} keys loaded")

    # -- stall ------------------------------------------------------------------------------------------------

    def stall(self, repeats: int, baseline_s: float) -> dict[str, Any]:
        rate = self._saturation() * LOAD
        added, base, during, whole, seconds = [], [], [], [], []
        for number in range(repeats):
            for place in (self.root / "cluster" / "checkpoints").glob("*"):
                if place.is_dir():  # the file STORE, which identifies the store, stays
                    shutil.rmtree(place)
            before = self._open_loop(rate, lambda started: time.perf_counter() - started < baseline_s)
            with ThreadPoolExecutor(1) as pool:
                taking = pool.submit(self.local.checkpoint, "Keep")
                started = time.perf_counter()
                meanwhile = self._open_loop(rate, lambda _, taking=taking: not taking.done())
                seconds.append(time.perf_counter() - started)
                if not taking.result().bytes_new:  # raises the checkpoint's error
                    raise RuntimeError("the checkpoint stored nothing, so it stalled nothing")
            base.append(_quantile(before, 0.99))
            during.append(_quantile(meanwhile, 0.99))
            added.append(during[-1] - base[-1])
            whole.append(max(meanwhile))
            _say(f"stall {number}: p99 {base[-1]:.1f} → {during[-1]:.1f} ms, p100 {whole[-1]:.1f} ms")
        return {
            "rows_per_s": rate,
            "baseline_p99_ms": spread(base),
            "checkpoint_p99_ms": spread(during),
            "checkpoint_p100_ms": spread(whole),
            "added_p99_ms": spread(added),
            "checkpoint_s": spread(seconds),
        }

    def _saturation(self) -> float:
        started, rows = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < 3.0:
            self.stream.send(self.rows(self.random.sample(range(self.keys), BATCH_ROWS)))
            rows += BATCH_ROWS
        return rows / elapsed

    def _open_loop(self, rate: float, goes_on: Any) -> list[float]:
        """Sends batches at fixed times. Returns the latency of each batch in ms, from the time at which it was due.

        Args:
            rate: rows a second.
            goes_on: gets the start of the loop, and returns whether to send another batch.
        """
        interval = BATCH_ROWS / rate
        started = time.perf_counter()
        latencies: list[float] = []
        while goes_on(started) or not latencies:
            due = started + len(latencies) * interval
            batch = self.rows(self.random.sample(range(self.keys), BATCH_ROWS))
            time.sleep(max(0.0, due - time.perf_counter()))
            self.stream.send(batch)
            latencies.append((time.perf_counter() - due) * 1e3)
        return latencies

    # -- increments ---------------------------------------------------------------------------------------------

    def increments(self, how: str, rounds: int) -> dict[str, Any]:
        count = max(1, self.keys // 100)
        hot = self.random.sample(range(self.keys), count)
        self.local.checkpoint("Keep")
        shares = []
        for _ in range(rounds):
            changed = hot if how == "skewed" else self.random.sample(range(self.keys), count)
            for first in range(0, count, LOAD_ROWS):
                self.stream.send(self.rows(changed[first : first + LOAD_ROWS]))
            reply = self.local.checkpoint("Keep")
            shares.append(reply.bytes_new / reply.bytes_total)
        _say(f"1 % changed, {how}: mean {statistics.mean(shares):.4f}, median {statistics.median(shares):.4f}")
        return {"mean": statistics.mean(shares), **spread(shares)}

    # -- restoring ----------------------------------------------------------------------------------------------

    def _manifests(self) -> list[Manifest]:
        store = CheckpointStore(str(self.root / "cluster" / "checkpoints"))
        return [next(store.newest(PartitionId("Keep", partition))) for partition in range(PARTITIONS)]

    def restore(self, repeats: int) -> dict[str, Any]:
        manifests = self._manifests()
        size_mb = sum(manifest.size for manifest in manifests) / 1e6
        restored, copied = [], []
        for number in range(repeats):
            restored.append(size_mb / self._restore_once(self.root / f"restored-{number}", keep=number == 0))
            copied.append(size_mb / self._copy_once(manifests, self.root / f"copied-{number}"))
            _say(f"restore {restored[-1]:.0f} MB/s, plain copy {copied[-1]:.0f} MB/s")
        return {
            "mb": size_mb,
            "restore_mb_s": spread(restored),
            "copy_mb_s": spread(copied),
            "ratio": spread([ratio(a, b) or 0.0 for a, b in zip(restored, copied, strict=True)]),
        }

    def _restore_once(self, root: Path, *, keep: bool) -> float:
        store = CheckpointStore(str(self.root / "cluster" / "checkpoints"))
        node = ReplicaNode(ReplicaInfo("bench", "solo", "x:1"), root, ReplicaSettings())
        spec = describe(Keep, PARTITIONS, "Keep")
        started = time.perf_counter()

        def one(partition: int) -> None:
            node.restorer.prepare(spec, PartitionId("Keep", partition), "r", store, None)
            node.restorer.own(PartitionId("Keep", partition), "r", 2)

        with ThreadPoolExecutor(RESTORES_AT_ONCE) as pool:
            for done in [pool.submit(one, partition) for partition in range(PARTITIONS)]:
                done.result()
        elapsed = time.perf_counter() - started
        if keep:
            self.state = {
                key: xxhash.xxh64_intdigest(value)
                for partition in range(PARTITIONS)
                for key, _, value in node.reader.scan(PartitionId("Keep", partition), "payload")
            }
        node.close()
        shutil.rmtree(root)
        return elapsed

    def _copy_once(self, manifests: list[Manifest], root: Path) -> float:
        blobs = self.root / "cluster" / "checkpoints" / "blobs"
        started = time.perf_counter()
        for manifest in manifests:
            folder = root / str(manifest.partition)
            folder.mkdir(parents=True)
            for file in manifest.files:
                shutil.copyfile(blobs / file.blob, folder / file.name)
                descriptor = os.open(folder / file.name, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        elapsed = time.perf_counter() - started
        shutil.rmtree(root)
        return elapsed

    def compare(self) -> tuple[int, int]:
        """Returns (keys whose last payload was not restored, restored keys that were never sent)."""
        state = getattr(self, "state", None)
        if state is None:
            self._restore_once(self.root / "compared", keep=True)
            state = self.state
        lost = sum(state.get(key) != value for key, value in self.expected.items())
        return lost, len(state.keys() - self.expected)

    def compression(self) -> dict[str, Any]:
        """Measures how far and how fast zstd compresses files that RocksDB has compressed already."""
        blobs = self.root / "cluster" / "checkpoints" / "blobs"
        plain = packed = 0
        started = time.perf_counter()
        for manifest in self._manifests()[:2]:
            for file in manifest.files:
                data = (blobs / file.blob).read_bytes()
                plain += len(data)
                packed += len(zstandard.ZstdCompressor(level=1).compress(data))
        return {"zstd_share": packed / plain, "zstd_mb_s": plain / 1e6 / (time.perf_counter() - started)}


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
