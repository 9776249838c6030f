"""Names in README and docs/ exist: commands with their options and arguments, files, tests and settings."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import typer
import typer.main
from typer.core import TyperArgument, TyperGroup

from benchmarks.__main__ import COMMANDS, _parser
from stateflow import settings
from stateflow.cli.app import app
from stateflow.metrics.figures import FIGURES
from stateflow.metrics.limits import Limit
from stateflow.project.writing import EXAMPLES
from stateflow.settings import base
from stateflow.settings.base import known_variables
from tests.pages import PAGES, ROOT, blocks

PROGRAM = typer.main.get_command(app)
#: marks of a line that shows how a command is written, and is no command itself
NOTATION = re.compile(r"[\[\]|…]")


def lines() -> Iterator[tuple[str, str]]:
    for block in blocks():
        if block.kind == "sh":
            for line in block.text.splitlines():
                command = re.sub(r"(^|\s)#.*", "", line).strip()
                if command:
                    yield str(block), command


def test_diagrams_are_of_kinds_that_are_drawn() -> None:
    for block in blocks():
        if block.kind == "mermaid":
            kind = block.text.split(maxsplit=1)[0]
            assert kind in ("flowchart", "sequenceDiagram", "stateDiagram-v2"), block
            assert kind != "sequenceDiagram" or ";" not in block.text, f"{block}: a semicolon ends a line there"


def test_every_block_says_what_it_is() -> None:
    """Every block names its kind, as tests look at known kinds only. Diagrams: test_transitions.py."""
    kinds = ("python", "yaml", "toml", "sh", "text", "mermaid", "theirs")
    assert [str(block) for block in blocks() if block.kind not in kinds] == []
    theirs = {block.page.parent for block in blocks() if block.kind == "theirs"}
    assert theirs == {ROOT / "docs" / "porting"}, "what is ours is run"
    for page in PAGES:  # a fence whose first line is written differently would have no kind and go unchecked
        assert page.read_text().count("\n```") == 2 * len(blocks(page)), page
    commanding = re.compile(r"^(stateflow|make|pip|python|apt-get) ", re.MULTILINE)
    assert [str(block) for block in blocks() if block.kind == "text" and commanding.search(block.text)] == []


@pytest.fixture(autouse=True)
def _with_the_file_that_pages_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Writes the file that `--config` reads, and restores the variable that `--config` sets for child processes."""
    monkeypatch.setenv(settings.CONFIG, "")
    monkeypatch.chdir(tmp_path)
    shown = next(block for block in blocks(ROOT / "docs" / "settings.md") if block.kind == "toml")
    (tmp_path / "fleet.toml").write_text(shown.text)
    yield
    base._read.cache_clear()


@pytest.mark.parametrize(("where", "command"), list(lines()))
def test_commands(where: str, command: str) -> None:
    if NOTATION.search(command) and command.startswith("stateflow "):
        for form in forms(command):
            check_form(form)
        return
    match shlex.split(command):
        case ["stateflow", *words]:
            found, rest = leaf(words)
            asks = pytest.raises(typer.Exit) if "--print-config" in rest else contextlib.nullcontext()
            with cast("Any", asks):
                # raises for anything that is not one of the command's options or arguments
                found.make_context("command", rest)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", "benchmarks", name, *rest]:
            if name not in COMMANDS:
                _parser().parse_args([name, *(word for word in rest if not NOTATION.search(word))])
        case ["pip", "install" | "wheel", *_]:
            pass  # tests/unit/test_distribution.py
        case ["jupyter", "lab", file] | ["python", file, *_]:
            assert any(file in example.files for example in EXAMPLES)
        case ["pytest"] | ["cd", _]:
            pass  # run in a project that `stateflow init` wrote: tests/integration/test_first_project.py
        case other:
            pytest.fail(f"no test knows what {other[0]!r} is")


def leaf(words: Sequence[str]) -> tuple[Any, list[str]]:
    found: Any = PROGRAM
    rest = list(words)
    while isinstance(found, TyperGroup):
        assert rest, "a command lacks"
        if found.invoke_without_command and rest[0].startswith("-") and found is not PROGRAM:
            return found, rest  # a group that is also a command, with options
        assert rest[0] in found.commands, f"there is no command {rest[0]!r}"
        found = found.commands[rest.pop(0)]
    return found, rest


def forms(command: str) -> Iterator[list[str]]:
    """Yields each command that a line stands for.

    ``a x | y Z`` stands for ``a x`` and ``a y Z``; ``a x|y Z`` for ``a x Z`` and ``a y Z``; brackets mark what can be
    left out.
    """
    first, *others = (part.split() for part in re.sub(r"[\[\]…]", "", command).split(" | "))
    at, group = 1, cast("Any", PROGRAM)
    while isinstance(group, TyperGroup) and isinstance(group.commands.get(first[at]), TyperGroup):
        group, at = group.commands[first[at]], at + 1
    for words in (first[1:], *([*first[1:at], *other] for other in others)):
        names = words[at - 1].split("|")
        for name in names:
            yield [*words[: at - 1], name, *words[at:]]


