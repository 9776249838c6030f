"""Writes files with which systemd, Docker, compose or Kubernetes run a process of stateflow (``stateflow generate``).

For each kind of files, a function returns them as text. The command prints the files or writes them to a directory. It
can also write the files for monitoring. It starts no process.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
import yaml

from stateflow.cli.group import Commands
from stateflow.cli.output import LOCAL, Controller, Json, console, emit, labels_of
from stateflow.errors import InvalidArgument
from stateflow.metrics.figures import monitoring
from stateflow.types import ADDRESS, check_name, shown

ROLES = ("agent", "replica", "controller")
#: data directory of a process in a container
DATA = "/var/lib/stateflow"
USER = 10001
PORTS = {"controller": 7070, "replica": 7071, "agent": 7072}
#: name of the optional file or secret with STATEFLOW_CHECKPOINTS, STATEFLOW_CODE_KEY and STATEFLOW_LEDGER
SECRETS = "stateflow"
#: directory of the process's certificate, as `stateflow certs issue` writes it
TLS = "/etc/stateflow/tls"


def _tls(prefix: str = "") -> dict[str, str]:
    """Returns the environment variables for TLS.

    Args:
        prefix: begins the names of the certificate and key files, if several processes share the directory.
    """
    return {
        "STATEFLOW_TLS_CA": f"{TLS}/ca.pem",
        "STATEFLOW_TLS_CERT": f"{TLS}/{prefix}cert.pem",
        "STATEFLOW_TLS_KEY": f"{TLS}/{prefix}key.pem",
        "STATEFLOW_TLS_CRL": f"{TLS}/crl.pem",
    }


_SIZE = re.compile(r"[1-9][0-9]*(?:Ki|Mi|Gi|Ti)")
_DNS = re.compile(r"[a-z0-9](?:[a-z0-9\-]{0,40}[a-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,30}|[0-9]{1,10}")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@\-]{0,254}")
#: a directory that StateDirectory= of a unit can name; systemd splits names at ``:``, and refuses ``..``
_STATE = re.compile(r"/var/lib/[^:\\\"']+")


@dataclass(frozen=True, slots=True)
class Plan:
    """A process for which files are generated.

    Attributes:
        name: name of the process; empty: made from the role and the site.
        data_dir: data directory; empty: the role's default.
        count: number of processes, for Kubernetes.
        memory: memory limit as Kubernetes writes it, e.g. 2Gi; empty: no limit.
        storage: size of the volume, as Kubernetes writes it.
        grace_s: seconds within which the process must drain and end, for Kubernetes.
    """

    role: str
    site: str = ""
    controller: str = "127.0.0.1:7070"
    name: str = ""
    data_dir: str = ""
    executable: str = "/usr/local/bin/stateflow"
    user: str = "stateflow"
    image: str = "stateflow"
    count: int = 1
    workers: int = 1
    memory: str = ""
    storage: str = "10Gi"
    namespace: str = "default"
    grace_s: int = 600
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the plan. Raises InvalidArgument if a value is not valid."""
        if self.role not in ROLES:
            raise InvalidArgument(f"unknown role {self.role!r}", remedy=f"use {', '.join(ROLES)}")
        if self.role != "controller" and not self.site:
            raise InvalidArgument(f"{self.role} needs a site", remedy="pass --site SITE")
        for what, name in (("site", self.site), (self.role, self.name)):
            if name:
                check_name(what, name)
        for address in self.controller.split(","):
            ADDRESS.check(address.strip(), "controller")
        for what, pattern, text in (("user", _USER, self.user), ("image", _IMAGE, self.image)):
            if pattern.fullmatch(text) is None:
                raise InvalidArgument(
                    f"{shown(text)} is not a valid {what}", remedy=f"pass a valid --{what}, such as stateflow"
                )
        if _DNS.fullmatch(self.namespace) is None:
            raise InvalidArgument(
                f"{shown(self.namespace)} is not a valid namespace", remedy="use lower-case letters, digits and '-'"
            )
        for text in (self.executable, self.data_dir, *self.labels, *self.labels.values()):
            if not text.isprintable():
                raise InvalidArgument(
                    f"{shown(text)} contains line breaks or control characters",
                    remedy="choose a name without them",
                )
        if self.data_dir and not PurePosixPath(self.data_dir).is_absolute():
            raise InvalidArgument(
                f"{self.data_dir!r} is not an absolute path", remedy="pass a --data-dir that begins with /"
            )
        for size in (self.memory, self.storage):
            if size and _SIZE.fullmatch(size) is None:
                raise InvalidArgument(f"{size!r} is not a size", remedy="write 512Mi or 4Gi")
        if self.role == "controller" and self.count > 1:
            raise InvalidArgument(
                "several controllers would each have their own ledger",
                remedy="generate one; if its secrets name a shared database, raise `replicas` in the file",
            )

    def arguments(self, name: str, listen: str, advertise: str, data_dir: str) -> list[str]:
        """Returns the arguments of ``stateflow`` for this process.

        Args:
            advertise: host:port at which others reach the process; empty: ``listen``.
        """
        if self.role == "controller":
            return ["controller", "--listen", listen, *(["--advertise", advertise] if advertise else [])]
        given = [self.role, "--site", self.site, "--controller", self.controller, "--data-dir", data_dir]
        given += ["--name", name] if name else []
        given += ["--listen", listen]
        if advertise:
            given += ["--advertise", advertise.rpartition(":")[0] if self.role == "agent" else advertise]
        if self.role == "replica" and self.workers > 1:
            given += ["--workers", str(self.workers)]
        if self.role == "agent":
            for key, value in sorted(self.labels.items()):
                given += ["--label", f"{key}={value}"]
        return given


