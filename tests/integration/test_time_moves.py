"""Timers, watermarks, windows and expiring state: they follow their partition through moves, kills and restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stateflow.testing import LocalCluster
from tests.integration.operators import Minutes

pytestmark = [pytest.mark.processes]
T0 = datetime(2013, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SCHEMA = "k string, at timestamp"


def test_windows_end_once_wherever_their_partition_is() -> None:
    with LocalCluster(Minutes, sites={"cloud": 1, "edge": 1}, partitions=4) as cluster:
        stream = cluster.stream("Minutes", source="s", schema=SCHEMA)
        stream.advance_watermark(T0)
        rows = [{"k": f"k{number % 8}", "at": T0 + number * MINUTE / 4} for number in range(40)]
        assert stream.send(rows) == []
        seen = stream.advance_watermark(T0 + 3 * MINUTE)
        moved = cluster.migrate("Minutes", partitions=range(4), to="edge").wait()
        assert moved.state == "COMPLETED"
        seen += stream.advance_watermark(T0 + 5 * MINUTE)
        cluster.kill("edge-0")
        cluster.restart("edge-0")
        # what was late before the move is late after it
        assert stream.send([{"k": "k0", "at": T0}]) == []
        assert stream.side_outputs["late"] == [{"k": "k0"}]
        seen += stream.advance_watermark(T0 + 100 * MINUTE)
        wanted: dict[tuple[str, datetime], int] = {}
        for row in rows:
            window = row["k"], T0 + (row["at"] - T0) // MINUTE * MINUTE
            wanted[window] = wanted.get(window, 0) + 1
        got = {(row["k"], row["minute"]): row["n"] for row in seen}
        assert len(got) == len(seen)
        assert got == wanted
        assert stream.advance_watermark(T0 + 200 * MINUTE) == []
