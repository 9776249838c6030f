"""OVERLOAD: a replica under twice its peak load, and good clients beside a hostile one.

Each client is a process of its own with a certificate of its own, so that the replica can tell them apart. The peak is
the best rate of one or several clients, each of which waits only for its last answer. Then all of them together send at
fixed times, twice as much: batches that cannot be sent in time wait at the sender. Then one client sends a quarter of
the peak, alone and beside each kind of hostile client in turn: one floods with large batches, one reads no answers, one
sends halves of batches, one opens two thousand streams. Latency counts from the time a batch was scheduled.

A hostile client gets only processor time that no other process wants (SCHED_IDLE): it stands for one on another
machine, which takes the replica's time but not that of the good client beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.operators import CountSum
from benchmarks.overload_sender import HOSTILE_KEYS, OPERATOR
from benchmarks.record import Correctness, Record, Target
from stateflow.local.cluster import Certificates
from stateflow.local.process import readable
from stateflow.testing import LocalCluster

PARTITIONS = 8
ROWS = 100
CLIENTS = 3  # processes, of two sources each
SETTLE_S = 1.0  # not counted
ANSWER_S = 60.0  # a client that prints nothing for so long hangs
HOSTILE = ("flood", "deaf", "halves", "streams")
PEAK_SHARE, P99_TIMES, MEMORY_GB = 0.9, 2.0, 2.0


class Client:
    """A client process, which starts to send at ``begin()``."""

    def __init__(self, kind: str, certificates: Certificates, told: Mapping[str, Any], name: str = "") -> None:
        who = certificates.issue(name or kind, "admin" if kind == "deaf" else "data")
        arguments = [
            sys.executable,
            "-m",
            "benchmarks.overload_sender",
            kind,
            json.dumps({**told, "settle_s": SETTLE_S}),
        ]
        self._process = subprocess.Popen(
            arguments,
            env=os.environ | who,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if kind != "count" else None,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        if self._line() != "ready\n":
            self._process.kill()
            raise RuntimeError(f"a client ended or hangs: {kind}")

    def _line(self) -> str:
        """Returns the next line of its output. Empty: the client ended, or hangs."""
        return self._out.readline() if readable([self._out.fileno()], ANSWER_S) else ""

    def begin(self) -> None:
        self._in.write("\n")
        self._in.flush()

    def end(self) -> Any:
        """Ends a counting client. Returns its report of what it sent."""
        self._in.close()
        said = self._out.read()
        self._process.wait(60)
        return json.loads(said) if said else {}

    def stop(self) -> bool:
        """Ends a hostile client. Returns False if it had stopped before, so that the good clients ran without it."""
        self._in.close()
        said = self._line()
        self._process.kill()
        self._process.wait()
        return bool(said) and bool(json.loads(said)["goes_on"])


class Measured:
    def __init__(self, local: LocalCluster, seed: int) -> None:
        assert local.certificates is not None
        self._local, self._certificates, self._seed = local, local.certificates, seed
        self._replica = local.processes["local-0"].address
        self.state: dict[int, tuple[int, float]] = {}
        self.wrong = {"lost": 0, "duplicated": 0}
        self.memory_bytes = 0
        self.failures = list[str]()
        self._clients = 0

    def _told(self, interval_s: float = 0.0) -> dict[str, Any]:
        self._clients += 1
        return {
            "address": self._local.address,
            "replica": self._replica,
            "number": self._clients,
            "seed": self._seed + self._clients,
            "rows": ROWS,
            "interval_s": interval_s,
        }

    def counting(self, clients: int, interval_s: float, seconds: float, beside: str = "") -> list[dict[str, Any]]:
        """Runs counting clients and returns their reports.

        ``interval_s``: seconds between batches of a source. ``beside``: kind of the hostile client; empty: none.
        """
        good = [
            Client("count", self._certificates, self._told(interval_s), f"count-{self._clients}")
            for _ in range(clients)
        ]
        hostile = Client(beside, self._certificates, self._told()) if beside else None
        if hostile is not None:
            hostile.begin()
            time.sleep(SETTLE_S)
        for each in good:
            each.begin()
        until = time.monotonic() + SETTLE_S + seconds
        while time.monotonic() < until:
            self.memory_bytes = max(self.memory_bytes, _resident(self._local.processes["local-0"].pid))
            time.sleep(0.1)
        said = [each.end() for each in good]
        if hostile is not None and not hostile.stop():
            self.failures.append(f"the hostile client stopped too early: {beside}")
        for each in said:
            self.state |= {key: (n, total) for key, n, total in each.pop("state")}
            self.wrong = {name: self.wrong[name] + each.pop(name) for name in self.wrong}
        return said

    def correctness(self) -> Correctness:
        found = {
            row["key"]: tuple(row["value"].values())
            for row in self._local.cluster.read_state(OPERATOR, "figures").to_pylist()
            if row["key"] < HOSTILE_KEYS
        }
        return Correctness(late=0, state_equal=found == self.state, **self.wrong)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    seconds, turns = (4.0, 1) if quick else (20.0, 5)
    shares, behind = list[float](), list[float]()
    ratios: dict[str, list[float]] = {kind: [] for kind in HOSTILE}
    figures: dict[str, Any] = {"peak_batches_per_s": [], "overloaded_batches_per_s": [], "p99_ms_alone": []}
    with LocalCluster(CountSum, partitions=PARTITIONS, checkpoint_interval_s=0, tls=True) as local:
        measured = Measured(local, seed)
        for _ in range(turns):
            peak = max(_rate(measured.counting(count, 0.0, seconds)) for count in range(1, CLIENTS + 1))
            said = measured.counting(CLIENTS, 2 * CLIENTS / (2 * peak), seconds)
            shares.append(_rate(said) / peak)
            behind.append(max(each["behind_s"] for each in said))
            figures["peak_batches_per_s"].append(peak)
            figures["overloaded_batches_per_s"].append(_rate(said))
            _say(f"  {peak:,.0f} batches/s at most; twice as much: {_rate(said):,.0f}, up to {behind[-1]:.1f} s behind")
            interval_s = 2 / (peak / 4)
            for kind in HOSTILE:
                (alone,) = measured.counting(1, interval_s, seconds)
                (beside,) = measured.counting(1, interval_s, seconds, kind)
                ratios[kind].append(beside["latency_ms"]["p99"] / alone["latency_ms"]["p99"])
                figures["p99_ms_alone"].append(alone["latency_ms"]["p99"])
                figures.setdefault(f"p99_ms_beside_{kind}", []).append(beside["latency_ms"]["p99"])
                _say(f"  beside {kind}: p99 {beside['latency_ms']['p99']:.1f} ms, {ratios[kind][-1]:.2f} of that alone")
        memory = measured.memory_bytes
        correctness = measured.correctness()
    return Record(
        experiment=experiment,
        figures={
            **figures,
            "senders_behind_s": behind,
            "replica_bytes_max": memory,
            "p99_ratio": {kind: statistics.median(found) for kind, found in ratios.items()},
        },
        targets=[
            Target("throughput of twice the peak, of the peak", statistics.median(shares), PEAK_SHARE),
            Target("replica's memory, GB", memory / 1e9, MEMORY_GB, "at_most"),
            *(
                Target(f"p99 beside one: {kind}, alone", statistics.median(found), P99_TIMES, "at_most")
                for kind, found in ratios.items()
            ),
        ],
        correctness=correctness,
        settings={
            "quick": quick,
            "partitions": PARTITIONS,
            "rows_per_batch": ROWS,
            "clients": CLIENTS,
            "seconds": seconds,
            "turns": turns,
        },
        seed=seed,
        failures=measured.failures,
    )


def _rate(said: Sequence[Mapping[str, Any]]) -> float:
    return sum(each["batches_per_s"] for each in said)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
