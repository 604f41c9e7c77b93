"""The defaults of norms and methods are those of their publications, as docs/norms.md and docs/methods.md have them.

A default that changes, changes the results of everybody who did not set it: list it in CHANGELOG.md under *Results*.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

from tbbn.bench.config.options import default_options
from tbbn.registry import METHODS, NORMS

COMMON: dict[str, Any] = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
PER_SAMPLE: dict[str, Any] = {"eps": 1e-5, "affine": True}  # no running statistics
OF_NORMS: dict[str, dict[str, Any]] = {
    "bn": COMMON,
    "in": PER_SAMPLE,
    "gn": {**PER_SAMPLE, "groups": 16, "channels_per_group": 0},
    "sn": {**COMMON, "unbiased": False, "zero_variance": False},
    "brn": {**COMMON, "momentum": 0.01, "r_max": 3.0, "d_max": 5.0, "eps_on_std": False},
    "cn": {**COMMON, "groups": 16},
    "tbbn": {
        **COMMON,
        "rule": "paper",
        "case": 0,
        "memory": "averaged",
        "total_variance": False,
        "output_statistics": False,
    },
    "adab2n": {**COMMON, "max_tasks": 100, "kappa": 1.0, "strength": 0.1},
    "weighted": COMMON,
}
PROXIES: dict[str, Any] = {
    "n_proxies": 10,
    "finetune_epochs": 20,
    "finetune_lr": 0.05,
    "classifier": "proxies",
    "scale": 0.0,
}
OF_METHODS: dict[str, dict[str, Any]] = {
    "afc": {**PROXIES, "importance_weight": 4.0, "importance_moves_statistics": False},
    "ft": {},
    "balaug": {"views_per_task": 3},
    "bic": {"temperature": 2.0, "held_out": 0.1, "correction_epochs": 200, "offset_penalty": 0.05},
    "derpp": {"alpha": 0.1, "beta": 0.5},
    "eeil": {
        "kd": 1.0,
        "temperature": 2.0,
        "balanced_epochs": 40,
        "balanced_lr_factor": 0.1,
        "skip_newest_head": False,
        "unbalanced_phase": False,
    },
    "er": {},
    "icarl": {"kd": 1.0},
    "il2m": {},
    "joint": {},
    "lucir": {"less_forget": 5.0, "ranking": 1.0, "margin": 0.5, "top_k": 2, "imprint": False},
    "podnet": {**PROXIES, "pod_flat": 1.0, "pod_spatial": 3.0},
    "ssil": {"kd": 1.0, "temperature": 2.0, "kd_last_task_only": False},
    "wa": {"temperature": 2.0},
}


def test_every_norm_and_method_is_covered_here() -> None:
    assert set(OF_NORMS) == set(NORMS) and set(OF_METHODS) == set(METHODS)


@pytest.mark.parametrize("name", OF_NORMS)
def test_the_defaults_of_a_norm(name: str) -> None:
    assert default_options("norm", name) == OF_NORMS[name]


@pytest.mark.parametrize("name", OF_METHODS)
def test_the_defaults_of_a_method(name: str) -> None:
    assert default_options("method", name) == OF_METHODS[name]


@pytest.mark.parametrize("name", OF_NORMS)
def test_a_norm_made_by_hand_has_the_same_defaults(name: str) -> None:
    found = NORMS.get(name)
    for layer in found if isinstance(found, tuple) else (found,):
        given = {key: p.default for key, p in inspect.signature(layer).parameters.items()}
        assert {key: given[key] for key in OF_NORMS[name] if key in given}.items() <= OF_NORMS[name].items()
        made = layer(32)
        assert isinstance(made, nn.Module) and made.eps == 1e-5
        assert getattr(made, "momentum", None) == OF_NORMS[name].get("momentum")
        assert made.weight is not None and made.bias is not None


# What an option accepts, in words. Weights of losses and numbers of epochs are not negative; the others are named here.
NOT_NEGATIVE = "at least 0"
ACCEPTED = {
    "eps": "1e-30 to 1e+30",
    "momentum": "0 to 1",
    "groups": "at least 1",
    "r_max": "at least 1",
    "rule": "paper, current or uneven",
    "case": "0 to 4",
    "memory": "averaged or own",
    "max_tasks": "1 to 1048576",
    "n_proxies": "at least 1",
    "views_per_task": "at least 1",
    "top_k": "at least 1",
    "temperature": "positive",
    "finetune_lr": "positive",
    "held_out": "positive and below 1",
    "classifier": "proxies or nme",
}


@pytest.mark.parametrize(
    ("registry", "name"), [(NORMS, name) for name in OF_NORMS] + [(METHODS, name) for name in OF_METHODS]
)
def test_what_an_option_accepts(registry: Any, name: str) -> None:
    for key, option in registry.options(name).items():
        is_flag = isinstance(option.default, bool) or option.kind is bool
        assert option.accepts == ("" if is_flag else ACCEPTED.get(key, NOT_NEGATIVE)), key
        assert option.help and not option.help.endswith("."), key
