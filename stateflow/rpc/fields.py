"""Valid values of each field on the wire; :func:`checked` checks a message on receipt.

``KINDS`` lists a field by its name if that means the same in every message, and by ``Message.field`` otherwise. It
lists every text field and every bytes field, which tests/unit/rpc/test_fields.py checks. An accepted value may become a
path, a ledger id, a label on a terminal or a number in SQL, and an epoch or sequence may be incremented.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from stateflow.errors import InvalidArgument
from stateflow.operator.arrow import read_schema
from stateflow.tracing import TRACEPARENT
from stateflow.types import (
    ADDRESS,
    DIGEST,
    EPOCH_MAX,
    FILE,
    LABEL,
    NAME,
    PARTITIONS_MAX,
    SEQUENCE_MAX,
    SNAPSHOT,
    SOURCE_MAX,
    SPAWNED_MAX,
    TARGET,
    TOKEN,
    URL,
    WEIGHT_MAX,
    WORKERS_MAX,
    Grammar,
    shown,
)

M = TypeVar("M", bound=Message)
#: limit of repeated fields; those of partitions have a lower one
ENTRIES_MAX = 1 << 17
#: greatest signed 64-bit number: SQL, Arrow and every JSON reader accept it, except readers that use doubles
NUMBER_MAX = (1 << 63) - 1
TEXT_MAX = 1 << 20
DURATION_MAX = 1e9
RATE_MAX = 1e15


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of valid values, with its name (``what``) and how to write one (``how``).

    An ``optional`` kind also allows the default that proto3 has for an unset field; ``holds`` is not called for it.
    """

    what: str
    how: str
    holds: Callable[[Any], bool]
    optional: bool = False
    #: least and most, for whole numbers
    within: tuple[int, int] | None = None


def _of(grammar: Grammar) -> Kind:
    return Kind(grammar.what, grammar.how, grammar.holds)


def _whole(what: str, least: int, most: int) -> Kind:
    return Kind(what, f"use {least} to {most}", lambda value: least <= value <= most, within=(least, most))


def _real(what: str, least: float, most: float) -> Kind:
    return Kind(what, f"use {least:g} to {most:g}", lambda value: least <= value <= most)  # NaN is not within


def optional(kind: Kind) -> Kind:
    return Kind(kind.what, kind.how, kind.holds, True, kind.within)


def is_schema(data: bytes) -> bool:
    try:
        read_schema(data)
    except InvalidArgument:
        return False
    return True


def is_traceparent(text: str) -> bool:
    return TRACEPARENT.fullmatch(text) is not None


def is_states(text: str) -> bool:
    """Tells whether the text is JSON as :meth:`stateflow.state.KeyedState.schema` returns it."""
    try:
        found = json.loads(text) if len(text) <= TEXT_MAX else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and all(isinstance(x, dict) and isinstance(x.get("name"), str) for x in found)


ANY = Kind("", "", lambda _: True)
NAMED, IDENTIFIED, SNAPSHOTTED, FILED = _of(NAME), _of(TOKEN), _of(SNAPSHOT), _of(FILE)
DIGESTED, ADDRESSED, LABELLED, PLACED = _of(DIGEST), _of(ADDRESS), _of(LABEL), _of(TARGET)
LOCATED = optional(_of(URL))
#: prose of errors and notes; :func:`stateflow.errors.one_line` makes it fit for a terminal
TEXT = Kind("text", f"use at most {TEXT_MAX} characters", lambda value: len(value) <= TEXT_MAX)
#: an operator's source text; :func:`stateflow.code.loading.check_digest` tells whether it is the deployed one
SOURCE = Kind("source", f"use at most {SOURCE_MAX} bytes", lambda value: len(value.encode()) <= SOURCE_MAX)
#: W3C Trace Context
TRACED = optional(Kind("traceparent", "send a traceparent of version 00, or none", is_traceparent))
WORD = optional(
    Kind(
        "word",
        "use at most 64 letters, digits, '-' and '_'",
        lambda value: len(value) <= 64 and value.replace("-", "_").isidentifier(),
    )
)
STATES = Kind("list of states", "send the result of KeyedState.schema() as JSON", is_states)
SCHEMA = Kind("Arrow schema", "send an Arrow IPC schema", is_schema)
#: a client's entry for its successor: at most 9 bytes a partition and its number; only clients read it
KNOWN = Kind("client record", "use at most 1 MiB", lambda value: len(value) <= 1 << 20)
PARTITION = _whole("partition", 0, PARTITIONS_MAX - 1)
PARTITIONS = _whole("number of partitions", 1, PARTITIONS_MAX)
EPOCH = _whole("epoch", 0, EPOCH_MAX)
SEQUENCE = _whole("sequence", 0, SEQUENCE_MAX)
#: -1: none
BATCH = _whole("batch number", -1, SEQUENCE_MAX)
COUNT = _whole("number", 0, NUMBER_MAX)
#: the end of the year 9999
INSTANT_MAX = 253_402_300_799_999_999
#: from 1970 on
INSTANT = _whole("time in µs", 0, INSTANT_MAX)
#: event times; a watermark of NUMBER_MAX means that nothing follows
MOMENT = _whole("time in µs", -NUMBER_MAX - 1, NUMBER_MAX)
DURATION = _real("duration", 0, DURATION_MAX)
ASKED = _real("limit", -RATE_MAX, RATE_MAX)
RATE = _real("rate", 0, RATE_MAX)
#: a measured value, to be shown: it may be infinite, or -1 for none
MEASURE = Kind("measure", "use a number", lambda value: not math.isnan(value))

