"""Network namespaces as edge sites. One bridge connects the namespaces, by links with a delay and a rate.

This needs root and ``ip``; links that are not plain need ``/dev/net/tun``. Their ends are TAP devices, between which
a process carries the frames (``python -m benchmarks.netns``), as Mahimahi's shells do (Netravali et al., USENIX ATC
2015). So no module of the kernel is needed, and each run reports how late its frames were. Everything that is created
here is removed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateflow.security.plain import environment
from stateflow.testing import LocalCluster

_PREFIX = f"sf{os.getpid() % 100_000}"
#: a subnet that differs between processes, because two bridges of one subnet would receive each other's answers
SUBNET = f"10.213.{os.getpid() % 254 + 1}"
HOST = f"{SUBNET}.1"

_TUN = Path("/dev/net/tun")
#: of linux/if_tun.h; frames carry a virtio header, so that a large segment stays one frame, as on a veth
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_CSUM_TSO4_TSO6 = 0x07
_FRAME_BYTES = 1 << 17
READY = "ready\n"
#: frames that wait on a link; more are dropped
_WAITING = 10_000


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
def network(
    sites: Sequence[str], link: Link, report: dict[str, Any] | None = None
) -> Iterator[dict[str, tuple[str, str]]]:
    """Makes the network of the sites, and removes it at the end of the block.

    Yields site → (namespace, address). This process has the address ``HOST``. If the link is not plain, ``report`` has
    at the end what was carried, in the form of :func:`report_of`. Raises CannotShape. No other process uses these
    links, so this process and those that it starts use plain text on them.
    """
    if os.geteuid() != 0:
        raise CannotShape("network namespaces need root")
    if shutil.which("ip") is None:
        raise CannotShape("there is no ip command: apt-get install iproute2")
    bridge = f"{_PREFIX}br"
    with contextlib.ExitStack() as undo:
        undo.enter_context(environment({"STATEFLOW_INSECURE": "1"}))
        _run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(_quietly, "ip", "link", "del", bridge)
        _run("ip", "addr", "add", f"{HOST}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        found = {}
        ends: list[int] = []
        for number, site in enumerate(sites):
            space, outer, inner = f"{_PREFIX}{site}", f"{_PREFIX}o{number}", f"{_PREFIX}i{number}"
            address = f"{SUBNET}.{number + 10}"
            _run("ip", "netns", "add", space)
            undo.callback(_quietly, "ip", "netns", "del", space)
            if link.plain:
                _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
                undo.callback(_quietly, "ip", "link", "del", outer)
            else:
                ends += [tap(inner), tap(outer)]
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "link", "set", inner, "netns", space)
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", inner)
            _run("ip", "-n", space, "link", "set", inner, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            found[site] = space, address
        if ends:
            undo.enter_context(_carried(link, ends, report if report is not None else {}))
        yield found


def tap(name: str) -> int:
    """Returns the file descriptor of a new TAP device. The device exists until the last descriptor is closed."""
    try:
        end = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise CannotShape(f"{_TUN} cannot be opened: {error.strerror}") from None
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR))
        fcntl.ioctl(end, _TUNSETOFFLOAD, _CSUM_TSO4_TSO6)
    except OSError as error:
        os.close(end)
        raise CannotShape(f"a TAP device cannot be made: {error.strerror}") from None
    return end


@contextlib.contextmanager
def _carried(link: Link, ends: Sequence[int], report: dict[str, Any]) -> Iterator[None]:
    """Runs the process that carries the frames between the ends, which are (inner, outer) of each site in turn."""
    command = [sys.executable, "-m", "benchmarks.netns", f"{link.rtt_ms / 2:g}", f"{link.mbit:g}", *map(str, ends)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=ends,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )
    for end in ends:
        os.close(end)
    try:
        if process.stdout is None or process.stdout.readline() != READY:
            raise CannotShape("the process that carries frames did not start")
        yield
    finally:
        report |= json.loads(process.communicate(timeout=30)[0] or "{}")  # its input ends, and so does it


@dataclass(slots=True)
class Wire:
    """The decisions of a link: when does a frame arrive? A site's frames are sent one after the other at its rate.

    Attributes:
        delay_s: how long a frame travels.
        mbit: rate in Mbit a second; 0: no limit.
        free_s: when the last frame has been sent.
        waiting: frames that travel, with the time of their arrival.
        late_s: how much later than due each frame was given out.
        dropped: number of frames that found too many others waiting.
    """

    delay_s: float
    mbit: float
    free_s: float = 0.0
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    late_s: list[float] = field(default_factory=list)
    dropped: int = 0

    def take(self, frame: bytes, now_s: float) -> None:
        """A site sends a frame."""
        if len(self.waiting) >= _WAITING:
            self.dropped += 1
            return
        self.free_s = max(now_s, self.free_s) + (len(frame) * 8 / (self.mbit * 1e6) if self.mbit else 0.0)
        self.waiting.append((self.free_s + self.delay_s, frame))

    def arrived(self, now_s: float) -> Iterator[bytes]:
        """Yields the frames that are due."""
        while self.waiting and self.waiting[0][0] <= now_s:
            due_s, frame = self.waiting.popleft()
            self.late_s.append(now_s - due_s)
            yield frame


def report_of(wires: Sequence[Wire]) -> dict[str, Any]:
    """Returns the number of frames carried and dropped, and how late they were: ``late_ms`` at p50, p99 and p100."""
    late = sorted(value * 1e3 for wire in wires for value in wire.late_s)
    at = {f"p{share}": round(late[(len(late) - 1) * share // 100], 3) for share in (50, 99, 100)} if late else {}
    return {"frames": len(late), "dropped": sum(wire.dropped for wire in wires), "late_ms": at}


def carry(wires: Sequence[Wire], inner: Sequence[int], outer: Sequence[int], end: int) -> None:
    """Carries frames between the ends of each wire until ``end`` has no more input.

    Those that come from a site travel as its wire decides, those to a site arrive at once.
    """
    while True:
        due = min((wire.waiting[0][0] for wire in wires if wire.waiting), default=None)
        left_s = None if due is None else max(0.0, due - time.monotonic())
        ready = set(select.select([end, *inner, *outer], [], [], left_s)[0])
        for wire, site, host in zip(wires, inner, outer, strict=True):
            if site in ready:
                for frame in _frames(site):
                    wire.take(frame, time.monotonic())
            if host in ready:
                for frame in _frames(host):
                    _put(site, frame)
            for frame in wire.arrived(time.monotonic()):
                _put(host, frame)
        if end in ready:
            return


def _frames(end: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # then the other ends have their turn
            yield os.read(end, _FRAME_BYTES)


def _put(end: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a device that is down or full loses frames, as any other
        os.write(end, frame)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CannotShape(f"{' '.join(command[:4])}: {said[-1] if said else 'failed'}")


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


def main(arguments: Sequence[str]) -> None:
    delay_ms, mbit, *ends = arguments
    inner, outer = [int(end) for end in ends[::2]], [int(end) for end in ends[1::2]]
    wires = [Wire(float(delay_ms) / 1e3, float(mbit)) for _ in inner]
    print(READY, end="", flush=True)
    carry(wires, inner, outer, sys.stdin.fileno())
    print(json.dumps(report_of(wires)))


if __name__ == "__main__":
    main(sys.argv[1:])
