"""Every error code, what is said with it and what to do: from the classes, and from where each is raised."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from links import ROOT

from stateflow import errors
from stateflow.errors import StateflowError

PACKAGES = ("stateflow", "reconfig")
#: of what is only known when it happens
UNKNOWN = "…"
CLASSES = {kind.__name__: kind for kind in StateflowError.registry.values()}


@dataclass(frozen=True, slots=True, order=True)
class Raised:
    """``what`` and ``remedy`` with UNKNOWN for what is filled in."""

    what: str
    remedy: str


def page() -> str:
    said = raised()
    lines: list[str] = []
    for kind in sorted(StateflowError.registry.values(), key=lambda each: each.code):
        if kind not in _abstract() or said.get(kind):
            lines += _section(kind, said.get(kind, ()))
    return "\n".join(lines)


def _section(kind: type[StateflowError], said: Sequence[Raised]) -> Iterator[str]:
    yield f"## {kind.code}\n"
    above = kind.__mro__[1]
    facts = [f"`stateflow.errors.{kind.__name__}`"]
    if issubclass(above, StateflowError) and above.__mro__[1] is not Exception and above not in _abstract():
        facts.append(f"caught by `{above.__name__}`, too")
    facts.append(
        "the same request may succeed later" if kind.retryable else "the same request fails again until somebody acts"
    )
    yield f"{_sentence(kind)}{', '.join(facts)}.\n"
    if said:
        yield "| what happened | what to do |\n|---|---|"
        yield from (f"| {_cell(each.what)} | {_cell(each.remedy)} |" for each in said)
        yield ""


def _sentence(kind: type[StateflowError]) -> str:
    text = kind.__dict__.get("__doc__")
    return f"{inspect.cleandoc(text)}\n\n" if text else ""


def _abstract() -> tuple[type[StateflowError], ...]:
    """Classes that only group others."""
    return errors.StateflowError, errors.LocalMisuse, errors.RemoteCondition


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") or UNKNOWN


@cache
def raised() -> dict[type[StateflowError], list[Raised]]:
    """What the code raises, by class, each once, in alphabetical order."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for name in PACKAGES for path in _modules(name)}
    constants = _constants(trees.values())
    found: dict[type[StateflowError], set[Raised]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (kind := CLASSES.get(_called(node))) is not None:
                remedies = [word.value for word in node.keywords if word.arg == "remedy"]
                for what in _texts(node.args[0], constants) if node.args else ():
                    for remedy in _texts(remedies[0], constants) if remedies else ("",):
                        if set(f"{what}{remedy}") - set(f"{UNKNOWN} :,"):
                            found.setdefault(kind, set()).add(Raised(what, remedy))
    return {kind: sorted(each) for kind, each in found.items()}


def _modules(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _constants(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Texts that modules give a name, for remedies that are said at several places."""
    found: dict[str, str] = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts = _texts(node.value, {})
                if len(texts) == 1 and texts[0] != UNKNOWN:
                    found[node.targets[0].id] = texts[0]
    return found


def _texts(node: ast.expr, constants: dict[str, str]) -> list[str]:
    """What an expression may come to."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return _joined([_texts(part, constants) for part in parts])
        case ast.FormattedValue(value=value):
            found = _texts(value, constants)
            return found if all(each != UNKNOWN for each in found) else [UNKNOWN]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([_texts(left, constants), _texts(right, constants)])
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body, constants), *_texts(orelse, constants)]
        case ast.Name(id=name):
            return [constants.get(name, UNKNOWN)]
        case _:
            return [UNKNOWN]


def _joined(parts: list[list[str]]) -> list[str]:
    whole = [""]
    for each in parts:
        whole = [before + text for before in whole for text in each]
    return whole
