"""Uses of operators that a driver remembers, so that their batches are completed."""

from __future__ import annotations

import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.errors import InvalidArgument, OperatorUsedTwice
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
