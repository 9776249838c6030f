"""docs/state-machines.md, from the tables: ``python -m tests.state_machines`` writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from reconfig.decisions import failover, migration
from stateflow.partition import lifecycle
from stateflow.transitions import Ignored, Order, Refused, Row, Table, Transition, each

PAGE = Path(__file__).parents[1] / "docs" / "state-machines.md"
TABLES = (migration.TABLE, failover.TABLE, lifecycle.TABLE)
HEAD = """\
# State machines

Written by `python -m tests.state_machines` from the tables that the machines run by:
`reconfig/decisions/migration.py`, `reconfig/decisions/failover.py` and `stateflow/partition/lifecycle.py`. [Moving
state](moving-state.md) tells the story.

For one phase and event the rows are tried from above; the first whose condition holds is taken. *Stays*: in the phase,
though other facts may change. *Ignored*: nothing changes, for the reason given. *Refused* and *impossible*: the event
raises an error and changes nothing. What is impossible raises `invalid_transition`.
"""


def page() -> str:
    commanded = [section(table, _instructions) for table in (migration.TABLE, failover.TABLE)]
    return "\n".join([HEAD, *commanded, section(lifecycle.TABLE, _answer)])


def _instructions(said: Iterable[Order[Any, Any]]) -> str:
    return ", ".join(map(str, said))


def _answer(said: lifecycle.Answer) -> str:
    return "" if said is None else str(said)


def faults(table: Table[Any, Any, Any]) -> Iterator[str]:
    """Yields the faults of a table: pairs without a row, and rows that can never be taken."""
    for phase in table.phases:
        for event in table.events:
            rows = table._rows.get((phase.name, event), ())
            if not rows or rows[-1].when is not None:
                yield f"{phase}, {event.__name__}: no row without a guard"
            if any(row.when is None for row in rows[:-1]):
                yield f"{phase}, {event.__name__}: a row is unreachable"
    for row in table.rows:
        if isinstance(row, Ignored) and not row.note:
            yield f"{', '.join(each(row.phases))}, {_names(row.events)}: ignored without a note"


def diagram(table: Table[Any, Any, Any]) -> str:
    """Returns a Mermaid state diagram: every way from a phase to another, with the events that lead there."""
    ways: dict[tuple[Any, Any], dict[str, None]] = {}
    for row in table.rows:
        if isinstance(row, Transition) and row.to is not None:
            for phase in each(row.phases):
                if phase is not row.to:
                    events = ways.setdefault((phase, row.to), {})
                    events.update(dict.fromkeys(event.__name__ for event in each(row.events)))
    lines = [f"    {start} --> {end}: {', '.join(events)}" for (start, end), events in ways.items()]
    ends = [phase for phase in table.phases if all(start is not phase for start, _ in ways)]
    begins = f"    [*] --> {next(iter(table.phases))}"
    return "\n".join(["stateDiagram-v2", begins, *lines, *(f"    {phase} --> [*]" for phase in ends)])


def section(table: Table[Any, Any, Any], show: Callable[[Any], str]) -> str:
    """Returns Markdown: the diagram, and the rows in their order.

    Args:
        show: returns an answer in words.
    """
    return "\n".join(
        [
            f"## {table.title}",
            "",
            "```mermaid",
            diagram(table),
            "```",
            "",
            "| in | event | when | then | answer | |",
            "|---|---|---|---|---|---|",
            *(_line(table, row, show) for row in table.rows),
            "",
            "Invariants:",
            "",
            *(f"- {invariant.words}" for invariant in table.invariants),
            "",
        ]
    )


def _line(table: Table[Any, Any, Any], row: Row[Any, Any], show: Callable[[Any], str]) -> str:
    phases, answer = each(row.phases), ""
    match row:
        case Transition():
            then, answer = row.to or "stays", show(row.answer)
        case Ignored():
            then, answer = "ignored", show(row.answer)
        case Refused():
            then = "refused"
        case _:
            then = "impossible"
    cells = [
        "any" if set(phases) == set(table.phases) else ", ".join(phases),
        "any" if set(each(row.events)) == set(table.events) else _names(row.events),
        row.when.words if row.when else "",
        then,
        answer,
        row.note,
    ]
    return f"| {' | '.join(cells)} |"


def _names(events: type | tuple[type, ...]) -> str:
    return ", ".join(event.__name__ for event in each(events))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
