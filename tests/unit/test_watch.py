"""Who watches a reconfiguration is always told how it ended."""

from __future__ import annotations

import asyncio

import pytest

from reconfig.controller.reconfigurations import Reconfigurations, Running
from stateflow.rpc import controller_pb2 as cpb


@pytest.mark.parametrize("ends_while", ["the first report is sent", "nothing is sent"])
def test_the_last_report_is_the_final_one(ends_while: str) -> None:
    """A report is awaited onto the wire, and the reconfiguration may end in that very moment."""
    reconfigurations = Reconfigurations.__new__(Reconfigurations)
    running = Running(cpb.Reconfiguration(id="r", state="RUNNING"))
    reconfigurations.running = {"r": running}

    async def watch() -> list[str]:
        said: list[str] = []
        async for report in reconfigurations.watch("r"):
            said.append(report.state)
            if report.state == "RUNNING":
                if ends_while == "the first report is sent":
                    reconfigurations.settle(running, "COMPLETED")
                else:
                    asyncio.get_running_loop().call_soon(reconfigurations.settle, running, "COMPLETED")
        return said

    async def in_time() -> list[str]:
        return await asyncio.wait_for(watch(), 10)

    assert asyncio.run(in_time()) == ["RUNNING", "COMPLETED"]
