"""Checks a plugin's method before it is used, so that a mistake is a one-line error and not a failure deep in training."""

from __future__ import annotations

import difflib
import dis
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType
from typing import Any

from tbbn.bench.methods.base import Method, Phase
from tbbn.bench.models import Head
from tbbn.errors import UserError
from tbbn.registry import BUILT_IN, METHODS

_PUBLIC = {name: value for name, value in vars(Method).items() if not name.startswith("_")}
_CALLED = {name: inspect.signature(value) for name, value in _PUBLIC.items() if inspect.isfunction(value)}
_FLAGS = tuple(name for name, value in _PUBLIC.items() if isinstance(value, bool))
_HOLDERS = (FunctionType, staticmethod, classmethod, property, cached_property, partial, partialmethod)
_HELD = ("__wrapped__", "__func__", "func", "fget")  # the function inside each of them
_NEAR = 0.8  # similarity above which a name counts as a misspelt name of Method


def check_class(name: str, kind: Any) -> None:
    """Raise for a class that cannot be a method, or that misspells the name of an override."""
    # Every config asks for its method, and the place of one takes reading its file: only an error pays for it.
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(
            f"{METHODS.place(name)}: must be a class derived from tbbn.bench.methods.Method, got {kind!r:.60}."
        )
    if inspect.get_annotations(kind) and "__dataclass_fields__" not in vars(kind):
        raise UserError(f"{METHODS.place(name)}: has options, so its class needs @dataclass(frozen=True).")
    if METHODS.entry(name).origin == BUILT_IN:
        return
    for field in fields(kind):
        if field.default is MISSING:
            raise UserError(
                f"{METHODS.place(name)}: its option {field.name!r} needs a default: "
                f"{field.name}: ... = option(0.0, 'what it is')."
            )
    if (
        kind.__init__.__qualname__ == f"{kind.__qualname__}.__init__"
        and is_dataclass(kind)
        and _is_written(kind.__init__)
    ):
        raise UserError(f"{METHODS.place(name)}: its fields are its options, so it takes no __init__ of its own.")
    check_names(name, kind)
    _check_previous(name, kind)
    _check_stages(name, kind)


def check_names(name: str, kind: type[Method]) -> None:
    """Raise for an unused name that is close to one of :class:`Method`."""
    own = [base for base in kind.__mro__ if issubclass(base, Method) and base.__module__.partition(".")[0] != "tbbn"]
    defined = {key: value for base in reversed(own) for key, value in vars(base).items() if not key.startswith("_")}
    users = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("tbbn", "builtins")]
    uses = {text for base in users for text in _used_beside(base)}
    options = {field.name for field in fields(kind)}
    for key, value in defined.items():
        if key in _PUBLIC or key in uses or key in options:
            continue
        if near := difflib.get_close_matches(key, _PUBLIC, n=1, cutoff=_NEAR):
            where = METHODS.place(name, value if inspect.isfunction(value) else None)
            raise UserError(f"{where}: nothing uses {key!r}; did you mean {near[0]!r}? Otherwise give it another name.")


