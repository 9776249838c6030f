"""What README and docs/ name is there: commands with their options and arguments, files, tests and settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import typer.main
from typer.core import TyperArgument, TyperGroup

from benchmarks.__main__ import COMMANDS, _parser
from stateflow import settings
from stateflow.cli.app import app
from tests.pages import PAGES, ROOT, blocks

PROGRAM = typer.main.get_command(app)
#: what a line has that says how a command is written, and is not one
NOTATION = re.compile(r"[\[\]|…]")


def lines() -> Iterator[tuple[str, str]]:
    for block in blocks():
        if block.kind == "sh":
            for line in block.text.splitlines():
                command = re.sub(r"(^|\s)#.*", "", line).strip()
                if command:
                    yield str(block), command


def test_every_block_says_what_it_is() -> None:
    """What says nothing is looked at by no test. Diagrams: test_transitions.py."""
    assert [str(block) for block in blocks() if block.kind not in ("python", "yaml", "sh", "text", "mermaid")] == []
    commanding = re.compile(r"^(stateflow|make|pip|python|apt-get) ", re.MULTILINE)
    assert [str(block) for block in blocks() if block.kind == "text" and commanding.search(block.text)] == []


@pytest.mark.parametrize(("where", "command"), list(lines()))
def test_commands(where: str, command: str) -> None:
    if NOTATION.search(command) and command.startswith("stateflow "):
        for form in forms(command):
            check_form(form)
        return
    match shlex.split(command):
        case ["stateflow", *words]:
            found, rest = leaf(words)
            found.make_context("command", rest)  # fails for whatever is not one of its options and arguments
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", "benchmarks", name, *rest]:
            if name not in COMMANDS:
                _parser().parse_args([name, *(word for word in rest if not NOTATION.search(word))])
        case ["pip", "install" | "wheel", *_]:
            pass  # tests/unit/test_distribution.py
        case other:
            pytest.fail(f"no test knows what {other[0]!r} is")


def leaf(words: Sequence[str]) -> tuple[Any, list[str]]:
    found: Any = PROGRAM
    rest = list(words)
    while isinstance(found, TyperGroup):
        assert rest, "a command lacks"
        if found.invoke_without_command and rest[0].startswith("-") and found is not PROGRAM:
            return found, rest  # it is a command itself, with options
        assert rest[0] in found.commands, f"there is no command {rest[0]!r}"
        found = found.commands[rest.pop(0)]
    return found, rest


def forms(command: str) -> Iterator[list[str]]:
    """``a x | y Z`` is ``a x`` and ``a y Z``, ``a x|y Z`` is ``a x Z`` and ``a y Z``; brackets are for what can be left
    out."""
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
        ("rm x", "no test knows"),
    ],
)
def test_what_is_wrong_is_found(command: str, said: str) -> None:
    with pytest.raises(BaseException, match=said):
        test_commands("", command)


#: a folder, which may be left out below ``tests``, and a file in it
NAMED = re.compile(
    r"`((?:tests/)?(?:stateflow|reconfig|benchmarks|docs|unit|integration|contract|property)/[\w/.]+\.\w+)"
)
SETTINGS = {
    f"{kind.model_config['env_prefix']}{name}".upper()
    for kind in vars(settings).values()
    if isinstance(kind, type) and issubclass(kind, settings.Settings)
    for name in kind.model_fields
}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    linked = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [link for link in linked if not (page.parent / link).exists()]
    missing += [name for name in NAMED.findall(text) if not any((at / name).exists() for at in (ROOT, ROOT / "tests"))]
    missing += [name for name in set(re.findall(r"\btest_\w+\.py", text)) if not any((ROOT / "tests").rglob(name))]
    asked = re.findall(r"STATEFLOW_(?:REPLICA|CONTROLLER|ROUTER|CLIENT)_[A-Z_]+[A-Z]", text)
    assert missing + sorted(set(asked) - SETTINGS) == []
