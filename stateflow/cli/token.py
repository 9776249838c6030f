"""``stateflow token``: credentials of some hours for people and jobs, where certificates do not fit."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from stateflow.cli.certs import Dir, authority_directory, fields_of
from stateflow.cli.group import Commands
from stateflow.cli.output import Json, console, emit, seconds
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import BadCertificate

app = Commands("token", help="Short-lived tokens for people and Spark jobs.")


@app.command()
def issue(
    name: Annotated[str, typer.Argument(help="Name of the person or job.")],
    role: Annotated[str, typer.Option(help="Role: read, data, operate or admin.")],
    lasts: Annotated[str, typer.Option("--for", help="Lifetime, e.g. 90s, 15m, 8h, 7d; at most 31d.")] = "8h",
    operator: Annotated[
        list[str] | None, typer.Option(help="Operator to which role `data` is limited; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New file for the token, readable only by its owner.")
    ] = None,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Print a token, or write it to a file. It is kept nowhere else, and is as secret as a key."""
    from stateflow.security.authority import Authority, write_private
    from stateflow.security.identity import Identity

    identity = Identity.of(role, name, tuple(operator or ()))
    text, said = Authority(authority_directory(directory)).token(identity, timedelta(seconds=seconds(lasts)))
    told = f"{said.identity} until {said.not_after:%Y-%m-%d %H:%M:%S} UTC"
    if out is not None:
        write_private(out, text.encode() + b"\n")
    if as_json:
        emit({**fields_of(said), **({"token": text} if out is None else {"file": str(out)})})
    elif out is not None:
        console.print(f"{told}, in {out}", style="dim")
        console.print(f"export STATEFLOW_TOKEN_FILE={out.absolute()}", highlight=False)
    else:
        print(told, file=sys.stderr)
        print(text)


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="Token file; default: the token that the environment names.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show whose token it is, and until when it is valid. The token itself is not shown."""
    from stateflow.security.files import TlsFiles, utc
    from stateflow.security.plain import of_file, tls_files

    if file is not None:
        files: TlsFiles | None = TlsFiles(of_file(file))
    else:
        files = tls_files()
    if files is None or not (file or files.token()):
        raise BadCertificate(
            "there is no token", remedy="name its file, or set STATEFLOW_TOKEN_FILE or STATEFLOW_TOKEN"
        )
    own = files.current().own
    if as_json:
        emit(fields_of(own))
        return
    assert own.identity is not None
    left = (own.not_after - utc(SYSTEM_CLOCK)).total_seconds()
    reaches = f", for {', '.join(own.identity.operators)} only" if own.identity.operators else ""
    console.print(
        f"{own.identity}{reaches}, until {own.not_after:%Y-%m-%d %H:%M:%S} UTC ({max(0, left) / 3600:.1f} h left), "
        f"serial {own.serial:x}",
        highlight=False,
    )
