"""Group records that have the same config but different seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tbbn.bench.config import PLACE, NormChoice, RunConfig, SaveConfig, flatten, to_dict
from tbbn.bench.engine.record import Record

# A label shows these settings first among those that distinguish two groups, because they say most.
_TELLING = ("data.name", "protocol", "train.keep", "train.epochs", "train.scale", "backbone", "train.optimizer")
# Settings of where a run was made and what it saved, which do not affect results.
WHERE = ("device", "threads", *PLACE, "data.stream", "save.tasks")
Seed = tuple[int, int]  # the run's seed, and the seed of the class order


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds."""

    config: RunConfig  # without seeds and the settings in WHERE
    detail: str  # settings other than the norm that distinguish the group from others with its method
    runs: dict[Seed, Record]

    @property
    def method(self) -> str:
        return self.config.names[0]

    @property
    def norm(self) -> str:
        return self.config.names[1]

    @property
    def label(self) -> str:
        return f"{self.config.label} [{self.detail}]" if self.detail else self.config.label

    @property
    def setup(self) -> str:
        """The label without the norm."""
        return f"{self.method} [{self.detail}]" if self.detail else self.method

    @property
    def records(self) -> list[Record]:
        return list(self.runs.values())

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.status == "finished" and record.accuracy]

    @property
    def drawn(self) -> list[Record]:
        """The runs for curves: only finished ones if there are any, because an unfinished run would cut the curve short."""
        return [record for record in self.finished or self.records if record.accuracy]

    @property
    def apart_from_norm(self) -> RunConfig:
        """The config without the norm: equal for groups that differ only in their norm."""
        return _without_norm(self.config)


def groups(records: Sequence[Record]) -> list[Group]:
    """The groups of these records, in order of appearance. Runs with the same config and seed count once."""
    found: dict[RunConfig, dict[Seed, Record]] = {}
    for record in records:
        config = record.run_config
        runs = found.setdefault(without_seed(config), {})
        seed = config.seed, config.data.class_order_seed
        if seed not in runs or _knows(record) > _knows(runs[seed]):
            runs[seed] = record
    alike: dict[str, dict[RunConfig, None]] = {}
    for config in found:
        alike.setdefault(config.names[0], {})[_without_norm(config)] = None
    always = _scenario_settings(list(found))
    details = {config: text for configs in alike.values() for config, text in _details(list(configs), always).items()}
    return [Group(config, details[_without_norm(config)], runs) for config, runs in found.items()]


def blocks(found: Sequence[Group]) -> list[list[Group]]:
    """Collect groups that differ only in their norm, in order of appearance."""
    together: dict[RunConfig, list[Group]] = {}
    for group in found:
        together.setdefault(group.apart_from_norm, []).append(group)
    return list(together.values())


def stamp(configs: Iterable[RunConfig]) -> str:
    """The prefix of every table and figure of runs that trained only part of their epochs or tasks; empty for others."""
    configs = list(configs)
    scales = sorted({config.train.scale for config in configs} - {1.0})
    parts = [f"SCALE {' and '.join(f'{scale:g}' for scale in scales)}: a fraction of the epochs."] if scales else []
    stopped = dict.fromkeys(config.data.part for config in configs if config.data.part)
    if stopped:
        some = "" if all(config.data.part for config in configs) else "some runs "
        parts.append(f"STOPPED: {some}after {' and '.join(stopped)}.")
    return "".join(f"{part} " for part in parts)


def repeated_note(records: Sequence[Record], found: Sequence[Group]) -> list[str]:
    """A note on how many records repeat another one and whether their results agree; empty without repeats."""
    counted = {(group.config, seed): record for group in found for seed, record in group.runs.items()}
    repeated = len(records) - len(counted)
    if not repeated:
        return []
    note = f"{repeated} of the {len(records)} runs repeat the config and seed of another and are not counted again."
    differ = 0
    for record in records:
        config = record.run_config
        chosen = counted[without_seed(config), (config.seed, config.data.class_order_seed)]
        differ += record.status == chosen.status == "finished" and record.accuracy != chosen.accuracy
    return [f"{note} {differ} of them have different results: the first of each is shown." if differ else note]


def _knows(record: Record) -> tuple[bool, int]:
    return record.status == "finished", len(record.accuracy)


def without_seed(config: RunConfig) -> RunConfig:
    """The config without seeds and the settings in WHERE: equal for all runs of a group."""
    stop = config.data.stop_after if config.data.part else 0
    data = replace(config.data, class_order_seed=-1, root="", download=True, stream="auto", stop_after=stop)
    return replace(config, seed=0, device="", threads=0, data=data, save=SaveConfig())


def _without_norm(config: RunConfig) -> RunConfig:
    return replace(config, norm=NormChoice(""))


def _scenario_settings(configs: Sequence[RunConfig]) -> list[str]:
    """Settings that every label must show if they differ: data set, scenario, protocol, which epoch is kept, network."""
    names = dict.fromkeys(config.data.name for config in configs)
    chosen = ["data.name"] if len(names) > 1 else []
    trees = [flatten(to_dict(config)) for config in configs]
    scenario = ("data.tasks", "data.base_classes", "data.stop_after", "data.online")
    for key in (*scenario, "protocol", "train.keep", "backbone"):
        if any(len({tree[key] for tree in trees if tree["data.name"] == name}) > 1 for name in names):
            chosen.append(key)
    return chosen


def _details(configs: Sequence[RunConfig], always: Sequence[str]) -> dict[RunConfig, str]:
    """The label details of these configs of one method: the settings in ``always``, plus any that tell further ones apart."""
    trees = [flatten(to_dict(config)) for config in configs]
    keys = sorted({key for tree in trees for key in tree}, key=_by_telling)
    chosen = list(always)
    seen = [tuple(str(tree.get(key)) for key in always) for tree in trees]
    for key in keys:
        longer = [(*known, str(tree.get(key))) for known, tree in zip(seen, trees, strict=True)]
        if len(set(longer)) > len(set(seen)):
            chosen, seen = [*chosen, key], longer
    return {
        config: ", ".join(_detail(config, k, v) for k, v in zip(chosen, values, strict=True))
        for config, values in zip(configs, seen, strict=True)
    }


def _detail(config: RunConfig, key: str, value: str) -> str:
    if key == "data.stop_after":
        return config.data.part or "all tasks"
    return value if key in ("data.name", "protocol") else f"{key}={value}"


def _by_telling(key: str) -> tuple[int, str]:
    return _TELLING.index(key) if key in _TELLING else len(_TELLING), key
