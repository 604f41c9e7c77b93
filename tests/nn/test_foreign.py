"""Batch norms with a class of their own: what their forward adds, and all they carry, survives convert and revert."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import tbbn
from tbbn.errors import UserError
from tbbn.nn import foreign
from tbbn.plugins import temporary
from tbbn.registry import register_norm

EIGHT = {"current": 8, "memory": 4, "past_tasks": 2}

# The same models are also run outside a block.
pytestmark = pytest.mark.filterwarnings("ignore:A training forward outside")


class BySuper(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Twice(BySuper):
    def forward(self, x, scale=1.0):
        return 2 * scale * super().forward(x)


class ByFunction(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: batch norm's forward written out, then drop and act."""

    def __init__(self, num_features, **kwargs):
        super().__init__(num_features, **kwargs)
        self.drop, self.act = nn.Identity(), nn.LeakyReLU()

    def forward(self, x):
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=self.training,
            momentum=factor, eps=self.eps,
        )  # fmt: skip
        return self.act(self.drop(x))


class ByBase(nn.BatchNorm2d):
    def forward(self, x):
        return nn.BatchNorm2d.forward(self, x).abs()


class ByHand(nn.BatchNorm2d):
    def forward(self, x):
        var, mean = torch.var_mean(x, (0, 2, 3), keepdim=True)
        return ((x - mean) / var.sqrt()).relu()


class Sometimes(nn.BatchNorm2d):
    def forward(self, x):
        return x if self.training else super().forward(x)


class Renamed(nn.BatchNorm2d):
    pass


AFTER = {
    BySuper: torch.relu,
    Twice: lambda y: 2 * y.relu(),
    ByFunction: lambda y: F.leaky_relu(y, 0.01),
    ByBase: torch.abs,
    Renamed: lambda y: y,
}


@pytest.fixture
def x():
    return 3 * torch.randn(12, 4, 3, 3, generator=torch.Generator().manual_seed(5)) + 1


@pytest.fixture
def converters(monkeypatch):
    """What a test registers ends with it."""
    monkeypatch.setattr(foreign, "_CONVERTERS", dict(foreign._CONVERTERS))
    monkeypatch.setattr(foreign, "_COMBINED", {})


def ready(cls, **options):
    torch.manual_seed(1)
    layer = cls(4, **options)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("cls", AFTER, ids=lambda c: c.__name__)
def test_the_normalisation_is_replaced_and_the_rest_is_kept(cls, momentum, x):
    layer = tbbn.convert(ready(cls, momentum=momentum))
    plain = tbbn.convert(ready(nn.BatchNorm2d, momentum=momentum))
    assert isinstance(layer, cls) and isinstance(layer, tbbn.TaskBalancedBatchNorm2d)
    for _ in range(2):
        with tbbn.balance(layer, **EIGHT), tbbn.balance(plain, **EIGHT):
            torch.testing.assert_close(layer(x), AFTER[cls](plain(x)))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value)
    torch.testing.assert_close(layer(x), AFTER[cls](plain(x)))  # outside the block: batch norm
    layer.eval(), plain.eval()
    assert torch.equal(layer(x), AFTER[cls](plain(x)))


@pytest.mark.parametrize("cls", AFTER, ids=lambda c: c.__name__)
def test_revert_restores_the_very_class_and_its_outputs(cls, x):
    before = ready(cls)
    layer = tbbn.convert(before)
    assert layer.state_dict().keys() == before.state_dict().keys() and layer.weight is before.weight
    with tbbn.balance(layer, **EIGHT):
        layer(x)
    wanted = layer.eval()(x)
    back = tbbn.revert(layer)
    assert type(back) is cls and torch.equal(back(x), wanted)
    assert vars(back).keys() == vars(before).keys()
    assert tbbn.revert(back) is back


def test_arguments_of_the_forward_are_passed_on(x):
    layer = tbbn.convert(ready(Twice))
    assert torch.equal(layer(x, scale=3.0), 3 * layer(x))


@pytest.mark.parametrize("cls", AFTER, ids=lambda c: c.__name__)
def test_copies_and_pickles_keep_the_class(cls, x):
    layer = tbbn.convert(ready(cls))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        with tbbn.balance(layer, **EIGHT), tbbn.balance(other, **EIGHT):
            assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("cls", [BySuper, ByFunction], ids=lambda c: c.__name__)
