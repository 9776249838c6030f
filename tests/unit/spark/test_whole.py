"""Uses of operators that a driver remembers, so that their batches are completed."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.errors import BatchIncomplete, InvalidArgument, OperatorUsedTwice, StaleBatch
from stateflow.router import Reached
from stateflow.spark import task as tasks
from stateflow.spark import whole
from stateflow.spark.task import OperatorTask


def applied(*, streaming: bool = True, operator: str = "Op") -> OperatorTask:
    return OperatorTask("c", operator, ("k",), 4, 1, b"", (), None, "s", uuid.uuid4().hex, 1.0, streaming=streaming)


def frame(*tasks: OperatorTask) -> Any:
    plan = "\n".join(f"MapInArrow {task.__name__}(k#1)#2, [k#3]" for task in tasks)
    shown = SimpleNamespace(toString=lambda: plan)
    return SimpleNamespace(_jdf=SimpleNamespace(queryExecution=lambda: SimpleNamespace(analyzed=lambda: shown)))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "_TASKS", {})
    monkeypatch.setattr(whole, "_REAL_TIME", {})
    monkeypatch.setattr(whole, "_watch_writers", lambda: None)
    monkeypatch.setattr(whole, "KEPT", 3)


def test_a_driver_that_applies_an_operator_for_ever_remembers_what_it_used_last() -> None:
    tasks = [applied() for _ in range(10)]
    for task in tasks:
        whole.complete_batches(task)
        assert whole._tasks_of(frame(tasks[0])) == [tasks[0]], "it is used again and again"
    assert list(whole._TASKS) == [tasks[8].run, tasks[9].run, tasks[0].run]


def test_what_is_not_remembered_any_more_is_not_quietly_left_to_itself() -> None:
    tasks = [applied() for _ in range(4)]
    for task in tasks:
        whole.complete_batches(task)
    with pytest.raises(InvalidArgument, match="call apply_operator again"):
        whole._tasks_of(frame(tasks[3], tasks[0]))


def test_both_kinds_are_found_and_a_static_frames_operator_is_no_concern() -> None:
    micro, real, static = applied(), applied(), applied(streaming=False, operator="a_b")
    whole.complete_batches(micro)
    whole.refuse_batches(real)
    assert list(whole._runs_of(frame(static, micro, real))) == [micro.run, real.run]
    assert whole._tasks_of(frame(static, micro)) == [micro]
    assert whole._NAMED.search(static.__name__.encode())
    assert whole._NAMED.search(micro.__name__.encode())


def test_an_empty_source_is_none() -> None:
    """Both uses would send as one source."""
    one, other = (replace(applied(), source=source) for source in (None, ""))
    assert one.real_time_source("q") == other.real_time_source("q")
    with pytest.raises(OperatorUsedTwice):
        whole._check_apart([one, other])


def writer(trigger: str | None, *tasks: OperatorTask) -> Any:
    """A writer of Spark Connect, whose server shows these applications in its plan."""
    nodes = "".join(f"+- MapInArrow {task.__name__}(k#1)#2, [k#3]\n" for task in tasks)
    parts = {"Parsed": "'x\n", "Analyzed": f"k: string\n{nodes}", "Optimized": ""}
    shown = "\n".join(f"== {name} Logical Plan ==\n{text}" for name, text in parts.items())
    client = SimpleNamespace(explain_string=lambda plan, explain_mode: shown)
    stream = SimpleNamespace(_child=SimpleNamespace(to_proto=lambda client: None))
    proto = SimpleNamespace(WhichOneof=lambda of: trigger)
    return SimpleNamespace(_session=SimpleNamespace(client=client), _write_stream=stream, _write_proto=proto)


def test_over_connect_a_trigger_must_fit_the_operators_that_the_server_sees() -> None:
    micro, real, other = applied(), applied(), applied()
    whole._remember(whole._TASKS, micro)
    whole._remember(whole._REAL_TIME, real)
    begun, live = whole._check_started_over_connect, "real_time_batch_duration"
    assert begun(writer(live)) == begun(writer(None)) == {}
    assert list(begun(writer(live, real))) == [real.run]
    assert list(begun(writer("once", micro))) == [micro.run]
    assert list(begun(writer(None, other))) == [other.run], "another client's"
    with pytest.raises(InvalidArgument, match=r"applied to micro-batches, .* apply_operator\(…, real_time=True\)"):
        begun(writer(live, micro))
    with pytest.raises(InvalidArgument, match="call apply_operator again"):
        begun(writer(live, other))
    with pytest.raises(InvalidArgument, match=r"applied in real-time mode, .* use trigger\(realTime=…\)"):
        begun(writer("available_now", real))
    whole._remember(whole._REAL_TIME, other)
    with pytest.raises(OperatorUsedTwice, match="pass a different source= to each"):
        begun(writer(live, real, other))


class Writer:
    """A writer of a session whose setting names a folder for checkpoints."""

    def __init__(self, folder: Path, task: OperatorTask) -> None:
        self._df = frame(task)
        values = {"spark.sql.streaming.checkpointLocation": str(folder)}
        self._df.sparkSession = SimpleNamespace(conf=SimpleNamespace(get=values.get))

    def option(self, key: str, value: Any) -> Writer:
        return self

    def options(self, **said: Any) -> Writer:
        return self

    def queryName(self, queryName: str) -> Writer:
        return self

    def start(self, *arguments: Any, **said: Any) -> str:
        return "started"

    def toTable(self, *arguments: Any, **said: Any) -> str:
        return "started"


def left(folder: Path) -> Path:
    """Makes the checkpoint of a query whose Spark was killed as it wrote its first offsets. Returns their file."""
    (folder / "offsets").mkdir(parents=True)
    (folder / "metadata").touch()
    file = folder / "offsets" / f".0.{uuid.uuid4()}.tmp"
    file.touch()
    return file


NAMED: list[Callable[[Any], Any]] = [
    lambda writer: writer.queryName("q").start(),
    lambda writer: writer.option("QUERYNAME", "q").start("out"),
    lambda writer: writer.options(queryName="q").toTable("out"),
    lambda writer: writer.queryName("other").start(queryName="q"),
    lambda writer: writer.toTable("out", None, None, None, "q"),
]


@pytest.mark.parametrize("start", NAMED)
def test_a_checkpoint_that_the_session_names_is_as_good_as_the_querys_own(
    start: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Spark keeps such a checkpoint under the query's name."""
    micro, real = applied(), applied()
    whole._remember(whole._TASKS, micro)
    whole._remember(whole._REAL_TIME, real)
    watched = type("Watched", (Writer,), {})
    whole._start_beside_what_was_left(watched)  # type: ignore[arg-type]
    mine, others = left(tmp_path / "q"), left(tmp_path / "other")
    assert start(watched(tmp_path, micro)) == "started"
    assert not mine.exists()
    assert others.exists()
    (tmp_path / "q" / "commits").mkdir()
    (tmp_path / "q" / "commits" / "0").write_text("v1\n{}")
    live = watched(tmp_path, real)
    live._stateflow_real_time = True
    with pytest.raises(InvalidArgument, match="has run in micro-batches"):
        start(live)


