"""Registries of methods, norms, data sets, backbones, augmentations and loggers, open to plugins.

Register your own with a decorator; the name then works in recipes, on the command line and in ``tbbn.run``::

    @tbbn.register_norm("frn", "filter response normalisation")
    class FilterResponseNorm(nn.Module): ...

Built-in names are registered in the same way by the registry's home module, which is imported at the first lookup. This module
itself imports neither torch nor the bench, so that the config can look up options in it::

    METHODS.options("eeil")  # {"kd": Option(default=1.0, help="..."), ...}; an unknown name is an error
    METHODS.get("eil")       # UserError: unknown method 'eil'; ... Did you mean 'eeil'?

Installed plugins (:mod:`tbbn.plugins`) are imported when a name is not found, or when names are listed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from tbbn.errors import UserError, one_line, unknown_name
from tbbn.options import Option, options_of

T = TypeVar("T")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, **kwargs


@dataclass(frozen=True)
class Origin:
    """Where a name comes from: this package, an installed package (version), a file (sha256), or the session (neither)."""

    name: str
    version: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version or self.sha256[:12]}".strip()


BUILT_IN = Origin("tbbn")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered name's value, one-line description, options and origin."""

    value: T
    description: str
    origin: Origin
    given: Mapping[str, Option] | None = None  # its options; None reads them from the value

    @cached_property  # every config reads it
    def options(self) -> Mapping[str, Option]:
        return options_of(self.value) if self.given is None else self.given


class Registry(Generic[T]):
    """The names of one kind. Registering a name twice is an error; the error for an unknown name suggests the nearest one."""

    def __init__(self, kind: str, home: str, *, configurable: bool = False) -> None:
        self.kind, self.home = kind, home  # the home module registers the built-in names
        self.configurable = configurable  # whether a config may set options of the registered values
        self._entries: dict[str, Entry[T]] = {}

    def register(
        self,
        name: str,
        value: T,
        description: str = "",
        options: Mapping[str, Option] | None = None,
        *,
        origin: Origin | None = None,
        replace: bool = False,
    ) -> T:
        """Register ``value`` under a name. ``options`` default to those read from it, ``origin`` to the calling module's.

        Registering the same function or class again, as a notebook cell does when it is run twice, replaces it.
        """
        origin = origin or _origin_of(sys._getframe(1).f_globals)
        if origin != BUILT_IN:
            import_module(self.home)  # so that the built-in names are taken
        if not name or not isinstance(name, str) or set(name) & set(" ,+:()="):
            raise UserError(f"{self.kind} {name!r}: a name is text without spaces or any of , + : ( ) =")
        old = self._entries.get(name)
        if old is not None and not replace and not _same_place(old.value, value):
            raise UserError(
                f"{self.kind} {name!r} is already registered by {old.origin}; {origin} must use another name."
            )
        self._check(name, value)
        description = description or (inspect.getdoc(value) or "").partition("\n")[0].rstrip(".")
        if options is None and not self.configurable:
            options = {}
        self._entries[name] = Entry(value, description, origin, options)
        return value

    def _check(self, name: str, value: Any) -> None:
        """Raise for values that can never work: options are read from a class, so methods and norms must be classes."""
        article = "an" if self.kind[0] in "aeiou" else "a"
        if self.configurable and not all(
            isinstance(v, type) for v in (value if isinstance(value, tuple) else (value,))
        ):
            raise UserError(f"{self.kind} {name!r} must be a class, got {_shown(value)}; decorate the class itself.")
        if not self.configurable and not callable(value):
            raise UserError(
                f"{self.kind} {name!r} must be a function that returns {article} {self.kind}, got {_shown(value)}."
            )

    def decorator(
        self, name: str, description: str = "", options: Mapping[str, Option] | None = None
    ) -> Callable[[Any], Any]:
        """:meth:`register` as a decorator. The description defaults to the first line of the docstring."""
        if not isinstance(name, str):
            raise UserError(f'register_{self.kind} needs a name: @tbbn.register_{self.kind}("my-{self.kind}").')
        origin = _origin_of(sys._getframe(1).f_globals)
        return lambda value: self.register(name, value, description, options, origin=origin)

    def entry(self, name: str) -> Entry[T]:
        """The entry of a name."""
        if name not in self:
            raise unknown_name(self.kind, str(name), self._entries)
        return self._entries[name]

    def get(self, name: str) -> T:
        """The value registered under a name."""
        return self.entry(name).value

    def make(self, name: str, /, **offered: Any) -> Any:
        """Call the value registered under a name with those offered arguments that it accepts."""
        value: Any = self.get(name)
        wanted = inspect.signature(value).parameters
        for parameter in wanted.values():
            required = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if required and parameter.name not in offered:
                takes = f"may take {', '.join(offered)}" if offered else "is called without arguments"
                raise UserError(f"{self.place(name)}: {takes}; its {parameter.name!r} needs a default.")
        with self.blame(name):
            return value(**{key: given for key, given in offered.items() if key in wanted})

    @contextmanager
    def blame(self, name: str) -> Iterator[None]:
        """Turn an error in a plugin's code into a one-line :class:`UserError` that names what failed; chains the original."""
        try:
            yield
        except (UserError, MemoryError):
            raise
        except Exception as error:
            origin = self.entry(name).origin
            if origin == BUILT_IN:
                raise
            raise UserError(f"{self.place(name, error)}: {one_line(error)}.") from error

    def place(self, name: str, at: Any = None) -> str:
        """A name as errors show it. A plugin's has the file and line of ``at``: an error in it, or one of its functions."""
        entry = self.entry(name)
        if entry.origin == BUILT_IN:
            return f"{self.kind} {name!r}"
        line = _plugins().line_of(entry.value, at)
        return f"{self.kind} {name!r} of {entry.origin}" + (f", {line}" if line else "")

    def options(self, name: str) -> dict[str, Option]:
        """The options of a name, with their defaults and help."""
        return dict(self.entry(name).options)

    def describe(self) -> dict[str, Entry[T]]:
        """All names, including those of installed plugins, in the order of registration."""
        import_module(self.home)
        _plugins().load_installed()
        return dict(self._entries)

    def registered(self) -> dict[str, Entry[T]]:
        """The names registered so far, without importing installed plugins."""
        import_module(self.home)
        return dict(self._entries)

    def __contains__(self, name: object) -> bool:
        import_module(self.home)
        if name not in self._entries:
            _plugins().load_installed()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.describe())


