"""Options of methods and norms. The accepted values are part of an option's declaration.

A method is a dataclass and declares options as fields; a norm is a class and declares them by annotating constructor arguments::

    kd: float = option(1.0, "weight of the distillation", least=0)
    groups: Annotated[int, Option(help="number of channel groups", least=1)] = 16

Every option is listed (``tbbn list``), checked (:func:`checked_options`) and written to a run's config.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from tbbn.errors import UserError, unknown_name

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list"}


@dataclass(frozen=True)
class Option:
    """An option's default, one line of help, and the accepted values.

    A number must satisfy ``least <= value <= most`` and ``above < value < below``; in a list, each entry must. A default of None
    means not set (a norm then takes the value from the layer that it replaces). ``kind`` defaults to the type of the default.
    """

    default: Any = None
    help: str = ""
    choices: tuple[Any, ...] = ()
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    kind: Any = None

    @property
    def limits(self) -> list[tuple[float, Any, str]]:
        """The limits that are set, each with its comparison and its wording."""
        found = (
            (self.above, operator.gt, "positive" if self.above == 0 else f"above {self.above}"),
            (self.least, operator.ge, f"at least {self.least}"),
            (self.most, operator.le, f"at most {self.most}"),
            (self.below, operator.lt, f"below {self.below}"),
        )
        return [(limit, holds, words) for limit, holds, words in found if limit is not None]

    @property
    def accepts(self) -> str:
        """The accepted values, such as "at least 0" or "paper, current or uneven"; empty if any value of the type is."""
        if self.choices:
            return _alternatives(self.choices)
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        return " and ".join(words for *_, words in self.limits)

    def problem(self, value: Any) -> str:
        """The problem with a value of the right type, such as "must be positive"; empty if there is none."""
        if isinstance(value, tuple):
            found = next(filter(None, map(self.problem, value)), "")
            return found and f"entries {found}"
        if self.choices and value not in self.choices:
            return f"must be {_alternatives(self.choices)}"
        wrong = (words for limit, holds, words in self.limits if not holds(value, limit))  # NaN satisfies no limit
        return next((f"must be {words}" for words in wrong), "")


def _alternatives(choices: Sequence[Any]) -> str:
    *others, last = map(str, choices)
    return " or ".join(filter(None, (", ".join(others), last)))


def option(default: Any, help: str, **accepted: Any) -> Any:
    """A dataclass field that declares an option of a method; ``accepted`` are fields of :class:`Option`."""
    return field(default=default, metadata={"help": help, **accepted})


def checked_options(owner: str, known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, converted to their types. Errors for unknown names and invalid values name ``owner``."""
    checked = {}
    for name, value in given.items():
        if name not in known:
            if not known:
                raise UserError(f"{owner} takes no options, got {name!r}.")
            raise unknown_name(f"option of {owner}:", name, known)
        checked[name] = _checked(known[name], value, f"{owner}: {name}")
    return checked


def _checked(known: Option, given: Any, where: str) -> Any:
    kind = known.kind or type(known.default)
    if kind not in WORDS or (given is None and known.default is None):
        return given
    value = _as(kind, given)
    if type(value) is not kind:
        default = "" if known.default is None else f" (default {known.default!r})"
        raise UserError(f"{where} must be {WORDS[kind]}{default}, got {value!r:.60}.")
    problem = known.problem(value)
    if not problem and kind is float and abs(value) == math.inf and value != known.default:
        problem = "must be finite"
    if problem:
        raise UserError(f"{where} {problem}, got {value!r:.60}.")
    return value


def _as(kind: Any, value: Any) -> Any:
    """Convert a value if that is lossless: a whole number to a float, a list to a tuple, NumPy numbers to Python's."""
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    wide = {int: numbers.Integral, float: numbers.Real}.get(kind)
    return kind(value) if wide and isinstance(value, wide) and not isinstance(value, bool) else value


# Constructor arguments of a norm that are not options, because `convert` supplies them: channels, bias, device and dtype come
# from the replaced layer, and synchronisation over ranks is not a property of a norm. The arguments in _INHERITED also come from
# the replaced layer, unless an option sets them.
_SUPPLIED = ("num_features", "bias", "device", "dtype", "sync", "process_group")
_AS_BEFORE = "as in the layer it replaces"
_INHERITED = {
    "eps": Option(help=_AS_BEFORE, least=1e-30, most=1e30, kind=float),
    "momentum": Option(help=_AS_BEFORE, least=0, most=1, kind=float),
    "affine": Option(help=_AS_BEFORE, kind=bool),
    "track_running_stats": Option(help=_AS_BEFORE, kind=bool),
}


def options_of(value: Any) -> dict[str, Option]:
    """The options of a method (its dataclass fields) or of a norm (its constructor's keywords); empty for other values."""
    if is_dataclass(value):
        return {f.name: _with_default(Option(**f.metadata), f.default, MISSING) for f in fields(value)}
    cls = value[-1] if isinstance(value, tuple) else value
    if not isinstance(cls, type):
        return {}
    found = keyword_arguments(cls)
    for name in _INHERITED.keys() & found.keys():
        if name != "momentum" or not getattr(cls, "own_momentum", False):
            annotated = found[name] if found[name].help else _INHERITED[name]
            found[name] = replace(annotated, default=None, kind=_INHERITED[name].kind)
    return {name: known for name, known in found.items() if name not in _SUPPLIED}


def keyword_arguments(cls: type) -> dict[str, Option]:
    """A constructor's keyword arguments except the first one, including those that it passes to its bases by ``**kwargs``."""
    found: dict[str, Option] = {}
    channels = ""  # the first argument's name
    for base in cls.__mro__:
        function = vars(base).get("__init__")
        if not inspect.isfunction(function):
            continue
        _, *parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if not channels and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                channels = parameter.name
            if parameter.name != channels and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                described = _with_default(_annotated(function, parameter), parameter.default, parameter.empty)
                found.setdefault(parameter.name, described)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def _with_default(known: Option, default: Any, none: object) -> Option:
    """The option with its default. A default that a config cannot hold, such as a function, counts as not set."""
    return replace(known, default=default if default is not none and _is_plain(default) else None)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else type(value) in (bool, int, float, str)


def _annotated(function: Any, parameter: inspect.Parameter) -> Option:
    """The :class:`Option` in an argument's annotation, or an empty one."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, function.__globals__)
        except Exception as error:  # ignored unless it is Annotated: the type may be imported for type checkers only
            if "Annotated" in annotation:
                where = f"{function.__qualname__}: the annotation of {parameter.name!r}"
                raise UserError(f"{where} cannot be read: {error}; use names of its module only.") from error
    found = [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Option)]
    return found[0] if found else Option()