#: kind of each field, by its name, or by ``Message.field`` if the name means something else there; for a map: (keys,
#: values)
KINDS: dict[str, Kind | tuple[Kind, Kind]] = {
    # names
    "operator": NAMED,
    "RebalanceRequest.operator": optional(NAMED),  # all
    "PlaceRequest.operator": optional(NAMED),  # all
    "CheckpointRequest.operator": optional(NAMED),  # all
    "RequestSample.operator": optional(NAMED),
    "OperatorSpec.name": NAMED,
    "Replica.name": NAMED,
    "Replica.site": optional(NAMED),
    "HeartbeatRequest.name": NAMED,
    "replica": NAMED,
    "Unserved.owner": NAMED,
    "NamedFollower.replica": optional(NAMED),  # nobody
    "sites": NAMED,
    "alone": NAMED,
    "failover": WORD,
    "ApplyHeader.site": optional(NAMED),
    "ApplyHeader.site_column": optional(LABELLED),
    "traceparent": TRACED,
    "origins": (NAMED, COUNT),
    "waiting": NAMED,
    "to": NAMED,
    "RestoreOperatorRequest.to": optional(NAMED),
    "savepoint": optional(NAMED),
    "Move.source": optional(NAMED),
    "Move.target": NAMED,
    "agent": NAMED,
    "at": NAMED,
    "Agent.name": NAMED,
    "Agent.site": NAMED,
    "ProposedMove.target": NAMED,
    "ProposedMove.source": NAMED,
    "Link.source": NAMED,
    "Link.target": NAMED,
    "Lacking.replicas": NAMED,
    "Maintenance.node": optional(NAMED),  # in addition to a command that names it
    "EndMaintenanceRequest.node": NAMED,
    "Maintenance.one_of": optional(NAMED),
    # ids
    "id": IDENTIFIED,
    "move_id": IDENTIFIED,
    "PartitionView.move_id": optional(IDENTIFIED),
    "Kept.move_id": optional(IDENTIFIED),
    "restore_id": IDENTIFIED,
    "standby_move": optional(IDENTIFIED),
    "session": optional(IDENTIFIED),
    "SourceSession.id": IDENTIFIED,
    "ticket": optional(IDENTIFIED),
    "ledger": optional(IDENTIFIED),
    "adopted": optional(IDENTIFIED),
    "conflicts": TEXT,
    "Adopted.missing": PARTITION,
    "Adopted.sealed": PARTITION,
    "Directory.id": optional(IDENTIFIED),
    "Directory.place": optional(LABELLED),
    "ReplaceRequest.directory": optional(IDENTIFIED),
    "ReplaceReply.directory": optional(IDENTIFIED),
    "incarnation": optional(IDENTIFIED),
    "snapshot_id": SNAPSHOTTED,
    # files
    "BaseFile.name": FILED,
    "FetchRequest.name": FILED,
    "BaseFile.digest": DIGESTED,
    "digest": optional(DIGESTED),
    "SnapshotReply.kept": optional(DIGESTED),
    "size": _whole("size", 0, 1 << 48),
    "offset": _whole("offset", 0, 1 << 48),
    # labels
    "source": LABELLED,
    "RestoreRequest.source": optional(LABELLED),
    "RestoreOperatorRequest.source": optional(LABELLED),
    "run": optional(LABELLED),
    "use": optional(LABELLED),
    "task": optional(LABELLED),
    "call": optional(LABELLED),
    "ScanRequest.state": optional(LABELLED),  # empty: a list of the states
    "labels": (LABELLED, LABELLED),
    "version": optional(LABELLED),  # empty: an early release, which sends none
    "Deployment.version": COUNT,
    "UpgradeRequest.version": COUNT,
    "python": LABELLED,
    "OperatorSpec.key": LABELLED,
    # places
    "Replica.address": optional(ADDRESSED),
    "Agent.address": ADDRESSED,
    "addresses": ADDRESSED,
    "disk": optional(LABELLED),
    "Child.address": optional(ADDRESSED),
    "Follower.address": optional(ADDRESSED),
    "Follower.leader": optional(ADDRESSED),
    "url": LOCATED,
    "OperatorSpec.target": PLACED,
    "OperatorSpec.source": SOURCE,
    "OperatorSpec.source_mac": optional(DIGESTED),
    "OperatorSpec.bundle": optional(DIGESTED),
    "bundle": DIGESTED,
    "Version.bundle": optional(DIGESTED),
    "Version.target": PLACED,
    "source_digest": optional(DIGESTED),
    # words and prose
    "state": WORD,
    "phase": WORD,
    "by": optional(LABELLED),
    "kind": WORD,
    "strategy": WORD,
    "order": WORD,
    "how": WORD,
    "limits": WORD,
    "code": WORD,
    "what": TEXT,
    "remedy": TEXT,
    "note": TEXT,
    "reason": TEXT,
    "policies": WORD,
    "silent": NAMED,
    "RestartAllRequest.site": optional(NAMED),
    "Rolling.site": optional(NAMED),
    "RollingNode.node": NAMED,
    "RollingNode.status": WORD,
    "RollingNode.error": TEXT,
    "BeginSweepRequest.site": optional(NAMED),
    "BeginSweepRequest.operator": optional(NAMED),  # all
    "Sweep.site": optional(NAMED),
    "Sweep.operator": optional(NAMED),
    "chore": WORD,
    "SweepNode.node": LABELLED,
    "SweepNode.status": WORD,
    "SweepNode.error": TEXT,
    "SweepNode.partitions": COUNT,
    "PartitionFault.replica": optional(NAMED),
    "PartitionFault.error": TEXT,
    "Job.name": NAMED,
    "Job.schedule": TEXT,
    "Job.error": TEXT,
    "ChangeJobRequest.name": NAMED,
    "JobRun.reconfigurations": IDENTIFIED,
    "JobRun.id": optional(LABELLED),
    "JobRunRequest.id": LABELLED,
    "JobStage.operator": NAMED,
    "JobStage.reconfigurations": IDENTIFIED,
    "JobStage.error": TEXT,
    "Job.coordinator": optional(LABELLED),
    "Job.workers": optional(LABELLED),
    "Job.do": WORD,
    "Job.operator": optional(NAMED),
    "Job.to": optional(NAMED),
    "JobRun.note": TEXT,
    "ChangeJobRequest.change": WORD,
    "ListJobsRequest.name": optional(NAMED),
    "Fault.where": (TEXT, TEXT),
    "state_schema": STATES,
    # bytes: their readers check the contents
    "input_schema": optional(SCHEMA),
    "output_schema": SCHEMA,
    "side_schemas": (LABELLED, SCHEMA),
    "dropped": (TEXT, COUNT),
    "chain": optional(Kind("chain", "send 16 bytes", lambda value: len(value) == 16)),
    "ApplyHeader.known": KNOWN,
    "PositionsReply.known": (PARTITION, KNOWN),
    "PositionsReply.clients": (PARTITION, IDENTIFIED),
    "rows": ANY,
    "output": ANY,
    "data": ANY,
    "change_sets": ANY,
    "records": ANY,
    "keys": ANY,
    # numbers with a meaning
    "ApplyRequest.call": COUNT,
    "ApplyResponse.call": COUNT,
    "partition": PARTITION,
    "partitions": PARTITION,
    "OperatorSpec.partitions": PARTITIONS,
    "CheckpointReply.partitions": COUNT,
    "RetireSourceReply.retired": COUNT,
    "DropOutputReply.sizes": (PARTITION, _whole("size", 1, 1 << 48)),
    "ReplicaStatus.partitions": COUNT,
    "ReplaceReply.partitions": COUNT,
    "Deploying.partitions": COUNT,
    "UndeployReply.partitions": COUNT,
    "numbers": PARTITION,
    "epoch": EPOCH,
    "epochs": EPOCH,
    "voided": EPOCH,
    "oldest_epoch": EPOCH,
    "source_epoch": EPOCH,
    "newest_epoch": EPOCH,
    "owned_at": EPOCH,
    "owned_epoch": EPOCH,
    "checkpoint_epoch": EPOCH,
    "sequence": SEQUENCE,
    "standby_of": SEQUENCE,
    "after_sequence": SEQUENCE,
    "head_sequence": SEQUENCE,
    "checkpoint_sequence": SEQUENCE,
    "batch": BATCH,
    "ApplyHeader.batch": _whole("batch number", 0, SEQUENCE_MAX),
    "ApplyRequest.afters": BATCH,
    "TakeOverReply.positions": (LABELLED, BATCH),
    "RestoreReply.positions": (LABELLED, BATCH),
    "PositionsReply.positions": (PARTITION, BATCH),
    "PositionsRequest.before": BATCH,
    "OpenSourceRequest.settled": BATCH,
    "OutputsRequest.after": BATCH,
    "watermark_us": MOMENT,
    "event_us": MOMENT,
    "newest_event_us": MOMENT,
    "PositionsReply.event_us": (PARTITION, MOMENT),
    "PositionsReply.event_before_us": (PARTITION, MOMENT),
    "weight": _whole("weight", 0, WEIGHT_MAX),
    "workers": _whole("number of workers", 1, WORKERS_MAX),
    "SpawnRequest.count": _whole("number of replicas", 1, SPAWNED_MAX),
    "cores": _whole("number of cores", 1, 1 << 16),
    "StandbyRequest.count": _whole("number of copies", 0, 100),
    # times and rates in requests
    "seconds": _real("time to hold requests", 0, 3600),
    "FenceRequest.pause_ms": DURATION,
    "FenceRequest.max_pause_ms": DURATION,
    "MoveOptions.max_pause_ms": ASKED,  # its reader refuses values that are not positive
    "MoveOptions.patience_s": ASKED,
    "MoveOptions.max_bandwidth": ASKED,
    "bandwidth_max": RATE,
    "heartbeat_interval_s": DURATION,
    "AgentBeatReply.heartbeat_interval_s": _real("interval", 0.001, DURATION_MAX),  # 0: the agent would not rest
    "lease_s": DURATION,
    "age_s": DURATION,
}
#: sub-messages without which a request means nothing
REQUIRED = {
    "CreateRequest.spec",
    "PrepareRequest.spec",
    "PrepareRequest.source",
    "TakeOverRequest.spec",
    "RestoreRequest.spec",
    "FenceRequest.target",
    "OpenSourceRequest.asked",
    "OpenSourceRequest.session",
    "DeployRequest.spec",
    "Deployment.spec",
    "RegisterRequest.replica",
    "AgentBeatRequest.agent",
    "AgentBeatRequest.directory",
    "AgentView.agent",
    "Child.spawned",
    "Superseded.owner",
}
_WHOLE = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_INT32,
}
#: least and most number that a type narrower than ``NUMBER_MAX`` can hold
_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
}


