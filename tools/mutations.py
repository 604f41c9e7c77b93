"""Changes of one expression or statement of a source file, for :mod:`mutants`."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
QUIET_KEYWORDS = (None, "strict", "non_blocking")
QUIET = {"cpu", "cuda", "contiguous", "detach", "pin_memory", "record", "warn", "debug", "info", "print"}  # on a CPU


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement: the bytes from ``begin`` to ``end`` of a file are replaced."""

    area: str
    file: str
    line: int
    begin: int
    end: int
    replacement: str
    name: str  # the lines before and after the change

    def code(self, source: str) -> str:
        """The whole file with the change."""
        whole = source.encode()
        return (whole[: self.begin] + self.replacement.encode() + whole[self.end :]).decode()

    def key(self, source: str) -> str:
        return hashlib.sha256(f"{self.file}\n{self.code(source)}".encode()).hexdigest()[:16]


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare(left, [comparison, *more], comparators) if type(comparison) in SWAPS:
            yield ast.Compare(left, [SWAPS[type(comparison)](), *more], comparators)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(SWAPS[type(operator)](), values)
            yield from values
        case ast.BinOp(_, ast.Div(), ast.Constant(str()) | ast.JoinedStr()):
            return  # a path
        case ast.BinOp(left, operator, right) if type(operator) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(operator)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1 if isinstance(value, int) else value * 2 or 1.0)
        case ast.Slice(lower, upper, step) if lower or upper:
            yield ast.Slice(None, None, step)
        case ast.Call(function, arguments, keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg not in QUIET_KEYWORDS:
                    yield ast.Call(function, arguments, keywords[:i] + keywords[i + 1 :])
            for i, argument in enumerate(arguments):
                match argument:
                    case ast.Constant(str(text)) if text.isidentifier():
                        yield ast.Call(
                            function, [*arguments[:i], ast.Constant(text + "_"), *arguments[i + 1 :]], keywords
                        )
            if len(arguments) > 1:
                yield ast.Call(function, arguments[:-1], keywords)
            match arguments:
                case [ast.Name() as first, ast.Name() as second, *others]:
                    yield ast.Call(function, [second, first, *others], keywords)
            if isinstance(function, ast.Attribute) and not arguments and not keywords:
                yield function.value
        case ast.If(_, body, orelse):
            yield ast.If(ast.Constant(True), body, orelse)
            yield ast.If(ast.Constant(False), body, orelse)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.Continue():
            yield ast.Pass()


def is_quiet(node: ast.AST) -> bool:
    """Whether a node is left alone: messages, types, docstrings, and what runs on a GPU only."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.AnnAssign(value=None):
            return True
        case ast.Expr(ast.Constant()) | ast.keyword(arg="strict" | "non_blocking"):
            return True
        case ast.Assign([ast.Name(id=name)]) if name == "__all__" or (name[:1].isupper() and name[1:2].islower()):
            return True  # a type
        case ast.Call(ast.Name(id=name) | ast.Attribute(attr=name)) if name in QUIET | {"UserError", "cast", "TypeVar"}:
            return True
        case ast.If(test) | ast.IfExp(test) if any(word in ast.unparse(test) for word in ("cuda", "TYPE_CHECKING")):
            return True
    return False


def walk(node: ast.AST) -> Iterator[ast.AST]:
    if is_quiet(node):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def mutants_of(area: str, file: str, source: str) -> Iterator[Mutant]:
    whole = source.encode()
    starts = [0]
    for line in whole.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in walk(ast.parse(source)):
        for changed in changes(node):
            target: Any = node.test if isinstance(node, ast.If) else node
            text = ast.unparse(ast.fix_missing_locations(changed.test if isinstance(changed, ast.If) else changed))
            if isinstance(changed, ast.expr) and not isinstance(changed, ast.Constant | ast.Slice):
                text = f"({text})"
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            first, last = starts[target.lineno - 1], starts[target.end_lineno]
            lines = whole[first:last].decode(), (whole[first:begin] + text.encode() + whole[end:last]).decode()
            name = f"{file}: " + "  ->  ".join(" ".join(line.split()) for line in lines)
            yield Mutant(area, file, target.lineno, begin, end, text, name)


def is_valid(mutant: Mutant, source: str) -> bool:
    """Whether the change compiles, and is one."""
    try:
        return ast.dump(ast.parse(mutant.code(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, with their names; not those inside a function."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def function_at(source: str, line: int) -> str:
    """The function or method around a line; "" at module or class level, and for defaults of arguments."""
    found = (name for name, f in functions(ast.parse(source)) if f.body[0].lineno <= line <= (f.end_lineno or 0))
    return next(found, "")
