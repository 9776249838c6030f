"""Network namespaces as edge sites. One bridge connects the namespaces, by links with a delay and a rate.

This needs root and ``ip``; links that are not plain need ``tc``, and netem in the kernel. Everything that is created
here is removed again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateflow.security.plain import environment
from stateflow.testing import LocalCluster

_PREFIX = f"sf{os.getpid() % 100_000}"
#: a subnet that differs between processes, because two bridges of one subnet would receive each other's answers
SUBNET = f"10.213.{os.getpid() % 254 + 1}"
HOST = f"{SUBNET}.1"


@dataclass(frozen=True, slots=True)
class Link:
    """A link between a site and the others. Each packet waits for half of the round trip at its sender's end.

    ``mbit`` is the rate in Mbit a second; 0: no limit.
    """

    rtt_ms: float = 0.0
    mbit: float = 0.0

    @property
    def plain(self) -> bool:
        return not self.rtt_ms and not self.mbit

    def __str__(self) -> str:
        return f"{self.rtt_ms:g} ms, {f'{self.mbit:g} Mbit' if self.mbit else 'unlimited'}"


class CannotShape(Exception):
    """Raised if the machine has no network namespaces, or cannot shape their links. The message has the reason."""


def probe(link: Link) -> str:
    """Returns the reason why this machine cannot make such a link; empty: it can."""
    try:
        with network(["probe"], link):
            return ""
    except CannotShape as error:
        return str(error)


@contextlib.contextmanager
def network(sites: Sequence[str], link: Link) -> Iterator[dict[str, tuple[str, str]]]:
    """Makes the network of the sites, and removes it at the end of the block.

    Yields site → (namespace, address). This process has the address ``HOST``. Raises CannotShape. No other process uses
    these links, so this process and those that it starts use plain text on them.
    """
    if os.geteuid() != 0:
        raise CannotShape("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise CannotShape(f"there is no {missing[0]} command: apt-get install iproute2")
    bridge = f"{_PREFIX}br"
    with contextlib.ExitStack() as undo:
        undo.enter_context(environment({"STATEFLOW_INSECURE": "1"}))
        _run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(_quietly, "ip", "link", "del", bridge)
        _run("ip", "addr", "add", f"{HOST}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        found = {}
        for number, site in enumerate(sites):
            space, outer, inner = f"{_PREFIX}{site}", f"{_PREFIX}o{number}", f"{_PREFIX}i{number}"
            address = f"{SUBNET}.{number + 10}"
            _run("ip", "netns", "add", space)
            undo.callback(_quietly, "ip", "netns", "del", space)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
            undo.callback(_quietly, "ip", "link", "del", outer)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "link", "set", inner, "netns", space)
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", inner)
            _run("ip", "-n", space, "link", "set", inner, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            if not link.plain:
                shape = ["delay", f"{link.rtt_ms / 2:g}ms", "limit", "100000"]
                shape += ["rate", f"{link.mbit:g}mbit"] if link.mbit else []
                _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", inner, "root", "netem", *shape)
            found[site] = space, address
        yield found


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        what = "no netem in this kernel" if "netem" in command else " ".join(command[:4])
        raise CannotShape(f"{what}: {said[-1] if said else 'failed'}")


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=30, check=False)


class SpacedCluster(LocalCluster):
    """A LocalCluster with one replica for each site, which runs in the site's namespace. The controller runs outside of
    the namespaces."""

    def __init__(self, *operators: type, spaces: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*operators, sites=dict.fromkeys(spaces, 1), **options)
        self._spaces = {f"{site}-0": where for site, where in spaces.items()}

    def _listen(self, name: str) -> str:
        return f"{self._spaces[name][1] if name in self._spaces else HOST}:0"

    def _within(self, name: str) -> Sequence[str]:
        return ["ip", "netns", "exec", self._spaces[name][0]] if name in self._spaces else []
