"""Class-incremental methods, by name. A new method is one file and one line here."""

from __future__ import annotations

from typing import Any

from tbbn.errors import choose
from tbbn.methods.afc import Afc
from tbbn.methods.balaug import BalancedAugmentation
from tbbn.methods.base import Losses, Method, Phase, Stage, make_method
from tbbn.methods.bic import BiasCorrection
from tbbn.methods.derpp import DarkExperienceReplay
from tbbn.methods.eeil import EndToEnd
from tbbn.methods.er import ExperienceReplay
from tbbn.methods.ft import FineTune
from tbbn.methods.icarl import Icarl
from tbbn.methods.il2m import Il2m
from tbbn.methods.joint import Joint
from tbbn.methods.lucir import Lucir
from tbbn.methods.podnet import PodNet
from tbbn.methods.ssil import SeparatedSoftmax
from tbbn.methods.wa import WeightAligning

_KINDS: tuple[type[Method], ...] = (
    FineTune,
    EndToEnd,
    Lucir,
    SeparatedSoftmax,
    PodNet,
    Afc,
    Joint,
    Icarl,
    BiasCorrection,
    WeightAligning,
    Il2m,
    ExperienceReplay,
    DarkExperienceReplay,
    BalancedAugmentation,
)
METHODS: dict[str, type[Method]] = {kind.name: kind for kind in _KINDS}


def method(name: str, options: dict[str, Any] | None = None) -> Method:
    """The method of that name with these hyper-parameters."""
    if name not in METHODS:
        raise choose("method", name, METHODS)
    return make_method(METHODS[name], options or {})


__all__ = ["METHODS", "Losses", "Method", "Phase", "Stage", "method"]
