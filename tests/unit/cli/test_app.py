"""The command line: what it reads, and its errors: one line on stderr with status 1, never a traceback."""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stateflow import __version__
from stateflow.cli import cluster as commands
from stateflow.cli.app import app
from stateflow.cli.group import EXAMPLES
from stateflow.cli.output import byte_count, bytes_per_second, guarded, milliseconds, position, seconds, size
from stateflow.client.commands import partition_numbers
from stateflow.errors import InvalidArgument, Unavailable
from stateflow.rpc.controller_pb2 import UndeployRequest
from stateflow.types import MoveOptions, ranges

#: a port without a listener, so that connections are refused at once
NOBODY = "127.0.0.1:1"
INVALID = "invalid_argument"


@pytest.mark.parametrize("text", ["s", "s=", "=1", "s=-1", "s=²", "s=1.5", "s=10000000000000000", "s=" + "9" * 5000])
def test_words_that_are_no_positions(text: str) -> None:
    assert position("a=b=7") == ("a=b", 7)
    assert position("s=9999999999999999") == ("s", 10**16 - 1)
    with pytest.raises(InvalidArgument, match="is not a position"):
        position(text)


def test_durations_up_to_a_century() -> None:
    assert [seconds(text) for text in ("90s", "1.5m", "2h", "36500d")] == [90.0, 90.0, 7200.0, 36500 * 86400.0]


@pytest.mark.parametrize("text", ["", "90", "-1s", "1w", "36501d", "99999999999999d", "9" * 400 + "s"])
def test_words_that_are_no_durations_in_seconds(text: str) -> None:
    """A duration that no time can be reckoned with used to end in a traceback."""
    with pytest.raises(InvalidArgument, match="is not a duration: write 90s, 15m, 2h or 7d"):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50ms", 50.0),
        ("50", 50.0),
        ("0.2s", 200.0),
        ("2s", 2000.0),
        ("250us", 0.25),
        (" 50 ms ", 50.0),
        (".5s", 500.0),
        ("0ms", 0.0),
    ],
)
def test_durations(text: str, expected: float) -> None:
    assert milliseconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20MB/s", 20e6),
        ("1GiB/s", 1 << 30),
        ("500kB", 500e3),
        ("1000", 1000.0),
        ("1.5 Mi", 1.5 * (1 << 20)),
        ("0", 0.0),
    ],
)
def test_bandwidths(text: str, expected: float) -> None:
    assert bytes_per_second(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "MB/s", "-1MB/s", "10TB/s", "1.2.3", "fast", "1MB/m"])
def test_words_that_are_no_bandwidths(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a bandwidth: write 20MB/s"):
        bytes_per_second(text)


@pytest.mark.parametrize("text", ["", "ms", "fast", "-5ms", "1.2.3s", ".", "5m", "5 s s", "1e3", "inf", "nan"])
def test_words_that_are_no_durations(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: .* is not a duration: write 50ms or 0\.2s"):
        milliseconds(text)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 5], "0-2 5"),
        ([5, 0, 2, 1], "0-2 5"),
        ([1, 3, 5], "1 3 5"),
        ([0, 2, 3], "0 2-3"),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranges_are_read_back(numbers: set[int]) -> None:
    said = ranges(list(numbers))
    assert partition_numbers(said, 201) == sorted(numbers)
    words = said.split()
    assert len(words) == sum(number - 1 not in numbers for number in numbers), "as few words as possible"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


# -- errors ---------------------------------------------------------------------------------------------------


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stateflow", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=os.environ | {"STATEFLOW_CLIENT_CONNECT_TIMEOUT_S": "0"},
    )


def assert_one_line(done: subprocess.CompletedProcess[str], code: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"{code}: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert "Traceback" not in done.stderr


def test_a_controller_that_is_not_there() -> None:
    done = run("status", "--controller", NOBODY)
    assert_one_line(done, "unavailable")
    assert NOBODY in done.stderr


def test_an_error_for_machines_is_an_object_on_stdout_as_well() -> None:
    done = run("status", "--controller", NOBODY, "--json")
    assert done.returncode == 1
    [line] = done.stdout.splitlines()
    said = json.loads(line)
    assert list(said) == ["error"]
    assert said["error"]["code"] == "unavailable"
    assert set(said["error"]) == {"code", "what", "remedy", "where"}
    assert done.stderr.startswith("unavailable: ")
    assert done.stderr.count("\n") == 1


runner = CliRunner()


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments))


