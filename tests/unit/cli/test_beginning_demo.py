"""Options of the demonstration that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from stateflow.cli.beginning import demo
from stateflow.errors import InvalidArgument


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"follow": True, "rows": 1000},
            "--rows and --source do not apply with --follow: leave out these options, or --follow",
        ),
        ({"follow": True, "source": "jetstream"}, "--rows and --source do not apply with --follow"),
        ({"seconds": 20.0}, "--seconds and --rtt require --follow: add --follow"),
        ({"rtt": "10ms"}, "--seconds and --rtt require --follow"),
        ({"follow": True, "rtt": "soon"}, "'soon' is not a duration"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        demo(**options)
