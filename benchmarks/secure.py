"""SECURE: cost of TLS compared with plain text, for a direct client and for a move.

Two clusters, one with TLS and one without, run all the time and take turns of a few seconds. A turn has three parts.
For throughput, the cluster is driven as fast as its senders can. For latency, it is driven at a quarter of the first
throughput of plain text. For pauses, half of its partitions move to another replica and back. Each turn with TLS is
compared with the turn without TLS just before it, so a slow minute affects both; the figure is the median of these
ratios. All traffic is on loopback; on a network, transmission adds the same time to both.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.latency import KEYS, SENDERS, SPREAD_ROWS, picker
from benchmarks.load import Ledger, Load, Source, completed, correctness_of, summary
from benchmarks.operators import CountSum
from benchmarks.record import Correctness, Record, Target, spread
from stateflow.client import StreamClient
from stateflow.errors import StateflowError
from stateflow.testing import LocalCluster

OPERATOR = "CountSum"
PARTITIONS = 8
ROWS = SPREAD_ROWS
SETTLE_S = 0.5  # not counted
PLAIN, TLS = "plain", "tls"
THROUGHPUT, LATENCY, PAUSE = 0.9, 1.3, 1.3


class Side:
    """One of the compared clusters, and its senders."""

    def __init__(self, local: LocalCluster, seed: int) -> None:
        self.local, self._seed, self._truth = local, seed, Ledger()
        with self.speaking():
            self._streams: list[StreamClient] = [
                local.stream(OPERATOR, source=f"s{number}") for number in range(SENDERS)
            ]

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Makes this process use a certificate of the cluster while the block runs; none for plain text."""
        if self.local.certificates is not None:
            self.local.certificates.begin()
        try:
            yield
        finally:
            if self.local.certificates is not None:
                self.local.certificates.end()

    def load(self, interval_s: float) -> Load:
        self._seed += 1
        sources = [Source(stream, picker(number, ROWS), interval_s) for number, stream in enumerate(self._streams)]
        load = Load(sources, self._seed)
        load.truth = self._truth  # the state carries over from one load to the next
        return load

    def fastest(self, seconds: float, *, at_end: Callable[[], object] = lambda: None) -> float:
        """Returns the batches per second of all senders together, if each sends as soon as its last batch is answered.

        Args:
            at_end: work that belongs to what was sent. Its duration counts, and the senders go on meanwhile.
        """
        with self.speaking(), self.load(0.0) as load:

            def sent() -> int:
                return sum(len(source.latencies.at_s) for source in load.sources)

            load.wait(SETTLE_S)
            before, began = sent(), time.monotonic()
            load.wait(seconds)
            at_end()
            return (sent() - before) / (time.monotonic() - began)

    def paced(self, rate: float, seconds: float, moves: int) -> dict[str, float]:
        """Sends ``rate`` batches a second. Measures latency without moves first, and then the pauses of moves.

        Returns the percentiles of the latency without moves, and the median pause. Raises RuntimeError if a move does
        not complete.
        """
        pauses: list[float] = []
        with self.speaking(), self.load(SENDERS / rate) as load:
            load.wait(SETTLE_S + seconds)
            until = time.monotonic()
            for to in ("b", "a") * (moves // 2):
                report = self.local.migrate(OPERATOR, list(range(PARTITIONS // 2)), to).wait()
                pauses += [move.pause_ms for move in completed(report)]
        took = summary(
            [each for source in load.sources for each in source.latencies.between(load.began_s + SETTLE_S, until)]
        )
        return {"p50_ms": took["p50"], "p99_ms": took["p99"], "pause_ms": summary(pauses)["p50"]}

    def correctness(self) -> Correctness:
        with self.speaking():
            return correctness_of(self.load(0.0), self.local.cluster, OPERATOR)


def run(experiment: str, *, quick: bool, seed: int, only: object = None) -> Record:
    seconds, turns, moves = (2.0, 6, 4) if quick else (10.0, 20, 10)
    found: dict[str, dict[str, list[float]]] = {PLAIN: {}, TLS: {}}
    failures: list[str] = []
    rate = 0.0  # batches a second sent to both
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for kind in (PLAIN, TLS):
            local = LocalCluster(
                CountSum,
                sites={"a": 1, "b": 1},
                partitions=PARTITIONS,
                deploy_to=("a",),
                checkpoint_interval_s=0,
                tls=kind == TLS,
            )
            sides[kind] = Side(stack.enter_context(local), seed)
        try:
            for _, (kind, side) in itertools.product(range(turns), sides.items()):
                fastest = side.fastest(seconds)
                rate = rate or fastest / 4
                told = {"rows_per_s": fastest * ROWS, **side.paced(rate, seconds, moves)}
                for name, value in told.items():
                    found[kind].setdefault(name, []).append(value)
                print(f"  {kind}: " + ", ".join(f"{k} {v:,.2f}" for k, v in told.items()), file=sys.stderr, flush=True)
        except (StateflowError, RuntimeError, TimeoutError) as error:
            failures.append(str(error))
        correctness = Correctness.of_all([side.correctness() for side in sides.values()])

    def beside(name: str) -> float | None:
        if failures:
            return None
        pairs = zip(found[TLS][name], found[PLAIN][name], strict=True)
        return statistics.median(secure / plain for secure, plain in pairs)

    return Record(
        experiment=experiment,
        figures={kind: {name: spread(each) for name, each in of.items()} for kind, of in found.items()},
        targets=[
            Target("throughput, TLS/plain text", beside("rows_per_s"), THROUGHPUT),
            Target("p99 at a quarter of it, TLS/plain text", beside("p99_ms"), LATENCY, "at_most"),
            Target("pause of a move, TLS/plain text", beside("pause_ms"), PAUSE, "at_most"),
        ],
        correctness=correctness,
        failures=failures,
        settings={
            "quick": quick,
            "partitions": PARTITIONS,
            "senders": SENDERS,
            "rows_per_batch": ROWS,
            "keys": KEYS,
            "seconds": seconds,
            "turns": turns,
            "moves_of_half": moves,
        },
        seed=seed,
    )
