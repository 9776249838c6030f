"""One key of one operator over a store that counts."""

from __future__ import annotations

from typing import Any

from stateflow.changes import Mutations
from stateflow.state import KeyedState, declarations_of
from tests.unit.state.dict_store import DictStore


class Bench:
    def __init__(self, operator: type, store: DictStore | None = None, now: int = 0, **sizes: Any) -> None:
        self.operator = operator
        self.store = store or DictStore()
        self.keyed = KeyedState("op", declarations_of(operator), self.store, **sizes)
        self.keyed.set_time(now)
        self.op: Any = operator()
        self.keyed.bind(self.op, "k")

    def commit(self) -> Mutations:
        mutations = self.keyed.collect()
        self.store.apply(mutations)
        self.keyed.mark_clean()
        self.store.asked()
        return mutations

    def at(self, now: int, event: int | None = None) -> Any:
        """Commits, and returns the operator for a batch at another time."""
        self.commit()
        self.keyed.set_time(now, event)
        return self.op

    def reopened(self, now: int = 0) -> Bench:
        self.commit()
        return Bench(self.operator, self.store, now)
