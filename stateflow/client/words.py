"""Parses user input of the command line and the live page, and makes the calls that it asks for."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from typing import Any

import pyarrow as pa

from stateflow.client.cluster import Cluster
from stateflow.client.commands import Migration
from stateflow.errors import EncodeError, InvalidArgument, UnknownPartition, UnsupportedKeyType
from stateflow.moves import MoveOptions
from stateflow.operator.arrow import read_table
from stateflow.partition.entries import joined
from stateflow.reports import Placement
from stateflow.types import shown

#: most columns of a key, and most keys that a list of them may stand for
KEY_COLUMNS_MAX, KEYS_MAX = 16, 200
#: kinds of batch that the controller runs, as the ledger's board names them: ``sweep/…``
CONTROLLERS = ("reconfiguration", "roll", "sweep", "restores")


def partition_numbers(text: str, count: int) -> list[int]:
    """Parses partition numbers, ``3, 5-9`` or ``all``, of ``count``: each once, sorted.

    Raises InvalidArgument, UnknownPartition.
    """
    found: set[int] = set()
    for word in re.split(r"\s*,\s*|\s+", text.strip()):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if word == "all":
            found.update(range(count))
        elif first > last:
            raise InvalidArgument(f"{shown(word)} is not a partition", remedy="write numbers, ranges like 5-9, or all")
        elif last >= count:
            raise UnknownPartition(f"there is no partition {last}", remedy=f"use 0 to {count - 1}")
        else:
            found.update(range(first, last + 1))
    return sorted(found)


def keys_meant(text: str) -> Iterator[Any]:
    """Yields the keys that a text may stand for, each once and with its type.

    The keys of an operator are of one type, which is not declared, so a text may stand for several keys. They are: the
    text itself; its value as JSON, where a list is a key of several columns, and a whole number is also a double; a
    date; a timestamp with its zone; bytes, as ``0xff``, as Python shows them, or as UTF-8.
    """
    found: list[tuple[Any, ...]] = [(each,) for each in _meant(text)]
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, list) and 1 <= len(value) <= KEY_COLUMNS_MAX:
            columns = [list(_meant(each) if isinstance(each, str) else _numbers(each)) for each in value]
            found += itertools.islice(itertools.product(*columns), KEYS_MAX)
    said: set[str] = set()
    for key in found:
        if repr(key) not in said:  # 1, 1.0 and True are equal
            said.add(repr(key))
            yield key if len(key) > 1 else key[0]


def _meant(text: str) -> Iterator[Any]:
    """Yields the values that a single text may stand for."""
    yield text
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        yield from [value] if isinstance(value, str) else _numbers(value)
    if text in ("True", "False"):  # as a scan shows them
        yield text == "True"
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        with contextlib.suppress(ValueError):
            yield date.fromisoformat(text)
    elif re.match(r"\d{4}-\d\d-\d\d[T ]\d", text):
        with contextlib.suppress(ValueError):
            if (moment := datetime.fromisoformat(text)).tzinfo is not None:
                yield moment
    if re.fullmatch(r"0[xX](?:[0-9a-fA-F]{2})*", text):
        yield bytes.fromhex(text[2:])
    if re.match(r"b['\"]", text):
        with contextlib.suppress(ValueError, SyntaxError):
            yield ast.literal_eval(text)
    with contextlib.suppress(UnicodeEncodeError):
        yield text.encode()


def _numbers(value: Any) -> Iterator[Any]:
    """Yields the values that a JSON number or truth value may stand for; no other JSON value is a column of a key."""
    if isinstance(value, bool | int | float):
        yield value
    if isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            yield float(value)


def entries_under(text: str, scan: Callable[[Any], Iterable[bytes]]) -> pa.Table | None:
    """Returns the entries of the key that a text stands for. None: there are none.

    Args:
        scan: yields the pages of a key.
    """
    for key in keys_meant(text):
        try:
            found = joined([read_table(page) for page in scan(key)])
        except (UnsupportedKeyType, EncodeError):
            continue
        if found.num_rows:
            return found
    return None


def by_share(policies: Sequence[str]) -> bool:
    """Tells whether policies mean a rebalance to shares by weight, which is another command than a placement."""
    return list(policies) in ([], ["ring"])


def would_redistribute(cluster: Cluster, policies: Sequence[str], operator: str) -> Placement:
    """Returns what :func:`redistribute` would move; moves nothing."""
    return cluster.would_rebalance(operator) if by_share(policies) else cluster.propose(*policies, operator=operator)


def redistribute(cluster: Cluster, policies: Sequence[str], operator: str, options: MoveOptions) -> list[Migration]:
    """Moves partitions to where these policies want them; those of all operators where ``operator`` is empty."""
    if by_share(policies):
        return cluster.rebalance(operator, options)
    return cluster.place(*policies, operator=operator, options=options)


def runner_of(batch: str) -> tuple[str, str]:
    """Splits a batch's name into one of CONTROLLERS and its id there.

    Returns ``""`` and the name for a batch that another program runs by the ledger's board.
    """
    kind, _, id_ = batch.partition("/")
    return (kind, id_) if id_ and kind in CONTROLLERS else ("", batch)


def call_off(cluster: Cluster, kind: str, id_: str) -> str:
    """Cancels a batch of the controller, named as by :func:`runner_of`. Returns what becomes of it."""
    match kind:
        case "reconfiguration":
            cluster.cancel(id_)
            return "moves that are not yet fenced are rolled back"
        case "restores":
            cluster.cancel_restore(id_)
            return "partitions that have not begun stay as they are"
        case _:
            return cluster.sweep(id_).cancel().state
