"""What the functions of this package do unless they are told otherwise."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tbbn.bench.data import augment, colour, loading, memory, outline, sampling, scenario, types
from tbbn.bench.data.packed import pack, workers, writer
from tbbn.bench.data.sources import bundled, contents, folders, images, listing

BATCHES = {"ratio": (3, 1), "length": "longer", "last": "short"}  # the paper's
SOURCES = {"size": None, "unreadable": "fail", "split": 0.0}
DEFAULTS: dict[Any, dict[str, Any]] = {
    augment.Centred: {"flip": False, "crop": None},
    augment.Shift: {"crop": None, "pad": None},
    augment.ResizedCrop: {"crop": None, "padded": False, "scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)},
    colour.Brightness: {"strength": 63 / 255},
    colour.Greyscale: {"probability": 0.2},
    colour.ColourJitter: {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "probability": 0.8},
    loading.load: {"root": "data", "download": True, **SOURCES, "on_progress": None},
    loading.found: {"root": "data"},
    outline.outline: {"root": "data", **SOURCES},
    sampling.batch_layout: {"ratio": (3, 1)},
    sampling.epoch_blocks: BATCHES,
    sampling.online_blocks: {"ratio": (3, 1), "last": "short", "past_only": False, "without": None},
    sampling.steps_per_epoch: {**BATCHES, "online": False},
    scenario.make_scenario: {
        "base_classes": 0, "class_order": "seed", "class_order_seed": 0, "validation": 0.0, "seed": 0
    },
    types.Source: {"groups": (), "skipped": ()},
    pack.pack: {
        "size": 256, "workers": None, "classes": None, "split": 0.0, "unreadable": "fail", "overwrite": False,
        "shard_bytes": None, "on_progress": None,
    },
    workers.Workers: {"n": None, "threads": False},
    writer.PackRequest: {"keep_common_size": True, "shard_bytes": None, "skip_option": "--unreadable skip"},
    writer.write_packed: {"unreadable": "fail", "overwrite": False, "wait": False, "on_progress": None},
    bundled.digits: {"name": "digits", "size": None},
    bundled.synthetic: {"name": "synthetic", "size": None, "argument": "20x40x10x16"},
    contents.Contents: {"skipped": ()},
    contents.make_source: {"size": None},
    folders.list_named: {"split": 0.0},
    folders.read_folder: {
        **SOURCES, "channels": 3, "classes": None, "test_names": ("test", "val"), "cache": False, "on_progress": None
    },
    images.decode: {"size": None, "channels": 3, "unreadable": "fail", "on_progress": None},
    listing.list_folder: {"classes": None, "test_names": ("test", "val"), "split": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__name__)
def test_a_function_has_its_defaults(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == DEFAULTS[function]


def test_a_memory_begins_empty_and_is_kept_as_in_the_paper() -> None:
    made = memory.ExemplarMemory(7)
    settings = (made.per_class, made.rounding, made.selection, made.shrink)
    assert settings == (False, "floor", "herding", "truncate")
    assert (len(made), made.index.tolist(), made.labels.tolist(), made.seen) == (0, [], [], 0)
