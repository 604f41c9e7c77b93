"""Swapping the norms of a model and swapping them back."""

import copy
import inspect

import pytest
import torch
from torch import nn

import tbbn
from tbbn.errors import UserError
from tbbn.nn import is_balanced
from tbbn.nn.plan import PlanOptions
from tbbn.options import keyword_arguments
from tbbn.plugins import temporary
from tbbn.registry import NORMS, register_norm

EIGHT = {"current": 8, "memory": 4, "past_tasks": 2}


class Nested(nn.Module):
    """Batch norms at three depths, one of them used in two places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(4)
        self.stem = nn.Conv2d(2, 4, 1)
        self.blocks = nn.ModuleDict(
            {"a": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))}
        )
        self.again = nn.Sequential(self.norm)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))

    def forward(self, x):
        x = self.again(self.blocks["a"](self.norm(self.stem(x))))
        return self.head(x)


def trained(model, x, steps=2):
    for _ in range(steps):
        model(x)
    return model


@pytest.fixture
def x():
    return torch.randn(12, 2, 2, 2, generator=torch.Generator().manual_seed(3))


def test_every_batch_norm_is_replaced_and_nothing_else(x):
    model = Nested()
    others = [m for m in model.modules() if not isinstance(m, nn.modules.batchnorm._BatchNorm)]
    converted = tbbn.convert(model)
    assert converted is model
    kinds = [type(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert kinds.count(tbbn.TaskBalancedBatchNorm2d) == 2 and kinds.count(tbbn.TaskBalancedBatchNorm1d) == 1
    assert len(kinds) == 3
    assert [m for m in model.modules() if not isinstance(m, nn.modules.batchnorm._BatchNorm)] == others


def test_a_shared_layer_stays_one_object():
    model = tbbn.convert(Nested())
    assert model.norm is model.again[0]
    assert tbbn.revert(model).norm is model.again[0]


def test_parameters_and_buffers_are_the_same_objects(x):
    model = trained(Nested(), x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tbbn.convert(model)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)
    # So an optimiser built before still trains the model.
    weight = model.norm.weight.detach().clone()
    with tbbn.balance(model, **EIGHT):
        model(x).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(model.norm.weight, weight)


def test_a_batch_norm_alone_is_replaced_by_its_return_value():
    layer = nn.BatchNorm3d(4)
    new = tbbn.convert(layer)
    assert type(new) is tbbn.TaskBalancedBatchNorm3d and new.weight is layer.weight
    assert type(tbbn.revert(new)) is nn.BatchNorm3d


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "brn", "adab2n", "bn"])
def test_revert_gives_the_same_outputs_in_eval_mode(norm, x):
    model = tbbn.convert(trained(Nested(), x), norm)
    if is_balanced(model):
        with tbbn.balance(model, **EIGHT):
            model(x)
    wanted = model.eval()(x)
    reverted = tbbn.revert(model)
    assert {type(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)} == {
        nn.BatchNorm1d,
        nn.BatchNorm2d,
    }
    assert not reverted.training
    torch.testing.assert_close(reverted(x), wanted, rtol=0, atol=0)
    plain = Nested().eval()
    state = reverted.state_dict()
    plain.load_state_dict(state, strict=True)
    assert torch.equal(plain(x), wanted)


@pytest.mark.parametrize(
    ("norm", "name"), [("in", "InstanceNorm"), ("gn", "GroupNorm"), ("cn", "ContinualNorm"), ("sn", "SwitchableNorm")]
)
def test_revert_refuses_what_is_not_batch_norm_in_eval_mode(norm, name):
    options = {"groups": 2} if norm in ("gn", "cn") else {}
    with pytest.raises(UserError, match=f"revert: {name} is not batch norm in eval mode"):
        tbbn.revert(tbbn.convert(nn.Sequential(nn.BatchNorm2d(4)), norm, **options))


def test_revert_refuses_batch_renorm_with_eps_on_the_deviation():
    model = tbbn.convert(nn.Sequential(nn.BatchNorm2d(4)), "brn", eps_on_std=True, eps=1e-3)
    with pytest.raises(UserError, match="revert: BatchRenorm is not batch norm"):
        tbbn.revert(model)


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_every_norm_keeps_what_it_shares_with_batch_norm(norm, x):
    model = trained(Nested(), x).eval().double()
    old = model.norm
    old.eps, old.weight.data[0] = 1e-3, 7.0
    options = {"groups": 2} if norm in ("gn", "cn") else {}
    model.head[2] = nn.Identity()  # groups of 2 do not divide 5 channels
    tbbn.convert(model, norm, **options)
    new = model.norm
    assert new.eps == 1e-3 and new.weight is old.weight and new.bias is old.bias
    assert not new.training and new.weight.dtype == torch.float64
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        if hasattr(new, name):
            assert getattr(new, name) is getattr(old, name)
    assert model(x.double()).shape == (12, 5)


FROM = {  # what a layer was before it became the first norm
    "plain": {},
    "set": {"eps": 0.1, "momentum": 0.3},
    "bare": {"affine": False},
    "double": {"dtype": torch.float64},
    "bare double": {"affine": False, "dtype": torch.float64},
}


@pytest.mark.parametrize("was", FROM)
@pytest.mark.parametrize("first", sorted(NORMS))
@pytest.mark.parametrize("second", sorted(NORMS))
def test_any_norm_becomes_any_other_as_batch_norm_would(first, second, was):
    groups = {norm: {"groups": 2} if norm in ("gn", "cn") else {} for norm in (first, second)}
    model = nn.Sequential(nn.BatchNorm1d(4, **FROM[was]), nn.BatchNorm3d(4, **FROM[was]))
    options = groups[second] | ({"eps": 1e-3} if was == "plain" else {})
    at_once = tbbn.convert(copy.deepcopy(model), second, **options)
    tbbn.convert(tbbn.convert(model, first, **groups[first]), second, **options)
    assert [type(layer) for layer in model] == [type(layer) for layer in at_once]
    state, wanted = model.state_dict(), at_once.state_dict()
    for ours, theirs in zip(model, at_once, strict=True):
        for name in ("eps", "affine", "track_running_stats"):
            assert getattr(ours, name, None) == getattr(theirs, name, None), name
        if hasattr(theirs, "momentum"):  # batch renormalisation brings one of its own
            assert ours.momentum == (theirs.momentum if first != "brn" else 0.01)
    if was == "bare double" and first in ("in", "gn"):
        return  # they have no tensor that would keep the type
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) and state[name].dtype == wanted[name].dtype for name in wanted)
    x = torch.randn(6, 4, 2, 2, 2, dtype=FROM[was].get("dtype"))
    assert model[1](x).shape == x.shape


def test_a_norm_made_by_hand_becomes_a_batch_norm_of_images():
    for norm in ("in", "gn", "sn", "brn", "cn", "adab2n"):
        made = tbbn.convert(NORMS.get(norm)(32))
        assert type(made) is tbbn.TaskBalancedBatchNorm2d and made.num_features == 32, norm
        assert made.momentum == (0.01 if norm == "brn" else 0.1)


# What a layer made by hand has beside batch norm's settings.
OWN_SETTINGS = {
    "bn": {},
    "in": {"num_groups": 32},
    "gn": {"num_groups": 16},
    "sn": {"unbiased": False, "zero_variance": False},
    "brn": {"r_max": 3.0, "d_max": 5.0, "eps_on_std": False, "momentum": 0.01},
    "cn": {"groups": 16},
    "tbbn": {"options": PlanOptions(), "output_statistics": False, "sync": False, "process_group": None},
    "adab2n": {"max_tasks": 100, "kappa": 1.0, "strength": 0.1},
    "weighted": {"options": PlanOptions("weighted"), "output_statistics": False, "sync": False, "process_group": None},
}


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_a_norm_made_by_hand_has_the_settings_of_batch_norm_and_its_own_as_published(norm):
    found = NORMS.get(norm)
    plain = nn.BatchNorm2d(32)
    for cls in found if isinstance(found, tuple) else [found]:
        layer = cls(32)
        for name in ("eps", "momentum", "affine", "track_running_stats"):
            if hasattr(layer, name):
                assert getattr(layer, name) == OWN_SETTINGS[norm].get(name, getattr(plain, name)), name
        assert torch.equal(layer.weight, plain.weight) and torch.equal(layer.bias, plain.bias)
        assert {name: getattr(layer, name) for name in OWN_SETTINGS[norm]} == OWN_SETTINGS[norm]
        assert {t.dtype for t in layer.parameters()} == {torch.float32} and {
            t.device.type for t in layer.parameters()
        } == {"cpu"}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_every_argument_of_a_constructor_reaches_the_layer(norm, by_name):
    given = {"eps": 0.5, "momentum": 0.3, "affine": True, "track_running_stats": True}
    given |= {"device": torch.device("meta"), "dtype": torch.float16}
    found = NORMS.get(norm)
    for cls in found if isinstance(found, tuple) else [found]:
        known = keyword_arguments(cls)
        taken = {name: value for name, value in given.items() if name in known}
        layer = cls(32, **taken) if by_name else cls(32, *taken.values())
        for name in taken.keys() - {"device", "dtype"}:
            assert getattr(layer, name) == given[name], name
        floats = {name: t for name, t in layer.state_dict().items() if name not in ("num_batches_tracked", "rate")}
        assert floats and {t.dtype for t in floats.values()} == {torch.float16}
        assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
        bare = cls(
            32, affine=False, **{"track_running_stats": False} if norm in ("bn", "sn", "cn", "tbbn", "weighted") else {}
        )
        assert bare.weight is None and bare.bias is None
        assert ("running_mean" in bare.state_dict()) == (norm in ("brn", "adab2n"))


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.3}],
    ids=str,
)
def test_settings_are_kept(options, x):
    old = nn.BatchNorm2d(2, **options)
    new = tbbn.convert(copy.deepcopy(old))
    for name in ("eps", "momentum", "affine", "track_running_stats", "num_features"):
        assert getattr(new, name) == getattr(old, name)
    assert new.state_dict().keys() == old.state_dict().keys()
    assert torch.equal(new(x), old(x))
    back = tbbn.revert(new)
    assert type(back) is nn.BatchNorm2d and torch.equal(back(x), old(x))


@pytest.mark.parametrize("norm", ["tbbn", "brn", "sn", "adab2n", "cn", "gn", "in"])
def test_a_batch_norm_without_bias_stays_without(norm):
    old = nn.BatchNorm2d(4)
    old.bias = None
    new = tbbn.convert(old, norm, **{"groups": 2} if norm in ("gn", "cn") else {})
    assert new.bias is None and new.weight is old.weight
    x = torch.randn(12, 4, 2, 2)
    assert new(x).shape == x.shape
    if is_balanced(new):
        with tbbn.balance(new, **EIGHT):
            assert new(x).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype, x):
    model = tbbn.convert(Nested().to(dtype), "sn")
    assert {p.dtype for p in model.parameters()} == {dtype}
    model = tbbn.convert(Nested().to(dtype))
    with tbbn.balance(model, **EIGHT):
        assert model(x.to(dtype)).dtype == dtype


def test_channels_last_models_stay_so(x):
    model = tbbn.convert(Nested().to(memory_format=torch.channels_last))
    big = torch.randn(12, 2, 3, 3).to(memory_format=torch.channels_last)
    with tbbn.balance(model, **EIGHT):
        assert model.norm(model.stem(big)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{}, {"rule": "current", "output_statistics": True}])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_batch_norm_learns_its_channels_later(options, x):
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d(momentum=0.3, device="cpu", dtype=torch.float64))
    waiting = model[1].weight
    tbbn.convert(model, **options)
    model[0].double()
    with tbbn.balance(model, **EIGHT):
        model(x.double())
    assert type(model[1]) is tbbn.TaskBalancedBatchNorm2d
    assert model[1].weight is waiting and model[1].weight.shape == (4,) and model[1].weight.dtype == torch.float64
    assert model[1].momentum == 0.3 and model[1].num_batches_tracked == 1
    assert model[1].options.rule == options.get("rule", "paper")
    assert type(tbbn.revert(model)[1]) is nn.BatchNorm2d


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.1}, {"momentum": 0.3}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
@pytest.mark.parametrize("norm", ["bn", "tbbn", "weighted"])
def test_a_lazy_layer_keeps_its_settings(norm, options, x):
    old, new = nn.LazyBatchNorm2d(**options), tbbn.convert(nn.LazyBatchNorm2d(**options), norm)
    for name in ("eps", "momentum", "affine", "track_running_stats"):
        assert getattr(new, name) == getattr(old, name), name
    assert torch.equal(new(x), old(x)) and torch.equal(new.eval()(x), old.eval()(x))
    assert new.state_dict().keys() == old.state_dict().keys() and new.num_features == 2


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_lazy_batch_norm_goes_there_and_back_untouched(dims):
    lazy, plain = getattr(nn, f"LazyBatchNorm{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    model = tbbn.convert(nn.Sequential(lazy()), "weighted")
    tbbn.revert(tbbn.convert(model))
    model(torch.randn(12, 3, *[2] * dims))
    assert type(model[0]) is plain
    with pytest.raises(UserError, match=r"LazyBatchNorm2d does not know its channels yet, .* run one batch"):
        tbbn.convert(nn.LazyBatchNorm2d(), "gn")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_norms_of_other_kinds_are_left_alone():
    others = [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.LazyInstanceNorm2d()]
    with pytest.warns(UserWarning, match="convert: Sequential has no batch norm; nothing was replaced"):
        assert list(tbbn.convert(nn.Sequential(*others))) == others


def test_a_model_whose_norms_are_all_skipped_is_no_surprise(recwarn):
    tbbn.convert(nn.Sequential(nn.BatchNorm2d(4)), skip=[nn.BatchNorm2d])
    tbbn.convert(nn.Sequential(nn.Linear(2, 2)), "bn")
    assert not recwarn.list


def test_unknown_norm_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown norm 'tbn'; choose one of: adab2n, .*Did you mean 'tbbn'\?"):
        tbbn.convert(nn.BatchNorm2d(3), "tbn")


def test_unknown_option_names_the_nearest():
    with pytest.raises(
        UserError, match=r"unknown option of norm 'tbbn': 'ruel'; choose one of: .*Did you mean 'rule'\?"
    ):
        tbbn.convert(nn.BatchNorm2d(3), ruel="current")
    with pytest.raises(UserError, match="unknown option of norm 'gn': 'rule'"):
        tbbn.convert(nn.BatchNorm2d(3), "gn", rule="current")
    with pytest.raises(UserError, match="unknown option of norm 'weighted': 'case'"):
        tbbn.convert(nn.BatchNorm2d(3), "weighted", case=2)
    with pytest.raises(UserError, match="unknown option of norm 'bn': 'groups'"):
        tbbn.convert(nn.BatchNorm2d(3), "bn", groups=2)


@pytest.mark.parametrize("norm", ["gn", "cn"])
def test_groups_of_a_layer_made_by_hand_divide_its_channels(norm):
    for groups in (0, -1, -4, 3, 16):
        with pytest.raises(
            UserError, match=rf"{norm}: groups={groups} does not divide 8 channels; choose one of \[1, 2, 4, 8\]"
        ):
            NORMS.get(norm)(8, groups=groups)
    if norm == "gn":
        for channels in (-2, 3, 16):
            with pytest.raises(UserError, match=f"gn: channels_per_group={channels} does not divide 8 channels"):
                NORMS.get(norm)(8, channels_per_group=channels)
    for groups in (1, 2, 4, 8):
        assert NORMS.get(norm)(8, groups=groups)(torch.randn(4, 8, 2)).shape == (4, 8, 2)


@pytest.mark.parametrize("norm", ["gn", "cn"])
def test_groups_that_do_not_divide_leave_the_model_as_it_was(norm):
    model = nn.Sequential(nn.BatchNorm2d(16), nn.BatchNorm2d(24))
    with pytest.raises(
        UserError, match=rf"{norm}: groups=16 does not divide 24 channels; choose one of \[1, 2, 3, 4, 6"
    ):
        tbbn.convert(model, norm)
    assert [type(m) for m in model] == [nn.BatchNorm2d] * 2
    with pytest.raises(UserError, match="gn: channels_per_group=5 does not divide 16 channels"):
        tbbn.convert(nn.BatchNorm2d(16), "gn", channels_per_group=5)
    with pytest.raises(UserError, match=f"norm '{norm}': groups must be at least 1, got 0"):
        tbbn.convert(nn.BatchNorm2d(16), norm, groups=0)


@pytest.mark.parametrize("norm", ["brn", "adab2n"])
def test_norms_that_need_running_statistics_say_so(norm):
    with pytest.raises(UserError, match=f"{norm}: .*needs running statistics and a momentum"):
        tbbn.convert(nn.BatchNorm2d(3, track_running_stats=False), norm)
    with pytest.raises(UserError, match=f"{norm}: .*needs running statistics and a momentum"):
        NORMS.get(norm)(3, momentum=None)


def test_converting_again_changes_options_and_keeps_state(x):
    model = tbbn.convert(trained(Nested(), x))
    weight, old = model.norm.weight, model.norm
    assert tbbn.convert(model).norm is old  # nothing to do
    tbbn.convert(model, rule="current")
    assert model.norm.weight is weight and model.norm.options.rule == "current"


def test_every_norm_is_described():
    assert all(entry.description for entry in NORMS.describe().values())


@temporary()
def test_a_norm_of_ones_own_can_be_registered(x):
    @register_norm("root", "root mean square")
    class Root(nn.Module):
        def __init__(self, num_features, eps=1e-5, affine=True):
            super().__init__()
            self.eps, self.num_features = eps, num_features
            self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
            self.register_parameter("bias", None)

        def forward(self, x):
            return x / (x.square().mean((2, 3), keepdim=True) + self.eps).sqrt() * self.weight.view(-1, 1, 1)

    model = tbbn.convert(nn.Sequential(nn.BatchNorm2d(2)), "root")
    assert type(model[0]) is Root and model(x).shape == x.shape
    assert type(tbbn.convert(model, "bn")[0]) is nn.BatchNorm2d
    with pytest.raises(UserError, match="unknown option of norm 'root': 'groups'"):
        tbbn.convert(nn.BatchNorm2d(2), "root", groups=2)


@temporary()
def test_a_norm_of_ones_own_may_require_options_and_any_of_batch_norms_arguments():
    @register_norm("grouped")
    class Grouped(nn.Module):
        def __init__(self, num_features, eps, momentum, affine, track_running_stats, device, dtype, *, groups):
            super().__init__()
            self.given = (num_features, eps, momentum, affine, track_running_stats, device, dtype, groups)

        def forward(self, x):
            return x

    bare = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
    assert tbbn.convert(bare, "grouped", groups=2).given == (4, 1e-5, 0.1, False, False, None, None, 2)
    for sync, said in ((False, r"any other argument needs a default. Got __init__\(.*groups\)"), (True, "over ranks")):
        with pytest.raises(UserError, match=said):
            tbbn.convert(nn.BatchNorm2d(4), "grouped", sync=sync)


@temporary()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_without_a_constructor_is_refused(monkeypatch, compiled):
    if compiled:  # torch.compile replaces the constructor of every module, for the rest of the process
        given = nn.Module.__init__
        monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **kwargs: given(self, *args, **kwargs))
    register_norm("nothing")(type("Nothing", (nn.Module,), {"forward": lambda self, x: x}))
    said = r"^norm 'nothing' of [^:]*: must take __init__\(self, num_features\).* Got none\.$"
    with pytest.raises(UserError, match=said) as caught:
        tbbn.convert(nn.BatchNorm2d(4), "nothing")
    assert "module.py" not in str(caught.value)  # a line of torch's


@temporary()
def test_a_constructor_of_torchs_that_a_norm_inherits_is_told_at_the_norms_class():
    @register_norm("inherits")
    class Inherits(nn.GroupNorm):  # whose constructor starts with the number of groups
        pass

    line = inspect.getsourcelines(Inherits)[1]
    with pytest.raises(UserError, match=rf"test_convert.py line {line}: must take __init__\(self, num_features\)"):
        tbbn.convert(nn.BatchNorm2d(4), "inherits")


@temporary()
def test_a_norm_that_does_not_initialise_its_base_is_told_so():
    @register_norm("hasty")
    class Hasty(nn.Module):
        def __init__(self, num_features):
            self.channels = num_features

        def forward(self, x):
            return x

    with pytest.raises(UserError, match=r"norm 'hasty' of .* line \d+: __init__ must call super\(\).__init__\(\)\.$"):
        tbbn.convert(nn.BatchNorm2d(4), "hasty")


@temporary()
def test_a_norm_without_batch_norms_attributes_is_replaced_like_any():
    @register_norm("scale")
    class Scale(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
            self.scale = nn.Parameter(torch.ones(channels))

        def forward(self, x):
            return x * self.scale.view(-1, 1, 1)

    made = tbbn.convert(tbbn.convert(nn.BatchNorm2d(4, eps=0.2), "scale"))
    assert made.eps == 0.2 and torch.equal(made.weight, torch.ones(4))
    model = nn.Sequential(Scale(4)).double()
    with pytest.raises(UserError, match=r"a Scale does not tell its number of channels; set self\.num_features"):
        tbbn.convert(model)
    model[0].num_features = 4
    new = tbbn.convert(copy.deepcopy(model))[0]
    assert new.eps == 1e-5 and new.weight.dtype == new.running_mean.dtype == torch.float64
    assert tbbn.convert(copy.deepcopy(model), affine=False)[0].weight is None
    model[0].weight, model[0].eps = None, 0.1
    bare = tbbn.convert(model)[0]
    assert bare.weight is None and bare.eps == 0.1


@pytest.mark.parametrize("norm", ["bn", "tbbn"])
@temporary()
def test_a_bias_that_a_norm_sets_to_none_is_none_in_the_next(norm):
    @register_norm("root")  # as in docs/norms.md
    class Root(nn.Module):
        def __init__(self, num_features):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(num_features)), None

        def forward(self, x):
            return x * self.weight.view(-1, 1, 1)

    model = nn.Sequential(Root(2))
    model[0].num_features, weight = 2, model[0].weight
    layer = tbbn.convert(model, norm)[0]
    assert layer.bias is None and layer.weight is weight
    assert layer(torch.randn(4, 2, 3, 3)).mean().abs() < 1e-6


def test_is_balanced():
    assert is_balanced(tbbn.convert(nn.Sequential(nn.BatchNorm2d(2))))
    assert not is_balanced(nn.Sequential(nn.BatchNorm2d(2)))


@pytest.mark.parametrize("norm", ["bn", "in", "gn", "sn", "brn", "cn", "tbbn", "weighted", "adab2n"])
def test_an_option_decides_over_affine_parameters_whatever_the_old_layer_had(norm):
    old = nn.BatchNorm2d(32)
    nn.init.constant_(old.weight, 5.0)
    bare = tbbn.convert(old, norm, affine=False)
    assert bare.weight is None and bare.bias is None and {"weight", "bias"}.isdisjoint(bare.state_dict())
    x = torch.randn(4, 32, 3, 3)
    assert bare(x).std() < 2, "not the weight of the old layer"
    own = tbbn.convert(nn.BatchNorm2d(32, affine=False), norm, affine=True)
    assert torch.equal(own.weight, torch.ones(32)) and torch.equal(own.bias, torch.zeros(32))
    kept = nn.BatchNorm2d(32)
    weight = kept.weight
    assert tbbn.convert(kept, norm, affine=True).weight is weight


@pytest.mark.parametrize("norm", ["bn", "sn", "cn", "tbbn", "weighted"])
def test_an_option_decides_over_running_statistics(norm):
    bare = tbbn.convert(nn.BatchNorm2d(32), norm, track_running_stats=False)
    assert bare.running_mean is None and not any("running" in name for name in bare.state_dict())
    x = torch.randn(4, 32, 3, 3) + 7
    assert bare.eval()(x).mean().abs() < 1, "normalised by the batch"
    own = tbbn.convert(nn.BatchNorm2d(32, track_running_stats=False), norm, track_running_stats=True)
    assert torch.equal(own.running_mean, torch.zeros(32))


def test_a_lazy_layer_takes_no_other_settings():
    with pytest.raises(UserError, match="does not know its channels yet"):
        tbbn.convert(nn.LazyBatchNorm2d(), "tbbn", affine=False)
    assert tbbn.convert(nn.LazyBatchNorm2d(), "tbbn", affine=True).affine


@pytest.mark.parametrize("function", [tbbn.convert, tbbn.revert])
@pytest.mark.parametrize("given", [nn.BatchNorm2d, [nn.BatchNorm2d(3)], None])
def test_what_is_no_model_is_refused(function, given):
    with pytest.raises(
        TypeError, match=f"{function.__name__}: the first argument must be the model, an nn.Module, got"
    ):
        function(given)


@pytest.mark.parametrize("function", [tbbn.convert, tbbn.revert, tbbn.balance])
def test_several_models_in_a_list_are_refused_in_one_line_with_the_remedy(function):
    models = [nn.Sequential(nn.BatchNorm2d(3)), nn.Sequential(nn.BatchNorm2d(3))]
    with pytest.raises(TypeError, match=r"^\w+: .*, got a list; .* into one: torch\.nn\.ModuleList\(\[\.\.\.\]\)\.$"):
        function(models)
