"""What an agent does so that it has what it is to have: which processes it begins, ends and kills, and when. Sans-io.

It compares what is wanted with what is there, each time anew: nothing is lost with an event that was missed.

========  ================================================================================================
state     meaning
========  ================================================================================================
STARTING  its process was begun and has not said where it listens
RUNNING   it listens
WAITS     it ended, or could not be begun: until it is begun again
STOPPING  it was asked to end
STOPPED   it is not to run, and does not
========  ================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import StateflowError
from stateflow.fleet import Child, Spawned

#: who listened for so long was well: it is started again at once
WELL_S = 30.0
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
#: a directory that a former process still has is looked at this often
BUSY_S = 0.25


class State(StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    WAITS = "WAITS"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


PROCESS = frozenset({State.STARTING, State.RUNNING, State.STOPPING})


@dataclass(frozen=True, slots=True)
class Begin:
    spawned: Spawned


@dataclass(frozen=True, slots=True)
class End:
    """It is asked to."""

    replica: str


@dataclass(frozen=True, slots=True)
class Kill:
    replica: str


Action = Begin | End | Kill


@dataclass(slots=True)
class _Child:
    spawned: Spawned
    state: State = State.STOPPED
    deaths: int = 0
    ready_at: float | None = None
    again_at: float = 0.0  # where it waits
    kill_at: float = math.inf  # where it stops
    fault: StateflowError | None = None
    address: str = ""
    pages: Mapping[str, str] = field(default_factory=dict)

    def told(self) -> Child:
        return Child(self.spawned, self.state.value, self.deaths, self.fault, self.address)


@dataclass(slots=True)
class Convergence:
    """Of one agent. Times are monotonic seconds.

    Args: kill_after_s: whoever was asked to end and has not is killed.
    """

    kill_after_s: float
    _wanted: dict[str, Spawned] = field(default_factory=dict)
    _children: dict[str, _Child] = field(default_factory=dict)

    def want(self, wanted: Iterable[Spawned]) -> None:
        """This, and nothing else, from now on."""
        self._wanted = {each.replica: each for each in wanted}

    def actions(self, now: float) -> list[Action]:
        """What is to be done now. Each is taken to be done: what comes of it is told."""
        found = [self._action(name, now) for name in sorted(self._wanted.keys() | self._children.keys())]
        return [action for action in found if action is not None]

    def _action(self, name: str, now: float) -> Action | None:
        wanted = self._wanted.get(name)
        child = self._children.get(name)
        if child is None:
            assert wanted is not None
            child = self._children[name] = _Child(wanted)
        runs = wanted is not None and wanted.running
        match child.state:
            case State.STARTING | State.RUNNING:
                if not runs or child.spawned != wanted:
                    child.state, child.kill_at = State.STOPPING, now + self.kill_after_s
                    return End(name)
            case State.STOPPING:
                if now >= child.kill_at:
                    child.kill_at = math.inf
                    return Kill(name)
            case State.WAITS | State.STOPPED:
                return self._of_none(name, child, wanted, now)
        return None

    def _of_none(self, name: str, child: _Child, wanted: Spawned | None, now: float) -> Action | None:
        """There is no process."""
        if wanted is None:
            del self._children[name]
            return None
        if child.spawned != wanted:  # whatever was wrong may be mended
            child.spawned, child.deaths, child.fault, child.again_at = wanted, 0, None, 0.0
        if not wanted.running:
            child.state = State.STOPPED
            return None
        if child.state is State.WAITS and now < child.again_at:
            return None
        child.state, child.ready_at, child.kill_at = State.STARTING, None, math.inf
        return Begin(wanted)

    # -- what came of it ----------------------------------------------------------------------------------

    def busy(self, name: str, now: float) -> None:
        """It was not begun: a former process still has its directory, and is ending."""
        child = self._children[name]
        child.state, child.again_at = State.WAITS, now + BUSY_S

    def ready(self, name: str, address: str, now: float) -> None:
        """Its process listens. That may have taken minutes."""
        child = self._children[name]
        if child.state is State.STARTING:
            child.state = State.RUNNING
        child.ready_at, child.address = now, address

    def serves(self, name: str, pages: Mapping[str, str]) -> None:
        """Its process serves figures there: replica → host:port, of each of its workers."""
        self._children[name].pages = dict(pages)

    def ended(self, name: str, now: float, fault: StateflowError | None = None) -> float | None:
        """Its process did, or could not be begun. Returns in how many seconds it is begun again; None: it was asked to
        end."""
        child = self._children[name]
        child.address, child.pages = "", {}
        if child.state is State.STOPPING:
            child.state, child.deaths, child.fault = State.STOPPED, 0, None
            return None
        was_well = child.ready_at is not None and now - child.ready_at >= WELL_S
        child.deaths = 1 if was_well else child.deaths + 1
        pause = 0.0 if child.deaths == 1 else min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (child.deaths - 2))
        child.state, child.again_at, child.fault = State.WAITS, now + pause, fault
        return pause

    # -- to be told ---------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When something is due though nothing was told before; infinity: never."""
        waits = [child.again_at for child in self._children.values() if child.state is State.WAITS]
        stops = [child.kill_at for child in self._children.values() if child.state is State.STOPPING]
        return min([*waits, *stops], default=math.inf)

    def processes(self) -> list[str]:
        """Replicas that have one."""
        return [name for name, child in self._children.items() if child.state in PROCESS]

    def pages(self) -> dict[str, str]:
        """Where figures of replicas are served that run: replica → host:port."""
        running = (child for _, child in sorted(self._children.items()) if child.state is State.RUNNING)
        return {replica: page for child in running for replica, page in child.pages.items()}

    def children(self) -> list[Child]:
        return [child.told() for _, child in sorted(self._children.items())]
