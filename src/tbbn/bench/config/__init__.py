"""Everything that affects a run: the settings, the two protocols, and how they become a config.

A config is made of layers, later ones over earlier ones: the settings' defaults, what suits the data set, the protocol, a TOML
file, the command line. Each layer maps dotted names (``train.epochs``) to values.
"""

from tbbn.bench.config.protocols import PROTOCOLS, QUIRKS, Values
from tbbn.bench.config.resolve import check_settings, complete, flatten, parse_value, resolve
from tbbn.bench.config.settings import (
    CHOICES,
    SECTIONS,
    SETTINGS,
    BatchConfig,
    Choice,
    DataConfig,
    MemoryConfig,
    MethodChoice,
    NormChoice,
    RunConfig,
    SaveConfig,
    Setting,
    TrainConfig,
)
from tbbn.bench.config.toml import read_toml, to_dict, to_toml

__all__ = [
    "CHOICES",
    "PROTOCOLS",
    "QUIRKS",
    "SECTIONS",
    "SETTINGS",
    "BatchConfig",
    "Choice",
    "DataConfig",
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
    "parse_value",
    "read_toml",
    "resolve",
    "to_dict",
    "to_toml",
]
