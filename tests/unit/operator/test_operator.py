"""Operators: describing one, naming its place, and finding it there again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from stateflow import Context, Operator, state
from stateflow.code.bundles import BundleStore
from stateflow.errors import DeclarationError, InvalidArgument, OperatorNotImportable
from stateflow.operator.operator import class_of, describe, key_columns, load, output_schema
from stateflow.testing import OperatorHarness
from tests.unit.operators import Count, Outer, Pair

NO_BUNDLES = BundleStore(Path("/nonexistent/bundles"))


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
        (NoKey, "declares no key"),
        (NoProcess, "no process"),
        (_class(key=(), output="k string"), "declares no key"),
        (_class(key="", output="k string"), "declares no key"),
        (_class(key=("a", ""), output="k string"), "declares no key"),
        (_class(key=["a"], output="k string"), "declares no key"),
        (_class(key=7, output="k string"), "declares no key"),
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


@pytest.mark.parametrize(
    ("output", "side", "what"),
    [
        ("k string, late long", {"late": "n long"}, "'late' has the same name as the main output's column 'late'"),
        ("k string, Late long", {"late": "n long"}, "'late' has the same name as the main output's column 'Late'"),
        ("k string", {"late": "n long", "Late": "n long"}, "'Late' has the same name as the side output 'late'"),
        ("k string", {"": "n long"}, "'' is not a valid side output name"),
        ("k string", {7: "n long"}, "7 is not a valid side output name"),
        ("k string", {"late": "s struct<a:int,a:int>"}, "a field of 's' is named twice: 'a'"),
        ("s struct<a:int,a:int>", {}, "a field of 's' is named twice: 'a'"),
    ],
)
def test_outputs_that_nobody_could_read_are_refused_at_deploy(output: str, side: Any, what: str) -> None:
    cls = _class(key="k", output=output, side_outputs=side)
    for declared in (describe, OperatorHarness):
        with pytest.raises(DeclarationError) as caught:
            declared(cls)
        assert what in caught.value.what
        assert caught.value.where["operator"] == cls.__name__


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


@pytest.mark.parametrize("attribute", ["open", "close", "on_timer", "state_version"])
def test_a_state_does_not_hide_what_the_operator_has(attribute: str) -> None:
    made = _class(key="k", output="k string", **{attribute: state.value(float)})
    with pytest.raises(DeclarationError, match=f"the state '{attribute}' hides the operator's own") as caught:
        OperatorHarness(made)
    assert f'{attribute}_ = state.…(…, name="{attribute}")' in str(caught.value)
    describe(_class(key="k", output="k string", open_=state.value(float, name="open")))


def test_a_set_of_unordered_members_is_refused_where_it_is_declared() -> None:
    with pytest.raises(DeclarationError):
        state.set(list)


# -- places -------------------------------------------------------------------------------------------------


def test_a_class_of_a_module_is_named() -> None:
    for cls in (Count, Pair, Outer.Inner):
        spec = describe(cls)
        assert class_of(spec, NO_BUNDLES) is cls
        assert (spec.source, spec.source_digest) == ("", "")
    assert describe(Outer.Inner).target == "tests.unit.operators:Outer.Inner"


def test_a_class_inside_a_function_is_refused() -> None:
    class Local(Count):
        pass

    with pytest.raises(OperatorNotImportable, match="inside a function"):
        describe(Local)


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("Count", "does not name an operator"),
        (":Count", "does not name an operator"),
        ("tests.unit.operators:", "does not name an operator"),
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


def test_what_is_missing_is_named_by_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy names what is missing.

    It used to be to install the operator, also where only one of its imports was missing.
    """
    (tmp_path / "needs.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    for target, remedy in (
        ("needs:Count", "install no_such_library, which the operator's code imports"),
        ("no_such_package.ops:Count", "install the code in this process's environment"),
        ("/no/such/file.py:Count", "name an existing file"),
    ):
        with pytest.raises(OperatorNotImportable) as caught:
            load(target)
        assert caught.value.remedy.startswith(remedy)


def test_an_import_that_fails_says_in_which_process_and_from_where() -> None:
    with pytest.raises(OperatorNotImportable) as caught:
        load("no.such.module:Count")
    where = caught.value.where
    assert where["process"].endswith(f" {os.getpid()}")
    assert (where["directory"], where["python"]) == (str(Path.cwd()), sys.executable)


SCRIPT = """
from __future__ import annotations
from stateflow import Operator
FACTOR = 2
class Scripted(Operator):
    key = "k"
    output = "k string, n long"
    def process(self, row, ctx):
        yield row.k, row.n * FACTOR
BELOW
"""
SHOW = """
import dataclasses, json
from stateflow.operator.operator import describe
spec = describe(Scripted, 2)
print(json.dumps([spec.target, spec.source, spec.source_digest]))
"""


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], input=stdin, capture_output=True, text=True, check=False)