def kind_of(field: FieldDescriptor) -> Kind | tuple[Kind, Kind] | None:
    """Returns the table's entry for a field.

    None: the table lacks an entry for a text or bytes field, which is an error in the table.
    """
    assert field.containing_type is not None
    if field.enum_type is not None:
        known = frozenset(field.enum_type.values_by_number)
        return Kind("choice", "use one that this release knows", known.__contains__)
    named = KINDS.get(f"{field.containing_type.name}.{field.name}") or KINDS.get(field.name)
    if named is not None:
        return named
    if field.type in _WHOLE:
        return INSTANT if field.name.endswith("_us") else COUNT
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return MEASURE
    if field.type in (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_FIXED64):
        return ANY
    return None


def checked(message: M) -> M:
    """Returns the message, if each of its fields holds a valid value. Raises InvalidArgument."""
    for check in _checks_of(message.DESCRIPTOR):
        check(message)
    return message


def unfit(kind: Any, given: Mapping[str, Any]) -> InvalidArgument | None:
    """Returns the error for the first value that protobuf refuses for its field; None: each field takes its value.

    Protobuf's own errors do not name the field. Fields that hold messages are not tried.

    Args:
        kind: class of the message.
        given: values by the name of their field.
    """
    for field in kind.DESCRIPTOR.fields:
        inner = field.message_type
        if field.name not in given or (inner is not None and not inner.GetOptions().map_entry):
            continue
        try:
            kind(**{field.name: given[field.name]})
        except (TypeError, ValueError, OverflowError):
            return _refused(f"{kind.DESCRIPTOR.name}.{field.name}", _sent_as(field), given[field.name])
    return None


