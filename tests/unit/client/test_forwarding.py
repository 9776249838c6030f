"""A forwarding client: its outbox, its errors and its end. No replica serves; tests answer what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stateflow.client.forwarding import ForwardingClient
from stateflow.errors import OutboxForeign
from stateflow.operator.operator import describe
from stateflow.rpc.clients import ControllerClient
from stateflow.status import Deployment
from stateflow.types import OperatorSpec, ReplicaInfo
from tests.unit.operators import Count

SPEC = describe(Count, 2)
Made = Callable[..., ForwardingClient]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Yields a function that makes a client of the same outbox. ``spec``: the operator as it is deployed then."""
    clients: list[ForwardingClient] = []

    def make(spec: OperatorSpec = SPEC, **options: Any) -> ForwardingClient:
        # port 1 of this machine: nothing listens there
        deployment = Deployment(spec, 1, (ReplicaInfo("a", "edge", "127.0.0.1:1"),) * spec.partitions, (1,) * 2)
        monkeypatch.setattr(ControllerClient, "deployment", lambda *_: deployment)
        clients.append(ForwardingClient("127.0.0.1:1", "Count", "s", tmp_path, patience_s=0.01, **options))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


def test_an_outbox_does_not_go_on_with_an_operator_of_another_key_or_other_outputs(made: Made) -> None:
    """Stored rows are sorted by the former key, and stored outputs would be read by the new schema."""
    made().close()
    with pytest.raises(OutboxForeign, match="has another output schema than when the outbox was created"):
        made(replace(SPEC, output_schema=SPEC.output_schema[:-8] + b"12345678"))
    with pytest.raises(OutboxForeign, match="has another key than when"):
        made(replace(SPEC, key=("n",)))
    made(replace(SPEC, state_schema='[{"name": "more"}]')).close()
