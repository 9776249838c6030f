"""Verification of a partition and of its standby."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.sweeping import Verifications, piece
from stateflow.errors import StateDamaged, Unavailable
from stateflow.partition.control import Verification
from stateflow.types import PartitionId

WRONG = StateDamaged("a block is damaged", remedy="put it back")


def found(digest: str, *faults: StateDamaged) -> Verification:
    return Verification(1, 7, True, 100, 5, digest, list(faults))


def test_alone_it_is_compared_with_nothing() -> None:
    made = piece(found("aa"), None)
    assert (made.counts, made.wrong) == ({"bytes_read": 100, "cells": 5, "compared": 0}, ())


def test_a_standby_that_is_the_same_is_compared() -> None:
    made = piece(found("aa"), found("aa"), "b")
    assert (made.counts["compared"], made.wrong) == (1, ())


def test_a_standby_that_differs_is_a_fault() -> None:
    made = piece(found("aa"), found("bb"), "b")
    assert made.counts["compared"] == 1
    assert made.wrong == (
        "its state differs from its standby's at b, both at sequence 7: restore it, or rebuild the standby",
    )


def test_what_is_damaged_is_said_of_whom() -> None:
    made = piece(found("", WRONG), found("bb", WRONG), "b")
    assert made.counts["compared"] == 0
    assert made.wrong == (
        "state_damaged: a block is damaged: put it back",
        "its standby at b: state_damaged: a block is damaged: put it back",
    )


def test_an_owner_that_fails_while_its_standby_reads_says_why() -> None:
    """The owner's error is reported while its standby still reads, and the standby's pages are closed."""
    closed: list[str] = []

    async def verify(name: str, partition: PartitionId, after: int = 0) -> AsyncIterator[Verification]:
        try:
            yield Verification(1, 7, False, 0, 0, "", [])
            if name == "owner":
                raise Unavailable("it went away")
            await asyncio.Event().wait()  # a long read
        finally:
            closed.append(name)

    copies = [SimpleNamespace(replica="standby", following=True)]
    context: Any = SimpleNamespace(replicas=SimpleNamespace(verify=verify), alive=lambda: {"standby": None})
    verifications = Verifications(context, SimpleNamespace(copies=lambda partition: copies))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="it went away"):
        asyncio.run(asyncio.wait_for(verifications.verify_one("owner", PartitionId("Op", 0)), 30))
    assert sorted(closed) == ["owner", "standby"]
