"""Text of the program that runs here: of a script, ``python -c``, ``python -``, a notebook or a REPL."""

from __future__ import annotations

import ast
import codeop
import importlib
import linecache
import os
import re
import stat
import sys
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateflow.errors import OperatorNotImportable
from stateflow.runtime.compiled import code_of_main, compiled
from stateflow.runtime.excerpt import Program, written

#: beginnings of lines that continue the statement before them
_GOES_ON = (" ", "\t", ")", "]", "}", "else", "elif", "except", "finally")
_COMMAND = re.compile(r"-[bBdEhiIOPqsSuvVx]*c(.*)", re.DOTALL)


def running(needed_by: str) -> tuple[str, Program, Mapping[str, Any]]:
    """Returns the program of ``__main__``: (its file, or its kind in angle brackets; the program; its present names).

    Raises OperatorNotImportable when nothing of its text is left.
    """
    main = sys.modules["__main__"]
    values = vars(main)
    shell = _notebook()
    if shell is not None:
        return "<notebook>", written(shell.user_ns["In"]), values
    file = getattr(main, "__file__", None)
    if file is not None and file.startswith("<"):  # the program is read from standard input
        file = None
    interactive = hasattr(sys, "ps1")
    texts: list[str] = []
    if file is not None and "_pyrepl" not in file:
        texts = [_text_of(file, values)]
    elif not interactive:
        texts = [text for text in (_of_command(sys.orig_argv) or _of_standard_input(),) if text]
    if interactive:
        texts += _typed()
    code = None if texts or interactive else code_of_main(values)
    if code is not None:
        return "<stdin>", compiled(code), values
    if not texts:
        raise OperatorNotImportable(
            f"the source of {needed_by} cannot be found: typed input is kept by the line editor only",
            remedy="put the program into a .py file, or the class into a module",
        )
    place = str(Path(file).resolve()) if len(texts) == 1 and file is not None else "<stdin>"
    return place, written(texts, getattr(main, "__package__", None)), values


def _notebook() -> Any:
    """Returns IPython's shell, in a terminal or behind a notebook, which keeps the cells it ran. None: no IPython."""
    if "IPython" not in sys.modules:
        return None
    return sys.modules["IPython"].get_ipython()


def _text_of(file: str, values: dict[str, Any]) -> str:
    try:
        with tokenize.open(file) as source:  # in the encoding that it declares
            return source.read()
    except OSError:  # the file is in an archive
        return "".join(linecache.getlines(file, values))


def _of_command(arguments: Sequence[str]) -> str:
    """Returns the program behind ``-c``; empty: there is none."""
    for at, argument in enumerate(arguments[1:], 1):
        command = _COMMAND.fullmatch(argument)
        if command is not None:
            return command[1] or arguments[at + 1]
        if not argument.startswith("-") and arguments[at - 1] not in ("-W", "-X"):
            break
    return ""


def _of_standard_input() -> str:
    """Returns the program of ``python - < file``, from the beginning of the file however far the interpreter has read
    it. Empty: standard input is no regular file.
    """
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return ""
    return os.pread(0, os.fstat(0).st_size, 0).decode()


def _typed() -> list[str]:
    """Returns what was typed into this REPL, and into earlier ones before it, as statements. The last definition wins.

    From Python 3.13 on the interpreter keeps it, as files of that name; before, the line editor keeps it.
    """
    kept = sorted((int(name[14:-1]), name) for name in linecache.cache if re.fullmatch(r"<python-input-\d+>", name))
    if kept:
        return ["".join(linecache.getlines(name)) for _, name in kept]
    try:
        readline: Any = importlib.import_module("readline")
    except ImportError:
        return []
    entries = [readline.get_history_item(n) or "" for n in range(1, readline.get_current_history_length() + 1)]
    return statements([line for entry in entries for line in entry.splitlines()])


def statements(lines: Sequence[str]) -> list[str]:
    """Joins lines to statements. The lines are as a line editor keeps them, without the empty ones that end a block;
    lines that form no statement are left out.
    """
    found, at = [], 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and (lines[end].startswith(_GOES_ON) or _is_open(lines[at:end])):
            end += 1
        text = "\n".join(lines[at:end])
        try:
            ast.parse(text)
        except SyntaxError:
            at += 1
            continue
        found.append(text)
        at = end
    return found


def _is_open(lines: Sequence[str]) -> bool:
    """Tells whether a bracket, a string or a decorator is still open."""
    try:
        return codeop.compile_command("\n".join(lines) + "\n\n", symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError):
        return False
