"""Types and grammars that all layers share, such as names, addresses, partitions and options of moves."""

from __future__ import annotations

import errno
import json
import math
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Literal, get_args

from stateflow.errors import InvalidArgument, PortInUse, StateflowError

#: partitions' directories have five digits: ``p65535``
PARTITIONS_MAX = 65_536
#: greatest epoch; the names of checkpoints have twelve digits for it
EPOCH_MAX = 10**12 - 1
#: greatest sequence of a commit and greatest batch of a source; the names of checkpoints have sixteen digits for it
SEQUENCE_MAX = 10**16 - 1
#: greatest weight of a replica relative to another
WEIGHT_MAX = 1_000
#: limit in bytes of an operator's class that is deployed as text, with all that it uses
SOURCE_MAX = 256 << 10
#: bytes of one part of a bundle, in messages and in the ledger
BUNDLE_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a name, wherever it is read: from the wire, a checkpoint store or the command line.

    In error messages, ``what`` names the kind of name, and ``how`` says how to write it.
    """

    what: str
    pattern: re.Pattern[str]
    how: str

    def holds(self, text: str) -> bool:
        return self.pattern.fullmatch(text) is not None and text.isprintable()

    def check(self, text: str, what: str = "") -> str:
        """Returns the text if it is valid. Raises InvalidArgument."""
        if not self.holds(text):
            raise InvalidArgument(f"{shown(text)} is not a valid {what or self.what}", remedy=self.how)
        return text


def _plain(length: int) -> str:
    return rf"[A-Za-z0-9][A-Za-z0-9_.\-]{{0,{length - 1}}}"


#: how to write a plain name. Names that become part of a path are plain: they have no separator, no leading dot, and
#: nothing special to a shell or terminal
_PLAIN_HOW = "use letters, digits, '.', '_' and '-', at most {}, starting with a letter or digit"
#: names of operators, replicas, sites, savepoints, and workers of a node; a worker's name ends with WORKER and a number
NAME = Grammar("name", re.compile(_plain(128) + r"(?:~\d{1,3})?"), _PLAIN_HOW.format(128))
#: precedes the number in a worker's name; a node's first worker has the node's name without a number
WORKER = "~"
WORKERS_MAX = 256
#: limit of replicas that one command starts
SPAWNED_MAX = 256
#: ids of moves, restores, reconfigurations, sessions, incarnations and ledgers
TOKEN = Grammar("id", re.compile(_plain(64)), _PLAIN_HOW.format(64))
#: ids of snapshots: an operator, a partition, a move and a number
SNAPSHOT = Grammar("snapshot id", re.compile(_plain(224)), _PLAIN_HOW.format(224))
#: files of a database; another process can request only such files of a copy, and no directory
FILE = Grammar(
    "file name",
    re.compile(
        r"CURRENT|IDENTITY|CHANGES|(?:MANIFEST|OPTIONS)-\d{1,20}|\d{1,20}\.(?:sst|log|blob)|rocksdict-config\.json"
    ),
    "use the name of a database file",
)
#: hexadecimal, of 64 to 256 bits
DIGEST = Grammar("digest", re.compile(r"[0-9a-f]{16,64}"), "use 16 to 64 lower-case hexadecimal digits")
PORT_MAX = 65_535
_PORT = r"[0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
ADDRESS = Grammar(
    "address",
    re.compile(rf"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.\-]{{0,253}})|\[[0-9A-Fa-f:.%]{{2,64}}\]):(?:{_PORT})"),
    "write host:port, or [IPv6]:port, with a port up to 65535",
)
#: names of sources, states, columns and side outputs: they are keys and labels, never paths
LABEL = Grammar("name", re.compile(r".{1,256}"), "use 1 to 256 printable characters")
#: place of an operator's class
TARGET = Grammar(
    "operator reference",
    re.compile(r".{1,1024}:[^\W\d][\w.]{0,255}"),
    "write package.module:Class or file.py:Class",
)
URL = Grammar(
    "URL",
    re.compile(r".{1,4096}"),
    "use at most 4096 printable characters",
)


def listened_at(listen: str) -> tuple[str, int]:
    """Returns host and port of ``host:port``, the address at which a process will listen. Raises InvalidArgument."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > PORT_MAX:
        raise InvalidArgument(
            f"{shown(listen)} is not an address",
            remedy=f"write host:port, with a port up to {PORT_MAX}, or 0 for a free one",
        )
    return host, int(port)


