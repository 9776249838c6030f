"""Fields on the wire: the table names what each may hold, and nothing else passes."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stateflow.errors import InvalidArgument
from stateflow.rpc import agent_pb2, common_pb2, controller_pb2, replica_pb2
from stateflow.rpc.fields import ANY, KINDS, REQUIRED, Kind, checked, kind_of
from stateflow.settings.base import Settings
from stateflow.settings.models import AgentProcess, ControllerSettings, ReplicaProcess
from stateflow.types import EPOCH_MAX, FILE, LABEL, NAME, PARTITIONS_MAX, TOKEN

FILES = (agent_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR, replica_pb2.DESCRIPTOR, controller_pb2.DESCRIPTOR)
HOSTILE = (
    "../x",
    "a/b",
    "/etc/passwd",
    ".",
    "..",
    "",
    "a\nb",
    "a\0b",
    "[/x]",
    "\x1b[2J",
    "a" * 5000,
    "\u202eevil",
    " ",
)
PLAIN = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
SCHEMA = pa.schema([("k", pa.string())]).serialize().to_pybytes()


def messages() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.message_types_by_name.values()


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def plain_fields() -> Iterator[FieldDescriptor]:
    """Yields the fields of every message that hold no message themselves. Maps are included."""
    for message in messages():
        yield from (field for field in message.fields if field.message_type is None or is_map(field))


@pytest.mark.parametrize("field", list(plain_fields()), ids=lambda f: f"{f.containing_type.name}.{f.name}")
def test_every_field_has_a_kind_that_fits_it(field: FieldDescriptor) -> None:
    place = f"{field.containing_type.name}.{field.name}"
    kind = kind_of(field)
    assert kind is not None, f"say in stateflow/rpc/fields.py what {place} may hold"
    if is_map(field):
        assert isinstance(kind, tuple), f"{place} is a map: give kinds of its keys and of its values"
        pairs = zip(kind, (field.message_type.fields_by_name[name] for name in ("key", "value")), strict=True)
    else:
        assert isinstance(kind, Kind), f"{place} is no map"
        pairs = iter([(kind, field)])
    for each, of in pairs:
        each.holds(PLAIN.get(of.type, 0))


def test_only_prose_and_payloads_hold_anything() -> None:
    """Only prose and payloads may hold any text; a text that becomes a path or an id never does."""
    loose = {
        f"{field.containing_type.name}.{field.name}"
        for field in plain_fields()
        if field.type == FieldDescriptor.TYPE_STRING
        and isinstance(kind := kind_of(field), Kind)
        and kind.holds("../[/x]\n\x1b")
    }
    assert loose == {
        "Fault.what",
        "Fault.remedy",
        "Move.note",
        "JobStage.error",
        "RollingNode.error",
        "SweepNode.error",
        "PartitionFault.error",
        "Adopted.conflicts",
        "OperatorSpec.source",
    } | {
        "Move.reason",
        "Job.error",
        "Job.schedule",
        "JobRun.note",
        "ProposedMove.reason",
        "Left.reason",
    }
    payloads = {f.name for f in plain_fields() if f.type == FieldDescriptor.TYPE_BYTES and kind_of(f) is ANY}
    assert payloads == {"rows", "output", "data", "change_sets", "records", "keys"}


def test_the_table_names_nothing_that_is_not_there() -> None:
    there = {f"{m.name}.{f.name}" for m in messages() for f in m.fields} | {
        f.name for m in messages() for f in m.fields
    }
    assert set(KINDS) | REQUIRED <= there


def sound(message: Descriptor) -> Message:
    """Makes a message that passes: every text and number in it is the plainest possible."""
    made = GetMessageClass(message)()
    for field in message.fields:
        if field.message_type is not None and not is_map(field):
            if f"{message.name}.{field.name}" in REQUIRED:
                getattr(made, field.name).CopyFrom(sound(field.message_type))
            continue
        kind = kind_of(field)
        if not isinstance(kind, Kind) or kind.optional or field.is_repeated or field.has_presence:
            continue
        if kind.holds(field.default_value):
            continue
        candidates = ("a", "host:1", "CURRENT", "0" * 32, "module:Class", "[]", SCHEMA, 1, 1.0)
        fitting = [each for each in candidates if type(each) is type(field.default_value) and kind.holds(each)]
        setattr(made, field.name, fitting[0])
    return made


def test_sound_messages_pass() -> None:
    for message in messages():
        checked(sound(message))


def requests() -> Iterator[Descriptor]:
    for file in FILES:
        for service in file.services_by_name.values():
            yield from (method.input_type for method in service.methods)
            yield from (method.output_type for method in service.methods)


def hostile(message: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Message]]:
    """Yields (place, an otherwise valid message with one hostile value) for every text, also in nested messages."""
    for field in message.fields:
        if is_map(field):
            continue
        if field.message_type is not None:
            if field.message_type.name in path:
                continue
            for place, inner in hostile(field.message_type, (*path, message.name)):
                made = sound(message)
                target = getattr(made, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(inner)
                yield f"{field.name}.{place}", made
            continue
        kind = kind_of(field)
        if field.type != FieldDescriptor.TYPE_STRING or kind is None or kind.holds("../[/x]\n\x1b"):  # type: ignore[union-attr]
            continue
        for value in HOSTILE:
            if (value == "" and (kind.optional or field.has_presence)) or kind.holds(value):  # type: ignore[union-attr]
                continue
            made = sound(message)
            if field.is_repeated:
                getattr(made, field.name).append(value)
            else:
                setattr(made, field.name, value)
            yield field.name, made


@pytest.mark.parametrize("message", list({each.full_name: each for each in requests()}.values()), ids=lambda m: m.name)
def test_no_hostile_text_passes_in_any_request_or_reply(message: Descriptor) -> None:
    for place, made in hostile(message):
        with pytest.raises(InvalidArgument, match=r"^invalid_argument: .* is not a valid ") as caught:
            checked(made)
        assert "\n" not in str(caught.value), place
        assert "\x1b" not in str(caught.value), place
        assert len(str(caught.value)) < 400, place


NUMBERS = [
    (replica_pb2.CreateRequest, {"partitions": [4294967295]}),
    (replica_pb2.CreateRequest, {"partitions": [PARTITIONS_MAX]}),
    (replica_pb2.CreateRequest, {"epoch": 1 << 63}),
    (replica_pb2.CreateRequest, {"epoch": EPOCH_MAX + 1}),
    (replica_pb2.FenceRequest, {"epoch": 1 << 63}),
    (replica_pb2.FenceRequest, {"max_pause_ms": float("nan")}),
    (replica_pb2.FenceRequest, {"max_pause_ms": float("inf")}),
    (replica_pb2.FenceRequest, {"pause_ms": -1.0}),
    (replica_pb2.HoldRequest, {"seconds": 1e300}),
    (replica_pb2.HoldRequest, {"seconds": float("nan")}),
    (replica_pb2.ApplyHeader, {"batch": -1}),
    (replica_pb2.ApplyHeader, {"batch": (1 << 63) - 1}),
    (replica_pb2.ApplyHeader, {"input_schema": b"no schema"}),
    (replica_pb2.ApplyRequest, {"partitions": [1 << 31]}),
    (replica_pb2.TakeOverRequest, {"how": 99}),
    (replica_pb2.TakeOverReply, {"checkpoint_us": -(1 << 62)}),
    (replica_pb2.BaseFile, {"size": 1 << 63}),
    (common_pb2.Replica, {"weight": (1 << 32) - 1}),
    (common_pb2.Replica, {"address": "unix:/tmp/socket"}),
    (common_pb2.Replica, {"address": "nowhere"}),
    (common_pb2.OperatorSpec, {"partitions": 0}),
    (common_pb2.OperatorSpec, {"partitions": 3_000_000}),
    (common_pb2.OperatorSpec, {"output_schema": b""}),
    (common_pb2.OperatorSpec, {"output_schema": b"\xff" * 100}),
    (common_pb2.OperatorSpec, {"side_schemas": {"late": b"?"}}),
    (common_pb2.OperatorSpec, {"target": "no place"}),
    (controller_pb2.MoveOptions, {"max_bandwidth": float("nan")}),
    (controller_pb2.MoveOptions, {"patience_s": float("inf")}),
    (controller_pb2.StandbyRequest, {"count": (1 << 32) - 1}),
]


@pytest.mark.parametrize(("kind", "values"), NUMBERS, ids=lambda each: getattr(each, "__name__", str(each)[:40]))
def test_no_number_beyond_its_meaning_passes(kind: type[Message], values: dict[str, object]) -> None:
    made = sound(kind.DESCRIPTOR)
    for name, value in values.items():
        if isinstance(value, (list, dict)):
            made.MergeFrom(kind(**{name: value}))
        else:
            setattr(made, name, value)
    with pytest.raises(InvalidArgument):
        checked(made)


def test_parts_of_a_batch_are_held_to_the_table() -> None:
    """Values of a batch's lists are checked against the table, by their least and their largest."""
    header = sound(replica_pb2.ApplyHeader.DESCRIPTOR)
    checked(replica_pb2.ApplyRequest(header=header, partitions=[5, 0], epochs=[1, EPOCH_MAX], afters=[-1, 0]))
    for name, wrong in (("partitions", PARTITIONS_MAX), ("epochs", EPOCH_MAX + 1), ("afters", -2), ("afters", 1 << 62)):
        bad = replica_pb2.ApplyRequest(header=header, **{name: [0, wrong, 1]})
        with pytest.raises(InvalidArgument):
            checked(bad)


