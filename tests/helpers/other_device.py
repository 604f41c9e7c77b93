"""A device that is neither a CPU nor CUDA and has no float64, like MPS: it computes on the CPU, but refuses float64.

``python other_device.py METHOD ...`` trains a small run of each method there and on the CPU, and compares the losses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import tbbn
from tbbn.accelerators import backend, eager
from tbbn.nn.plan import Layout

NAME = "other"


class Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]


class Elsewhere(Tensor):
    """A tensor of that device; ``raw`` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> Any:
        assert raw.dtype != torch.float64, "float64 on a device without it"
        made = Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(NAME, 0), requires_grad=requires_grad,
        )  # fmt: skip
        made.raw = raw
        return made

    def __init__(self, raw: Tensor, requires_grad: bool = False) -> None:
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.raw.tolist()

    def __deepcopy__(self, memo: Any) -> Any:
        return Elsewhere(self.raw.clone(), self.requires_grad)


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        return value.raw if isinstance(value, Elsewhere) else value

    given = any(isinstance(value, Elsewhere) for value in tree_leaves((args, kwargs)))
    wanted = kwargs.get("device")
    stays = given if wanted is None else torch.device(wanted).type == NAME
    own_args, own_kwargs = tree_map(moved, (args, kwargs))
    result = func(*own_args, **own_kwargs)
    if not func._schema.returns:
        return None
    if func._schema.is_mutable and given:
        return kwargs["out"] if "out" in kwargs else args[0]
    return tree_map(lambda t: Elsewhere(t) if stays and isinstance(t, Tensor) else t, result)


def losses(method: str, device: str) -> dict[str, float]:
    """Of the first epoch: later ones amplify what kernels round differently."""
    settings = {"data.tasks": 2, "train.epochs": 1, "memory.budget": 8, "threads": 1}
    result = tbbn.run(
        method, "tbbn", "synthetic:4x12x4x8", seeds=1, backbone="small", device=device, quiet=True, **settings
    )[0]
    assert len(result.record.accuracy) == 2
    return {name: value for name, value in result.record.history[0].items() if isinstance(value, float)}


def main(methods: list[str]) -> None:
    _setup_privateuseone_for_python_backend(NAME, Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    x = torch.zeros(12, 3, 2, 2).to(NAME)
    plan = Layout(9, 3, 5).plan(None, x.device, torch.float32)
    assert type(x) is Elsewhere and type(plan.gather) is Elsewhere
    assert backend.find(x, None, None, None, None, plan) is eager
    for method in methods:
        there, here = losses(method, NAME), losses(method, "cpu")
        assert there.keys() == here.keys() and len(here) > 1, (there, here)
        assert all(abs(there[name] - here[name]) <= 1e-3 * abs(here[name]) for name in here), (method, there, here)


if __name__ == "__main__":
    main(sys.argv[1:])