def _sent_as(field: FieldDescriptor) -> Kind:
    """Returns the kind of a field, or of a map's values, within what the field's type can hold."""
    if field.type == FieldDescriptor.TYPE_BOOL:
        return Kind("truth value", "use True or False", lambda value: isinstance(value, bool))
    kind = kind_of(field)
    kind = kind[1] if isinstance(kind, tuple) else kind or ANY
    if kind.within is None or field.type not in _RANGES:
        return kind
    least, most = _RANGES[field.type]
    return _whole(kind.what, max(least, kind.within[0]), min(most, kind.within[1]))


_Check = Callable[[Any], None]


@functools.cache
def _checks_of(descriptor: Descriptor) -> tuple[_Check, ...]:
    return tuple(check for field in descriptor.fields if (check := _check_of(field)) is not None)


def _check_of(field: FieldDescriptor) -> _Check | None:
    assert field.containing_type is not None
    name, place = field.name, f"{field.containing_type.name}.{field.name}"
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        pair = kind_of(field)
        assert isinstance(pair, tuple), place
        return functools.partial(_check_map, name, place, *pair)
    if field.message_type is not None:
        inner = field.message_type
        if field.is_repeated:
            return functools.partial(_check_messages, name, place, inner)
        return functools.partial(_check_message, name, place, inner, place in REQUIRED)
    kind = kind_of(field)
    assert isinstance(kind, Kind), place
    if field.is_repeated:
        entries_max = PARTITIONS_MAX if kind is PARTITION else ENTRIES_MAX
        return functools.partial(_check_entries, name, place, kind, entries_max)
    if kind is ANY:
        return None
    skips = kind.optional or field.has_presence
    return functools.partial(_check_value, name, place, kind.holds, kind, field.default_value if skips else _NOTHING)


