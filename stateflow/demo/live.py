"""The live page of the demonstration's cluster, while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.errors import PortInUse
from stateflow.testing import LocalCluster

#: its address if that is free, so that a tab that is open shows the next demonstration too
LISTEN = "127.0.0.1:7071"


@contextmanager
def live_page(local: LocalCluster, console: Console) -> Iterator[Dashboard]:
    """Serves the page, and says where it is."""
    with _at_a_free_port(local) as page:
        console.print(Text.assemble("  live page: ", (page.url, "bold")))
        yield page


def _at_a_free_port(local: LocalCluster) -> Dashboard:
    checkpoints = str(local.data_dir / "checkpoints")
    try:
        return Dashboard(DashboardOptions(local.address, LISTEN, ledger=local.ledger, checkpoints=checkpoints))
    except PortInUse:
        return Dashboard(DashboardOptions(local.address, ledger=local.ledger, checkpoints=checkpoints))
