"""Cause every fault of the table, and write the page of verdicts: ``python -m tests.chaos``.

Most of the time the tests wait for leases and time limits, so two faults are caused at a time. Faults whose tests need
the whole machine are caused one by one.
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

#: seconds after which the tests of a row are stopped, and the row fails
TIMEOUT_S = 600
#: number of faults that are caused at the same time
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
    """Runs the tests of all rows, and yields each row with the result of :func:`run`. Rows that run alone come last."""
    shared, alone = ([row for row in rows if row.alone is each] for each in (False, True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(shared, pool.map(run, shared), strict=True)
    yield from ((row, run(row)) for row in alone)


def verdict(status: int, said: str, took_s: float) -> str:
    """Returns the verdict on a row.

    Args:
        status: the exit status of pytest.
        said: the output of pytest; its last line has the counts.
        took_s: how long the tests took.
    """
    if status:
        return f"{FAILED} ({took_s:.0f} s)"
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|skipped)", said.splitlines()[-1])}
    if "passed" not in counts:
        return SKIPPED
    return f"as said ({took_s:.0f} s)" + (f", {counts['skipped']} not possible here" if "skipped" in counts else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", help="cause only faults that contain this text; other verdicts stay on the page")
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
