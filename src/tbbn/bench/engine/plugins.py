"""The plugins of a config: load them before a run, record them, and require them when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tbbn.bench.config import RunConfig
from tbbn.bench.config.options import default_options
from tbbn.bench.data.loading import base_names
from tbbn.bench.data.sources.arrays import is_remembered
from tbbn.errors import UserError
from tbbn.plugins import MissingPlugin, load_plugin
from tbbn.registry import AUGMENTATIONS, BACKBONES, BUILT_IN, DATASETS, METHODS, NORMS, REGISTRIES, Registry

_TABLES = {registry.kind: registry for registry in REGISTRIES}


def load_plugins(config: RunConfig) -> None:
    """Load every plugin that a config names."""
    for plugin in config.plugins:
        load_plugin(plugin)


def load_needed_plugins(config: RunConfig) -> None:
    """Load the plugins of a run's config. One may be missing, say because its file moved, if all names are registered."""
    for plugin in config.plugins:
        try:
            load_plugin(plugin)
        except UserError as error:
            if all(name in registry for registry, name in _names(config)):
                continue
            if isinstance(error, MissingPlugin):
                raise MissingPlugin(f"{str(error)[:-1]}; if the file is elsewhere, add --plugin PATH.") from None
            raise


def used_plugins(config: RunConfig) -> list[dict[str, Any]]:
    """For the record: each plugin that the config uses, with its version or file hash, the names used, and their defaults."""
    found: dict[Any, dict[str, Any]] = {}
    for registry, name in _names(config):
        origin = registry.entry(name).origin if name in registry else BUILT_IN
        if origin != BUILT_IN:
            mark = (
                {"version": origin.version}
                if origin.version
                else {"file_sha256": origin.sha256}
                if origin.sha256
                else {}
            )
            entry = found.setdefault(origin, {"name": origin.name, **mark, "brings": []})
            entry["brings"].append(f"{registry.kind} {name}")
            if registry.configurable:
                entry.setdefault("defaults", {})[registry.kind] = default_options(registry.kind, name)
    return list(found.values())


def require_plugins(config: RunConfig, recorded: Sequence[Mapping[str, Any]], where: str) -> None:
    """Load the plugins of a run that is resumed. The error for a missing plugin says which name comes from it."""
    try:
        load_needed_plugins(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for plugin in recorded:
        for text in plugin["brings"]:
            kind, _, name = text.partition(" ")
            if kind not in _TABLES or name not in _TABLES[kind]:
                raise UserError(
                    f"{where}: {kind} {name!r} comes from the plugin {_shown(plugin)}, which is not loaded; install it, or "
                    "name its file as a plugin."
                )


def check_unchanged(config: RunConfig, recorded: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse to resume a run if a plugin's file has changed: its results would belong to neither version."""
    for plugin in changed_plugins(config, recorded):
        raise UserError(
            f"{where}: the plugin {plugin['name']} has changed since this run began; to resume it, restore the file; to "
            "train anew, use tbbn run with --name, --out or --overwrite."
        )


def changed_plugins(config: RunConfig, recorded: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The plugins of a run's record whose file has changed. One that is not loaded is unknown, and not among them."""
    now = {text: plugin.get("file_sha256") for plugin in used_plugins(config) for text in plugin["brings"]}
    changed = []
    for plugin in recorded:
        here = [now.get(text) for text in plugin["brings"] if now.get(text)]
        if plugin.get("file_sha256") and here and here[0] != plugin["file_sha256"]:
            changed.append(plugin)
    return changed


def without_data(config: RunConfig) -> str:
    """Why the config's data set cannot be loaded here (a missing plugin, or data passed in memory); empty if it can."""
    for name in base_names(config.data.name):
        if name not in DATASETS:
            return f"dataset {name!r} comes from a plugin that is not loaded"
        if name == "arrays" and not is_remembered(config.data.name.partition(":")[2]):
            return "the data was passed in memory and is no longer available"
    return ""


def without_plugins(config: RunConfig) -> str:
    """Why the config's names cannot be resolved here (a missing plugin); empty if they can."""
    for registry, name in _names(config):
        if name not in registry:
            return f"{registry.kind} {name!r} comes from a plugin that is not loaded"
    return ""


def describe_plugins(recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per plugin of a record."""
    return [f"plugin {_shown(plugin)}: {', '.join(plugin['brings'])}" for plugin in recorded]


def _shown(plugin: Mapping[str, Any]) -> str:
    mark = plugin.get("version") or str(plugin.get("file_sha256", ""))[:12]
    return f"{plugin['name']} {mark}".strip()


def _names(config: RunConfig) -> Iterator[tuple[Registry[Any], str]]:
    yield METHODS, config.method.name
    yield NORMS, config.norm.name
    yield BACKBONES, config.backbone
    yield AUGMENTATIONS, config.batch.augment
    for name in base_names(config.data.name):
        yield DATASETS, name
