"""Verifies partitions: the owner reads one, and its state is compared with a standby's at the same moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from reconfig.controller.context import ControllerContext
from reconfig.controller.covering import Piece
from reconfig.controller.standbys import Standbys
from stateflow.errors import StateflowError, Unavailable
from stateflow.runtime.control import Verification
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: attempts to compare with a standby, which may have passed the moment that the owner reads
ATTEMPTS = 3


class Verifications:
    def __init__(self, context: ControllerContext, standbys: Standbys) -> None:
        self._context, self._standbys = context, standbys

    async def verify_one(self, name: str, partition: PartitionId) -> Piece | None:
        """Verifies a partition at a replica. Returns what was found; None: the replica no longer owns the partition.

        What is wrong with the partition is in the result. Raises the error because of which the replica cannot verify.
        """
        standby = self._standby_of(partition)
        for attempt in range(ATTEMPTS):
            async with aclosing(self._context.replicas.verify(name, partition)) as pages:
                moment = await anext(pages, None)
                if moment is None:
                    return None
                if standby is None:
                    return piece(await _found(pages, name), None)
                async with aclosing(self._context.replicas.verify(standby, partition, moment.sequence)) as copied:
                    at = await _first(copied)
                    if at is None or at.sequence == moment.sequence or attempt == ATTEMPTS - 1:
                        together = at is not None and at.sequence == moment.sequence
                        copy = _copied(copied, standby) if together else _nothing()
                        found, other = await _both(_found(pages, name), copy)
                        return piece(found, other, standby)
        raise AssertionError("the last attempt returns")

    def _standby_of(self, partition: PartitionId) -> str | None:
        """Returns a replica with a standby that has caught up and answers; None: there is none."""
        alive = self._context.alive()
        names = [each.replica for each in self._standbys.copies(partition) if each.following and each.replica in alive]
        return names[0] if names else None


def piece(found: Verification, copy: Verification | None, standby: str = "") -> Piece:
    """Returns the result of one partition.

    Args:
        found: what its owner found.
        copy: what its standby found, at the same moment; None: it was not compared.
    """
    wrong = list(map(str, found.faults))
    counts = {"bytes_read": found.bytes_read, "cells": found.cells, "compared": 0}
    if copy is not None:
        wrong += [f"its standby at {standby}: {each}" for each in copy.faults]
        if found.digest and copy.digest:
            counts["compared"] = 1
            if found.digest != copy.digest:
                wrong.append(
                    f"its state differs from its standby's at {standby}, both at sequence {found.sequence}: "
                    f"restore it, or rebuild the standby"
                )
    return Piece(counts, tuple(wrong))


async def _first(pages: AsyncGenerator[Verification]) -> Verification | None:
    """Returns the first page of a standby; None: it has none, or cannot be asked, and is not compared."""
    try:
        return await anext(pages, None)
    except StateflowError as error:
        log.warning("standby not compared: %s", error)
        return None


async def _copied(pages: AsyncGenerator[Verification], standby: str) -> Verification | None:
    try:
        return await _found(pages, standby)
    except StateflowError as error:
        log.warning("standby at %s not compared: %s", standby, error)
        return None


async def _both(
    found: Coroutine[Any, Any, Verification], copy: Coroutine[Any, Any, Verification | None]
) -> tuple[Verification, Verification | None]:
    """Awaits both results. If one fails, the other has ended as well, as pages that a task awaits cannot be closed."""
    copying = asyncio.ensure_future(copy)
    try:
        return await found, await copying
    finally:
        copying.cancel()
        await asyncio.wait([copying])


async def _nothing() -> None:
    return None


async def _found(pages: AsyncGenerator[Verification], name: str) -> Verification:
    found = await anext(pages, None)
    if found is None or not found.done:
        raise Unavailable(f"{name} did not finish the verification", remedy="run the command again")
    return found
