"""Windows, sessions and time-bounded joins against a plain computation from the same rows and watermarks.

Runs on both stores, with restarts in between. The model of single states with a ttl is in test_state_ttl.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from stateflow import Context, Operator, SessionWindows, SlidingWindows, TumblingWindows, state
from stateflow.operator.timers import to_datetime, to_us
from stateflow.testing import OperatorHarness
from tests.sizes import sized

SECOND = 1_000_000
COUNT: Any = state.counter(name="count")
MEMBERS: Any = state.list(int, name="members")
#: in seconds
LATENESS, GAP, BOUND = 3, 4, 5


def seconds(count: int) -> timedelta:
    return timedelta(seconds=count)


def merge(into: Any, other: Any) -> None:
    into.state(COUNT).add(other.state(COUNT).value)
    into.state(MEMBERS).extend(other.state(MEMBERS))


class Windowed(Operator):
    key = "k"
    event_time = "at"
    output = "k string, start long, end long, n long, members array<long>"
    side_outputs = {"late": "n long"}  # noqa: RUF012
    windows: Any

    def process(self, row: Any, ctx: Context) -> None:
        late = self.windows.is_late(ctx)
        found = self.windows.of(ctx)
        assert late == (not found)
        if late:
            ctx.emit("late", (row.n,))
        for window in found:
            window.state(COUNT).add()
            window.state(MEMBERS).append(row.n)

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for window in self.windows.ended(timer, ctx):
            members = sorted(window.state(MEMBERS))
            yield ctx.key, window.start_us // SECOND, window.end_us // SECOND, window.state(COUNT).value, members


class Tumbling(Windowed):
    windows = TumblingWindows(seconds(6), offset=seconds(1), allowed_lateness=seconds(LATENESS))


class Sliding(Windowed):
    windows = SlidingWindows(seconds(6), seconds(2), allowed_lateness=seconds(LATENESS))


class Sessions(Windowed):
    windows = SessionWindows(seconds(GAP), merge, allowed_lateness=seconds(LATENESS))


class Joined(Operator):
    """Pairs of even and odd rows of a key that are at most BOUND apart."""

    key = "k"
    event_time = "at"
    output = "k string, start long, end long, n long, members array<long>"
    side_outputs = {"late": "n long"}  # noqa: RUF012
    even = state.map(int, int)
    odd = state.map(int, int)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        at_us = to_us(ctx.timestamp)
        until_us = at_us + BOUND * SECOND
        if ctx.watermark is not None and until_us <= to_us(ctx.watermark):
            ctx.emit("late", (row.n,))
            return
        mine, others = (self.odd, self.even) if row.n % 2 else (self.even, self.odd)
        for n, other_us in others.items():
            if abs(other_us - at_us) <= BOUND * SECOND:
                yield row.k, 0, 0, 2, sorted([row.n, n])
        mine[row.n] = at_us
        ctx.set_timer(until_us, name=str(row.n))

    def on_timer(self, timer: Any, ctx: Context) -> None:
        n = int(timer.name)
        del (self.odd if n % 2 else self.even)[n]


# --- plain computations: (rows as (key, at, n, watermark then), watermark now) → (what came out, what was late) -


def aligned(size: int, every: int, offset: int) -> Any:
    def compute(rows: list[Any], now: int | None) -> tuple[Counter[Any], set[int]]:
        windows: dict[Any, list[int]] = {}
        late = set()
        for key, at, n, watermark in rows:
            starts = [s for s in range(at - size + 1, at + 1) if (s - offset) % every == 0]
            still = [s for s in starts if watermark is None or s + size + LATENESS > watermark]
            for start in still:
                windows.setdefault((key, start, start + size), []).append(n)
            if not still:
                late.add(n)
        return ended(windows.items(), now), late

    return compute


def sessions(rows: list[Any], now: int | None) -> tuple[Counter[Any], set[int]]:
    found: list[list[Any]] = []
    late = set()
    for key, at, n, watermark in rows:
        open_ = [each for each in found if each[0] == key and (watermark is None or each[2] + LATENESS > watermark)]
        met = [each for each in open_ if each[1] <= at + GAP and at <= each[2]]
        if not met and watermark is not None and at + GAP + LATENESS <= watermark:
            late.add(n)
            continue
        found = [each for each in found if not any(each is one for one in met)]
        start, end = min([at, *(each[1] for each in met)]), max([at + GAP, *(each[2] for each in met)])
        found.append([key, start, end, [n, *(member for each in met for member in each[3])]])
    return ended((((key, start, end), members) for key, start, end, members in found), now), late


def ended(windows: Any, now: int | None) -> Counter[Any]:
    return Counter(
        (*place, len(members), tuple(sorted(members)))
        for place, members in windows
        if now is not None and place[2] + LATENESS <= now
    )


def joins(rows: list[Any], now: int | None) -> tuple[Counter[Any], set[int]]:
    late = {n for _, at, n, watermark in rows if watermark is not None and at + BOUND <= watermark}
    taken = [row for row in rows if row[2] not in late]
    pairs = Counter(
        (key, 0, 0, 2, tuple(sorted([n, other])))
        for index, (key, at, n, watermark) in enumerate(taken)
        for its_key, its_at, other, _ in taken[:index]
        if its_key == key and (n + other) % 2 and abs(at - its_at) <= BOUND
        if watermark is None or its_at + BOUND > watermark
    )
    return pairs, late


MODELS: list[tuple[type[Operator], Any]] = [
    (Tumbling, aligned(6, 6, 1)),
    (Sliding, aligned(6, 2, 0)),
    (Sessions, sessions),
    (Joined, joins),
]


class EventTime(RuleBasedStateMachine):
    cls: type[Operator]
    compute: Any
    backend: str

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="stateflow-property-"))
        self.harness = OperatorHarness(self.cls, partitions=2, backend=self.backend)
        self.rows: list[Any] = []
        self.watermark: int | None = None
        self.out: Counter[Any] = Counter()
        self.late: set[int] = set()
        self.copies = 0

    def take(self, rows: list[dict[str, Any]]) -> None:
        self.out += Counter((r["k"], r["start"], r["end"], r["n"], tuple(sorted(r["members"]))) for r in rows)
        self.late |= {row["n"] for row in self.harness.side_outputs.get("late", ())}
        assert (self.out, self.late) == type(self).compute(self.rows, self.watermark)

    @rule(rows=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), min_size=1, max_size=5))
    def send(self, rows: list[tuple[str, int]]) -> None:
        first = len(self.rows)
        numbered = [(key, at, first + place) for place, (key, at) in enumerate(rows)]
        self.rows += [(key, at, n, self.watermark) for key, at, n in numbered]
        epoch = to_datetime(0)
        self.take(self.harness.send([{"k": k, "at": epoch + seconds(at), "n": n} for k, at, n in numbered]))

    @rule(to=st.integers(0, 50))
    def advance(self, to: int) -> None:
        self.watermark = max(to, self.watermark or 0)
        self.take(self.harness.advance_watermark(to * SECOND))

    @rule()
    def restart(self) -> None:
        self.copies += 1
        snapshot = self.harness.checkpoint(self.root / str(self.copies))
        self.harness.close()
        self.harness = OperatorHarness.restore(self.cls, snapshot)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.advance(100)
        left = [
            cell for store in self.harness._stores for space in (b"c", b"n", b"t", b"u") for cell in store.scan(space)
        ]
        assert left == [], "nothing stays of what has ended"
        self.harness.close()
        shutil.rmtree(self.root)


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
@pytest.mark.parametrize(("cls", "compute"), MODELS, ids=[cls.__name__ for cls, _ in MODELS])
def test_event_time_is_as_computed(cls: type[Operator], compute: Any, backend: str) -> None:
    machine = type(cls.__name__, (EventTime,), {"cls": cls, "compute": staticmethod(compute), "backend": backend})
    examples = sized(120 if backend == "memory" else 24)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=12),
    )
