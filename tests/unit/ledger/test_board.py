"""Authors of a batch's records."""

from __future__ import annotations

from pathlib import Path

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
