"""Output of `stateflow checkpoint` for several operators."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.checkpoint import CheckpointStore, Codec
from stateflow.cli import checkpoint
from stateflow.cli.app import app
from stateflow.client import RestoredPartition
from stateflow.errors import MoveConflict
from stateflow.types import PartitionId, shown
from tests.contract.backends import manifest_of, small


def test_an_operator_that_is_refused_keeps_none_behind_it_from_being_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cluster:
        def __init__(self, _: str) -> None: ...
        def status(self) -> Any:
            return SimpleNamespace(operators=[SimpleNamespace(name=name) for name in ("A", "B", "C")])

        def restore(self, name: str, *_: Any, **__: Any) -> list[RestoredPartition]:
            if name == "B":
                raise MoveConflict("it moves", remedy="wait")
            return [RestoredPartition(0, "r", 2, 7, {"s": 3}, 10)]

    monkeypatch.setattr(checkpoint, "Cluster", Cluster)
    found = CliRunner().invoke(checkpoint.checkpoint_commands, ["restore", "all"])
    assert found.exit_code == 1
    assert [line.split()[0] for line in found.stdout.splitlines() if "restored" in line] == ["A", "C", "B"]
    assert "B was not restored: move_conflict: it moves: wait" in found.stdout
    told = json.loads(CliRunner().invoke(checkpoint.checkpoint_commands, ["restore", "all", "--json"]).stdout)
    assert [each["operator"] for each in told["partitions"]] == ["A", "C"]
    assert [(each["operator"], each["code"]) for each in told["refused"]] == [("B", "move_conflict")]


def test_a_restore_says_what_sources_do_now(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Cluster:
        def __init__(self, _: str) -> None: ...
        def restore(self, *_: Any, stop_sources: bool, **__: Any) -> list[RestoredPartition]:
            asked.append(stop_sources)
            positions = {"query:q": 3, "batch:b": 0, "a meter": 7, "stateflow:initial": 0}
            return [RestoredPartition(n, "r", 2, 7, {**positions, "a meter": 7 + n}, 10) for n in (0, 1)]

    monkeypatch.setattr(checkpoint, "Cluster", Cluster)
    monkeypatch.setattr(checkpoint.console, "width", 300)
    said = CliRunner().invoke(checkpoint.checkpoint_commands, ["restore", "A"]).stdout.splitlines()
    sources = [line.removeprefix("source ") for line in said if line.startswith("source ")]
    assert [line.split(":")[0] for line in sources] == ["a meter continues with batch 8", "batch", "query"]
    assert sources[1].endswith("a run under way is refused; to apply its frame again, use another source=")
    assert sources[2].endswith(
        "batch 4: refused (position_gap) until `stateflow spark rewind CHECKPOINT_LOCATION --to-batch 4`"
    )
    assert said[-1].startswith("running stream clients")
    assert "--stop-sources" in said[-1]
    stopped = (
        CliRunner().invoke(checkpoint.checkpoint_commands, ["restore", "A", "--stop-sources"]).stdout.splitlines()[-1]
    )
    assert "are refused (source_taken)" in stopped
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("checkpoint", "list", "--checkpoints", "/nonexistent/dir"), "checkpoint_store_missing"),
        (("checkpoint", "list", "--checkpoints", "nosuch://x"), "invalid_argument"),
        (("checkpoint", "gc", "--checkpoints", ".", "--keep", "0"), "invalid_argument"),
        (("checkpoint", "gc", "--checkpoints", ".", "--keep", "-3"), "invalid_argument"),
        (("checkpoint", "gc", "--checkpoints", ".", "--keep-for", "-1d"), "invalid_argument"),
        (("savepoint", "export", "x", "--checkpoints", ".", "--to", "."), "checkpoint_store_missing"),
        (("savepoint", "delete", "none", "--checkpoints", "."), "checkpoint_store_missing"),
        (("checkpoint", "verify", "--checkpoints", "."), "checkpoint_store_missing"),
        (("checkpoint", "gc", "--checkpoints", "."), "checkpoint_store_missing"),
        (("state", "export", "Op", "n", "--out", "x.csv"), "invalid_argument"),
        (("state", "scan", "Op", "n", "--savepoint", "x"), "invalid_argument"),
        (("state", "scan", "Op", "n", "--from", "."), "checkpoint_store_missing"),
        (("spark", "rewind", ".", "--to-batch", "3"), "invalid_argument"),
        (("savepoint", "create", "."), "invalid_argument"),
        (("savepoint", "export", "..", "--checkpoints", ".", "--to", "new"), "invalid_argument"),
        (("checkpoint", "verify", "--checkpoints", ".", "--savepoint", ""), "invalid_argument"),
        (("checkpoint", "verify", "--checkpoints", ".", "--savepoint", "x/Op"), "invalid_argument"),
        (("checkpoint", "restore", "all", "--savepoint", ""), "invalid_argument"),
        (("checkpoint", "restore", "Op", "--savepoint", "."), "invalid_argument"),
        (("state", "scan", "Op", "n", "--from", ".", "--savepoint", "."), "invalid_argument"),
        (("state", "get", "Op", "n", "k", "--from", ".", "--savepoint", ""), "invalid_argument"),
        (("state", "export", "Op", "n", "--out", "x.arrow", "--from", ".", "--savepoint", ""), "invalid_argument"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"{code}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", ".", "kept/Op"])
def test_only_the_named_savepoint_is_deleted(name: str, tmp_path: Path) -> None:
    store, directory = CheckpointStore(str(tmp_path / "store"), codec=Codec()), small(tmp_path, a="x")
    for partition, kept in enumerate(("kept", "too")):
        store.save(manifest_of(directory, partition=PartitionId("Op", partition)), directory, savepoint=kept)
    result = CliRunner().invoke(app, ["savepoint", "delete", name, "--checkpoints", store.url])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"invalid_argument: {shown(name)} is not a valid savepoint name: ")
    assert sorted(store.savepoints()) == ["kept", "too"]
