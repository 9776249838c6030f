"""Tests of the count of files on the product's main walks: no walk enters more of them than its limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.walks import LIMITS, PACKAGES, over_limit, product_file, room_of, table_in, table_of, write_table


def test_no_walk_enters_more_files_than_its_limit() -> None:
    # in a process of its own with default settings: threads and variables of earlier tests would count
    ran = subprocess.run(
        [sys.executable, "-m", "tests.walks"],
        cwd=Path(__file__).parents[1],
        env={name: value for name, value in os.environ.items() if not name.startswith("STATEFLOW_")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, f"take a file out of the walk; limits only shrink: {ran.stdout}{ran.stderr}"
    for walk, limit in LIMITS.items():
        (line,) = (line for line in ran.stdout.splitlines() if line.startswith(f"{walk} "))
        assert 0 < int(line.removeprefix(walk).split()[0]) <= limit


def test_contributing_has_the_limits_of_now() -> None:
    rows = [[cell.strip() for cell in row.split("|")] for row in table_in().splitlines()[2:]]
    assert {walk: int(limit) for _, walk, _, limit, *_ in rows} == LIMITS, "write them: python -m tests.walks --write"
    assert [walk for _, walk, files, limit, *_ in rows if int(files) > int(limit)] == []


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (PACKAGES[0] / "state" / "keyed.py", "stateflow/state/keyed.py"),
        (PACKAGES[1] / "decisions" / "plan.py", "reconfig/decisions/plan.py"),
        (PACKAGES[0] / "rpc" / "common_pb2.py", None),
        (PACKAGES[0].parent / "tests" / "walks.py", None),
        ("<string>", None),
    ],
)
def test_generated_and_other_files_do_not_count(file: Path | str, found: str | None) -> None:
    assert product_file(str(file)) == found


def test_a_file_is_in_the_room_of_its_package() -> None:
    assert [room_of(file) for file in ("stateflow/clock.py", "stateflow/state/keyed.py")] == ["stateflow", "state"]


def test_a_walk_over_its_limit_is_named_with_its_files() -> None:
    walk, limit = next(iter(LIMITS.items()))
    files = {f"stateflow/f{number:03}.py" for number in range(limit + 1)}
    assert over_limit({walk: files - {"stateflow/f000.py"}}) == []
    (said,) = over_limit({walk: files})
    assert said.startswith(f"{walk}: {limit + 1} files, at most {limit}: stateflow/f000.py ")


def test_the_table_is_replaced_in_its_page(tmp_path: Path) -> None:
    page, walks = tmp_path / "page.md", {walk: {"stateflow/clock.py"} for walk in LIMITS}
    page.write_text(f"before\n\n{table_of({})}| old | 1 | 2 | state 1 |\n\nafter\n")
    write_table(walks, page)
    assert page.read_text() == f"before\n\n{table_of(walks)}\nafter\n"
    assert table_in(page) == table_of(walks)
