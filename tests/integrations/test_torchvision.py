"""torchvision's classification networks: one of every source file, and by night all of them."""

import pytest
import torch
from torch import nn
from zoo import has_batch_norm, is_large, step_on_meta, there_and_back, train_a_step

import tbbn
from tbbn.bench.vision import torchvision

torchvision()

from torchvision import models  # noqa: E402
from torchvision.ops import FrozenBatchNorm2d  # noqa: E402

SIZES = {"inception_v3": 299, "maxvit_t": 224}  # the smallest they take; the others: 64


# The smallest network with batch norm of every source file.
SMALL = """
densenet121 efficientnet_b0 googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 shufflenet_v2_x0_5
"""
LONGER = ["inception_v3", "maxvit_t", "vgg11_bn"]  # a step takes seconds


def family(name):
    return models.get_model_builder(name).__module__


def on_meta(name):
    try:
        with torch.device("meta"):
            return models.get_model(name, num_classes=4)
    except NotImplementedError:  # RegNet reads its own settings from tensors
        return models.get_model(name, num_classes=4).to("meta")


@pytest.mark.parametrize("name", SMALL.split())
def test_one_network_of_every_family(name):
    torch.manual_seed(0)
    train_a_step(models.get_model(name, num_classes=4), torch.randn(6, 3, 64, 64))


@pytest.mark.parametrize("name", LONGER)
def test_the_other_families(name):
    model, size = on_meta(name), SIZES.get(name, 64)
    there_and_back(model)
    step_on_meta(model, torch.empty(6, 3, size, size, device="meta"))


def test_frozen_batch_norm_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), FrozenBatchNorm2d(4))
    with pytest.warns(UserWarning, match="did not replace 1 FrozenBatchNorm2d"):
        tbbn.convert(model)
    assert type(model[1]) is FrozenBatchNorm2d


@pytest.mark.nightly
@pytest.mark.parametrize("name", models.list_models(module=models))
def test_every_network(name, record_property):
    model = on_meta(name)
    if not has_batch_norm(model):
        pytest.skip("no batch norm")
    size = SIZES.get(name, 64)
    if is_large(model, 64):
        assert family(name) in map(family, [*SMALL.split(), *LONGER])  # which trains
        there_and_back(model)
        step_on_meta(model, torch.empty(6, 3, size, size, device="meta"))
        record_property("way", "on meta")  # for --junitxml
    else:
        torch.manual_seed(0)
        train_a_step(models.get_model(name, num_classes=4), torch.randn(6, 3, size, size))
        record_property("way", f"trained at {size}")
