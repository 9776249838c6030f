"""Explores all states of a model, breadth first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stateflow.errors import StateflowError
from tests.simulation.one_move import Broken, Model, World


@dataclass(frozen=True, slots=True)
class Explored:
    states: int
    transitions: int
    ends: int
    outcomes: dict[str, int]
    leftovers: dict[str, int]


#: said where an exploration has another number of states than the page gives
SHRANK = "with fewer states less is checked than before; if that is right, correct docs/correctness.md"


def documented(name: str) -> int:
    """Returns the number of states that docs/correctness.md gives for an exploration."""
    page = Path(__file__).parents[2] / "docs" / "correctness.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| {name} |"))
    return int(row.split("|")[2].replace(",", ""))


class Found(AssertionError):
    """Raised for a state that breaks a rule; ``trace`` holds the shortest path to it, one step an entry."""

    def __init__(self, why: str, trace: list[str]) -> None:
        super().__init__(why + "\n  " + "\n  ".join(trace))
        self.why = why
        self.trace = trace


def explore(model: Model, states_max: int = 2_000_000, on_end: Callable[[World], None] = lambda _: None) -> Explored:
    """Explores all states that the model can reach.

    Args:
        states_max: number of states at which the exploration fails, as the model is too large.
        on_end: called with every state in which nothing more has to happen.

    Raises:
        Found: a state breaks a rule, or no end can be reached from it.
    """
    first = model.start()
    number: dict[World, int] = {first: 0}
    came: list[tuple[int, str]] = [(-1, "start")]
    into: list[list[int]] = [[]]  # predecessors, by transitions that must happen
    ends: list[int] = []
    outcomes: dict[str, int] = {}
    leftovers: dict[str, int] = {}
    queue = deque([first])
    transitions = 0

    def trace(at: int, last: str = "") -> list[str]:
        steps = [last] if last else []
        while at > 0:
            at, what = came[at]
            steps.append(what)
        return steps[::-1]

    while queue:
        world = queue.popleft()
        here = number[world]
        ended = True
        steps = model.steps(world)
        while True:
            try:
                what, after, must = next(steps)
            except StopIteration:
                break
            except (Broken, StateflowError) as error:
                raise Found(str(error), trace(here)) from error
            transitions += 1
            if after == world:
                continue
            ended = ended and not must
            there = number.get(after)
            if there is None:
                there = number[after] = len(came)
                came.append((here, what))
                into.append([])
                queue.append(after)
                assert there < states_max, "the model is too large"
                try:
                    model.check(after)
                except Broken as error:
                    raise Found(str(error), trace(there)) from error
            if must:
                into[there].append(here)
        if ended:
            ends.append(here)
            try:
                model.check_end(world)
            except Broken as error:
                raise Found(str(error), trace(here)) from error
            on_end(world)
            outcomes[world.outcome] = outcomes.get(world.outcome, 0) + 1
            assert world.target is not None
            if world.target[0].value == "WARMING":
                leftovers["target still warming"] = leftovers.get("target still warming", 0) + 1
            if world.log != "none":
                leftovers["source still logging"] = leftovers.get("source still logging", 0) + 1
    # an end must be reachable from every state, by transitions that must happen
    reached = bytearray(len(came))
    stack = list(ends)
    while stack:
        at = stack.pop()
        if not reached[at]:
            reached[at] = 1
            stack.extend(before for before in into[at] if not reached[before])
    stuck = reached.find(0)
    if stuck >= 0:
        raise Found("there is no way on from here", trace(stuck))
    return Explored(len(came), transitions, len(ends), outcomes, leftovers)