def _plugins() -> Any:
    return import_module("tbbn.plugins")  # imported lazily: the layer alone does not need it


def _origin_of(namespace: Mapping[str, Any]) -> Origin:
    """The origin of code with these globals."""
    built_in = str(namespace.get("__name__")).partition(".")[0] == "tbbn"
    found: Origin = BUILT_IN if built_in else _plugins().origin_of(namespace)
    return found


def _shown(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"the {type(value).__name__} {name}" if name else f"{value!r:.60}"


def _same_place(old: Any, new: Any) -> bool:
    places = [(getattr(v, "__module__", None), getattr(v, "__qualname__", None)) for v in (old, new)]
    return places[0] == places[1] and None not in places[0] and "<lambda>" not in str(places[0][1])


METHODS: Registry[Any] = Registry("method", "tbbn.bench.methods", configurable=True)
NORMS: Registry[Any] = Registry("norm", "tbbn.nn.convert", configurable=True)
DATASETS: Registry[Any] = Registry("dataset", "tbbn.bench.data.loading")
BACKBONES: Registry[Any] = Registry("backbone", "tbbn.bench.models")
AUGMENTATIONS: Registry[Any] = Registry("augmentation", "tbbn.bench.data.augment")
LOGGERS: Registry[Any] = Registry("logger", "tbbn.bench.loggers")
REGISTRIES = (METHODS, NORMS, DATASETS, BACKBONES, AUGMENTATIONS, LOGGERS)

register_method = METHODS.decorator
register_norm = NORMS.decorator
register_dataset = DATASETS.decorator
register_backbone = BACKBONES.decorator
register_augmentation = AUGMENTATIONS.decorator
register_logger = LOGGERS.decorator
