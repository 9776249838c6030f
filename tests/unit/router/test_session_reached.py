"""Positions of a source: what follows from them, and which replicas are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from stateflow.errors import BatchIncomplete, NotOwner, PositionGap, StateflowError, Unavailable
from stateflow.partition.layout import Position
from stateflow.router import Asked, Reached, check_whole, newest_event_us
from stateflow.router import router as asking
from stateflow.router.session import Route, RoutingTable
from stateflow.settings import RouterSettings


def check(batch: int, *last: int | None) -> None:
    reached = {partition: Reached(at) for partition, at in enumerate(last) if at is not None}
    check_whole("Flow", "query:q", batch, len(last), reached)


@pytest.mark.parametrize(
    ("batch", "last"),
    [(0, (None, None)), (0, (0, None)), (1, (0, 0)), (1, (0, 1)), (1, (1, 1)), (7, (6, 7, 6))],
    ids=["first", "first, begun", "next", "next, begun", "replayed", "later"],
)
def test_a_batch_follows_one_that_is_everywhere(batch: int, last: tuple[int | None, ...]) -> None:
    check(batch, *last)


@pytest.mark.parametrize(
    ("batch", "last", "have"), [(1, (0, None), 1), (1, (None, 0, 0), 2), (9, (7, 8), 1)], ids=["first", "most", "later"]
)
def test_a_batch_that_is_in_some_partitions_only(batch: int, last: tuple[int | None, ...], have: int) -> None:
    with pytest.raises(BatchIncomplete) as caught:
        check(batch, *last)
    said = str(caught.value)
    assert f"batch {batch} was sent, but batch {batch - 1} is in only {have} of {len(last)} partitions" in said
    assert said.endswith(f"stateflow spark rewind CHECKPOINT --to-batch {batch - 1} --apply")


@pytest.mark.parametrize(
    ("batch", "last", "expected"),
    [
        (1, (None, None), 0),
        (9, (7, 7), 8),
        (9, (8, 3), 4),
        (9, (8, None), 0),
        (9, (9, 7), 8),
    ],
    ids=["nothing at all", "one that nobody has", "a loss", "one that is empty", "lost after the next was begun"],
)
def test_what_else_is_missing_was_lost(batch: int, last: tuple[int | None, ...], expected: int) -> None:
    """Any other missing batch is lost: sending the previous batch again would not restore it."""
    with pytest.raises(
        PositionGap, match=rf"the state expects batch {expected} .*: rewind the source to b.* {expected}$"
    ):
        check(batch, *last)


def test_the_newest_event_is_the_same_for_partitions_that_have_the_batch_already() -> None:
    reached = {0: Reached(4, 100, 90), 1: Reached(5, 300, 200), 2: Reached(4)}
    assert newest_event_us(reached, 5) == 200
    assert newest_event_us(reached, 6) == 300
    assert newest_event_us({}, 0) is None
    assert newest_event_us({0: Reached(0, 7)}, 0) is None


# -- asking ---------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Table:
    """A stub of the router. ``moves``: the owners that it learns at each refresh."""

    operator = "Flow"
    settings = RouterSettings()

    def __init__(self, owners: str) -> None:
        self.clock = Clock()
        self.spec = type("Spec", (), {"partitions": len(owners)})
        self.table = RoutingTable("Flow", 1, [Route(owner, owner, 1) for owner in owners])
        self.moves: Iterator[str] = iter(())
        self.random = Random(1)
        self.slept: list[float] = []

    def refresh(self) -> None:
        owners = next(self.moves, None)
        if owners is None:
            raise Unavailable("no controller", remedy="-")
        self.table.routes[:] = [Route(owner, owner, 2) for owner in owners]


Answer = Callable[[list[int]], dict[int, int] | StateflowError]


def replicas(monkeypatch: pytest.MonkeyPatch, router: Table, **answers: Answer) -> list[tuple[str, list[int]]]:
    asked: list[tuple[str, list[int]]] = []

    class Client:
        def __init__(self, address: str, timeout_s: float) -> None:
            self.address = address

        def begin_positions(
            self, operator: str, source: str, partitions: list[int], before: int
        ) -> Callable[[], dict[int, Position]]:
            asked.append((self.address, partitions))
            answer = answers[self.address](partitions)

            def result() -> dict[int, Position]:
                if isinstance(answer, StateflowError):
                    raise answer
                return {p: Position(batch, event_us=10 * batch) for p, batch in answer.items()}

            return result

    def sleep(seconds: float) -> None:
        router.clock.now += seconds
        router.slept.append(seconds)

    monkeypatch.setattr(asking, "ReplicaClient", Client)
    monkeypatch.setattr(asking, "sleep", sleep)
    return asked


def test_every_owner_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Table("aab")
    asked = replicas(monkeypatch, router, a=lambda _: {0: 4}, b=lambda parts: dict.fromkeys(parts, 5))
    answers = Asked(router, "s", 6, 60.0).answers()  # type: ignore[arg-type]
    assert answers == {0: Reached(4, 40), 2: Reached(5, 50)}, "the second has seen nothing"
    assert asked == [("a", [0, 1]), ("b", [2])]


def test_a_partition_on_the_move_is_asked_for_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Table("ab")
    router.moves = iter(["ab", "bb"])
    away = NotOwner("not owned here", remedy="-")
    asked = replicas(monkeypatch, router, a=lambda _: away, b=lambda parts: dict.fromkeys(parts, 5))
    assert Asked(router, "s", 6, 60.0).answers() == {0: Reached(5, 50), 1: Reached(5, 50)}  # type: ignore[arg-type]
    assert asked == [("a", [0]), ("b", [1]), ("a", [0]), ("b", [0])], "those that answered are not asked again"


def test_an_owner_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Table("ab")
    gone = Unavailable("no answer from b", remedy="-")
    replicas(monkeypatch, router, a=lambda _: {0: 1}, b=lambda _: gone)
    with pytest.raises(Unavailable, match=r"for \d+ s; last error: no answer from b .*partition=Flow/1 owner=b"):
        Asked(router, "s", 6, 60.0).answers()  # type: ignore[arg-type]
    assert 60 < router.clock.now < 62


def test_pauses_between_questions_vary_by_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    def slept(seed: int) -> list[float]:
        router = Table("a")
        router.random = Random(seed)
        replicas(monkeypatch, router, a=lambda _: Unavailable("no answer from a", remedy="-"))
        with pytest.raises(Unavailable):
            Asked(router, "s", 6, 10.0).answers()  # type: ignore[arg-type]
        return router.slept

    steady = [min(0.25, 0.01 * 2**number) for number in range(60)]
    found = slept(1)
    assert found[:20] == pytest.approx(steady[:20], rel=0.2501)
    assert len(set(found[10:])) == len(found[10:]), "also at the bound"
    assert found == slept(1) != slept(2)
