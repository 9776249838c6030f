"""Handles for commands that are under way, the commands to a fleet, and parsers for arguments from the command line and
the live page.

The commands with handles are moves, rolling restarts, sweeps, and starts and stops of replicas.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from numbers import Integral
from time import sleep
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from stateflow.errors import (
    AlreadyThere,
    EncodeError,
    InvalidArgument,
    MoveAborted,
    MoveConflict,
    Unavailable,
    UnknownPartition,
    UnsupportedKeyType,
    brief,
)
from stateflow.fleet import Request, Spawned
from stateflow.operator.arrow import read_table
from stateflow.partition.entries import joined
from stateflow.reports import (
    AgentReport,
    ChildReport,
    JobReport,
    JobRun,
    Placement,
    Reconfiguration,
    Rolling,
    Sweep,
)
from stateflow.rpc.cluster_client import ClusterClient
from stateflow.types import DEFAULT_OPTIONS, PARTITIONS_MAX, MoveOptions, shown

if TYPE_CHECKING:
    from stateflow.client.cluster import Cluster

#: seconds between two polls of the controller
POLL_S = 0.25


@brief
class Migration:
    """Handle for a reconfiguration that is under way.

    Example: ``for report in cluster.migrate("Count", [3], to="edge-1").progress(): print(report.state)``
    """

    def __init__(self, client: ClusterClient, first: Reconfiguration) -> None:
        self._client = client
        self.report = first

    @property
    def id(self) -> str:
        return self.report.id

    def progress(self) -> Iterator[Reconfiguration]:
        """Yields reports as the reconfiguration proceeds, up to the first report whose state is not RUNNING.

        The reports continue after a change of leaders. Raises Unavailable if no controller leads any more.
        """
        for report in self._client.watch(self.id):
            self.report = report
            yield report

    def wait(self) -> Reconfiguration:
        """Waits until the reconfiguration has ended, and returns the final report.

        Failed moves raise no error; the report has a ``state``, and an ``error`` for each move.
        """
        for _ in self.progress():
            pass
        return self.report


R = TypeVar("R", bound=Rolling | Sweep)
T = TypeVar("T")


@brief
class _Batch(Generic[R]):
    """Handle for a batch of work that is under way. ``report``: the report received last."""

    def __init__(self, first: R, look: Callable[[str], R], cancel: Callable[[str], R]) -> None:
        self.report: R = first
        self._look, self._cancel = look, cancel

    @property
    def id(self) -> str:
        return self.report.id

    def progress(self) -> Iterator[R]:
        """Yields reports as the work proceeds; the last report is final. Raises Unavailable if no controller leads
        any more."""
        while True:
            self.report = self._look(self.id)
            yield self.report
            if self.report.over:
                return
            sleep(POLL_S)

    def wait(self) -> R:
        """Waits until the work has ended, and returns the final report.

        The report has a ``state``, and an ``error`` for each node that failed.
        """
        for _ in self.progress():
            pass
        return self.report

    def cancel(self) -> R:
        """Cancels the work that has not begun, and returns the report."""
        self.report = self._cancel(self.id)
        return self.report


@brief
class RollingRestart(_Batch[Rolling]):
    """Handle for a rolling restart, which restarts nodes one after another.

    Example: ``for report in cluster.restart_all(limit=2).progress(): print(report.state)``
    """

    def __init__(self, client: ClusterClient, first: Rolling) -> None:
        super().__init__(first, client.rolling, client.cancel_rolling)


@brief
class Sweeping(_Batch[Sweep]):
    """Handle for a sweep, which is long work at many nodes: a checkpoint or a verification of all partitions.

    Example: ``cluster.checkpoint_all("Count").wait().state``
    """

    def __init__(self, client: ClusterClient, first: Sweep) -> None:
        super().__init__(first, client.sweep, client.cancel_sweep)


@brief
class Spawning:
    """Handle for a command to agents that is under way.

    ``replicas``: replicas by name, as the agents last reported them.

    Example: ``cluster.spawn("edge-1", count=3).wait()``
    """

    def __init__(self, client: ClusterClient, wanted: Iterable[Spawned]) -> None:
        self._client = client
        self._wanted = {each.replica: each for each in wanted}
        self.replicas: dict[str, ChildReport] = {}

    @property
    def names(self) -> list[str]:
        return list(self._wanted)

    def progress(self, deaths_max: int | None = None) -> Iterator[dict[str, ChildReport]]:
        """Yields the replicas by name until each is in the commanded state: it runs and has registered, or has ended.

        A caller may stop iterating early: the agents still carry out the command. Raises Unavailable if the controller
        stops answering, MoveConflict if a later command replaced this one, and the error of a replica that died at each
        of its first ``deaths_max`` starts since the command; None: never.
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
            for name in waits:
                self._check_starts(name, deaths_max)
            sleep(POLL_S)

    def wait(self, deaths_max: int = 5) -> list[str]:
        """Waits until each replica is in the commanded state, and returns the names.

        Raises the errors of :meth:`progress`. An agent keeps restarting a replica that dies at its starts.
        """
        for _ in self.progress(deaths_max):
            pass
        return self.names

    def _check_starts(self, name: str, deaths_max: int | None) -> None:
        child, wanted = self.replicas.get(name), self._wanted[name]
        # until the agent carries out the command, it reports the deaths of the former run
        if child is None or deaths_max is None or not wanted.running or child.runs != wanted.generation:
            return
        if child.state != "RUNNING" and child.deaths >= deaths_max and child.fault is not None:
            raise child.fault

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