_NOTHING = object()


def _check_value(
    name: str, place: str, holds: Callable[[Any], bool], kind: Kind, nothing: object, message: Any
) -> None:
    value = getattr(message, name)
    if value != nothing and not holds(value):
        raise _refused(place, kind, value)


def _check_entries(name: str, place: str, kind: Kind, entries_max: int, message: Any) -> None:
    values = getattr(message, name)
    _check_count(place, len(values), entries_max)
    if not values or kind is ANY:
        return
    if kind.within is not None:  # every batch brings values for each partition
        least, most = kind.within
        if least <= min(values) and max(values) <= most:
            return
    for value in values:
        if not kind.holds(value):
            raise _refused(place, kind, value)


def _check_map(name: str, place: str, keys: Kind, values: Kind, message: Any) -> None:
    entries = getattr(message, name)
    _check_count(place, len(entries), ENTRIES_MAX)
    for key, value in entries.items():
        if not keys.holds(key):
            raise _refused(place, keys, key)
        if not values.holds(value):
            raise _refused(place, values, value)


def _check_message(name: str, place: str, inner: Descriptor, required: bool, message: Any) -> None:
    if message.HasField(name):
        checked(getattr(message, name))
    elif required:
        raise InvalidArgument(f"{place} is missing", remedy="send it", field=place)


def _check_messages(name: str, place: str, inner: Descriptor, message: Any) -> None:
    entries = getattr(message, name)
    if not entries:
        return
    _check_count(place, len(entries), ENTRIES_MAX)
    checks = _checks_of(inner)
    for entry in entries:
        for check in checks:
            check(entry)


def _check_count(place: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgument(f"too many entries: {count}", remedy=f"send at most {most}", field=place)


def _refused(place: str, kind: Kind, value: object) -> InvalidArgument:
    return InvalidArgument(f"{shown(value)} is not a valid {kind.what}", remedy=kind.how, field=place)
