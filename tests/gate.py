"""Run the gate: the tests that must pass before a change lands, in lanes and within ten minutes.

    python -m tests.gate                       # make test
    python -m tests.gate --tier all            # make test-all; one quarter of it: --shard 2/4
    python -m tests.gate --write-durations     # after a run: keeps the durations of its tests

Tiers
    ``gate``   every test that needs no process of its own, at small sizes; of those on real processes only the
               *promises* of ``promises.toml``.
    ``all``    every test, at the sizes that ``sizes.py`` says.
    ``@pytest.mark.thorough`` leaves a test out of the gate; so does starting processes without being a promise.

Lanes, by what a test needs; each is one pytest of its own
    ``cpu``      computes: one worker for each core, alone on the machine. Nothing in it depends on time.
    ``waiting``  starts processes and waits for them: four workers, beside ``spark``.
    ``spark``    one worker and one JVM for all of its tests.
    ``alone``    slow disks, full disks, links, open files: one after another, at the end.

The gate runs a test that fails in a lane once more, alone, with the same seed. A test that then passes is *flaky*: the
last lines of the run name it. In the lane ``cpu`` it is red all the same; in the others the gate stays green, and
``flaky.toml`` gets an entry.

A skipped test is red unless ``SKIPS`` accepts its reason.

The run ends by itself after its cap, with the names and stacks of the tests that were running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DURATIONS = TESTS / "durations.json"
PROMISES = TESTS / "promises.toml"
PROMISES_PAGE = ROOT / "CONTRIBUTING.md"
FLAKY = TESTS / "flaky.toml"

TIERS = ("gate", "all")
#: workers of each lane. The lanes of one stage run side by side, stages one after another
LANES = {"cpu": 2, "waiting": 4, "spark": 1, "alone": 1}
STAGES = (("cpu",), ("waiting", "spark"), ("alone",))
#: markers of tests that start processes
PROCESSES = {"processes", "spark", "browser"}

#: wall time, in seconds on two cores, that the lanes of the gate may take together
BUDGET_S = 540.0
CAP_S = {"gate": 20 * 60.0, "all": 90 * 60.0}
#: seconds that one test may take while the others of its stage run, by its lane
LONGEST_S = {"cpu": 4.0, "waiting": 40.0, "spark": 40.0, "alone": 40.0}
#: seconds after which a running test is ended with its stack, by its tier
TIMEOUT_S = {"gate": 150, "all": 900}
MAX_FLAKY = 10
#: where more tests fail, chance is not the cause, and no test runs again
MAX_ONCE_MORE = 10
#: characters of a lane's output that are shown
SHOWN = 20_000
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    f"--rootdir={ROOT}",
    "-c",
    str(ROOT / "pyproject.toml"),
)
WORSE = ("passed", "skipped", "failed")
SLOWEST = 10

#: accepted reasons of skipped tests, as patterns of the whole reason: they lie in the machine, in what is installed, or
#: in another command that runs the test. Any other reason turns the run red, so that a test that never runs is noticed
SKIPS = (
    # servers, programs and packages
    r"STATEFLOW_TEST_[A-Z]+_URL names no \w+ server",
    r"no PostgreSQL is installed in /usr/lib/postgresql",
    r"there is no nats-server to start and stop",
    r"there is no Chromium: .+",
    r"there is no python3\.\d+ here that starts",
    r"the source of rows is Java, and there is no javac",
    r"needs a C compiler, on Linux",
    r"(prlimit|systemd) is not here",
    r"(atheris|bytewax) is not installed here",
    r"could not import '(IPython|msgspec|pandas|pydantic)': .+",
    r"this interpreter came without its tests",
    r"C API test only available in a debug build",
    r"an older Arrow has no UUIDs",
    r"(its other blocks run; .+: )?[\w -]+ needs PySpark \d\.\d or newer, and this is \S+",
    # rights, networks and operating systems
    r"mounting is not permitted here",
    r"only root becomes somebody who may not write",
    r"the system allows more here",
    r"no network of its own: .+",
    r"every address is reached from everywhere: .+",
    r"no IPv6 here(: .+)?",
    r"forks on Linux only",
    r"limits of other processes are Linux's",
    r"told by /proc",
    r"another C library keeps its own counsel",
    # other commands
    r"minutes long: run by `make kills`",
    r"python3\.\d+ needs everything installed: make test-all does so",
)


def lane_of(markers: Iterable[str]) -> str:
    """Returns the lane of a test with these markers."""
    markers = set(markers)
    if "alone" in markers:
        return "alone"
    if "spark" in markers:
        return "spark"
    return "waiting" if markers & PROCESSES else "cpu"


def is_in_gate(markers: Iterable[str], promised: bool) -> bool:
    markers = set(markers)
    return promised or not (markers & PROCESSES or "thorough" in markers)


def is_accepted(reason: str) -> bool:
    """Tells whether a test may be skipped for this reason."""
    return any(re.fullmatch(accepted, reason, re.DOTALL) for accepted in SKIPS)


@dataclass(frozen=True, slots=True)
class Promise:
    """One sentence of README or docs/faults.md and the test that proves it.

    ``of``: its section there. ``says``: the sentence. ``test``: a node id; without parameters it stands for all of
    them.
    """

    of: str
    says: str
    test: str

    def is_held_by(self, node_id: str) -> bool:
        return node_id == self.test or node_id.partition("[")[0] == self.test


def promises(path: Path = PROMISES) -> list[Promise]:
    return [Promise(**entry) for entry in tomllib.loads(path.read_text())["promise"]]


def table_of(held: Sequence[Promise], durations: Durations) -> str:
    """Renders the promises as CONTRIBUTING.md shows them, with seconds."""
    seconds = defaultdict[Promise, float](float)
    for tests in durations.lanes.values():
        for node_id, spent in tests.items():
            for promise in held:
                if promise.is_held_by(node_id):
                    seconds[promise] += spent
    rows, section = ["| promise | test | s |", "|---|---|---|"], ""
    for promise in held:
        if promise.of != section:
            section = promise.of
            rows.append(f"| **{section}** | | |")
        test = promise.test.removeprefix("tests/").removeprefix("integration/")
        rows.append(f"| {promise.says} | `{test}` | {seconds[promise]:.0f} |")
    return "\n".join(rows) + "\n"


def write_table(page: Path = PROMISES_PAGE) -> None:
    """Replaces the table of promises in a page, up to the empty line after it."""
    before, _, rest = page.read_text().partition("| promise | test | s |\n")
    after = rest.partition("\n\n")[2]
    page.write_text(f"{before}{table_of(promises(), Durations.read())}\n{after}")


def files_of(lane: str, tier: str) -> list[str]:
    """Lists the files that may have tests of a lane, so that its workers import no others; empty: all files."""
    if lane == "cpu":
        return []
    if tier == "gate":
        return sorted({promise.test.partition("::")[0] for promise in promises()})
    marked = ["pytest.mark." + marker for marker in sorted(PROCESSES)]
    texts = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    return sorted(str(path.relative_to(ROOT)) for path, text in texts.items() if any(mark in text for mark in marked))


@dataclass(slots=True)
class Durations:
    """Seconds that tests took when ``--write-durations`` was last run: ``lanes[lane][node id] = seconds``.

    Tests that took less than ``SMALL_S`` are added up for each file.
    """

    SMALL_S = 0.2
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = DURATIONS) -> Durations:
        return cls(json.loads(path.read_text()) if path.exists() else {})

    def write(self, path: Path = DURATIONS) -> None:
        path.write_text(json.dumps(self.lanes, indent=1, sort_keys=True) + "\n")

    def of_file(self, file: str) -> float:
        """Adds up the seconds of all tests of a file."""
        return sum(
            seconds
            for tests in self.lanes.values()
            for node_id, seconds in tests.items()
            if node_id.partition("::")[0] == file
        )

    def wall_s(self) -> float:
        """Estimates the gate's wall time in seconds, as if every worker were busy all the time."""
        lane_s = {lane: sum(self.lanes.get(lane, {}).values()) / workers for lane, workers in LANES.items()}
        return sum(max(lane_s[lane] for lane in stage) for stage in STAGES)

    def too_long(self) -> dict[str, float]:
        """Returns the tests that take longer than their lane allows, with their seconds."""
        return {
            node_id: seconds
            for lane, tests in self.lanes.items()
            for node_id, seconds in tests.items()
            if "::" in node_id and seconds > LONGEST_S[lane]
        }