def of_script(said: str, cls: str = "Scripted") -> type[Operator]:
    """Returns the class that a replica makes of the description that a program prints of its own class."""
    target, source, digest = json.loads(said)
    assert target.endswith(f":{cls}")
    return class_of(replace(describe(Count, 2), target=target, source=source, source_digest=digest), NO_BUNDLES)


def test_a_scripts_own_class_goes_along_as_text(tmp_path: Path) -> None:
    script = tmp_path / "my ops.py"
    script.write_text(SCRIPT.replace("BELOW", SHOW))
    said = run(str(script))
    assert not said.stderr
    cls = of_script(said.stdout)
    assert json.loads(said.stdout)[0] == f"{script.resolve()}:Scripted"
    assert of_script(said.stdout) is cls, "one text, one module: isinstance must keep working"
    assert [row for each in (("a", 3),) for row in cls().process(_Row(*each), None)] == [("a", 6)]
    again = describe(cls)
    assert (again.target, again.source, again.source_digest) == tuple(json.loads(said.stdout)), "it can be told on"
    assert load(f"{script}:Scripted").output == cls.output, "no one needs the program to run, or runs it"


class _Row(NamedTuple):
    k: str
    n: int


def test_of_a_command_and_of_standard_input(tmp_path: Path) -> None:
    program = SCRIPT.replace("BELOW", SHOW)
    script = tmp_path / "ops.py"
    script.write_text(program)
    with script.open() as file:
        redirected = subprocess.run([sys.executable, "-"], stdin=file, capture_output=True, text=True, check=False)
    for done in (run("-c", program), run("-Bc", program), run("-", stdin=program), redirected):
        assert not done.stderr
        assert json.loads(done.stdout)[0] == "<stdin>:Scripted"
        assert of_script(done.stdout).output == "k string, n long"


def test_a_text_that_is_not_what_was_deployed_is_not_loaded(tmp_path: Path) -> None:
    script, proof = tmp_path / "ops.py", tmp_path / "ran"
    script.write_text(SCRIPT.replace("BELOW", f"open({str(proof)!r}, 'w')"))
    spec = describe(load(f"{script}:Scripted"), 2)
    with pytest.raises(OperatorNotImportable, match="does not have the deployed digest"):
        class_of(replace(spec, source=spec.source + f"open({str(proof)!r}, 'w')"), NO_BUNDLES)
    for target in (spec.target, "<stdin>:Scripted"):  # the file never replaces the missing text
        with pytest.raises(OperatorNotImportable, match="lacks the operator's source code"):
            class_of(replace(spec, source="", source_digest="", target=target), NO_BUNDLES)
    with pytest.raises(OperatorNotImportable, match="not a file"):
        load("<stdin>:Scripted")
    assert not proof.exists()


def test_what_is_too_long_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "ops.py"
    table = f"FACTOR = {list(range(100_000))!r}"
    script.write_text(SCRIPT.replace("FACTOR = 2", table))
    with pytest.raises(OperatorNotImportable, match="bytes of source code, the limit is 262144"):
        load(f"{script}:Scripted")


@pytest.mark.parametrize("code", ["LocalCluster().start()", "local_session('x')"])
def test_what_is_loaded_starts_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Loading an operator starts no cluster.

    An imported module is run: twenty processes used to start one another.
    """
    text = f"from stateflow.spark import local_session\nfrom stateflow.testing import LocalCluster\nx = {code}\n"
    (tmp_path / "starts_a_cluster.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    what = r"cannot be started inside starts_a_cluster:Op, which is being loaded.*__main__"
    with pytest.raises(OperatorNotImportable, match=what):
        load("starts_a_cluster:Op")


def test_a_file_that_fails_is_told_and_may_be_mended(tmp_path: Path) -> None:
    script = tmp_path / "broken_ops.py"
    script.write_text("N = 1 / 0\nclass Scripted:\n    n = N\n")
    with pytest.raises(OperatorNotImportable, match="ZeroDivisionError"):
        load(f"{script}:Scripted")
    script.write_text(SCRIPT)
    assert load(f"{script}:Scripted").__name__ == "Scripted"


def test_a_file_that_exits_does_not_end_the_replica(tmp_path: Path) -> None:
    script = tmp_path / "exiting_ops.py"
    script.write_text("import sys\nN = sys.exit(3)\nclass Scripted:\n    n = N\n")
    with pytest.raises(OperatorNotImportable, match="SystemExit"):
        load(f"{script}:Scripted")


def test_a_file_that_anybody_can_write_is_not_loaded(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open_to_all.py"
    open_to_all.write_text("from tests.unit.operators import Count\n\n\nclass Open(Count):\n    pass\n")
    open_to_all.chmod(0o666)
    with pytest.raises(OperatorNotImportable, match="is world-writable"):
        load(f"{open_to_all}:Open")
