"""Commands for credentials. ``stateflow certs`` runs a private authority, which issues certificates to processes and
people. ``stateflow token`` issues tokens for some hours, to people and jobs that cannot use certificates.
"""

from __future__ import annotations

import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stateflow.cli.group import Commands
from stateflow.cli.output import Json, console, emit, seconds
from stateflow.cli.show import new_table
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import BadCertificate
from stateflow.private import state_directory

if TYPE_CHECKING:
    from stateflow.security.authority import Issued
    from stateflow.security.certificates import Certificate

app = Commands()


certs_commands = Commands("certs", help="TLS certificates from your own authority.")
app.add_typer(certs_commands)
Dir = Annotated[
    Path | None, typer.Option("--dir", help="Directory of the authority.", show_default="a directory of this user")
]
Days = Annotated[int, typer.Option(help="Validity of the certificate, in days.", min=1)]
Out = Annotated[
    Path | None, typer.Option("--out", help="Directory for the certificate's files.", show_default="./NAME")
]


def authority_directory(given: Path | None) -> Path:
    return given or state_directory() / "authority"


@certs_commands.command()
def init(
    directory: Dir = None,
    name: Annotated[str, typer.Option(help="Common name of the authority.")] = "stateflow",
    as_json: Json = False,
) -> None:
    """Create an authority. The authority's key stays here; every process and person gets the authority's
    certificate."""
    from stateflow.security.authority import Authority
    from stateflow.security.plain import CA

    where = authority_directory(directory)
    Authority.init(where, name)
    if as_json:
        emit({"dir": str(where), "ca": str(where / CA)})
    else:
        console.print(f"The authority is in {where}. Its key can impersonate any process or user: keep a copy offline.")