def test_a_checkpoint_of_its_own_comes_before_the_sessions_and_none_is_made_up(tmp_path: Path) -> None:
    micro = applied()
    whole._remember(whole._TASKS, micro)
    watched = type("Watched", (Writer,), {})
    whole._start_beside_what_was_left(watched)  # type: ignore[arg-type]
    files = {name: left(tmp_path / name) for name in ("q", "own")}
    watched(tmp_path, micro).start()
    assert all(file.exists() for file in files.values())
    watched(tmp_path, micro).queryName("q").start(checkpointLocation=str(tmp_path / "own"))
    assert [name for name, file in files.items() if file.exists()] == ["q"]


@pytest.mark.parametrize(("newest", "is_newer"), [({}, False), ({0: 3, 1: 2}, False), ({0: 3, 1: 4}, True)])
def test_a_checkpoint_that_lacks_the_plan_of_a_batch_in_the_state_is_refused(
    newest: dict[int, int], is_newer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark planned batch 4 anew. Partitions took fewer rows for a replay, and got the others again in batch 5."""
    micro, asked = applied(), list[str]()
    whole._remember(whole._TASKS, micro)
    watched = type("Watched", (Writer,), {})
    whole._start_beside_what_was_left(watched)  # type: ignore[arg-type]
    monkeypatch.setattr(whole, "Router", lambda *_: None)
    monkeypatch.setattr(whole, "positions", lambda _, source: asked.append(source) or newest)
    (tmp_path / "q" / "offsets").mkdir(parents=True)
    (tmp_path / "q" / "offsets" / "3").write_text("v1")
    (tmp_path / "q" / "metadata").write_text('{"id":"q-1"}')
    begun = watched(tmp_path, micro).queryName("q")
    if is_newer:
        with pytest.raises(StaleBatch, match=r"contains batch 4, .*planned no batch after 3, .*: put the newest copy"):
            begun.start()
    else:
        assert begun.start() == "started"
    assert asked == [micro.query_source("q-1")]


@pytest.mark.parametrize(
    ("proto", "arguments", "said", "name"),
    [
        ({"queryName": "a"}, (), {}, "a"),
        ({"queryname": "a", "b": "c"}, (), {"queryName": "q"}, "q"),
        ({}, (None, None, None, None, "q"), {"queryName": None}, "q"),
    ],
)
def test_over_connect_the_name_of_a_query_is_found(
    proto: dict[str, str], arguments: tuple[Any, ...], said: dict[str, Any], name: str
) -> None:
    for called in ("", "before"):
        found = whole._options_over_connect(SimpleNamespace(options=proto, query_name=called), arguments, said)
        assert found["queryname"] == (called if called and name == "a" else name)


class Owners:
    """A stand-in for the router, of owners that contain ``batch``, and ``current`` once the router knows them."""

    made = 0

    def __init__(self, *_: object, **__: object) -> None:
        Owners.made += 1
        self.spec, self.batch, self.current, self.refreshed = applied(), 7, 7, 0

    def refresh(self) -> None:
        self.refreshed += 1
        self.batch = self.current


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the router by :class:`Owners`. Returns a list for the evaluations of micro-batches."""
    evaluated: list[Any] = []

    def asked(router: Owners, _source: str, _batch: int, _timeout_s: float) -> Any:
        return SimpleNamespace(answers=lambda: dict.fromkeys(range(4), Reached(router.batch)))

    monkeypatch.setattr(tasks, "Router", Owners)
    monkeypatch.setattr(tasks, "_ROUTERS", {})
    monkeypatch.setattr(whole, "Asked", asked)
    monkeypatch.setattr(Owners, "made", 0)
    return evaluated


def micro_batch(evaluate: Callable[[], Any]) -> Any:
    """A micro-batch's frame, in a thread that lacks the query's run."""
    said = {"sql.streaming.queryId": "q"}
    writer = SimpleNamespace(format=lambda _: writer, mode=lambda _: writer, save=evaluate)
    session = SimpleNamespace(sparkContext=SimpleNamespace(getLocalProperty=said.get))
    return SimpleNamespace(sparkSession=session, write=writer)


def test_a_driver_keeps_its_router_while_a_controller_restarts(evaluated: list[Any]) -> None:
    """Each micro-batch of which a part was evaluated made a router, which failed without a controller."""
    task = applied()
    for number in (6, 7):
        whole._whole(lambda *_: None, [task], micro_batch(lambda: evaluated.append(1)), number)
    (router,) = tasks._ROUTERS.values()
    assert (Owners.made, router.refreshed, evaluated) == (1, 0, [])


@pytest.mark.parametrize("current", [7, 8])
def test_a_batch_counts_as_missing_only_if_its_present_owners_lack_it(current: int, evaluated: list[Any]) -> None:
    """A former owner that does not know its successor answers for the batches that it had."""
    task = applied()
    router: Any = task.kept_router()
    router.current = current
    batch = micro_batch(lambda: evaluated.append(1))
    if current == 8:
        whole._whole(lambda *_: None, [task], batch, 8)
    else:
        with pytest.raises(BatchIncomplete, match="batch 8 does not reach the operator"):
            whole._whole(lambda *_: None, [task], batch, 8)
    assert (router.refreshed, evaluated) == (1, [1])
