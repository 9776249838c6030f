"""What somebody writes who asks a cluster for something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.client.words import (
    call_off,
    keys_meant,
    partition_numbers,
    redistribute,
    runner_of,
    would_redistribute,
)
from stateflow.errors import InvalidArgument, UnknownPartition
from stateflow.moves import MoveOptions


class Asked:
    """A cluster that remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            return SimpleNamespace(cancel=lambda: SimpleNamespace(state="CANCELLED"))

        return call


@pytest.fixture
def cluster() -> Any:
    return Asked()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("0", [0]),
        ("5-9", [5, 6, 7, 8, 9]),
        ("5-5", [5]),
        ("1 4-5", [1, 4, 5]),
        ("1,4-5", [1, 4, 5]),
        (" 4-5 ,  1\t11 ", [1, 4, 5, 11]),
        ("5-7 3, 6 3", [3, 5, 6, 7]),
        ("all", list(range(12))),
        ("3 all", list(range(12))),
        ("007", [7]),
    ],
)
def test_partitions(text: str, numbers: list[int]) -> None:
    assert partition_numbers(text, 12) == numbers


@pytest.mark.parametrize(
    "word", ["", "x", "-1", "3-", "-", "1-2-3", "1.5", "ALL", "1,", ",1", "²", "9-5", "12345678901"]
)
def test_words_that_are_no_partitions(word: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: .*: write numbers, ranges like 5-9, or all"):
        partition_numbers(word, 12)


@pytest.mark.parametrize("word", ["12", "0-12", "3 999999999"])
def test_partitions_that_there_are_not(word: str) -> None:
    with pytest.raises(UnknownPartition, match="use 0 to 11"):
        partition_numbers(word, 12)


def test_a_key_is_text_first_and_json_then() -> None:
    assert list(keys_meant("N14228")) == ["N14228"]
    assert list(keys_meant("7")) == ["7", 7]
    assert list(keys_meant('["a", 1]')) == ['["a", 1]', ("a", 1)]


@pytest.mark.parametrize("policies", [[], ["ring"]])
def test_the_ring_alone_is_a_rebalance(cluster: Any, policies: list[str]) -> None:
    would_redistribute(cluster, policies, "Op")
    redistribute(cluster, policies, "Op", MoveOptions())
    assert cluster.calls == [("would_rebalance", "Op"), ("rebalance", "Op", MoveOptions())]


def test_with_others_it_is_a_placement(cluster: Any) -> None:
    would_redistribute(cluster, ["load", "ring"], "")
    redistribute(cluster, ["load", "ring"], "", MoveOptions())
    assert cluster.calls == [("propose", "load", "ring", ""), ("place", "load", "ring", "", MoveOptions())]


@pytest.mark.parametrize(
    ("batch", "call"),
    [
        ("reconfiguration/r1", ("cancel", "r1")),
        ("restores/x/1", ("cancel_restore", "x/1")),
        ("sweep/s1", ("sweep", "s1")),
        ("roll/s1", ("sweep", "s1")),
    ],
)
def test_a_batch_of_the_controller_is_called_off_there(cluster: Any, batch: str, call: tuple[str, str]) -> None:
    assert call_off(cluster, *runner_of(batch))
    assert cluster.calls == [call]


@pytest.mark.parametrize("batch", ["4b1f", "sweep", "sweep/", "mine/7"])
def test_others_are_of_whoever_works_by_the_board(batch: str) -> None:
    assert runner_of(batch) == ("", batch)
