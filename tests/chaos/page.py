"""Renders and reads the page docs/chaos.md: the table of faults with the verdict of each fault's last run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.rows import ROWS, Row

PAGE = Path(__file__).parents[2] / "docs" / "chaos.md"
HEAD = """# Faults on real processes

`make chaos` causes each of these faults in real processes and writes this page. Where batches are sent, their outputs
and the state are compared with a model. "Lost" refers to acknowledged batches. More faults, one by one:
[faults.md](faults.md). The same classes drawn at random, and every state of the machines:
[correctness.md](correctness.md). Each step of a move: [crash-matrix.md](crash-matrix.md).

| fault | what is seen | lost | how it recovers | tests | verdict |
|---|---|---|---|---|---|
"""

#: verdicts that the committed page may contain: at least one test of the row ran, and all that ran passed
GOOD = re.compile(r"as said \(\d+ s\)(, \d+ not possible here)?")
SKIPPED, FAILED, NOT_RUN = "skipped: not possible here", "**failed**", "not run"


def table(verdicts: Mapping[str, str]) -> str:
    """Renders the page from ``verdicts``, which maps faults to verdicts."""
    return HEAD + "".join(f"{_line(row)} {verdicts[row.fault]} |\n" for row in ROWS)


def _line(row: Row) -> str:
    tests = ", ".join(f"`{each}`" for each in row.tests)
    return f"| {row.fault} | {row.seen} | {row.lost} | {row.recovers} | {tests} |"


def verdicts_of(text: str) -> dict[str, str]:
    """Returns fault → verdict, as a page says."""
    rows = [line.split(" | ") for line in text.removeprefix(HEAD).splitlines()]
    return {cells[0].removeprefix("| "): cells[-1].removesuffix(" |") for cells in rows}
