"""Completions by the Tab key, requested as shells do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stateflow.checkpoint import CheckpointStore
from stateflow.cli.app import app
from stateflow.cli.configuring import OF_COMMANDS, PARAMETERS, Said, answered
from stateflow.cli.output import LISTEN
from stateflow.errors import Unavailable
from stateflow.rpc import cluster_client
from stateflow.settings import CONFIG, base

SHELLS = ("bash", "zsh", "fish")


class Known:
    """A cluster with fixed answers to what completion asks."""

    def status(self) -> Any:
        at = [SimpleNamespace(name=name, site=name.partition("-")[0]) for name in ("cloud-0", "edge-0", "edge-1")]
        return SimpleNamespace(
            operators=[SimpleNamespace(name="Tally", partitions=4), SimpleNamespace(name="Tell", partitions=2)],
            replicas=at,
            maintenance=[SimpleNamespace(node="edge-1")],
        )

    def agents(self) -> Any:
        return [SimpleNamespace(name="edge-gw", site="edge")]

    def reconfigurations(self, limit: int) -> Any:
        return [SimpleNamespace(id="4b1f", operator="Tally", state="RUNNING")]

    def jobs(self) -> Any:
        run = SimpleNamespace(id="run-7")
        return [SimpleNamespace(name="evening", do="rebalance", schedule="every 60", runs=[run])]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Said, "cluster", lambda said: Known())


def offered(line: str, shell: str = "bash") -> list[str]:
    """Returns the completions of a line's last word."""
    words = line.split(" ")
    asked = {
        "_STATEFLOW_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = CliRunner().invoke(app, [], env=asked, prog_name="stateflow")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return list(filter(None, done.output.splitlines()))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("stateflow migr", ["migrate"]),
        ("stateflow migrate ", ["Tally", "Tell"]),
        ("stateflow migrate Ta", ["Tally"]),
        ("stateflow migrate Tally 3 --to ", ["cloud", "edge", "cloud-0", "edge-0", "edge-1"]),
        ("stateflow migrate Tally 3 --to edge", ["edge", "edge-0", "edge-1"]),
        ("stateflow drain e", ["edge-0", "edge-1"]),
        ("stateflow verify --site ", ["cloud", "edge"]),
        ("stateflow maintenance end ", ["edge-1"]),
        ("stateflow agent forget ", ["edge-gw"]),
        ("stateflow spawn ", ["edge", "edge-gw"]),
        ("stateflow reconfig info ", ["4b1f"]),
        ("stateflow job result ", ["run-7"]),
        ("stateflow job pause ev", ["evening"]),
        ("stateflow undeploy X", []),
    ],
)
def test_names_that_a_cluster_knows(cluster: None, line: str, found: list[str]) -> None:
    assert offered(line) == found


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_is_told_what_a_name_is_where_it_shows_that(cluster: None, shell: str) -> None:
    told = "\n".join(offered("stateflow undeploy Ta", shell))
    assert "Tally" in told
    assert ("4 partitions" in told) is (shell != "bash")


def test_savepoints_of_a_store_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, nowhere = tmp_path / "there", tmp_path / "nowhere"
    CheckpointStore(str(there)).check(first_use=True)
    monkeypatch.setattr(CheckpointStore, "savepoints", lambda store: {store.url.rpartition("/")[2]: [1, 2]})
    assert offered(f"stateflow savepoint delete --checkpoints {there} ") == ["there"]
    monkeypatch.setenv("STATEFLOW_CHECKPOINTS", str(there))
    assert offered("stateflow savepoint export t") == ["there"]
    assert offered(f"stateflow savepoint delete --checkpoints {nowhere} x") == []
    assert not nowhere.exists()


