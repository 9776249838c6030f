"""A second implementation of which records the ledger must accept. It shares no code with the ledger's own rules.

An item's history is a list, which every function here walks from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("NEW", "PROCESSING", "PROCESSED", "FAILED", "RESOLVED", "SKIPPED")


@dataclass(frozen=True)
class Step:
    """A record to write.

    Attributes:
        previous: index of the previous record in the history, "elsewhere" for a record of another item, or None.
    """

    state: str
    previous: int | str | None
    app: str = "A"


def blocked_at(history: list[Step]) -> int | None:
    for place, step in enumerate(history):
        later = [each for each in history[place + 1 :] if each.previous == place]
        if step.state == "PROCESSING" and not [e for e in later if e.state in ("PROCESSED", "FAILED", "RESOLVED")]:
            return place
        if step.state == "FAILED" and not [e for e in later if e.state == "RESOLVED"]:
            return place
    return None


def allows(history: list[Step], step: Step) -> bool:
    if step.previous == "elsewhere":
        return False
    before = history[step.previous].state if isinstance(step.previous, int) else None
    if step.state == "NEW":
        return history == [] and before is None
    if history == []:
        return False
    if step.state == "SKIPPED":
        return True
    if step.state == "PROCESSING":
        told_to_skip = [each for each in history if each.state == "SKIPPED" and each.app in ("*", step.app)]
        return before in (None, "NEW") and blocked_at(history) is None and not told_to_skip
    if step.state in ("PROCESSED", "FAILED"):
        is_holder = isinstance(step.previous, int) and history[step.previous].app == step.app
        return before == "PROCESSING" and blocked_at(history) == step.previous and is_holder
    return before in ("PROCESSING", "FAILED") and blocked_at(history) == step.previous


def state(history: list[Step]) -> str:
    told = [step.state for step in history if step.state != "SKIPPED"]
    return told[-1]


def choices(length: int) -> list[Step]:
    """Returns every record that could be written after ``length`` others, allowed or not."""
    previous: list[int | str | None] = [None, "elsewhere", *range(length)]
    return [
        Step(state, each, app)
        for state in STATES
        for each in previous
        for app in (("A", "B", "*") if state == "SKIPPED" else ("A", "B"))
    ]
