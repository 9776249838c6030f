"""Windows against a model that sorts all rows first, through the harness on both backends, restarted in between."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow import (
    BatchOperator,
    Context,
    Namespace,
    Operator,
    SessionWindows,
    SlidingWindows,
    TumblingWindows,
    Window,
    state,
)
from stateflow.errors import DeclarationError, InvalidArgument, OperatorFailed, SchemaMismatch
from stateflow.operator.operator import describe
from stateflow.state import Declaration
from stateflow.state.cells import CELL
from stateflow.testing import OperatorHarness
from tests.sizes import sized

T0 = datetime(2013, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
COUNT = state.counter(name="count")
SEEN = state.set(int, name="seen")


def merge(into: Window, other: Window) -> None:
    into.state(COUNT).add(other.state(COUNT).value)
    into.state(SEEN).update(other.state(SEEN))


class Windowed(Operator):
    key = "k"
    event_time = "at"
    output = "k string, start timestamp, end timestamp, n long, seen array<long>"
    side_outputs = {"late": "k string, n long"}  # noqa: RUF012
    windows: Any

    def process(self, row: Any, ctx: Context) -> None:
        if self.windows.is_late(ctx):
            ctx.emit("late", (row.k, row.n))
        for window in self.windows.of(ctx):
            window.state(COUNT).value += 1
            window.state(SEEN).add(row.n)

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for window in self.windows.ended(timer, ctx):
            yield ctx.key, window.start, window.end, window.state(COUNT).value, list(window.state(SEEN))


class Tumbling(Windowed):
    windows = TumblingWindows(10 * MINUTE)


class Shifted(Windowed):
    windows = TumblingWindows(10 * MINUTE, offset=3 * MINUTE, allowed_lateness=5 * MINUTE)


class Sliding(Windowed):
    windows = SlidingWindows(10 * MINUTE, 4 * MINUTE)


class Sessions(Windowed):
    windows = SessionWindows(5 * MINUTE, merge)


class PatientSessions(Windowed):
    windows = SessionWindows(5 * MINUTE, merge, allowed_lateness=7 * MINUTE)


Rows = list[tuple[str, int, int]]  # key, minute, number


def aligned(size: int, every: int, offset: int = 0) -> Any:
    def bounds(rows: Rows) -> Any:
        for key, minute, number in rows:
            for start in range(-size * every + offset, 100, every):
                if start <= minute < start + size:
                    yield key, start, start + size, number

    return bounds


def sessions(gap: int) -> Any:
    def bounds(rows: Rows) -> Any:
        for key in {key for key, _, _ in rows}:
            mine = sorted((minute, number) for k, minute, number in rows if k == key)
            groups: list[list[tuple[int, int]]] = []
            for row in mine:
                if groups and row[0] - groups[-1][-1][0] <= gap:
                    groups[-1].append(row)
                else:
                    groups.append([row])
            for group in groups:
                for _, number in group:
                    yield key, group[0][0], group[-1][0] + gap, number

    return bounds


def expected(bounds: Any, rows: Rows) -> dict[Any, Any]:
    found: dict[Any, list[int]] = {}
    for key, start, end, number in bounds(rows):
        found.setdefault((key, T0 + start * MINUTE, T0 + end * MINUTE), []).append(number)
    return {window: (len(numbers), sorted(set(numbers))) for window, numbers in found.items()}


def as_rows(rows: Rows) -> list[dict[str, Any]]:
    return [{"k": key, "at": T0 + minute * MINUTE, "n": number} for key, minute, number in rows]


MODELS = [
    (Tumbling, aligned(10, 10)),
    (Shifted, aligned(10, 10, 3)),
    (Sliding, aligned(10, 4)),
    (Sessions, sessions(5)),
    (PatientSessions, sessions(5)),
]
rows_ = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 9)), max_size=12)


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
@pytest.mark.parametrize(("cls", "bounds"), MODELS)
@settings(max_examples=sized(100))
@given(batches=st.lists(rows_, max_size=3))
def test_windows_hold_what_falls_into_them(cls: type[Windowed], bounds: Any, batches: list[Rows], backend: str) -> None:
    harness = OperatorHarness(cls, partitions=2, backend=backend)
    for batch in batches:
        assert harness.send(as_rows(batch)) == []
        harness = OperatorHarness.restore(cls, harness.checkpoint())
    out = harness.advance_watermark(T0 + 1000 * MINUTE)
    got = {(r["k"], r["start"], r["end"]): (r["n"], r["seen"]) for r in out}
    assert len(got) == len(out)
    assert got == expected(bounds, [row for batch in batches for row in batch])
    assert [r["end"] for r in out if r["k"] == "a"] == sorted(r["end"] for r in out if r["k"] == "a")
    assert harness.advance_watermark(T0 + 2000 * MINUTE) == []
    harness.close()


@pytest.mark.parametrize(("cls", "ends"), [(Tumbling, 10), (Shifted, 18), (Sessions, 10), (PatientSessions, 17)])
def test_a_window_ends_once_when_lateness_has_passed(cls: type[Windowed], ends: int) -> None:
    with OperatorHarness(cls) as h:
        h.send(as_rows([("a", 5, 1)]))
        assert h.advance_watermark(T0 + ends * MINUTE - timedelta(microseconds=1)) == []
        (out,) = h.advance_watermark(T0 + ends * MINUTE)
        assert (out["n"], out["seen"]) == (1, [1])
        h.send(as_rows([("a", 5, 2)]))
        assert h.side_outputs["late"] == [{"k": "a", "n": 2}]
        assert h.advance_watermark(T0 + 500 * MINUTE) == []


def test_a_late_row_that_joins_an_open_session_counts() -> None:
    with OperatorHarness(Sessions) as h:
        h.send(as_rows([("a", 8, 1)]))
        h.advance_watermark(T0 + 12 * MINUTE)
        h.send(as_rows([("a", 6, 2)]))
        assert h.side_outputs["late"] == []
        (out,) = h.advance_watermark(T0 + 13 * MINUTE)
        assert (out["start"], out["n"]) == (T0 + 6 * MINUTE, 2)


def test_an_ended_window_leaves_nothing_behind() -> None:
    for cls, _ in MODELS:
        with OperatorHarness(cls, partitions=1) as h:
            h.send(as_rows([("a", 5, 1), ("a", 9, 2), ("a", 30, 3)]))
            h.advance_watermark(T0 + 500 * MINUTE)
            left = [entry for entry, _ in h._stores[0].scan(b"") if entry[:1] not in (b"m", b"r")]
            assert left == [], cls


class Two(Windowed):
    windows = TumblingWindows(10 * MINUTE)
    again = SlidingWindows(10 * MINUTE, 10 * MINUTE)

    def process(self, row: Any, ctx: Context) -> None:
        for window in [*self.windows.of(ctx), *self.again.of(ctx)]:
            window.state(COUNT).value += 1

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for windows in (self.windows, self.again):
            for window in windows.ended(timer, ctx):
                yield ctx.key, window.start, window.end, window.state(COUNT).value, []


def test_two_helpers_do_not_share_windows_of_the_same_time() -> None:
    with OperatorHarness(Two) as h:
        h.send(as_rows([("a", 5, 1)]))
        assert [row["n"] for row in h.advance_watermark(T0 + 10 * MINUTE)] == [1, 1]


def test_odd_windows_are_refused() -> None:
    with pytest.raises(DeclarationError, match="size cannot be"):
        TumblingWindows(timedelta())
    with pytest.raises(DeclarationError, match="size cannot be 5: use a timedelta"):
        TumblingWindows(5)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="gaps"):
        SlidingWindows(MINUTE, 2 * MINUTE)
    with pytest.raises(DeclarationError, match="allowed_lateness"):
        SessionWindows(MINUTE, merge, allowed_lateness=-MINUTE)


def test_a_row_without_a_time_is_refused() -> None:
    with (
        OperatorHarness(Tumbling) as h,
        pytest.raises(InvalidArgument, match=r"no event time.*key='a'.*filter out rows"),
    ):
        h.send([{"k": "a", "at": None, "n": 1}])


# -- helpers may have any names ------------------------------------------------------------------------------


class OddlyNamed(Operator):
    key, event_time = "k", "at"
    output = "which string, start timestamp, n long"
    one = TumblingWindows(10 * MINUTE, name="a")
    two = TumblingWindows(10 * MINUTE, name="a b")
    three = SessionWindows(10 * MINUTE, merge, name="a 1")
    four = TumblingWindows(10 * MINUTE, name="a%20b")

    def process(self, row: Any, ctx: Context) -> None:
        for helper in (self.one, self.two, self.three, self.four):
            for window in helper.of(ctx):
                window.state(COUNT).value += 1

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for helper in (self.one, self.two, self.three, self.four):
            for window in helper.ended(timer, ctx):
                yield helper.name, window.start, window.state(COUNT).value


def test_windows_end_whatever_their_helper_is_called() -> None:
    with OperatorHarness(OddlyNamed) as harness:
        harness.send([{"k": "x", "at": T0}, {"k": "x", "at": T0 + MINUTE}])
        ended = harness.advance_watermark(T0 + 60 * MINUTE)
        assert sorted((row["which"], row["n"]) for row in ended) == [("a", 2), ("a 1", 2), ("a b", 2), ("a%20b", 2)]
        assert not harness.advance_watermark(T0 + 120 * MINUTE)


def test_two_helpers_of_one_name_are_refused() -> None:
    class Twice(OddlyNamed):
        more = TumblingWindows(MINUTE, name="a")

    with pytest.raises(DeclarationError, match="'more' and 'one' are both stored as 'a'"):
        describe(Twice)


def test_a_timer_of_the_operators_own_is_not_taken_for_a_windows() -> None:
    class Own(OddlyNamed):
        def process(self, row: Any, ctx: Context) -> None:
            ctx.set_timer(T0, name=row.name)

    with OperatorHarness(Own) as harness, pytest.raises(InvalidArgument, match="is reserved for window timers"):
        harness.send([{"k": "x", "at": T0, "name": "window a 1 2"}])


def test_windows_that_no_row_can_have_are_refused_where_they_are_declared() -> None:
    class AtOnce(BatchOperator):
        key, event_time, output = "k", "at", "k string"
        hourly = TumblingWindows(60 * MINUTE)

        def process_batch(self, batch: Any, ctx: Any) -> Any: ...

    class Timeless(Operator):
        key, output = "k", "k string"
        hourly = TumblingWindows(60 * MINUTE)

        def process(self, row: Any, ctx: Context) -> Any: ...

    with pytest.raises(DeclarationError, match=r"'hourly' work row by row, .*operator=AtOnce.: derive from Operator"):
        describe(AtOnce)
    with pytest.raises(DeclarationError, match=r"'hourly' use event time, .*: set event_time"):
        describe(Timeless)


def test_a_row_that_falls_into_an_ended_session_and_is_not_late_begins_another() -> None:
    with OperatorHarness(Sessions) as h:
        h.send(as_rows([("a", 0, 1)]))
        (first,) = h.advance_watermark(T0 + 6 * MINUTE)
        h.send(as_rows([("a", 4, 2)]))
        assert h.side_outputs["late"] == []
        (second,) = h.advance_watermark(T0 + 9 * MINUTE)
    assert [(each["start"], each["end"], each["n"]) for each in (first, second)] == [
        (T0, T0 + 5 * MINUTE, 1),
        (T0 + 4 * MINUTE, T0 + 9 * MINUTE, 1),
    ]


class Reset(Operator):
    key, event_time = "k", "at"
    output = "k string, n long"
    total = state.counter()
    visits = SessionWindows(MINUTE, merge)

    def process(self, row: Any, ctx: Context) -> None:
        for window in self.visits.of(ctx):
            window.state(COUNT).add()
        ctx.state(COUNT).add()
        self.total.add()
        if row.reset:
            ctx.clear_state(Namespace())

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for window in self.visits.ended(timer, ctx):
            yield ctx.key, window.state(COUNT).value


@pytest.mark.parametrize("restored", [False, True])
def test_an_operator_that_clears_its_states_leaves_sessions_open(restored: bool) -> None:
    harness = OperatorHarness(Reset, partitions=1)
    harness.send([{"k": "a", "at": T0, "reset": False}])
    if restored:  # this process has not met the tags yet
        harness = OperatorHarness.restore(Reset, harness.checkpoint())
    harness.send([{"k": "a", "at": T0, "reset": True}])
    assert harness.state("a").total.value == 0
    assert harness.advance_watermark(T0 + 2 * MINUTE) == [{"k": "a", "n": 2}]
    harness.close()


class Left(Operator):
    """Leaves the loop over a window that has ended, as ``how`` says."""

    key, event_time = "k", "at"
    output = "k string, n long"
    how = ""
    hourly: Any = TumblingWindows(MINUTE)

    def process(self, row: Any, ctx: Context) -> None:
        for window in self.hourly.of(ctx):
            window.state(COUNT).add()

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        match type(self).how:
            case "next":
                yield ctx.key, next(self.hourly.ended(timer, ctx)).state(COUNT).value
            case "close":
                self.kept = self.hourly.ended(timer, ctx)
                window = next(self.kept)
                self.kept.close()
                yield ctx.key, window.state(COUNT).value
            case "unasked":
                self.hourly.ended(timer, ctx)
        if type(self).how in ("next", "close", "none", "unasked"):
            return
        for window in self.hourly.ended(timer, ctx):
            n = window.state(COUNT).value
            if type(self).how == "raise":
                raise ValueError("not now")
            yield ctx.key, n
            if type(self).how == "return":
                return
            break


class LeftSessions(Left):
    hourly = SessionWindows(MINUTE, merge)


def cells(h: OperatorHarness) -> list[bytes]:
    return [entry for entry, _ in h._stores[0].scan(CELL + cast(Declaration, COUNT).tag)]


@pytest.mark.parametrize("how", ["break", "return", "next", "close"])
@pytest.mark.parametrize("cls", [Left, LeftSessions])
def test_a_loop_that_is_left_keeps_nothing_of_the_window(
    cls: type[Left], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Left, "how", "raise")
    with OperatorHarness(cls, partitions=1) as h:
        h.send([{"k": "a", "at": T0}, {"k": "b", "at": T0}])
        assert len(cells(h)) == 2
        with pytest.raises(OperatorFailed, match="not now"):
            h.advance_watermark(T0 + 2 * MINUTE)
        assert len(cells(h)) == 2, "the error rolled everything back"
        monkeypatch.setattr(Left, "how", how)
        assert h.advance_watermark(T0 + 2 * MINUTE) == [{"k": "a", "n": 1}, {"k": "b", "n": 1}]
        assert cells(h) == []


@pytest.mark.parametrize("how", ["none", "unasked"])
@pytest.mark.parametrize("cls", [Left, LeftSessions])
def test_a_window_that_on_timer_leaves_alone_ends_with_its_timer(
    cls: type[Left], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OperatorHarness(cls, partitions=1) as h:
        h.send([{"k": "a", "at": T0}, {"k": "b", "at": T0}])
        monkeypatch.setattr(Left, "how", how)
        assert h.advance_watermark(T0 + MINUTE) == []
        assert [entry for entry, _ in h._stores[0].scan(CELL)] == []
        monkeypatch.setattr(Left, "how", "break")
        h.send([{"k": "a", "at": T0 + MINUTE}])
        assert h.advance_watermark(T0 + 3 * MINUTE) == [{"k": "a", "n": 1}]


class Keeping(Left):
    """Keeps what the first of two timers ended, and uses it in the second one, whose key is another."""

    kept: Any = None

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        how, kept = type(self).how, self.kept
        if kept is None:
            self.kept = self.hourly.ended(timer, ctx)
            if how != "begun":
                window = next(self.kept)
                self.kept = window if how == "window" else self.kept
        elif how == "window":
            yield ctx.key, kept.state(COUNT).value
        else:
            for window in kept:
                yield ctx.key, window.state(COUNT).value


class KeepingSessions(Keeping):
    hourly = SessionWindows(MINUTE, merge)


@pytest.mark.parametrize("how", ["begun", "resumed", "window"])
@pytest.mark.parametrize("cls", [Keeping, KeepingSessions])
def test_what_is_kept_of_a_timer_is_refused_in_the_next_one(
    cls: type[Keeping], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Left, "how", how)
    with OperatorHarness(cls, partitions=1) as h:
        h.send([{"k": "a", "at": T0}, {"k": "b", "at": T0}])
        with pytest.raises(InvalidArgument, match="whose row or timer is done"):
            h.advance_watermark(T0 + 2 * MINUTE)
        assert len(cells(h)) == 2


def test_a_window_of_a_row_is_refused_in_a_row_of_another_key() -> None:
    class Late(Left):
        kept: Any = None

        def process(self, row: Any, ctx: Context) -> None:
            self.kept = self.kept or self.hourly.of(ctx)
            self.kept[0].state(COUNT).add()

    with OperatorHarness(Late, partitions=1) as h:
        h.send([{"k": "a", "at": T0}, {"k": "a", "at": T0}])
        with pytest.raises(InvalidArgument, match="whose row or timer is done"):
            h.send([{"k": "b", "at": T0}])
        assert len(cells(h)) == 1


def test_a_session_ends_once() -> None:
    class Twice(LeftSessions):
        def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
            for _ in range(2):
                for window in self.hourly.ended(timer, ctx):
                    yield ctx.key, window.state(COUNT).value

    with OperatorHarness(Twice, partitions=1) as h:
        h.send([{"k": "a", "at": T0}])
        with pytest.raises(InvalidArgument, match="the session of this timer has ended already"):
            h.advance_watermark(T0 + 2 * MINUTE)


@pytest.mark.parametrize(
    ("before", "after", "kind"), [(Tumbling, Sessions, "SessionWindows"), (Sessions, Tumbling, "TumblingWindows")]
)
def test_windows_of_another_kind_under_the_same_name_are_named(
    before: type[Windowed], after: type[Windowed], kind: str
) -> None:
    with OperatorHarness(before) as h:
        h.send(as_rows([("a", 5, 1)]))
        stored = h.checkpoint()
    refused = pytest.raises(SchemaMismatch, match=rf"windows .* are {kind}, .*another name")
    with OperatorHarness.restore(after, stored) as again, refused:
        again.advance_watermark(T0 + 500 * MINUTE)
