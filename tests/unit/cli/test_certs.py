"""``stateflow certs``: what it writes, prints and refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.security.certificates import TlsFiles
from tests.unit.security.test_authority import settings


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["certs", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def said(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_from_an_authority_to_a_revoked_certificate(tmp_path: Path) -> None:
    assert str(tmp_path / "state" / "authority") in run("init").replace("\n", "")
    issued = said("issue", "edge-0", "--role", "node", "--host", "edge-0.lan", "--host", "10.0.0.7")
    assert (issued["role"], issued["hosts"], issued["dir"]) == ("node", ["edge-0.lan", "10.0.0.7"], "edge-0")
    assert issued["environment"]["STATEFLOW_TLS_KEY"] == str(tmp_path / "edge-0" / "key.pem")
    assert TlsFiles(settings(tmp_path / "edge-0")).current().own.serial == int(issued["serial"], 16)
    assert f"export STATEFLOW_TLS_CA={tmp_path}/gw/ca.pem" in run(
        "issue", "gw", "--role", "data", "--operator", "Pumps", "--days", "7"
    ).replace("\n", "")
    renewed = said("renew", "edge-0")
    assert renewed["serial"] != issued["serial"]
    assert "node/edge-0 revoked" in run("revoke", issued["serial"])
    states = {each["serial"]: each["state"] for each in said("list")["certificates"]}
    assert (states[issued["serial"]], states[renewed["serial"]], len(states)) == ("revoked", "valid", 3)
    listed = run("list")
    for word in ("node/edge-0", "data/gw", "revoked", "edge-0.lan", "Pumps"):
        assert word in listed


def test_a_shell_takes_what_is_printed_for_it(tmp_path: Path) -> None:
    run("init")
    issued = run("issue", "gw", "--role", "data", "--operator", "Pumps", "--out", "a b/it's")
    lines = [shlex.split(line) for line in issued.splitlines() if line.startswith("export ")]
    assert ["export", f"STATEFLOW_TLS_KEY={tmp_path}/a b/it's/key.pem"] in lines
    assert all(len(words) == 2 for words in lines)
    token = CliRunner().invoke(app, ["token", "issue", "al", "--role", "operate", "--for", "1h", "--out", "a b/t"])
    assert shlex.split(token.stdout.splitlines()[-1]) == ["export", f"STATEFLOW_TOKEN_FILE={tmp_path}/a b/t"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["issue", "a", "--role", "king"], "there is no role 'king'"),
        (["issue", "a", "--role", "node"], "pass --host"),
        (["issue", "a", "--role", "read", "--operator", "Pumps"], "cannot be restricted to operators"),
        (["issue", "a/b", "--role", "read"], "is not a valid read name"),
        (["renew", "a"], "there is no certificate to renew"),
        (["revoke", "a"], "no certificate was issued to 'a'"),
        (["init"], "an authority already exists"),
        (["list", "--dir", "nowhere"], "no certificate authority found"),
    ],
)
def test_what_it_refuses(arguments: list[str], line: str) -> None:
    run("init")
    output = run(*arguments, status=1)
    assert line in output.replace("\n", " ")
