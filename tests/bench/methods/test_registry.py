from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import numpy as np
import pytest

from tbbn.bench.methods import Method, method
from tbbn.errors import UserError
from tbbn.options import option
from tbbn.plugins import temporary
from tbbn.registry import METHODS, register_method

NAMES = "afc balaug bic derpp eeil er ft icarl il2m joint lucir podnet ssil wa"
KINDS = {name: METHODS.get(name) for name in METHODS}


def test_all_methods_are_there_and_say_what_they_are() -> None:
    assert sorted(METHODS) == NAMES.split()
    for name, kind in KINDS.items():
        assert METHODS.entry(name).description
        assert isinstance(method(name), kind)


def test_every_default_is_a_value_the_method_takes() -> None:
    for name, kind in KINDS.items():
        defaults = {f.name: f.default for f in fields(kind)}
        assert method(name, defaults) == method(name)


def test_mistakes_of_released_programs_are_off_unless_asked_for() -> None:
    flags = {(n, f.name): f.default for n, kind in KINDS.items() for f in fields(kind) if isinstance(f.default, bool)}
    assert flags == {
        ("afc", "importance_moves_statistics"): False,
        ("lucir", "imprint"): False,  # not a mistake: its authors do it, the paper's code does not
        ("eeil", "skip_newest_head"): False,
        ("eeil", "unbalanced_phase"): False,
        ("ssil", "kd_last_task_only"): False,
    }


def test_options_become_fields_and_whole_numbers_pass_for_floats() -> None:
    lucir = method("lucir", {"less_forget": 10, "top_k": 1})
    assert lucir.less_forget == 10.0 and isinstance(lucir.less_forget, float)
    assert lucir.top_k == 1


def test_a_method_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        method("eeil").kd = 2.0  # type: ignore[attr-defined]


def test_an_unknown_method_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"unknown method 'lucri'; choose one of: afc, .*Did you mean 'lucir'\?"):
        method("lucri")
    with pytest.raises(UserError, match="unknown method 'der'"):
        method("der")


def test_an_unknown_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"unknown option of method 'ssil': 'temprature'.*Did you mean 'temperature'\?"):
        method("ssil", {"temprature": 2.0})


def test_a_method_without_options_says_so() -> None:
    with pytest.raises(UserError, match=r"^method 'ft' takes no options, got 'kd'\."):
        method("ft", {"kd": 1.0})


