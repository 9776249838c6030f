"""Transition tables cover every event in every phase, and their page in the docs is generated from them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

import pytest

from stateflow.errors import InvalidTransition, InvariantBroken, MoveConflict
from stateflow.transitions import (
    STORY_KEPT,
    Guard,
    Ignored,
    Impossible,
    Machine,
    Order,
    Refused,
    Table,
    Transition,
    each,
)
from tests.state_machines import PAGE, TABLES, diagram, faults, page, section


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_something_is_said_of_every_event_in_every_phase(table: Table[Any, Any, Any]) -> None:
    assert list(faults(table)) == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_a_row_that_is_taken_away_is_missed(table: Table[Any, Any, Any]) -> None:
    for row in table.rows:
        if row.when is None:
            left = replace(table, rows=tuple(other for other in table.rows if other is not row))
            assert len(list(faults(left))) == len(list(each(row.phases))) * len(list(each(row.events)))


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.state_machines"


class Phase(StrEnum):
    SHUT = "SHUT"
    OPEN = "OPEN"
    GONE = "GONE"


class Push:
    pass


class Knock:
    pass


class Door:
    locked = False
    pushes = 0


def _push(door: Door, _: Push) -> None:
    door.pushes += 1


LOCKED: Guard[Door] = Guard("it is locked", lambda door, _: door.locked)
DOOR: Table[Phase, Door, str] = Table(
    "A door",
    Phase,
    (Push, Knock),
    (
        Refused(Phase.SHUT, Push, lambda *_: MoveConflict("locked"), when=LOCKED),
        Transition(Phase.SHUT, Push, Phase.OPEN, "creak", effect=_push, note="mind the step"),
        Transition(Phase.OPEN, Push, Phase.GONE, "crash"),
        Ignored((Phase.SHUT, Phase.OPEN), Knock, "", note="nobody is in"),
        Impossible(Phase.GONE, (Push, Knock)),
    ),
    lambda *_: InvalidTransition("there is no door"),
    (Guard("it was pushed three times at most", lambda door, _: door.pushes < 4),),
)


def test_the_first_row_that_holds_is_taken() -> None:
    door = Door()
    assert DOOR.handle(door, Phase.SHUT, Push()) == (Phase.OPEN, "creak")
    assert DOOR.handle(door, Phase.SHUT, Knock()) == (Phase.SHUT, "")
    door.locked = True
    with pytest.raises(MoveConflict):
        DOOR.handle(door, Phase.SHUT, Push())
    with pytest.raises(InvalidTransition, match="no door"):
        DOOR.handle(door, Phase.GONE, Knock())
    assert door.pushes == 1


def test_what_is_wrong_with_a_table_is_named() -> None:
    never: Transition[Phase, Door, str] = Transition(Phase.OPEN, Push, None, "")
    silent: Ignored[Phase, Door, str] = Ignored(Phase.GONE, Knock, "")
    assert list(faults(replace(DOOR, rows=(*DOOR.rows[2:], never, silent)))) == [
        "SHUT, Push: no row without a guard",
        "OPEN, Push: a row is unreachable",
        "GONE, Knock: a row is unreachable",
        "GONE, Knock: ignored without a note",
    ]


def test_diagram_and_page() -> None:
    assert diagram(DOOR).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> SHUT",
        "    SHUT --> OPEN: Push",
        "    OPEN --> GONE: Push",
        "    GONE --> [*]",
    ]
    lines = section(DOOR, str).splitlines()
    assert lines[0] == "## A door"
    assert "| SHUT | Push | it is locked | refused |  |  |" in lines
    assert "| SHUT | Push |  | OPEN | creak | mind the step |" in lines
    assert "| SHUT, OPEN | Knock |  | ignored |  | nobody is in |" in lines
    assert "| GONE | any |  | impossible |  |  |" in lines
    assert lines[-1] == "- it was pushed three times at most"


def test_what_does_not_hold_is_named() -> None:
    door = Door()
    assert list(DOOR.broken(door)) == []
    door.pushes = 4
    assert list(DOOR.broken(door)) == ["it was pushed three times at most"]


RING: Order[Bell, str] = Order("Ring", lambda bell: f"ring from {bell.phase}")
BELL: Table[Phase, Bell, Any] = Table(
    "A bell",
    Phase,
    (Push, Knock),
    (
        Transition(Phase.SHUT, Push, Phase.OPEN, (RING,)),
        Transition(Phase.OPEN, Push, None, ()),
        Ignored((Phase.SHUT, Phase.OPEN), Knock, (), note="nobody hears it"),
        Impossible(Phase.GONE, (Push, Knock)),
    ),
    Machine.impossible,
    (Guard("a bell is not gone", lambda bell, _: bell.phase is not Phase.GONE),),
)


@dataclass(slots=True)
class Bell(Machine[Phase, Push | Knock, str]):
    phase: Phase = Phase.SHUT
    story: deque[str] = field(default_factory=Machine.empty_story)
    table: ClassVar[Table[Phase, Bell, Any]] = BELL
    untold: ClassVar[tuple[type, ...]] = (Knock,)

    def _where(self) -> dict[str, Any]:
        return {"floor": 3}


def test_a_machine_tells_its_last_steps_in_its_errors() -> None:
    bell = Bell()
    assert bell.handle(Push()) == ["ring from OPEN"], "in the new phase"
    assert bell.handle(Knock()) == []
    told = "Push: SHUT → OPEN [Ring]"
    assert list(bell.story) == [told]
    bell.validate()
    bell.phase = Phase.GONE
    with pytest.raises(InvariantBroken, match="an invariant is broken in GONE: a bell is not gone") as broken:
        bell.validate()
    with pytest.raises(InvalidTransition, match="cannot happen in GONE") as caught:
        bell.handle(Push())
    assert broken.value.where == caught.value.where == {"floor": 3, "story": told}


def test_a_machine_remembers_a_bounded_number_of_steps() -> None:
    bell = Bell()
    for _ in range(STORY_KEPT + 1):
        bell.handle(Push())
    assert list(bell.story) == ["Push: OPEN → OPEN []"] * STORY_KEPT
