"""Jobs: what is to be done again and again, or at a time, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from reconfig.placement import PolicyName, policies_named
from stateflow.errors import InvalidArgument
from stateflow.moves import MoveOptions
from stateflow.schedule import Schedule
from stateflow.types import check_name

#: runs of a job that are remembered
RUNS_MAX = 100


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
    """``operator``: empty: all. ``policies``: of a rebalance; none: the ring's. ``partitions``, ``to``: of a migration;
    of a drain ``to`` is the replica that is drained. ``since_us``: when it was made, or went on. See :meth:`check`."""

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

    def check(self) -> None:
        """Raises InvalidArgument."""
        check_name("job", self.name)
        wants = {Do.MIGRATE: (self.operator, self.partitions, self.to), Do.DRAIN: (self.to,)}.get(self.do, ())
        if not all(wants):
            lacks = "operator, partitions and target" if self.do is Do.MIGRATE else "the replica"
            raise InvalidArgument(f"a job that does {self.do} names {lacks}", remedy="say which", job=self.name)

    def to_payload(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.text,
            "do": str(self.do),
            "operator": self.operator,
            "policies": [str(each) for each in self.policies],
            "partitions": list(self.partitions),
            "to": self.to,
            "options": {name: value for name, value in asdict(self.options).items() if value is not None},
            "paused": self.paused,
        }

    @classmethod
    def of(cls, name: str, payload: Mapping[str, Any], since_us: int = 0) -> Job:
        """Raises InvalidArgument."""
        policies = payload.get("policies") or []
        return cls(
            name,
            Schedule.parse(payload["schedule"]),
            Do(payload["do"]),
            payload.get("operator", ""),
            tuple(policies_named(",".join(policies))) if policies else (),
            tuple(payload.get("partitions", ())),
            payload.get("to", ""),
            MoveOptions(**payload.get("options", {})),
            payload.get("paused", False),
            since_us,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """``at_us``: the time that it was for. ``ended_us``: 0: it is under way. ``note``: what came of it."""

    job: str
    at_us: int
    began_us: int
    state: RunState = RunState.IN_PROCESS
    ended_us: int = 0
    reconfigurations: tuple[str, ...] = ()
    note: str = ""

    @property
    def item_id(self) -> str:
        return f"run/{self.job}/{self.at_us}"

    @property
    def mark(self) -> str:
        """By which its moves are told from others'."""
        return f"job {self.job}, run {self.at_us}"


def due(job: Job, newest: Run | None, now_us: int) -> int | None:
    """The time that it is to run for now; None: it is not yet."""
    if job.paused or (newest is not None and newest.state is RunState.IN_PROCESS):
        return None
    fired, ended = (None, None) if newest is None else (newest.at_us, newest.ended_us)
    return job.schedule.due(now_us, job.since_us, fired, ended)


def next_us(job: Job, newest: Run | None, now_us: int) -> int:
    """When it will run next; 0: never, or while it is paused."""
    if job.paused:
        return 0
    fired, ended = (None, None) if newest is None else (newest.at_us, newest.ended_us or None)
    return job.schedule.next_us(now_us, job.since_us, fired, ended) or 0
