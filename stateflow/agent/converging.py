"""Decides which processes an agent starts, ends and kills, and when, so that it runs the ordered replicas. Without I/O.

The agent compares the orders with the running processes afresh each time, so that a missed event does no harm.

========  ================================================================================================
state     meaning of a replica's state
========  ================================================================================================
STARTING  the process was started, and has not reported its address yet
RUNNING   the process listens
WAITS     the process ended, or could not be started; the agent will start it again at a set time
STOPPING  the process was asked to end
STOPPED   the replica is ordered not to run, and has no process
========  ================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import StateflowError
from stateflow.fleet import Child, Spawned

#: a replica that has listened for this many seconds counts as healthy, and is restarted at once
WELL_S = 30.0
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
#: seconds between two checks of a directory that a former process still holds
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
    """Asks a replica to end."""

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
    again_at: float = 0.0  # time of the next start, in state WAITS
    kill_at: float = math.inf  # time at which the process is killed, in state STOPPING
    fault: StateflowError | None = None
    address: str = ""
    pages: Mapping[str, str] = field(default_factory=dict)

    def told(self) -> Child:
        return Child(self.spawned, self.state.value, self.deaths, self.fault, self.address)


@dataclass(slots=True)
class Convergence:
    """Decides what one agent does next. Times are monotonic seconds.

    Args:
        kill_after_s: seconds after which a replica that was asked to end is killed.
    """

    kill_after_s: float
    _wanted: dict[str, Spawned] = field(default_factory=dict)
    _children: dict[str, _Child] = field(default_factory=dict)

    def want(self, wanted: Iterable[Spawned]) -> None:
        """Sets the complete list of wanted replicas."""
        self._wanted = {each.replica: each for each in wanted}

    def actions(self, now: float) -> list[Action]:
        """Returns the actions to carry out now, and records them as carried out. The caller reports each outcome."""
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
        """Returns the action for a replica without a process."""
        if wanted is None:
            del self._children[name]
            return None
        if child.spawned != wanted:  # the new order may fix the fault
            child.spawned, child.deaths, child.fault, child.again_at = wanted, 0, None, 0.0
        if not wanted.running:
            child.state = State.STOPPED
            return None
        if child.state is State.WAITS and now < child.again_at:
            return None
        child.state, child.ready_at, child.kill_at = State.STARTING, None, math.inf
        return Begin(wanted)

    # -- outcomes of actions ------------------------------------------------------------------------------

    def busy(self, name: str, now: float) -> None:
        """Records that a replica was not started, because a former process that is ending still holds its directory."""
        child = self._children[name]
        child.state, child.again_at = State.WAITS, now + BUSY_S

    def ready(self, name: str, address: str, now: float) -> None:
        """Records that a replica's process listens at ``address``. ``now`` may be minutes after the start.

        The address of a running process changes if its first worker comes back at another port.
        """
        child = self._children[name]
        if child.state is State.STARTING:
            child.state, child.ready_at = State.RUNNING, now
        child.address = address

    def fails(self, name: str, fault: StateflowError, deaths: int) -> None:
        """Records why a replica that is starting is not ready. Its process goes on trying.

        Args:
            deaths: number of failures in a row within the process.
        """
        child = self._children[name]
        if child.state is State.STARTING:
            child.deaths, child.fault = max(child.deaths, deaths), fault

    def serves(self, name: str, pages: Mapping[str, str]) -> None:
        """Records where a replica's workers serve metrics. ``pages``: worker → host:port."""
        self._children[name].pages = dict(pages)

    def ended(self, name: str, now: float, fault: StateflowError | None = None) -> float | None:
        """Records that a replica's process ended, or could not be started.

        Returns the seconds until the replica is started again; None: the process was asked to end.
        """
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

    # -- reports ------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """Returns the time at which the next action is due if nothing else happens; infinity: never."""
        waits = [child.again_at for child in self._children.values() if child.state is State.WAITS]
        stops = [child.kill_at for child in self._children.values() if child.state is State.STOPPING]
        return min([*waits, *stops], default=math.inf)

    def processes(self) -> list[str]:
        """Returns the replicas that have a process."""
        return [name for name, child in self._children.items() if child.state in PROCESS]

    def pages(self) -> dict[str, str]:
        """Returns where the metrics of running replicas are served: worker → host:port."""
        running = (child for _, child in sorted(self._children.items()) if child.state is State.RUNNING)
        return {replica: page for child in running for replica, page in child.pages.items()}

    def children(self) -> list[Child]:
        return [child.told() for _, child in sorted(self._children.items())]
