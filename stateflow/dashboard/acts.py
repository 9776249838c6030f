"""Requests of the page's users: who may make them, and how they are carried out through the client's API.

*Access* is decided from a request's headers, a token and the table of roles, without I/O. The page must be requested at
an IP address, or under a name that is configured as its own (:func:`check_host`). A request that changes something must
come from the page itself (:func:`check_same_page`). Users sign in with a token, and get a session for it
(:class:`Sessions`). A function of the page makes a gRPC call. The user's role must allow this call, and so must the
role of this process, which acts for the user (:class:`Access`). In plain text users cannot be told apart, and each may
do everything.

*Acts*: requests are parsed from JSON (:func:`read_body`), checked, and carried out (:class:`Acts`).
"""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stateflow.client import Cluster, Migration, MoveOptions
from stateflow.client.commands import (
    by_share,
    call_off,
    entries_under,
    partition_numbers,
    redistribute,
    runner_of,
    would_redistribute,
)
from stateflow.dashboard.view import plan_view
from stateflow.dashboard.watching import Records
from stateflow.errors import BadCertificate, InvalidArgument, NotAllowed, StateflowError
from stateflow.security.certificates import checked_pair, decoded_token
from stateflow.security.roles import DELEGATES, Identity, Role, check_call, via

# -- Access ----------------------------------------------------------------------------------------------------------

#: header of requests that change something; a form or a picture of another page cannot send it
HEADER, HEADER_VALUE = "x-stateflow", "1"
#: prefix of the cookie's name; the port that the browser asked follows, because ports of a host share their cookies
COOKIE = "stateflow-session"
#: author of what the dashboard itself writes to the ledger
AUTHOR = "stateflow dashboard"
SESSIONS_MAX = 1000
#: longest time until a user has to present a token again
LONGEST = timedelta(hours=24)
#: the user of each request in plain text, where users cannot be told apart
EVERYBODY = Identity(Role.ADMIN, "everybody")
#: the gRPC call that each function of the page makes
CALLS: Mapping[str, str] = {
    "plan": "Propose",
    "migrate": "Migrate",
    "drain": "Drain",
    "rebalance": "Rebalance",
    "place": "Place",
    "pause": "PauseReconfiguration",
    "resume": "ResumeReconfiguration",
    "cancel": "CancelReconfiguration",
    "retry": "RetryReconfiguration",
    "sweep": "BeginSweep",
    "batch": "CancelSweep",
    "restore": "CancelRestore",
    "job": "ChangeJob",
    "autopilot": "Autopilot",
    "state": "Scan",
}
_SERVICES = {"Scan": "ReplicaService"}


