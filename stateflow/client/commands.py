"""Commands to a cluster that take time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import sleep
from typing import Generic, TypeVar

from stateflow.errors import MoveConflict, brief
from stateflow.fleet import Spawned
from stateflow.reports import ChildReport, Reconfiguration, Rolling, Sweep
from stateflow.rpc.cluster_client import ClusterClient

#: seconds between two looks at agents
POLL_S = 0.25


@brief
class Migration:
    """A reconfiguration under way.

    Example: ``for report in cluster.migrate("Count", [3], to="edge-1").progress(): print(report.state)``
    """

    def __init__(self, client: ClusterClient, first: Reconfiguration) -> None:
        self._client = client
        self.report = first

    @property
    def id(self) -> str:
        return self.report.id

    def progress(self) -> Iterator[Reconfiguration]:
        """Yields reports as it goes on, from any controller that leads; the last one is not RUNNING.

        Raises Unavailable when no controller leads any more.
        """
        for report in self._client.watch(self.id):
            self.report = report
            yield report

    def wait(self) -> Reconfiguration:
        """Returns the final report. Failed moves raise nothing: see its ``state`` and each move's ``error``."""
        for _ in self.progress():
            pass
        return self.report


R = TypeVar("R", bound=Rolling | Sweep)


@brief
class _Batch(Generic[R]):
    """A batch under way, whichever controller leads. ``report``: the last one seen."""

    def __init__(self, first: R, look: Callable[[str], R], cancel: Callable[[str], R]) -> None:
        self.report: R = first
        self._look, self._cancel = look, cancel

    @property
    def id(self) -> str:
        return self.report.id

    def progress(self) -> Iterator[R]:
        """Yields reports as it goes on; the last one is over. Raises Unavailable when no controller leads any more."""
        while True:
            self.report = self._look(self.id)
            yield self.report
            if self.report.over:
                return
            sleep(POLL_S)

    def wait(self) -> R:
        """Returns the final report: see its ``state``, and each node's ``error``."""
        for _ in self.progress():
            pass
        return self.report

    def cancel(self) -> R:
        """Cancels what has not begun, and returns the report."""
        self.report = self._cancel(self.id)
        return self.report


@brief
class RollingRestart(_Batch[Rolling]):
    """Restarts of nodes, one after another.

    Example: ``for report in cluster.restart_all(limit=2).progress(): print(report.state)``
    """

    def __init__(self, client: ClusterClient, first: Rolling) -> None:
        super().__init__(first, client.rolling, client.cancel_rolling)


@brief
class Sweeping(_Batch[Sweep]):
    """Long work at many nodes: checkpoints of everything, or a verification.

    Example: ``cluster.checkpoint_all("Count").wait().state``
    """

    def __init__(self, client: ClusterClient, first: Sweep) -> None:
        super().__init__(first, client.sweep, client.cancel_sweep)


@brief
class Spawning:
    """A command to agents under way. ``replicas``: by name, as the agents last reported them.

    Example: ``cluster.spawn("edge-1", count=3).wait()``
    """

    def __init__(self, client: ClusterClient, wanted: Iterable[Spawned]) -> None:
        self._client = client
        self._wanted = {each.replica: each for each in wanted}
        self.replicas: dict[str, ChildReport] = {}

    @property
    def names(self) -> list[str]:
        return list(self._wanted)

    def progress(self) -> Iterator[dict[str, ChildReport]]:
        """Yields the replicas by name until each is in the commanded state: it runs and has registered, or has ended.

        A caller may stop early: the agents go on. Raises Unavailable when the controller goes away, MoveConflict when
        another command came after this one.
        """
        while True:
            found = {each.replica: each for agent in self._client.agents() for each in agent.replicas}
            self.replicas = {name: found[name] for name in self._wanted if name in found}
            yield self.replicas
            if not (waits := [name for name in self._wanted if not self._is_done(name)]):
                return
            if superseded := [name for name in waits if self._is_superseded(name)]:
                raise MoveConflict(
                    "a later command superseded this one", remedy="see `stateflow agent list`", replica=superseded[0]
                )
            sleep(POLL_S)

    def wait(self, deaths_max: int = 5) -> list[str]:
        """Returns the names when each replica is in the commanded state.

        Raises the error of a replica that dies at its first ``deaths_max`` starts; its agent goes on trying.
        """
        for replicas in self.progress():
            for child in replicas.values():
                if child.deaths >= deaths_max and child.fault is not None:
                    raise child.fault
        return self.names

    def _is_superseded(self, name: str) -> bool:
        return name not in self.replicas or self.replicas[name].generation != self._wanted[name].generation

    def _is_done(self, name: str) -> bool:
        child, wanted = self.replicas.get(name), self._wanted[name]
        if child is None or child.runs != wanted.generation:
            return False
        if not wanted.running:
            return child.state == "STOPPED"
        if child.state != "RUNNING":
            return False
        there = (each for each in self._client.status().replicas if each.name == name)
        return any(each.alive and each.address == child.address for each in there)
