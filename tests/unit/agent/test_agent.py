"""Agents obey one controller at a time: the one with the newest term of the ledger's hold."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stateflow.agent import agent as module
from stateflow.agent import converging
from stateflow.agent.agent import Agent, Config
from stateflow.agent.processes import LocalLauncher, Rlimits, Store
from stateflow.errors import DataDirLocked, ForeignLedger, LeaseLost, StaleTerm, Unavailable
from stateflow.fleet import Command as LaunchCommand
from stateflow.fleet import DesiredState, Listening, Spawned, Started
from stateflow.partition.control import Command
from stateflow.partition.environment import claim

WANTED = (Spawned("a-0", "a"),)
FIFTH = DesiredState(10.0, WANTED, "ledger", 5)


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


# -- processes that end at a bad moment --------------------------------------------------------------------


class Quiet:
    """A process without output that ends when it is told to."""

    def __init__(self, pid: int) -> None:
        self.pid, self.stdin, self.stdout = pid, None, io.StringIO()
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def poll(self) -> int | None:
        return 0 if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        self._ended.wait()
        return 0


class Recording:
    """A launcher that starts no processes."""

    def __init__(self) -> None:
        self.started: dict[str, Quiet] = {}
        self.refuses: dict[str, Exception] = {}

    def start(self, spec: LaunchCommand) -> Started:
        if spec.name in self.refuses:
            raise self.refuses.pop(spec.name)
        self.started[spec.name] = process = Quiet(len(self.started) + 1)
        return Started(spec, process)

    def stop(self, handle: Started) -> None:
        assert isinstance(handle.process, Quiet)
        handle.process.end()

    kill = stop

    def is_running(self, handle: Started) -> bool:
        return handle.process.poll() is None

    def logs(self, handle: Started) -> Iterator[bytes]:
        return iter(())


def states(agent: Agent) -> dict[str, str]:
    return {child.spawned.replica: child.state for child in agent._convergence.children()}


async def until(condition: Callable[[], bool], task: asyncio.Task[None] | None = None) -> None:
    while not condition():
        if task is not None and task.done():
            await task
        await asyncio.sleep(0)


def test_a_replica_that_listens_elsewhere_is_reported_there(tmp_path: Path) -> None:
    """A replica's first worker comes back at another port, with the same process of the replica."""

    async def steps(agent: Agent) -> None:
        process = agent._processes["a"] = Recording().start(LaunchCommand("a", [], {}, tmp_path / "log"))
        agent._convergence.want([Spawned("a", "a")])
        agent._convergence.actions(0.0)
        agent._hears("a", process, Listening("host:7", {"a": "host:8"}))
        agent._told.clear()
        ready_at = agent._convergence._children["a"].ready_at
        agent._hears("a", process, Listening("host:10", {"a": "host:9"}))
        (child,) = agent._convergence.children()
        assert (child.state, child.address) == ("RUNNING", "host:10")
        assert agent._told.is_set()
        assert agent._convergence._children["a"].ready_at == ready_at, "its process has not started again"

    scenario(tmp_path, steps)


