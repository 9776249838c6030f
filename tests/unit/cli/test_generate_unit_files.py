"""Files for systemd, Docker, compose and Kubernetes: they are complete, and the command that they start exists."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.cli.generate import DATA, KINDS, PORTS, ROLES, TLS, Plan, compose, docker, kubernetes, systemd
from stateflow.errors import InvalidArgument
from stateflow.settings import ConnectionSettings

LABELS = {"disk": "ssd"}


def plan(role: str, **more: Any) -> Plan:
    return Plan(role, site="" if role == "controller" else "edge-1", controller="ctl:7070", labels=LABELS, **more)


def check_command(words: list[str]) -> None:
    """Asserts that ``stateflow`` takes this command line."""
    command: Any = typer.main.get_command(app)
    group = command.commands[words[0]]
    group.make_context("stateflow", words[1:])


def unit(role: str, **more: Any) -> configparser.ConfigParser:
    ((name, text),) = systemd(plan(role, **more)).items()
    assert name.endswith(".service")
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_has_what_it_needs(role: str) -> None:
    parser = unit(role, memory="4Gi")
    service = parser["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0] == "/usr/local/bin/stateflow"
    check_command([word.replace("%H", "host") for word in words[1:]])
    assert words[words.index("--listen") + 1] == f"0.0.0.0:{PORTS[role]}"
    assert service["Restart"] == "always"
    assert service["KillMode"] == "mixed", "an agent ends its own replicas"
    assert service["StateDirectory"] == f"stateflow/{role}"
    assert service["MemoryMax"] == "4G"
    assert ("Delegate" in service) == (role == "agent")
    assert parser["Install"]["WantedBy"] == "multi-user.target"
    said = dict(word.split("=", 1) for word in service["Environment"].split())
    assert bool(said.pop("STATE_DIRECTORY", "")) == (role == "controller")
    assert ConnectionSettings(**{k.removeprefix("STATEFLOW_").lower(): v for k, v in said.items()}).tls
    elsewhere = unit(role, data_dir="/data/it has%")["Service"]
    assert "StateDirectory" not in elsewhere
    assert role == "controller" or '"/data/it has%%"' in elsewhere["ExecStart"]
    assert elsewhere["ReadWritePaths"] == '"/data/it has%%"', "a blank began another path"
    if role == "controller":
        assert '"STATE_DIRECTORY=/data/it has%%"' in elsewhere["Environment"]
    below = unit(role, data_dir="/var/lib/it has//it/")["Service"]
    assert below["StateDirectory"] == '"it has/it"'
    for odd in ("/var/lib/a:b", "/var/lib/../etc", "/var/lib/"):
        assert "StateDirectory" not in unit(role, data_dir=odd)["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("odd", ["", """\\t "quotes" 'too': $x;"""])
def test_systemd_takes_the_unit(role: str, odd: str, tmp_path: Path) -> None:
    user = os.environ.get("USER") or "root"
    executable = tmp_path / "it has%h" / "stateflow"
    executable.parent.mkdir()
    shutil.copy("/bin/true", executable)
    planned = plan(role, executable=str(executable), data_dir=str(tmp_path / f"it has%h{odd}"), user=user)
    ((name, text),) = systemd(planned).items()
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True, check=False, timeout=60
    )
    said = [line for line in done.stderr.splitlines() if name in line]
    assert said == []


@pytest.mark.parametrize("role", ROLES)
def test_a_dockerfile_starts_a_command(role: str) -> None:
    text = docker(plan(role))["Dockerfile"]
    found = dict(line.split(" ", 1) for line in text.splitlines() if not line.startswith((" ", "RUN", "COPY")))
    assert json.loads(found["ENTRYPOINT"]) == ["stateflow"]
    check_command(json.loads(found["CMD"]))
    assert found["VOLUME"] == DATA
    assert found["USER"].isdigit()


@pytest.mark.parametrize("role", ROLES)
def test_a_compose_file_has_what_it_needs(role: str) -> None:
    files = compose(plan(role, memory="512Mi"))
    assert set(files) == {"compose.yaml", "Dockerfile"}
    document = yaml.safe_load(files["compose.yaml"])
    ((name, service),) = document["services"].items()
    check_command(service["command"])
    assert service["hostname"] == name
    assert service["volumes"] == [f"{name}:{DATA}", f"./{name}-tls:{TLS}:ro"]
    assert set(service["environment"].values()) == {f"{TLS}/{file}.pem" for file in ("ca", "cert", "key", "crl")}
    assert document["volumes"] == {name: {}}
    assert service["mem_limit"] == "512m"
    assert int(service["stop_grace_period"][:-1]) >= 30


@pytest.mark.parametrize("role", ROLES)
def test_manifests_have_what_they_need(role: str) -> None:
    count = 1 if role == "controller" else 3
    ((name, text),) = kubernetes(plan(role, count=count, memory="4Gi", storage="50Gi", grace_s=120)).items()
    assert "&id" not in text
    service, stateful, budget = yaml.safe_load_all(text)
    assert [each["kind"] for each in (service, stateful, budget)] == ["Service", "StatefulSet", "PodDisruptionBudget"]
    assert {each["metadata"]["name"] for each in (service, stateful, budget)} == {name.removesuffix(".yaml")}
    spec = stateful["spec"]
    assert (spec["replicas"], spec["serviceName"]) == (count, service["metadata"]["name"])
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"]
    assert labels == spec["selector"]["matchLabels"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    check_command([word.replace("$(POD_NAME)", "pod-0") for word in container["args"]])
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == DATA
    assert {each["name"] for each in pod["volumes"]} | {claim["metadata"]["name"]} == set(mounts)
    for probe, asked in (("startupProbe", "live"), ("livenessProbe", "live"), ("readinessProbe", "ready")):
        shell, _, command = container[probe]["exec"]["command"]
        assert shell == "sh"
        address = f"pod-0.{name.removesuffix('.yaml')}:{PORTS[role]}"
        words = shlex.split(command.replace("$POD_NAME", "pod-0"))
        assert words == ["stateflow", "health", address, "--service", asked]
        check_command(words[1:])
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert given["STATEFLOW_TLS_KEY"] == f"{TLS}/$(POD_NAME).key.pem", "a node speaks for itself only"
    assert container["resources"]["limits"] == {"memory": "4Gi"}
    assert ("lifecycle" in container) == (role == "replica")
    if role == "replica":
        drain = container["lifecycle"]["preStop"]["exec"]["command"]
        assert drain[:2] == ["sh", "-c"]
        assert 'stateflow drain "$POD_NAME" --controller ctl:7070' in drain[2]


def test_what_compose_and_kubernetes_would_fill_in_stays_as_it_is() -> None:
    odd = Plan("agent", site="edge-1", labels={"price": "$5 or $(HOME)"})
    ((_, service),) = yaml.safe_load(compose(odd)["compose.yaml"])["services"].items()
    assert "price=$$5 or $$(HOME)" in service["command"]
    (text,) = kubernetes(odd).values()
    (container,) = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"]
    assert "price=$5 or $$(HOME)" in container["args"]
    assert "$(POD_NAME)" in container["args"]


@pytest.mark.parametrize(
    "given",
    [
        {"executable": "/opt/a\nExecStartPre=/bin/sh"},
        {"data_dir": "/data\nUser=root"},
        {"user": "root\nUMask=0"},
        {"image": "a b"},
        {"namespace": "a: b"},
        {"controller": "ctl:7070 --insecure"},
        {"name": "../../x"},
        {"site": "edge\n1"},
        {"labels": {"a": "b\nc"}},
    ],
    ids=str,
)
def test_text_that_would_become_another_line_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Plan("agent", **{"site": "edge-1", **given})


@pytest.mark.parametrize("path", ["/opt/$x/stateflow", '/opt/"/stateflow', "/opt/\\/stateflow"])
def test_a_path_that_systemd_does_not_start_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match="systemd cannot start"):
        systemd(plan("agent", executable=path))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs a site"):
        Plan("agent")
    with pytest.raises(InvalidArgument, match="unknown role 'router'"):
        Plan("router")
    with pytest.raises(InvalidArgument, match="is not a size"):
        plan("agent", memory="much")
    with pytest.raises(InvalidArgument, match="not an absolute path"):
        plan("agent", data_dir="data")
    with pytest.raises(InvalidArgument, match="each have their own ledger"):
        plan("controller", count=2)
    with pytest.raises(InvalidArgument, match="is not a Kubernetes name"):
        kubernetes(plan("agent", name="Upper_Case"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_writes_them(kind: str, tmp_path: Path) -> None:
    arguments = ["generate", kind, "--for", "agent", "--site", "edge-1", "--controller", "ctl:7070"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written
    assert CliRunner().invoke(app, arguments).stdout.strip()
    assert CliRunner().invoke(app, ["generate", "pigeon", "--for", "agent", "--site", "x"]).exit_code == 1
