"""``python -m benchmarks NAME [--experiment ID] [--quick] --json``

One JSON object goes to standard output, progress to standard error. The exit status is 0 only when everything
was measured and every result was correct; a missed target does not change it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.record import Record


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``module``: ``run(experiment, quick=, seed=, only=) -> Record``. First experiment: the default."""

    module: str
    experiments: tuple[str, ...]
    question: str


REGISTRY = {
    "spark": Benchmark("benchmarks.spark", ("T1",), "faster than Spark's Python state API and its own aggregation?"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
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
    record: Record = run(experiment, quick=options.quick, seed=options.seed, only=options.only)
    print(json.dumps(record.to_json(), allow_nan=False) if options.json else _for_people(record))
    return 0 if record.complete else 1


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:10} {entry.question}" for name, entry in REGISTRY.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(REGISTRY))
    parser.add_argument("--experiment", help="id; the benchmark's first when left out")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--seed", type=int, default=20130101)
    parser.add_argument("--only", action="append", metavar="CONTESTANT", help="run these alone; may be repeated")
    return parser


def _for_people(record: Record) -> str:
    lines = [f"experiment {record.experiment}"]
    for target in record.targets:
        value = "not measured" if target.value is None else f"{target.value:.2f}"
        sign = "≥" if target.bound == "at_least" else "≤"
        verdict = "met" if target.met else "NOT MET"
        lines.append(f"  {target.name:44} {value:>14}  ({sign} {target.target:g})  {verdict}")
    lines.append(f"  correctness {record.correctness.to_json()}")
    lines += [f"  failed: {failure}" for failure in record.failures]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
