"""Feeds damaged Arrow messages to every reader of them.

``python -m tests.property.arrow_mutants SEED COUNT`` exits with 0 if each message was read, or refused with a
StateflowError; any other exit was caused by a message. ``--as-before`` reads them as plain pyarrow does, to show that
there is something to find.
"""

from __future__ import annotations

import datetime as dt
import decimal
import io
import random
import sys
from collections import Counter
from collections.abc import Callable

import pyarrow as pa

from stateflow.errors import StateflowError
from stateflow.operator.arrow import read_batch, read_schema, read_table
from stateflow.operator.rows import RowReader, alone

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ROWS = [
    {
        "k": f"key-{number}",
        "n": number,
        "x": number / 3,
        "b": bytes(number),
        "flag": number % 2 == 0,
        "at": NOW + dt.timedelta(seconds=number),
        "amount": decimal.Decimal(number),
        "list": ["a" * number, None],
        "nested": {"a": [number], "b": "x"},
        "map": [("one", number)],
        "nothing": None,
    }
    for number in range(20)
]
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("b", pa.binary()),
        ("flag", pa.bool_()),
        ("at", pa.timestamp("us", "UTC")),
        ("amount", pa.decimal128(20, 2)),
        ("list", pa.list_(pa.string())),
        ("nested", pa.struct([("a", pa.large_list(pa.int64())), ("b", pa.large_string())])),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("nothing", pa.null()),
    ]
)
INTERESTING = (0, 1, 7, 8, 255, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63)


def damaged(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed))
        match chance.randrange(6):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.randrange(256)
            case 2 | 3:  # a length or an offset
                width = chance.choice((4, 8))
                at -= at % width
                value = chance.choice(INTERESTING) + chance.randrange(-2, 3)
                changed[at : at + width] = (value % (1 << (8 * width))).to_bytes(width, "little")
            case 4:
                del changed[at : at + chance.randrange(1, 64)]
            case _:
                changed[at:at] = changed[at : at + chance.randrange(1, 64)]
        if not changed:
            return b""
    return bytes(changed)


def readers(as_before: bool) -> list[tuple[bytes, Callable[[bytes], object]]]:
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA)
    message, schema = batch.serialize().to_pybytes(), SCHEMA.serialize().to_pybytes()
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        stream.write_batch(batch)
        stream.write_batch(batch)
    if as_before:
        return [
            (message, lambda data: pa.ipc.read_record_batch(pa.py_buffer(data), SCHEMA).to_pylist()),
            (schema, lambda data: pa.ipc.read_schema(pa.py_buffer(data))),
            (sink.getvalue(), lambda data: pa.ipc.open_stream(data).read_all().to_pylist()),
        ]
    reader = RowReader(SCHEMA, ("k",), "Op")
    return [
        (message, lambda data: list(alone(reader, read_batch(data, SCHEMA)).read()[1])),
        (schema, read_schema),
        (sink.getvalue(), read_table),
    ]


def run(seed: int, count: int, as_before: bool = False) -> Counter[str]:
    chance = random.Random(seed)
    kinds = readers(as_before)
    said: Counter[str] = Counter()
    for _ in range(count):
        whole, read = chance.choice(kinds)
        data = damaged(whole, chance)
        try:
            read(data)
        except StateflowError as error:
            said["refused" if str(error).isprintable() else "unprintable"] += 1
        except Exception:
            if not as_before:
                raise
            said["refused"] += 1
        else:
            said["read"] += 1
    return said


if __name__ == "__main__":
    said = run(int(sys.argv[1]), int(sys.argv[2]), "--as-before" in sys.argv)
    print(said)
    sys.exit("unprintable" in said)
