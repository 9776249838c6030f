"""Describing an operator, naming the place it lives, and finding it there again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Context, Operator, state
from stateflow.errors import DeclarationError, InvalidArgument, OperatorNotImportable
from stateflow.runtime.operator import describe, key_columns, load, output_schema, target_of
from tests.unit.operators import Count, Outer, Pair


def _class(**members: Any) -> type[Operator]:
    members.setdefault("process", lambda self, row, ctx: None)
    return type("Made", (Operator,), members)


def test_describe() -> None:
    spec = describe(Count, 16)
    assert (spec.name, spec.partitions, spec.key) == ("Count", 16, ("k",))
    assert spec.target == "tests.unit.operators:Count"
    assert pa.ipc.read_schema(pa.py_buffer(spec.output_schema)).names == ["k", "n", "total"]
    assert [each["name"] for each in json.loads(spec.state_schema)] == ["by_tag", "n", "seen", "total"]
    assert describe(Count, 16) == spec
    assert describe(Pair).key == ("a", "b")
    assert describe(Pair).partitions == 128
    assert describe(Count, 16, name="other-name").name == "other-name"


class NoKey(Operator):
    output = "k string"

    def process(self, row: Any, ctx: Context) -> None:
        pass


class NoProcess(Operator):
    key = "k"
    output = "k string"


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (NoKey, "names no key"),
        (NoProcess, "no process"),
        (_class(key=(), output="k string"), "names no key"),
        (_class(key="", output="k string"), "names no key"),
        (_class(key=("a", ""), output="k string"), "names no key"),
        (_class(key=["a"], output="k string"), "names no key"),
        (_class(key=7, output="k string"), "names no key"),
        (int, "is not an operator"),
        ("Count", "is not an operator"),
        (Operator, "no process"),
    ],
)
def test_declarations_that_cannot_be(cls: Any, what: str) -> None:
    with pytest.raises(DeclarationError, match=what) as caught:
        describe(cls)
    assert caught.value.remedy


@pytest.mark.parametrize("output", [None, 7, "k strang", ""])
def test_outputs_that_cannot_be(output: Any) -> None:
    with pytest.raises(DeclarationError):
        output_schema(_class(key="k", output=output))


def test_outputs_may_be_arrow() -> None:
    schema = pa.schema([("x", pa.int8())])
    assert output_schema(_class(key="k", output=schema)) is schema
    assert key_columns(_class(key=("a", "b"))) == ("a", "b")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "x" * 129, "é", "a\n"])
def test_names_become_directories_and_are_kept_plain(name: str) -> None:
    if not name:
        assert describe(Count, 1, name).name == "Count"
        return
    with pytest.raises(InvalidArgument):
        describe(Count, 1, name)


def test_a_set_of_unordered_members_is_refused_where_it_is_declared() -> None:
    with pytest.raises(DeclarationError):
        state.set(list)


# -- places -------------------------------------------------------------------------------------------------


def test_load_is_the_inverse_of_target_of() -> None:
    for cls in (Count, Pair, Outer.Inner):
        assert load(target_of(cls)) is cls
    assert target_of(Outer.Inner) == "tests.unit.operators:Outer.Inner"


def test_a_class_inside_a_function_is_refused() -> None:
    class Local(Count):
        pass

    with pytest.raises(OperatorNotImportable, match="inside a function"):
        target_of(Local)


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("Count", "is not an operator's place"),
        (":Count", "is not an operator's place"),
        ("tests.unit.operators:", "is not an operator's place"),
        ("no_such_module_anywhere:Count", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("tests.unit.operators:Missing", "AttributeError"),
        ("tests.unit.operators:Count.Missing", "AttributeError"),
        ("tests.unit.operators:not_a_class", "is not an Operator class"),
        ("tests.unit.operators:Outer", "is not an Operator class"),
        ("/no/such/file.py:Count", "FileNotFoundError"),
    ],
)
def test_places_where_no_operator_is(target: str, what: str) -> None:
    with pytest.raises(OperatorNotImportable) as caught:
        load(target)
    assert what in caught.value.what
    assert len(str(caught.value).splitlines()) == 1


SCRIPT = """
from stateflow import Operator
class Scripted(Operator):
    key = "k"
    output = "k string"
    def process(self, row, ctx):
        return None
if __name__ == "__main__":
    from stateflow.runtime.operator import target_of
    print(target_of(Scripted))
"""


def test_a_scripts_own_class_is_found_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "my ops.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=Path.cwd(), check=True)
    target = run.stdout.strip()
    assert target == f"{script.resolve()}:Scripted"
    cls = load(target)
    assert cls.__name__ == "Scripted"
    assert load(target) is cls, "one file, one module: isinstance must keep working"


def test_a_class_typed_into_an_interpreter_is_refused() -> None:
    """Replicas could never load it."""
    program = SCRIPT.replace("print(target_of(Scripted))", "target_of(Scripted)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "OperatorNotImportable" in run.stderr
    assert "lives in no file" in run.stderr


def test_a_file_that_fails_on_import_is_told_and_may_be_mended(tmp_path: Path) -> None:
    script = tmp_path / "broken_ops.py"
    script.write_text("1/0\n")
    with pytest.raises(OperatorNotImportable, match="ZeroDivisionError"):
        load(f"{script}:Scripted")
    script.write_text(SCRIPT)
    assert load(f"{script}:Scripted").__name__ == "Scripted"


def test_a_file_that_exits_on_import_does_not_end_the_replica(tmp_path: Path) -> None:
    script = tmp_path / "exiting_ops.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(OperatorNotImportable, match="SystemExit"):
        load(f"{script}:Scripted")
