"""Whom an agent obeys: one controller at a time, by the term of its hold on the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stateflow.agent.agent import Agent, Config
from stateflow.agent.limits import Rlimits
from stateflow.agent.local import LocalLauncher
from stateflow.agent.store import Store
from stateflow.errors import DataDirLocked, ForeignLedger, LeaseLost, StaleTerm
from stateflow.fleet import Orders, Spawned
from stateflow.runtime.authority import Command

WANTED = (Spawned("a-0", "a"),)
FIFTH = Orders(10.0, WANTED, "ledger", 5)


def config(directory: Path) -> Config:
    return Config("a", "edge", "ctl:1", directory, "127.0.0.1:0", "", {}, 0, 0, 10.0, {})


def scenario(tmp_path: Path, steps: Callable[[Agent], Awaitable[None]]) -> None:
    async def run() -> None:
        agent = Agent(config(tmp_path), Rlimits(), LocalLauncher())
        await steps(agent)
        agent._claimed.close()

    asyncio.run(run())


def test_an_older_term_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    stale = replace(FIFTH, term=4, wanted=())

    async def first(agent: Agent) -> None:
        await agent._obey(FIFTH, "ctl:1")
        with pytest.raises(StaleTerm):
            await agent._obey(stale, "ctl:1")
        with pytest.raises(DataDirLocked, match="another agent holds"):
            Agent(config(tmp_path), Rlimits(), LocalLauncher())

    async def again(agent: Agent) -> None:
        with pytest.raises(StaleTerm):
            await agent._obey(stale, "ctl:1")

    scenario(tmp_path, first)
    scenario(tmp_path, again)
    assert Store(tmp_path, "a").kept.wanted == WANTED


def test_another_ledger_is_followed_by_who_has_nothing_or_where_that_adopted_its_own(tmp_path: Path) -> None:
    async def steps(agent: Agent) -> None:
        await agent._obey(replace(FIFTH, wanted=()), "ctl:1")
        await agent._obey(replace(FIFTH, ledger="second", term=1), "ctl:1")
        with pytest.raises(ForeignLedger):
            await agent._obey(replace(FIFTH, ledger="third", term=9, wanted=()), "ctl:1")
        assert agent._store.kept.ledger == "second"
        await agent._obey(replace(FIFTH, ledger="third", term=1, adopted="second"), "ctl:1")

    scenario(tmp_path, steps)
    assert Store(tmp_path, "a").kept.ledger == "third"


def test_logs_are_for_the_controller_that_is_obeyed(tmp_path: Path) -> None:
    async def ask(agent: Agent, command: Command) -> bytes:
        return b"".join([piece async for piece in agent._logs(command, "a-0", 2, False)])

    async def steps(agent: Agent) -> None:
        with pytest.raises(LeaseLost):
            await ask(agent, Command("ledger", 5, agent._incarnation))
        await agent._obey(FIFTH, "ctl:1")
        agent._convergence.actions(0.0)
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "a-0.log").write_text("one\ntwo\nthree\n")
        assert await ask(agent, Command("ledger", 5, agent._incarnation)) == b"two\nthree\n"
        with pytest.raises(StaleTerm):
            await ask(agent, Command("ledger", 4, agent._incarnation))
        with pytest.raises(LeaseLost):
            await ask(agent, Command("ledger", 5, "somebody"))

    scenario(tmp_path, steps)
