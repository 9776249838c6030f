"""Output rows of several partitions, encoded at once: an array costs more to make than what is in it, for few rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from stateflow.runtime.rows import OutputWriter


class Outputs(NamedTuple):
    """One partition's ``rows``, as its ``writer`` has settled them."""

    writer: OutputWriter
    rows: list[Any]


def encode(several: Sequence[Outputs]) -> list[bytes | Exception]:
    """A record batch message of each, ``b""`` for no rows; or what is wrong with one, which is no other's fault."""
    encoded: list[bytes | Exception] = []
    for _, alike in groupby(several, key=lambda outputs: outputs.writer.schema):
        encoded += _encode(list(alike))
    return encoded


def _encode(alike: list[Outputs]) -> Sequence[bytes | Exception]:
    if len(alike) > 1:
        try:
            return alike[0].writer.write_each([outputs.rows for outputs in alike])
        except Exception:  # noqa: BLE001, S110 - somebody's rows are wrong, or all of them are too many for one
            pass
    return [_alone(outputs) for outputs in alike]


def _alone(outputs: Outputs) -> bytes | Exception:
    try:
        return outputs.writer.write_each([outputs.rows])[0]
    except Exception as error:  # noqa: BLE001 - its batch's
        return error
