"""Which plugins a config needs: loaded before a run, written into its record, asked for when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tbbn.bench.config import RunConfig
from tbbn.bench.data.loading import base_names
from tbbn.errors import UserError
from tbbn.registry import (
    AUGMENTATIONS,
    BACKBONES,
    BUILT_IN,
    DATASETS,
    METHODS,
    NORMS,
    REGISTRIES,
    Registry,
    load_plugin,
)

_TABLES = {registry.kind: registry for registry in REGISTRIES}


def load_plugins(config: RunConfig) -> None:
    """Load the plugins that a config names."""
    for plugin in config.plugins:
        load_plugin(plugin)


def used_plugins(config: RunConfig) -> list[dict[str, Any]]:
    """For the record: each plugin that the config uses, with version or file hash, and the names it brings."""
    found: dict[Any, dict[str, Any]] = {}
    for registry, name in _names(config):
        origin = registry.entry(name).origin if name in registry else BUILT_IN
        if origin != BUILT_IN:
            mark = {"version": origin.version} if origin.version else {"sha256": origin.sha256} if origin.sha256 else {}
            entry = found.setdefault(origin, {"name": origin.name, **mark, "brings": []})
            entry["brings"].append(f"{registry.kind} {name}")
    return list(found.values())


def require_plugins(config: RunConfig, recorded: Sequence[Mapping[str, Any]], where: str) -> None:
    """Load what a run needs to go on; raise if something is missing, or a plugin's file is not what it was."""
    try:
        load_plugins(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for plugin in recorded:
        brings = plugin.get("brings", [])
        missing = [text for text in brings if text.partition(" ")[2] not in _TABLES.get(text.partition(" ")[0], ())]
        if missing:
            raise UserError(
                f"{where}: {missing[0]!r} comes from the plugin {_shown(plugin)}, which is not here; install it, or give "
                "its file with --plugin."
            )
        now = [entry for entry in used_plugins(config) if entry["name"] == plugin.get("name")]
        if plugin.get("sha256") and now and now[0].get("sha256") != plugin["sha256"]:
            raise UserError(
                f"{where}: the plugin {plugin.get('name')} has changed since this run began; restore it, or use another "
                "--name or --overwrite."
            )


def without_data(config: RunConfig) -> str:
    """Why the config's data set cannot be loaded here: its plugin is missing, or it was given in memory; empty if it can."""
    for name in base_names(config.data.name):
        if name == "arrays":
            return "it was given in memory"
        if name not in DATASETS:
            return f"dataset {name!r} comes from a plugin that is not here"
    return ""


def describe(recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each plugin of a record."""
    return [f"plugin {_shown(plugin)}: {', '.join(plugin.get('brings', []))}" for plugin in recorded]


def _shown(plugin: Mapping[str, Any]) -> str:
    return f"{plugin.get('name', '')} {plugin.get('version') or str(plugin.get('sha256', ''))[:12]}".strip()


def _names(config: RunConfig) -> Iterator[tuple[Registry[Any], str]]:
    yield METHODS, config.method.name
    yield NORMS, config.norm.name
    yield BACKBONES, config.backbone
    yield AUGMENTATIONS, config.batch.augment
    for name in base_names(config.data.name):
        yield DATASETS, name
