"""Examples are complete, and agree with their page and the index."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest
import yaml

from stateflow.errors import InvalidArgument
from stateflow.operator.operator import load
from stateflow.project.writing import EXAMPLES, EXAMPLES_DIR, Example, example_named, write_project
from stateflow.spark.pipeline import load_pipeline
from tests.pages import ROOT, blocks

DOCS = ROOT / "docs" / "examples"
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def page(example: Example) -> Path:
    return DOCS / f"{example.name}.md"


def operators(example: Example) -> list[tuple[Path, ast.ClassDef]]:
    found = []
    for file in sorted(example.folder.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Operator" for base in node.bases):
                found.append((file, node))
    return found


@each_example
def test_what_is_written(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(path.name for path in example.folder.iterdir() if path.is_file()) == sorted(example.files)
    written = write_project(tmp_path / "mine", example)
    assert [path.name for path in written] == list(example.files)
    assert (tmp_path / "mine" / "README.md").read_text().startswith("# mine\n")
    monkeypatch.chdir(tmp_path / "mine")
    if "pipeline.yml" in example.files:
        config = load_pipeline(
            Path("pipeline.yml"), {"day": "2026-03-01"} if example.name == "stages" else {}, {}
        ).config
        assert config.name == "mine"
        for step in config.operators:
            load(step.operator)


@each_example
def test_an_operator_is_short_and_has_a_test_of_its_own(example: Example) -> None:
    found = operators(example)
    assert found
    for file, node in found:
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno < 40
        assert f"OperatorHarness({node.name}" in file.with_name(f"test_{file.name}").read_text()


def test_an_example_is_named() -> None:
    assert example_named("fraud").folder == EXAMPLES_DIR / "fraud"
    with pytest.raises(InvalidArgument, match="did you mean 'fraud'"):
        example_named("frauds")
    with pytest.raises(InvalidArgument, match="use one of flights, fraud"):
        example_named("xyz")
    assert sorted(each.name for each in EXAMPLES_DIR.iterdir() if each.is_dir()) == sorted(
        each.name for each in EXAMPLES
    )


def test_modules_of_examples_have_names_of_their_own() -> None:
    """Module names are unique, as mypy and pytest look at all examples at once."""
    modules = [path.name for path in EXAMPLES_DIR.glob("*/*.py")]
    assert len(modules) == len(set(modules))
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert mypy["mypy_path"] == sorted(f"stateflow/examples/{each.name}" for each in EXAMPLES)


# -- their pages ------------------------------------------------------------------------------------------------


@each_example
def test_a_page_shows_the_code_as_it_is(example: Example) -> None:
    """Every block of Python and YAML is a file, or one class or function of it, and all operators are shown."""
    shown = [block for block in blocks(page(example)) if block.kind in ("python", "yaml")]
    texts = [(example.folder / file).read_text() for file in example.files if file.endswith((".py", ".yml"))]
    unknown = [str(block) for block in shown if not any(block.text in text for text in texts)]
    assert unknown == []
    for _, node in operators(example):
        assert any(f"class {node.name}(Operator):" in block.text for block in shown)


@each_example
def test_a_page_begins_with_what_the_project_says(example: Example) -> None:
    """A page begins with the commands of the example's README, after those that write the project."""
    own = [block.text for block in blocks(example.folder / "README.md")]
    shown = [block.text for block in blocks(page(example)) if block.kind == "sh"]
    assert shown[0] == f"stateflow init my-{example.name} --example {example.name}\ncd my-{example.name}\n{own[0]}"
    assert shown[1 : len(own)] == own[1:]
    assert example.run in own[0]


def test_the_index_has_them_all() -> None:
    rows = [line for line in (DOCS / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert rows == [f"| [{each.name}]({each.name}.md) | {each.shows} | {each.uses} |" for each in EXAMPLES]
    assert sorted(path.stem for path in DOCS.glob("*.md")) == sorted(["README", *(each.name for each in EXAMPLES)])


# -- the notebook -----------------------------------------------------------------------------------------------


each_notebook = pytest.mark.parametrize("name", ["move", "connect"])


def cells(name: str) -> dict[str, dict[str, object]]:
    return {cell["id"]: cell for cell in json.loads((EXAMPLES_DIR / "notebook" / f"{name}.ipynb").read_text())["cells"]}


@each_notebook
def test_the_operator_of_the_notebook_is_the_one_that_is_tested(name: str) -> None:
    source = cells(name)["operator"]["source"]
    assert isinstance(source, list)
    (_, node), *_ = operators(example_named("notebook"))
    tested = ast.get_source_segment((EXAMPLES_DIR / "notebook" / "counting.py").read_text(), node)
    assert tested is not None
    assert "".join(source).endswith(tested)


@each_notebook
def test_the_notebook_has_no_outputs(name: str) -> None:
    code = [cell for cell in cells(name).values() if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_pipelines_are_yaml_of_one_document() -> None:
    for file in EXAMPLES_DIR.glob("*/pipeline.yml"):
        assert {"name", "source", "operators", "sink"} <= yaml.safe_load(file.read_text()).keys()
