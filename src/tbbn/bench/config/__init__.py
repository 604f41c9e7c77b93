"""The config of a run: every number that affects it.

- ``settings.py``: every setting with its default, help, choices and limits
- ``options.py``: default values of the options of norms and methods
- ``protocols.py``: defaults that depend on the data set, the protocol, quirks and online learning
- ``resolve.py``: merge layers of settings into a config; later layers override earlier ones
- ``toml.py``: convert configs to TOML and back
"""

from tbbn.bench.config.protocols import PROTOCOLS, QUIRKS, Values
from tbbn.bench.config.resolve import (
    check_settings,
    complete,
    flatten,
    merge,
    nearest_setting,
    parse_value,
    resolve,
    with_defaults,
    without_place,
)
from tbbn.bench.config.settings import (
    CHOICES,
    PLACE,
    SECTIONS,
    SETTINGS,
    BatchConfig,
    Choice,
    DataConfig,
    FirstTaskConfig,
    MemoryConfig,
    MethodChoice,
    NormChoice,
    RunConfig,
    SaveConfig,
    Setting,
    TrainConfig,
)
from tbbn.bench.config.toml import parse_toml, read_toml, to_dict, to_toml

__all__ = [
    "CHOICES",
    "PLACE",
    "PROTOCOLS",
    "QUIRKS",
    "SECTIONS",
    "SETTINGS",
    "BatchConfig",
    "Choice",
    "DataConfig",
    "FirstTaskConfig",
    "MemoryConfig",
    "MethodChoice",
    "NormChoice",
    "RunConfig",
    "SaveConfig",
    "Setting",
    "TrainConfig",
    "Values",
    "check_settings",
    "complete",
    "flatten",
    "merge",
    "nearest_setting",
    "parse_toml",
    "parse_value",
    "read_toml",
    "resolve",
    "to_dict",
    "to_toml",
    "with_defaults",
    "without_place",
]
