"""Cause every fault of the table, and write a page of verdicts: ``python -m tests.chaos``.

Most tests wait for leases and time limits, so two faults are caused at a time, except those that need the machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.chaos.page import FAILED, NOT_RUN, PAGE, SKIPPED, table, verdicts_of
from tests.chaos.rows import ROWS, Row

#: seconds; a row that takes longer has not passed
TIMEOUT_S = 600
#: faults at a time
AT_ONCE = 2


def run(row: Row) -> tuple[str, str]:
    """Runs a row's tests. Returns its verdict, and the end of pytest's output."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *row.ids]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"**did not end** within {TIMEOUT_S} s", ""
    took = time.monotonic() - began
    return verdict(done.returncode, done.stdout, took), done.stdout[-5000:]


def run_all(rows: Sequence[Row]) -> Iterator[tuple[Row, tuple[str, str]]]:
    """Runs all rows' tests, and yields each row with what :func:`run` returned: first those that share the machine."""
    shared, alone = ([row for row in rows if row.alone is each] for each in (False, True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(shared, pool.map(run, shared), strict=True)
    yield from ((row, run(row)) for row in alone)


def verdict(status: int, said: str, took_s: float) -> str:
    """Makes a verdict of pytest's exit status and its output ``said``, whose last line has the counts."""
    if status:
        return f"{FAILED} ({took_s:.0f} s)"
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|skipped)", said.splitlines()[-1])}
    if "passed" not in counts:
        return SKIPPED
    return f"as said ({took_s:.0f} s)" + (f", {counts['skipped']} not possible here" if "skipped" in counts else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", help="faults that have this in their text; the page keeps the others' verdicts")
    wanted = parser.parse_args().only
    before = verdicts_of(PAGE.read_text()) if PAGE.exists() else {}
    verdicts = {row.fault: before.get(row.fault, NOT_RUN) for row in ROWS}
    rows = [row for row in ROWS if wanted is None or wanted in row.fault]
    began, bad = time.monotonic(), 0
    for number, (row, (came, said)) in enumerate(run_all(rows), 1):
        verdicts[row.fault] = came
        bad += "**" in came
        print(f"{number}/{len(rows)} {row.fault}: {came}", flush=True)
        if "**" in came:
            print(said, flush=True)
    PAGE.write_text(table(verdicts))
    print(f"{len(rows)} faults, {bad} not as said, {(time.monotonic() - began) / 60:.1f} min")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
