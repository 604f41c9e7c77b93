"""Names for methods, norms, data sets, backbones and augmentations: one table for each kind, open to plugins.

Register something of your own with a decorator; the name then works in recipes, on the command line and in ``tbbn.run``::

    @tbbn.register_norm("frn", "filter response normalisation")
    class FilterResponseNorm(nn.Module): ...

What this package brings is registered in the same way by the table's home module, which is imported when the table is first
asked. This module itself imports neither torch nor the bench, so the config may ask it for option defaults::

    NORMS.defaults("gn")     # {"groups": 16, ...}: every option that has a default; {} for a name that is not registered
    METHODS.options("eeil")  # {"kd": Option(default=1.0, help="..."), ...}; an unknown name is an error
    METHODS.get("eil")       # UserError: unknown method 'eil'; ... Did you mean 'eeil'?

Plugins are modules or files that call the decorators. Installed ones (entry point group ``tbbn.plugins``) are imported when a
name is not built in, or when names are listed; others by :func:`load_plugin`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from tbbn.errors import UserError, unknown_name

T = TypeVar("T")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, **kwargs
GROUP = "tbbn.plugins"  # the entry points of installed plugins


@dataclass(frozen=True)
class Origin:
    """Where a name comes from: this package, an installed one (version), a file (sha256), or the running session (neither)."""

    name: str
    version: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version or self.sha256[:12]}".strip()


BUILT_IN = Origin("tbbn")
SESSION = Origin("this session")


@dataclass(frozen=True)
class Option:
    """A setting of a method or a norm. A default of None means: not set (a norm takes it from the layer it replaces)."""

    default: Any
    help: str = ""


def option(default: Any, help: str) -> Any:
    """A field of a method's dataclass that explains itself: ``kd: float = option(1.0, "weight of the distillation")``."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered name: what it stands for, a line about it, its options, and where it comes from."""

    value: T
    description: str
    origin: Origin
    given: Mapping[str, Option] | None = None  # its options, where they are not to be read off it

    @property
    def options(self) -> Mapping[str, Option]:
        return options_of(self.value) if self.given is None else self.given


class Registry(Generic[T]):
    """The names of one kind. A name taken twice is an error; an unknown name is an error that offers the nearest one."""

    def __init__(self, kind: str, home: str, *, configurable: bool = False) -> None:
        self.kind, self.home = kind, home  # the home module registers what is built in
        self.configurable = configurable  # whether a config may set options of what is registered
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
        """Give ``value`` a name. Without ``options`` they are read off it, without ``origin`` it is the calling module's.

        Registering the same function or class again, as a notebook cell does when it is run twice, replaces it.
        """
        origin = origin or origin_of(sys._getframe(1).f_globals)
        if origin != BUILT_IN:
            import_module(self.home)  # so that a name this package uses is taken
        if not name or not isinstance(name, str) or set(name) & set(" ,+:()="):
            raise UserError(f"{self.kind} {name!r}: a name is text without spaces or any of , + : ( ) =")
        old = self._entries.get(name)
        if old is not None and not replace and not _same_place(old.value, value):
            raise UserError(
                f"{self.kind} {name!r} is already registered by {old.origin}; {origin} must use another name."
            )
        description = description or (inspect.getdoc(value) or "").partition("\n")[0].rstrip(".")
        if options is None and not self.configurable:
            options = {}
        self._entries[name] = Entry(value, description, origin, options)
        return value

    def decorator(
        self, name: str, description: str = "", options: Mapping[str, Option] | None = None
    ) -> Callable[[Any], Any]:
        """:meth:`register` as a decorator; without a description the first line of the docstring is used."""
        if not isinstance(name, str):
            raise UserError(f'register_{self.kind} needs a name: @tbbn.register_{self.kind}("my-{self.kind}").')
        origin = origin_of(sys._getframe(1).f_globals)
        return lambda value: self.register(name, value, description, options, origin=origin)

    def entry(self, name: str) -> Entry[T]:
        """All that is known about a name."""
        if name not in self:
            raise unknown_name(self.kind, str(name), self._entries)
        return self._entries[name]

    def get(self, name: str) -> T:
        """What a name stands for."""
        return self.entry(name).value

    def make(self, name: str, /, **offered: Any) -> Any:
        """Call what a name stands for with those of the offered arguments that it names itself."""
        value: Any = self.get(name)
        wanted = inspect.signature(value).parameters
        for parameter in wanted.values():
            required = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if required and parameter.name not in offered:
                raise UserError(
                    f"{self.kind} {name!r} may take {', '.join(offered)}; its {parameter.name!r} needs a default."
                )
        return value(**{key: given for key, given in offered.items() if key in wanted})

    def options(self, name: str) -> dict[str, Option]:
        """The options of a name, with default and help."""
        return dict(self.entry(name).options)

    def defaults(self, name: str) -> dict[str, Any]:
        """The options that have a default, for a config.

        Empty for a name that is not registered: a config may be read where its plugin is missing, or cannot be loaded.
        """
        try:
            found = self.options(name)
        except UserError:
            return {}
        return {option: known.default for option, known in found.items() if known.default is not None}

    def describe(self) -> dict[str, Entry[T]]:
        """Every name there is, those of installed plugins included, in the order of registration."""
        import_module(self.home)
        load_installed()
        return dict(self._entries)

    def registered(self) -> dict[str, Entry[T]]:
        """The names registered so far, without looking for installed plugins."""
        import_module(self.home)
        return dict(self._entries)

    def __contains__(self, name: object) -> bool:
        import_module(self.home)
        if name not in self._entries:
            load_installed()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.describe())


