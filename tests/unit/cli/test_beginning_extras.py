"""The demonstration where its optional packages are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stateflow.cli.beginning import NEEDED, check_extras

#: makes the import of one of these fail, as if it were not installed
WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
importlib.util.find_spec = lambda name, package=None: None if name in {packages!r} else find(name, package)
sys.meta_path.insert(0, Lacking())
sys.argv = ["stateflow", "demo"]
from stateflow.cli import main
main()
"""


@pytest.mark.parametrize("lacking", [NEEDED, ("plotly",)], ids=["all", "one"])
def test_it_says_at_once_what_to_install(lacking: tuple[str, ...]) -> None:
    program = WITHOUT.format(packages=set(lacking))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"extra_missing: the demonstration needs {', '.join(lacking)}: pip install 'stateflow-streams[demo]'\n"
    )


def test_here_all_is_there() -> None:
    check_extras()