def test_it_compiles_in_one_graph(cls, x):
    layer = tbbn.convert(ready(cls))
    compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
    with tbbn.balance(layer, **EIGHT), tbbn.balance(compiled, **EIGHT):
        torch.testing.assert_close(compiled(x), layer(x))


def test_a_forward_that_normalises_in_another_way_is_refused_and_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.BatchNorm2d(4), ByHand(4))
    with pytest.raises(
        UserError, match=r"convert: ByHand is a batch norm with a forward of its own.*register_converter.*skip="
    ):
        tbbn.convert(model)
    assert [type(m) for m in model] == [nn.BatchNorm2d, ByHand]


def test_a_forward_that_does_not_reach_the_normalisation_raises(x):
    layer = tbbn.convert(ready(Sometimes))
    with pytest.raises(UserError, match="Sometimes: its forward did not reach the normalisation"):
        layer(x)
    assert torch.equal(layer.eval()(x), ready(nn.BatchNorm2d).eval()(x))


def test_a_forward_replaced_on_the_object_is_refused(x):
    layer = nn.BatchNorm2d(4)
    layer.forward = lambda x: nn.BatchNorm2d.forward(layer, x).relu()
    with pytest.raises(UserError, match="convert: the forward of a BatchNorm2d was replaced on the object itself"):
        tbbn.convert(nn.Sequential(layer))


def test_a_converter_says_what_surrounds_the_normalisation(x, converters):
    @tbbn.register_converter(ByHand)
    def forward(layer, normalise, x):
        return normalise(x).relu()

    layer, plain = tbbn.convert(ready(ByHand)), tbbn.convert(ready(nn.BatchNorm2d))
    with tbbn.balance(layer, **EIGHT), tbbn.balance(plain, **EIGHT):
        assert torch.equal(layer(x), plain(x).relu())
    assert type(tbbn.revert(layer)) is ByHand
    with pytest.raises(
        UserError, match="register_converter: expected a subclass of torch's batch norm, got <class 'torch"
    ):
        tbbn.register_converter(nn.LayerNorm)


@pytest.mark.parametrize("norm", ["gn", "in", "sn", "brn", "cn", "adab2n", "weighted"])
def test_every_norm_goes_into_a_class_with_an_activation(norm, x, converters):
    tbbn.register_converter(ByFunction)(lambda layer, normalise, x: layer.act(layer.drop(normalise(x))))
    options = {"groups": 2} if norm in ("gn", "cn") else {}
    layer, plain = (
        tbbn.convert(ready(ByFunction), norm, **options),
        tbbn.convert(ready(nn.BatchNorm2d), norm, **options),
    )
    torch.testing.assert_close(layer(x), AFTER[ByFunction](plain(x)))
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert type(tbbn.convert(layer, "bn")) is ByFunction


def test_norms_that_are_no_batch_norm_need_a_converter():
    for cls in (BySuper, ByFunction):
        with pytest.raises(UserError, match=rf"convert: {cls.__name__} is a batch norm with a forward of its own"):
            tbbn.convert(cls(4), "gn", groups=2)


@temporary()
def test_registering_such_a_class_as_a_norm_does_not_lose_its_activation(x):
    register_norm("bnact", "batch norm and an activation")(ByFunction)
    layer = tbbn.convert(ready(ByFunction))
    assert layer(x).min() < 0 and isinstance(layer.act, nn.LeakyReLU)
    assert type(tbbn.revert(layer)) is ByFunction
    # Put in by name, it is a norm like any other.
    assert type(tbbn.convert(tbbn.convert(nn.BatchNorm2d(4), "bnact"), "tbbn")) is tbbn.TaskBalancedBatchNorm2d


class FrozenBatchNorm2d(nn.Module):
    pass