class SignInRequired(NotAllowed):
    """The user has not signed in yet."""

    code = "sign_in_required"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(header: str) -> str:
    """Returns the name or address in a Host header, without its port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def check_host(header: str, hosts: Collection[str]) -> None:
    """Checks the name or address by which the page was requested. Raises NotAllowed.

    The operator of another website can let that website's name point to this address; the website's page could then
    read the answers (DNS rebinding). So a name is accepted only if it is configured as this page's. An IP address needs
    no such check.
    """
    host = host_of(header)
    if host == "localhost" or host.endswith(".localhost") or _is_address(host) or host in hosts:
        return
    raise NotAllowed(
        f"the page is not served under the name {host[:100]!r}",
        remedy="use its address, or start the dashboard with --host and this name",
    )


def check_same_page(headers: Mapping[str, str], scheme: str) -> None:
    """Checks that a request which changes something comes from the page itself. Raises NotAllowed."""
    if headers.get(HEADER) != HEADER_VALUE:
        raise NotAllowed(f"the header {HEADER} is missing", remedy="use the page, or the command line")
    own = f"{scheme}://{headers.get('host', '')}".lower()
    if headers.get("origin", "").lower() != own:
        raise NotAllowed("the request comes from another page", remedy="use the page, or the command line")


@dataclass(frozen=True, slots=True)
class Shown:
    """The contents of a token that a user has presented.

    Attributes:
        until: end of the token's validity, or of ``LONGEST`` from the sign-in, if that is earlier.
    """

    identity: Identity
    serial: int
    until: datetime


def shown_by(text: str, ca: bytes, revoked: Collection[int], now: datetime) -> Shown:
    """Returns the contents of a token after checking it. Raises BadCertificate.

    The check uses this process's certificate authority, and ignores the authority that the token contains.
    """
    _, cert, key = decoded_token(text)
    found = checked_pair(ca, cert, key, now, "the token")
    if found.serial in revoked:
        raise BadCertificate("the token was revoked", remedy="issue another one: `stateflow token issue`")
    assert found.identity is not None
    return Shown(found.identity, found.serial, min(found.not_after, now + LONGEST))


class Sessions:
    """The sessions of users that have presented a token. The token itself is not kept: a session is known by a random
    id, which the browser gets."""

    def __init__(self, new_id: Callable[[], str] = lambda: secrets.token_urlsafe(32)) -> None:
        self._new_id = new_id
        self._sessions: dict[str, Shown] = {}

    def open(self, shown: Shown) -> str:
        """Opens a session, and returns its id. If there are ``SESSIONS_MAX`` sessions already, the oldest one ends."""
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        number = self._new_id()
        self._sessions[number] = shown
        return number

    def find(self, number: str, revoked: Collection[int], now: datetime) -> Identity | None:
        """Returns the user of a session; None: there is no such session.

        A session ends here if its token has expired or was revoked.
        """
        shown = self._sessions.get(number)
        if shown is None:
            return None
        if now >= shown.until or shown.serial in revoked:
            self.end(number)
            return None
        return shown.identity

    def end(self, number: str) -> None:
        self._sessions.pop(number, None)


@dataclass(frozen=True, slots=True)
class Access:
    """The rights of one request.

    Attributes:
        own: this process's identity in the cluster; None: plain text.
        signed_in: the user; None: nobody has signed in.
    """

    own: Identity | None
    signed_in: Identity | None

    @property
    def needs_sign_in(self) -> bool:
        return self.own is not None and self.signed_in is None

    @property
    def who(self) -> Identity:
        """The user. Raises SignInRequired."""
        if self.own is None:
            return EVERYBODY
        if self.signed_in is None:
            raise SignInRequired("no user is signed in", remedy="sign in with a token: `stateflow token issue`")
        return self.signed_in

    @property
    def named(self) -> Identity | None:
        """The user in whose name this process calls controllers; None: it calls in its own name, because no user is
        signed in, or its certificate may not name users."""
        return self.signed_in if self.own is not None and self.own.role in DELEGATES else None

    @property
    def author(self) -> str:
        """The author of what this process itself writes to the ledger for the user; empty: the user is not known."""
        return "" if self.signed_in is None else via(self.signed_in, AUTHOR)

    def check(self, act: str) -> None:
        """Checks that the user and this process, which acts for the user, may both use a function of the page.

        Raises NotAllowed, SignInRequired.
        """
        call = CALLS[act]
        method = f"/stateflow.rpc.{_SERVICES.get(call, 'ControllerService')}/{call}"
        for each in (self.who, self.own):
            if each is not None:
                check_call(method, each)

    def check_look(self) -> None:
        """Checks that the user may look at the page. Raises NotAllowed, SignInRequired."""
        if self.own is not None:
            check_call("/stateflow.rpc.ControllerService/Status", self.who)

    def check_operator(self, operator: str) -> None:
        """Checks that the user and this process may both reach an operator. Raises NotAllowed, SignInRequired."""
        for each in (self.who, self.own):
            if each is not None and not each.reaches(operator):
                raise NotAllowed(f"{each} may not reach the operator {operator!r}", remedy="use another token")

    def may(self) -> dict[str, bool]:
        """Returns function of the page → whether the user may use it."""
        return {act: self._allows(act) for act in CALLS}

    def _allows(self, act: str) -> bool:
        try:
            self.check(act)
        except StateflowError:
            return False
        return True


# -- Acts ------------------------------------------------------------------------------------------------------------

#: entries of one key that are shown
ENTRIES_MAX = 500
Text = Annotated[str, Field(max_length=1024)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Move(Body):
    """A request for moves.

    ``do`` says what moves: "migrate" moves ``partitions`` of ``operator`` to the replica ``to``, "drain" moves all
    partitions away from the replica ``to``, and "rebalance" distributes partitions anew by ``policies``.
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
        where = ".".join(map(str, first["loc"]))[:100] or "the request"  # it may be a name that the request has
        raise InvalidArgument(f"{where} cannot be read: {first['msg']}", remedy="reload the page") from None


class Acts:
    """Carries out the requests that the page offers. The methods raise NotAllowed, SignInRequired and the cluster's
    errors."""

    def __init__(self, cluster: Cluster, records: Records | None) -> None:
        self._cluster, self._records = cluster, records

    def plan(self, access: Access, move: Move) -> dict[str, Any]:
        """Returns the moves that a request would make, without making them."""
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
        """Pauses, resumes, cancels or retries a batch. ``named.name`` is the batch's id on the board."""
        kind, id_ = runner_of(named.name)
        if kind == "reconfiguration":
            return self._change_reconfiguration(access, id_, named.change)
        access.check("restore" if kind == "restores" else "batch")
        if kind and named.change == "cancel":
            call_off(self._cluster, kind, id_)
        elif not kind and self._records is not None and named.change in _STATUS:
            self._records.board.move_batch(named.name, _STATUS[named.change], access.author)
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


#: new status on the board, for batches whose runner reads it there
_STATUS = {"pause": "PAUSED", "resume": "IN_PROGRESS", "cancel": "CANCELLED"}


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
