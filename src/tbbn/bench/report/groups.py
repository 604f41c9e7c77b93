"""Records that belong together: the same config with different seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tbbn.bench.config import RunConfig, SaveConfig, flatten, to_dict
from tbbn.bench.engine.record import Record


def grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records that differ only in their seeds, under a label that identifies the group; in order of appearance.

    Runs with equal config and seed count once.
    """
    runs: dict[tuple[RunConfig, int, int], Record] = {}
    for record in records:
        config = record.run_config
        key = _without_seed(config), config.seed, config.data.class_order_seed
        if key not in runs or runs[key].status != "finished":
            runs[key] = record
    groups: dict[RunConfig, list[Record]] = {}
    for (config, *_), record in runs.items():
        groups.setdefault(config, []).append(record)
    alike: dict[str, list[RunConfig]] = {}
    for config in groups:
        alike.setdefault(config.label, []).append(config)
    always = _scenario_settings(list(groups))
    names = {config: name for configs in alike.values() for config, name in _labels(configs, always).items()}
    return {names[config]: members for config, members in groups.items()}


def _without_seed(config: RunConfig) -> RunConfig:
    """The config without seeds, and without settings that say where it ran, not what it did."""
    data = replace(config.data, class_order_seed=-1, root="", download=True, stream="auto")
    return replace(config, seed=0, device="", threads=0, data=data, save=SaveConfig())


def _scenario_settings(configs: Sequence[RunConfig]) -> list[str]:
    """Settings that every label must show: the data set and the scenario, where they are not the same for all."""
    names = dict.fromkeys(config.data.name for config in configs)
    chosen = ["data.name"] if len(names) > 1 else []
    for key in ("tasks", "base_classes", "stop_after", "online"):
        if any(len({getattr(c.data, key) for c in configs if c.data.name == name}) > 1 for name in names):
            chosen.append(f"data.{key}")
    return chosen


def _labels(configs: Sequence[RunConfig], always: Sequence[str]) -> dict[RunConfig, str]:
    """A distinct label for each of these configs, whose own labels are equal: the label, the settings in ``always``, and
    as few others as distinguish them."""
    trees = [flatten(to_dict(config)) for config in configs]
    keys = sorted({key for tree in trees for key in tree}, key=lambda k: (k != "data.name", k))
    chosen = list(always)
    seen = [tuple(str(tree.get(key)) for key in always) for tree in trees]
    for key in keys:
        longer = [(*known, str(tree.get(key))) for known, tree in zip(seen, trees, strict=True)]
        if len(set(longer)) > len(set(seen)):
            chosen, seen = [*chosen, key], longer
    names = {}
    for config, values in zip(configs, seen, strict=True):
        inside = ", ".join(
            value if key == "data.name" else f"{key}={value}" for key, value in zip(chosen, values, strict=True)
        )
        names[config] = f"{config.label} [{inside}]" if inside else config.label
    return names
