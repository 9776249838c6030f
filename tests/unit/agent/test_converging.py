"""An agent's state machine: after any commands and events it comes to run what it is to run."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stateflow.agent.converging import BACKOFF_S, BACKOFF_S_MAX, BUSY_S, WELL_S, Begin, Convergence, End, Kill
from stateflow.errors import Unavailable
from stateflow.fleet import Spawned
from tests.sizes import sized

R = Spawned("r", "a")
KILL_S = 25.0
GONE = Unavailable("its process was killed by signal 9", remedy="-")


def started(wanted: Spawned = R) -> Convergence:
    machine = Convergence(KILL_S)
    machine.want([wanted])
    assert machine.actions(0.0) == [Begin(wanted)]
    return machine


def state(machine: Convergence) -> str:
    (child,) = machine.children()
    return child.state


def test_what_is_wanted_is_begun_once() -> None:
    machine = started()
    assert machine.actions(1.0) == []
    machine.ready("r", "host:1", 2.0)
    assert machine.actions(3.0) == []
    (child,) = machine.children()
    assert (child.state, child.address, child.deaths) == ("RUNNING", "host:1", 0)


def test_figures_are_found_where_a_replica_runs() -> None:
    machine = started()
    machine.serves("r", {"r": "host:2"})
    assert machine.pages() == {}, "it is not ready"
    machine.ready("r", "host:1", 2.0)
    machine.serves("r", {"r": "host:2", "r~1": "host:3"})
    assert machine.pages() == {"r": "host:2", "r~1": "host:3"}
    machine.want([replace(R, running=False)])
    assert machine.actions(3.0) == [End("r")]
    assert machine.pages() == {}, "it is asked to end"
    machine.ended("r", 4.0)
    machine.want([replace(R, generation=3)])
    assert machine.actions(5.0) == [Begin(replace(R, generation=3))]
    machine.ready("r", "host:1", 6.0)
    assert machine.pages() == {}, "those were of a process that has ended"


def test_who_was_well_is_started_again_at_once_and_others_later_and_later() -> None:
    machine = started()
    now, pauses = 0.0, []
    for _ in range(9):
        pause = machine.ended("r", now, GONE)
        assert pause is not None
        pauses.append(pause)
        if pause:
            assert machine.next_at() == now + pause
            assert machine.actions(now + pause / 2) == []
        now += pause
        assert machine.actions(now) == [Begin(R)]
    assert pauses == [0.0, *(min(BACKOFF_S * 2**n, BACKOFF_S_MAX) for n in range(8))]
    assert machine.children()[0].deaths == 9
    assert machine.children()[0].fault is GONE
    machine.ready("r", "host:1", now)
    assert machine.ended("r", now + WELL_S, GONE) == 0.0


def test_a_command_ends_the_process_and_begins_one_of_its_own() -> None:
    machine = started()
    machine.ready("r", "host:1", 1.0)
    again = replace(R, generation=2)
    machine.want([again])
    assert machine.actions(2.0) == [End("r")]
    assert machine.actions(2.1) == []
    assert machine.ended("r", 3.0) is None
    assert machine.actions(3.0) == [Begin(again)]


def test_who_does_not_end_is_killed_once() -> None:
    machine = started()
    machine.want([replace(R, running=False, generation=2)])
    assert machine.actions(1.0) == [End("r")]
    assert machine.next_at() == 1.0 + KILL_S
    assert machine.actions(1.0 + KILL_S) == [Kill("r")]
    assert machine.actions(2.0 + KILL_S) == []
    machine.ended("r", 3.0 + KILL_S, GONE)
    assert machine.actions(3.0 + KILL_S) == []
    (child,) = machine.children()
    assert (child.state, child.fault, child.spawned.generation) == ("STOPPED", None, 2)
    assert machine.next_at() == math.inf


def test_who_is_stopped_while_it_waits_is_not_begun_and_a_command_forgives_its_deaths() -> None:
    machine = started()
    for now in (1.0, 1.0):
        machine.ended("r", now, GONE)
        machine.actions(now)
    assert state(machine) == "WAITS"
    machine.want([replace(R, running=False, generation=2)])
    assert machine.actions(100.0) == []
    assert state(machine) == "STOPPED"
    machine.want([replace(R, generation=3)])
    assert machine.actions(100.0) == [Begin(replace(R, generation=3))]
    assert machine.children()[0].deaths == 0


def test_a_directory_that_is_still_held_is_no_death() -> None:
    machine = started()
    machine.busy("r", 1.0)
    assert machine.actions(1.0) == []
    assert machine.next_at() == 1.0 + BUSY_S
    assert machine.actions(1.0 + BUSY_S) == [Begin(R)]
    assert machine.children()[0].deaths == 0


def test_what_is_not_wanted_any_more_is_ended_and_not_spoken_of() -> None:
    machine = started()
    machine.want([])
    assert machine.actions(1.0) == [End("r")]
    assert machine.processes() == ["r"]
    machine.ended("r", 2.0)
    assert machine.actions(2.0) == []
    assert machine.children() == []


class Life(RuleBasedStateMachine):
    """Commands, deaths and time pass in any order; then, left alone, the agent runs what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.machine, self.now = Convergence(KILL_S), 0.0
        self.wanted: dict[str, Spawned] = {}
        self.processes: dict[str, Spawned] = {}
        self.asked: set[str] = set()

    names = st.sampled_from(["a", "b"])

    @rule(name=names, running=st.booleans())
    def command(self, name: str, running: bool) -> None:
        before = self.wanted.get(name)
        self.wanted[name] = Spawned(name, "x", running, 1 if before is None else before.generation + 1)
        self.machine.want(self.wanted.values())

    @precondition(lambda self: self.wanted)
    @rule(name=names)
    def forget(self, name: str) -> None:
        if self.wanted.pop(name, None) is not None:
            self.machine.want(self.wanted.values())

    @rule(seconds=st.sampled_from([0.0, 0.3, 5.0, 40.0]))
    def act(self, seconds: float) -> None:
        self.now += seconds
        for action in self.machine.actions(self.now):
            match action:
                case Begin(spawned):
                    assert spawned.replica not in self.processes, "one directory, one process"
                    assert self.wanted[spawned.replica] == spawned
                    assert spawned.running
                    self.processes[spawned.replica] = spawned
                case End(name):
                    assert self.wanted.get(name) != self.processes[name], "what is wanted is left alone"
                    self.asked.add(name)
                case Kill(name):
                    assert name in self.asked
                    self.end(name)

    @precondition(lambda self: self.processes)
    @rule(name=names)
    def end(self, name: str) -> None:
        if self.processes.pop(name, None) is not None:
            self.asked.discard(name)
            self.machine.ended(name, self.now, GONE)

    @precondition(lambda self: self.processes)
    @rule(name=names)
    def ready(self, name: str) -> None:
        if name in self.processes:
            self.machine.ready(name, "host:1", self.now)

    @invariant()
    def it_knows_its_processes(self) -> None:
        assert set(self.machine.processes()) == self.processes.keys()

    def teardown(self) -> None:
        for _ in range(4):
            self.act(40.0)
        assert self.processes == {name: each for name, each in self.wanted.items() if each.running}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=sized(400), stateful_step_count=30, deadline=None)