def test_frozen_batch_norm_is_left_alone_and_said_so():
    model = nn.Sequential(nn.BatchNorm2d(4), FrozenBatchNorm2d(), FrozenBatchNorm2d())
    with pytest.warns(UserWarning, match="convert: did not replace 2 FrozenBatchNorm2d, whose statistics are fixed"):
        tbbn.convert(model)
    assert isinstance(model[0], tbbn.TaskBalancedBatchNorm2d) and type(model[1]) is FrozenBatchNorm2d


def parametrized(layer):
    return parametrizations.weight_norm(layer, dim=None)


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 2)


def hook_normed(layer):
    return torch.nn.utils.spectral_norm(layer)


@pytest.mark.parametrize("change", [parametrized, pruned, hook_normed])
def test_parametrized_and_pruned_layers(change, x):
    before = change(ready(nn.BatchNorm2d))
    layer, plain = tbbn.convert(before), tbbn.convert(ready(nn.BatchNorm2d))
    assert layer.state_dict().keys() == before.state_dict().keys()
    before(x)  # hooks compute the weight
    layer(x)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    with tbbn.balance(layer, **EIGHT), tbbn.balance(plain, **EIGHT):
        y = layer(x)
        torch.testing.assert_close(y, plain(x))
    y.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    back = tbbn.revert(layer)
    assert type(back) is type(before) and back.state_dict().keys() == before.state_dict().keys()
    assert back(x).shape == x.shape


class Listener:
    def __init__(self):
        self.heard = []

    def __call__(self, layer, *args):
        self.heard.append(layer)


def test_hooks_and_attributes_are_carried_there_and_back(x):
    layer, forward, pre, backward, saved = nn.BatchNorm2d(4), Listener(), Listener(), Listener(), Listener()
    handle = layer.register_forward_hook(forward)
    layer.register_forward_pre_hook(pre)
    layer.register_full_backward_hook(backward)
    layer._register_state_dict_hook(saved)
    layer.register_buffer("mine", torch.ones(2), persistent=False)
    layer.note = "keep"
    for change in (tbbn.convert, tbbn.revert):
        layer = change(layer)
        layer(x.requires_grad_()).sum().backward()
        keys = layer.state_dict().keys()
        for listener in (forward, pre, backward, saved):
            assert listener.heard and all(heard is layer for heard in listener.heard)
            listener.heard.clear()
        assert layer.note == "keep" and layer.mine.numel() == 2 and "mine" not in keys
    assert type(layer) is nn.BatchNorm2d
    handle.remove()  # handles taken before still work
    layer(x)
    assert not forward.heard


def test_hooks_that_hold_the_layer_hold_the_new_one():
    class WithMethod(nn.BatchNorm2d):
        def listen(self, state, *args):
            self.loaded = True

    layer = WithMethod(4)
    layer._register_load_state_dict_pre_hook(layer.listen)
    heard = []
    layer._register_load_state_dict_pre_hook(lambda module, *args: heard.append(module), with_module=True)
    new = tbbn.convert(layer)
    del layer
    new.load_state_dict(new.state_dict())
    assert new.loaded and heard == [new]


def test_hooks_of_every_kind_are_rebound_or_left_as_they_are(x):
    class WithMethods(nn.BatchNorm2d):
        def seen(self, *args):
            self.calls = getattr(self, "calls", 0) + 1

    layer, heard = WithMethods(4), []
    layer.register_forward_hook(layer.seen)
    slot = layer.register_forward_pre_hook(layer.__eq__)  # no Python function, so it stays
    other = WithMethods(4)
    layer.register_forward_hook(other.seen)
    kept = [layer._register_load_state_dict_pre_hook(lambda *args: heard.append(len(args)))]
    layer.register_buffer("mine", torch.ones(2), persistent=False)
    old = layer
    for change in (tbbn.convert, tbbn.revert):
        layer = change(layer)
        assert [getattr(hook, "__self__", None) for hook in layer._forward_hooks.values()] == [layer, other]
        assert next(iter(layer._forward_pre_hooks.values())).__self__ is old
        layer.load_state_dict(layer.state_dict())
        assert heard == [7]  # without a module
        heard.clear()
        assert layer._non_persistent_buffers_set == {"mine"}
    slot.remove()
    layer(x)
    assert layer.calls == other.calls == 1
    kept[0].remove()
    layer.load_state_dict(layer.state_dict())
    assert not heard


