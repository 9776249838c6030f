"""Send a million inputs to the decoders, and tens of thousands to RPCs and pages of real processes, and to clients."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.doors import CASES, DOORS, keep
from tests.fuzz.makers import Outcome

#: the corpus that runs have built up, which the next run extends; and the findings
CORPUS = Path(".fuzz")
FOUND = CORPUS / "found"
_DONE = re.compile(rb"stat::number_of_executed_units: *(\d+)")
_REACHED = re.compile(rb"cov: (\d+)")
#: file in the folder of a part that has what was found
FOUND_THERE = "found"
TOGETHER = 2
#: seconds for one door; each input has its own limit, which notices a hang
DOOR_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one door. ``reached``: edges of the code. ``problem``: output of the run, where something was found."""

    door: str
    inputs: int
    reached: int
    seconds: float
    problem: str = ""


def enter(door: str, runs: int, seed: int) -> Result:
    FOUND.mkdir(parents=True, exist_ok=True)
    before, began = set(FOUND.iterdir()), time.monotonic()
    arguments = [door, str(runs), str(seed), str(CORPUS / door), str(FOUND / f"{door}-")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.engine", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=DOOR_TIMEOUT_S,
    )
    inputs, reached = _DONE.findall(done.stdout), _REACHED.findall(done.stdout)
    problem = ""
    if done.returncode or not inputs:
        new = ", ".join(str(path) for path in sorted(set(FOUND.iterdir()) - before)) or "nothing was kept"
        problem = f"{done.stdout.decode(errors='replace')[-6000:]}\n{door}: ended with {done.returncode}; {new}"
    seconds = time.monotonic() - began
    return Result(door, int(inputs[-1]) if inputs else 0, int(reached[-1]) if reached else 0, seconds, problem)


def shares(inputs: int, doors: Sequence[str]) -> dict[str, int]:
    whole = sum(DOORS[name].weight for name in doors)
    return {name: 1 + int(inputs * DOORS[name].weight / whole) for name in doors}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="to the decoders; 0: none")
    parser.add_argument("--calls", type=int, default=40_000, help="to the RPCs of real processes; 0: none")
    parser.add_argument("--pages", type=int, default=20_000, help="to the HTTP pages of these processes; 0: none")
    parser.add_argument(
        "--answers", type=int, default=20_000, help="uses of clients whose servers are hostile; 0: none"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--door", choices=sorted(DOORS), action="append", help="only this one")
    parser.add_argument("--case", type=Path, help="give this file to --door, and end")
    parser.add_argument("--keep", action="store_true", help=f"keep what runs have put into {CORPUS}, and end")
    arguments = parser.parse_args()
    if arguments.case is not None:
        for name in arguments.door or ():
            print(f"{name}: {'let in' if DOORS[name](arguments.case.read_bytes()) else 'refused'}")
        return 0
    if arguments.keep:
        keep({name: [path.read_bytes() for path in (CORPUS / name).glob("*")] for name in arguments.door or DOORS})
        return 0
    print(f"seed {arguments.seed}", flush=True)
    wanted = shares(arguments.inputs, arguments.door or list(DOORS)) if arguments.inputs else {}
    results = []
    with ThreadPoolExecutor(TOGETHER) as pool:
        for result in pool.map(lambda name: enter(name, wanted[name], arguments.seed), wanted):
            results.append(result)
            what = f"{result.inputs:>9,} inputs  {result.reached:>5} edges  {result.seconds:4.0f} s"
            print(f"{result.door:<14}{what}  {'FOUND' if result.problem else 'ok'}", flush=True)
            if result.problem:
                print(result.problem, file=sys.stderr)
    wrong = sum(bool(result.problem) for result in results)
    inputs = sum(result.inputs for result in results)
    for outcome in (
        [] if arguments.door else others(arguments.calls, arguments.pages, arguments.answers, arguments.seed)
    ):
        inputs, wrong = inputs + sum(outcome.said.values()), wrong + len(outcome.wrong)
    print(f"{inputs:,} inputs, {wrong} found" + (f"; keep what is mended below {CASES.name}/" if wrong else ""))
    return 1 if wrong else 0


def others(calls: int, pages: int, answers: int, seed: int) -> Iterator[Outcome]:
    """Yields the outcome of each part without an engine."""
    if calls or pages:
        from tests.fuzz.calls import run as call

        with _part() as folder:
            called, asked = call(calls, pages, seed, folder)
            yield from (_told("RPCs", called, folder), _told("pages", asked, folder))
    if answers:
        from tests.fuzz.answers import run as answer

        with _part() as folder:
            yield _told("clients", answer(answers, seed, folder), folder)


@contextlib.contextmanager
def _part() -> Iterator[Path]:
    """Yields the folder of a part. It is removed, unless something was found."""
    folder = Path(tempfile.mkdtemp(prefix="stateflow-fuzz-"))
    yield folder
    if not (folder / FOUND_THERE).exists():
        shutil.rmtree(folder)


def _told(part: str, outcome: Outcome, folder: Path) -> Outcome:
    for problem in outcome.wrong:
        print(problem, file=sys.stderr)
    if outcome.wrong:
        (folder / FOUND_THERE).write_text("\n".join(outcome.wrong))
    said = ", ".join(f"{status.lower()} {number:,}" for status, number in outcome.said.most_common(20))
    called = sum(outcome.said.values())
    print(
        f"{part:<14}{called:>9,} inputs  {'FOUND; see ' + str(folder) if outcome.wrong else 'ok'}  ({said})", flush=True
    )
    return outcome


if __name__ == "__main__":
    sys.exit(main())
