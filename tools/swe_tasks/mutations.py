"""Find small bugs that can be put into Python source: each changes one line, and nothing else of the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

COMPARISONS = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
}
SIGNS = "+ -, - +, * +, / *, // /, % //, ** *, & |, | &, << >>, >> <<"
OPERATORS = dict(pair.split() for pair in SIGNS.split(","))
PAIRS = """min max, any all, startswith endswith, lstrip rstrip, lower upper, keys values, append extend,
    popleft pop, partition rpartition, find rfind, split rsplit"""
OTHER_NAMES = {
    name: other_name for pair in PAIRS.split(",") for name, other_name in permutations(pair.split())
}
SHORTEST = 10
"""Characters of a changed line: a shorter one, such as `i += 1`, is in every program."""


class Mutation(NamedTuple):
    """A bug: `line` (from 1) is `after` instead of `before`.

    `function`: the qualified name of its function, with the names that the function binds.
    """

    kind: str
    line: int
    before: str
    after: str
    function: str = ""
    names: tuple[str, ...] = ()


class Edit(NamedTuple):
    kind: str
    line: int
    start: int  # bytes of the line
    end: int
    text: str


def mutations(source: bytes) -> list[Mutation]:
    """List the mutations of the functions of a module (UTF-8), in the order of its lines."""
    lines = source.splitlines(keepends=True)
    by_change: dict[tuple[int, str], Mutation] = {}
    for name, function in functions(ast.parse(source)):
        for edit in (edit for node in inside(function) for edit in edits(node, lines)):
            before = lines[edit.line - 1]
            after = before[: edit.start] + edit.text.encode() + before[edit.end :]
            if len(before.strip()) >= SHORTEST and differs(function, lines, edit.line, after):
                texts = (before.decode().rstrip("\n"), after.decode().rstrip("\n"))
                mutation = Mutation(edit.kind, edit.line, *texts, name, names(function))
                by_change.setdefault((edit.line, mutation.after), mutation)

    return sorted(by_change.values(), key=lambda mutation: mutation.line)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}.{node.name}".lstrip(".")
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, name)


def inside(function: Function) -> Iterator[ast.AST]:
    """Walk the statements and expressions that run when the function is called, without annotations,
    texts, and inner functions and classes."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, Function | ast.ClassDef | ast.JoinedStr):
            continue
        yield node
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        todo.extend(child for child in ast.iter_child_nodes(node) if child is not skipped)


def names(function: Function) -> tuple[str, ...]:
    """List the names that the function's bytecode holds under any compiler: its own name, and names of
    arguments and variables."""
    bound = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    bound |= {n.id for n in inside(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return tuple(sorted({function.name, *bound}, key=lambda name: (-len(name), name)))


def differs(function: Function, lines: list[bytes], number: int, after: bytes) -> bool:
    """Tell whether the function is Python with the line `after` at `number`, and says something else."""
    first = function.lineno - 1
    last = function.end_lineno or 0

    changed = [*lines[first : number - 1], after, *lines[number:last]]
    start = b"if 1:\n" if function.col_offset else b""  # encloses an indented function
    try:
        new, old = (ast.parse(start + b"".join(text)) for text in (changed, lines[first:last]))
    except SyntaxError:
        return False

    return ast.dump(new) != ast.dump(old)


# -- what can be edited at a node, all of it on one line -----------------------------------------------------


def edits(node: ast.AST, lines: list[bytes]) -> Iterator[Edit]:
    match node:
        case ast.Compare(ops=[_], comparators=[right]):
            yield from operator(node.left, right, lines, "comparison")
        case ast.BinOp(left=left, right=right):
            yield from operator(left, right, lines, "operator")
        case ast.AugAssign(target=target, value=value):
            yield from operator(target, value, lines, "operator")
        case ast.BoolOp(values=[left, right, *_]):
            yield from operator(left, right, lines, "and, or")
            yield from replaced("missing condition", node, lines, text(left, lines))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from replaced("inverted condition", node, lines, text(operand, lines))
        case ast.Constant(value=bool(value)):
            yield from replaced("wrong constant", node, lines, str(not value))
        case ast.Constant(value=int(value)):
            yield from replaced("off by one", node, lines, str(value + 1))
            if value > 0:
                yield from replaced("off by one", node, lines, str(value - 1))
        case ast.Return(value=ast.expr() as value):
            yield from replaced("dropped return", node, lines, text(value, lines))
        case ast.Continue() | ast.Break() | ast.Raise():
            yield from replaced("dropped statement", node, lines, "pass")
        case ast.Expr(value=ast.Call()) | ast.Delete():
            yield from replaced("dropped statement", node, lines, "pass")
        case ast.Subscript(slice=ast.Slice(lower=ast.expr() as lower, upper=None)):
            yield from replaced("wrong slice", lower, lines, "")
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.Name | ast.Attribute | ast.Call):
                yield from replaced("inverted condition", test, lines, f"not {text(test, lines)}")
        case ast.Call():
            yield from of_call(node, lines)


def of_call(node: ast.Call, lines: list[bytes]) -> Iterator[Edit]:
    match node.func:
        case ast.Name(id=name) if name in OTHER_NAMES:
            yield from replaced("wrong function", node.func, lines, OTHER_NAMES[name])
        case ast.Attribute(attr=name, value=owner) if name in OTHER_NAMES:
            yield from replaced(
                "wrong function", node.func, lines, f"{text(owner, lines)}.{OTHER_NAMES[name]}"
            )
    match node.args:
        case [first, second, *_] if not {type(first), type(second)} & {ast.Starred, ast.GeneratorExp}:
            if first.lineno == second.end_lineno:
                between = lines[first.lineno - 1][first.end_col_offset : second.col_offset].decode()
                swapped = f"{text(second, lines)}{between}{text(first, lines)}"
                span = (first.lineno, first.col_offset, second.end_col_offset or 0)
                yield Edit("swapped arguments", *span, swapped)


def operator(left: ast.expr, right: ast.expr, lines: list[bytes], kind: str) -> Iterator[Edit]:
    """Return other operators for the operator between two operands."""
    if left.end_lineno != right.lineno:
        return
    start = left.end_col_offset or 0
    end = right.col_offset
    match = re.fullmatch(
        rb"([\s)]*)([^\s()=]+=?|not +in|is +not|==)([\s(]*)", lines[right.lineno - 1][start:end]
    )
    if match is None:
        return

    old = " ".join(match[2].decode().split())
    span = (right.lineno, start + match.start(2), start + match.end(2))
    if kind == "operator":
        word = old.removesuffix("=")
        sign = "=" if old.endswith("=") else ""
        if word in OPERATORS:
            yield Edit("wrong operator", *span, OPERATORS[word] + sign)
    elif kind == "comparison":
        for new in COMPARISONS.get(old, ()):
            yield Edit("off by one" if new.strip("=") == old.strip("=") else "flipped comparison", *span, new)
    else:
        yield Edit("wrong operator", *span, "or" if old == "and" else "and")


def text(node: ast.expr | ast.stmt, lines: list[bytes]) -> str:
    """Return the source of a node of one line.

    For a node of more lines, return text that cannot be parsed.
    """
    if node.lineno != node.end_lineno:
        return "?"
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def replaced(kind: str, node: ast.expr | ast.stmt, lines: list[bytes], new: str) -> Iterator[Edit]:
    if node.lineno == node.end_lineno and "?" not in (new, text(node, lines)):
        yield Edit(kind, node.lineno, node.col_offset, node.end_col_offset or 0, new)
