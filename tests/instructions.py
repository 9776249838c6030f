"""Instructions by their names, for tests to which it does not matter what these carry."""

from __future__ import annotations

from collections.abc import Iterable


def names(instructions: Iterable[object]) -> list[str]:
    """A retry as ``Retry(Fence)``."""
    return [_name(instruction) for instruction in instructions]


def _name(instruction: object) -> str:
    retried = getattr(instruction, "instruction", None)
    return type(instruction).__name__ if retried is None else f"Retry({_name(retried)})"
