"""timm's networks: one of every source file, and by night all of them."""

import pytest
import torch
from package import package
from torch import nn
from zoo import has_batch_norm, is_large, predict, step_on_meta, there_and_back, train_a_step

import tbbn
from tbbn.errors import UserError

timm = package("timm")

from timm.layers import BatchNormAct2d  # noqa: E402
from timm.layers.norm_act import convert_sync_batchnorm, freeze_batch_norm_2d  # noqa: E402


def family(name):
    """The source file of a network."""
    return timm.model_entrypoint(name).__module__.rpartition(".")[2]


# The smallest network with batch norm of every source file of timm.
SMALLEST = """
halonet_h1 test_byobnet convmixer_768_32 cpubone_nano cs3darknet_focus_s densenet121 dla46x_c dpn48b
efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0
fasternet_t0 fastvit_t8 ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto
inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s lowformer_b0 maxvit_pico_rw_256 lcnet_035
mobilevit_xxs nasnetalarge nextvit_small pnasnet5large regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d
test_resnet resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 shvit_s1 skresnet18 starnet_s050 swiftformer_xs
tiny_vit_5m_224 tresnet_m vgg11_bn visformer_tiny vit_small_resnet50d_s16_224 volo_d1_224 ese_vovnet19b_slim_dw
legacy_xception xception41p xcit_nano_12_p8_224
"""
ALL = timm.list_models()
ONE_OF_EACH = {family(name): name for name in SMALLEST.split() if name in ALL}  # an older timm has fewer


def create(name, size):
    try:
        return timm.create_model(name, num_classes=4, img_size=size)
    except TypeError:  # any size
        return timm.create_model(name, num_classes=4)


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
    with pytest.warns(UserWarning, match="did not replace 1 FrozenBatchNormAct2d, 1 FrozenBatchNorm2d"):
        tbbn.convert(freeze_batch_norm_2d(nn.Sequential(BatchNormAct2d(4), nn.BatchNorm2d(4))))
    synchronised = tbbn.convert(convert_sync_batchnorm(model))
    x = torch.randn(12, 4, 3, 3)
    with tbbn.balance(synchronised, current=8, memory=4, past_tasks=2):
        assert synchronised[0](x).min() == 0  # its activation
    assert [type(m).__name__ for m in tbbn.revert(synchronised)] == ["SyncBatchNormAct", "SyncBatchNorm"]


def on_meta(name):
    with torch.device("meta"):
        return timm.create_model(name, num_classes=4)


def small_enough(name, model):
    """The network and an input, the smallest it takes; None: a step would be too long. ``model`` is that on meta."""
    if not has_batch_norm(model) or is_large(model, 64):
        return None
    channels, own = model.default_cfg["input_size"][0], model.default_cfg["input_size"][-1]
    for size in (*(s for s in (64, 128) if s < own), own):
        torch.manual_seed(0)
        try:
            model, x = create(name, size), torch.randn(6, channels, size, size)
            predict(model, x[:2])
        except (AssertionError, RuntimeError, ValueError, ZeroDivisionError):
            if size == own:
                raise
            continue  # too small for this network
        return None if is_large(model, size) else (model, x)


def check(name):
    """Take a network through all steps, and say how."""
    model = on_meta(name)
    if not has_batch_norm(model):
        pytest.skip("no batch norm")
    if small := small_enough(name, model):
        several = train_a_step(*small, rows_per_sample="any")
        return f"trained at {small[1].shape[-1]}" + ", several rows a sample" * several
    there_and_back(model)
    step_on_meta(model, torch.empty(6, *model.default_cfg["input_size"], device="meta"), rows_per_sample="any")
    return "on meta"


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_one_network_of_every_family(name):
    assert check(name).startswith("trained")


def test_rows_that_are_tokens_must_be_declared():
    torch.manual_seed(0)
    model, x = tbbn.convert(timm.create_model("levit_128s", num_classes=4)), torch.randn(6, 3, 224, 224)
    with (
        pytest.raises(UserError, match=r"the input has 1176; .* Where rows are not samples .*: rows_per_sample="),
        tbbn.balance(model, current=4, memory=2, past_tasks=1),
    ):
        model(x)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_every_network(name, record_property):
    record_property("way", check(name))  # for --junitxml
    assert family(name) in ONE_OF_EACH  # which trains, where this one is too large
