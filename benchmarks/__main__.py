"""Runs one experiment: ``python -m benchmarks NAME [--experiment ID] [--quick] [--keep] --json``.

The JSON object is written to standard output, and progress to standard error. The exit status is 0 if everything was
measured and every result was correct, otherwise 1; a missed target does not change it.

``suite`` runs one experiment after another, ``report`` makes a page of the results that were kept, ``compare`` compares
two files of results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.record import Record, failed
from benchmarks.results import keep
from tests.gate import slowness


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark and its experiments.

    Attributes:
        module: module that defines ``run(experiment, quick=, seed=, only=) -> Record``.
        experiments: names of the experiments; the first one is the default.
        question: question that the benchmark answers.
        full_only: experiments without a quick size, which the quick suite leaves out.
        questions: experiment → its question, if that differs from the benchmark's.
    """

    module: str
    experiments: tuple[str, ...]
    question: str
    full_only: tuple[str, ...] = ()
    questions: Mapping[str, str] = field(default_factory=dict)

    def question_of(self, experiment: str) -> str:
        return self.questions.get(experiment, self.question)


REGISTRY = {
    "state": Benchmark("benchmarks.state", ("P1",), "what does tracked state cost, compared with plain Python?"),
    "ledger": Benchmark(
        "benchmarks.ledger", ("G1", "G1-1e7"), "does the ledger scale, in appends and look-ups?", full_only=("G1-1e7",)
    ),
    "checkpoint": Benchmark("benchmarks.checkpoint", ("C1",), "what does durability cost?"),
    "migrate": Benchmark(
        "benchmarks.migrate",
        ("M1", "M2", "M3", "M6", "M7", "M8"),
        "how long are partitions unserved?",
        questions={
            "M1": "how long is a partition unserved, by its size?",
            "M2": "how long is a partition unserved, by the share of its keys that change during the move?",
            "M3": "how much latency do batches gain while a quarter of many partitions moves?",
            "M6": "what does moving back cost?",
            "M7": "do moves slow down partitions that stay?",
            "M8": "is a pause budget kept, and are pauses predicted?",
        },
    ),
    "failover": Benchmark("benchmarks.failover", ("F1",), "how long until a dead replica's partitions answer again?"),
    "fleet": Benchmark(
        "benchmarks.fleet",
        ("TAKEOVER", "FLEET", "ROLLING", "ALONE"),
        "how long until the next decision when the leading controller is killed?",
        questions={
            "FLEET": "how long until spawned replicas serve, drained ones are empty, and a joining one is used?",
            "ALONE": "does a site that is cut off for ten minutes keep serving, and lose nothing?",
            "ROLLING": "what does a Spark query notice while every replica and both controllers are restarted?",
        },
    ),
    "soak": Benchmark(
        "benchmarks.soak", ("SOAK",), "are rows lost under random moves, kills and stops?", full_only=("SOAK",)
    ),
    "spark": Benchmark(
        "benchmarks.spark",
        ("T1", "T1-small", "T4"),
        "is stateflow faster than Spark's Python state API and Spark's own aggregation?",
        questions={
            "T1-small": "what does a small micro-batch cost, compared with the least that Spark needs?",
            "T4": "what does a small micro-batch cost, by the number of partitions?",
        },
    ),
    "backfill": Benchmark("benchmarks.backfill", ("T5",), "does memory grow with a batch DataFrame?"),
    "direct": Benchmark("benchmarks.direct", ("T2",), "what does a record cost without Spark?"),
    "scale": Benchmark("benchmarks.scale", ("T3",), "does a cluster scale with replicas, keys and state?"),
    "plan": Benchmark(
        "benchmarks.plan",
        ("S1", "S2"),
        "how long does planning take for 10,000 replicas, and what moves?",
        questions={"S2": "what do placement policies propose for skewed loads, and how long do they take?"},
    ),
    "nexmark": Benchmark(
        "benchmarks.nexmark", ("M4",), "do realistic operators give the same results while they move?"
    ),
    "edge": Benchmark("benchmarks.edge", ("M5",), "how long is a pause between edge sites, over a shaped link?"),
    "observe": Benchmark("benchmarks.observe", ("OBSERVE",), "what does monitoring cost?"),
    "realtime": Benchmark(
        "benchmarks.realtime",
        ("REALTIME",),
        "how long does a row take through Spark's real-time mode, while partitions move?",
    ),
    "inside": Benchmark(
        "benchmarks.inside",
        ("INSIDE",),
        "what do replicas in Spark's own tasks cost, and what does a killed executor hold up?",
    ),
    "secure": Benchmark("benchmarks.secure", ("SECURE",), "what does TLS cost, in rows, latency and pauses?"),
    "overload": Benchmark(
        "benchmarks.overload", ("OVERLOAD",), "what happens at twice the load, and to other clients beside a bad one?"
    ),
    "latency": Benchmark(
        "benchmarks.latency",
        ("L1", "L2"),
        "how long does a batch take at 25, 50, 75 % of saturation?",
        questions={"L2": "what does a batch of 200 rows cost, by the number of partitions?"},
    ),
}
#: commands other than benchmarks: ``main(arguments) -> exit status``
COMMANDS = {
    "suite": ("benchmarks.suite", "run every experiment, one after another, then the report"),
    "report": ("benchmarks.report", "make a page, pictures and a table of the kept results"),
    "compare": ("benchmarks.compare", "compare two files of results, and show what is only noise"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in COMMANDS:
        module, _ = COMMANDS[given[0]]
        return int(importlib.import_module(module).main(given[1:]))
    options = _parser().parse_args(given)
    benchmark = REGISTRY[options.name]
    experiment = options.experiment or benchmark.experiments[0]
    if experiment not in benchmark.experiments:
        known = ", ".join(benchmark.experiments)
        print(
            f"invalid_argument: {options.name} has no experiment {experiment!r}: choose {known}",
            file=sys.stderr,
        )
        return 2
    run = importlib.import_module(benchmark.module).run
    extra = {} if options.minutes is None else {"minutes": options.minutes}
    before = slowness() if options.keep else 1.0
    began = time.monotonic()
    record: Record
    try:
        record = run(experiment, quick=options.quick, seed=options.seed, only=options.only, **extra)
    except Exception as error:  # noqa: BLE001 - the record says it; without one the report would omit the experiment
        traceback.print_exc()
        record = failed(experiment, f"{type(error).__name__}: {error}", quick=options.quick, seed=options.seed)
    settings = {"quick": options.quick, **record.settings}  # without it ``overran`` would not know the size
    record = replace(record, settings=settings, took_s=time.monotonic() - began)
    if options.keep:
        record = replace(record, slowness=max(before, slowness()))
        keep(options.name, record)
    print(json.dumps(record.to_json(), allow_nan=False) if options.json else _for_people(record))
    return 0 if record.complete else 1


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:10} {entry.question}" for name, entry in REGISTRY.items())
    commands = "\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"benchmarks:\n{names}\n\ncommands:\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(REGISTRY))
    parser.add_argument("--experiment", help="experiment to run; default: the benchmark's first")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--keep", action="store_true", help="also append the result to bench-out/results.jsonl")
    parser.add_argument("--seed", type=int, default=20130101)
    parser.add_argument("--minutes", type=float, help="duration of a soak; default 15")
    parser.add_argument(
        "--only", action="append", metavar="CONTESTANT", help="run only this contestant; may be repeated"
    )
    return parser


def _for_people(record: Record) -> str:
    lines = [f"experiment {record.experiment}"]
    for target in record.targets:
        value = "not measured" if target.value is None else f"{target.value:.2f}"
        sign = "≥" if target.bound == "at_least" else "≤"
        verdict = "met" if target.met else "NOT MET"
        lines.append(f"  {target.name:44} {value:>14}  ({sign} {target.target:g})  {verdict}")
    lines.append(f"  correctness {record.correctness.to_json()}")
    if record.took_s is not None:
        lines.append(f"  took {record.took_s:.0f} s")
    if record.skipped:
        lines.append(f"  skipped: {record.skipped}")
    lines += [f"  failed: {failure}" for failure in record.failures]
    return "\n".join(lines)


if __name__ == "__main__":
    # SIGTERM exits through the context managers, which end the processes that this one started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