def test_nothing_is_said_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_CONTROLLER", "127.0.0.1:1")
    assert offered("stateflow undeploy ") == []

    def refuse(said: Said) -> Any:
        raise Unavailable("nobody is there", remedy="wait")

    monkeypatch.setattr(Said, "cluster", refuse)
    assert offered("stateflow drain ") == []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Yields the addresses of the controllers that completion asked."""
    found: list[str] = []

    def cluster(address: str, connect_s: float) -> Known:
        found.append(address)
        return Known()

    monkeypatch.setattr(cluster_client, "ClusterClient", cluster)
    for name in (CONFIG, "STATEFLOW_CONTROLLER", "STATEFLOW_INSECURE"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    yield found
    base._read.cache_clear()


def file_with(text: str) -> str:
    Path("fleet.toml").write_text(text)
    Path("fleet.toml").chmod(0o600)
    return "fleet.toml"


def test_the_cluster_is_asked_that_the_command_would_go_to(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    named = file_with('[connection]\ncontroller = "of-the-file:7070"\n')
    for line in (f"undeploy --config {named} ", f"--config {named} undeploy ", f"reconfig info --config {named} "):
        monkeypatch.setenv(CONFIG, "")
        assert offered(f"stateflow {line}"), line
    monkeypatch.setenv(CONFIG, named)
    offered("stateflow undeploy ")
    offered("stateflow undeploy --controller of-the-flag:7070 ")
    monkeypatch.setenv("STATEFLOW_CONTROLLER", "of-the-environment:7070")
    offered("stateflow undeploy ")
    assert asked == ["of-the-file:7070"] * 4 + ["of-the-flag:7070", "of-the-environment:7070"]


def test_a_program_that_runs_here_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    offered("stateflow undeploy ")
    monkeypatch.setattr("stateflow.local.embedded.running_in", lambda: "here:1")
    offered("stateflow undeploy ")
    assert asked == [LISTEN, "here:1"]


def test_nobody_is_asked_where_settings_cannot_be_read(asked: list[str]) -> None:
    assert offered(f"stateflow undeploy --config {file_with('[nothing]')} ") == []
    assert offered("stateflow undeploy --config none.toml ") == []
    assert offered("stateflow --config none.toml undeploy ") == []
    assert asked == []


def test_settings_are_not_printed_in_place_of_names(asked: list[str]) -> None:
    assert offered("stateflow undeploy --print-config ") == ["Tally", "Tell"]


def test_plain_text_goes_where_the_command_would_send_it(asked: list[str]) -> None:
    offered("stateflow --insecure undeploy ")
    assert os.environ["STATEFLOW_INSECURE"] == "1"


def test_whoever_is_late_is_not_waited_for() -> None:
    over = threading.Event()
    assert answered(lambda: [("late", "")] if over.wait() else [], within_s=0.01) == []
    over.set()
    assert answered(lambda: [("early", "")]) == [("early", "")]


def test_what_is_said_so_far_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_LEDGER", "sqlite:///there.db")
    assert Said({"url": "sqlite:///here.db"}).of("url", "STATEFLOW_LEDGER") == "sqlite:///here.db"
    assert Said({"url": None}).of("url", "STATEFLOW_LEDGER") == "sqlite:///there.db"
    assert Said({}).of("other", default="x") == "x"


def test_what_is_asked_for_is_a_parameter_of_some_command() -> None:
    found: dict[str, set[str]] = {}

    def walk(command: Any, path: list[str]) -> None:
        found[" ".join(path)] = {param.name for param in command.params}
        for name, below in getattr(command, "commands", {}).items():
            walk(below, [*path, name])

    walk(typer.main.get_command(app), [])
    assert set(PARAMETERS) <= set().union(*found.values())
    assert {called: set(asks) - found[called] for called, asks in OF_COMMANDS.items()} == {
        called: set() for called in OF_COMMANDS
    }


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", None)])
def test_it_is_installed_for_every_shell(
    shell: str, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    # bypasses the cached command: typer makes a different one here
    monkeypatch.setattr(typer.testing, "_get_command", typer.main.get_command)
    done = CliRunner().invoke(app, ["--install-completion", shell], prog_name="stateflow")
    assert done.exit_code == 0, done.output
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_STATEFLOW_COMPLETE" in path.read_text() for path in written)
    assert file is None or (tmp_path / file).exists()