def test_an_operator_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("N = 1 / 0\n\n\nclass Op:\n    n = N\n")
    (tmp_path / "empty.py").write_text("1 / 0\n")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    for target, said in (
        ("broken.py:Op", "ZeroDivisionError"),
        ("empty.py:Op", "there is no 'Op' at the top level"),
        ("binary.py:Op", "invalid start byte"),
        ("no_such_module_at_all:Op", "ModuleNotFoundError"),
        ("tests.unit.operators:Nothing", "Nothing"),
        ("missing.py:Op", "missing.py"),
        ("nonsense", "does not name an operator"),
        ("json:dumps", "json:dumps is not an Operator class"),
    ):
        result = invoke("deploy", target, "--controller", NOBODY)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("operator_not_importable: "), target
        assert result.stderr.count("\n") == 1
        assert said in result.stderr


def test_a_nested_pipeline_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yml").write_text("a: " + "[" * 20_000 + "]" * 20_000)
    result = invoke("run", "p.yml")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("invalid_argument: p.yml is not valid YAML: sections")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["replica", "--site", "a site", "--data-dir", "x", "--controller", NOBODY], INVALID),
        *(
            (["replica", "--site", "edge", "--name", name, "--data-dir", "x", "--controller", NOBODY], INVALID)
            for name in ("../up", "edge~1", "edge~x")  # including names reserved for the workers of a node
        ),
        pytest.param(
            ["migrate", "Op", "3", "--to", "edge", "--controller", NOBODY], "unavailable", marks=pytest.mark.thorough
        ),
    ],
)
def test_errors_are_one_line_on_stderr(arguments: list[str], code: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"{code}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["status", "--nonsense"], ["nonsense"], ["migrate", "Op", "3"], ["demo", "--rows", "7"]]
)
def test_wrong_usage_is_status_2_and_says_what_is_wrong(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["upgrade", "Op", "--to", "-1"],
        ["upgrade", "Op", "--to", str(1 << 32)],
        ["spawn", "edge", "--count", "257"],
        ["spawn", "edge", "--weight", "1001"],
        ["logs", "edge-0", "--lines", str(1 << 32)],
        ["reconfig", "list", "--limit", str(1 << 32)],
    ],
)
def test_a_number_that_no_message_can_carry_is_wrong_usage(arguments: list[str]) -> None:
    result = invoke(*arguments, "--controller", NOBODY)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["init", ""], "DIRECTORY"),
        (["certs", "init", "--dir", ""], "--dir"),
        (["certs", "issue", "n", "--role", "node", "--host", "h", "--out", ""], "--out"),
        (["generate", "prometheus", "--out="], "--out"),
        (["replica", "--site", "s", "--data-dir", ""], "--data-dir"),
        (["token", "show", ""], "FILE"),
        (["agent", "--site", "s", "--data-dir", ""], "--data-dir"),
    ],
)
def test_an_empty_path_is_not_the_working_directory(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of a script that is not set leaves a path empty."""
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"{INVALID}: the path {named} is empty: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["9" * 400, "99999999999GiB", "0", "0.4B"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a size"):
        byte_count(size)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "~no-such-user/x", "status"],
        ["status", "--config", "~no-such-user/x"],
        ["doctor", "--data-dir", "~no-such-user/x"],
    ],
)
def test_a_user_without_a_home_directory(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("invalid_argument: there is no home directory")
    assert result.stderr.count("\n") == 1


def test_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    there = "import os, sys\nos.rmdir(os.getcwd())\nsys.argv = ['stateflow', 'examples']\n"
    done = subprocess.run(
        [sys.executable, "-c", f"from stateflow.cli import main\n{there}main()"],
        *(), capture_output=True, text=True, check=False, cwd=tmp_path / "gone",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert_one_line(done, INVALID)


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for name in ("controller", "replica", "deploy", "status", "migrate", "demo", "ledger", "stages"):
        assert name in result.stdout


@functools.cache
def whole() -> Any:
    """Returns the program's command with all its subcommands.

    It is made once, as that takes as long as most of the tests.
    """
    return typer.main.get_command(app)


@functools.cache
def every_command() -> list[tuple[str, ...]]:
    def below(group: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [path]
        for name, each in getattr(group, "commands", {}).items():
            found += below(each, (*path, name))
        return found

    return below(whole(), ())


@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_help_of_every_command(path: tuple[str, ...]) -> None:
    """``-h`` is ``--help``, and flags show no type, as they take no value."""
    context = typer.Context(whole(), **whole().context_settings)
    for name in path:
        command = context.command.commands[name]  # type: ignore[attr-defined]
        context = typer.Context(command, parent=context, **command.context_settings)
    assert context.help_option_names == ["-h", "--help"]
    result = invoke(*path, "-h")
    assert result.exit_code == 0
    assert "<bool>" not in result.stdout
    for example in EXAMPLES.get(" ".join(path), ()):
        assert f"$ stateflow {example[:40]}" in result.stdout


@pytest.mark.parametrize("called", EXAMPLES)
def test_examples_are_commands(called: str) -> None:
    """Every example parses as its command."""
    assert tuple(called.split()) in every_command()
    for example in EXAMPLES[called]:
        words = shlex.split(example)
        assert words[: len(called.split())] == called.split()
        command, rest = whole(), words
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context("stateflow", rest)


@pytest.mark.parametrize(
    ("typed", "meant"), [(["migrat"], "migrate"), (["reconfg"], "reconfig"), (["ledger", "inti"], "init")]
)
def test_a_word_that_is_no_command_is_answered_with_the_nearest(typed: list[str], meant: str) -> None:
    result = invoke(*typed)
    assert result.exit_code == 2
    assert f"No such command '{typed[-1]}'. Did you mean '{meant}'?" in result.stderr


def test_version() -> None:
    first, second = invoke("--version").stdout.splitlines()
    assert first == f"stateflow {__version__}"
    assert second.startswith(f"Python {platform.python_version()}, Spark ")


def test_completion_can_be_had() -> None:
    assert "_STATEFLOW_COMPLETE" in subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'stateflow'; from stateflow.cli import main; main()"],
        env={**os.environ, "_STATEFLOW_COMPLETE": "source_bash", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip


def raising(error: BaseException) -> Callable[..., None]:
    def act(as_json: bool = False) -> None:
        raise error

    return guarded(act)


def test_markup_in_an_error_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Words in brackets are shown unchanged and unwrapped, though rich reads them as style."""
    what = "odd [red] name [/] and [1, 2] " + "x" * 300
    with pytest.raises(typer.Exit) as ended:
        raising(Unavailable(what, remedy="see [bold]", where_it="[/nothing]"))()
    assert ended.value.exit_code == 1
    said = capsys.readouterr()
    assert said.err == f"unavailable: {what} (where_it=[/nothing]): see [bold]\n"


def test_an_error_of_several_lines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        raising(Unavailable("first\nsecond", remedy="third", traceback="Traceback …\n  File"))()
    assert capsys.readouterr().err == "unavailable: first second: third\n"


def test_an_argument_that_is_not_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    """An argument in Latin-1, as Python hands it to a program, cannot be sent; it used to end in a traceback."""

    def act() -> None:
        UndeployRequest(operator="M\udcfcller")

    with pytest.raises(typer.Exit) as ended:
        guarded(act)()
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.startswith("invalid_argument: 'M\\udcfcller' is not UTF-8: ")


def test_ctrl_c_is_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        raising(KeyboardInterrupt())()
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == ""


def test_a_fault_of_ours_is_not_dressed_up_as_the_users() -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-pause", "50ms"), "--max-pause has no effect without --policy"),
        (
            ("--cool-down", "60s", "--moves-per-minute", "6"),
            "--cool-down and --moves-per-minute have no effect without",
        ),
        (("--off", "--max-pause", "50ms"), "has no effect without --policy"),
        (("--off", "--policy", "load"), "--off and --policy contradict each other"),
    ],
)
def test_the_autopilot_ignores_no_option(words: tuple[str, ...], said: str) -> None:
    found = invoke("autopilot", *words, "--controller", NOBODY)
    assert found.exit_code == 1
    assert said in found.stderr


