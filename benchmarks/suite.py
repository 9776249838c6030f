"""Run every experiment in a process of its own, and then make the report.

If an experiment fails, the others still run, and the exit status is 1. An experiment that ends without a record, e.g.
because it took too long, gets one that says so.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks import report
from benchmarks.record import REPOSITORY, failed
from benchmarks.results import RESULTS, keep, read

#: time limits of an experiment; a quick one should take no longer than ``record.QUICK_S``, and is marked if it does
LIMIT_QUICK_S, LIMIT_S = 600, 4 * 3600
#: seconds within which an experiment must end its processes
GRACE_S = 60


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks suite", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="quick sizes")
    parser.add_argument("--seed", type=int, default=20130101)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; default: all")
    options = parser.parse_args(arguments)
    if RESULTS.exists():
        RESULTS.replace(RESULTS.with_suffix(".previous.jsonl"))
    unfinished = [
        f"{name} {experiment}"
        for name, experiment in chosen(quick=options.quick, names=options.names)
        if not _run(name, experiment, quick=options.quick, seed=options.seed)
    ]
    if RESULTS.exists():
        report.main([])
    if unfinished:
        print(f"benchmarks_failed: {', '.join(unfinished)}: run one alone to see why", file=sys.stderr)
    return 1 if unfinished else 0


def chosen(*, quick: bool, names: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields (benchmark, experiment) in the order of the registry."""
    from benchmarks.__main__ import REGISTRY

    for name, benchmark in REGISTRY.items():
        if names and name not in names:
            continue
        for experiment in benchmark.experiments:
            if not (quick and experiment in benchmark.full_only):
                yield name, experiment


def _run(name: str, experiment: str, *, quick: bool, seed: int) -> bool:
    command = [sys.executable, "-m", "benchmarks", name, "--experiment", experiment, "--keep", "--seed", str(seed)]
    command += ["--quick"] * quick
    print(f"== {name} {experiment}", file=sys.stderr, flush=True)
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup, and then also by children
    kept = _records()
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        status = process.wait(LIMIT_QUICK_S if quick else LIMIT_S)
        reason = "" if status == 0 else f"ended with status {status} and without a record"
    except subprocess.TimeoutExpired as error:
        reason = f"took over {error.timeout:.0f} s"
        print(f"benchmark_too_slow: {name} {experiment} {reason}", file=sys.stderr)
        process.send_signal(signal.SIGINT)
        _await_end(process)
    except KeyboardInterrupt:  # the terminal has sent it to the child too
        _await_end(process)
        raise
    took = time.monotonic() - began
    if reason and _records() == kept:
        keep(name, replace(failed(experiment, reason, quick=quick, seed=seed), took_s=took), RESULTS)
    print(f"== {name} {experiment}: {took:.0f} s, {'FAILED' if reason else 'done'}", file=sys.stderr, flush=True)
    return not reason


def _records() -> int:
    return len(read(RESULTS)) if RESULTS.exists() else 0


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Waits until an experiment and its processes have ended, because they would take CPU time from the next one."""
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
