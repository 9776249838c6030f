"""Run the whole matrix, or a part of it, and write the table."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.record import commit
from tests.crash_matrix.matrix import ACKNOWLEDGE, AWAY_S, OUTAGE_S, Outcome, matrix, run_cell
from tests.crash_matrix.steps import FAULTS, cells, sample, steps

PAGE = Path(__file__).parents[2] / "docs" / "crash-matrix.md"
HEAD = """# Crash matrix

Every step of a move × every participant × {{crash, pause, partition}}, and × an outage of the ledger, each run against
real processes: a controller and two replicas behind loopback TCP proxies, while a client streams rows. The proxy sees
the step on the wire, stops it there, and the fault strikes: SIGKILL and a restart, SIGSTOP and SIGCONT after
{away_s:g} s, every connection of the participant standing still for {away_s:g} s and then gone, or the ledger locked by
another process for {outage_s:g} s, which is longer than the hold of a controller. A cell is good when
the move ends, each partition is owned by exactly one replica and by the one the ledger names, every batch gave the
outputs of an undisturbed run once, and the state equals that run's.

Steps come from the code: the instructions of `reconfig.decisions.migration` and the RPCs that carry them out
(`tests/crash_matrix/steps.py`). Replicas acknowledged batches by `{acknowledge}`{spare}. Made by
`python -m tests.crash_matrix --acknowledge {acknowledge}` (commit {commit}): {count} cells, {bad} bad.

✓ completed: the target owns. ↺ rolled back: the source does. In brackets the longest a batch took, in seconds, on a
shared 2-core machine; the client holds the rows meanwhile, none is refused.

"""


def page(outcomes: list[Outcome], acknowledge: str, revision: str) -> str:
    """Makes the page of these outcomes. ``acknowledge``, ``revision``: the mode and the commit that gave them."""
    found = {(o.cell.step, o.cell.participant, o.cell.fault): o for o in outcomes}
    bad = [o for o in outcomes if o.problem]
    lines = [
        "| step | " + " | ".join(f"{participant} {fault}" for participant, fault in FAULTS) + " |",
        "|---" * (len(FAULTS) + 1) + "|",
    ]
    for step in steps():
        row = [_cell(found.get((step, *column))) for column in FAULTS]
        lines.append(f"| {step} | " + " | ".join(row) + " |")
    lines += ["", *(f"- **{o.cell}**: {o.problem}" for o in bad)]
    head = HEAD.format(
        away_s=AWAY_S,
        outage_s=OUTAGE_S,
        acknowledge=acknowledge,
        spare=", and a third one had a standby of each partition" if acknowledge == "standby" else "",
        commit=revision,
        count=len(outcomes),
        bad=len(bad),
    )
    return head + "\n".join(lines).rstrip() + "\n"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return " "
    if outcome.problem:
        return "✗"
    return f"{'✓' if outcome.move == 'COMPLETED' else '↺'} ({outcome.longest_s:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_matrix", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="only what the test suite runs; writes nothing")
    parser.add_argument(
        "--acknowledge", choices=ACKNOWLEDGE, default="wal", help="how replicas acknowledge batches; default: wal"
    )
    parser.add_argument("--only", default="", help="cells whose name contains this; writes nothing")
    arguments = parser.parse_args()
    chosen = [cell for cell in (sample() if arguments.sample else cells()) if arguments.only in str(cell)]
    outcomes: list[Outcome] = []
    revision = commit()
    started = time.monotonic()
    with matrix(arguments.acknowledge) as local:
        for number, cell in enumerate(chosen):
            outcome = run_cell(local, cell, number)
            outcomes.append(outcome)
            elapsed = time.monotonic() - started
            said = outcome.problem or f"{outcome.move} {outcome.longest_s:.1f} s"
            print(f"{elapsed:6.0f} s  {number + 1}/{len(chosen)}  {cell}: {said}", flush=True)
    bad = [outcome for outcome in outcomes if outcome.problem]
    if not arguments.sample and not arguments.only:
        PAGE.write_text(page(outcomes, arguments.acknowledge, revision))
    print(f"{len(outcomes)} cells, {len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