def test_a_request_without_what_it_is_about_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"CreateRequest\.spec is missing"):
        checked(replica_pb2.CreateRequest(epoch=1))


def test_deep_and_wide_schemas_are_refused() -> None:
    deep = pa.int64()
    for _ in range(40):
        deep = pa.list_(deep)
    wide = [(f"c{number}", pa.int8()) for number in range(10_001)]
    for schema in (pa.schema([("a", deep)]), pa.schema(wide)):
        spec = sound(common_pb2.OperatorSpec.DESCRIPTOR)
        spec.output_schema = schema.serialize().to_pybytes()  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument):
            checked(spec)


def test_names() -> None:
    assert NAME.holds("Delay-by_aircraft.2")
    assert LABEL.holds("die Größe, m²")
    assert TOKEN.holds("0" * 64)
    assert not TOKEN.holds("0" * 65)
    for name in ("CURRENT", "MANIFEST-000004", "OPTIONS-000007", "000012.sst", "rocksdict-config.json", "CHANGES"):
        assert FILE.holds(name)
    for name in ("RESTORING", "LOCK", "x.py", "000012.sst.part", "000012.sst\n", "../000012.sst", "operator.json"):
        assert not FILE.holds(name)


@pytest.mark.parametrize(
    ("kind", "name", "place", "outside"),
    [
        (ControllerSettings, "heartbeat_interval_s", "AgentBeatReply.heartbeat_interval_s", (0.0009, 2e9)),
        (ReplicaProcess, "weight", "weight", (0, 1001)),
        (ReplicaProcess, "workers", "workers", (0, 257)),
        (AgentProcess, "cores", "cores", (65537,)),
        (ControllerSettings, "lease_s", "lease_s", (2e9,)),
    ],
)
def test_a_setting_that_no_message_could_carry_is_refused(
    kind: type[Settings], name: str, place: str, outside: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    field = KINDS[place]
    assert isinstance(field, Kind)
    for value in outside:
        assert value == 0 or not field.holds(value)
        monkeypatch.setenv(kind.variable(name), str(value))
        with pytest.raises(InvalidArgument, match=f"{kind.variable(name)} cannot be"):
            kind()
