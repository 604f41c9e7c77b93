"""timm's networks: one of every kind of batch norm, and by night all of them."""

import pytest
import torch
from package import package
from torch import nn
from zoo import LARGE, has_batch_norm, there_and_back, train_a_step

import tbbn

timm = package("timm")

from timm.layers import BatchNormAct2d  # noqa: E402
from timm.layers.norm_act import convert_sync_batchnorm, freeze_batch_norm_2d  # noqa: E402


def create(name, size):
    try:
        return timm.create_model(name, num_classes=4, img_size=size)
    except TypeError:  # any size
        return timm.create_model(name, num_classes=4)


# Two of its kinds of batch norm, squeeze and excitation, activation first, dense, grouped, depthwise.
@pytest.mark.parametrize(
    "name", ["resnet10t", "efficientnet_lite0", "mobilenetv3_small_050", "regnetx_002", "resnetv2_50", "semnasnet_075"]
)
def test_a_network_trains_and_comes_back(name):
    torch.manual_seed(0)
    train_a_step(create(name, 64), torch.randn(6, 3, 64, 64))


def test_a_network_that_normalises_tokens():
    torch.manual_seed(0)
    train_a_step(timm.create_model("levit_128s", num_classes=4), torch.randn(6, 3, 224, 224), rows_per_sample="any")


def test_activation_and_drop_are_kept():
    torch.manual_seed(0)
    layer = BatchNormAct2d(4, act_layer=nn.SiLU, drop_layer=nn.Dropout)
    plain = tbbn.convert(nn.BatchNorm2d(4))
    layer.drop.p = 0.0
    new, x = tbbn.convert(layer), torch.randn(12, 4, 3, 3)
    assert isinstance(new, BatchNormAct2d) and new.act is layer.act and new.drop is layer.drop
    layout = {"current": 8, "memory": 4, "past_tasks": 2}
    with tbbn.balance(new, **layout), tbbn.balance(plain, **layout):
        assert torch.equal(new(x), nn.functional.silu(plain(x)))
    assert type(tbbn.revert(new)) is BatchNormAct2d


def test_frozen_and_synchronised_kinds():
    model = nn.Sequential(BatchNormAct2d(4), nn.BatchNorm2d(4))
    with pytest.warns(UserWarning, match="left 1 FrozenBatchNormAct2d, 1 FrozenBatchNorm2d alone"):
        tbbn.convert(freeze_batch_norm_2d(nn.Sequential(BatchNormAct2d(4), nn.BatchNorm2d(4))))
    synchronised = tbbn.convert(convert_sync_batchnorm(model))
    x = torch.randn(12, 4, 3, 3)
    with tbbn.balance(synchronised, current=8, memory=4, past_tasks=2):
        assert synchronised[0](x).min() == 0  # its activation
    assert [type(m).__name__ for m in tbbn.revert(synchronised)] == ["SyncBatchNormAct", "SyncBatchNorm"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", timm.list_models())
def test_every_network(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=4)
    if not has_batch_norm(model):
        pytest.skip("no batch norm")
    there_and_back(model)
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return
    own = model.default_cfg["input_size"][-1]
    for size in (*(s for s in (64, 128) if s < own), own):
        torch.manual_seed(0)
        try:
            model = create(name, size)
            with torch.no_grad():
                model.eval()(torch.randn(2, 3, size, size))
        except (AssertionError, RuntimeError, ValueError, ZeroDivisionError):
            if size == own:
                raise
            continue  # too small for this network
        train_a_step(model, torch.randn(6, 3, size, size), rows_per_sample="any")
        return