def last_of(found: Sequence[T], what: str) -> T:
    """Returns the last entry of an answer. Raises Unavailable for an empty answer, which no controller gives."""
    if not found:
        raise Unavailable(
            f"invalid answer from the controller: it names no {what}", remedy="check what runs there, and its version"
        )
    return found[-1]


@brief
class FleetCommands:
    """The methods of ``Cluster`` for agents, for the replicas that they run, and for scheduled jobs."""

    _client: ClusterClient

    def agents(self) -> list[AgentReport]:
        """Returns the agents by name, each with the replicas that it runs and those that it should run."""
        return self._client.agents()

    def spawn(
        self,
        at: str,
        *,
        count: int = 1,
        workers: int = 1,
        weight: int = 1,
        memory_bytes: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> Spawning:
        """Starts replicas through an agent, or through agents of a site.

        Args:
            at: name of an agent or a site.
            count: number of replicas.
            workers: workers of each replica.
            weight: weight of each replica.
            memory_bytes: memory limit of each replica, in bytes; 0: no limit.
            labels: labels, all of which an agent must have.

        Raises UnknownSite, Unavailable if no agent there answers, NoRoom; nothing is started then.
        """
        request = Request(at, count, workers, weight, memory_bytes, dict(labels or {}))
        return Spawning(self._client, self._client.spawn(request))

    def stop_replica(self, replica: str, *, drain: bool = False, force: bool = False) -> Spawning:
        """Stops a replica through its agent. The data directory stays, and ``restart_replica`` starts it again.

        Args:
            drain: True moves its partitions to other replicas first.
            force: True stops it even if it owns partitions, which no replica serves until they are taken over, and even
                if an operator then has no standby.

        Raises PartitionsLive, MoveConflict, InvalidArgument for a replica that no agent started, Unavailable if an
        operator that wants standbys could have none any more, and MoveAborted if a partition could not be moved away.
        The replica keeps running in each of these cases.
        """
        if drain:
            with contextlib.suppress(AlreadyThere):
                for begun in self._client.drain(replica, DEFAULT_OPTIONS):
                    report = Migration(self._client, begun).wait()
                    if report.state != "COMPLETED":
                        failed = next((move.error for move in report.moves if move.error), "the drain was cancelled")
                        raise MoveAborted(
                            f"the replica was not drained and keeps running: {failed}",
                            remedy=f"see `stateflow reconfig info {report.id}`",
                            replica=replica,
                        )
        return Spawning(self._client, self._client.stop_replica(replica, force))

    def restart_replica(self, replica: str) -> Spawning:
        """Restarts a replica through its agent, or starts it if it does not run. Raises InvalidArgument, NoRoom."""
        return Spawning(self._client, self._client.restart_replica(replica))

    def restart_all(self, site: str = "", *, limit: int = 1) -> RollingRestart:
        """Restarts every replica that an agent runs, ``limit`` nodes at a time.

        A further node is restarted when an earlier one serves again; until then, rows for its partitions wait. If a
        node does not serve again, no further node is restarted.

        Args:
            site: site or agent whose replicas are restarted; empty: all replicas.

        Raises InvalidArgument, and MoveConflict while another rolling restart is under way.
        """
        return RollingRestart(self._client, self._client.restart_all(site, limit))

    def rolling(self, roll: str) -> RollingRestart:
        """Returns an earlier rolling restart, by its id. Raises MoveUnknown."""
        return RollingRestart(self._client, self._client.rolling(roll))

    def logs(self, replica: str, *, lines: int = 100, follow: bool = False) -> Iterator[bytes]:
        """Yields the newest log lines of a replica that an agent runs, and with ``follow`` all later ones, in pieces.

        Raises InvalidArgument, Unavailable.
        """
        return self._client.logs(replica, lines, follow)

    def forget_agent(self, agent: str) -> None:
        """Forgets an agent that has ended for good, and the replicas that it should have run.

        Raises NameTaken while the agent may be running, PartitionsLive, InvalidArgument; nothing is changed then.
        """
        self._client.forget_agent(agent)

    def create_job(
        self,
        name: str,
        schedule: str,
        do: str,
        *,
        operator: str = "",
        policies: Iterable[str] = (),
        partitions: Iterable[int] = (),
        to: str = "",
        coordinator: str = "",
        workers: str = "",
        options: MoveOptions = DEFAULT_OPTIONS,
        **changed: Any,
    ) -> JobReport:
        """Creates a scheduled job. Each due run is carried out once, whichever controller leads at the time; see
        docs/fleet.md.

        Args:
            schedule: ``once 2030-01-01T18:00:00Z``, ``every 3600`` (seconds, from the end of the previous run), or
                ``cron 0 18 * * 1-5 Europe/Berlin`` (UTC without a zone).
            do: ``rebalance`` (by ``policies``), ``migrate`` (``partitions`` of ``operator`` to ``to``), ``drain``
                (``to``: the replica to drain) or ``checkpoint``.
            coordinator: constraint on the controller that coordinates the runs, ``hard`` or ``soft``, by node, site or
                label, such as ``soft:30 site cloud``; empty: any controller.
            workers: constraint on the target nodes of the job's moves, such as ``hard label disk=ssd:2-4``, which
                requires 2 nodes and uses at most 4; empty: any node.

        Raises InvalidArgument, also for a constraint that no known node could ever satisfy; OperatorNotDeployed.
        """
        asked, numbers = options.changed(**changed), tuple(partition_list(partitions)) if partitions else ()
        given = JobReport(
            name, schedule, do, operator, tuple(policies), numbers, to, False, 0, (), coordinator, workers
        )
        return self._client.create_job(given, asked)

    def jobs(self) -> list[JobReport]:
        """Returns the scheduled jobs, and their latest runs."""
        return self._client.jobs()

    def job(self, name: str) -> JobReport:
        """Returns one job. Raises InvalidArgument if there is none of that name."""
        return last_of(self._client.jobs(name), "job")

    def run_job(self, name: str) -> JobRun:
        """Starts a job once, now; :meth:`job_run` returns its result. Raises InvalidArgument while the job runs."""
        return last_of(self._client.change_job(name, "run").runs, "run")

    def job_run(self, run: str, *, wait: bool = False) -> JobRun:
        """Returns the result of a run, or its progress.

        Args:
            run: id of the run.
            wait: True waits until the run has ended.

        Raises InvalidArgument for an unknown run; only the newest hundred are kept.
        """
        while (found := self._client.job_run(run)).state == "IN_PROCESS" and wait:
            sleep(POLL_S)
        return found

    def change_job(self, name: str, change: str) -> JobReport:
        """Changes a job: ``pause``, ``resume``, ``run`` (now, once) or ``delete``. Raises InvalidArgument."""
        return self._client.change_job(name, change)


#: maximum number of columns of a key, and of keys that a list of columns may stand for
KEY_COLUMNS_MAX, KEYS_MAX = 16, 200
#: kinds of batch that the controller runs, as the ledger's board names them: ``sweep/…``
CONTROLLERS = ("reconfiguration", "roll", "sweep", "restores")


def partition_list(partitions: object) -> list[int]:
    """Returns the partitions that a caller passed as a list.

    Raises InvalidArgument for a value that is not a list of partitions, such as a number; UnknownPartition.
    """
    numbers: list[Any] = [None]
    if isinstance(partitions, Iterable) and not isinstance(partitions, str):
        numbers = list(partitions)
    if not all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers):
        raise InvalidArgument(
            f"partitions={partitions!r} is not a list of partitions",
            remedy="pass partitions=[20], or range(20) for the first twenty",
        )
    for number in numbers:
        if not 0 <= number < PARTITIONS_MAX:
            raise UnknownPartition(
                f"there is no partition {number}", remedy="count from 0 to the operator's last partition"
            )
    return numbers


