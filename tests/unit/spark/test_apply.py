"""The program's own cluster, as ``apply_operator`` starts it, and arguments that it refuses before that."""

from __future__ import annotations

import atexit
import math
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.errors import InvalidArgument
from stateflow.spark import apply
from tests.unit.operators import Count


def test_queries_end_before_each_cluster_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second cluster is registered at exit after the first one, and so its end would come first."""
    registered: list[tuple[Any, ...]] = []
    clusters: dict[str, SimpleNamespace] = {}

    def register(*call: Any) -> None:
        registered.append(call)

    def unregister(function: Any) -> None:
        registered[:] = [call for call in registered if call[0] != function]

    def embedded(directory: Path) -> SimpleNamespace:
        if directory.name not in clusters:
            clusters[directory.name] = SimpleNamespace(
                address=directory.name, cluster=SimpleNamespace(deploy=lambda *_, **__: None)
            )
            atexit.register(directory.name.upper)
        return clusters[directory.name]

    class Session:
        """A session, and what it knows of its queries."""

        def __init__(self, name: str) -> None:
            self.name, self.streams = name, self
            self.active = [SimpleNamespace(stop=lambda: ended.append(name))]

    ended: list[str | None] = []
    one, two = Session("one"), Session("two")
    monkeypatch.setattr(atexit, "register", register)
    monkeypatch.setattr(atexit, "unregister", unregister)
    monkeypatch.setattr(apply, "embedded", embedded)
    monkeypatch.setattr(apply, "master_of", lambda _: "local[2]")
    for session, place in ((one, "a"), (one, "b"), (two, "b"), (two, "a")):
        frame: Any = SimpleNamespace(sparkSession=session)
        operator: Any = object
        assert apply._own(frame, operator, None, tmp_path / place) == place
    for call, *arguments in reversed(registered):
        ended.append(call(*arguments))
    assert sorted(ended[:2]) == ["one", "two"], "queries of both sessions"
    assert [each for each in ended if each not in ("one", "two", None)] == ["B", "A"]


@pytest.mark.parametrize("wrong", [-1, -0.5, 2e9, math.inf, math.nan, None, "60", True])
def test_a_time_limit_that_cannot_be_is_refused_before_the_first_task(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first task failed, with the name of an environment variable that nobody had set."""
    monkeypatch.setattr(apply, "check_frame", lambda _: None)
    monkeypatch.setattr(apply, "tell_briefly", lambda: None)
    frame: Any = object()
    with pytest.raises(InvalidArgument, match=r"unavailable_timeout cannot be .*: use seconds, from 0") as caught:
        apply.apply_operator(frame, Count, cluster="127.0.0.1:1", unavailable_timeout=wrong)
    assert "STATEFLOW" not in str(caught.value)


def test_a_lateness_that_no_row_exceeds_leaves_a_watermark_that_fits_into_64_bits() -> None:
    """``timedelta.max`` stands for "never late"; the task failed at the watermark."""
    assert apply._micros(timedelta(days=1)) == 86_400_000_000
    span_us = (datetime.max - datetime.min) // timedelta(microseconds=1)
    assert span_us <= apply._micros(timedelta.max) < 1 << 62
    for wrong in (timedelta(microseconds=-1), 60):
        with pytest.raises(InvalidArgument, match="use a timedelta of zero or more"):
            apply._micros(wrong)  # type: ignore[arg-type]
