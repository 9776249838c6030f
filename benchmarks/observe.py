"""OBSERVE: cost of monitoring every process, as a direct client sees it.

Four clusters run all the time. One has no monitoring. One serves /metrics, and its pages are read each second, which is
more often than Prometheus would. In the other two, batches are traced from the client to each commit, 1 % of the
batches in one and all in the other, and a collector runs in a process of its own.

The clusters take turns of a few seconds, in which each is driven as fast as its senders can. The order changes from
round to round. A turn is compared with the unmonitored cluster's turn in the same round; the figure is the median of
these ratios.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
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
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces")))
    return made


@contextlib.contextmanager
def reading(pages: list[str]) -> Iterator[list[int]]:
    """Reads all pages every second while the block runs. Yields a list of the sizes of all pages read, in bytes."""
    over, sizes = threading.Event(), list[int]()

    def read() -> None:
        while not over.wait(EVERY_S):
            for page in pages:
                with urllib.request.urlopen(page, timeout=30) as answer:
                    sizes.append(len(answer.read()))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def run(experiment: str, *, quick: bool, seed: int, only: object = None) -> Record:
    seconds, turns = (2.0, 6) if quick else (10.0, 20)
    kinds = [PLAIN, METRICS, *TRACED]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(collecting())
        exporting = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        watched = Watched(metrics=True)
        sides = {
            PLAIN: Side(stack.enter_context(Watched()), seed),
            METRICS: Side(stack.enter_context(watched), seed),
        }
        for kind, share in TRACED.items():
            local = stack.enter_context(Watched(environment=exporting))
            made = provider(share, endpoint)
            stack.callback(made.shutdown)
            tracing.use(made)
            try:
                sides[kind] = Side(local, seed)  # its clients keep the provider in use when they are made
            finally:
                tracing.use(None)
        sizes = stack.enter_context(reading(watched.pages))
        for turn in range(turns):
            for kind in (*kinds[turn % len(kinds) :], *kinds[: turn % len(kinds)]):
                found[kind].append(sides[kind].fastest(seconds) * ROWS)
                print(f"  {kind}: {found[kind][-1]:,.0f} rows/s", file=sys.stderr, flush=True)
        correctness = Correctness.of_all([side.correctness() for side in sides.values()])
        with urllib.request.urlopen(endpoint, timeout=30) as answer:
            exported = int(answer.read())

    def beside(kind: str) -> float:
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
        failures=[] if exported and sizes else ["nothing was monitored: no page was read, or no span arrived"],
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
            "traced": TRACED,
        },
        seed=seed,
    )
