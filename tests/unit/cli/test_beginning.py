"""``stateflow init`` and ``stateflow examples``: what they print and write."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.project.writing import EXAMPLES
from stateflow.spark.pipeline import load_pipeline

RUNNER = CliRunner()


def test_an_example_is_written_and_how_to_begin_is_said(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["init", str(tmp_path / "cards"), "--example", "gateway"])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "  python outage.py"
    assert (tmp_path / "cards" / "pumps.py").exists()
    done = RUNNER.invoke(app, ["init", str(tmp_path / "alarms")])
    assert done.stdout.splitlines()[-1] == "  stateflow run pipeline.yml --once"


def test_an_unknown_example_writes_nothing(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["init", str(tmp_path / "cards"), "--example", "gatewy"])
    assert done.exit_code != 0
    assert "did you mean 'gateway'?" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_all_are_listed(as_json: bool) -> None:
    done = RUNNER.invoke(app, ["examples", *(["--json"] if as_json else [])])
    assert done.exit_code == 0
    if as_json:
        assert [each["name"] for each in json.loads(done.stdout)["examples"]] == [each.name for each in EXAMPLES]
    else:
        assert all(each.name in done.stdout for each in EXAMPLES)


def test_a_project_that_was_begun_passes_its_own_tests_and_its_pipeline_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RUNNER.invoke(app, ["init", str(tmp_path / "alarms")]).exit_code == 0
    project = tmp_path / "alarms"
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "ops", raising=False)
    found = runpy.run_path(str(project / "test_ops.py"))
    tests = [test for name, test in found.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    del sys.modules["ops"]
    config = load_pipeline(project / "pipeline.yml", {}, {}).config
    assert config.operators[0].operator == "ops.py:Alarms"
    assert list(project.glob(config.source.path)), "what it reads is there"