@dataclass(slots=True)
class Journal:
    """The events of each test that the pytest of a lane wrote (``tests/conftest.py``)."""

    seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)  # passed, failed, skipped
    skipped: dict[str, str] = field(default_factory=dict)  # node id, of a test or of a file: reason
    running: dict[str, float] = field(default_factory=dict)  # node id: when it began

    @classmethod
    def read(cls, path: Path) -> Journal:
        journal = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            node_id = entry["test"]
            if "reason" in entry:
                journal.skipped[node_id] = entry["reason"]
            if entry["event"] == "begins":
                journal.running[node_id] = entry["at"]
            elif entry["event"] == "ended":
                journal.running.pop(node_id, None)
            elif entry["event"] != "file":
                journal.seconds[node_id] = journal.seconds.get(node_id, 0.0) + entry["seconds"]
                outcome = entry["outcome"]  # of set-up, call and clean-up the worst counts
                journal.outcomes[node_id] = max(outcome, journal.outcomes.get(node_id, outcome), key=WORSE.index)
        return journal

    def failed(self) -> list[str]:
        return sorted(node_id for node_id, outcome in self.outcomes.items() if outcome == "failed")

    def unaccepted(self) -> dict[str, str]:
        """Returns the skipped tests whose reason ``SKIPS`` does not accept, with their reasons."""
        return {node_id: reason for node_id, reason in self.skipped.items() if not is_accepted(reason)}


