"""Class-incremental methods, by name. A new method is one file and one line here."""

from __future__ import annotations

from typing import Any

from tbbn.bench.methods.afc import Afc
from tbbn.bench.methods.balaug import BalancedAugmentation
from tbbn.bench.methods.base import Losses, Method, Phase, Stage, make_method
from tbbn.bench.methods.bic import BiasCorrection
from tbbn.bench.methods.derpp import DarkExperienceReplay
from tbbn.bench.methods.eeil import EndToEnd
from tbbn.bench.methods.er import ExperienceReplay
from tbbn.bench.methods.ft import FineTune
from tbbn.bench.methods.icarl import Icarl
from tbbn.bench.methods.il2m import Il2m
from tbbn.bench.methods.joint import Joint
from tbbn.bench.methods.lucir import Lucir
from tbbn.bench.methods.podnet import PodNet
from tbbn.bench.methods.ssil import SeparatedSoftmax
from tbbn.bench.methods.wa import WeightAligning
from tbbn.errors import unknown_name

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
        raise unknown_name("method", name, METHODS)
    return make_method(METHODS[name], options or {})


__all__ = ["METHODS", "Losses", "Method", "Phase", "Stage", "method"]