@pytest.mark.parametrize(
    ("name", "option", "value", "wanted"),
    [
        (
            "eeil",
            "balanced_epochs",
            2.5,
            r"method 'eeil': balanced_epochs must be a whole number \(default 40\), got 2\.5",
        ),
        ("eeil", "kd", "1", r"method 'eeil': kd must be a number \(default 1\.0\), got '1'"),
        ("eeil", "kd", True, r"method 'eeil': kd must be a number \(default 1\.0\), got True"),
        (
            "eeil",
            "skip_newest_head",
            1,
            r"method 'eeil': skip_newest_head must be true or false \(default False\), got 1",
        ),
        ("lucir", "top_k", True, r"method 'lucir': top_k must be a whole number \(default 2\), got True"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(name: str, option: str, value: object, wanted: str) -> None:
    with pytest.raises(UserError, match=f"^{wanted}"):
        method(name, {option: value})


@pytest.mark.parametrize(
    ("name", "option", "value", "wanted"),
    [
        ("wa", "temperature", 0.0, r"method 'wa': temperature must be positive, got 0\.0"),
        ("wa", "temperature", float("nan"), r"method 'wa': temperature must be positive, got nan"),
        ("wa", "temperature", float("inf"), r"method 'wa': temperature must be finite, got inf"),
        ("bic", "held_out", 1.0, r"method 'bic': held_out must be below 1, got 1\.0"),
        ("lucir", "top_k", 0, r"method 'lucir': top_k must be at least 1, got 0"),
        ("podnet", "n_proxies", 0, r"method 'podnet': n_proxies must be at least 1, got 0"),
        ("derpp", "alpha", -0.5, r"method 'derpp': alpha must be at least 0, got -0\.5"),
        ("eeil", "kd", float("inf"), r"method 'eeil': kd must be finite, got inf"),
    ],
)
def test_a_number_out_of_range_is_refused(name: str, option: str, value: float, wanted: str) -> None:
    with pytest.raises(UserError, match=f"^{wanted}"):
        method(name, {option: value})


# The default of every option, and what it accepts; True or False alone: the option is a switch.
ACCEPTED: dict[str, dict[str, Any]] = {
    "afc": {"importance_weight": (4.0, "at least 0"), "importance_moves_statistics": False},
    "balaug": {"views_per_task": (3, "at least 1")},
    "bic": {
        "temperature": (2.0, "positive"),
        "held_out": (0.1, "positive and below 1"),
        "correction_epochs": (200, "at least 0"),
        "offset_penalty": (0.05, "at least 0"),
    },
    "derpp": {"alpha": (0.1, "at least 0"), "beta": (0.5, "at least 0")},
    "eeil": {
        "kd": (1.0, "at least 0"),
        "temperature": (2.0, "positive"),
        "balanced_epochs": (40, "at least 0"),
        "balanced_lr_factor": (0.1, "at least 0"),
        "skip_newest_head": False,
        "unbalanced_phase": False,
    },
    "icarl": {"kd": (1.0, "at least 0")},
    "lucir": {
        "less_forget": (5.0, "at least 0"),
        "ranking": (1.0, "at least 0"),
        "margin": (0.5, "at least 0"),
        "top_k": (2, "at least 1"),
        "imprint": False,
    },
    "podnet": {"pod_flat": (1.0, "at least 0"), "pod_spatial": (3.0, "at least 0")},
    "ssil": {"kd": (1.0, "at least 0"), "temperature": (2.0, "positive"), "kd_last_task_only": False},
    "wa": {"temperature": (2.0, "positive")},
}
PROXIES: dict[str, Any] = {
    "n_proxies": (10, "at least 1"),
    "finetune_epochs": (20, "at least 0"),
    "finetune_lr": (0.05, "positive"),
    "classifier": ("proxies", "proxies or nme"),
    "scale": (0.0, "at least 0"),
}


@pytest.mark.parametrize("name", NAMES.split())
def test_the_options_have_their_published_defaults_and_accept_what_makes_sense(name: str) -> None:
    known = METHODS.options(name)
    shared = PROXIES if name in ("podnet", "afc") else {}
    found = {
        key: one.default if isinstance(one.default, bool) else (one.default, one.accepts) for key, one in known.items()
    }
    assert found == {**shared, **ACCEPTED.get(name, {})}
    assert {key: type(one.default) for key, one in known.items()} == {
        key: type(wanted if isinstance(wanted, bool) else wanted[0])
        for key, wanted in {**shared, **ACCEPTED.get(name, {})}.items()
    }


@temporary()
def test_a_method_of_one_s_own_gets_the_same_checks() -> None:
    @register_method("mine")
    @dataclass(frozen=True)
    class Mine(Method):
        share: float = option(0.5, "a share", above=0, below=1)
        mode: str = option("soft", "a mode", choices=("soft", "hard"))
        offset: float = -1.0

    made: Any = method("mine", {"share": np.float32(0.25), "offset": -2})
    assert (made.share, made.offset) == (0.25, -2.0)
    with pytest.raises(UserError, match=r"^method 'mine': share must be below 1, got 2\.0\.$"):
        method("mine", {"share": 2})
    with pytest.raises(UserError, match=r"^method 'mine': mode must be soft or hard, got 'sof'\.$"):
        method("mine", {"mode": "sof"})
    with pytest.raises(UserError, match=r"^method 'mine': offset must be finite, got -inf\.$"):
        method("mine", {"offset": -float("inf")})


@temporary()
def test_what_is_registered_must_be_a_method() -> None:
    @register_method("plain")
    class Plain: ...

    @register_method("bare")
    class Bare(Method):
        share: float = 0.5

    @register_method("inherits")
    class Inherits(KINDS["lucir"]): ...  # type: ignore[misc,valid-type]

    with pytest.raises(
        UserError,
        match=r"^method 'plain' of .*, test_registry\.py line \d+: must be a class derived from tbbn\.bench\.methods\.Method",
    ):
        method("plain")
    with pytest.raises(
        UserError, match=r"^method 'bare' of .*: has options, so its class needs @dataclass\(frozen=True\)"
    ):
        method("bare")
    assert method("inherits", {"top_k": 1}).top_k == 1  # type: ignore[attr-defined]


@temporary()
def test_the_order_of_the_decorators_does_not_matter() -> None:
    @dataclass(frozen=True)
    @register_method("turned")
    class Turned(Method):
        share: float = 0.5

    assert METHODS.options("turned")["share"].default == 0.5 and method("turned", {"share": 0.25}).share == 0.25  # type: ignore[attr-defined]


def test_the_base_has_no_loss() -> None:
    with pytest.raises(NotImplementedError):
        Method().loss(None, None, None)  # type: ignore[arg-type]


def test_an_option_with_choices_refuses_other_values() -> None:
    with pytest.raises(UserError, match=r"podnet.*classifier must be proxies or nme, got 'nne'"):
        method("podnet", {"classifier": "nne"})