def partition_numbers(text: str, count: int) -> list[int]:
    """Parses partition numbers, such as ``3, 5-9`` or ``all``, of an operator with ``count`` partitions.

    Returns each number once, sorted. Raises InvalidArgument, UnknownPartition.
    """
    found: set[int] = set()
    for word in re.split(r"\s*,\s*|\s+", text.strip()):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if word == "all":
            found.update(range(count))
        elif first > last:
            raise InvalidArgument(f"{shown(word)} is not a partition", remedy="write numbers, ranges like 5-9, or all")
        elif last >= count:
            raise UnknownPartition(f"there is no partition {last}", remedy=f"use 0 to {count - 1}")
        else:
            found.update(range(first, last + 1))
    return sorted(found)


def keys_meant(text: str) -> Iterator[Any]:
    """Yields the keys that a text may stand for, each once and with its type.

    The keys of an operator are of one type, which is not declared, so a text may stand for several keys:

    * the text itself
    * its value as JSON; a list is a key of several columns, and a whole number is also a double
    * a date, or a timestamp with a time zone
    * bytes, written as ``0xff`` or as Python shows them, or the text's UTF-8
    """
    found: list[tuple[Any, ...]] = [(each,) for each in _meant(text)]
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, list) and 1 <= len(value) <= KEY_COLUMNS_MAX:
            columns = [list(_meant(each) if isinstance(each, str) else _numbers(each)) for each in value]
            found += itertools.islice(itertools.product(*columns), KEYS_MAX)
    said: set[str] = set()
    for key in found:
        if repr(key) not in said:  # 1, 1.0 and True are equal
            said.add(repr(key))
            yield key if len(key) > 1 else key[0]


