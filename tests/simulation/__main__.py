"""Runs larger explorations than the test suite does: ``python -m tests.simulation``."""

from __future__ import annotations

import sys
import time

from tests.simulation.explore import Explored, Found, explore
from tests.simulation.one_move import Model, Rules
from tests.simulation.two_moves import explore_two

ONE_MOVE = {
    "one move, no fault": Rules(faults_together=0, commits=2),
    "one move, one fault, two batches": Rules(faults_together=1, commits=2),
    "one move, two faults, two batches": Rules(faults_together=2, commits=2),
    "one move, two faults, requests outlive processes": Rules(faults_together=2, commits=1, orphans_survive=True),
    "one move, three faults, the same one twice": Rules(faults_together=3, commits=0, faults=(2,) * 7),
    "one move, three faults": Rules(faults_together=3, commits=1),
}
FIRST = Rules(faults_together=1, commits=0)
TWO_MOVES = {
    "two moves, three replicas, two late requests": (Rules(faults_together=0, commits=1), 2),
    "two moves, three replicas, a late request, a fault": (Rules(faults_together=1, commits=1), 1),
}


def main() -> int:
    states = 0
    try:
        for name, rules in ONE_MOVE.items():
            states += _say(name, time.perf_counter(), explore(Model(rules)))
        for name, (rules, stale_max) in TWO_MOVES.items():
            states += _say(name, time.perf_counter(), explore_two(FIRST, rules, stale_max))
    except Found as error:
        print(error)
        return 1
    print(f"{states:,} distinct states, no violation")
    return 0


def _say(name: str, started: float, explored: Explored) -> int:
    took = time.perf_counter() - started
    print(f"{name}: {explored.states:,} states, {explored.transitions:,} transitions, ", end="")
    print(f"{explored.ends:,} ends {explored.outcomes}, {took:.0f} s", flush=True)
    return explored.states


if __name__ == "__main__":
    sys.exit(main())
