"""Finds the text of the program that runs in this process: a script, ``python -c``, ``python -``, a notebook or a REPL.

A program that ``python -`` read from a pipe leaves no text, only its compiled code (:mod:`stateflow.code.compiled`).
"""

from __future__ import annotations

import ast
import base64
import codeop
import importlib
import importlib.util
import linecache
import marshal
import os
import re
import stat
import sys
import threading
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from stateflow.code.compiled import compiled
from stateflow.code.excerpt import written
from stateflow.code.statements import Program
from stateflow.errors import OperatorNotImportable

#: beginnings of lines that continue the statement of the line before
_GOES_ON = (" ", "\t", ")", "]", "}", "else", "elif", "except", "finally")
_COMMAND = re.compile(r"-[bBdEhiIOPqsSuvVx]*c(.*)", re.DOTALL)


def code_of_main(values: Mapping[str, Any]) -> tuple[CodeType, int] | None:
    """Returns (code object of the running ``__main__``, offset of the instruction that runs now).

    They are found among the frames of the main thread. Returns None if ``__main__`` is not running.

    Args:
        values: namespace of ``__main__``.
    """
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    while frame is not None:
        if frame.f_globals is values and frame.f_code.co_name == "<module>":
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


def code(magic: str, data: str) -> CodeType:
    """Decodes a code object of an excerpt (:mod:`stateflow.code.compiled`). Raises OperatorNotImportable in another
    version of Python."""
    if magic != importlib.util.MAGIC_NUMBER.hex():
        raise OperatorNotImportable(
            "the operator's program came through a pipe, and another version of Python compiled it",
            remedy="deploy it from a .py file",
        )
    loaded: CodeType = marshal.loads(base64.b64decode(data))  # noqa: S302 - deployed code
    return loaded


def running(needed_by: str) -> tuple[str, Program, Mapping[str, Any]]:
    """Returns (file of ``__main__``, its program, the present values of its names).

    A program without a file has ``<notebook>`` or ``<stdin>`` in place of the file. Raises OperatorNotImportable if the
    program's text is no longer available.

    Args:
        needed_by: name of the class that needs the text, for the error.
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
        return "<stdin>", compiled(*code), values
    if not texts:
        raise OperatorNotImportable(
            f"the source of {needed_by} cannot be found: Python keeps typed input only in its line editor's history",
            remedy="put the program into a .py file, or the class into a module",
        )
    place = str(Path(file).resolve()) if len(texts) == 1 and file is not None else "<stdin>"
    return place, written(texts, getattr(main, "__package__", None)), values


def _notebook() -> Any:
    """Returns IPython's shell, which keeps the cells that it ran; None: the program does not run in IPython."""
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
    """Returns the program that follows ``-c`` in a command line; empty: there is none."""
    for at, argument in enumerate(arguments[1:], 1):
        command = _COMMAND.fullmatch(argument)
        if command is not None:
            return command[1] or arguments[at + 1]
        if not argument.startswith("-") and arguments[at - 1] not in ("-W", "-X"):
            break
    return ""


def _of_standard_input() -> str:
    """Returns the program of ``python - < file``; empty: standard input is not a regular file.

    The whole file is read from its beginning, no matter how far the interpreter has read it.
    """
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return ""
    return os.pread(0, os.fstat(0).st_size, 0).decode()


def _typed() -> list[str]:
    """Returns the statements that were typed into this REPL, in their order.

    From Python 3.13 on the interpreter keeps the statements, as numbered files. Before that, the line editor keeps
    them, and its history may also have statements from before this REPL. They come first, so newer definitions of the
    same names replace theirs. The list is empty if neither keeps the statements.
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
    """Joins lines to statements, and leaves out lines that form no statement.

    The lines come from a line editor, which drops the empty lines that end a block.
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
