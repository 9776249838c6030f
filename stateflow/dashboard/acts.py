"""Requests of the page's users: parsed from JSON, checked, and carried out through the client's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stateflow.client import Cluster, Migration, MoveOptions
from stateflow.client.words import (
    by_share,
    call_off,
    entries_under,
    partition_numbers,
    redistribute,
    runner_of,
    would_redistribute,
)
from stateflow.dashboard.access import Access
from stateflow.dashboard.records import Records
from stateflow.dashboard.view import plan_view
from stateflow.errors import InvalidArgument

#: entries of one key that are shown
ENTRIES_MAX = 500
Text = Annotated[str, Field(max_length=1024)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Move(Body):
    """A request for moves.

    ``do``: migrate (``partitions`` of ``operator`` to ``to``), drain (``to``: the replica) or rebalance.
    """

    do: Literal["migrate", "drain", "rebalance"]
    operator: Text = ""
    partitions: Text = ""
    to: Text = ""
    policies: list[Text] = Field(default_factory=list, max_length=3)
    max_pause_ms: float | None = None
    strategy: Text = "auto"


class Named(Body):
    """A change of a batch or a job, by its name."""

    name: Text
    change: Literal["pause", "resume", "cancel", "retry", "run"]


class Sweep(Body):
    chore: Literal["checkpoint", "verify"]
    operator: Text = ""


class Lookup(Body):
    operator: Text
    state: Text
    key: Text


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], data: bytes) -> B:
    """Parses a request. Raises InvalidArgument."""
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise InvalidArgument(f"{where} cannot be read: {first['msg']}", remedy="reload the page") from None


class Acts:
    """The requests that the page offers. Methods raise NotAllowed, and what the cluster refuses with."""

    def __init__(self, cluster: Cluster, records: Records | None) -> None:
        self._cluster, self._records = cluster, records

    def plan(self, access: Access, move: Move) -> dict[str, Any]:
        """Returns what would move. Moves nothing."""
        access.check("plan")
        cluster = self._cluster
        if move.do == "migrate":
            found = cluster.would_migrate(move.operator, self._numbers(move), move.to)
        elif move.do == "drain":
            found = cluster.would_drain(move.to)
        else:
            found = would_redistribute(cluster, move.policies, move.operator)
        return plan_view(found)

    def begin(self, access: Access, move: Move) -> dict[str, Any]:
        """Begins moves, and returns the ids of their reconfigurations."""
        access.check("place" if move.do == "rebalance" and not by_share(move.policies) else move.do)
        cluster, options = self._cluster, MoveOptions(max_pause_ms=move.max_pause_ms, strategy=move.strategy)
        begun: list[Migration]
        if move.do == "migrate":
            begun = [cluster.migrate(move.operator, self._numbers(move), move.to, options)]
        elif move.do == "drain":
            begun = cluster.drain(move.to, options)
        else:
            begun = redistribute(cluster, move.policies, move.operator, options)
        return {"begun": [each.id for each in begun]}

    def _numbers(self, move: Move) -> list[int]:
        return partition_numbers(move.partitions, self._cluster.operator(move.operator).partitions)

    def change_batch(self, access: Access, named: Named) -> dict[str, Any]:
        """Changes a batch, named as the board names it."""
        kind, id_ = runner_of(named.name)
        if kind == "reconfiguration":
            return self._change_reconfiguration(access, id_, named.change)
        access.check("restore" if kind == "restores" else "batch")
        if kind and named.change == "cancel":
            call_off(self._cluster, kind, id_)
        elif not kind and self._records is not None and named.change in _STATUS:
            self._records.board.move_batch(named.name, _STATUS[named.change])
        else:
            raise InvalidArgument(
                f"{named.name} does not support {named.change}", remedy="cancel it, or reload the page"
            )
        return {}

    def _change_reconfiguration(self, access: Access, id_: str, change: str) -> dict[str, Any]:
        changes: Mapping[str, Callable[[str], Any]] = {
            "pause": self._cluster.pause,
            "resume": self._cluster.resume,
            "cancel": self._cluster.cancel,
            "retry": self._cluster.retry,
        }
        if change not in changes:
            raise InvalidArgument(f"a reconfiguration does not support {change}", remedy="reload the page")
        access.check(change)
        changes[change](id_)
        return {}

    def change_job(self, access: Access, named: Named) -> dict[str, Any]:
        access.check("job")
        if named.change not in ("pause", "resume", "run"):
            raise InvalidArgument(f"a job does not support {named.change}", remedy="reload the page")
        if named.change == "run":
            return {"run": self._cluster.run_job(named.name).id}
        self._cluster.change_job(named.name, named.change)
        return {}

    def sweep(self, access: Access, wanted: Sweep) -> dict[str, Any]:
        access.check("sweep")
        begin = self._cluster.checkpoint_all if wanted.chore == "checkpoint" else self._cluster.verify_all
        return {"batch": begin(wanted.operator).report.batch}

    def states(self, access: Access, operator: str) -> dict[str, Any]:
        """Returns the key columns of an operator, and its states with their kinds."""
        access.check_look()
        spec = self._cluster.operator(operator)
        states = json.loads(spec.state_schema)
        return {
            "key": list(spec.key),
            "states": [{"name": each["name"], "kind": each.get("kind", "")} for each in states],
        }

    def look_up(self, access: Access, wanted: Lookup) -> dict[str, Any]:
        """Returns the entries of one key, and the ``partition`` that holds them."""
        access.check("state")
        access.check_operator(wanted.operator)
        found = entries_under(wanted.key, lambda key: self._cluster.scan_state(wanted.operator, wanted.state, key))
        if found is None:
            return {"entries": [], "partition": None, "more": False}
        rows = found.slice(0, ENTRIES_MAX + 1).to_pylist()
        entries = [{"map_key": _shown(row["map_key"]), "value": _shown(row["value"])} for row in rows[:ENTRIES_MAX]]
        return {"entries": entries, "partition": rows[0]["partition"], "more": len(rows) > ENTRIES_MAX}


#: for batches whose runner reads the status from the board
_STATUS = {"pause": "PAUSED", "resume": "IN_PROGRESS", "cancel": "CANCELLED"}


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
