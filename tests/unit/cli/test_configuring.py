"""Flags, variables and keys of commands: which one wins, and that all three set the same field."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from stateflow.cli import cluster as commands
from stateflow.cli.app import app
from stateflow.cli.configuring import PROCESSES
from stateflow.errors import Unavailable
from stateflow.settings import CONFIG, AgentProcess, ControllerProcess, ReplicaProcess, Settings, base
from stateflow.settings.base import STRICT

PROGRAM: Any = typer.main.get_command(app)
NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Restores the variables that a command sets for its child processes."""
    for name in (CONFIG, STRICT, "STATEFLOW_INSECURE", "STATEFLOW_CONTROLLER"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    yield
    base._read.cache_clear()


def file_with(text: str) -> str:
    base._read.cache_clear()
    Path("fleet.toml").write_text(text)
    Path("fleet.toml").chmod(0o600)
    return "fleet.toml"


def run(*words: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(app, list(words))


def printed(*words: str, **environment: str) -> dict[str, Any]:
    result = run(*words, "--print-config", **environment)
    assert result.exit_code == 0, result.output
    return tomllib.loads(result.stdout)


# -- flags and fields -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROCESSES)
def test_every_flag_of_a_model_is_an_option_with_the_same_default(path: str) -> None:
    command = PROGRAM.commands[path]
    options = {name: option for option in command.params for name in option.opts}
    for kind in PROCESSES[path]:
        for name, info in kind.model_fields.items():
            flag = kind.flag(name)
            if flag is None or (flag not in options and kind.section != path):
                continue  # a setting that other commands have too
            if (kind.section, name) == ("connection", "controller"):
                assert info.default == ""  # the controller's address is looked up, so there is no default
                continue
            option, default = options[flag], info.get_default(call_default_factory=True)
            unsaid = option.default in (None, "")
            assert (option.default == default) or (unsaid and default in ("", {}, 60.0)), flag
            if path != "agent":  # ``agent`` is a group
                assert option.envvar == kind.variable(name)
            limits = {key: getattr(each, key) for each in info.metadata for key in ("ge", "le") if hasattr(each, key)}
            if option.default is not None and option.min is not None:
                assert (option.min, option.max) == (limits.get("ge"), limits.get("le")), flag


@pytest.mark.parametrize("kind", [ControllerProcess, ReplicaProcess, AgentProcess])
def test_every_option_that_says_where_a_process_is_has_a_key(kind: type[Settings]) -> None:
    known = {each.flag(name) for each in PROCESSES[kind.section] for name in each.model_fields}
    of_a_call = {
        "--config",
        "--print-config",
        "--strict",
        "--json",
        "--stop-with-parent",
        "--worker",
        "--lock",
        "--help",
    }
    options = {option.opts[0] for option in PROGRAM.commands[kind.section].params}
    assert options - of_a_call - known == set()


# -- precedence -----------------------------------------------------------------------------------------------


def test_flag_before_environment_before_file_before_default() -> None:
    named = file_with('[replica]\nsite = "of the file"\nweight = 2\nworkers = 2\ncached_keys = 5\n')
    words = ("replica", "--config", named, "--site", "of the flag")
    found = printed(*words, STATEFLOW_REPLICA_SITE="of the environment", STATEFLOW_REPLICA_WEIGHT="3")["replica"]
    assert found["site"] == "of the flag"
    assert found["weight"] == 3
    assert (found["workers"], found["cached_keys"]) == (2, 5)
    assert found["listen"] == "127.0.0.1:0"


def test_it_is_said_where_each_comes_from() -> None:
    named = file_with('[replica]\nweight = 2\n[log]\nformat = "json"\n')
    said = run(
        "replica", "--config", named, "--site", "a", "--insecure", "--print-config", STATEFLOW_REPLICA_WORKERS="2"
    )
    for origin in ("--site", "--insecure", "STATEFLOW_REPLICA_WORKERS", f"{Path(named).absolute()}: replica.weight"):
        assert f"({origin})\n" in said.stdout, origin
    assert "(--insecure)\n" in run("--insecure", "replica", "--print-config").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("controller", "--no-jobs", "--auto-rebalance", "--ledger", "sqlite:///l.db"),
        ("replica", "--site", "a", "--data-dir", "d", "--checkpoint-interval", "5", "--verbose"),
        ("agent", "--site", "a", "--data-dir", "d", "--label", "disk=ssd", "--label", "rack=7", "--memory", "4GiB"),
        ("status", "--controller", "a:7070"),
    ],
)
def test_what_is_printed_is_what_the_flags_said(words: tuple[str, ...]) -> None:
    found = printed(*words)
    assert printed(words[0]) != found
    assert printed(words[0], "--config", file_with(run(*words, "--print-config").stdout)) == found


def test_a_command_has_its_options_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def nobody(address: str) -> Any:
        asked.append(address)
        raise Unavailable("nobody")

    monkeypatch.setattr(commands, "Cluster", nobody)
    monkeypatch.setattr("stateflow.local.embedded.running_in", lambda: "here:1")
    named = file_with('[connection]\ncontroller = "of-the-file:7070"\n')
    run("status", "--config", named)
    run("--config", named, "status")  # before the command: holds for every subcommand
    run("status", CONFIG=named, STATEFLOW_CONFIG=named)
    run("status", "--config", named, STATEFLOW_CONTROLLER="of-the-environment:7070")
    run("status", "--config", named, "--controller", "of-the-flag:7070")
    assert asked == ["of-the-file:7070"] * 3 + ["of-the-environment:7070", "of-the-flag:7070"]
    monkeypatch.setenv(CONFIG, "")
    run("status")
    run("status", "--config", file_with('[connection]\ncontroller = ""\n'))
    assert asked[5:] == ["here:1", "here:1"]


