"""Metrics of routers: batches count once they are acknowledged, and failures count separately."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stateflow.clock import ManualClock
from stateflow.metrics.figures import CLIENT
from stateflow.router.router import Sent
from stateflow.rpc.apply import BatchRows

ROWS = BatchRows(b"", pa.record_batch({"k": ["a", "b", "c"]}), [0, 1], [1, 3])


def test_what_was_acknowledged_and_what_failed() -> None:
    sent, clock = Sent(), ManualClock()
    of = sent.of("Op")
    with of.measured(clock, ROWS) as done:
        assert of.under_way == 1
        clock.advance(0.3)
        done(2)
    with pytest.raises(ValueError, match="no"), of.measured(clock, ROWS):
        raise ValueError("no")
    with sent.of("Op").measured(clock, BatchRows.visit([0])) as done:
        done(0)
    found = sent.figures()
    assert found.keys() == {each.name for each in CLIENT}
    took = found.pop("stateflow_client_batch_seconds")["Op",]
    assert not isinstance(took, float)
    assert (took.count, took.total) == (2, 0.3)
    assert found == {
        "stateflow_client_rows_total": {("Op",): 3},
        "stateflow_client_batches_failed_total": {("Op",): 1},
        "stateflow_client_replayed_total": {("Op",): 2},
        "stateflow_client_batches_running": {("Op",): 0},
    }