def check_form(words: list[str]) -> None:
    found, rest = leaf(words)
    options = {name for each in found.params for name in (*each.opts, *each.secondary_opts)}
    arguments = [each for each in found.params if isinstance(each, TyperArgument)]
    for word in rest:
        if word.startswith("-"):
            assert word in options, f"{word} is no option of {' '.join(words)}"
    if any(word.isupper() and "=" not in word for word in rest[:1]):
        assert arguments, f"{' '.join(words)} takes no argument"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("stateflow migrat Op", "no command 'migrat'"),
        ("stateflow status --wach", "--wach"),
        ("stateflow migrate Op 3", "Missing parameter: to"),
        ("stateflow nodes | nothing", "no command 'nothing'"),
        ("stateflow reconfig list | no ID", "no command 'no'"),
        ("stateflow status [--wach]", "--wach is no option"),
        ("stateflow nodes [OPERATOR]", "takes no argument"),
        ("make nothing", "nothing"),
        ("python -m benchmarks nothing", "2"),
        ("python nothing.py", "assert"),
        ("jupyter lab nothing.ipynb", "assert"),
        ("rm x", "no test knows"),
    ],
)
def test_what_is_wrong_is_found(command: str, said: str) -> None:
    with pytest.raises(BaseException, match=said):
        test_commands("", command)


@pytest.mark.parametrize(
    "command", ["stateflow migrat", "stateflow state read|get", "stateflow state --wach", "stateflow status --wach=1"]
)
def test_what_is_wrong_in_sentences_is_found(command: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(command)):
        check_named(command)


#: a folder, where ``tests`` may be left out, and a file in it
NAMED = re.compile(
    r"`((?:tests/)?(?:stateflow|reconfig|benchmarks|docs|unit|integration|contract|property)/[\w/.]+\.\w+)"
)
#: a folder or file of tests, with its path
PATHS = re.compile(r"\btests/(?:unit|integration|contract|property|simulation|kills)/[\w/.]*\w")
SETTINGS = known_variables()
TESTS = [ROOT / "tests", ROOT / "stateflow" / "examples"]


TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", [*TEXTS, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_sentences(page: Path) -> None:
    for command in re.findall(r"`(stateflow [a-z][^`\n]*)`", page.read_text()):
        check_named(command)


def check_named(command: str) -> None:
    """Checks a command that a sentence names: a group may stand without a command, and an option without its value."""
    group: Any = PROGRAM
    words = re.sub(r"[\[\]…]", " ", command).split(" | ")[0].split()[1:]
    while isinstance(group, TyperGroup) and words and not words[0].startswith("-"):
        first, *words = words
        for name in first.split("|"):
            assert name in group.commands, f"there is no command {name!r} in {command}"
        group = group.commands[name]
    every = group.commands.values() if isinstance(group, TyperGroup) else ()
    options = {
        name for each in (group, *every) for param in each.params for name in (*param.opts, *param.secondary_opts)
    }
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= {*options, "--help"}, command


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    linked = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [link for link in linked if not (page.parent / link).exists()]
    missing += [name for name in NAMED.findall(text) if not any((at / name).exists() for at in (ROOT, ROOT / "tests"))]
    missing += [name for name in PATHS.findall(text) if not (ROOT / name).exists()]
    tests = [path.name for folder in TESTS for path in folder.rglob("test_*.py")]
    missing += sorted(set(re.findall(r"\btest_\w+\.py", text)) - set(tests))
    asked = re.findall(r"STATEFLOW_(?:(?:REPLICA|CONTROLLER|ROUTER|CLIENT|TLS)_[A-Z_]+[A-Z]|INSECURE)", text)
    assert missing + sorted(set(asked) - SETTINGS) == []


UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1, "ms": 1e-3}


def limits() -> list[tuple[str, str, str, str]]:
    """Returns (what, limit, name of its setting or constant, metric) for each row of docs/limits.md."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \| [^|]+ \| ([^|]+) \|$",
        (ROOT / "docs" / "limits.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 25
    return rows


#: a metric as the page of limits names it, with the value of its label
METRIC = re.compile(r'`(\w+)(?:\{limit="(\w+)"\})?`')


@pytest.mark.parametrize(("said_by", "shown_by"), [row[2:] for row in limits()])
def test_metrics_of_limits_are_those_of_the_code(said_by: str, shown_by: str) -> None:
    assert said_by
    found = METRIC.findall(shown_by)
    assert bool(found) is (shown_by != "—")
    for name, limit in found:
        if name == "process_open_fds":  # Prometheus' client has it
            continue
        assert FIGURES[name].labels == ("limit",) if limit else name in FIGURES
        assert not limit or limit in get_args(Limit)


def test_each_limit_with_a_metric_is_on_the_page() -> None:
    assert {limit for row in limits() for _, limit in METRIC.findall(row[3]) if limit} == set(get_args(Limit))


@pytest.mark.parametrize(("what", "most", "said_by"), [row[:3] for row in limits()])
def test_limits_are_as_the_page_says(what: str, most: str, said_by: str) -> None:
    number, _, unit = most.partition(" ")
    if said_by.startswith("STATEFLOW_"):
        models = [
            each for each in vars(settings).values() if isinstance(each, type) and issubclass(each, settings.Settings)
        ]
        found = [
            field.default
            for model in models
            for name, field in model.model_fields.items()
            if f"{model.model_config['env_prefix']}{name}".upper() == said_by
        ]
        assert found, "there is no such setting"
        actual = found[0]
    else:
        module, _, name = said_by.rpartition(".")
        actual = getattr(importlib.import_module(module), name)
    assert float(number) * UNITS[unit] == actual