def test_no_file_is_read_because_of_where_it_is() -> None:
    Path("stateflow.toml").write_text('[replica]\nsite = "nobody asked"\n')
    assert printed("replica")["replica"]["site"] == ""


def test_an_agent_has_labels_from_each_of_the_three(monkeypatch: pytest.MonkeyPatch) -> None:
    named = file_with('[agent]\nlabels = { disk = "ssd", rack = "7" }\n')
    assert printed("agent", "--config", named)["agent"]["labels"] == {"disk": "ssd", "rack": "7"}
    said = {"STATEFLOW_AGENT_LABELS": '{"a": "b"}'}
    assert printed("agent", "--config", named, **said)["agent"]["labels"] == {"a": "b"}
    assert printed("agent", "--config", named, "--label", "c=d", **said)["agent"]["labels"] == {"c": "d"}
    context = PROGRAM.commands["agent"].make_context("agent", ["--config", named])
    assert context.params["label"] == ["disk=ssd", "rack=7"]


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (("replica", "--workers", "0"), {}, "--workers cannot be '0'"),
        (("replica", "--workers", "two"), {}, "--workers cannot be 'two'"),
        (("replica",), {"STATEFLOW_REPLICA_WORKERS": "0"}, "STATEFLOW_REPLICA_WORKERS cannot be '0'"),
        (
            ("replica", "--site", "x", "--data-dir", "there"),
            {"STATEFLOW_REPLICA_ACKNOWLEDGE": "maybe"},
            "STATEFLOW_REPLICA_ACKNOWLEDGE cannot be 'maybe'",
        ),
        (("replica",), {"STATEFLOW_LOG_FORMAT": "xml"}, "STATEFLOW_LOG_FORMAT cannot be 'xml'"),
        (
            ("controller", "--ledger", "sqlite:///there"),
            {"STATEFLOW_CONTROLLER_CONCURRENT_MOVES": "0"},
            "STATEFLOW_CONTROLLER_CONCURRENT_MOVES cannot be '0'",
        ),
        (("controller",), {"STATEFLOW_CONTROLLER_LABELS": "x"}, "STATEFLOW_CONTROLLER_LABELS cannot be 'x'"),
        (("agent", "--label", "x"), {}, "'x' is not a label"),
        (("status", "--config", "nothing.toml"), {}, "the settings file cannot be read: No such file"),
        (("status",), {CONFIG: "/"}, "a directory is not a settings file"),
    ],
)
def test_one_line_says_what_is_wrong(words: tuple[str, ...], environment: dict[str, str], said: str) -> None:
    result = run(*words, **environment)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"invalid_argument: {said}")
    assert not Path("there").exists()


def test_programs_read_what_is_wrong_as_json() -> None:
    result = run("status", "--json", "--config", file_with("[agents]\n"))
    assert json.loads(result.stdout)["error"]["what"] == "there is no section [agents]"


def test_help_and_version_need_no_file() -> None:
    assert run("status", "--help", **{CONFIG: "/nothing"}).exit_code == 0
    assert run("--version", **{CONFIG: "/nothing"}).exit_code == 0


def test_what_is_of_a_process_is_nothing_to_the_commands_of_its_name() -> None:
    assert run("agent", "list", "--help", STATEFLOW_AGENT_CORES="x").exit_code == 0
    assert "STATEFLOW_AGENT_CORES" not in run("agent", "list", "--print-config", STATEFLOW_AGENT_CORES="x").output
    assert run("agent", STATEFLOW_AGENT_CORES="x").stderr.startswith("invalid_argument: STATEFLOW_AGENT_CORES cannot")


def test_what_must_be_said_has_three_ways() -> None:
    said = run("replica")
    assert said.exit_code == 2
    assert "STATEFLOW_REPLICA_SITE" in said.stderr


def test_a_variable_that_nothing_reads_is_said_and_stops_no_command() -> None:
    said = run("examples", STATEFLOW_REPLICA_ACKNOWLEGDE="fsync", STATEFLOW_ZZZZ="1", STATEFLOW_LOG_FORMAT="")
    assert said.exit_code == 0, said.output
    wrong, right = "STATEFLOW_REPLICA_ACKNOWLEGDE", "STATEFLOW_REPLICA_ACKNOWLEDGE"
    assert said.stderr.splitlines() == [
        f"warning: nothing reads {wrong}, which is set: did you mean {right}?",
        "warning: nothing reads STATEFLOW_ZZZZ, which is set",
    ]
    assert run("examples").stderr == ""


@pytest.mark.parametrize(
    "words", [("examples", "--strict"), ("--strict", "examples"), ("--strict", "job", "list"), ("agent", "--strict")]
)
def test_a_variable_that_nothing_reads_is_refused_by_who_is_strict(words: tuple[str, ...]) -> None:
    said = run(*words, STATEFLOW_REPLICA_ACKNOWLEGDE="fsync")
    assert said.exit_code == 1
    assert said.stderr == (
        "invalid_argument: nothing reads STATEFLOW_REPLICA_ACKNOWLEGDE, which is set: "
        "did you mean STATEFLOW_REPLICA_ACKNOWLEDGE?\n"
    )


def test_strictness_is_a_variable_too_and_holds_for_what_is_started() -> None:
    assert run("examples", STATEFLOW_STRICT="1").exit_code == 0
    assert run("examples", STATEFLOW_STRICT="1", STATEFLOW_ZZZZ="").exit_code == 1
    assert run("examples", STATEFLOW_STRICT="0", STATEFLOW_ZZZZ="").exit_code == 0
