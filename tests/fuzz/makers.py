"""Makers of messages whose fields hold valid and invalid values, and what a part of the fuzzing has found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stateflow.rpc.fields import REQUIRED, Kind, kind_of
from tests.property.arrow_mutants import damaged

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
ROWS = [{"k": f"honest-{number}", "v": number} for number in range(20)]
DEPTH_MAX = 4
#: values that are drawn until one is valid
TRIES = 30
INTEGERS = (0, 1, 2, 3, 4, 7, 255, 65_535, 65_536, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, (1 << 64) - 1, -1)
REALS = (0.0, 1.0, 0.5, -1.0, 1e9, 1e300, float("inf"), float("nan"), 5e-324)
HOSTILE = (
    *("", "x", "../../etc/passwd", "/etc/passwd", "a\nb", "[/x]", "a\x00b", "\x1b[2J", "é" * 90, "x" * 300, "a/b"),
    *("unix:/run/docker.sock", "host:1", "127.0.0.1:1", "[::1]:70000", "file:///etc", "memory://x", "s3://b/k"),
    *("*/5 * * * *", "0 0 31 2 *", "hard label a=b:2-4", "{}", "[]", "[[[[", '{"a": 1e999}', "tests.fuzz:Nothing"),
    *("0" * 32, "f" * 64, "rebalance", "migrate", "stateflow:migration", "batch:x", "PAUSED", "%00", "{0}", "r-0"),
)
#: names that exist, for those who may not move or delete what they name
KNOWN = ("Tally", "cloud-0", "edge-0", "cloud", "edge", "s")


@dataclass(slots=True)
class Outcome:
    """Result of all calls. ``said``: number of calls by status. ``wrong``: violations, one text each."""

    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def _is_needed(each: FieldDescriptor) -> bool:
    """Tells whether a message without this field is not valid."""
    assert each.containing_type is not None
    if each.message_type is not None:
        return f"{each.containing_type.name}.{each.name}" in REQUIRED
    kind = kind_of(each)
    assert isinstance(kind, Kind)
    return not (each.is_repeated or each.has_presence or kind.optional or kind.holds(each.default_value))


class Made:
    """A maker of messages.

    Args:
        wrong: share of values that need not be valid. For requests it is small: few would get far otherwise.
    """

    def __init__(self, chance: random.Random, wrong: float = 0.05) -> None:
        self.chance, self.wrong = chance, wrong
        batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
        self._bytes = [
            b"",
            b"x",
            SCHEMA.serialize().to_pybytes(),
            batch.serialize().to_pybytes(),
            bytes(16),
            bytes(5000),
        ]
        self._known: dict[tuple[Kind, tuple[str, ...]], list[str]] = {}  # valid ones of some names

    def message(self, kind: type[Message], names: Sequence[str], depth: int = 0) -> Message:
        message = kind()
        for each in kind.DESCRIPTOR.fields:
            needed = _is_needed(each) and self.chance.random() >= self.wrong
            if needed or self.chance.random() < (0.75 if depth < DEPTH_MAX else 0.0):
                self.set(message, each, names, depth)
        return message

    def encoded(self, kind: type[Message], names: Sequence[str]) -> bytes:
        """Returns the bytes of a message, of which one in five is damaged."""
        data = self.message(kind, names).SerializeToString()
        return damaged(data, self.chance) if data and self.chance.random() < 0.2 else data

    def set(self, message: Message, each: FieldDescriptor, names: Sequence[str], depth: int) -> None:
        """Sets a field of a message."""
        inner = each.message_type
        count = self.chance.choice((0, 1, 1, 2, 3, 40)) if each.is_repeated else 1
        if inner is not None and inner.GetOptions().map_entry:
            if inner.fields_by_name["value"].message_type is None:
                kinds = kind_of(each)
                assert isinstance(kinds, tuple)
                for _ in range(count):
                    fields = inner.fields_by_name["key"], inner.fields_by_name["value"]
                    key, value = (self._value(*pair, names) for pair in zip(fields, kinds, strict=True))
                    getattr(message, each.name)[key] = value
        elif inner is not None:
            for _ in range(count):
                made = self.message(GetMessageClass(inner), names, depth + 1)
                if each.is_repeated:
                    getattr(message, each.name).append(made)
                else:
                    getattr(message, each.name).CopyFrom(made)
        else:
            kind = kind_of(each)
            assert isinstance(kind, Kind)
            if each.is_repeated:
                getattr(message, each.name).extend(self._value(each, kind, names) for _ in range(count))
            else:
                setattr(message, each.name, self._value(each, kind, names))

    def _value(self, each: FieldDescriptor, kind: Kind, names: Sequence[str]) -> Any:
        """Chooses a value, which is valid unless it may be wrong."""
        if self.chance.random() < self.wrong:
            return self._any(each, names)
        if each.type == FieldDescriptor.TYPE_STRING:
            names = self._valid(kind, tuple(names)) or names
        for _ in range(TRIES):
            value = self._any(each, names)
            if kind.holds(value):
                break
        return value

    def _valid(self, kind: Kind, names: tuple[str, ...]) -> list[str]:
        if (kind, names) not in self._known:
            self._known[kind, names] = [each for each in names if kind.holds(each)]
        return self._known[kind, names]

    def _any(self, each: FieldDescriptor, names: Sequence[str]) -> Any:
        kinds = FieldDescriptor
        match each.type:
            case kinds.TYPE_STRING:
                return self.chance.choice(names)
            case kinds.TYPE_BYTES:
                data = self.chance.choice(self._bytes)
                return damaged(data, self.chance) if data and self.chance.random() < 0.5 else data
            case kinds.TYPE_BOOL:
                return self.chance.random() < 0.5
            case kinds.TYPE_DOUBLE | kinds.TYPE_FLOAT:
                return self.chance.choice(REALS)
            case kinds.TYPE_ENUM:
                assert each.enum_type is not None
                return self.chance.choice([value.number for value in each.enum_type.values])
            case _:
                bits = 32 if each.type in (kinds.TYPE_INT32, kinds.TYPE_UINT32) else 64
                signed = each.type in (kinds.TYPE_INT32, kinds.TYPE_INT64, kinds.TYPE_SINT64)
                low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
                small = self.chance.random() < 0.6
                return max(low, min(high, self.chance.choice(INTEGERS[:5] if small else INTEGERS)))
