"""A client of rows, without replicas."""

from __future__ import annotations

from typing import Any

import pytest

from stateflow.client import Cluster, stream
from stateflow.errors import Unavailable


def test_addresses_reach_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def router(*_: Any, **options: Any) -> Any:
        asked.append(options)
        raise Unavailable("not here")

    monkeypatch.setattr(stream, "Router", router)
    with pytest.raises(Unavailable):
        Cluster("nowhere:1").stream("Op", "s", addresses={"a:1": "nat:2"})
    assert asked == [{"addresses": {"a:1": "nat:2"}}]
