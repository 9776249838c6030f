"""Authors of a batch's records, and retries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateflow.ledger import Board, Ledger


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
