"""The unit tests of a change: ``make quick``, before a commit.

    python -m tests.quick [REVISION]     # what changed since then and is not committed; HEAD by default

Tests that changed run whole. Tests that import a changed module run, nearest first, until their durations in
``durations.json`` add up to the budget; the run says how many files were left out. Tests that start processes are left
to ``make test``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp

from tests.gate import ROOT, Durations

#: seconds of tests, on two workers; with ruff and mypy it is a minute and a half
BUDGET_S = 80.0
PACKAGES = ("stateflow", "reconfig", "tests")
AT_WORK = "not processes and not spark and not browser and not thorough"


def changed_files(since: str) -> list[str]:
    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def nearest_first(graph: grimp.ImportGraph, changed: set[str]) -> list[str]:
    """Returns the changed modules and those that import them, by the number of imports between."""
    found, edge = list[str](), set(changed)
    seen = set(changed)
    while edge:
        found += sorted(edge)
        edge = {by for module in edge for by in graph.find_modules_that_directly_import(module)} - seen
        seen |= edge
    return found


def main() -> int:
    changed = {module_of(file) for file in changed_files(*sys.argv[1:2] or ["HEAD"]) if file.endswith(".py")}
    graph = grimp.build_graph(*PACKAGES)
    durations, wanted, spent, left_out = Durations.read(), list[str](), 0.0, 0
    for module in nearest_first(graph, changed & graph.modules):
        file = module.replace(".", "/") + ".py"
        if not module.rpartition(".")[2].startswith("test_") or not Path(ROOT, file).exists():
            continue
        seconds = durations.of_file(file) / 2
        if module in changed or spent + seconds <= BUDGET_S:
            wanted.append(file)
            spent += seconds
        else:
            left_out += 1
    if left_out:
        print(f"{left_out} files of tests that are further away are left to make test")
    if not wanted:
        print("nothing changed that a unit test imports")
        return 0
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", AT_WORK, *wanted]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == 5 else status  # 5: all of them were deselected


if __name__ == "__main__":
    sys.exit(main())