def seed_of_commit() -> int:
    """Derives a seed from the commit: the same one on every machine, another one for the next commit."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(found.strip()[:7] or "0", 16)


def slowness() -> float:
    """Measures how many times longer this machine takes just now than a quiet one with two cores; at least 1.

    The time limits of waiting tests are multiplied by it (``tests/integration/support.py``). The worst of three counts:
    a million additions, a process that starts and ends, and a durable write.
    """
    with tempfile.TemporaryFile() as file:

        def write() -> None:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())

        works = {
            0.010: lambda: sum(range(1_000_000)),
            0.020: lambda: subprocess.run([sys.executable, "-S", "-c", ""], check=True),
            0.005: write,
        }
        factors = [1.0]
        for quiet_s, work in works.items():
            began = time.perf_counter()
            for _ in range(5):
                work()
            factors.append((time.perf_counter() - began) / 5 / quiet_s)
    return max(factors)


class Lane:
    """One pytest at work. Its output goes to ``log``; ``wait`` returns when it has ended."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.journal_path = directory / f"{name}.jsonl"
        self.began = time.monotonic()
        self.seconds = 0.0
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, f"--journal={self.journal_path}"],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int | None:
        """Waits for its end and returns the exit status; None: the time is over and the lane still runs."""
        try:
            status = self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None
        self.seconds = time.monotonic() - self.began
        return status

    def journal(self) -> Journal:
        return Journal.read(self.journal_path)

    def end(self) -> None:
        """Makes each of its processes write its stacks (``faulthandler``), then kills all of them."""
        for pid in _pythons_below(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(1)  # one after another, as they write into one file
        self.kill()
        self.seconds = time.monotonic() - self.began

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _pythons_below(pid: int) -> list[int]:
    """Returns the process ids of a pytest and of its xdist workers, without the processes that tests started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [pid]
    for child in children.read_text().split() if children.exists() else ():
        command = Path(f"/proc/{child}/cmdline")
        if command.exists() and b"sys.stdin.readline" in command.read_bytes():
            found.append(int(child))
    return found


class Gate:
    def __init__(self, tier: str, shard: str, extra: Sequence[str], directory: Path) -> None:
        self._tier, self._shard, self._extra, self._directory = tier, shard, list(extra), directory
        self._seed = int(os.environ.get("STATEFLOW_TEST_SEED") or seed_of_commit())
        self._slowness = slowness()
        self._environment = os.environ | {
            "STATEFLOW_TEST_TIER": tier,
            "STATEFLOW_TEST_SEED": str(self._seed),
            "STATEFLOW_TEST_SLOWNESS": f"{self._slowness:.1f}",
            "PYTHONHASHSEED": str(self._seed % (1 << 32)),  # workers collect the same tests, and a run can be repeated
        }
        self._deadline = time.monotonic() + CAP_S[tier]
        self.lanes: list[Lane] = []

    def run(self) -> int:
        """Runs all stages and returns the exit status of the whole."""
        began = time.monotonic()
        print(
            f"tier {self._tier}, seed {self._seed}; {self._slowness:.1f} times as slow as a quiet machine; "
            f"logs in {self._directory}",
            flush=True,
        )
        statuses = dict[str, int | None]()
        try:
            for stage in STAGES:
                statuses |= self._run_stage(stage)
                if None in statuses.values():
                    break
        finally:  # also where this process is told to end
            for lane in self.lanes:
                lane.kill()
        journals = {lane.name: lane.journal() for lane in self.lanes}
        failed = {lane: journal.failed() for lane, journal in journals.items()}
        flaky = dict[str, list[str]]()
        if None not in statuses.values() and sum(map(len, failed.values())) <= MAX_ONCE_MORE:
            for lane, tests in failed.items():
                flaky[lane] = [test for test in tests if self._passes_alone(test)]
                failed[lane] = [test for test in tests if test not in flaky[lane]]
        return self._tell(statuses, journals, failed, flaky, time.monotonic() - began)

    def _timeout_s(self) -> int:
        return int(TIMEOUT_S[self._tier] * self._slowness)

    def _command(self, lane: str) -> list[str]:
        command = [*PYTEST, f"--tier={self._tier}", f"--lane={lane}"]
        command += [f"--timeout={self._timeout_s()}", f"--hypothesis-seed={self._seed}"]
        if LANES[lane] > 1:
            command += ["-n", str(LANES[lane]), "--dist", "loadscope", "--no-loadscope-reorder"]
        if self._shard:
            command += [f"--shard={self._shard}"]
        return [*command, *self._extra, *files_of(lane, self._tier)]

    def _run_stage(self, stage: Sequence[str]) -> dict[str, int | None]:
        lanes = [Lane(name, self._command(name), self._directory, self._environment) for name in stage]
        self.lanes += lanes
        statuses = {lane.name: lane.wait(self._deadline - time.monotonic()) for lane in lanes}
        for lane in lanes:
            if statuses[lane.name] is None:
                lane.end()
            print(f"\n--- {lane.name}: {lane.seconds:.0f} s", flush=True)
            text = lane.log.read_text(errors="replace")
            sys.stdout.write(text if len(text) <= SHOWN else f"… all of it: {lane.log}\n{text[-SHOWN:]}")
            sys.stdout.flush()
        return statuses

    def _passes_alone(self, test: str) -> bool:
        print(f"\n--- once more, alone: {test}", flush=True)
        command = [*PYTEST, f"--timeout={self._timeout_s()}"]
        try:
            done = subprocess.run(
                [*command, f"--hypothesis-seed={self._seed}", test],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                timeout=max(1.0, self._deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _tell(
        self,
        statuses: Mapping[str, int | None],
        journals: Mapping[str, Journal],
        failed: Mapping[str, list[str]],
        flaky: Mapping[str, list[str]],
        seconds: float,
    ) -> int:
        outcomes = {test: outcome for journal in journals.values() for test, outcome in journal.outcomes.items()}
        took = sorted(
            ((spent, test, lane) for lane, journal in journals.items() for test, spent in journal.seconds.items()),
            reverse=True,
        )
        may_be = (0, 1, 5) if self._shard or self._extra else (0, 1)  # 1: tests failed; 5: there were none
        print(f"\nslowest of {len(outcomes)} tests:")
        for spent, test, lane in took[:SLOWEST]:
            print(f"  {spent:6.1f} s  {lane:8} {test}")
        for lane, status in statuses.items():
            if status is None:
                print(f"the cap of {CAP_S[self._tier] / 60:.0f} minutes ended lane {lane}, stacks are above; at work:")
                for test in journals[lane].running:
                    print(f"  {test}")
            elif status not in may_be:
                print(f"lane {lane} ended with status {status}: see its output above")
        named = _flaky_tests()
        for lane, tests in flaky.items():
            for test in tests:
                known = "" if test in named else "; add it to tests/flaky.toml, and find its cause"
                red = "; red, as nothing in this lane may depend on time" if lane == "cpu" else ""
                print(f"FLAKY ({lane}): {test}{red}{known}")
        for tests in failed.values():
            for test in tests:
                print(f"FAILED: {test}")
        reasons = {test: reason for journal in journals.values() for test, reason in journal.skipped.items()}
        unaccepted = {test: reason for journal in journals.values() for test, reason in journal.unaccepted().items()}
        for reason, count in sorted(Counter(reasons.values()).items()):
            print(f"skipped {count}: {reason}")
        for test, reason in sorted(unaccepted.items()):
            print(f"SKIPPED: {test}: {reason}; red, as SKIPS in tests/gate.py does not accept this reason")
        said = ", ".join(f"{lane.name} {lane.seconds:.0f} s" for lane in self.lanes)
        print(f"{said}; {seconds / 60:.1f} minutes in all, cap {CAP_S[self._tier] / 60:.0f}")
        counts = defaultdict(int)
        for test, outcome in outcomes.items():
            counts["passed" if any(test in tests for tests in flaky.values()) else outcome] += 1
        ended_badly = any(status not in may_be for status in statuses.values())
        unexplained = any(status == 1 and not journals[lane].failed() for lane, status in statuses.items())
        red = ended_badly or unexplained or any(failed.values()) or bool(flaky.get("cpu")) or bool(unaccepted)
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}", flush=True)
        return 1 if red or not counts["passed"] else 0

    def durations(self) -> Durations:
        found = Durations()
        for lane in self.lanes:
            seconds = defaultdict(float)
            for test, spent in lane.journal().seconds.items():
                seconds[test if spent >= Durations.SMALL_S else test.partition("::")[0]] += spent
            found.lanes[lane.name] = {test: round(spent, 1) for test, spent in seconds.items()}
        return found


def _flaky_tests(path: Path = FLAKY) -> set[str]:
    return {entry["test"] for entry in flaky_entries(path)}


def flaky_entries(path: Path = FLAKY) -> list[dict[str, Any]]:
    """Reads the entries of flaky.toml: ``test``, ``seed``, ``day`` and ``suspected`` of each."""
    return list(tomllib.loads(path.read_text()).get("flaky", [])) if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", choices=TIERS, default="gate")
    parser.add_argument("--shard", default="", metavar="I/N", help="the I-th of N parts of the files, from 1 on")
    parser.add_argument("--write-durations", action="store_true", help="keep what tests took in tests/durations.json")
    parser.add_argument("extra", nargs="*", help="further arguments for each pytest, behind --")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="stateflow-gate-"))
    gate = Gate(arguments.tier, arguments.shard, arguments.extra, directory)
    status = gate.run()
    if arguments.write_durations:
        gate.durations().write()
        write_table()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests started with nohup and & would ignore it, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
