"""Decides when jobs run, and on which nodes. Sans-io.

A job is work that is done on a schedule or once at a given time; a run is one execution of it. A run is IN_PROCESS
until it ends as PROCESSED or FAILED. At most one run of a job is under way at a time. A run has a stage for each
operator. A controller that resumes a run carries out the stages that are not recorded.

An affinity says which controller coordinates a job's runs, or which nodes they may use::

    [hard|soft[:SECONDS]] node NAME | site NAME | label KEY[=VALUE] [:AT_LEAST[-AT_MOST]]

for example ``hard site edge-1:2-4``. A run waits for a hard affinity without a time limit. After SECONDS it gives a
soft affinity up: it uses the matching nodes that answer, or any other nodes if none match. No job uses a node whose
settings exclude jobs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from reconfig.decisions.policies import PolicyName, policies_named
from stateflow.errors import REPORT_LINE, InvalidArgument, StateflowError
from stateflow.reports import JobStage
from stateflow.schedule import Schedule
from stateflow.types import MoveOptions, check_name, shown

#: seconds after which a run gives up a soft affinity that names no time
FALLBACK_S = 60.0
FALLBACK_MAX_S = 1e9
WORKERS_AT_MOST = 1_000_000
#: the label of a node that takes no jobs; ``--no-jobs`` sets it
NO_JOBS = ("jobs", "no")
#: maximum number of runs of a job that are remembered
RUNS_MAX = 100
_REMEDY = "write hard site edge-1, soft:30 node gw-1, or label disk=ssd:2-4 (at least 2 nodes, at most 4)"
_COUNTS = re.compile(r"(?P<rest>.+?)(?::(?P<least>\d{1,6})(?:-(?P<most>\d{1,6}))?)?")


# -- Affinities ------------------------------------------------------------------------------------------------------


class By(StrEnum):
    NODE = "node"
    SITE = "site"
    LABEL = "label"


@dataclass(frozen=True, slots=True)
class Node:
    """A controller, or a node with replicas. ``agent`` is the name of the agent that started the node and gives it its
    labels, or empty if no agent did. An affinity may name the node by its agent."""

    name: str
    site: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    agent: str = ""

    @property
    def jobs(self) -> bool:
        """Tells whether the node takes jobs."""
        key, no = NO_JOBS
        return self.labels.get(key) != no


@dataclass(frozen=True, slots=True)
class Affinity:
    """An affinity, parsed by :meth:`parse`. A run uses from ``least`` to ``most`` nodes. Unless the affinity is
    ``hard``, a run gives it up after ``fallback_s`` seconds."""

    text: str
    hard: bool
    by: By
    value: str
    least: int = 1
    most: int = WORKERS_AT_MOST
    fallback_s: float = FALLBACK_S

    @classmethod
    def parse(cls, text: str) -> Affinity:
        """Parses the text form (see the module). Raises InvalidArgument."""
        words = text.split(maxsplit=2)
        strength = words.pop(0) if words and words[0].partition(":")[0] in ("hard", "soft") else "hard"
        kind, _, seconds = strength.partition(":")
        rest = " ".join(words).split(maxsplit=1)
        found = _COUNTS.fullmatch(rest[1]) if len(rest) == 2 else None
        if found is None or rest[0] not in set(By) or (kind == "hard" and seconds):
            raise _none(text)
        try:
            fallback_s = float(seconds) if seconds else FALLBACK_S
        except ValueError:
            raise _none(text) from None
        if not 0 <= fallback_s <= FALLBACK_MAX_S:
            raise _none(text)
        least = int(found["least"] or 1)
        most = int(found["most"]) if found["most"] else WORKERS_AT_MOST
        if not 1 <= least <= most:
            raise InvalidArgument(
                f"{shown(text)} asks for at least {least} nodes and at most {most}",
                remedy="give the minimum, from 1 on, then the maximum, e.g. 2-4",
            )
        return cls(text, kind == "hard", By(rest[0]), found["rest"], least, most, fallback_s)

    def __str__(self) -> str:
        return f"{self.by} {self.value}"

    def fits(self, node: Node) -> bool:
        match self.by:
            case By.NODE:
                return self.value in (node.name, node.agent)
            case By.SITE:
                return node.site == self.value
        key, equals, value = self.value.partition("=")
        return key in node.labels and (not equals or node.labels[key] == value)

    def check(self, known: Iterable[Node], what: str) -> None:
        """Checks that the known nodes, alive or not, could ever satisfy the affinity. Raises InvalidArgument.

        Args:
            what: the word for the nodes in errors, ``nodes`` or ``controllers``.
        """
        known = list(known)
        fitting = [node for node in known if self.fits(node)]
        if not fitting:
            there = {
                By.NODE: sorted({node.name for node in known} | {node.agent for node in known if node.agent}),
                By.SITE: sorted({node.site for node in known if node.site}),
                By.LABEL: sorted({f"{key}={value}" for node in known for key, value in node.labels.items()}),
            }[self.by]
            raise InvalidArgument(
                f"none of the {what} matches {self}",
                remedy=f"use one of {', '.join(there)}" if there else f"start one that has a {self.by}",
                wanted=self.text,
            )
        if not any(node.jobs for node in fitting):
            raise InvalidArgument(
                f"the {what} that match {self} take no jobs",
                remedy="start one without --no-jobs, or choose others",
                wanted=self.text,
            )
        if self.by is By.NODE and self.least > len(fitting):
            raise InvalidArgument(
                f"{self} matches {len(fitting)} nodes, but the job asks for at least {self.least}",
                remedy="ask for fewer nodes, or choose them by site or label",
                wanted=self.text,
            )


@dataclass(frozen=True, slots=True)
class Go:
    """The decision that a run may continue. ``nodes`` are the names of the nodes that it may use, or None for all
    nodes. ``note`` names the affinity that was given up, and is empty if none was."""

    nodes: frozenset[str] | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    why: str


def choose(affinity: Affinity | None, there: Sequence[Node], waited_s: float, what: str = "nodes") -> Go | Wait:
    """Chooses the nodes that a run uses now. If more nodes fit than the run may use, the first by name are chosen.

    Args:
        there: nodes that answer now.
        waited_s: seconds since the run began.
        what: the word for the nodes in texts, ``nodes`` or ``controllers``.
    """
    willing = sorted((node for node in there if node.jobs), key=lambda node: node.name)
    if affinity is None:
        if there and not willing:
            return Wait(f"waits: none of the {what} that answer takes jobs")
        everyone = len(willing) == len(there)
        return Go(None if everyone else frozenset(node.name for node in willing))
    fitting = [node.name for node in willing if affinity.fits(node)]
    if len(fitting) >= affinity.least:
        return Go(frozenset(fitting[: affinity.most]))
    lacking = f"{len(fitting)} of at least {affinity.least} {what} that match {affinity} and take jobs answer"
    if affinity.hard:
        return Wait(f"waits: {lacking}")
    if waited_s < affinity.fallback_s:
        return Wait(f"waits: {lacking}; gives the affinity up in {affinity.fallback_s - waited_s:.0f} s")
    used = fitting or [node.name for node in willing]
    if not used:
        return Wait(f"waits: {lacking}, and no other {what} that take jobs answer")
    return Go(frozenset(used[: affinity.most]), f"ran without its affinity: {lacking}")


def _none(text: str) -> InvalidArgument:
    return InvalidArgument(f"{shown(text)} is not an affinity", remedy=_REMEDY)


# -- Jobs and runs ---------------------------------------------------------------------------------------------------


class Do(StrEnum):
    REBALANCE = "rebalance"
    MIGRATE = "migrate"
    DRAIN = "drain"
    CHECKPOINT = "checkpoint"


class RunState(StrEnum):
    IN_PROCESS = "IN_PROCESS"
    PROCESSED = "PROCESSED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Job:
    """A job's definition. :meth:`check` checks which fields belong together.

    Attributes:
        operator: the operator that the job is about; empty: all operators.
        policies: the policies of a rebalance; empty: the ring.
        partitions: the partitions that a migration moves.
        to: the target of a migration, or the replica that a drain empties.
        since_us: when the job was last defined or resumed.
        resumed: True if it was resumed then.
        definition: number of the ledger record that defined the job; 0: there is none yet. Unlike the name, it tells a
            job from one that was deleted before.
        coordinator: the controllers that may coordinate its runs; None: any.
        workers: the nodes that its runs may use; None: any.
    """

    name: str
    schedule: Schedule
    do: Do
    operator: str = ""
    policies: tuple[PolicyName, ...] = ()
    partitions: tuple[int, ...] = ()
    to: str = ""
    options: MoveOptions = MoveOptions()  # noqa: RUF009 - frozen
    paused: bool = False
    since_us: int = 0
    coordinator: Affinity | None = None
    workers: Affinity | None = None
    resumed: bool = False
    definition: int = 0

    @property
    def is_dropped(self) -> bool:
        """True if the job's only time passed while the job was paused."""
        return self.resumed and self.schedule.once_us is not None and self.schedule.once_us <= self.since_us

    def check(self) -> None:
        """Checks that the job has the fields that it needs, and no others. Raises InvalidArgument."""
        check_name("job", self.name)
        wants = {Do.MIGRATE: (self.operator, self.partitions, self.to), Do.DRAIN: (self.to,)}.get(self.do, ())
        if not all(wants):
            lacks = "operator, partitions and target" if self.do is Do.MIGRATE else "the replica"
            raise InvalidArgument(f"a {self.do} job must name {lacks}", remedy="add what is missing", job=self.name)
        ignored = {
            "policies": bool(self.policies) and self.do is not Do.REBALANCE,
            "partitions": bool(self.partitions) and self.do is not Do.MIGRATE,
            "a target": bool(self.to) and self.do in (Do.REBALANCE, Do.CHECKPOINT),
        }
        for what, is_ignored in ignored.items():
            if is_ignored:
                raise InvalidArgument(f"a {self.do} job does not take {what}", remedy="leave it out", job=self.name)
        if self.coordinator is not None and self.coordinator.least > 1:
            raise InvalidArgument(
                "a job has one coordinator, not several", remedy="name the controller without a count", job=self.name
            )

    def prove(self, now_us: int) -> None:
        """Checks a job before it is recorded, because a record cannot be removed. Raises InvalidArgument if the record
        would not be read back as the same job, or the job would never be due."""
        self.check()
        match read_job(self.name, self.to_payload(), self.since_us):
            case Unreadable() as found:
                raise InvalidArgument(
                    f"the job is not valid: {found.why}", remedy="correct its definition", job=self.name
                )
            case found if found != self:
                what = "the job changes when it is written and read again"
                raise InvalidArgument(what, remedy=REPORT_LINE, job=self.name)
        if self.schedule.once_us is not None and self.schedule.once_us <= now_us:
            raise InvalidArgument("the scheduled time has passed", remedy="give a time in the future", job=self.name)
        if self.schedule.next_us(now_us, now_us, None, None) is None:
            raise InvalidArgument("the schedule is never due", remedy="correct the schedule", job=self.name)

    def to_payload(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.in_seconds,  # release 0.1 reads no units
            **({} if self.schedule.in_seconds == self.schedule.text else {"schedule_text": self.schedule.text}),
            "do": str(self.do),
            "operator": self.operator,
            "policies": [str(each) for each in self.policies],
            "partitions": list(self.partitions),
            "to": self.to,
            "options": {name: value for name, value in asdict(self.options).items() if value is not None},
            "paused": self.paused,
            **({} if self.coordinator is None else {"coordinator": self.coordinator.text}),
            **({} if self.workers is None else {"workers": self.workers.text}),
        }

    @classmethod
    def of(cls, name: str, payload: Mapping[str, Any], since_us: int = 0) -> Job:
        """Reads a job from the payload of its record. Raises InvalidArgument."""
        policies = payload.get("policies") or []
        return cls(
            name,
            Schedule.parse(payload.get("schedule_text", payload["schedule"])),
            Do(payload["do"]),
            payload.get("operator", ""),
            tuple(policies_named(",".join(policies))) if policies else (),
            tuple(payload.get("partitions", ())),
            payload.get("to", ""),
            MoveOptions(**payload.get("options", {})),
            payload.get("paused", False),
            since_us,
            Affinity.parse(text) if (text := payload.get("coordinator", "")) else None,
            Affinity.parse(text) if (text := payload.get("workers", "")) else None,
        )


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A job's record that cannot be read, e.g. because a newer version wrote it, or an earlier one that checked less.
    Such a job is listed and can be deleted, but is never due. ``why`` says what is wrong with the record."""

    name: str
    payload: Mapping[str, Any]
    why: str

    def refused(self) -> InvalidArgument:
        return InvalidArgument(
            f"the job's record cannot be read: {self.why}",
            remedy=f"delete it with `stateflow job delete {self.name}`, and create it again",
            job=self.name,
        )


def read_job(name: str, payload: Mapping[str, Any], since_us: int) -> Job | Unreadable:
    """Reads a job's record. Returns Unreadable instead of raising, so that the records of other jobs can be read."""
    try:
        return Job.of(name, payload, since_us)
    except StateflowError as error:
        return Unreadable(name, payload, error.what)
    except Exception as error:  # noqa: BLE001 - another version may have written anything
        return Unreadable(name, payload, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job.

    Attributes:
        at_us: its due time.
        ended_us: when it ended; 0: it is under way.
        note: its outcome in words.
        operators: the operators that it has a stage for; None: an earlier version began the run and did not record
            them.
        stages: the stages recorded so far.
        definition: :attr:`Job.definition` of the job that began it.
    """

    job: str
    at_us: int
    began_us: int
    state: RunState = RunState.IN_PROCESS
    ended_us: int = 0
    reconfigurations: tuple[str, ...] = ()
    note: str = ""
    operators: tuple[str, ...] | None = None
    stages: tuple[JobStage, ...] = ()
    definition: int = 0

    @property
    def id(self) -> str:
        return f"{self.job}/{self.at_us}"

    @property
    def item_id(self) -> str:
        return f"run/{self.id}"

    def left(self, deployed: Sequence[str]) -> list[str]:
        """Returns the operators whose stage is not recorded yet.

        Args:
            deployed: the operators deployed now.
        """
        done = {stage.operator for stage in self.stages}
        wanted = deployed if self.operators is None else self.operators
        return [name for name in wanted if name not in done]

    @property
    def mark(self) -> str:
        """Text in the reason of each of this run's moves, by which the moves are recognised."""
        return f"job {self.job}, run {self.at_us}"


def next_at_us(runs: Sequence[Run], now_us: int) -> int:
    """Returns the time of a run that is begun by hand. It is later than the times of all earlier runs, even if those
    were taken from a clock that was ahead."""
    return max([now_us, *(run.at_us + 1 for run in runs)])


def due(job: Job, runs: Sequence[Run], now_us: int, seen_us: int | None = None) -> int | None:
    """Returns the time of the run that is due now; None: none is due. If a controller whose clock is ahead has begun
    the run of a due time, a controller whose clock is behind does not run the job for that time again.

    Args:
        seen_us: the earliest time that the clock has shown since the job's last change, see :class:`Earliest`; None:
            not known.
    """
    newest = runs[-1] if runs else None
    if job.paused or job.is_dropped or (newest is not None and newest.state is RunState.IN_PROCESS):
        return None
    fired, ended = _fired_us(job, runs), None if newest is None else newest.ended_us
    at_us, ran = job.schedule.due(now_us, job.since_us, fired, ended, seen_us), {run.at_us for run in runs}
    if at_us is None or job.schedule.once_us is None:
        return None if at_us in ran else at_us
    while at_us in ran:  # for a former job of the same name: that run has the id already
        at_us += 1
    return at_us


def _fired_us(job: Job, runs: Sequence[Run]) -> int | None:
    """Returns the newest due time for which the job ran; None: it never ran. A job for one time does not count the runs
    of a former job of the same name, which may be from a clock that ran ahead."""
    is_once = job.schedule.once_us is not None
    return max((run.at_us for run in runs if not is_once or run.definition == job.definition), default=None)


class Earliest:
    """The earliest time that the clock has shown since each job was last defined or has last run."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[int, int], int]] = {}  # by job: since when, and the earliest time

    def at(self, job: Job, runs: Sequence[Run], now_us: int) -> int:
        """Notes the present time, and returns the earliest one."""
        since = job.since_us, runs[-1].ended_us if runs else 0
        known, seen_us = self._seen.get(job.name, (since, now_us))
        self._seen[job.name] = since, min(seen_us, now_us) if known == since else now_us
        return self._seen[job.name][1]

    def keep(self, names: Collection[str]) -> None:
        """Forgets all jobs but these."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}


def next_us(job: Job, runs: Sequence[Run], now_us: int) -> int:
    """Returns the time of the next run; 0: the job never runs again, or is paused."""
    if job.paused or job.is_dropped:
        return 0
    fired, ended = _fired_us(job, runs), (runs[-1].ended_us or None) if runs else None
    if job.schedule.cron is not None and fired is not None and fired > now_us:  # a clock that was ahead was put back
        ran, at_us = {run.at_us for run in runs}, job.schedule.next_us(now_us, job.since_us, None, None)
        while at_us in ran:
            at_us = job.schedule.next_us(at_us, job.since_us, None, None)
        return at_us or 0
    return job.schedule.next_us(now_us, job.since_us, fired, ended) or 0
