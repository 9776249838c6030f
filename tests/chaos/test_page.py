"""The page docs/chaos.md has the rows of the table, and every test that a row names exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.chaos.__main__ import verdict
from tests.chaos.page import GOOD, PAGE, table, verdicts_of
from tests.chaos.rows import ROWS, Row

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_tables() -> None:
    text = PAGE.read_text()
    assert table(verdicts_of(text)) == text
    assert len({row.fault for row in ROWS}) == len(ROWS)
    assert [fault for fault, said in verdicts_of(text).items() if not GOOD.fullmatch(said)] == []


@pytest.mark.parametrize(
    ("status", "last", "said", "good"),
    [
        (0, "7 passed in 1.61s", "as said (2 s)", True),
        (0, "5 passed, 2 skipped in 75.1s (0:01:15)", "as said (2 s), 2 not possible here", True),
        (0, "2 skipped in 0.10s", "skipped: not possible here", False),
        (1, "1 failed, 6 passed in 1.61s", "**failed** (2 s)", False),
        (5, "no tests ran in 0.01s", "**failed** (2 s)", False),
    ],
)
def test_a_verdict_is_what_pytest_said(status: int, last: str, said: str, good: bool) -> None:
    assert verdict(status, f".......  [100%]\n{last}\n", 1.61) == said
    assert bool(GOOD.fullmatch(said)) is good


@pytest.mark.parametrize("test", sorted({each for row in ROWS for each in row.ids}))
def test_a_test_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    defined = {
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert any(each.startswith("test_") for each in defined)
    assert not name or name in defined


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_a_row_runs_alone_if_one_of_its_tests_must(row: Row) -> None:
    files = {(ROOT / each.partition("::")[0]).read_text() for each in row.ids}
    assert row.alone is any("pytest.mark.alone" in text for text in files)


def test_verdicts_are_read_as_they_are_written() -> None:
    verdicts = {row.fault: f"as said ({number} s)" for number, row in enumerate(ROWS)}
    assert verdicts_of(table(verdicts)) == verdicts