@temporary()
def test_a_norm_may_have_buffers_that_are_not_saved():
    @register_norm("counting")
    class Counting(nn.BatchNorm2d):
        def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True):
            super().__init__(num_features, eps, momentum, affine)
            self.register_buffer("passing", torch.zeros(3), persistent=False)

    layer = nn.BatchNorm2d(4)
    layer.register_buffer("mine", torch.ones(2), persistent=False)
    layer = tbbn.convert(layer, "counting")
    assert layer.passing.numel() == 3 and layer.mine.numel() == 2
    assert layer.state_dict().keys() == nn.BatchNorm2d(4).state_dict().keys()
    layer = tbbn.convert(layer, "tbbn")
    assert not hasattr(layer, "passing") and layer._non_persistent_buffers_set == {"mine"}


class Outer(nn.BatchNorm2d):
    """Another norm with a forward of its own inside its forward."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.inner = BySuper(num_features)

    def forward(self, x):
        return self.inner(super().forward(x))


class OnlyInTraining(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) if self.training else 2 * x


def test_a_norm_inside_another_ones_forward_does_not_count_for_it(x):
    layer = tbbn.convert(Outer(4))
    plain = Outer(4)
    torch.testing.assert_close(layer(x), plain(x))
    inner = Outer(4)
    inner.inner = Outer(4)  # and one more
    torch.testing.assert_close(tbbn.convert(copy.deepcopy(inner))(x), inner(x))

    class Never(Outer):
        def forward(self, x):
            return self.inner(x) if x.sum() > -1e9 else super().forward(x)

    with pytest.raises(UserError, match="Never: its forward did not reach the normalisation"):
        tbbn.convert(Never(4))(x)


def test_in_eval_mode_a_forward_need_not_reach_what_is_batch_norm_there(x):
    assert torch.equal(tbbn.convert(OnlyInTraining(4)).eval()(x), 2 * x)
    for norm, options in (("sn", {}), ("cn", {"groups": 2})):  # these are not
        with pytest.raises(UserError, match="OnlyInTraining: its forward did not reach the normalisation"):
            tbbn.convert(OnlyInTraining(4), norm, **options).eval()(x)


def test_whether_a_forward_has_reached_the_normalisation_is_known_by_thread(x):
    here, there = threading.Event(), threading.Event()

    class Slow(nn.BatchNorm2d):
        def forward(self, x):
            assert here.wait(20)
            y = super().forward(x)
            there.set()
            return y

    class Waits(nn.BatchNorm2d):
        def forward(self, x):
            here.set()
            assert there.wait(20)  # the other thread's forward has reached its normalisation
            return x if self.training else super().forward(x)

    slow, waits = tbbn.convert(Slow(4)), tbbn.convert(Waits(4))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(slow, x)
        with pytest.raises(UserError, match="Waits: its forward did not reach the normalisation"):
            waits(x)
        assert other.result().shape == x.shape


def test_the_input_of_an_own_forward_may_be_given_by_its_name(x):
    class Named(nn.BatchNorm2d):
        def forward(self, input):
            return super().forward(input).relu()

    layer, plain = tbbn.convert(Named(4)), Named(4)
    assert torch.equal(layer(input=x), plain(input=x))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = layer

        def forward(self, x):
            return self.norm(input=x)

    graph = torch.fx.symbolic_trace(Around()).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["norm"]


class Both(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + F.batch_norm(x, None, None, training=True)


class AboveFunction(ByFunction):
    def forward(self, x):
        return super().forward(x).abs()


class Decorated(nn.BatchNorm2d):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class NoFunction(nn.BatchNorm2d):
    forward = torch.relu


def test_how_a_forward_normalises_is_read_off_its_code():
    planned, other = tbbn.TaskBalancedBatchNorm2d, tbbn.nn.adab2n.AdaptiveBalancedNorm
    found = {
        (own, norm): foreign._replaces_call(own, norm)
        for own, norm in (
            *((own, planned) for own in (BySuper, Twice, ByFunction, ByBase, AboveFunction, Decorated)),
            *((own, other) for own in (BySuper, Twice, Decorated)),
        )
    }
    by_call = {(ByFunction, planned), (ByBase, planned), (AboveFunction, planned)}
    assert found == {pair: pair in by_call for pair in found}
    refused = [(own, planned) for own in (ByHand, Both, NoFunction)]
    refused += [(own, other) for own in (ByFunction, ByBase, AboveFunction, Both)]
    refused += [(own, tbbn.nn.comparison.GroupNorm) for own in (BySuper, ByFunction, Twice)]
    for own, norm in refused:
        with pytest.raises(UserError, match=f"convert: {own.__name__} is a batch norm with a forward of its own"):
            foreign._replaces_call(own, norm)


@pytest.mark.parametrize("name", ["BatchNormAct2d", "SyncBatchNormAct"])
def test_norms_of_timm_are_known_by_their_names(name, x):
    def forward(self, x):
        return self.act(self.drop(torch.nn.functional.instance_norm(x)))  # what it is does not matter

    kind = type(
        name, (nn.BatchNorm2d,), {"forward": forward, "__module__": "timm.layers.norm_act", "__qualname__": name}
    )
    layer = kind(4)
    layer.drop, layer.act = nn.Hardtanh(-0.5, 0.5), nn.LeakyReLU(0.1)
    new = tbbn.convert(layer)
    wanted = F.leaky_relu(nn.BatchNorm2d(4)(x).clamp(-0.5, 0.5), 0.1)
    torch.testing.assert_close(new(x), wanted)
    assert type(tbbn.convert(kind(4))) is type(new), "one class for all layers of a kind"


def test_a_pickle_of_an_own_class_leaves_behind_what_a_forward_has_left(x):
    layer = tbbn.convert(BySuper(4))
    with tbbn.balance(layer, **EIGHT), torch.no_grad():
        layer(x)
    assert layer._forwards.last and layer._used
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer)):
        assert type(twin) is type(layer) and not twin._forwards.last and twin._used is None


@pytest.mark.parametrize("cls", [BySuper, ByFunction], ids=lambda c: c.__name__)
def test_checkpointing_of_an_own_class_without_running_statistics(cls, x):
    found = []
    for recompute in (False, True):
        layer, leaf = tbbn.convert(ready(cls, track_running_stats=False)), x.clone().requires_grad_()
        with tbbn.balance(layer, **EIGHT):
            y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
        y.pow(2).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_only_a_batch_norm_class_has_a_converter(converters):
    for wrong in (nn.Linear, nn.BatchNorm2d(3), "BatchNorm2d", int):
        with pytest.raises(UserError, match="register_converter: expected a subclass of torch's batch norm, got"):
            tbbn.register_converter(wrong)
    calls = []

    @tbbn.register_converter(ByHand)
    def first(layer, normalise, x):
        calls.append(1)
        return normalise(x)

    x = torch.randn(12, 4, 3, 3)
    tbbn.convert(ByHand(4))(x)

    @tbbn.register_converter(ByHand)
    def second(layer, normalise, x):
        calls.append(2)
        return normalise(x)

    tbbn.convert(ByHand(4))(x)
    assert calls == [1, 2], "the newer one holds for layers that are converted later"
    assert first is not second


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


def model():
    return nn.ModuleDict({"stem": nn.BatchNorm2d(4), "block": nn.ModuleDict({"tokens": Tokens()}), "head": BySuper(4)})


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["head"], {"head"}),
        ("block", {"block.tokens.norm"}),
        (["*.norm", "stem"], {"block.tokens.norm", "stem"}),
        ([Tokens], {"block.tokens.norm"}),
        (nn.BatchNorm2d, {"stem", "head"}),
        (lambda name, module: name.startswith("s"), {"stem"}),
        ((), set()),
    ],
    ids=["list", "parent", "patterns", "classes", "class", "function", "nothing"],
)
def test_skip_leaves_layers_alone(skip, left):
    converted = tbbn.convert(model(), skip=skip)
    norms = {n: m for n, m in converted.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    assert {name for name, m in norms.items() if not isinstance(m, tbbn.nn.modules.BalancedNorm)} == left


def test_a_shared_layer_is_skipped_by_any_of_its_names():
    shared = nn.BatchNorm2d(4)
    for name in ("a", "b"):
        net = tbbn.convert(nn.ModuleDict({"a": shared, "b": shared, "c": nn.BatchNorm2d(4)}), skip=[name])
        assert net["a"] is net["b"] is shared and isinstance(net["c"], tbbn.TaskBalancedBatchNorm2d)


def test_a_function_may_skip_nothing_and_other_things_are_no_rule():
    assert isinstance(tbbn.convert(nn.BatchNorm2d(4), skip=lambda *_: False), tbbn.TaskBalancedBatchNorm2d)
    with pytest.raises(TypeError, match="convert: skip takes names, patterns, classes, modules and functions, got 3"):
        tbbn.convert(nn.BatchNorm2d(4), skip=[3])


def test_a_frozen_batch_norm_that_is_skipped_is_not_mentioned(recwarn):
    tbbn.convert(nn.Sequential(nn.BatchNorm2d(4), FrozenBatchNorm2d()), skip=[FrozenBatchNorm2d])
    assert not recwarn.list


def test_skip_lets_a_refused_layer_pass():
    converted = tbbn.convert(nn.Sequential(nn.BatchNorm2d(4), ByHand(4)), skip=[ByHand])
    assert type(converted[1]) is ByHand and isinstance(converted[0], tbbn.TaskBalancedBatchNorm2d)


def test_a_rule_of_skip_that_matches_nothing_is_an_error():
    with pytest.raises(UserError, match=r"convert: skip: no module of ModuleDict has a name that matches 'haed'"):
        tbbn.convert(model(), skip=["haed"])
    with pytest.raises(UserError, match=r"convert: skip: no module of ModuleDict is a SyncBatchNorm"):
        tbbn.convert(model(), skip=nn.SyncBatchNorm)
    with pytest.raises(TypeError, match="convert: skip takes names, patterns, classes, modules and functions, got 3"):
        tbbn.convert(model(), skip=[3])


@pytest.mark.parametrize("norm", ["tbbn", "weighted", "adab2n"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (2, 3, 2)], ids=str)
def test_rows_of_a_sample_count_as_its_pixels(norm, shape):
    """Each of 12 samples gives 5 rows, one after another; the sample as a whole is current or memory."""
    dims = max(len(shape), 1)
    torch.manual_seed(0)
    x = torch.randn(60, 4, *shape)
    layer = tbbn.convert(getattr(nn, f"BatchNorm{dims}d")(4), norm)
    other = copy.deepcopy(layer)
    with tbbn.balance(layer, **EIGHT, rows_per_sample=5):
        y = layer(x)
    pixels = torch.stack([torch.stack([x[5 * n + i] for i in range(5)], 1) for n in range(12)])  # (12, 4, 5, ...)
    with tbbn.balance(other, **EIGHT):
        wanted = other(pixels.reshape(12, 4, *((5 * shape[0], *shape[1:]) if shape else (5,)))).reshape(pixels.shape)
    wanted = torch.stack([wanted[row // 5, :, row % 5] for row in range(60)])
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(layer.state_dict(), other.state_dict())


class Mixed(nn.Module):
    """A norm of tokens between two norms of samples, as in LeViT."""

    def __init__(self, tokens=None):
        super().__init__()
        self.first, self.tokens, self.last = nn.BatchNorm2d(4), (tokens or BySuper1d)(4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.first(x).flatten(2).transpose(1, 2)  # (N, tokens, 4)
        return self.last(self.tokens(x.flatten(0, 1)).reshape(x.shape).mean(1))


class BySuper1d(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class ByFunction1d(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        ).relu()


@pytest.mark.parametrize("tokens", [BySuper1d, ByFunction1d])
def test_layers_with_and_without_several_rows_a_sample(tokens, x):
    model = tbbn.convert(Mixed(tokens))
    plain = Mixed()  # the same with a norm and ReLU
    plain.tokens = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    plain = tbbn.convert(plain)
    with tbbn.balance(model, **EIGHT, rows_per_sample=9), tbbn.balance(plain, **EIGHT, rows_per_sample=9):
        torch.testing.assert_close(model(x), plain(x))
    outputs = []
    for rows in (9, "any"):
        twin = copy.deepcopy(model)
        with tbbn.balance(twin, **EIGHT, rows_per_sample=rows):
            outputs.append(twin(x))
    assert torch.equal(*outputs) and outputs[0].shape == (12, 4)
    for rows in (1, 8):
        with (
            pytest.raises(
                UserError, match=r"rows but the input has 108.*rows_per_sample=, or tbbn\.convert\(\.\.\., skip"
            ),
            tbbn.balance(model, **EIGHT, rows_per_sample=rows),
        ):
            model(x)
    skipped = tbbn.convert(Mixed(), skip=["tokens"])
    with tbbn.balance(skipped, **EIGHT):
        assert skipped(x).shape == (12, 4)
    for wrong in (0, 2.0, True, "all"):
        with pytest.raises(UserError, match="balance: rows_per_sample must be a whole number from 1, or 'any', got"):
            tbbn.balance(model, **EIGHT, rows_per_sample=wrong)


def test_rows_per_sample_compiles_in_one_graph(x):
    model = tbbn.convert(Mixed())
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    with tbbn.balance(model, **EIGHT, rows_per_sample="any"), tbbn.balance(compiled, **EIGHT, rows_per_sample="any"):
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_keeps_hooks_and_attributes(x):
    layer, forward = nn.LazyBatchNorm2d(), Listener()
    layer.register_forward_hook(forward)
    layer.note = "keep"
    new = tbbn.convert(layer)
    assert new(x).shape == x.shape and type(new) is tbbn.TaskBalancedBatchNorm2d
    assert forward.heard == [new] and new.note == "keep" and new.num_features == 4


@pytest.mark.parametrize("given", ["any", 2])
@pytest.mark.parametrize("rows", [11, 13, 25])
def test_rows_that_are_no_multiple_of_the_samples_are_refused_by_their_numbers(given, rows):
    layer = tbbn.convert(nn.BatchNorm1d(4))
    with (
        tbbn.balance(layer, **EIGHT, rows_per_sample=given),
        pytest.raises(UserError, match=rf"the layout covers 8 \+ 4 = 12 rows but the input has {rows};"),
    ):
        layer(torch.randn(rows, 4))
    with tbbn.balance(layer, **EIGHT, rows_per_sample=given):
        assert layer(torch.randn(12, 4)).shape == (12, 4)


class Bare(nn.BatchNorm1d):
    """Leaves the defaults of ``F.batch_norm`` as they are, whatever its own settings."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


