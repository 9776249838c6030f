"""A source that seals what it did not send: the target detects that and refuses, and a command resolves the move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument, MoveConflict
from stateflow.reports import Reconfiguration
from stateflow.testing import LocalCluster
from tests.integration.lying import LIES, Lying
from tests.integration.support import Model, check_owners, command, eventually, outputs, rows_of, wait_alive

pytestmark = pytest.mark.processes


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv(LIES, str(tmp_path / "lies"))
    # without periodic checkpoints: the first of them may come at any time, and would be restored
    sites = {"cloud": 1, "edge": 1}
    with LocalCluster(
        Lying, sites=sites, partitions=2, data_dir=tmp_path / "c", deploy_to=("cloud",), checkpoint_interval_s=0
    ) as local:
        yield local


def stuck(local: LocalCluster, tmp_path: Path, model: Model) -> str:
    """Begins a move that gets stuck behind its fence, and returns the id of its reconfiguration."""
    stream = local.stream("Lying", source="s")
    for batch in range(3):
        assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
    (tmp_path / "lies").touch()
    id_ = local.migrate("Lying", [0, 1], "edge").report.id

    def noted() -> bool:
        moves = local.cluster.reconfiguration(id_).moves
        return all("the copy differs from what the source sealed" in move.note for move in moves)

    eventually(noted, "both moves cannot be proved")
    local.cluster.cancel(id_)
    assert local.cluster.reconfiguration(id_).state == "RUNNING", "only the source's word rolls a fenced move back"
    return id_


def test_the_source_serves_what_it_sealed(local: LocalCluster, tmp_path: Path) -> None:
    """The source serves again what it sealed.

    Earlier, the move stood fenced for ever, its partitions unserved, and cancelling it had no effect.
    """
    model = Model()
    id_ = stuck(local, tmp_path, model)
    mistake = command("reconfig", "resolve", id_, "--controller", local.address)
    assert mistake.stderr.startswith("invalid_argument: exactly one of --serve-source and --restore is required")
    with pytest.raises(InvalidArgument, match="is not a resolution"):
        local.cluster.resolve(id_, "pray")
    done = command("reconfig", "resolve", id_, "--serve-source", "--controller", local.address)
    assert done.exit_code == 0, done.stderr
    assert f"{id_} of Lying: FAILED" in done.stdout
    with pytest.raises(MoveConflict, match="no fenced move"):
        local.cluster.resolve(id_, "serve-source")
    stream = local.stream("Lying", source="s")
    assert outputs(stream.send(rows_of("k", 3), sequence=3)) == model.apply(rows_of("k", 3))
    model.check(local.cluster, "Lying")
    check_owners(local, "Lying")
    notes = [move.note for each in local.cluster.reconfigurations() if each.kind == "failover" for move in each.moves]
    assert len(notes) == 2
    assert all("the former owner's own copy, complete" in note for note in notes)
    (tmp_path / "lies").unlink()
    assert local.migrate("Lying", [0, 1], "edge").wait().state == "COMPLETED"
    model.check(local.cluster, "Lying")


def test_a_source_that_is_not_trusted_is_passed_over(local: LocalCluster, tmp_path: Path) -> None:
    local.cluster.checkpoint("Lying")
    model = Model()
    id_ = stuck(local, tmp_path, model)
    assert command("reconfig", "resolve", id_, "--restore", "--controller", local.address).exit_code == 0

    def notes() -> list[str]:
        found = [each for each in local.cluster.reconfigurations() if each.kind == "failover"]
        return [move.note for each in found if each.state == "COMPLETED" for move in each.moves]

    assert all("the checkpoint of" in note for note in eventually(lambda: len(notes()) == 2 and notes(), "restored"))


def test_distrust_outlives_the_controller(local: LocalCluster, tmp_path: Path) -> None:
    """Distrust of a source outlives the controller.

    Earlier, the next controller had the source serve what was not trusted.
    """
    id_ = stuck(local, tmp_path, Model())
    assert command("reconfig", "resolve", id_, "--restore", "--controller", local.address).exit_code == 0
    eventually(lambda: local.cluster.reconfiguration(id_).state == "FAILED", "it is given up")

    def ended() -> list[Reconfiguration]:
        found = local.cluster.reconfigurations()
        return [each for each in found if each.kind == "failover" and each.state != "RUNNING"]

    local.kill("controller")
    local.restart("controller")
    wait_alive(local, "cloud-0", "edge-0")
    before = {each.id for each in ended()}
    local.kill("cloud-0")  # it reports again what it sealed
    local.restart("cloud-0")
    tried = eventually(lambda: [each for each in ended() if each.id not in before], "an owner is looked for")
    assert {each.state for each in tried} == {"FAILED"}
    assert list(local.cluster.status().operators[0].owners) == ["cloud-0", "cloud-0"]
