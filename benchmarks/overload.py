"""OVERLOAD: a replica under twice its peak load, and good clients beside a hostile one.

Each client is a process of its own with a certificate of its own, so that the replica can tell them apart. The peak is
the best rate of one or several clients whose sources each wait only for their last answer. Then clients together offer
twice as many batches at fixed times, whatever is answered (open loop). Each has a fixed number of batches under way at
most; a fixed number more wait at the sender until an answer lets one go, and the rest is not sent. Then one client
sends a quarter of the peak, alone and beside each kind of hostile client in turn: one floods with large batches, one
reads no answers, one sends halves of batches, one opens two thousand streams. Latency counts from the time a batch was
due, so that it includes every wait at the sender.

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
from collections.abc import Callable, Mapping, Sequence
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
CLIENTS = 3  # processes
#: batches that a client of the overload has under way at most, and that wait at it besides
UNDER_WAY, ROOM = 8, 32
#: (clients, sources of each) whose best rate is the peak
SATURATING = ((1, 2), (2, 2), (CLIENTS, 2), (CLIENTS, UNDER_WAY))
SETTLE_S = 1.0  # not counted
ANSWER_S = 60.0  # a client that prints nothing for so long hangs
HOSTILE = ("flood", "deaf", "halves", "streams")
PEAK_SHARE, P99_TIMES, MEMORY_GB = 0.9, 2.0, 2.0
#: least part of twice the peak that is offered, and of the offered batches that are told to wait
OFFERED_SHARE, WAITED_SHARE = 0.95, 0.5
#: most time from when a batch was due to its answer, and growth of the replica, at twice the peak
OVERLOADED_P99_MS, GROWTH_GB = 1000.0, 0.25


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
            stderr=subprocess.DEVNULL if kind in HOSTILE else None,
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
        """Ends a client that counts answers. Returns its report of what it sent."""
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

    def _told(self, interval_s: float = 0.0, sources: int = 2) -> dict[str, Any]:
        self._clients += 1
        return {
            "address": self._local.address,
            "replica": self._replica,
            "number": self._clients,
            "seed": self._seed + self._clients,
            "rows": ROWS,
            "sources": sources,
            "interval_s": interval_s,
            "room": ROOM,
        }

    def running(
        self,
        clients: int,
        interval_s: float,
        seconds: float,
        beside: str = "",
        *,
        kind: str = "count",
        sources: int = 2,
    ) -> list[dict[str, Any]]:
        """Runs clients that count answers, and returns their reports.

        ``interval_s``: seconds between batches of a source, or between those of a client that offers. ``beside``: kind
        of the hostile client; empty: none.
        """
        good = [
            Client(kind, self._certificates, self._told(interval_s, sources), f"{kind}-{self._clients}")
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
            self.memory_bytes = max(self.memory_bytes, self.resident())
            time.sleep(0.1)
        said = [each.end() for each in good]
        if hostile is not None and not hostile.stop():
            self.failures.append(f"the hostile client stopped too early: {beside}")
        for each in said:
            self.state |= {key: (n, total) for key, n, total in each.pop("state")}
            self.wrong = {name: self.wrong[name] + each.pop(name) for name in self.wrong}
        return said

    def resident(self) -> int:
        """Returns the memory of the replica now, in bytes."""
        return _resident(self._local.processes["local-0"].pid)

    def overloaded(self, peak: float, seconds: float) -> dict[str, Any]:
        """Offers twice the peak. Returns what came of it, all clients together."""
        highest, self.memory_bytes = self.memory_bytes, 0
        before = self.resident()
        said = self.running(CLIENTS, CLIENTS / (2 * peak), seconds, kind="offer", sources=UNDER_WAY)
        during, self.memory_bytes = self.memory_bytes, max(self.memory_bytes, highest)
        counts = {name: sum(each[name] for each in said) for name in ("offered", "answered", "waited", "not_sent")}
        return {
            **counts,
            "peak_batches_per_s": peak,
            "offered_batches_per_s": sum(each["offered_per_s"] for each in said),
            "answered_batches_per_s": _rate(said),
            "p99_ms": max(each["latency_ms"]["p99"] for each in said),
            "replica_bytes_before": before,
            "replica_bytes_most": during,
        }

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
    overloaded: list[dict[str, Any]] = []
    alone = list[list[float]]()
    beside: dict[str, list[float]] = {kind: [] for kind in HOSTILE}
    with LocalCluster(CountSum, partitions=PARTITIONS, checkpoint_interval_s=0, tls=True) as local:
        measured = Measured(local, seed)
        for _ in range(turns):
            rates = [_rate(measured.running(count, 0.0, seconds, sources=each)) for count, each in SATURATING]
            overloaded.append(found := measured.overloaded(max(rates), seconds))
            _say(
                f"  {max(rates):,.0f} batches/s at most; {found['offered_batches_per_s']:,.0f} offered: "
                f"{found['answered_batches_per_s']:,.0f} answered, p99 {found['p99_ms']:.0f} ms"
            )
            alone.append([])
            for kind in HOSTILE:
                for where, hostile in ((alone[-1], ""), (beside[kind], kind)):
                    (said,) = measured.running(1, 2 / (max(rates) / 4), seconds, hostile)
                    where.append(said["latency_ms"]["p99"])
                _say(f"  p99 {alone[-1][-1]:.1f} ms alone, {beside[kind][-1]:.1f} ms beside one: {kind}")
        correctness = measured.correctness()
    ratios = {
        kind: [high / min(low) for high, low in zip(found, alone, strict=True)]  # of a turn, the least disturbed
        for kind, found in beside.items()
    }
    return Record(
        experiment=experiment,
        figures={
            "overloaded": overloaded,
            "replica_bytes_most": measured.memory_bytes,
            "p99_ms_alone": alone,
            "p99_ms_beside": beside,
            "p99_ratio": {kind: statistics.median(found) for kind, found in ratios.items()},
        },
        targets=[
            *_targets(overloaded, correctness),
            Target("replica's memory, GB", measured.memory_bytes / 1e9, MEMORY_GB, "at_most"),
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
            "under_way_per_client": UNDER_WAY,
            "waiting_per_client": ROOM,
            "seconds": seconds,
            "turns": turns,
        },
        seed=seed,
        failures=measured.failures,
    )


def _targets(overloaded: Sequence[Mapping[str, Any]], correctness: Correctness) -> list[Target]:
    """Returns the targets of offering twice the peak."""

    def median(figure: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.median(map(figure, overloaded))

    offered = median(lambda each: each["offered_batches_per_s"] / (2 * each["peak_batches_per_s"]))
    answered = median(lambda each: each["answered_batches_per_s"] / each["peak_batches_per_s"])
    waited = median(lambda each: each["waited"] / each["offered"])
    growth = max(each["replica_bytes_most"] - each["replica_bytes_before"] for each in overloaded)
    return [
        Target("offered, of twice the peak", offered, OFFERED_SHARE),
        Target("throughput of twice the peak, of the peak", answered, PEAK_SHARE),
        Target("told to wait, of the offered batches", waited, WAITED_SHARE),
        Target("p99 from when a batch was due, ms", median(lambda each: each["p99_ms"]), OVERLOADED_P99_MS, "at_most"),
        Target("growth of the replica's memory, GB", growth / 1e9, GROWTH_GB, "at_most"),
        Target("output rows lost", correctness.lost, 0, "at_most"),
        Target("output rows duplicated", correctness.duplicated, 0, "at_most"),
    ]


def _rate(said: Sequence[Mapping[str, Any]]) -> float:
    return sum(each["batches_per_s"] for each in said)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