def _check_previous(name: str, kind: type[Method]) -> None:
    """Raise for a loss that reads the previous network's output, but never gets it: what it adds would silently be missing.

    A class that sets ``needs_previous`` itself, to whatever value, has thought of it.
    """
    if any("needs_previous" in vars(base) for base in kind.__mro__ if base is not Method):
        return
    code = getattr(kind.loss, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount < 4:
        return
    previous = code.co_varnames[3]  # after self, batch and output
    if attribute := next(_attributes_read(code, previous), None):
        raise UserError(
            f"{METHODS.place(name, kind.loss)}: loss reads {previous}.{attribute}, which needs the line "
            "needs_previous = True in the class; without it there is never a previous network."
        )


def _check_stages(name: str, kind: type[Method]) -> None:
    """Raise for a loss that reads stages without ``needs_stages``, now and not first in the second task.

    The engine refuses the stages that other functions read, when they do.
    """
    code = getattr(kind.loss, "__code__", None)
    if any("needs_stages" in vars(base) for base in kind.__mro__ if base is not Method) or not isinstance(
        code, CodeType
    ):
        return
    for output in code.co_varnames[2 : code.co_argcount]:
        if "stages" in _attributes_read(code, output):
            raise UserError(
                f"{METHODS.place(name, kind.loss)}: loss reads {output}.stages, which needs the line needs_stages = True in "
                "the class."
            )


def check_signatures(name: str, method: Method) -> None:
    """Raise if the engine could not call one of the method's functions, or if a flag is not True or False."""
    for key, wanted in _CALLED.items():
        given = getattr(method, key)
        try:
            inspect.signature(given).bind(*list(wanted.parameters)[1:])
        except ValueError:  # a function written in C, such as torch.relu, may not tell its arguments
            continue
        except TypeError:
            function = getattr(given, "__func__", given)
            got = f"{key}{inspect.signature(function)}" if callable(given) else f"{given!r:.60}"
            where = METHODS.place(name, function if callable(given) else None)
            raise UserError(f"{where}: must be {key}{_arguments(key)}, got {got}.") from None
    for key in _FLAGS:
        if not isinstance(getattr(method, key), bool):
            raise UserError(f"{METHODS.place(name)}: {key} must be True or False, got {getattr(method, key)!r:.60}.")


def checked_phases(name: str, method: Method, phases: object) -> tuple[Phase, ...]:
    """Return the phases of a task, or raise if they are not valid phases."""
    if not isinstance(phases, Sequence) or not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise UserError(
            f"{METHODS.place(name, method.phases)}: phases must return Phases, such as (Phase(),), got {phases!r:.60}."
        )
    for phase in phases:
        if phase.loss == "loss" and type(method).loss is Method.loss:
            where = METHODS.place(name)
            raise UserError(f"{where}: needs a function loss{_arguments('loss')}, which returns the terms to minimise.")
        if not callable(getattr(method, phase.loss, None)):
            raise UserError(
                f"{METHODS.place(name, method.phases)}: phase {phase.name!r} minimises {phase.loss!r}, which the method lacks."
            )
    return tuple(phases)


def checked_head(name: str, method: Method, head: object) -> Head:
    """Return the result of ``make_head``, or raise if it is not a head."""
    if not isinstance(head, Head):
        where = METHODS.place(name, method.make_head)
        raise UserError(f"{where}: make_head must return a tbbn.bench.models.Head, got {type(head).__name__}.")
    return head


def _arguments(key: str) -> str:
    return f"({', '.join(_CALLED[key].parameters)})"


def _is_written(function: Any) -> bool:
    """Whether a constructor was written by hand, not generated by @dataclass."""
    return getattr(function, "__code__", None) is not None and function.__code__.co_filename != "<string>"


def _used_beside(kind: type) -> Iterable[str]:
    """Every name and string that the functions of a class, and of the functions and classes of its module, use."""
    beside = [*vars(sys.modules.get(kind.__module__, kind)).values()]
    found = [*vars(kind).values(), *beside]
    for other in beside:
        if isinstance(other, type) and other.__module__ == kind.__module__:
            found += vars(other).values()
    for value in found:  # it grows by the functions inside
        if isinstance(value, _HOLDERS):
            found += [inner for name in _HELD if (inner := getattr(value, name, None)) is not None]
        if isinstance(code := getattr(value, "__code__", None), CodeType):
            yield from _texts(code)


def _texts(code: CodeType) -> Iterable[str]:
    """The names and string constants in a function's code: everything that it may use."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _texts(value)
        elif isinstance(value, str):
            yield value


def _attributes_read(code: CodeType, variable: str) -> Iterator[str]:
    """The attributes of a variable that a function reads, in itself or in a function inside it."""
    loaded = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and loaded == variable:
            yield str(step.argval)
        # Python 3.13 loads two variables in one step.
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        loaded = names[-1] if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _attributes_read(value, variable)