@certs_commands.command()
def issue(
    name: Annotated[str, typer.Argument(help="Name of the node, agent, controller, person or program.")],
    role: Annotated[str, typer.Option(help="Role: node, agent, controller, admin, operate, data, query or read.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Host name or address at which others reach it; repeatable.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="Operator to which the role `query` or `data` is limited; repeatable.")
    ] = None,
    out: Out = None,
    days: Days = 90,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a certificate, its key, and the files for verifying others, for one process or person."""
    from stateflow.security.authority import Authority
    from stateflow.security.roles import Identity

    where = out or Path(name)
    identity = Identity.of(role, name, tuple(operator or ()))
    _say(Authority(authority_directory(directory)).issue(identity, host or [], where, days), where, as_json)


@certs_commands.command()
def renew(
    name: Annotated[
        str,
        typer.Argument(
            help="Renew the certificate in ./NAME, where `certs issue NAME` wrote it, or in the directory of --out."
        ),
    ],
    out: Out = None,
    days: Days = 90,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a new certificate and key for the same name, role and hosts. Running processes load both by themselves."""
    from stateflow.security.authority import Authority

    where = out or Path(name)
    _say(Authority(authority_directory(directory)).renew(where, days), where, as_json)


def _say(certificate: Certificate, where: Path, as_json: bool) -> None:
    from stateflow.security.plain import CA, CRL, OWN_CERT, OWN_KEY

    files = {"CA": CA, "CERT": OWN_CERT, "KEY": OWN_KEY, "CRL": CRL}
    environment = {f"STATEFLOW_TLS_{which}": str((where / file).absolute()) for which, file in files.items()}
    if as_json:
        emit({**fields_of(certificate), "dir": str(where), "environment": environment})
        return
    console.print(f"{certificate.identity} until {certificate.not_after:%Y-%m-%d %H:%M} UTC, in {where}", style="dim")
    for key, value in environment.items():
        console.print(f"export {key}={shlex.quote(value)}", highlight=False, soft_wrap=True)


@certs_commands.command()
def revoke(
    who: Annotated[str, typer.Argument(metavar="WHO", help="ROLE/NAME, NAME, or a serial number.")],
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Add certificates to the list of those that servers refuse. Copy the list to every server."""
    from stateflow.security.authority import Authority

    authority = Authority(authority_directory(directory))
    found = authority.revoke(who)
    if as_json:
        emit({"revoked": [fields_of(each) for each in found], "crl": str(authority.crl)})
        return
    for each in found:
        console.print(f"{each.identity} revoked (serial {each.serial:x})")
    console.print(f"Servers refuse them once their STATEFLOW_TLS_CRL is a copy of {authority.crl}")


@certs_commands.command("list")
def list_(directory: Dir = None, as_json: Json = False) -> None:
    """List the issued certificates and their expiry."""
    from stateflow.security.authority import Authority
    from stateflow.security.certificates import utc

    now = utc(SYSTEM_CLOCK)
    issued = Authority(authority_directory(directory)).issued()
    if as_json:
        emit({"certificates": [fields_of(each.certificate) | {"state": each.state(now)} for each in issued]})
        return
    table = new_table("name", "state", "valid until (UTC)", "days", "hosts", "operators", "serial")
    for each in issued:
        table.add_row(*_row(each, each.state(now), (each.certificate.not_after - now).days))
    console.print(table)


def _row(issued: Issued, state: str, days: int) -> list[str]:
    certificate, identity = issued.certificate, issued.certificate.identity
    operators = () if identity is None else identity.operators
    until = f"{certificate.not_after:%Y-%m-%d %H:%M}"
    hosts = ", ".join(certificate.hosts)
    return [str(identity), state, until, str(days), hosts, ", ".join(operators), f"{certificate.serial:x}"]


def fields_of(certificate: Certificate) -> dict[str, Any]:
    identity = certificate.identity
    assert identity is not None  # it was issued by this program
    return {
        "name": identity.name,
        "role": str(identity.role),
        "operators": list(identity.operators),
        "hosts": list(certificate.hosts),
        "serial": f"{certificate.serial:x}",
        "not_before": certificate.not_before.isoformat(),
        "not_after": certificate.not_after.isoformat(),
    }


token_commands = Commands("token", help="Short-lived tokens for people and Spark jobs.")
app.add_typer(token_commands)


@token_commands.command("issue")
def issue_token(
    name: Annotated[str, typer.Argument(help="Name of the person or job.")],
    role: Annotated[str, typer.Option(help="Role: read, query, data, operate or admin.")],
    lasts: Annotated[str, typer.Option("--for", help="Lifetime, e.g. 90s, 15m, 8h, 7d; at most 31d.")] = "8h",
    operator: Annotated[
        list[str] | None, typer.Option(help="Operator to which the role `query` or `data` is limited; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New file for the token, readable only by its owner.")
    ] = None,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Issue a token: print it, or write it to a file. The token is stored nowhere else. Keep it as secret as a key."""
    from stateflow.security.authority import Authority, write_private
    from stateflow.security.roles import Identity

    identity = Identity.of(role, name, tuple(operator or ()))
    text, said = Authority(authority_directory(directory)).token(identity, timedelta(seconds=seconds(lasts)))
    told = f"{said.identity} until {said.not_after:%Y-%m-%d %H:%M:%S} UTC"
    if out is not None:
        write_private(out, text.encode() + b"\n")
    if as_json:
        emit({**fields_of(said), **({"token": text} if out is None else {"file": str(out)})})
    elif out is not None:
        console.print(f"{told}, in {out}", style="dim")
        console.print(
            f"export STATEFLOW_TOKEN_FILE={shlex.quote(str(out.absolute()))}", highlight=False, soft_wrap=True
        )
    else:
        print(told, file=sys.stderr)
        print(text)


@token_commands.command("show")
def show_token(
    file: Annotated[
        Path | None, typer.Argument(help="Token file; default: the token that the environment names.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a token's owner and its end of validity. The token itself is not shown."""
    from stateflow.security.certificates import TlsFiles, utc
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
