"""Transition tables, which are state machines as data, and checks of invariants.

A machine's page, its diagram and the test of its completeness are derived from the same rows; see
docs/state-machines.md. For a phase and a type of event, the rows are tried in their order, and the first row with a
guard that holds, or with no guard, is applied. A table is complete if, for every phase and type of event, the last of
these rows has no guard.

Objects that decide (state machines, the partition registry, an assignment, the controller's knowledge) have a
``validate()`` that checks their invariants. With the setting ``STATEFLOW_DEBUG_VALIDATE`` replicas and controllers call
it by :func:`check` after each change.

A :class:`Machine` gets facts as events, returns the instructions that follow from them, and remembers its last steps
for its errors.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from stateflow.errors import REPORT_LINE, InvalidTransition, InvariantBroken, StateflowError

log = logging.getLogger(__name__)
P = TypeVar("P", bound=StrEnum)  # phases
M = TypeVar("M")  # the machine
A = TypeVar("A")  # the machine's answers
E = TypeVar("E")  # its events
I = TypeVar("I")  # instructions to its shell  # noqa: E741
T = TypeVar("T")
#: maximum number of steps that a machine remembers, for its errors
STORY_KEPT = 40


# -- Checks of invariants --------------------------------------------------------------------------------------------


class Validated(Protocol):
    def validate(self) -> None:
        """Checks the object's invariants. Raises InvariantBroken."""
        ...


def check(changed: Validated) -> None:
    """Checks the invariants of a changed object.

    Raises InvariantBroken, and logs the error as well, because the caller may swallow it.
    """
    try:
        changed.validate()
    except InvariantBroken as error:
        report(error)
        raise


def report(error: InvariantBroken) -> None:
    log.critical("%s", error)


# -- Transition tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guard(Generic[M]):
    """A condition on the machine and the event. ``words`` describe it in a sentence, after "when"."""

    words: str
    holds: Callable[[M, Any], bool]


@dataclass(frozen=True, slots=True)
class Order(Generic[M, I]):
    """A named instruction to a machine's shell, as it appears in a table.

    ``make`` creates the instruction with its data. The machine calls ``make`` after the transition's effect, when it is
    in the new phase.
    """

    name: str
    make: Callable[[M], I]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Row(Generic[P, M]):
    """A row of a table, for every combination of ``phases`` and ``events``. ``note`` explains it in one line."""

    phases: P | tuple[P, ...]
    events: type | tuple[type, ...]
    note: str = field(default="", kw_only=True)
    when: Guard[M] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Transition(Row[P, M], Generic[P, M, A]):
    """A row that changes the machine.

    Attributes:
        to: the new phase; None: the phase stays the same.
        effect: changes the machine's other fields, while the machine is still in the old phase.
    """

    to: P | None
    answer: A
    effect: Callable[[M, Any], None] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Ignored(Row[P, M], Generic[P, M, A]):
    """A row that changes nothing; ``note`` gives the reason."""

    answer: A


@dataclass(frozen=True, slots=True)
class Refused(Row[P, M]):
    """A row that raises ``error`` and changes nothing."""

    error: Callable[[M, Any], StateflowError]


@dataclass(frozen=True, slots=True)
class Impossible(Row[P, M]):
    """A row that raises the table's own error and changes nothing."""


@dataclass(frozen=True, slots=True)
class Table(Generic[P, M, A]):
    """The transition table of a machine.

    Args:
        title: title of its page.
        phases: all phases; the machine begins in the first.
        events: all types of events.
        impossible: the error for an event that cannot happen in the machine's phase.
        invariants: guards that always hold; they are called without an event.
    """

    title: str
    phases: type[P]
    events: tuple[type, ...]
    rows: tuple[Row[P, M], ...]
    impossible: Callable[[M, Any], StateflowError]
    invariants: tuple[Guard[M], ...] = ()
    #: (name of a phase, type of event) → rows. Names are the keys, because hashing a member of an enumeration runs
    #: Python code, and each batch needs two lookups
    _rows: dict[tuple[str, type], tuple[Row[P, M], ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found: dict[tuple[str, type], tuple[Row[P, M], ...]] = {}
        for row in self.rows:
            for phase in each(row.phases):
                for event in each(row.events):
                    found[phase.name, event] = (*found.get((phase.name, event), ()), row)
        object.__setattr__(self, "_rows", found)

    def decide(self, machine: M, phase: P, event: object) -> Transition[P, M, A] | Ignored[P, M, A]:
        """Returns the row for this event in the present phase. Raises the row's error if the event is refused or
        impossible."""
        for row in self._rows[phase._name_, type(event)]:
            if row.when is None or row.when.holds(machine, event):
                if isinstance(row, (Transition, Ignored)):
                    return row
                if isinstance(row, Refused):
                    raise row.error(machine, event)
                break
        raise self.impossible(machine, event)

    def handle(self, machine: M, phase: P, event: object) -> tuple[P, A]:
        """Applies the effect of the row for this event. Returns (phase afterwards, answer).

        Raises the errors of ``decide``; then nothing is changed.
        """
        row = self.decide(machine, phase, event)
        if isinstance(row, Ignored):
            return phase, row.answer
        if row.effect is not None:
            row.effect(machine, event)
        return phase if row.to is None else row.to, row.answer

    def broken(self, machine: M) -> Iterator[str]:
        """Yields a description of each invariant that does not hold."""
        return (invariant.words for invariant in self.invariants if not invariant.holds(machine, None))


def each(one_or_more: T | tuple[T, ...]) -> Iterable[T]:
    return one_or_more if isinstance(one_or_more, tuple) else (one_or_more,)


# -- Machines --------------------------------------------------------------------------------------------------------


class Machine(Generic[P, E, I]):
    """The base of a state machine that is commanded by its table. Only :meth:`handle` changes the machine.

    Each machine is a dataclass with ``phase`` and ``story`` among its fields.

    Attributes:
        story: the machine's last steps, in words.
        untold: events that the story leaves out, because they are frequent.
    """

    __slots__ = ("phase", "story")
    phase: P
    story: deque[str]
    table: ClassVar[Table[Any, Any, Any]]
    untold: ClassVar[tuple[type, ...]] = ()

    def handle(self, event: E) -> list[I]:
        """Handles an event. Returns the instructions that follow from it. Raises InvalidTransition, with the story so
        far, for an event that cannot happen in this phase."""
        before = self.phase
        self.phase, orders = self.table.handle(self, before, event)
        if not isinstance(event, self.untold):
            self.story.append(f"{type(event).__name__}: {before} → {self.phase} [{', '.join(map(str, orders))}]")
        return [order.make(self) for order in orders]

    def validate(self) -> None:
        """Checks the invariants. Raises InvariantBroken, with the story so far, if one is violated by a bug."""
        for words in self.table.broken(self):
            raise InvariantBroken(
                f"an invariant is broken in {self.phase}: {words}",
                remedy=REPORT_LINE,
                **self._where(),
                story=" | ".join(self.story),
            )

    def fault(self, what: str) -> InvalidTransition:
        return InvalidTransition(what, remedy=REPORT_LINE, **self._where(), story=" | ".join(self.story))

    def impossible(self, event: E) -> InvalidTransition:
        """Returns the error for an event that cannot happen in the present phase."""
        return self.fault(f"{event} cannot happen in {self.phase}")

    @staticmethod
    def empty_story() -> deque[str]:
        return deque(maxlen=STORY_KEPT)

    def _where(self) -> dict[str, Any]:
        """Returns facts that locate the machine's errors."""
        return {}