def test_a_replica_that_dies_while_another_is_looked_at_costs_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica ends while the agent looks at another one: the agent does not try to end it again, and goes on."""
    a, b, c = Spawned("a", "a"), Spawned("b", "b"), Spawned("c", "c")

    async def run() -> None:
        launcher = Recording()
        agent = Agent(config(tmp_path), Rlimits(), launcher)
        agent._convergence.want([b])
        converging = asyncio.create_task(agent._converge())
        await until(lambda: "b" in launcher.started, converging)
        await until(lambda: states(agent) == {"b": "STARTING"}, converging)

        loop = asyncio.get_running_loop()

        def dies(directory: Path) -> None:
            """Ends ``b`` in the thread that looks at ``a``, and waits until the agent has noticed."""
            launcher.started["b"].end()
            asyncio.run_coroutine_threadsafe(until(lambda: "b" not in agent._processes), loop).result()

        monkeypatch.setattr("stateflow.agent.agent._is_busy", dies)
        agent._convergence.want([a, replace(b, running=False)])
        agent._changed.set()
        await until(lambda: "a" in launcher.started, converging)
        monkeypatch.setattr("stateflow.agent.agent._is_busy", lambda _: None)
        agent._convergence.want([a, b, c])
        agent._changed.set()
        await until(lambda: "c" in launcher.started and states(agent)["b"] == "STARTING", converging)
        converging.cancel()
        await agent._end_all()
        agent._claimed.close()

    asyncio.run(run())


def test_an_agent_that_ends_while_a_replica_is_looked_at_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, goes_on = threading.Event(), threading.Event()

    def looks(directory: Path) -> None:
        if directory.name == "b":
            looked_at.set()
            goes_on.wait()

    monkeypatch.setattr("stateflow.agent.agent._is_busy", looks)

    async def run() -> None:
        launcher = Recording()
        agent = Agent(config(tmp_path), Rlimits(), launcher)
        agent._convergence.want([Spawned("a", "a"), Spawned("b", "b"), Spawned("c", "c")])
        converging = asyncio.create_task(agent._converge())
        await until(looked_at.is_set, converging)
        converging.cancel()
        try:
            await agent._end_all()
        finally:
            goes_on.set()
        assert launcher.started["a"].poll() == 0
        assert list(launcher.started) == ["a"], "nothing is begun any more"
        agent._claimed.close()

    asyncio.run(run())


def test_a_replica_whose_former_process_hangs_is_waited_for_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(converging, "BUSY_S", 0.0)
    caplog.set_level(logging.WARNING)

    async def run() -> None:
        launcher = Recording()
        agent = Agent(config(tmp_path), Rlimits(), launcher)
        former = claim(tmp_path / "replicas" / "a", "LOCK")
        seen = 0
        is_busy = module._is_busy

        def looks(directory: Path) -> Any:
            nonlocal seen
            seen += 1
            return is_busy(directory)

        monkeypatch.setattr(module, "_is_busy", looks)
        agent._convergence.want([Spawned("a", "a")])
        task = asyncio.create_task(agent._converge())
        await until(lambda: seen > 3, task)
        former.close()
        await until(lambda: "a" in launcher.started, task)
        task.cancel()
        await agent._end_all()
        agent._claimed.close()

    asyncio.run(run())
    (line,) = [record.message for record in caplog.records if "waits" in record.message]
    assert line == f"replica a waits until its former process has ended (process {os.getpid()}); kill it if it hangs"


def test_a_node_that_is_not_ready_yet_says_why(tmp_path: Path) -> None:
    """A node whose first worker dies at every start runs on. Its agent shows why it is not ready, until it is."""

    async def run() -> None:
        launcher, (reads, writes) = Recording(), os.pipe()
        agent = Agent(config(tmp_path), Rlimits(), launcher)
        process = Quiet(1)
        process.stdout = cast(Any, os.fdopen(reads))
        launcher.start = lambda spec: Started(spec, process)  # type: ignore[method-assign]
        fault = Unavailable("the first worker of a has died at 5 starts in a row", remedy="remove the cause")
        agent._convergence.want([Spawned("a", "a")])
        task = asyncio.create_task(agent._converge())
        for deaths in (5, 6):
            os.write(writes, json.dumps({"failing": fault.to_wire(), "deaths": deaths}).encode() + b"\n")
            await until(lambda deaths=deaths: [each.deaths for each in agent._convergence.children()] == [deaths], task)
            (child,) = agent._convergence.children()
            assert (child.state, str(child.fault), child.address) == ("STARTING", str(fault), "")
        os.write(writes, b'{"address": "127.0.0.1:7", "metrics": {"a": "127.0.0.1:8"}}\n')
        await until(lambda: states(agent) == {"a": "RUNNING"}, task)
        (child,) = agent._convergence.children()
        assert child.address.endswith(":7")
        assert agent._convergence.pages() == {"a": "127.0.0.1:8"}
        os.close(writes)
        task.cancel()
        await agent._end_all()
        agent._claimed.close()

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("first", ["failing", "address"])
def test_the_error_with_which_a_process_ends_is_told_whatever_it_said_before(tmp_path: Path, first: str) -> None:
    why = Unavailable("no worker of a starts: the data directory cannot be used", remedy="remove the cause")
    said = {"failing": why.to_wire(), "deaths": 5} if first == "failing" else {"address": "127.0.0.1:7"}

    async def run() -> None:
        launcher = Recording()
        agent = Agent(config(tmp_path), Rlimits(), launcher)
        lines = "".join(json.dumps(each) + "\n" for each in (said, {"error": why.to_wire()}))
        begin = launcher.start

        def start(spec: LaunchCommand) -> Started:
            started = begin(spec)
            launcher.started[spec.name].stdout = io.StringIO(lines)
            launcher.started[spec.name].end()
            launcher.start = begin  # type: ignore[method-assign]
            return started

        launcher.start = start  # type: ignore[method-assign]
        agent._convergence.want([Spawned("a", "a")])
        task = asyncio.create_task(agent._converge())
        await until(lambda: agent._figures.ends == 1, task)
        (child,) = agent._convergence.children()
        assert str(child.fault) == str(why)
        task.cancel()
        await agent._end_all()
        agent._claimed.close()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_a_replica_that_cannot_be_begun_for_any_reason_costs_itself_alone(tmp_path: Path) -> None:
    async def run() -> None:
        launcher = Recording()
        launcher.refuses["a"] = ValueError("embedded null byte")
        agent = Agent(config(tmp_path), Rlimits(), launcher)
        agent._convergence.want([Spawned("a", "a"), Spawned("b", "b")])
        converging = asyncio.create_task(agent._converge())
        await until(lambda: {"a", "b"} <= launcher.started.keys(), converging)
        converging.cancel()
        await agent._end_all()
        agent._claimed.close()

    asyncio.run(run())


class Enough(Exception):
    """Ends the loop of heartbeats."""


def test_heartbeats_of_agents_do_not_stay_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def wait_for(change: Coroutine[Any, Any, bool], timeout: float) -> None:
        change.close()
        waited.append(timeout)
        raise Enough if len(waited) == 20 else TimeoutError

    async def run() -> None:
        one = Agent(replace(config(tmp_path), controller="127.0.0.1:1"), Rlimits(), LocalLauncher(), Random(5))
        patched = vars(asyncio) | {"wait_for": wait_for}
        with monkeypatch.context() as patch, pytest.raises(Enough):
            patch.setattr(module, "asyncio", SimpleNamespace(**patched))
            await one._beat(one._info("127.0.0.1:9"))
        one._claimed.close()

    asyncio.run(run())
    assert 0.75 * module.BEAT_S <= min(waited) < max(waited) <= 1.25 * module.BEAT_S
