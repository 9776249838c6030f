"""Timers, watermarks and side outputs, through the harness on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stateflow import BatchOperator, Context, Operator, TumblingWindows, state
from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, InvalidArgument, OperatorFailed, UnknownState
from stateflow.operator.operator import side_schemas
from stateflow.operator.output import OutputReader
from stateflow.operator.timers import Domain, Timers, to_us
from stateflow.partition.positions import Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import MemoryStore
from stateflow.testing import OperatorHarness
from stateflow.types import PartitionId
from tests.sizes import sized

T0 = datetime(2013, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Sessions(Operator):
    """Counts rows of a key until an hour passes without one."""

    key = "k"
    output = "k string, n long, closed timestamp"
    side_outputs = {"late": "k string, at timestamp"}  # noqa: RUF012
    event_time = "at"

    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> None:
        if ctx.watermark is not None and ctx.timestamp < ctx.watermark:
            ctx.emit("late", {"k": row.k, "at": row.at})
            return
        self.n.value += 1
        ctx.set_timer(ctx.timestamp + HOUR, name="close")

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield timer.key, self.n.value, timer.at
        self.n.value = 0


@pytest.fixture(params=["memory", "rocksdb"])
def harness(request: pytest.FixtureRequest) -> Iterator[OperatorHarness]:
    with OperatorHarness(Sessions, partitions=3, backend=request.param) as made:
        yield made


def at(hours: float) -> datetime:
    return T0 + hours * HOUR


def test_a_session_closes_when_the_watermark_passes_its_gap(harness: OperatorHarness) -> None:
    assert harness.send([{"k": "a", "at": at(0)}, {"k": "b", "at": at(0.2)}, {"k": "a", "at": at(0.5)}]) == []
    assert harness.advance_watermark(at(1.2)) == [{"k": "b", "n": 1, "closed": at(1.2)}]
    assert harness.advance_watermark(at(1.2)) == [], "a timer fires once"
    assert harness.advance_watermark(at(1.4)) == []
    assert harness.advance_watermark(at(1.5)) == [{"k": "a", "n": 2, "closed": at(1.5)}]
    assert harness.state("a").n.value == 0


def test_late_rows_go_to_the_side_output(harness: OperatorHarness) -> None:
    harness.advance_watermark(at(5))
    assert harness.send([{"k": "a", "at": at(4)}, {"k": "a", "at": at(6)}]) == []
    assert harness.side_outputs == {"late": [{"k": "a", "at": at(4)}]}
    harness.send([{"k": "a", "at": at(6)}])
    assert harness.side_outputs == {"late": []}


def test_timers_survive_a_restart(harness: OperatorHarness) -> None:
    harness.send([{"k": key, "at": at(0)} for key in "abcdef"])
    with OperatorHarness.restore(Sessions, harness.checkpoint()) as again:
        fired = again.advance_watermark(at(1))
        assert sorted(row["k"] for row in fired) == list("abcdef")
        assert again.advance_watermark(at(2)) == []


class Chain(Operator):
    """An operator whose timers each set the next one; for processing time, names and failures, too."""

    key = "k"
    output = "k string, name string"
    log = state.map(str, int)

    def process(self, row: Any, ctx: Context) -> None:
        match row.do:
            case "chain":
                ctx.set_timer(T0, name="0")
            case "clock":
                ctx.set_timer(10_000_000, domain="processing")
            case "replace":
                ctx.set_timer(T0, name="x")
                ctx.set_timer(T0 + HOUR, name="x")
            case "delete":
                ctx.delete_timer(name="x")
            case "odd":
                ctx.set_timer(T0, domain="lunar")
            case "naive":
                ctx.set_timer(datetime(2013, 1, 1))
            case "unknown":
                ctx.emit("nowhere", {})
            case "set and fail":
                ctx.set_timer(T0, name="never")
                raise RuntimeError("no")

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[str, str]]:
        self.log[timer.name or "clock"] = self.log.get(timer.name or "clock", 0) + 1
        yield ctx.key, timer.name or "clock"
        if timer.name.isdigit() and int(timer.name) < 3:
            ctx.set_timer(timer.at + HOUR / 4, name=str(int(timer.name) + 1))
        if timer.name == "3":
            ctx.delete_timer(name="3")  # the timer has fired: there is nothing to delete


@pytest.fixture(params=["memory", "rocksdb"])
def chain(request: pytest.FixtureRequest) -> Iterator[OperatorHarness]:
    with OperatorHarness(Chain, partitions=2, backend=request.param) as made:
        yield made


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_a_timer_set_by_a_timer_fires_in_the_same_advance_when_it_is_due(chain: OperatorHarness) -> None:
    chain.send([{"k": "a", "do": "chain"}])
    assert names(chain.advance_watermark(T0 + HOUR / 2)) == ["0", "1", "2"]
    assert names(chain.advance_watermark(T0 + HOUR)) == ["3"]
    assert dict(chain.state("a").log) == {"0": 1, "1": 1, "2": 1, "3": 1}


def test_processing_time(chain: OperatorHarness) -> None:
    chain.send([{"k": "a", "do": "clock"}])
    assert chain.advance_processing_time(9.9) == []
    assert names(chain.advance_processing_time(0.1)) == ["clock"]
    assert chain.advance_processing_time(100) == []
    assert chain.advance_watermark(T0) == [], "the domains are separate"


def test_setting_again_replaces_and_deleting_deletes(chain: OperatorHarness) -> None:
    chain.send([{"k": "a", "do": "replace"}, {"k": "b", "do": "replace"}])
    assert chain.advance_watermark(T0) == []
    chain.send([{"k": "b", "do": "delete"}])
    assert chain.advance_watermark(T0 + HOUR) == [{"k": "a", "name": "x"}]


@pytest.mark.parametrize("do", ["odd", "naive", "unknown"])
def test_misuse_is_named(chain: OperatorHarness, do: str) -> None:
    with pytest.raises(InvalidArgument):
        chain.send([{"k": "a", "do": do}])


def test_a_failed_batch_sets_no_timer(chain: OperatorHarness) -> None:
    with pytest.raises(OperatorFailed):
        chain.send([{"k": "a", "do": "set and fail"}])
    assert chain.advance_watermark(T0 + HOUR) == []


def test_a_bad_side_output_is_refused() -> None:
    class Odd(Sessions):
        side_outputs = {"late": 7}  # type: ignore[dict-item] # noqa: RUF012

    with pytest.raises(DeclarationError):
        side_schemas(Odd)


class Again(Operator):
    """An operator whose timer, after it fired, is set again to the time that has passed."""

    key = "k"
    output = "name string"
    n = state.counter()

    def process(self, row: Any, ctx: Context) -> None:
        ctx.set_timer(100, name="event")

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[str]]:
        self.n.value += 1
        if self.n.value == 1:
            ctx.set_timer(0, name="processing", domain="processing")
        if timer.name == "processing":
            ctx.set_timer(100, name="event")
        yield (timer.name,)


def test_a_timer_set_again_to_the_time_at_which_it_just_fired_is_due_at_once() -> None:
    with OperatorHarness(Again, partitions=1) as harness:
        harness.send([{"k": "a"}])
        assert names(harness.advance_watermark(200)) == ["event", "processing"]
        assert harness._hosts[0].needs_no_visit(0).event_us <= 100
        assert names(harness.advance_watermark(201)) == ["event"]


def test_a_failed_batch_that_is_forgotten_later_does_not_disturb_the_running_one() -> None:
    timers = Timers(MemoryStore())
    timers.set("a", "x", 1, "event")
    failed = timers.due(Domain.EVENT, 5)  # kept alive by the error's traceback
    assert next(failed).name == "x"
    timers.rollback()
    timers.set("a", "x", 1, "event")
    fired = []
    for timer in timers.due(Domain.EVENT, 5):
        fired.append(timer.name)
        if timer.name == "x":
            failed.close()  # type: ignore[attr-defined]
            timers.set("a", "z", 3, "event")
    assert fired == ["x", "z"]


# -- watermarks over sources ----------------------------------------------------------------------------------


def _host(store: MemoryStore) -> PartitionProcessor:
    return PartitionProcessor(Watched, PartitionId("Watched", 0), store, epoch=1)


class Watched(Operator):
    key = "k"
    output = "watermark timestamp"

    def process(self, row: Any, ctx: Context) -> None:
        raise AssertionError("no rows are sent")

    def on_watermark(self, watermark: datetime, ctx: Context) -> list[tuple[datetime]]:
        assert ctx.watermark == watermark
        return [(watermark,)]


def test_the_watermark_is_the_minimum_over_sources_and_never_goes_back() -> None:
    store = MemoryStore()
    reader = OutputReader(pa.schema([("watermark", pa.timestamp("us", tz="UTC"))]), {})
    host = _host(store)
    steps = [
        # source, batch, its watermark in hours → what on_watermark is given
        ("a", 0, 1, 1),
        ("b", 0, None, None),  # promises nothing
        ("a", 1, 3, 3),
        ("c", 0, 2, None),  # joins late: the partition's watermark stays
        ("a", 2, 5, None),
        ("c", 1, 4, 4),
        ("c", 2, 1, None),  # a source cannot take its promise back
        ("c", 3, 9, 5),
    ]
    for number, (source, batch, hours, told) in enumerate(steps):
        if number % 3 == 2:
            host = _host(store)  # restarted
        promise = None if hours is None else to_us(at(hours))
        output = host.apply(Batch(source, batch, watermark_us=promise), b"", b"", 0).output
        assert reader.rows([output])[0] == ([] if told is None else [{"watermark": at(told)}]), (source, batch)


# -- Timers against a plain model -----------------------------------------------------------------------------


class TimersMachine(RuleBasedStateMachine):
    """Timers over a store, with commits, rollbacks and restarts, against a dict."""

    keys = st.sampled_from(["a", "b", 1, "1"])
    tags = st.sampled_from(["", "x", "xy"])
    domains = st.sampled_from(list(Domain))
    times = st.integers(-20, 20)

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.timers = Timers(self.store)
        self.saved: dict[tuple[Domain, Any, str], int] = {}
        self.model = dict(self.saved)

    @rule(key=keys, name=tags, domain=domains, at_us=times)
    def set(self, key: Any, name: str, domain: Domain, at_us: int) -> None:
        self.timers.set(key, name, at_us, domain)
        self.model[domain, key, name] = at_us

    @rule(key=keys, name=tags, domain=domains)
    def delete(self, key: Any, name: str, domain: Domain) -> None:
        self.timers.delete(key, name, domain)
        self.model.pop((domain, key, name), None)

    @rule(domain=domains, until=times)
    def fire(self, domain: Domain, until: int) -> None:
        fired = [(to_us(t.at), t.key, t.name) for t in self.timers.due(domain, until)]
        due = {k: at_us for k, at_us in self.model.items() if k[0] is domain and at_us <= until}
        assert sorted(map(repr, fired)) == sorted(repr((at_us, key, name)) for (_, key, name), at_us in due.items())
        assert [at_us for at_us, _, _ in fired] == sorted(at_us for at_us, _, _ in fired)
        for identity in due:
            del self.model[identity]

    @rule()
    def commit(self) -> None:
        mutations = Mutations()
        self.timers.collect(mutations)
        self.store.apply(mutations)
        self.timers.end_batch()
        self.saved = dict(self.model)

    @rule()
    def roll_back(self) -> None:
        self.timers.end_batch()
        self.model = dict(self.saved)

    @rule()
    def reopen(self) -> None:
        self.commit()
        self.timers = Timers(self.store)

    @invariant()
    def pending_is_what_is_set(self) -> None:
        for key in ["a", 1]:
            shown = {(t.domain, t.key, t.name): to_us(t.at) for t in self.timers.pending(key)}
            wanted = {k: v for k, v in self.model.items() if k[1] == key and type(k[1]) is type(key)}
            assert shown == wanted

    def teardown(self) -> None:
        self.commit()
        entries = list(self.store.scan(b""))
        assert len(entries) == 2 * len(self.model), "nothing is left behind"


TestTimersMachine = TimersMachine.TestCase
TestTimersMachine.settings = settings(max_examples=sized(240), stateful_step_count=40)


class Remembering(Operator):
    """An operator that reads its state where there is no current key."""

    key, event_time = "k", "at"
    output = "k string, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> None:
        self.n.value += 1

    def on_watermark(self, watermark: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield "?", self.n.value


@pytest.mark.parametrize("rows", [[], [{"k": "a", "at": T0}]], ids=["without rows", "behind a row"])
def test_a_watermark_has_no_current_key(rows: list[dict[str, Any]]) -> None:
    with OperatorHarness(Remembering) as harness:
        if rows:
            harness.send(rows)
        with pytest.raises(UnknownState, match="while no key is bound"):
            harness.advance_watermark(T0 + timedelta(hours=1))


class Lapsing(Operator):
    """An operator with a value that has a ttl in event time, which a timer reads and writes."""

    key, event_time = "k", "at"
    output = "seen string"
    v = state.value(str, ttl=600, ttl_domain="event")

    def process(self, row: Any, ctx: Context) -> None:
        if row.set:
            self.v.value = row.set
            ctx.set_timer(row.at + timedelta(hours=1))
        else:
            ctx.emit("now", (str(self.v.value),))

    side_outputs = {"now": "seen string"}  # noqa: RUF012

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield (str(self.v.value),)
        self.v.value = "written by the timer"


def test_a_batch_has_one_event_time_for_rows_timers_and_what_they_write() -> None:
    with OperatorHarness(Lapsing) as harness:
        harness.advance_watermark(T0)
        harness.send([{"k": "a", "at": T0, "set": "x"}])
        # the timer fires an hour later: a value of ten minutes is gone, and what the timer writes lives for ten more
        assert harness.advance_watermark(T0 + timedelta(hours=1)) == [{"seen": "None"}]
        harness.send([{"k": "a", "at": T0, "set": None}])
        assert harness.side_outputs["now"] == [{"seen": "written by the timer"}]
        harness.advance_watermark(T0 + timedelta(hours=1, minutes=10))
        harness.send([{"k": "a", "at": T0, "set": None}])
        assert harness.side_outputs["now"] == [{"seen": "None"}]


@pytest.mark.parametrize("name", ["\ud800", 7, None, b"x"])
def test_a_timers_name_is_text(name: Any) -> None:
    class Named(Remembering):
        def process(self, row: Any, ctx: Context) -> None:
            ctx.set_timer(row.at, name=name)

    with OperatorHarness(Named) as harness, pytest.raises(InvalidArgument, match="is not a valid timer name"):
        harness.send([{"k": "a", "at": T0}])


class Deaf(Operator):
    """An operator that sets a timer and has no method that answers it."""

    key, output, event_time = "k", "k string", "at"

    def process(self, row: Any, ctx: Context) -> None:
        ctx.set_timer(ctx.timestamp + HOUR)


class DeafColumns(BatchOperator):
    key, output = "k", "k string"

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        ctx.set_timers(batch.column("k"), T0)


class DeafWindows(Operator):
    key, output, event_time = "k", "k string", "at"
    hours = TumblingWindows(HOUR)

    def process(self, row: Any, ctx: Context) -> None:
        self.hours.of(ctx)


@pytest.mark.parametrize(
    ("operator", "lacks"), [(Deaf, "on_timer"), (DeafColumns, "on_timers"), (DeafWindows, "on_timer")]
)
def test_a_timer_that_nothing_answers_is_refused_when_it_is_set(operator: type[Operator], lacks: str) -> None:
    """The timer is refused when it is set.

    It used to fail every batch from when it was due.
    """
    refused = pytest.raises(InvalidArgument, match=rf"the operator has no {lacks}\(\) .*define {lacks}\(self, …\)")
    with OperatorHarness(operator, partitions=1) as harness, refused:
        harness.send([{"k": "a", "at": T0}])


class Quiet(Operator):
    key, output, event_time = "k", "k string, n long, closed timestamp", "at"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> None: ...


class QuietColumns(BatchOperator):
    key, output, n = "k", "k string, n long, closed timestamp", Quiet.n

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None: ...


@pytest.mark.parametrize(("later", "lacks"), [(Quiet, "on_timer"), (QuietColumns, "on_timers")])
def test_a_timer_of_an_earlier_version_that_nothing_answers_is_named(
    harness: OperatorHarness, later: type[Operator], lacks: str
) -> None:
    harness.send([{"k": "a", "at": T0}])
    refused = pytest.raises(
        OperatorFailed, match=rf"earlier version set, .* has no {lacks}\(\) .*deploy a version with"
    )
    with OperatorHarness.restore(later, harness.checkpoint()) as again, refused:
        again.advance_watermark(at(5))
