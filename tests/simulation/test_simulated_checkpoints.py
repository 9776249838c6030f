"""Restores, uploads and collections at the same time lose no checkpoint, and the oracle finds planted mistakes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from stateflow.checkpoint import CheckpointStore, collecting, store
from stateflow.checkpoint.store import Adoption
from tests.simulation.sim.checkpoints import simulate
from tests.simulation.sim.oracle import Violation
from tests.sizes import sized

SEEDS = sized(240)
ENOUGH = 600


@pytest.mark.timeout(900)
def test_no_seed_loses_a_checkpoint() -> None:
    worlds = [simulate(seed) for seed in range(SEEDS)]
    assert sum(world.restored for world in worlds) > SEEDS
    assert sum(world.collected for world in worlds) > SEEDS
    assert sum(world.killed for world in worlds) > SEEDS / 20


def test_a_seed_is_the_same_run_every_time() -> None:
    one, two = (simulate(7).memory.now_us for _ in range(2))
    assert one == two


def no_holds(patch: pytest.MonkeyPatch) -> None:
    """Collections ignore which checkpoints and blobs are in use."""
    marks = collecting.Catalog.marks
    patch.setattr(
        collecting.Catalog, "marks", lambda self, folder: [] if folder == collecting.INTENTS else marks(self, folder)
    )
    patch.setattr(collecting, "is_dead", lambda *_: False)


def adopted_as_it_was(patch: pytest.MonkeyPatch) -> None:
    """An adopted checkpoint is published under the new epoch without a check that its blobs still exist."""

    def adopt(self: CheckpointStore, manifest: Any, directory: Any) -> Adoption:
        self.check(first_use=True)
        return Adoption(self, manifest, self._lease(manifest))

    patch.setattr(CheckpointStore, "adopt", adopt)
    patch.setattr(CheckpointStore, "leased", lambda *_: nullcontext())


def not_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adoption, "publish", lambda *_: None)


def condemned_blobs_are_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "CONDEMNED", "nothing")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "broken",
    [no_holds, adopted_as_it_was, not_published, pytest.param(condemned_blobs_are_used, marks=pytest.mark.thorough)],
)
def test_a_broken_variant_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(ENOUGH):
        try:
            simulate(seed)
        except Violation as found:
            print(f"seed {seed}: {found}")
            return
    raise AssertionError(f"not found in {ENOUGH} seeds")
