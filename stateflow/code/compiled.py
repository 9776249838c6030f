"""Reads the statements of a program from its compiled code, of which the text is gone. No I/O.

The interpreter compiles a program that ``python -`` reads from a pipe as a whole before it runs it, and the code object
lives as long as the program runs. A definition in the code object is a sequence of instructions without jumps, and the
last instruction stores the defined name. So this sequence can be cut out and executed alone. An import is written as a
statement again. The excerpt loads only in interpreters of the same version, because bytecode differs between versions.
"""

from __future__ import annotations

import ast
import base64
import dis
import importlib
import importlib.util
import inspect
import marshal
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from types import CodeType

from stateflow.code.statements import (
    CONSTRUCTORS,
    CONTAINERS,
    READS,
    Program,
    Statement,
    Touch,
    named_in,
    only_looks,
    read_at_once,
    runs_at_once,
)

#: instructions of an expression or definition without a jump; a definition that has any other instruction is not cut
#: out
_PLAIN = (
    *("LOAD_", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "CALL", "PRECALL", "KW_NAMES", "PUSH_NULL"),
    *("BUILD_", "LIST_", "SET_", "DICT_", "FORMAT_", "CONVERT_VALUE", "GET_ITER"),
    *("BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "EXTENDED_ARG", "NOP"),
)
#: instructions of a literal
_LITERAL = ("LOAD_CONST", "LOAD_SMALL_INT", "BUILD_", "LIST_EXTEND", "SET_UPDATE", "DICT_", "EXTENDED_ARG", "STORE_")
_STORES = ("STORE_NAME", "STORE_GLOBAL")
#: instructions that change the object on top of the stack, or the one below
_CHANGING = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_ATTR", "DELETE_ATTR")
#: instructions of a call that stand, depending on the version of Python, between a function and its arguments, or
#: between them and ``CALL``
_OF_CALLS = ("PUSH_NULL", "PRECALL")
#: instructions of calls; their arguments are on top of the stack, with names of arguments in one more place
_CALLS = ("PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX")
#: module of the function that decodes what an excerpt contains; excerpts of other releases name it, too
_DECODER = "stateflow.code.program"


def compiled(code: CodeType, now: int | None = None) -> Program:
    """Reads a program's statements from its code object.

    Args:
        now: offset of the instruction that runs now; None: the program has ended.
    """
    instructions = list(dis.get_instructions(code))
    found, elsewhere = list[Statement](), dict[str, int]()
    constant, module, names = None, "", None  # names: those after "from module import"; None: "import module"
    packages = defaultdict[str, list[tuple[int, str]]](list)  # name → its statements "import name.module"
    statement_at: dict[int, Statement] = {}
    stars: list[tuple[int, str]] = []  # "from module import *"
    stores = defaultdict[str, list[int]](list)
    ways = _ways(code, instructions)
    goals = {at for at, each in enumerate(instructions) if each.opname.startswith("RETURN_")}
    if now is not None:  # while a called function runs, the offset may be that of the call's cache
        goals = {max(at for at, each in enumerate(instructions) if each.offset <= now)}
    begun = _reached(_turned(ways), goals)  # other instructions have not run yet
    for at, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_CONST":
            constant = instruction.argval
        if instruction.opname == "IMPORT_NAME":
            module, names = instruction.argval, constant
        if _imports_all(instruction) and at in begun:
            stars.append((at, module))
        if instruction.opname not in _STORES or at not in begun:
            continue
        name, before = instruction.argval, instructions[at - 1]
        if before.opname in ("IMPORT_NAME", "IMPORT_FROM") and module not in sys.modules:  # it failed in a "try"
            continue
        begin = _begin(instructions, at)
        if before.opname == "IMPORT_NAME" and module.partition(".")[0] == name:
            packages[name].append((at, module))
            if len(packages[name]) > 1:  # the same object once more
                continue
        stores[name].append(at)
        if before.opname == "IMPORT_FROM":
            imports = f"import {module}" if names is None else f"from {module} import {before.argval}"
            order, source = (at, _line(instruction)), f"{imports} as {name}"
            found.append(Statement(order, source, frozenset({name}), imports=True))
        elif begin is None:
            elsewhere.setdefault(name, _line(instruction))
        else:
            run = instructions[begin : at + 1]
            statement = Statement((at, _line(run[0])), _source(code, run), frozenset({name}))
            _find_names(statement, run)
            statement.empty = run[0].opname in ("BUILD_MAP", "BUILD_LIST") and not run[0].arg and len(run) == 2
            statement.empty |= any(each.opname in READS and each.argval in CONTAINERS for each in run) and not any(
                each.opcode in dis.hasconst for each in run
            )
            statement.repeats = all(each.opname.startswith(_LITERAL) for each in run)
            found.append(statement)
            statement_at.update(dict.fromkeys(range(begin, at + 1), statement))
    for at, module in stars:
        for name in _all_of(module):
            if name in stores:
                stores[name].append(at)
    for name, imported in packages.items():
        if modules := dict.fromkeys(each for _, each in imported if each in sys.modules):  # others failed in a "try"
            order, source = (imported[0][0], _line(instructions[imported[0][0]])), f"import {', '.join(modules)}"
            found.append(Statement(order, source, frozenset({name}), imports=True))
    found.sort(key=lambda each: each.order)
    left_out = _left_out(instructions, ways, goals, stores, {each.order[0]: each for each in found})
    for at in (at for at in left_out if instructions[at].opname in _STORES):
        elsewhere.setdefault(instructions[at].argval, _line(instructions[at]))
    found = [each for each in found if each.order[0] not in left_out]
    statement_at = {at: each for at, each in statement_at.items() if each.order[0] not in left_out}
    return Program(found, elsewhere, list(_touches(code, instructions, statement_at, begun)))


def _imports_all(instruction: dis.Instruction) -> bool:
    """Tells whether an instruction is that of ``from module import *``."""
    return instruction.opname == "IMPORT_STAR" or (instruction.opname, instruction.arg) == ("CALL_INTRINSIC_1", 2)


def _all_of(module: str) -> Iterable[str]:
    """Returns the names that ``from module import *`` binds."""
    loaded = sys.modules.get(module)
    public = [name for name in vars(loaded) if not name.startswith("_")] if loaded is not None else []
    names: Iterable[str] = getattr(loaded, "__all__", public)
    return names


def _left_out(
    instructions: Sequence[dis.Instruction],
    ways: Sequence[Sequence[int]],
    goals: Set[int],
    stores: Mapping[str, list[int]],
    statements: Mapping[int, Statement],
) -> set[int]:
    """Returns the indexes of stores whose statements cannot be used.

    The code does not tell which of the name's statements made its value, because one of them may have been passed over
    or repeated: it is in a branch, a loop or a ``try``. A name's only statement cannot be used if a loop repeats it and
    its value may depend on that.
    """
    found = set[int]()
    back = [(to, at) for at, following in enumerate(ways) for to in following if to <= at]
    for name, indexes in stores.items():
        at = indexes[0]
        if len(indexes) == 1 and at in statements and any(first <= at <= last for first, last in back):
            read = [each for other in statements[at].at_once for each in stores.get(other, ())]
            if not _is_alike(instructions, ways, goals, at, read):
                found.add(at)
        # from Python 3.12 on, the code of handlers follows all other code
        in_order = sorted(indexes, key=lambda at: (_line(instructions[at]), at))
        for at in reversed(in_order if len(in_order) > 1 else []):
            statement = statements.get(at)
            is_passed = not goals.isdisjoint(_reached(ways, [0], without=at))
            if statement is None or is_passed or at in _reached(ways, ways[at]):
                found.update(indexes)
                break
            if name not in statement.at_once:
                break
    return found


def _is_alike(
    instructions: Sequence[dis.Instruction],
    ways: Sequence[Sequence[int]],
    goals: Set[int],
    at: int,
    read: Iterable[int],
) -> bool:
    """Tells whether one run of the statement that ends with the store ``at`` makes the value that the program has, no
    matter how often a loop repeats the statement.

    A repeated statement that calls anything may not. The making of a class is no such call, if its body calls nothing
    and reads only imports: a base class could count its subclasses.

    Args:
        read: stores of the names that the statement reads. The program must not end, or leave the loop, between such
            a store and the statement.
    """
    repeated = _reached(ways, [at + 1])  # a store cannot raise
    if at not in repeated or (begin := _begin(instructions, at)) is None:  # the latter is an import
        return True
    run = instructions[begin : at + 1]
    inside = [each.argval for each in run if isinstance(each.argval, CodeType) and runs_at_once(each.argval)]
    calls = [each for each in run if each.opname.startswith("CALL")]
    calls += [each for code in inside for each in dis.get_instructions(code) if each.opname.startswith("CALL")]
    makes = sum(each.opname == "LOAD_BUILD_CLASS" for each in run)
    if len(calls) > makes or (makes and any(not instructions[each - 1].opname.startswith("IMPORT_") for each in read)):
        return False
    changes = (each for each in read if each in repeated and at in _reached(ways, [each + 1]))
    return all(goals.isdisjoint(_reached(ways, [each + 1], without=at)) for each in changes)


def _reached(ways: Sequence[Sequence[int]], begin: Iterable[int], without: int = -1) -> set[int]:
    """Returns the indexes of the instructions that may run, these included, if instruction ``without`` may not."""
    found, todo = set[int](), [*begin]
    while todo:
        at = todo.pop()
        if at not in found and at != without:
            found.add(at)
            todo += ways[at]
    return found


def _ways(code: CodeType, instructions: Sequence[dis.Instruction]) -> list[list[int]]:
    """Returns for each instruction the indexes of those that may run next, handlers of exceptions included."""
    index = {each.offset: at for at, each in enumerate(instructions)}
    found: list[list[int]] = []
    for at, each in enumerate(instructions):
        ends = each.opname.startswith(("RETURN_", "RERAISE", "RAISE_", "JUMP_FORWARD", "JUMP_BACKWARD"))
        found.append([] if ends else [at + 1])
        if each.opcode in dis.hasjrel:
            found[-1].append(index[each.argval])
    for entry in getattr(dis.Bytecode(code), "exception_entries"):  # noqa: B009 - for mypy
        for offset in range(entry.start, entry.end, 2):
            if offset in index:  # otherwise a cache
                found[index[offset]].append(index[entry.target])
    return found


def _turned(ways: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns for each instruction the indexes of those that may run before it."""
    found: list[list[int]] = [[] for _ in ways]
    for at, following in enumerate(ways):
        for each in following:
            found[each].append(at)
    return found


def _touches(
    code: CodeType,
    instructions: Sequence[dis.Instruction],
    statement_at: Mapping[int, Statement],
    begun: Container[int],
) -> Iterator[Touch]:
    """Yields the places, among the instructions of ``begun``, where a name's object may be changed.

    There, instructions load the name, or another name of its object or of a part of it, and soon after call a method of
    the object or store into the object.
    """
    functions = {each.co_name: each for each in code.co_consts if isinstance(each, CodeType)}
    classes = _Classes(code)
    others: dict[str, tuple[str, tuple[str, ...]]] = {}  # name → the name whose value it is a part of, path to the part
    for at, instruction in enumerate(instructions):
        if at not in begun:
            continue
        here = _touches_at(instructions, at, functions, statement_at.get(at))
        for touch in (*here, *classes.touches_at(instructions, at, statement_at.get(at))):
            yield touch
            if touch.name in others and touch.path:  # an empty path binds the other name anew
                root, path = others[touch.name]
                yield replace(touch, name=root, path=(*path, *touch.path), through=touch.name)
        if instruction.opname in _STORES:
            name, of = instruction.argval, _stored(instructions, at)
            new = None if of is None else others.get(of[0], (of[0], ()))
            others = {other: part for other, part in others.items() if name not in (other, part[0])}
            if of is not None and new is not None and new[0] != name:
                others[name] = new[0], (*new[1], *of[1])


def _touches_at(
    instructions: Sequence[dis.Instruction], at: int, functions: Mapping[str, CodeType], statement: Statement | None
) -> Iterator[Touch]:
    """Yields the touches of one instruction, which is a part of ``statement``, or of none."""
    instruction = instructions[at]
    order, line = (at, _line(instruction)) if statement is None else statement.order, _line(instruction)
    if statement is None and instruction.opname in _STORES and instructions[at - 1].opname != "IMPORT_FROM":
        yield Touch(instruction.argval, order, line, (), stores=True)
    if instruction.opname not in READS:
        return
    touch = _touch(instructions, at, order, line)
    if touch is not None and (statement is None or touch.name not in statement.binds):
        yield touch
    called = functions.get(instruction.argval)
    if called is not None and _calls(instructions, at):
        for name in _bound_by(called):
            yield Touch(name, order, line, (), stores=True)
    given_to = () if called is None else called.co_cellvars  # parameters, and others, that inner functions read
    for inner in () if called is None else _with_inner(called):
        inside = list(dis.get_instructions(inner))
        local = [n for n, each in enumerate(inside) if each.opname.startswith("LOAD_FAST") or each.argval in given_to]
        if any(_changes(inside, n) for n in local):
            for given in instructions[at + 1 : at + 4]:  # most likely the arguments of the call
                if given.opname in READS:
                    yield Touch(given.argval, order, line, ("", "change"), discards=True)
        for number, each in enumerate(inside):
            found = _touch(inside, number, order, line) if each.opname in READS else None
            if found is not None:
                yield found


class _Classes:
    """The classes of a program, with what the making of a class and calls of class methods change of other classes."""

    def __init__(self, program: CodeType) -> None:
        self._constants = program.co_consts
        self._codes = {each.co_name: each for each in program.co_consts if isinstance(each, CodeType)}
        self._bases: dict[str, set[str]] = {}  # name of a class → names of all its bases
        self._metas: dict[str, set[str]] = {}  # name of a class → names of its metaclass and the bases of that

    def touches_at(
        self, instructions: Sequence[dis.Instruction], at: int, statement: Statement | None
    ) -> Iterator[Touch]:
        """Yields the touches of one instruction, which is a part of ``statement``, or of none. Call it with the
        instructions in their order."""
        here, following = instructions[at], instructions[at + 1 : at + 2]
        line = _line(here)
        order = (at, line) if statement is None else statement.order
        if here.opname == "LOAD_BUILD_CLASS":
            yield from self._made(instructions, at, self._constants, order, line)
        elif here.opname in READS and following and following[0].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            called = {here.argval} | self._bases.get(here.argval, set())
            codes = [code for each in sorted(called) for code in self._methods(each, following[0].argval)]
            for path in _of_first(codes):
                for other in sorted(called) if len(path) > 1 else [here.argval]:
                    yield Touch(other, order, line, path, stores=len(path) == 1, discards=True)
        elif here.opname in READS and (code := self._codes.get(here.argval)) is not None and _calls(instructions, at):
            inside = list(dis.get_instructions(code))
            for number, each in enumerate(inside):
                if each.opname == "LOAD_BUILD_CLASS":
                    yield from self._made(inside, number, code.co_consts, order, line)

    def _made(
        self,
        instructions: Sequence[dis.Instruction],
        at: int,
        constants: Sequence[object],
        order: tuple[int, ...],
        line: int,
    ) -> Iterator[Touch]:
        """Yields what the making of a class changes. It begins at an instruction of the code with these constants."""
        end = next((n for n in range(at, len(instructions)) if instructions[n].opname.startswith("STORE_")), at)
        run, name = instructions[at:end], instructions[end].argval
        read = [each.argval for each in run if each.opname in READS]
        given = [constants[each.arg] for each in run if each.opcode in dis.hasconst and each.arg is not None]
        meta = read[-1:] if any(isinstance(each, tuple) and "metaclass" in each for each in given) else []
        bases = {other for each in read if each not in meta for other in (each, *self._bases.get(each, ()))}
        metas = {other for each in meta for other in (each, *self._bases.get(each, ()))}
        metas |= {other for each in bases for other in self._metas.get(each, ())}
        self._bases[name], self._metas[name] = bases, metas
        hooks = [code for each in sorted(bases) for code in self._methods(each, "__init_subclass__")]
        hooks += [code for each in sorted(metas) for code in self._methods(each, "__new__", "__init__")]
        for path in _of_first(hooks):
            for other in sorted(bases - {name}) if len(path) > 1 else ():
                yield Touch(other, order, line, path, discards=True)

    def _methods(self, name: str, *methods: str) -> Iterator[CodeType]:
        body = self._codes.get(name)
        for each in () if body is None or body.co_flags & inspect.CO_OPTIMIZED else body.co_consts:
            if isinstance(each, CodeType) and each.co_name in methods:
                yield each


def _of_first(codes: Iterable[CodeType]) -> Iterator[tuple[str, ...]]:
    """Yields the paths, as in :class:`Touch`, to what functions change of their first parameter."""
    for code in codes:
        first = code.co_varnames[0] if code.co_argcount else ""
        for inner in _with_inner(code):
            inside = list(dis.get_instructions(inner))
            for at, each in enumerate(inside):
                loaded = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
                if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and loaded == first:
                    path, stores = _goes_on(inside, at)
                    if stores or (path and not only_looks(path)):
                        yield (*path, "update") if stores and path else path or ("",)


def _calls(instructions: Sequence[dis.Instruction], at: int) -> bool:
    """Tells whether the function or class that instruction ``at`` loads is called, also as a decorator."""
    height = 1  # of the stack, from this object on
    for before, here in pairwise(instructions[at:]):
        given = here.arg or 0
        if here.opname == "CALL_FUNCTION_EX":
            given = 1 + (given & 1)
        given += here.opname == "CALL_KW"
        if here.opname in _CALLS and before.opname != "PRECALL" and height - given in (1, 2):  # 2: below is its NULL
            return True
        height += dis.stack_effect(here.opcode, here.arg, jump=False)
        if height < 1 or here.opname in ("LOAD_METHOD", *_STORES):
            break
    return False


def _bound_by(called: CodeType) -> Iterator[str]:
    """Yields the names of the program that a call of a function, or of a class, binds anew."""
    is_class = not called.co_flags & inspect.CO_OPTIMIZED
    made = [each for each in called.co_consts if isinstance(each, CodeType) and each.co_name in CONSTRUCTORS]
    for code in made if is_class else [called]:
        yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")


def _stored(instructions: Sequence[dis.Instruction], at: int) -> tuple[str, tuple[str, ...]] | None:
    """Returns ``a.b`` or ``vars(a)``, which the instruction at ``at`` stores, as ("a", ("b",)); None for others."""
    at -= 1
    while at >= 0 and instructions[at].opname in (*_STORES, "COPY"):  # name = another = a
        at -= 1
    path: list[str] = []
    while at >= 0 and instructions[at].opname == "LOAD_ATTR":
        path.insert(0, instructions[at].argval)
        at -= 1
    if at > 0 and instructions[at].opname == "CALL":
        at = _before(instructions, at)
        if not _is_called(instructions, at, "vars"):
            return None
    return (instructions[at].argval, tuple(path)) if at >= 0 and instructions[at].opname in READS else None


def _before(instructions: Sequence[dis.Instruction], at: int) -> int:
    """Returns the index of the preceding instruction, other than those of ``_OF_CALLS``; -1: there is none."""
    at -= 1
    while at >= 0 and instructions[at].opname in _OF_CALLS:
        at -= 1
    return at


def _is_called(instructions: Sequence[dis.Instruction], at: int, *functions: str) -> bool:
    """Tells whether the value that instruction ``at`` loads is the first argument of one of these functions."""
    before = _before(instructions, at)
    return before >= 0 and instructions[before].opname in READS and instructions[before].argval in functions


def _touch(instructions: Sequence[dis.Instruction], at: int, order: tuple[int, ...], line: int) -> Touch | None:
    path, stores = _goes_on(instructions, at)
    if not path and not stores:
        return None
    return Touch(instructions[at].argval, order, line, path or ("",), stores=stores)


def _changes(instructions: Sequence[dis.Instruction], at: int) -> bool:
    path, stores = _goes_on(instructions, at)
    return stores or (bool(path) and not only_looks(path))


def _goes_on(instructions: Sequence[dis.Instruction], at: int) -> tuple[tuple[str, ...], bool]:
    """Returns (attributes looked up on the object that instruction ``at`` loads, whether a value is stored into it)."""
    begin, first = at + 1, instructions[at]
    if _is_called(instructions, at, "vars"):
        first = instructions[_before(instructions, at)]
        begin = next((n for n in range(begin, len(instructions)) if instructions[n].opname == "CALL"), at) + 1
    behind = begin
    while behind < len(instructions) and instructions[behind].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        behind += 1
    stores = any(each.opname in _CHANGING for each in instructions[behind : behind + 2])
    stores |= _is_target(instructions, begin, first) or _is_called(instructions, at, "setattr", "delattr")
    return tuple(each.argval for each in instructions[begin:behind]), stores


def _is_target(instructions: Sequence[dis.Instruction], at: int, first: dis.Instruction) -> bool:
    """Tells whether an assignment or deletion has a target that begins where ``first`` does, as in ``a.b += c``.

    Args:
        at: index of the instruction before which the target's object is on top of the stack.
    """
    height = 1  # of the stack, from this object on
    while at < len(instructions) and height > 0:
        here = instructions[at]
        if here.opname in _CHANGING:
            return _place(here) == _place(first)
        height += dis.stack_effect(here.opcode, here.arg, jump=False)
        at += 1
    return False


def _place(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    position = instruction.positions
    return (None, None) if position is None else (position.lineno, position.col_offset)


def _line(instruction: dis.Instruction) -> int:
    position = instruction.positions
    return (position.lineno if position else None) or 0


def _begin(instructions: Sequence[dis.Instruction], at: int) -> int | None:
    """Returns the index of the first instruction that makes the value stored at ``at``.

    Before that instruction, the stack is as high as after the store. Returns None if an instruction between the two is
    not in ``_PLAIN``, or is the target of a jump, or if the store is one: an operand before the jump is stored, too.
    """
    if instructions[at].is_jump_target:
        return None
    missing = 1
    while missing:
        at -= 1
        here = instructions[at] if at >= 0 else None
        if here is None or not here.opname.startswith(_PLAIN):
            return None
        missing -= dis.stack_effect(here.opcode, here.arg, jump=False)
        if missing and here.is_jump_target:
            return None
    while at and instructions[at - 1].opname == "EXTENDED_ARG":
        at -= 1
    return at


def _source(code: CodeType, run: Sequence[dis.Instruction]) -> str:
    first = next(each for each in dis.get_instructions(code) if each.opname == "RESUME")
    begin, end = run[0].offset, run[-1].offset + 2  # a store has no cache after it
    used = {each.arg for each in run if each.opcode in dis.hasconst}
    constants = [each if number in used else None for number, each in enumerate(code.co_consts)]
    operands = len(constants).to_bytes(4, "big").lstrip(b"\0") or b"\0"
    tail = b"".join(bytes((dis.opmap["EXTENDED_ARG"], each)) for each in operands[:-1])
    tail += bytes((dis.opmap["LOAD_CONST"], operands[-1], dis.opmap["RETURN_VALUE"], 0))
    cut = code.replace(
        co_code=code.co_code[: first.offset + 2] + code.co_code[begin:end] + tail,
        co_consts=(*constants, None),
        co_exceptiontable=b"",
        co_linetable=b"",
        co_firstlineno=_line(run[0]),
    )
    # version 2 of marshal writes no references, which would differ from run to run
    data = base64.b64encode(marshal.dumps(cut, 2)).decode()
    magic = importlib.util.MAGIC_NUMBER.hex()
    return f"exec(__import__({_DECODER!r}, fromlist=['code']).code({magic!r}, {data!r}))"


def _find_names(statement: Statement, run: Sequence[dis.Instruction]) -> None:
    constants = [each.argval for each in run if isinstance(each.argval, CodeType)]
    statement.at_once = {each.argval for each in run if each.opname in READS}
    statement.at_once |= {name for each in constants if runs_at_once(each) for name in read_at_once(each)}
    statement.uses = set(statement.at_once)
    for constant in constants:
        for inner in _with_inner(constant):
            statement.uses |= {each.argval for each in dis.get_instructions(inner) if each.opname in READS}
            if "__annotations__" in inner.co_names:  # annotations are text there
                statement.hints |= {
                    name for each in inner.co_consts if isinstance(each, str) for name in named_in(ast.Constant(each))
                }


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_inner(each)
