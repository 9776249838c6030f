"""A client asks all partitions while some of them have no owner that may serve."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.client import stream
from stateflow.clock import ManualClock
from stateflow.errors import InvalidArgument, LeaseLost, NotOwner, StateflowError, Unavailable
from stateflow.partition.layout import Position
from stateflow.partition.positions import SourceView
from stateflow.settings import RouterSettings


class Owners:
    """Owners of two partitions, at one address. They answer with ``error`` until ``back_at_s``."""

    def __init__(self, patch: pytest.MonkeyPatch, error: type[StateflowError], back_at_s: float) -> None:
        self.clock, self.asked = ManualClock(), list[list[int]]()
        self._error, self._back_at_s = error, back_at_s
        patch.setattr(stream, "ReplicaClient", lambda _: SimpleNamespace(positions=self._answer))
        patch.setattr(stream, "sleep", self.clock.advance)

    def _answer(self, _operator: str, _source: str, partitions: list[int]) -> dict[int, Position]:
        self.asked.append(partitions)
        if self.clock.monotonic() < self._back_at_s:
            raise self._error("not now", remedy="ask again")
        return dict.fromkeys(partitions, Position(7))

    def positions(self) -> dict[int, Position]:
        routes = [SimpleNamespace(address="a"), SimpleNamespace(address="a")]
        table = SimpleNamespace(routes=routes, unserved={})
        settings = RouterSettings(unavailable_timeout_s=30)
        router: Any = SimpleNamespace(
            operator="Op", table=table, settings=settings, clock=self.clock, refresh=lambda: None
        )
        return stream.look(router, "s")


@pytest.mark.parametrize("error", [LeaseLost, NotOwner, Unavailable])
def test_an_owner_that_was_away_is_asked_again(error: type[StateflowError], monkeypatch: pytest.MonkeyPatch) -> None:
    owners = Owners(monkeypatch, error, back_at_s=0.05)
    assert owners.positions() == {0: Position(7), 1: Position(7)}
    assert owners.asked == [[0, 1], [0], [0], [0], [0], [1]]


def test_an_owner_is_waited_for_as_long_as_a_batch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Owners(monkeypatch, Unavailable, back_at_s=29).positions() == {0: Position(7), 1: Position(7)}
    gone = Owners(monkeypatch, Unavailable, back_at_s=60)
    with pytest.raises(Unavailable):
        gone.positions()
    assert 30 <= gone.clock.monotonic() < 31


# -- sources -------------------------------------------------------------------------------------------------------


class Sources:
    """Replica ``a`` owns partitions 0 and 2, and ``b`` owns 1. Each keeps 9 bytes of output for batch 4 of ``s``.

    Replica ``a`` does what ``misses`` names for partition 0, then answers that it does not own partition 2, unless it
    is asked for one partition alone.
    """

    def __init__(self, patch: pytest.MonkeyPatch, misses: str = "") -> None:
        self.asked: list[tuple[str, str, list[int]]] = []
        self.retired, self.dropped, self._misses = set[int](), set[int](), misses
        patch.setattr(stream, "ReplicaClient", self._replica)
        routes = [SimpleNamespace(address=address) for address in "aba"]
        table, settings = SimpleNamespace(routes=routes, unserved={}), RouterSettings()
        self.router: Any = SimpleNamespace(
            operator="Op", table=table, settings=settings, clock=ManualClock(), refresh=lambda: None
        )

    def _replica(self, address: str) -> Any:
        def here(question: str, partitions: list[int]) -> Iterator[int]:
            self.asked.append((address, question, partitions))
            for partition in partitions:
                if partition == 2 and len(partitions) > 1 and question == self._misses:
                    raise NotOwner("not here", remedy="ask again")
                yield partition

        def sources(_: str, partitions: list[int]) -> dict[int, list[SourceView]]:
            return {p: [SourceView("s", 4, 1, 9, retired=p in self.retired)] for p in here("list", partitions)}

        def retire_source(_: str, __: str, partitions: list[int]) -> None:
            for partition in here("retire", partitions):
                self.retired.add(partition)

        def drop_output(_: str, __: str, batch: int, partitions: list[int], apply: bool) -> dict[int, int]:
            sizes: dict[int, int] = {}
            for partition in here("drop" if apply else "look", partitions):
                if batch == 4 and partition not in self.dropped:
                    sizes[partition] = 9
                    self.dropped.update([partition] * apply)
            return sizes

        return SimpleNamespace(sources=sources, retire_source=retire_source, drop_output=drop_output)


def once(*questions: str) -> list[tuple[str, str, list[int]]]:
    """Returns requests to both replicas, one to each for each question."""
    return [request for each in questions for request in (("a", each, [0, 2]), ("b", each, [1]))]


def test_a_question_about_sources_is_one_request_to_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Sources(monkeypatch)
    (report,) = stream.list_sources(replicas.router)
    assert (report.source, report.partitions, report.bytes, report.retired) == ("s", 3, 27, False)
    stream.drop_output(replicas.router, "s", 4, apply=False)
    stream.drop_output(replicas.router, "s", 4, apply=True)
    stream.retire_source(replicas.router, "s")
    dry = once("list", "look")
    assert replicas.asked == [*once("list"), *dry, *dry, *once("drop"), *once("list", "retire")]


@pytest.mark.parametrize("misses", ["", "list", "retire", "look", "drop"])
def test_what_a_replica_did_before_it_missed_a_partition_counts(misses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Sources(monkeypatch, misses)
    assert stream.drop_output(replicas.router, "s", 4, apply=True).sizes == {0: 9, 1: 9, 2: 9}
    assert stream.retire_source(replicas.router, "s") == 3
    assert replicas.dropped == replicas.retired == {0, 1, 2}
    assert stream.retire_source(replicas.router, "s") == 0
    with pytest.raises(InvalidArgument, match=r"no partition keeps output of batch 4 .* newest batch is 4"):
        stream.drop_output(replicas.router, "s", 4, apply=True)
    with pytest.raises(InvalidArgument, match="no partition knows a source 'other'"):
        stream.retire_source(replicas.router, "other")
