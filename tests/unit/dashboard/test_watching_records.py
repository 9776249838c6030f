"""Batches and record searches, over a ledger in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.dashboard import watching
from stateflow.dashboard.watching import Records
from stateflow.ledger import Board, Ledger


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger(url, author="alice") as made:
        board = Board(made)
        board.create_batch("tidy", "rm old", bid="b1")
        board.move_batch("b1", "GENERATE_IID")
        board.list_entities("b1", ["edge-1", "edge-2"])
        board.run("b1", lambda entity: {"freed": 7 if entity == "edge-1" else 8})
        board.create_batch("later", "rm new", bid="b2")
    opened = Records(url, "the page")
    yield opened
    opened.close()


def test_batches_come_with_their_counts_newest_first(records: Records) -> None:
    found = records.batches()
    assert [(each["bid"], each["status"], each["succeeded"]) for each in found] == [("b2", "NEW", 0), ("b1", "DONE", 2)]


def test_reconfigurations_are_shown_elsewhere_and_what_is_over_is_asked_once(records: Records) -> None:
    for number in range(40):
        records.board.create_batch("moves", "migrate", bid=f"reconfiguration/r{number}")
    assert [each["bid"] for each in records.batches()] == ["b2", "b1"]
    asked: list[str] = []
    original = records.board.batch
    records.board.batch = lambda bid: asked.append(bid) or original(bid)  # type: ignore[method-assign, func-returns-value]
    assert [each["succeeded"] for each in records.batches()] == [0, 2]
    assert asked == ["b2"]


def test_a_batch_under_way_is_shown_however_many_newer_ones_there_are(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "BATCHES_MAX", 3)
    monkeypatch.setattr(watching, "LOOKED_AT", 10)
    board = records.board
    board.move_batch("b2", "GENERATE_IID")
    board.list_entities("b2", ["edge-1"])
    board.move_batch("b2", "IN_PROGRESS")
    for number in range(10):
        board.create_batch("moves", "migrate", bid=f"reconfiguration/r{number}")
    assert [each["bid"] for each in records.batches()] == ["b2"]
    for number in range(4):
        board.create_batch("later", "rm", bid=f"new-{number}")
    newest = ["new-3", "new-2", "new-1"]
    assert [each["bid"] for each in records.batches()] == [*newest, "new-0", "b2"]
    monkeypatch.setattr(watching, "BATCHES_MAX", 1)
    assert [each["bid"] for each in records.batches()] == ["new-3", "b2"], "those in progress first"


def test_a_batch_that_was_tried_again_between_two_looks_has_its_new_counts(records: Records) -> None:
    board = records.board
    board.move_batch("b2", "GENERATE_IID")
    board.list_entities("b2", ["edge-1", "edge-2"])
    well: list[str] = []

    def work(entity: str) -> dict[str, int]:
        if entity not in well:
            raise RuntimeError("it cannot be removed")
        return {}

    board.run("b2", work)
    assert [(each["status"], each["failed"]) for each in records.batches()] == [("DONE", 2), ("DONE", 0)]
    well.append("edge-1")
    board.retry_batch("b2")
    board.run("b2", work)
    assert [(each["status"], each["failed"]) for each in records.batches()] == [("DONE", 1), ("DONE", 0)]


def test_an_item_is_found_by_its_name_with_all_its_records(records: Records) -> None:
    found = records.search("b1")
    assert (found["item"], found["state"]) == ("b1", "PROCESSED")
    assert [each["author"] for each in found["records"]] == ["alice"] * len(found["records"])


def test_records_are_found_by_words_newest_first(records: Records) -> None:
    found = records.search("EDGE-2 processed")
    assert {each["state"] for each in found["records"]} == {"PROCESSED"}
    assert all("edge-2" in each["item"] + each["payload"] for each in found["records"])
    everything = records.search("")
    numbers = [each["record"] for each in everything["records"]]
    assert numbers == sorted(numbers, reverse=True)
    assert everything["searched"] == len(numbers)
    assert records.search("nothing has this")["records"] == []