def _meant(text: str) -> Iterator[Any]:
    """Yields the values that a single text may stand for."""
    yield text
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        yield from [value] if isinstance(value, str) else _numbers(value)
    if text in ("True", "False"):  # as a scan shows them
        yield text == "True"
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        with contextlib.suppress(ValueError):
            yield date.fromisoformat(text)
    elif re.match(r"\d{4}-\d\d-\d\d[T ]\d", text):
        with contextlib.suppress(ValueError):
            if (moment := datetime.fromisoformat(text)).tzinfo is not None:
                yield moment
    if re.fullmatch(r"0[xX](?:[0-9a-fA-F]{2})*", text):
        yield bytes.fromhex(text[2:])
    if re.match(r"b['\"]", text):
        with contextlib.suppress(ValueError, SyntaxError):
            yield ast.literal_eval(text)
    with contextlib.suppress(UnicodeEncodeError):
        yield text.encode()


def _numbers(value: Any) -> Iterator[Any]:
    """Yields the values of a key's column that a JSON number or boolean may stand for; nothing for another JSON
    value."""
    if isinstance(value, bool | int | float):
        yield value
    if isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            yield float(value)


def entries_under(text: str, scan: Callable[[Any], Iterable[bytes]]) -> pa.Table | None:
    """Returns the entries of the key that a text stands for; None: the key has none.

    Args:
        scan: yields the pages of a key's entries, given the key.
    """
    for key in keys_meant(text):
        try:
            found = joined([read_table(page) for page in scan(key)])
        except (UnsupportedKeyType, EncodeError):
            continue
        if found.num_rows:
            return found
    return None


def by_share(policies: Sequence[str]) -> bool:
    """Tells whether policies ask for a rebalance by weight. The controller has a separate command for that."""
    return list(policies) in ([], ["ring"])


def would_redistribute(cluster: Cluster, policies: Sequence[str], operator: str) -> Placement:
    """Returns the moves that :func:`redistribute` would make; moves nothing."""
    return cluster.would_rebalance(operator) if by_share(policies) else cluster.propose(*policies, operator=operator)


def redistribute(cluster: Cluster, policies: Sequence[str], operator: str, options: MoveOptions) -> list[Migration]:
    """Moves partitions of ``operator`` (empty: of all operators) as ``policies`` propose."""
    if by_share(policies):
        return cluster.rebalance(operator, options)
    return cluster.place(*policies, operator=operator, options=options)


def runner_of(batch: str) -> tuple[str, str]:
    """Splits a batch's name, such as ``sweep/7``, into its kind (one of CONTROLLERS) and its id.

    For a batch that another program runs, returns ``""`` and the whole name.
    """
    kind, _, id_ = batch.partition("/")
    return (kind, id_) if id_ and kind in CONTROLLERS else ("", batch)


def call_off(cluster: Cluster, kind: str, id_: str) -> str:
    """Cancels a batch that the controller runs. Returns a text about the effect, or the batch's new state.

    Args:
        kind: kind of the batch, as :func:`runner_of` returns it.
        id_: id of the batch, as :func:`runner_of` returns it.
    """
    match kind:
        case "reconfiguration":
            cluster.cancel(id_)
            return "moves that are not yet fenced are rolled back"
        case "restores":
            cluster.cancel_restore(id_)
            return "partitions that have not begun stay as they are"
        case _:
            return cluster.sweep(id_).cancel().state