# -- systemd ---------------------------------------------------------------------------------------------------------


def _quoted(word: str) -> str:
    """Quotes a word of a unit, because systemd splits words at blanks and interprets quotes, backslashes and ``%``."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{word}"' if not word or re.search(r"[\s\"';\\]", word) else word


def _argument(word: str) -> str:
    """Quotes a word of a unit's command line, in which ``$`` is special as well, because it begins a variable."""
    return _quoted(word.replace("$", "$$"))


def systemd(plan: Plan) -> dict[str, str]:
    """Returns a unit, file name → text.

    systemd creates the data directory if it is below /var/lib. Raises InvalidArgument for an executable that systemd
    cannot start.
    """
    if re.search(r"[$\"'\\]", plan.executable):
        raise InvalidArgument(
            f"systemd cannot start {shown(plan.executable)}",
            remedy="install stateflow at a path without quotes, '$' and backslashes",
        )
    data_dir = str(PurePosixPath(plan.data_dir or f"{DATA}/{plan.role}"))
    named = plan.name or (plan.site if plan.role != "controller" else "")
    unit = f"stateflow-{plan.role}{'-' + named if named else ''}.service"
    words = [plan.executable, *plan.arguments(plan.name, f"0.0.0.0:{PORTS[plan.role]}", "", data_dir)]
    # others reach the process by the machine's name
    advertise = "%H" if plan.role == "agent" else f"%H:{PORTS[plan.role]}"
    command = " ".join([*map(_argument, words), "--advertise", advertise])
    environment = _tls() | ({"STATE_DIRECTORY": data_dir} if plan.role == "controller" else {})
    stop_s = {"agent": 60, "replica": 30, "controller": 20}[plan.role]
    lines = [
        "[Unit]",
        f"Description=stateflow {plan.role}{' at ' + plan.site if plan.site else ''}".replace("%", "%%"),
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={command}",
        "# the EnvironmentFile takes precedence: for plain text, empty these there and set STATEFLOW_INSECURE=1",
        f"Environment={' '.join(_quoted(f'{name}={value}') for name, value in environment.items())}",
        f"EnvironmentFile=-/etc/stateflow/{SECRETS}.env",
        f"User={plan.user}",
        f"Group={plan.user}",
        "Restart=always",
        "RestartSec=1",
        "# the process stops its own children; systemd kills what is left",
        "KillMode=mixed",
        f"TimeoutStopSec={stop_s}",
        *(["# control groups for its replicas", "Delegate=memory"] if plan.role == "agent" else []),
        *([f"MemoryMax={plan.memory.removesuffix('i')}"] if plan.memory else []),
        "LimitNOFILE=1048576",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=strict",
        *(
            [f"StateDirectory={_quoted(data_dir.removeprefix('/var/lib/'))}", "StateDirectoryMode=0700"]
            if _STATE.fullmatch(data_dir) and ".." not in PurePosixPath(data_dir).parts
            else [f"ReadWritePaths={_quoted(data_dir)}"]
        ),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return {unit: "\n".join(lines) + "\n"}


# -- Containers ------------------------------------------------------------------------------------------------------


def docker(plan: Plan) -> dict[str, str]:
    """Returns a Dockerfile, file name → text. Put it into the directory that contains ``dist/`` with the wheel."""
    command = plan.arguments(plan.name, f"0.0.0.0:{PORTS[plan.role]}", "", DATA)
    lines = [
        "FROM python:3.12-slim",
        "# the wheel: `make dist` in a clone of stateflow; operator code is sent later, by `stateflow deploy`",
        "COPY dist/*.whl /tmp/",
        'RUN pip install --no-cache-dir "$(ls /tmp/*.whl)[s3,postgres]" && rm /tmp/*.whl \\',
        f"  && useradd --uid {USER} --no-create-home stateflow && install -d -m 0700 -o {USER} {DATA}",
        f"USER {USER}",
        f"VOLUME {DATA}",
        f"# mount the files of `stateflow certs issue` at {TLS}, readable by user {USER}",
        *(f"ENV {name}={file}" for name, file in _tls().items()),
        f"EXPOSE {PORTS[plan.role]}",
        *([f"ENV STATE_DIRECTORY={DATA}"] if plan.role == "controller" else []),
        "STOPSIGNAL SIGTERM",
        'ENTRYPOINT ["stateflow"]',
        f"CMD {json.dumps(command)}",
    ]
    return {"Dockerfile": "\n".join(lines) + "\n"}


def compose(plan: Plan) -> dict[str, str]:
    service = plan.name or f"{plan.role}{'-' + plan.site if plan.site else ''}"
    port = PORTS[plan.role]
    # others reach the process by its container's name, which outlasts restarts like the data
    described: dict[str, Any] = {
        "build": ".",
        "image": plan.image,
        "hostname": service,
        "command": plan.arguments(service, f"0.0.0.0:{port}", f"{service}:{port}", DATA),
        "init": True,
        "restart": "unless-stopped",
        "stop_grace_period": f"{60 if plan.role == 'agent' else 30}s",
        "volumes": [f"{service}:{DATA}", f"./{service}-tls:{TLS}:ro"],
        "environment": _tls(),
        "env_file": [{"path": f"{SECRETS}.env", "required": False}],
        "ulimits": {"nofile": 1 << 20},
    }
    if plan.memory:
        described["mem_limit"] = plan.memory.removesuffix("i").lower()
    if plan.role == "controller":
        described["ports"] = [f"{port}:{port}"]
    text = _yaml([_each_text({"services": {service: described}, "volumes": {service: {}}}, _composed)])
    return {"compose.yaml": text, **docker(plan)}


def _composed(text: str) -> str:
    """Returns the text with escaped ``$``, which compose would otherwise expand."""
    return text.replace("$", "$$")


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _each_text(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # no aliases: people read and change these files
        return True


def _yaml(documents: list[Any]) -> str:
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False)
    assert isinstance(text, str)
    return text


# -- Kubernetes ------------------------------------------------------------------------------------------------------


def kubernetes(plan: Plan) -> dict[str, str]:
    """Returns manifests, file name → text. Raises InvalidArgument for a name that Kubernetes would refuse."""
    name = plan.name or f"stateflow-{plan.role}{'-' + plan.site if plan.site else ''}"
    if _DNS.fullmatch(name) is None:
        raise InvalidArgument(
            f"{name!r} is not a Kubernetes name",
            remedy="pass --name with at most 42 characters: lower-case letters, digits and '-'",
        )
    labels = {"app.kubernetes.io/name": "stateflow", "app.kubernetes.io/component": plan.role,
              "app.kubernetes.io/instance": name}  # fmt: skip
    port, host = PORTS[plan.role], f"$(POD_NAME).{name}"
    metadata = {"name": name, "namespace": plan.namespace, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # a process that has no lease yet must be reached, too
            "selector": labels,
            "ports": [{"name": "grpc", "port": port}],
        },
    }
    spec = {
        "serviceName": name,
        "replicas": plan.count,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "terminationGracePeriodSeconds": plan.grace_s,
                "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
                "containers": [_container(plan, port, host)],
                "volumes": [
                    {"name": "tmp", "emptyDir": {}},
                    # ca.pem, crl.pem, and for each pod POD.cert.pem and POD.key.pem
                    {"name": "tls", "secret": {"secretName": f"{name}-tls", "defaultMode": 0o440}},
                ],
            },
        },
        "volumeClaimTemplates": [
            {
                "metadata": {"name": "data"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": plan.storage}}},
            }
        ],
    }
    stateful = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }
    return {f"{name}.yaml": _yaml([service, stateful, budget])}


