"""Plugins: modules or files that call ``tbbn.register_*``, and the origin of registered names.

Installed packages announce their plugins by entry points in the group ``tbbn.plugins``. A failed import is a one-line error and
leaves no names registered.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tbbn.errors import UserError, one_line
from tbbn.registry import BUILT_IN, REGISTRIES, Entry, Origin

GROUP = "tbbn.plugins"
SESSION = Origin("this session")

_loaded: dict[str, Origin] = {}  # by module name or file path; GROUP marks that the installed ones are loaded
_loading: list[Origin] = []  # the plugin being imported
_MODULE = re.compile(r"\w[\w-]*(\.\w+)*")


class MissingPlugin(UserError):
    """A plugin's file does not exist."""


def load_plugin(plugin: str) -> Origin:
    """Import a plugin, given as a module name or a file (``./mine.py``), and return its origin with version or file hash.

    A second call does nothing unless the file has changed.
    """
    if not (plugin.endswith(".py") or "/" in plugin):
        if not _MODULE.fullmatch(plugin):
            raise UserError(f"plugin {plugin!r}: must be a module's name or a Python file, such as ./mine.py.")
        if plugin not in _loaded:
            origin = _module_origin(plugin)
            with _importing(plugin, origin):
                import_module(plugin)
            _loaded[plugin] = origin
        return _loaded[plugin]
    path, origin = Path(plugin).expanduser().resolve(), _file_origin(plugin)
    if _loaded.get(str(path)) != origin:
        with _importing(plugin, origin):
            _run_file(path)
        _loaded[str(path)] = origin
    return origin


def load_installed() -> None:
    """Import every installed plugin, once per process."""
    from importlib import metadata  # imported lazily: it is slow, and the layer alone does not need it

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
    """Undo registrations made inside on exit. ``fresh`` starts with the built-in names only, like a new process."""
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
    except BaseException as error:
        _restore(tables)
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{plugin}.".startswith(f"{error.name}."):
            raise UserError(
                f"plugin {plugin}: no such module; install it, or give a file such as ./{plugin}.py."
            ) from None
        what = str(error) if isinstance(error, UserError) else one_line(error)
        line = next((trace for trace in reversed(_traces(error)) if trace.tb_frame.f_code.co_name == "<module>"), None)
        where = "" if line is None else f" ({Path(line.tb_frame.f_code.co_filename).name} line {line.tb_lineno})"
        raise UserError(f"plugin {plugin} cannot be loaded: {what}{where}") from error
    finally:
        _loading.pop()


def _tables() -> list[dict[str, Entry[Any]]]:
    return [dict(registry._entries) for registry in REGISTRIES]


def _restore(tables: list[dict[str, Entry[Any]]]) -> None:
    for registry, before in zip(REGISTRIES, tables, strict=True):
        # Keep built-in names that were registered meanwhile: their home module registers them only once.
        built_in = {name: entry for name, entry in registry._entries.items() if entry.origin == BUILT_IN}
        registry._entries = built_in | before


def _run_file(path: Path) -> None:
    name = f"tbbn_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # @dataclass looks up its module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _file_origin(file: str) -> Origin:
    path = Path(file).expanduser()
    if path.is_dir():
        raise UserError(f"plugin {file}: is a folder; give a Python file such as ./mine.py, or a module's name.")
    if not path.is_file():
        raise MissingPlugin(f"plugin {file}: no such file{'' if path.is_absolute() else f' in {Path.cwd()}'}.")
    if path.suffix != ".py":
        raise UserError(f"plugin {file}: must be a Python file, with the ending .py.")
    try:
        return Origin(file, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    except OSError as error:
        raise UserError(f"plugin {file}: cannot be read: {error.strerror}.") from None


def _module_origin(module: str) -> Origin:
    """The installed package that contains a module, or the module with its file's hash."""
    from importlib import metadata

    top = module.partition(".")[0]
    for package in metadata.packages_distributions().get(top, ()):
        return Origin(package, metadata.version(package))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # the import itself will raise a better error
        return Origin(module)
    file = spec.origin if spec is not None else None
    return Origin(module, sha256=_file_origin(file).sha256) if file and Path(file).is_file() else Origin(module)


def origin_of(namespace: Mapping[str, Any]) -> Origin:
    """The origin of code with these globals, for code outside this package."""
    module = namespace.get("__name__", "")
    if _loading:
        return _loading[-1]
    if module in ("", "__main__", "__mp_main__"):
        file = str(namespace.get("__file__", ""))
        return _file_origin(file) if Path(file).is_file() else SESSION
    return _module_origin(module)


def line_of(value: Any, at: Any = None) -> str:
    """The source line of a plugin's class or function, such as "mine.py line 19", or that of ``at``; empty if unknown.

    ``at`` is a function, or an error; for an error it is the last line that ran in the plugin's module.
    """
    value = value[-1] if isinstance(value, tuple) else value
    value = value.func if isinstance(value, partial) else value
    if isinstance(at, BaseException):
        for trace in reversed(_traces(at)):
            if trace.tb_frame.f_globals.get("__name__") == value.__module__ and _is_written(trace.tb_frame):
                return f"{Path(trace.tb_frame.f_code.co_filename).name} line {trace.tb_lineno}"
        at = None
    value = value if at is None else at
    try:
        file, line = inspect.getsourcefile(value), inspect.getsourcelines(value)[1]
    except Exception:  # the file may be gone, or no valid Python while somebody edits it
        return ""
    return f"{Path(file).name} line {line}" if file else ""


def _traces(error: BaseException) -> list[TracebackType]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_written(frame: FrameType) -> bool:
    """Whether a frame's code comes from a file or a cell, unlike the code that @dataclass generates."""
    return frame.f_code.co_filename != "<string>"


def failure(error: BaseException) -> str:
    """Describe an error for a run's record. If a plugin's code failed, with its name, the plugin and the line."""
    what = f"{type(error).__name__}: {error}"
    for trace in reversed(_traces(error)):
        if (owner := _owner(trace.tb_frame)) and _is_written(trace.tb_frame):
            code = trace.tb_frame.f_code
            return f"{owner}, {Path(code.co_filename).name} line {trace.tb_lineno}: {what}"
    return what


def _owner(frame: FrameType) -> str:
    """The plugin's registered object whose function or method this frame runs; empty for other code."""
    found: dict[str, int] = {}  # the number of a class's bases: one may be registered beside classes derived from it
    for registry in REGISTRIES:
        for name, entry in registry._entries.items():
            for value in entry.value if isinstance(entry.value, tuple) else (entry.value,):
                runs = getattr(value, "__code__", None) is frame.f_code
                if isinstance(value, type):
                    runs = (
                        isinstance(frame.f_locals.get("self"), value)
                        and frame.f_globals["__name__"] == value.__module__
                    )
                if runs and entry.origin != BUILT_IN:
                    found[f"{registry.kind} {name!r} of {entry.origin}"] = len(getattr(value, "__mro__", ()))
    return max(found, key=found.__getitem__, default="")
