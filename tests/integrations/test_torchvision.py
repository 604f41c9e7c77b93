"""torchvision's classification networks: two small ones, and by night all of them."""

import pytest
import torch
from torch import nn
from zoo import LARGE, has_batch_norm, there_and_back, train_a_step

import tbbn
from tbbn.bench.vision import torchvision

torchvision()

from torchvision import models  # noqa: E402
from torchvision.ops import FrozenBatchNorm2d  # noqa: E402

SIZES = {"inception_v3": 96, "googlenet": 64}


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_a_network_trains_and_comes_back(name):
    torch.manual_seed(0)
    train_a_step(models.get_model(name, num_classes=4), torch.randn(6, 3, 32, 32))


def test_frozen_batch_norm_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), FrozenBatchNorm2d(4))
    with pytest.warns(UserWarning, match="left 1 FrozenBatchNorm2d alone"):
        tbbn.convert(model)
    assert type(model[1]) is FrozenBatchNorm2d


@pytest.mark.nightly
@pytest.mark.parametrize("name", models.list_models(module=models))
@pytest.mark.filterwarnings("ignore")
def test_every_network(name):
    try:
        with torch.device("meta"):
            model = models.get_model(name, num_classes=4)
    except NotImplementedError:  # RegNet reads its own settings from tensors
        model = models.get_model(name, num_classes=4)
    if not has_batch_norm(model):
        pytest.skip("no batch norm")
    there_and_back(model)
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return
    torch.manual_seed(0)
    size = SIZES.get(name, 64)
    train_a_step(models.get_model(name, num_classes=4), torch.randn(6, 3, size, size))
