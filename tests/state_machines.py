"""docs/state-machines.md, from the tables: ``python -m tests.state_machines`` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reconfig.decisions import failover, migration
from stateflow.partition import lifecycle
from stateflow.transitions import Order

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
    commanded = [table.page(_instructions) for table in (migration.TABLE, failover.TABLE)]
    return "\n".join([HEAD, *commanded, lifecycle.TABLE.page(_answer)])


def _instructions(said: Iterable[Order[Any, Any]]) -> str:
    return ", ".join(map(str, said))


def _answer(said: lifecycle.Answer) -> str:
    return "" if said is None else str(said)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
