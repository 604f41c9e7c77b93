"""torchvision imports whatever torch it lies beside."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types

import pytest
import torch

from tbbn.bench import vision
from tbbn.errors import UserError


def run(code: str) -> str:
    """What a fresh interpreter prints: an import can be tried once a process."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_models_transforms_and_datasets_work_and_a_missing_op_raises_torchvisions_error() -> None:
    code = """
import torch
from tbbn.bench.vision import torchvision
assert "torchvision" not in __import__("sys").modules
tv = torchvision()
import torchvision.datasets
from torchvision.transforms import v2
net = tv.models.resnet18(num_classes=3).eval()
print(*net(v2.Resize(40)(torch.rand(1, 3, 32, 32))).shape, tv is torchvision, tv.datasets.CIFAR100.__name__)
if tv.extension._has_ops():
    print("custom C++ ops")
else:
    try:
        tv.ops.nms(torch.rand(1, 4), torch.rand(1), 0.5)
    except RuntimeError as error:
        print(error)
"""
    shape, _, error = run(code).partition("\n")
    assert shape == "1 3 True CIFAR100"
    assert "custom C++ ops" in error


def test_only_missing_ops_are_declared() -> None:
    code = """
import torch
torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold, int mine=3) -> Tensor")
from importlib.machinery import ModuleSpec
from tbbn.bench import vision
vision.importlib.util.find_spec = lambda name: ModuleSpec(name, None)  # a torchvision without its library
vision.importlib.import_module = lambda name: vision
assert vision.torchvision() is vision
print("mine" in str(torch.ops.torchvision.nms.default._schema), hasattr(torch.ops.torchvision, "qnms"))
"""
    assert run(code) == "True True"


def test_the_module_is_returned_once_imported() -> None:
    assert vision.torchvision() is vision.torchvision() is sys.modules["torchvision"]


def test_missing_torchvision_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torchvision"):
        vision.torchvision()


def test_a_torchvision_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> types.ModuleType:
        raise RuntimeError("operator torchvision::other does not exist\nmore")

    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(vision.importlib, "import_module", broken)
    with pytest.raises(UserError, match=f"with torch {torch.__version__}".replace("+", r"\+")) as caught:
        vision.torchvision()
    assert "\n" not in str(caught.value)
