"""OBSERVE: cost of monitoring every process, as a direct client sees it.

Four clusters run all the time. One has no monitoring. One serves /metrics, and its pages are read each second, which is
more often than Prometheus would. In the other two, batches are traced from the client to each commit, 1 % of the
batches in one and all in the other, and a collector runs in a process of its own.

The clusters take turns of a few seconds, in which each is driven as fast as its senders can. The order changes from
round to round, and within four rounds each cluster comes once directly after each other one. A turn is compared with
the unmonitored cluster's turn in the same round; the figure is the median of these ratios.

What a turn causes belongs to that turn. Pages are read only in turns of the cluster that serves them. The client's
spans are sent before its turn is over. Those of the processes leave within ``EXPORT_S``, and the next turn begins
later.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.latency import KEYS, SENDERS
from benchmarks.operators import CountSum
from benchmarks.record import Correctness, Record, Target, spread
from benchmarks.secure import OPERATOR, PARTITIONS, ROWS, Side
from stateflow import tracing
from stateflow.local.process import Process
from stateflow.testing import LocalCluster

PLAIN, METRICS = "plain", "metrics"
#: kind → share of the batches that are recorded
TRACED = {"traces 1 %": 0.01, "traces 100 %": 1.0}
EVERY_S = 1.0
#: seconds after which spans are sent at the latest, instead of the default of 5 s, which is as long as a turn
EXPORT_S = 1.0
LEAST = 0.97


class Watched(LocalCluster):
    """A cluster whose processes are monitored.

    Args:
        metrics: every process serves its metrics.
        environment: environment variables for the processes, in addition to those of this process.

    Attributes:
        pages: URLs of the processes' metrics.
    """

    def __init__(self, *, metrics: bool = False, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(
            CountSum, sites={"a": 1, "b": 1}, partitions=PARTITIONS, deploy_to=("a",), checkpoint_interval_s=0
        )
        self.pages: list[str] = []
        self._metrics, self._more = metrics, dict(environment or {})

    def _process(self, name: str, arguments: list[str]) -> Process:
        if self._metrics:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            self.pages.append(f"http://{address}/metrics")
            arguments = [*arguments, "--metrics", address]
        process = super()._process(name, arguments)
        process._environment |= self._more
        return process


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """Runs a collector of spans in a process of its own while the block runs. Yields the collector's URL."""
    sink = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sink"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sink.stdin is not None
    assert sink.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(sink.stdout.readline())}"
    finally:
        sink.stdin.close()
        sink.wait(30)
        sink.stdout.close()


def provider(share: float, endpoint: str) -> Any:
    """Returns a tracer provider for this process's clients of one cluster.

    Environment variables would give the clients of all clusters the same provider.

    Args:
        share: share of the batches that are recorded.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    made = TracerProvider(sampler=ParentBasedTraceIdRatio(share))
    exporter = OTLPSpanExporter(f"{endpoint}/v1/traces")
    made.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1e3 * EXPORT_S))
    return made


@contextlib.contextmanager
def reading(pages: Sequence[str], sizes: list[int], failures: list[str]) -> Iterator[None]:
    """Reads all pages every second while the block runs, until a page cannot be read.

    Args:
        sizes: gets the size of each page that was read, in bytes.
        failures: gets a line if a page could not be read.
    """
    over = threading.Event()

    def read() -> None:
        try:
            while not over.wait(EVERY_S):
                for page in pages:
                    with urllib.request.urlopen(page, timeout=30) as answer:
                        sizes.append(len(answer.read()))
        except Exception as error:  # noqa: BLE001 - reported by the other thread
            failures.append(f"a page of metrics could not be read: {error}")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def orders(kinds: Sequence[str], seed: int) -> Iterator[Sequence[str]]:
    """Yields the order of four kinds for each round, without end.

    Within four rounds each kind comes once in each place, and once directly after each other kind (a Williams square).
    So no kind has to bear more than its share of what another one leaves behind.
    """
    zigzag, rng = (0, 1, 3, 2), random.Random(seed)
    square = [[kinds[(place + shift) % len(zigzag)] for place in zigzag] for shift in range(len(zigzag))]
    while True:
        rng.shuffle(square)
        yield from square


def turn_of(side: Side, seconds: float, flush: Callable[[], object] | None) -> float:
    """Returns the rows per second of one turn.

    Args:
        flush: sends the spans of this process's clients; None: the cluster has no spans.
    """
    if flush is None:
        return side.fastest(seconds) * ROWS
    rate = side.fastest(seconds, at_end=flush)
    flush()  # those of the last batches
    time.sleep(1.5 * EXPORT_S)  # until the other processes have sent theirs
    return rate * ROWS


def run(experiment: str, *, quick: bool, seed: int, only: object = None) -> Record:
    seconds, turns = (2.0, 6) if quick else (10.0, 20)
    kinds = [PLAIN, METRICS, *TRACED]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    sizes: list[int] = []
    failures: list[str] = []
    flushes: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(collecting())
        exporting = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": f"{1e3 * EXPORT_S:.0f}",
        }
        watched = Watched(metrics=True)
        sides = {
            PLAIN: Side(stack.enter_context(Watched()), seed),
            METRICS: Side(stack.enter_context(watched), seed),
        }
        for kind, share in TRACED.items():
            local = stack.enter_context(Watched(environment=exporting))
            made = provider(share, endpoint)
            stack.callback(made.shutdown)
            flushes[kind] = made.force_flush
            tracing.use(made)
            try:
                sides[kind] = Side(local, seed)  # its clients keep the provider in use when they are made
            finally:
                tracing.use(None)
        for order in itertools.islice(orders(kinds, seed), turns):
            for kind in order:
                with reading(watched.pages, sizes, failures) if kind == METRICS else contextlib.nullcontext():
                    found[kind].append(turn_of(sides[kind], seconds, flushes.get(kind)))
                print(f"  {kind}: {found[kind][-1]:,.0f} rows/s", file=sys.stderr, flush=True)
        correctness = Correctness.of_all([side.correctness() for side in sides.values()])
        with urllib.request.urlopen(endpoint, timeout=30) as answer:
            exported = int(answer.read())

    if not (exported and sizes):
        failures.append("nothing was monitored: no page was read, or no span arrived")

    def beside(kind: str) -> float | None:
        if failures:
            return None
        return statistics.median(watched / plain for watched, plain in zip(found[kind], found[PLAIN], strict=True))

    return Record(
        experiment=experiment,
        figures={
            **{kind: {"rows_per_s": spread(each)} for kind, each in found.items()},
            "pages_read": len(sizes),
            "bytes_of_a_page": round(statistics.mean(sizes)) if sizes else None,
            "bytes_of_spans": exported,
        },
        targets=[Target(f"throughput, {kind}/plain", beside(kind), LEAST) for kind in kinds if kind != PLAIN],
        correctness=correctness,
        failures=failures,
        settings={
            "quick": quick,
            "operator": OPERATOR,
            "partitions": PARTITIONS,
            "senders": SENDERS,
            "rows_per_batch": ROWS,
            "keys": KEYS,
            "seconds": seconds,
            "turns": turns,
            "read_every_s": EVERY_S,
            "export_within_s": EXPORT_S,
            "traced": TRACED,
        },
        seed=seed,
    )
