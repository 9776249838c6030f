"""OBSERVE: what monitoring costs falls into the turns of what is monitored."""

from __future__ import annotations

import http.server
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import observe, secure
from benchmarks.record import Correctness

KINDS = (observe.PLAIN, observe.METRICS, *observe.TRACED)


@pytest.mark.parametrize("seed", [1, 2, 20130101])
def test_in_four_rounds_each_kind_comes_once_after_each_other_kind(seed: int) -> None:
    rounds = [tuple(order) for order in itertools.islice(observe.orders(KINDS, seed), 20)]
    for first in range(0, 20, 4):
        four = rounds[first : first + 4]
        after = Counter(pair for order in four for pair in pairwise(order))
        assert after == dict.fromkeys(itertools.permutations(KINDS, 2), 1)
        for place in zip(*four, strict=True):
            assert set(place) == set(KINDS)
    assert len({tuple(rounds[first : first + 4]) for first in range(0, 20, 4)}) > 1, "it is not one rotation"


@contextmanager
def pages(answer: Callable[[int], int]) -> Iterator[str]:
    """Serves a page of four digits while the block runs. Yields its URL.

    Args:
        answer: gets the number of the request, and returns the status.
    """
    asked = itertools.count(1)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer(next(asked)))
            self.end_headers()
            self.wfile.write(b"4444")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            serving.join()


def test_a_page_that_cannot_be_read_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "EVERY_S", 0.001)
    several, refused = threading.Event(), threading.Event()

    def answer(number: int) -> int:
        if number == 3:
            several.set()
        if several.is_set() and broken:
            refused.set()
            return 503
        return 200

    broken = False
    sizes: list[int] = []
    failures: list[str] = []
    with pages(answer) as page:
        with observe.reading([page], sizes, failures):
            assert several.wait(30)
        assert (set(sizes), failures) == ({4}, [])
        broken = True
        with observe.reading([page], sizes, failures):
            assert refused.wait(30)
    assert failures == ["a page of metrics could not be read: HTTP Error 503: Service Unavailable"]


def test_spans_leave_within_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    class Load:
        sources = ()

        def __enter__(self) -> Load:
            did.append("begin")
            return self

        def __exit__(self, *_: object) -> None:
            did.append("end")

        def wait(self, seconds: float) -> None:
            did.append("send")

    side: Any = object.__new__(secure.Side)
    side.local, side.load = SimpleNamespace(certificates=None), lambda _: Load()
    monkeypatch.setattr(observe, "time", SimpleNamespace(sleep=lambda seconds: did.append(f"rest {seconds}")))
    observe.turn_of(side, 1.0, lambda: did.append("flush"))
    assert did == ["begin", "send", "send", "flush", "end", "flush", f"rest {1.5 * observe.EXPORT_S}"]
    del did[:]
    observe.turn_of(side, 1.0, None)
    assert did == ["begin", "send", "send", "end"]


def test_pages_are_read_only_in_the_turns_of_their_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = False
    turns: list[tuple[str, bool]] = []

    class Watched:
        def __init__(self, *, metrics: bool = False, environment: Any = None) -> None:
            self.kind = observe.METRICS if metrics else "traced" if environment else observe.PLAIN
            self.pages = ["page"] * metrics
            if environment:
                assert environment["OTEL_BSP_SCHEDULE_DELAY"] == f"{1000 * observe.EXPORT_S:.0f}"

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Side:
        def __init__(self, local: Watched, seed: int) -> None:
            self.local = local

        def correctness(self) -> Correctness:
            return Correctness(0, 0, 0, True)

    @contextmanager
    def read(pages: list[str], sizes: list[int], failures: list[str]) -> Iterator[None]:
        nonlocal reading
        reading = True
        yield
        reading = False
        sizes.append(4)

    def turn_of(side: Side, seconds: float, flush: Any) -> float:
        turns.append((side.local.kind, reading))
        assert (flush is not None) is (side.local.kind == "traced")
        return 1.0

    with pages(lambda number: 200) as endpoint:
        monkeypatch.setattr(observe, "collecting", lambda: nullcontext(endpoint))
        monkeypatch.setattr(observe, "provider", lambda *_: SimpleNamespace(shutdown=int, force_flush=int))
        monkeypatch.setattr(observe, "tracing", SimpleNamespace(use=lambda _: None))
        for name, stand_in in {"Watched": Watched, "Side": Side, "reading": read, "turn_of": turn_of}.items():
            monkeypatch.setattr(observe, name, stand_in)
        record = observe.run("OBSERVE", quick=True, seed=1)
    assert Counter(turns) == {(observe.PLAIN, False): 6, (observe.METRICS, True): 6, ("traced", False): 12}
    assert record.complete
    assert all(target.met for target in record.targets)
