"""``stateflow generate``: files with which systemd, containers or Kubernetes run its processes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from stateflow.cli.group import Commands
from stateflow.cli.options import LOCAL, Controller, Json, labels_of
from stateflow.cli.output import console, emit
from stateflow.cli.unit_files import KINDS, Plan
from stateflow.errors import InvalidArgument
from stateflow.metrics.figures import monitoring

app = Commands()
MONITORING = "prometheus"


@app.command()
def generate(
    kind: Annotated[str, typer.Argument(help=f"{', '.join((*KINDS, MONITORING))}.")],
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
    """Write files with which systemd, Docker, compose or Kubernetes run a process, or Prometheus and Grafana watch all
    of them. Nothing is run."""
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