def cannot_listen(error: OSError, listen: str) -> StateflowError:
    """Returns the error of a process that cannot listen: InvalidArgument if the machine lacks the address or the user
    lacks the permission, otherwise PortInUse."""
    host, _, port = listen.rpartition(":")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return InvalidArgument(
            f"this machine has no address {shown(host)}: {error.strerror}",
            remedy="listen on one of its addresses, or on 0.0.0.0 for all",
            address=listen,
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return InvalidArgument(
            f"this user may not listen on port {port}", remedy="choose a port of 1024 or more", address=listen
        )
    return PortInUse(
        f"the address cannot be bound: {error.strerror or error}", remedy="choose another port", address=listen
    )


def check_name(kind: str, name: str) -> str:
    """Returns the name if it is plain, otherwise raises InvalidArgument.

    Names must be plain, because they become directory names and ledger ids.
    """
    if WORKER in name:  # only a node gives such names, to its workers
        raise InvalidArgument(f"{shown(name)} is not a valid {kind} name", remedy=NAME.how)
    return NAME.check(name, f"{kind} name")


def worker_name(node: str, number: int) -> str:
    """Returns the name of a node's worker, which is a replica. ``number`` counts from 0."""
    return f"{node}{WORKER}{number}" if number else node


def node_of(replica: str) -> str:
    """Returns the node to which a replica belongs as a worker. A node fails, moves and is listed as a whole."""
    return replica.partition(WORKER)[0]


def worker_of(replica: str) -> int:
    """Returns a worker's number in its node, from 0."""
    return int(replica.partition(WORKER)[2] or 0)


def shown(value: object) -> str:
    """Returns a value in the form for error messages: in one line, shortened if it is long."""
    try:
        text = repr(value[:200] if isinstance(value, (str, bytes)) else value)
    except Exception as error:  # noqa: BLE001 - raised by a user's repr, or for an int of thousands of digits
        return f"a value of type {type(value).__name__}, which cannot be shown: {type(error).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def one_of(names: Iterable[str], kind: str) -> str:
    """Returns the remedy for an unknown name: a list of the known names, or the remark that no ``kind`` exists yet."""
    known = ", ".join(sorted(names))
    return f"use one of {known}" if known else f"there is no {kind} yet"


def ranges(numbers: list[int]) -> str:
    """Returns ``[0, 1, 2, 5]`` as ``0-2 5``."""
    words: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if start is not None and (number is None or number != (previous or 0) + 1):
            words.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return " ".join(words)


class How(StrEnum):
    """Ways of taking over a partition from an owner that is gone."""

    LOCAL = "LOCAL"  # by the former owner, with the state that it sealed: nothing is lost
    STANDBY = "STANDBY"  # by a standby, with its copy
    CHECKPOINT = "CHECKPOINT"  # by any replica, with the newest checkpoint


@dataclass(frozen=True, slots=True, order=True)
class PartitionId:
    operator: str
    partition: int

    def __str__(self) -> str:
        return f"{self.operator}/{self.partition}"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """The controller's data about a replica. ``weight`` is its share of new partitions relative to others."""

    name: str
    site: str
    address: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """The description by which any replica can run an operator.

    ``target`` is ``package.module:Class``, ``/path/file.py:Class`` or ``<stdin>:Class``; for the latter two, ``source``
    is the text to load. ``key`` contains input column names. ``output_schema`` is an Arrow IPC schema.

    ``recorded_us`` orders the versions of a name: a version that a ledger records is newer than all versions that the
    ledger recorded before, including those of operators undeployed since. 0 is older than all others: the version was
    not recorded, or was recorded by a release that kept no order.
    """

    name: str
    target: str
    partitions: int
    key: tuple[str, ...]
    output_schema: bytes
    state_schema: str  # JSON, as returned by KeyedState.schema()
    side_schemas: tuple[tuple[str, bytes], ...] = ()  # (tag, Arrow IPC schema), by tag
    dropped: tuple[tuple[str, int], ...] = ()  # (state, how often deployments dropped it), by name
    source: str = ""  # text of the class and of all that it uses; empty: it is imported
    source_digest: str = ""  # SHA-256
    source_mac: str = ""  # HMAC with the key of the client that deployed it, see stateflow.code.loading
    recorded_us: int = 0
    bundle: str = ""  # SHA-256 of the bundle that holds the code; empty: replicas have the code, or source is the code

    #: fields that all versions of an operator share, because clients send and read rows by them, and keys are stored by
    #: them; each with its name in errors
    AGREED: ClassVar[Mapping[str, str]] = {
        "partitions": "number of partitions",
        "key": "key",
        "output_schema": "output schema",
        "side_schemas": "schema of side outputs",
    }

    def after(self, deployed: OperatorSpec) -> OperatorSpec:
        """Returns this spec as the version that follows ``deployed``. If nothing changes, it equals ``deployed``.

        A state that this spec no longer declares is dropped. Its stored data stays gone if a later version declares the
        state again, even on a partition that never ran the version without the state.
        """
        gone = {each["name"] for each in json.loads(deployed.state_schema)}
        gone -= {each["name"] for each in json.loads(self.state_schema)}
        times = dict(deployed.dropped)
        dropped = tuple(sorted({**times, **{name: times.get(name, 0) + 1 for name in gone}}.items()))
        return replace(self, dropped=dropped, recorded_us=deployed.recorded_us)

    def unlike(self, other: OperatorSpec) -> list[str]:
        """Returns the fields of ``AGREED`` in which the specs differ; empty: one may be a version of the other."""
        return [name for name in self.AGREED if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as JSON-able data, in the form that data directories and the ledger store."""
        return {
            **asdict(self),
            "key": list(self.key),
            "output_schema": self.output_schema.hex(),
            "side_schemas": {tag: schema.hex() for tag, schema in self.side_schemas},
            "dropped": dict(self.dropped),
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> OperatorSpec:
        """Parses the form of :meth:`to_json`, also that of earlier releases.

        Raises ValueError, TypeError, KeyError or AttributeError for any other form.
        """
        fields = dict(kept)
        fields["key"] = tuple(fields["key"])
        fields["output_schema"] = bytes.fromhex(fields["output_schema"])
        fields["side_schemas"] = tuple((tag, bytes.fromhex(s)) for tag, s in sorted(fields["side_schemas"].items()))
        fields["dropped"] = tuple(sorted(fields.get("dropped", {}).items()))
        return cls(**fields)


# -- Options of moves --------------------------------------------------------------------------------------------------


class StrategyName(StrEnum):
    STOP_AND_RESTART = "stop-and-restart"
    PAUSE_AND_COPY = "pause-and-copy"
    FLUID = "fluid"
    BATCHED = "batched"
    ON_DEMAND = "on-demand"
    WARM_UP = "warm-up"


#: the strategy is chosen from measurements
AUTO = "auto"
STRATEGIES = (AUTO, *StrategyName)
Order = Literal["hot-first", "hot-last", "number"]
ORDERS: tuple[Order, ...] = get_args(Order)
#: field → its unit, and what omitting it means
_UNITS = {
    "max_pause_ms": ("milliseconds", "no limit"),
    "max_bandwidth": ("bytes per second", "no limit"),
    "patience_s": ("seconds", "the controller's setting"),
}


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """The options of a move of partitions.

    Args:
        max_pause_ms: a partition is cut over only when its predicted pause is within this budget; None: no budget.
        max_bandwidth: limit in bytes a second of all base copies together, of every operator that is moved; None: no
            limit. Change sets are not limited, because a copy might never catch up with its source; copies for standbys
            are not limited either.
        patience_s: a move fails with BudgetUnreachable when its pause budget was out of reach for this long; None: the
            controller's setting.
        strategy: one of ``STRATEGIES``, see docs/moving-state.md; ``auto`` chooses from measurements.
        order: ``number``, ``hot-first`` or ``hot-last``, by batches a second.
        limit: maximum number of concurrent moves; None: only the controller's limit.
        per_node: the same, for moves with one node as source or target.
        per_link: the same, for moves between the same two sites.

    Raises InvalidArgument.

    >>> MoveOptions(max_pause_ms=50.0, limit=4).strategy
    'auto'
    """

    max_pause_ms: float | None = None
    max_bandwidth: float | None = None
    patience_s: float | None = None
    strategy: str = AUTO
    order: Order = "number"
    limit: int | None = None
    per_node: int | None = None
    per_link: int | None = None

    def __post_init__(self) -> None:
        for name, (unit, default) in _UNITS.items():
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise InvalidArgument(
                    f"{name} cannot be {value!r}",
                    remedy=f"pass a positive number of {unit}, or omit it for {default}",
                )
        for name in ("limit", "per_node", "per_link"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 0 < value < 1 << 31):
                raise InvalidArgument(f"{name} cannot be {value!r}", remedy="pass an integer of 1 or more, or omit it")
        if self.strategy not in STRATEGIES:
            raise InvalidArgument(f"there is no strategy {self.strategy!r}", remedy=f"use {', '.join(STRATEGIES)}")
        if self.order not in ORDERS:
            raise InvalidArgument(f"there is no order {self.order!r}", remedy=f"use {', '.join(ORDERS)}")

    def changed(self, **changes: Any) -> MoveOptions:
        """Returns these options with some of them changed, by name. Raises InvalidArgument."""
        names = [each.name for each in fields(self)]
        if unknown := changes.keys() - set(names):
            raise InvalidArgument(f"a move has no option {min(unknown)!r}", remedy=f"use {', '.join(names)}")
        return replace(self, **changes)


#: no limits, and defaults otherwise
DEFAULT_OPTIONS = MoveOptions()


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
