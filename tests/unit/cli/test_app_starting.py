"""Imports of a command line: only those of its own command, and the program's help imports no command."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from stateflow.cli.app import COMMANDS, app, app_for, app_of, outline


def commands_of(program: Any) -> set[str]:
    return set(typer.main.get_command(program).commands)  # type: ignore[attr-defined]


def test_every_command_is_in_the_module_that_is_said_to_have_it() -> None:
    for module, commands in COMMANDS.items():
        assert commands_of(app_of([module])) == set(commands)
    assert commands_of(app) == {name for names in COMMANDS.values() for name in names}


def test_the_outline_is_the_help_of_the_whole_program() -> None:
    assert CliRunner().invoke(outline(), ["--help"]).output == CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("words", [["status", "--help"], ["job", "create", "--help"], ["agent", "list", "--help"]])
def test_help_of_a_command_is_that_of_the_whole_program(words: list[str]) -> None:
    assert CliRunner().invoke(app_for(words), words).output == CliRunner().invoke(app, words).output


def test_what_cannot_be_told_has_the_whole_program() -> None:
    for words in (["--config", "status", "job", "list"], ["--insecure", "status"], ["statsu"]):
        assert commands_of(app_for(words)) == commands_of(app)
    for words in ([], ["-h"], ["--version"]):
        assert commands_of(app_for(words)) == commands_of(outline())


def test_a_shell_that_completes_has_the_whole_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_STATEFLOW_COMPLETE", "complete_bash")
    assert commands_of(app_for([])) == commands_of(app)
    assert "list" in typer.main.get_command(app_for([])).commands["job"].commands  # type: ignore[attr-defined]


def test_help_imports_nothing_that_takes_long() -> None:
    """Help imports no heavy module.

    It used to take a second and a half longer: gRPC, Arrow, numpy, RocksDB and what uses them.
    """
    code = "import sys\nfrom stateflow.cli.app import app_for\napp_for(['--help'])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    heavy = {"grpc", "pyarrow", "numpy", "rocksdict", "sqlalchemy", "pandas", "pyspark", "fsspec", "cryptography"}
    assert heavy & set(done.stdout.split()) == set()


def test_ctrl_c_while_the_modules_load_leaves_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from stateflow.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (130, "")
