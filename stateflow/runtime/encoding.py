"""Encoding output rows of several partitions at once: for few rows, making an array costs more than filling it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from stateflow.runtime.rows import OutputWriter


class Outputs(NamedTuple):
    """Output ``rows`` of one partition, as its ``writer`` has settled them."""

    writer: OutputWriter
    rows: list[Any]


def encode(several: Sequence[Outputs]) -> list[bytes | Exception]:
    """Returns a record batch message for each item, ``b""`` for no rows, or the error of an item whose rows are wrong;
    the other items are encoded nevertheless."""
    encoded: list[bytes | Exception] = []
    for _, alike in groupby(several, key=lambda outputs: outputs.writer.schema):
        encoded += _encode(list(alike))
    return encoded


def _encode(alike: list[Outputs]) -> Sequence[bytes | Exception]:
    if len(alike) > 1:
        try:
            return alike[0].writer.write_each([outputs.rows for outputs in alike])
        except Exception:  # noqa: BLE001, S110 - some rows are wrong, or all of them are too many for one message
            pass
    return [_alone(outputs) for outputs in alike]


def _alone(outputs: Outputs) -> bytes | Exception:
    try:
        return outputs.writer.write_each([outputs.rows])[0]
    except Exception as error:  # noqa: BLE001 - it is the result of this batch alone
        return error
