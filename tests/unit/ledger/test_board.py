"""Authors of a batch's records, runs, and retries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stateflow.errors import InvalidPayload
from stateflow.ledger import Board, Ledger
from tests.pages import ROOT, blocks


def test_who_moves_a_batch_is_its_author(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", author="page") as ledger:
        board = Board(ledger)
        bid = board.create_batch("drain edge-1", "drain")
        board.move_batch(bid, "GENERATE_IID")
        board.move_batch(bid, "PAUSED", "operate/alice via page")
        item = ledger.item(bid)
        assert item is not None
        assert item.records[-2].author == "page"
        assert item.records[-1].author == "operate/alice via page"


def test_an_entity_whose_result_cannot_be_recorded_has_failed_and_the_run_goes_on(tmp_path: Path) -> None:
    def raises() -> None:
        raise ValueError("x" * (20 << 20))

    work: dict[str, Any] = {
        "numpy": lambda: {"rows": np.int64(3)},
        "nan": lambda: float("nan"),
        "large": lambda: "x" * (16 << 20),
        "quotes": lambda: '"' * (6 << 20),  # too large only with the escapes of the record's payload
        "raises": raises,
        "good": lambda: {"b": "ü", "a": 1},
    }
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        board = Board(ledger)
        bid = board.create_batch("totals", "recompute.py")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, work)
        with pytest.raises(InvalidPayload, match="not JSON"):
            board.end_entity(bid, "nan", "COMPLETED", result=work["nan"]())
        ended = board.run(bid, lambda entity: work[entity]())
        assert (ended["status"], ended["succeeded"], ended["failed"]) == ("DONE", 1, 5)
        results = {each["entity"]: json.loads(each["result"]) for each in board.entities(bid)}
        assert results.pop("good") == {"b": "ü", "a": 1}
        said = ["int64 is not JSON", "Out of range float", "the limit is", "the limit is", "ValueError: xxx"]
        assert [part in each["error"] for part, each in zip(said, results.values(), strict=True)] == [True] * 5
        assert max(len(each["error"]) for each in results.values()) < 3000
        assert ledger.verify() == []


@pytest.mark.parametrize("writes", range(1, 7))
def test_the_program_of_the_docs_goes_on_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    [program] = [block.text for block in blocks(ROOT / "docs" / "ledger.md") if "board.run(" in block.text]
    monkeypatch.chdir(tmp_path)
    append, left = Ledger.append, iter(range(writes - 1))

    def crash(*arguments: Any, **options: Any) -> Any:
        append(*arguments, **options)
        if next(left, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "append", crash)
        with pytest.raises(KeyboardInterrupt):
            exec(program, {})
    names: dict[str, Any] = {}
    exec(program, names)
    assert (names["found"]["status"], names["found"]["succeeded"]) == ("DONE", 8)


def test_an_entity_that_completes_while_its_batch_is_retried_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        board, other = Board(ledger), Board(ledger)
        bid = board.create_batch("backup", "backup.py")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["a", "b"])
        board.move_batch(bid, "IN_PROGRESS")
        board.begin_entity(bid, "a")
        board.move_batch(bid, "PAUSED")

        def entities(*arguments: Any) -> list[dict[str, Any]]:
            found = other.entities(*arguments)
            other.end_entity(bid, "a", "COMPLETED", result=1)  # by another process, just after it was read
            return found

        monkeypatch.setattr(board, "entities", entities)
        assert board.retry_batch(bid)[1] == ["b"]
        assert [each["status"] for each in other.entities(bid)] == ["COMPLETED", "WAITING"]
        assert ledger.verify() == []
