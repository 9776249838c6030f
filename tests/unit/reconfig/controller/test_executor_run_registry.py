"""Watchers of a reconfiguration always hear how it ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from reconfig.controller.executor import Running, RunRegistry
from reconfig.decisions.plan import ReconfigurationState
from stateflow.ledger import Ledger
from stateflow.reports import Reconfiguration
from tests.writing import Written


@pytest.mark.parametrize("ends_while", ["the first report is sent", "nothing is sent"])
def test_the_last_report_is_the_final_one(tmp_path: Path, ends_while: str) -> None:
    """The last report is the final one, though the reconfiguration may end while an earlier report is being sent."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    runs = RunRegistry(Written(ledger))
    running = Running(Reconfiguration("r", "Op", "RUNNING", (), 0.0))
    runs.running = {"r": running}

    async def watch() -> list[str]:
        said: list[str] = []
        async for report in runs.watch("r"):
            said.append(report.state)
            if report.state == "RUNNING":
                if ends_while == "the first report is sent":
                    runs.settle(running, ReconfigurationState.COMPLETED)
                else:
                    asyncio.get_running_loop().call_soon(runs.settle, running, ReconfigurationState.COMPLETED)
        return said

    async def in_time() -> list[str]:
        return await asyncio.wait_for(watch(), 10)

    try:
        assert asyncio.run(in_time()) == ["RUNNING", "COMPLETED"]
    finally:
        ledger.close()