def test_migrate_passes_on_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    asked: dict[str, Any] = {}
    state = "COMPLETED"

    class FakeCluster:
        def __init__(self, address: str) -> None:
            asked["address"] = address

        def operator(self, name: str) -> Any:
            return SimpleNamespace(partitions=8)

        def migrate(self, operator: str, partitions: list[int], to: str, options: MoveOptions) -> Any:
            asked.update(operator=operator, partitions=partitions, to=to, options=options)
            report = SimpleNamespace(state=state, to_dict=lambda: {"state": state})
            return SimpleNamespace(wait=lambda: report)

    monkeypatch.setattr(commands, "Cluster", FakeCluster)
    arguments = [
        "migrate",
        "Op",
        "3",
        "5-6",
        "--to",
        "edge",
        "--max-pause",
        "0.2s",
        "--max-bandwidth",
        "20MB/s",
        "--order",
        "hot-last",
        "--patience",
        "5s",
        "--controller",
        "there:1",
        "--json",
    ]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"state": "COMPLETED"}
    assert asked == {
        "address": "there:1",
        "operator": "Op",
        "partitions": [3, 5, 6],
        "to": "edge",
        "options": MoveOptions(200.0, 20e6, 5.0, order="hot-last"),
    }
    assert invoke("migrate", "Op", "all", "--to", "edge", "--json").exit_code == 0
    assert asked["partitions"] == list(range(8))
    state = "FAILED"
    failed = invoke(*arguments)
    assert failed.exit_code == 1, "only success is 0"
    assert json.loads(failed.stdout) == {"state": "FAILED"}