def test_what_a_layer_does_not_pass_on_is_the_default_of_torch():
    torch.manual_seed(0)
    x = 3e-3 * torch.randn(12, 4).double()  # a variance near eps
    bare = tbbn.convert(Bare(4, eps=0.1, momentum=0.7).double())
    plain = tbbn.convert(nn.BatchNorm1d(4, eps=1e-5, momentum=0.1, affine=False).double())
    with tbbn.balance(bare, **EIGHT), tbbn.balance(plain, **EIGHT):
        torch.testing.assert_close(bare(x), plain(x))
    torch.testing.assert_close(bare.running_mean, plain.running_mean)
    torch.testing.assert_close(bare.running_var, plain.running_var)
    torch.testing.assert_close(bare.eval()(x), plain.eval()(x))


class LeavesOut(nn.BatchNorm2d):
    """Calls ``F.batch_norm`` without what it may leave out."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class LeavesOutTraining(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class InOrder(nn.BatchNorm2d):
    def forward(self, x):
        running = self.running_mean, self.running_var
        return F.batch_norm(x, *running, self.weight, self.bias, self.training, 0.7, 0.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", [LeavesOut, LeavesOutTraining, InOrder], ids=lambda c: c.__name__)
def test_a_replaced_call_means_what_it_means_to_torch(cls, training, x):
    plain, layer = (ready(cls).train(training) for _ in range(2))
    for one in (plain, layer):
        one.running_mean += 0.3
        one.running_var *= 1.7
    layer = tbbn.convert(layer)
    if cls is LeavesOutTraining and training:  # it normalises by its running statistics, and so does the new layer
        with tbbn.balance(layer, **EIGHT):
            assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_mean, plain.running_mean) and torch.equal(layer.running_var, plain.running_var)
