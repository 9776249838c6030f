"""Completion by the Tab key of names that a cluster, a ledger or a checkpoint store knows, beside commands and options.

The user waits for the answer. Each of these is therefore asked for a moment only. Without an answer nothing is offered
and no error is printed: the command itself will say what is wrong.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import typing
from collections.abc import Callable, Iterable
from typing import Any

import typer

Offers = Iterable[tuple[str, str]]
#: source of offers, which gets the command line so far
Ask = Callable[["Said"], Offers]
ANSWER_S = 1.0
#: seconds in which a controller that can be reached is reached
CONNECT_S = 0.5
#: key in a context's ``meta``: its settings cannot be read, so the cluster is not known
UNCONFIGURED = "stateflow.unconfigured"
#: how many of the newest are offered from a long list
NEWEST = 20


class Said:
    """The command line so far."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def of(self, name: str, variable: str = "", default: str = "") -> str:
        return self._given.get(name) or os.environ.get(variable) or default

    def cluster(self) -> Any:
        from stateflow.cli.options import LOCAL
        from stateflow.rpc.cluster_client import ClusterClient

        return ClusterClient(self.of("controller", "STATEFLOW_CONTROLLER", LOCAL), CONNECT_S)


def operators(said: Said) -> Offers:
    return [(each.name, f"{each.partitions} partitions") for each in said.cluster().status().operators]


def replicas(said: Said) -> Offers:
    return [(each.name, f"at {each.site}") for each in said.cluster().status().replicas]


def sites(said: Said) -> Offers:
    return [(site, "site") for site in dict.fromkeys(each.site for each in said.cluster().status().replicas)]


def places(said: Said) -> Offers:
    """Returns sites and replicas to which partitions can be moved."""
    found = said.cluster().status().replicas
    return [
        *((site, "site") for site in dict.fromkeys(each.site for each in found)),
        *((each.name, f"at {each.site}") for each in found),
    ]


def agents(said: Said) -> Offers:
    return [(each.name, f"at {each.site}") for each in said.cluster().agents()]


def where_agents_are(said: Said) -> Offers:
    found = said.cluster().agents()
    return [
        *((site, "site") for site in dict.fromkeys(each.site for each in found)),
        *((each.name, f"agent at {each.site}") for each in found),
    ]


def resting(said: Said) -> Offers:
    return [(each.node, "in maintenance") for each in said.cluster().status().maintenance]


def reconfigurations(said: Said) -> Offers:
    return [(each.id, f"{each.operator}, {each.state.lower()}") for each in said.cluster().reconfigurations(NEWEST)]


def jobs(said: Said) -> Offers:
    return [(each.name, f"{each.do}, {each.schedule}") for each in said.cluster().jobs()]


def runs(said: Said) -> Offers:
    return [(run.id, job.name) for job in said.cluster().jobs() for run in job.runs[-NEWEST:]]


def batches(said: Said) -> Offers:
    from stateflow.cli.ledger import opened_at
    from stateflow.ledger import Board

    with opened_at(said.of("url", "STATEFLOW_LEDGER")) as opened:
        return [(row["bid"], f"{row['name']}, {row['status']}") for row in Board(opened).batches(None, limit=NEWEST)]


def savepoints(said: Said) -> Offers:
    from stateflow.checkpoint import CheckpointStore
    from stateflow.private import url_of

    store = CheckpointStore(url_of(said.of("url", "STATEFLOW_CHECKPOINTS")), create=False)
    store.check()
    return [(name, f"{len(partitions)} partitions") for name, partitions in store.savepoints().items()]


#: by the parameter's name, where its command has no entry of its own
PARAMETERS: dict[str, Ask] = {
    "agent": agents,
    "bid": batches,
    "operator": operators,
    "replica": replicas,
    "savepoint": savepoints,
    "site": sites,
}
OF_COMMANDS: dict[str, dict[str, Ask]] = {
    "checkpoint restore": {"to": places},
    "job create": {"to": places},
    "maintenance end": {"node": resting},
    "migrate": {"to": places},
    "savepoint delete": {"name": savepoints},
    "savepoint export": {"name": savepoints},
    "spawn": {"at": where_agents_are},
    **{f"job {each}": {"name": jobs} for each in ("info", "pause", "resume", "run-now", "delete")},
    "job result": {"run": runs},
    **{
        f"reconfig {each}": {"id": reconfigurations}
        for each in ("info", "details", "pause", "resume", "edit", "retry", "cancel", "resolve")
    },
}


def completed(called: str, function: Callable[..., Any]) -> None:
    """Makes a command's parameters offer completions.

    Args:
        called: the command, as on the command line.
    """
    known = PARAMETERS | OF_COMMANDS.get(called, {})
    asks = {name: known[name] for name in inspect.signature(function).parameters if name in known}
    hints = typing.get_type_hints(function, include_extras=True) if asks else {}
    for name, ask in asks.items():
        for each in getattr(hints[name], "__metadata__", ()):
            if hasattr(each, "autocompletion"):  # what typer.Argument and Option return
                each.autocompletion = _offering(ask)
        function.__annotations__[name] = hints[name]  # annotations read again as text would be other objects


def _offering(ask: Ask) -> Callable[..., list[tuple[str, str]]]:
    def offer(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        if UNCONFIGURED in ctx.meta:
            return []
        return [each for each in answered(lambda: ask(Said(ctx.params))) if each[0].startswith(incomplete)]

    return offer


def answered(ask: Callable[[], Offers], within_s: float = ANSWER_S) -> list[tuple[str, str]]:
    """Returns the offers; none where asking fails or takes too long."""
    found: list[tuple[str, str]] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            found.extend(ask())

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(within_s)
    return list(found)
