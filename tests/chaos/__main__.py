"""Cause every fault of the table, and write a page of verdicts: ``python -m tests.chaos``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

from tests.chaos.page import FAILED, NOT_RUN, PAGE, SKIPPED, table, verdicts_of
from tests.chaos.rows import ROWS, Row

#: seconds; a row that takes longer has not passed
TIMEOUT_S = 600


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
    verdicts, began, bad = dict[str, str](), time.monotonic(), 0
    for number, row in enumerate(ROWS, 1):
        if wanted is not None and wanted not in row.fault:
            verdicts[row.fault] = before.get(row.fault, NOT_RUN)
            continue
        verdicts[row.fault], said = run(row)
        bad += "**" in verdicts[row.fault]
        print(f"{number}/{len(ROWS)} {row.fault}: {verdicts[row.fault]}", flush=True)
        if "**" in verdicts[row.fault]:
            print(said, flush=True)
    PAGE.write_text(table(verdicts))
    print(f"{len(ROWS)} faults, {bad} not as said, {(time.monotonic() - began) / 60:.1f} min")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
