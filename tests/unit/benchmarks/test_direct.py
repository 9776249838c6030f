"""A rival that is not installed is distinguished from one that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import direct
from benchmarks.direct_common import COLUMNS, PLAIN, QUIX, ROWS, columns_of, reference
from benchmarks.direct_worker import CONTEST


def test_a_rival_that_is_not_installed_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(job: direct.Job) -> dict[str, Any]:
        assert job.contestant != QUIX, "what is missing is not started"
        return {"rows_per_s": 1.0, "lost": 0, "duplicated": 0, "state_equal": True}

    monkeypatch.setattr(direct, "QUIX_PYTHON", tmp_path / "none")
    monkeypatch.setattr(direct, "run_worker", worker)
    record = direct.run("T2", quick=True, seed=1, only=[PLAIN, ROWS, QUIX])
    assert record.skipped == "quix streams is not installed: make .venv/.quix"
    assert record.complete
    met = {target.name: target.met for target in record.targets}
    assert met["stateflow rows / dict loop @1,000 keys"]
    assert not met["stateflow rows / quix streams @1,000 keys"]


@pytest.mark.parametrize("contestant", [ROWS, COLUMNS])
@pytest.mark.thorough
def test_ours_gives_what_the_reference_gives(contestant: str, tmp_path: Path) -> None:
    batches = columns_of(1, 20, 100, 3)
    outcome = CONTEST[contestant](batches, 1, tmp_path / "replica", True)
    outputs, state = reference(batches, last_only=contestant == COLUMNS)
    assert sorted(outcome.outputs) == sorted(outputs)
    assert outcome.state == state
