"""Hunt for faults that no gate finds: draw one command after another until stopped (``make hunt``).

    python -m tests.hunt [--draws N] [--seed S]

Each draw is a command with a seed of its own, chosen by weight. The hunt prints a finding with its seed and the command
that repeats it, and keeps it with its output in ``hunt-out/``. One draw in a hundred has a mistake planted; where the
draw does not find it the hunt itself is broken, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tests.gate import ROOT

FINDINGS = ROOT / "hunt-out"
#: seconds; a draw that takes longer hangs, which is a finding
LONGEST_S = 1800
PLANTED_EVERY = 100
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x")


@dataclass(frozen=True, slots=True)
class Quarry:
    """One kind of draw.

    ``weight``: how often it is drawn, relative to the others. ``command``: makes the command of a seed.
    """

    name: str
    weight: float
    command: Callable[[int], Sequence[str]]


def _simulated(seed: int) -> Sequence[str]:
    return (sys.executable, "-m", "tests.simulation.sim", "--first", str(seed), "--seeds", "200", "--processes", "1")


def _pytest(*arguments: str) -> Callable[[int], Sequence[str]]:
    return lambda seed: (*PYTEST, f"--hypothesis-seed={seed}", *arguments)


def _a_file(marker: str) -> Callable[[int], Sequence[str]]:
    """Makes the command of one file of integration tests, chosen by the seed."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "integration").glob("test_*.py"))
    return lambda seed: (*PYTEST, f"--hypothesis-seed={seed}", "-m", marker, Random(seed).choice(files))


QUARRIES = (
    Quarry("clusters", 40, _simulated),
    Quarry("checkpoints", 5, _pytest("tests/simulation/test_simulated_checkpoints.py", "-k", "no_seed")),
    Quarry("properties", 25, _pytest("tests/property")),
    Quarry("ledgers", 3, _pytest("tests/contract/test_ledger.py")),
    Quarry("crash matrix", 4, _pytest("tests/integration/test_crash_matrix.py")),
    Quarry("processes", 12, _a_file("processes and not spark")),
    Quarry("Spark", 8, _a_file("spark")),
    Quarry("pipelines that are killed", 4, _pytest("tests/integration/test_spark_kills.py")),
    Quarry("hostile input", 5, _pytest("tests/fuzz")),
    Quarry("the gate on one processor", 1, lambda _: ("taskset", "-c", "0", sys.executable, "-m", "tests.gate")),
)
PLANTED = Quarry("a planted mistake", 0, _pytest("tests/simulation/test_planted_mistakes.py", "--tier", "gate"))


def draw(random: Random, number: int) -> tuple[Quarry, int]:
    """Draws the kind of the draw with this number, and its seed."""
    seed = random.randrange(1, 2**31)
    if number % PLANTED_EVERY == PLANTED_EVERY - 1:
        return PLANTED, seed
    return random.choices(QUARRIES, [quarry.weight for quarry in QUARRIES])[0], seed


def chase(quarry: Quarry, seed: int) -> bool:
    """Runs one draw; returns whether nothing was found."""
    command = quarry.command(seed)
    variables = {"STATEFLOW_TEST_TIER": "hunt", "STATEFLOW_TEST_SEED": str(seed), "STATEFLOW_TEST_KILL_ROUNDS": "1"}
    if quarry is PLANTED or command[0] == "taskset":
        variables["STATEFLOW_TEST_TIER"] = "gate"
    began = time.monotonic()
    FINDINGS.mkdir(exist_ok=True)
    log = FINDINGS / f"{quarry.name.replace(' ', '-')}-{seed}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LONGEST_S)
            ended, sound = f"status {status}", status in (0, 5)  # 5: pytest had no test to run
        except subprocess.TimeoutExpired:
            ended, sound = f"not within {LONGEST_S} s", False
        finally:  # also the processes that the command started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(
        f"{time.strftime('%H:%M:%S')}  {time.monotonic() - began:6.0f} s  {quarry.name}, seed {seed}: {ended}",
        flush=True,
    )
    if sound:
        log.unlink()
    else:
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        print(f"FOUND, see {log.relative_to(ROOT)}; again: {said} {shlex.join(command)}", flush=True)
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, help="so many; without end by default")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="what is drawn follows from it")
    arguments = parser.parse_args()
    os.nice(19)
    random, found, number = Random(arguments.seed), 0, 0
    print(f"hunting from seed {arguments.seed} on; findings are kept in {FINDINGS}", flush=True)
    while arguments.draws is None or number < arguments.draws:
        quarry, seed = draw(random, number)
        if not chase(quarry, seed):
            found += 1
            if quarry is PLANTED:
                print("a planted mistake was not found: the hunt is broken", flush=True)
                return 2
        number += 1
    print(f"{number} draws, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
