"""Options of a move: the client and the controller accept the same ones."""

from __future__ import annotations

from typing import Any

import pytest

from reconfig.controller.service import _options_of as options_of
from stateflow.client import Cluster
from stateflow.errors import InvalidArgument
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import message_of
from stateflow.types import DEFAULT_OPTIONS, MoveOptions

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_pause_ms": -1}, "max_pause_ms cannot be -1: pass a positive number of milliseconds, or omit it"),
    ({"max_pause_ms": 0}, "max_pause_ms cannot be 0: "),
    ({"max_pause_ms": True}, "max_pause_ms cannot be True: "),
    ({"max_pause_ms": "50ms"}, "max_pause_ms cannot be '50ms': "),
    ({"max_bandwidth": float("nan")}, "max_bandwidth cannot be nan: pass a positive number of bytes per second"),
    (
        {"patience_s": float("inf")},
        "patience_s cannot be inf: pass a positive number of seconds, or omit it for the controller's setting",
    ),
    ({"strategy": "magic"}, "there is no strategy 'magic': use auto, stop-and-restart, pause-and-copy, fluid, batched"),
    ({"strategy": ""}, "there is no strategy ''"),
    ({"order": "hottest"}, "there is no order 'hottest': use hot-first, hot-last, number"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED)
def test_what_cannot_be_is_refused_where_it_is_written(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        MoveOptions(**asked)
    assert str(refused.value).startswith(f"invalid_argument: {said}")


def test_keywords_change_what_the_options_say() -> None:
    given = MoveOptions(50.0, strategy="warm-up")
    asked = given.changed(patience_s=5, max_pause_ms=None)
    assert asked == options_of(message_of(cpb.MoveOptions, asked)) == MoveOptions(patience_s=5.0, strategy="warm-up")
    sent = message_of(cpb.MoveOptions, DEFAULT_OPTIONS.changed())
    assert options_of(sent) == DEFAULT_OPTIONS == options_of(cpb.MoveOptions())


def test_a_keyword_that_is_none_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(InvalidArgument, match=r"a move has no option 'max_pause': use max_pause_ms, max_bandwidth, "):
        Cluster("127.0.0.1:1").migrate("Op", [0], "edge", max_pause=50)


def test_what_is_sent_from_elsewhere_is_looked_at_as_well() -> None:
    with pytest.raises(InvalidArgument, match="max_pause_ms cannot be 0"):
        options_of(cpb.MoveOptions(max_pause_ms=0.0))