def _literal(plan: Plan) -> Plan:
    """Returns the plan with ``$(NAME)`` escaped in labels, where Kubernetes would expand it.

    No other value of a plan may contain it.
    """
    return replace(
        plan, labels={key.replace("$(", "$$("): each.replace("$(", "$$(") for key, each in plan.labels.items()}
    )


def _container(plan: Plan, port: int, host: str) -> dict[str, Any]:
    def probe(service: str, failures: int) -> dict[str, Any]:
        # asked within the container, because a kubelet has no certificate
        ask = f'stateflow health "{host.replace("$(POD_NAME)", "$POD_NAME")}:{port}" --service {service}'
        command = {"command": ["sh", "-c", ask]}
        return {"exec": command, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": failures}

    resources: dict[str, dict[str, str]] = {"requests": {"cpu": str(plan.workers)}}
    if plan.memory:
        resources["requests"]["memory"] = plan.memory
        resources["limits"] = {"memory": plan.memory}
    container: dict[str, Any] = {
        "name": plan.role,
        "image": plan.image,
        "command": ["stateflow"],
        "args": _literal(plan).arguments("$(POD_NAME)", f"0.0.0.0:{port}", f"{host}:{port}", DATA),
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *({"name": variable, "value": file} for variable, file in _tls("$(POD_NAME).").items()),
        ],
        "envFrom": [{"secretRef": {"name": SECRETS, "optional": True}}],
        "ports": [{"name": "grpc", "containerPort": port}],
        "startupProbe": probe("live", 120),  # the process first reads its state
        "livenessProbe": probe("live", 3),
        "readinessProbe": probe("ready", 2),
        "resources": resources,
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "data", "mountPath": DATA},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the container has its own
            {"name": "tls", "mountPath": TLS, "readOnly": True},
        ],
    }
    if plan.role == "replica":
        # partitions that cannot be moved away stay in the pod's volume, and are served when the pod is back
        drain = f'stateflow drain "$POD_NAME" --controller {shlex.quote(plan.controller)} || true'
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", drain]}}}
    if plan.role == "controller":
        container["env"].append({"name": "STATE_DIRECTORY", "value": DATA})  # for the ledger, unless that has a URL
    return container


