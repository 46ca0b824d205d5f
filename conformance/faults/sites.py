"""Every single fault that a Python source can be given by rule: where it stands and what it says.

A fault replaces one stretch of the text, so that all lines keep their numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = (
    "operator",
    "comparison",
    "constant",
    "condition",
    "branches",
    "extremum",
    "mask",
    "other",
    "cast",
    "statement",
)
"""What is put wrong: an arithmetic or bitwise operator; a comparison's bound or sense; a number, a
truth value or an infinity; a condition, negated or joined the other way; the branches of a `where`,
exchanged; min for max; a mask, dropped; what masked lanes read; a cast, removed; a statement,
deleted."""

LAUNCH_OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "launch_pdl",
    "enable_fp_fusion",
    "do_not_specialize",
)
"""Keywords of a launch or a kernel that shape its speed: no fault is put there."""

OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
EXTREMA = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
    "amin": "amax",
    "amax": "amin",
}
INFINITIES = {"inf": "-inf", "-inf": "inf", "nan": "0"}

SHOWN_CHARACTERS = 60
"""How much of a text a list shows."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    line, column : int
        Where it stands in the file, the line from 1, the column (of UTF-8 bytes) from 0.
    before, after : str
        The text there, and what takes its place.
    function : str
        The function that it is in, by its dotted name; empty at module level.
    lines : tuple of int
        First and last line whose execution can reach it.
    """

    kind: str
    line: int
    column: int
    before: str
    after: str
    function: str
    lines: tuple[int, int]

    @property
    def change(self) -> str:
        """`before -> after` on one line."""
        return f"{_shown(self.before)} -> {_shown(self.after)}"


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."


def faults(source: str) -> list[Fault]:
    """Every fault of a source, in the order of its text.

    Left out is what no bit depends on: docstrings, annotations, decorators, the texts of errors,
    and `LAUNCH_OPTIONS`.

    Raises
    ------
    SyntaxError
        If the source is no Python.
    """
    finder = _Finder(source)
    finder.body(ast.parse(source).body)
    found = {(fault.line, fault.column, fault.before, fault.after): fault for fault in finder.found}
    return sorted(found.values(), key=lambda fault: (fault.line, fault.column, fault.after))


def faulty(source: str, fault: Fault) -> str:
    """The source with one fault in it, of as many lines as before."""
    data = source.encode()
    start = _offset(data, fault.line, fault.column)
    before = fault.before.encode()
    assert data[start : start + len(before)] == before
    # A text that spanned lines leaves as many: what follows keeps its line.
    blank = "\\\n" * (fault.before.count("\n") - fault.after.count("\n"))
    after = fault.after + (f" {blank}" if blank else "")
    return (data[:start] + after.encode() + data[start + len(before) :]).decode()


def _offset(data: bytes, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = data.index(b"\n", start) + 1
    return start + column


class _Finder:
    """Walks a tree and gathers its faults."""

    def __init__(self, source: str) -> None:
        self.found: list[Fault] = []
        self._source = source
        self._data = source.encode()
        self._function: list[str] = []
        self._lines = (1, 1)
        self._assigned: set[str] = set()

    def body(self, statements: list[ast.stmt]) -> None:
        for number, statement in enumerate(statements):
            if number == 0 and isinstance(statement, ast.Expr) and _is_text(statement.value):
                continue
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Pass)):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._definition(node)
            return
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        inner = [statement for block in blocks for statement in block]
        last = min((one.lineno - 1 for one in inner), default=node.end_lineno or node.lineno)
        self._lines = (node.lineno, max(node.lineno, last))
        if isinstance(node, ast.Raise):
            self._add("statement", node, "pass")
            return
        if not isinstance(node, ast.Assert):
            self._deleted(node)
            for expression in _expressions(node):
                self._expression(expression)
        if isinstance(node, (ast.If, ast.While)):
            self._negated(node.test)
        for statement in inner:
            self._statement(statement)
        for handler in getattr(node, "handlers", []):
            for statement in handler.body:
                self._statement(statement)
        if isinstance(node, ast.Assign):
            self._assigned |= {t.id for t in node.targets if isinstance(t, ast.Name)}

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        kept = self._lines, self._assigned
        if not isinstance(node, ast.ClassDef):
            self._lines = (node.lineno, node.lineno)
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self._expression(default)
        self._function.append(node.name)
        self._assigned = set()
        self.body(node.body)
        self._function.pop()
        self._lines, self._assigned = kept

    def _deleted(self, node: ast.stmt) -> None:
        """A statement whose lack leaves a program: a call, a write, a name that held a value."""
        targets = node.targets if isinstance(node, ast.Assign) else []
        written = any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in targets)
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        again = bool(names) and set(names) <= self._assigned
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        jump = isinstance(node, (ast.AugAssign, ast.Break, ast.Continue, ast.Delete))
        if written or again or call or jump:
            self._add("statement", node, "pass")

    def _negated(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.UnaryOp)) and not _is_literal(test):
            self._add("condition", test, f"not ({self._text(test)})")

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, (ast.JoinedStr, ast.Lambda)):
            return
        if isinstance(node, ast.BinOp):
            self._between("operator", node.left, node.right, OPERATORS.get(type(node.op)))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                self._between("comparison", left, right, COMPARISONS.get(type(op)))
        elif isinstance(node, ast.BoolOp):
            other = "or" if isinstance(node.op, ast.And) else "and"
            for left, right in zip(node.values, node.values[1:], strict=False):
                self._between("condition", left, right, other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._add("condition", node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.IfExp):
            self._negated(node.test)
        elif isinstance(node, ast.Constant):
            self._constant(node)
        elif isinstance(node, ast.Call):
            self._call(node)
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child)

    def _constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, str(not value))
        elif isinstance(value, int):
            self._add("constant", node, str(value + 1))
        elif isinstance(value, float):
            self._add("constant", node, f"(-{self._text(node)})" if value else "1.0")

    def _call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else _name(node.func)
        keywords = {keyword.arg: keyword for keyword in node.keywords}
        if name == "float" and node.args and isinstance(node.args[0], ast.Constant):
            if (other := INFINITIES.get(str(node.args[0].value))) is not None:
                self._add("constant", node.args[0], f'"{other}"')
            return
        if name in EXTREMA:
            self._last_name(node.func, name, EXTREMA[name])
        if name == "where" and len(node.args) == 3:
            yes, no = self._text(node.args[1]), self._text(node.args[2])
            text = f"{self._text(node.func)}({self._text(node.args[0])}, {no}, {yes})"
            self._add("branches", node, text)
        if name == "to" and isinstance(node.func, ast.Attribute):
            self._add("cast", node, f"({self._text(node.func.value)})")
        elif name == "cast" and node.args:
            self._add("cast", node, f"({self._text(node.args[0])})")
        if "mask" in keywords:
            kept = [self._text(one) for one in node.args]
            kept += [
                self._text(keyword)
                for keyword in node.keywords
                if keyword.arg not in ("mask", "other")
            ]
            self._add("mask", node, f"{self._text(node.func)}({', '.join(kept)})")
        if "other" in keywords:
            value = keywords["other"].value
            zero = isinstance(value, ast.Constant) and value.value == 0
            self._add("other", value, "1" if zero else "0")
        self._expression(node.func)
        for argument in node.args:
            self._expression(argument)
        for keyword in node.keywords:
            if keyword.arg not in (*LAUNCH_OPTIONS, "other"):
                self._expression(keyword.value)

    def _last_name(self, node: ast.expr, name: str, other: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        column = node.end_col_offset - len(name.encode())
        self._put("extremum", node.end_lineno, column, name, other)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, other: str | None) -> None:
        """Replace the operator between two operands, whatever brackets stand there."""
        if other is None:
            return
        assert left.end_lineno is not None
        assert left.end_col_offset is not None
        start = _offset(self._data, left.end_lineno, left.end_col_offset)
        end = _offset(self._data, right.lineno, right.col_offset)
        text = self._data[start:end].decode()
        # A comment between the two could hold anything.
        bare = text.strip("() \t\n\\")
        if "#" in text or not bare or text.count(bare) != 1:
            return
        ahead = text[: text.index(bare)].encode()
        line = left.end_lineno + ahead.count(b"\n")
        begun = start + len(ahead)
        column = begun - (self._data.rfind(b"\n", 0, begun) + 1)
        self._put(kind, line, column, bare, other)

    def _add(self, kind: str, node: Any, after: str) -> None:
        self._put(kind, node.lineno, node.col_offset, self._text(node), after)

    def _put(self, kind: str, line: int, column: int, before: str, after: str) -> None:
        place = ".".join(self._function)
        self.found.append(Fault(kind, line, column, before, after, place, self._lines))

    def _text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._source, node) or ""


def _expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, annotations apart."""
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, (ast.expr, ast.withitem)):
                yield child


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)