def options_of(value: Any) -> dict[str, Option]:
    """A dataclass's fields (help in their metadata), or the keyword-only arguments of a function or constructor."""
    if is_dataclass(value):
        return {
            f.name: Option(None if f.default is MISSING else f.default, f.metadata.get("help", ""))
            for f in fields(value)
        }
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # not callable, or written in C
        return {}
    return {p.name: Option(None if p.default is p.empty else p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


METHODS: Registry[Any] = Registry("method", "tbbn.bench.methods", configurable=True)
NORMS: Registry[Any] = Registry("norm", "tbbn.nn.convert", configurable=True)
DATASETS: Registry[Any] = Registry("dataset", "tbbn.bench.data.loading")
BACKBONES: Registry[Any] = Registry("backbone", "tbbn.bench.models")
AUGMENTATIONS: Registry[Any] = Registry("augmentation", "tbbn.bench.data.augment")
REGISTRIES = (METHODS, NORMS, DATASETS, BACKBONES, AUGMENTATIONS)

register_method = METHODS.decorator
register_norm = NORMS.decorator
register_dataset = DATASETS.decorator
register_backbone = BACKBONES.decorator
register_augmentation = AUGMENTATIONS.decorator


# Plugins. An import that fails leaves no names behind.

_loaded: dict[str, Origin] = {}  # by module name or file path, and GROUP for the installed ones
_loading: list[Origin] = []  # the plugin being imported


def load_plugin(plugin: str) -> Origin:
    """Import a plugin, given as a module's name or a file (``./mine.py``); return what it is, with version or file hash.

    A second call does nothing, unless the file has changed.
    """
    is_file = plugin.endswith(".py") or "/" in plugin
    path = Path(plugin).expanduser().resolve()
    key, origin = (str(path), _file_origin(plugin)) if is_file else (plugin, _module_origin(plugin))
    if _loaded.get(key) != origin:
        with _importing(plugin, origin):
            if is_file:
                _run_file(path)
            else:
                import_module(plugin)
        _loaded[key] = origin
    return origin


def load_installed() -> None:
    """Import every installed plugin, once."""
    from importlib import metadata  # slow, and not needed by who uses the layer alone

    if GROUP in _loaded or _loading:
        return
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.value, point.name)):
        origin = Origin(point.dist.name, point.dist.version) if point.dist else Origin(point.value)
        with _importing(point.value, origin):
            point.load()
        _loaded[point.module] = origin
    _loaded[GROUP] = BUILT_IN


@contextmanager
def temporary(*, fresh: bool = False) -> Iterator[None]:
    """What is registered inside is gone afterwards; ``fresh``: begin with what is built in, as a new process does."""
    tables, loaded = _tables(), dict(_loaded)
    if fresh:
        _restore([{} for _ in REGISTRIES])
        _loaded.clear()
    try:
        yield
    finally:
        _restore(tables)
        _loaded.clear()
        _loaded.update(loaded)


@contextmanager
def _importing(plugin: str, origin: Origin) -> Iterator[None]:
    tables = _tables()
    _loading.append(origin)
    try:
        yield
    except (Exception, SystemExit) as error:
        _restore(tables)
        if isinstance(error, ModuleNotFoundError) and error.name == plugin:
            raise UserError(
                f"plugin {plugin}: no such module; install it, or give a file such as ./{plugin}.py."
            ) from None
        first = (str(error).strip().splitlines() or [""])[0]
        what = first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
        raise UserError(f"plugin {plugin} cannot be loaded: {what}") from error
    finally:
        _loading.pop()


def _tables() -> list[dict[str, Entry[Any]]]:
    return [dict(registry._entries) for registry in REGISTRIES]


def _restore(tables: list[dict[str, Entry[Any]]]) -> None:
    for registry, before in zip(REGISTRIES, tables, strict=True):
        # Built-in names may have been registered meanwhile; their home module does so only once.
        built_in = {name: entry for name, entry in registry._entries.items() if entry.origin == BUILT_IN}
        registry._entries = built_in | before


def _run_file(path: Path) -> None:
    name = f"tbbn_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # a dataclass looks its module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _file_origin(file: str) -> Origin:
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"plugin {file}: no such file.")
    return Origin(file, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def _module_origin(module: str) -> Origin:
    """The installed package that holds a module, or the module with its file's hash."""
    from importlib import metadata

    top = module.partition(".")[0]
    for package in metadata.packages_distributions().get(top, ()):
        return Origin(package, metadata.version(package))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # the import itself will say what is wrong
        return Origin(module)
    file = spec.origin if spec is not None else None
    return Origin(module, sha256=_file_origin(file).sha256) if file and Path(file).is_file() else Origin(module)


def origin_of(namespace: Mapping[str, Any]) -> Origin:
    """Where code with these globals comes from."""
    module = namespace.get("__name__", "")
    if module.partition(".")[0] == "tbbn":
        return BUILT_IN
    if _loading:
        return _loading[-1]
    if module in ("", "__main__", "__mp_main__"):
        file = str(namespace.get("__file__", ""))
        return _file_origin(file) if Path(file).is_file() else SESSION
    return _module_origin(module)


def _same_place(old: Any, new: Any) -> bool:
    places = [(getattr(v, "__module__", None), getattr(v, "__qualname__", None)) for v in (old, new)]
    return places[0] == places[1] and None not in places[0] and "<lambda>" not in str(places[0][1])
