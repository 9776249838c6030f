"""Damage to a replica's files before it starts, and their later return from quarantine."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from stateflow.partition.data_directory import PART, UNFINISHED
from tests.simulation.sim.disk import Dir, File
from tests.simulation.sim.oracle import Violation
from tests.simulation.sim.world import REPLICAS, World

SHARE = 0.3  # of all seeds
AWAY_S = 4.0  # longest time that the replica stays down
MENDED_AFTER_S = 15.0
NOTICED_AFTER_S = 10.0  # seconds in which the cluster notices that a copy is back


class Damage:
    """Damages the files of one replica while it is down: a copy of a partition, or an operator's description.

    A damaged copy is later mended, and put back if the replica has quarantined it. The replica that owns the partition
    by then must stay its owner.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.seed}:damage")

    def plan(self, within_s: float) -> None:
        if self._random.random() < SHARE:
            self._world.loop.at(1 + self._random.random() * within_s, None, self._strike)

    def _strike(self) -> None:
        world, name = self._world, self._random.choice(REPLICAS)
        world.kill(name)
        operator = _dir(world.disks[name].root, "data", "operators", "Flow")
        homes = [] if operator is None else sorted(n for n, node in operator.entries.items() if isinstance(node, Dir))
        copies = [
            (home, copy)
            for home in homes
            for copy, node in sorted(_dir(operator, home).entries.items())  # type: ignore[union-attr]
            if isinstance(node, Dir)
            and "CURRENT" in node.entries
            and not copy.endswith(PART)
            and UNFINISHED not in node.entries  # a replica removes unfinished copies at every start
        ]
        if operator is not None and copies:
            if "operator.json" in operator.entries and self._random.random() < 0.2:
                world.log(f"{name}: its operator's description is damaged")
                operator.entries["operator.json"] = world.disks[name].new(b'{"na')
            else:
                self._hurt(name, *self._random.choice(copies))
        world.loop.at(world.loop.now + AWAY_S * self._random.random(), None, world.start, name)

    def _hurt(self, name: str, home: str, copy: str) -> None:
        directory = _dir(self._world.disks[name].root, "data", "operators", "Flow", home, copy)
        assert directory is not None
        ssts = sorted(entry for entry in directory.entries if entry.endswith(".sst"))
        kinds = ["CURRENT"] + ["sst"] * bool(ssts)
        if directory.log is not None and directory.log.records:
            kinds.append("log")
        kind = self._random.choice(kinds)
        self._world.damaged += 1
        self._power_losses = self._world.counts.power_losses
        # whether the replica has lost power and has not started since
        self._after_power_loss = self._world.programs[name].power_lost
        self._world.log(f"{name} {home}/{copy}: its {kind} is damaged")
        mended = lambda: False  # noqa: E731
        if kind == "log":
            log = directory.log
            assert log is not None
            log.damaged_at, mend = self._random.randrange(len(log.records)), lambda: setattr(log, "damaged_at", None)
            mended = lambda: log.damaged_at is None  # noqa: E731
        else:
            entry = "CURRENT" if kind == "CURRENT" else self._random.choice(ssts)
            file = directory.entries.pop(entry)
            directory.durable.pop(entry, None)
            mend = lambda: directory.put(entry, file)  # type: ignore[arg-type] # noqa: E731
        world = self._world
        world.loop.at(world.loop.now + MENDED_AFTER_S, None, self._mend, name, home, copy, directory, mend, mended)

    def _mend(
        self, name: str, home: str, copy: str, directory: Dir, mend: Callable[[], None], mended: Callable[[], bool]
    ) -> None:
        """Mends the damage and puts a quarantined copy back. Reports a violation if the damaged copy is gone.

        Args:
            mend: mends the damage.
            mended: tells whether the replica has already mended the copy with its commit log. If so, the copy need not
                exist any more, as the partition may have moved since.
        """
        world, root = self._world, self._world.disks[name].root
        world.kill(name)
        whole = mended()
        mend()
        if self._after_power_loss or world.counts.power_losses > self._power_losses:
            world.programs[name].power_lost = True  # the quarantined copy may have lost records to the power loss, too
        at_home = _made(root, "data", "operators", "Flow", home)  # the quarantined copy may be all that is left
        evidence = _dir(root, "data", "evidence", "Flow")
        for name_there, node in [] if evidence is None else list(evidence.entries.items()):
            if name_there.startswith(f"{home}-") and isinstance(node, Dir) and directory in node.entries.values():
                world.log(f"{name} {home}/{copy} is mended, of a deployment that was taken back")
                world.start(name)
                world.loop.at(world.loop.now + NOTICED_AFTER_S, None, self._mended)
                return
        aside = _dir(root, "data", "evidence", "Flow", home)
        kept = [] if aside is None else [n for n, node in aside.entries.items() if node is directory]
        if kept:
            assert aside is not None
            world.log(f"{name} {home}/{copy} is mended and put back")
            del aside.entries[kept[0]]
            aside.durable = dict(aside.entries)
            at_home.entries[copy if copy not in at_home.entries else f"{copy}-mended"] = directory
            at_home.durable = dict(at_home.entries)
        elif not whole and directory not in at_home.entries.values():
            world.fail(Violation(f"{home}/{copy} of {name} was damaged, and is gone"))
        world.start(name)
        world.loop.at(world.loop.now + NOTICED_AFTER_S, None, self._mended)

    def _mended(self) -> None:
        self._world.damaged -= 1


def _made(root: Dir, *names: str) -> Dir:
    for name in names:
        root.durable[name] = below = root.entries.setdefault(name, Dir())
        assert isinstance(below, Dir)
        root = below
    return root


def _dir(root: Dir, *names: str) -> Dir | None:
    node: Dir | File | None = root
    for name in names:
        node = node.entries.get(name) if isinstance(node, Dir) else None
    return node if isinstance(node, Dir) else None