KINDS = {"systemd": systemd, "docker": docker, "compose": compose, "kubernetes": kubernetes}


# -- The command -----------------------------------------------------------------------------------------------------

app = Commands()
MONITORING = "prometheus"


@app.command()
def generate(
    kind: Annotated[str, typer.Argument(help=f"Kind of files: {', '.join((*KINDS, MONITORING))}.")],
    role: Annotated[
        str, typer.Option("--for", help="Role of the process: agent, replica or controller; none for prometheus.")
    ] = "",
    site: Annotated[str, typer.Option(help="Site of the process; none for a controller.")] = "",
    controller: Controller = LOCAL,
    name: Annotated[str, typer.Option(help="Name of the process; default: from the role and the site.")] = "",
    data_dir: Annotated[str, typer.Option(help="For systemd: data directory; default: below /var/lib/stateflow.")] = "",
    user: Annotated[str, typer.Option(help="For systemd: user that runs the process.")] = "stateflow",
    image: Annotated[str, typer.Option(help="For compose and Kubernetes: container image.")] = "stateflow",
    count: Annotated[int, typer.Option(help="For Kubernetes: number of replicas.", min=1)] = 1,
    workers: Annotated[int, typer.Option(help="Worker processes of a replica.", min=1)] = 1,
    memory: Annotated[str, typer.Option(help="Memory limit, e.g. 2Gi; default: none.")] = "",
    storage: Annotated[str, typer.Option(help="For Kubernetes: volume size of each replica, e.g. 50Gi.")] = "10Gi",
    namespace: Annotated[str, typer.Option(help="For Kubernetes: namespace.")] = "default",
    grace: Annotated[int, typer.Option(help="For Kubernetes: termination grace period, in seconds.", min=30)] = 600,
    label: Annotated[list[str] | None, typer.Option(help="Label key=value of an agent; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; default: standard output.")] = None,
    as_json: Json = False,
) -> None:
    """Write the files to run a process with systemd, Docker, compose or Kubernetes, or to monitor all processes with
    Prometheus and Grafana. The command starts nothing."""
    if kind not in (*KINDS, MONITORING):
        raise InvalidArgument(f"unknown kind {kind!r}", remedy=f"use {', '.join((*KINDS, MONITORING))}")
    if kind == MONITORING:
        _write(monitoring(), out, as_json)
        return
    plan = Plan(
        role,
        site=site,
        controller=controller,
        name=name,
        data_dir=data_dir,
        executable=shutil.which("stateflow") or str(Path(sys.executable).with_name("stateflow")),
        user=user,
        image=image,
        count=count,
        workers=workers,
        memory=memory,
        storage=storage,
        namespace=namespace,
        grace_s=grace,
        labels=labels_of(label or []),
    )
    _write(KINDS[kind](plan), out, as_json)


def _write(files: Mapping[str, str], out: Path | None, as_json: bool) -> None:
    if out is None:
        if as_json:
            emit({"files": files})
            return
        for file, text in files.items():
            print(f"# {file}\n{text}" if len(files) > 1 else text, end="")
        return
    out.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (out / file).write_text(text, encoding="utf-8")
    if as_json:
        emit({"files": [str(out / file) for file in files]})
    else:
        console.print("\n".join(str(out / file) for file in files))
