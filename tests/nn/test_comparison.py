"""Every other norm against its own formula, written out slowly; the paper's ablations against what they say."""

import copy

import pytest
import torch
from literal import reshape_repeat, split_by_split
from norms import EIGHT, affine, close, data, make
from torch import nn

import tbbn

SHAPES = [(12, 4), (12, 4, 5), (12, 4, 3, 2), (12, 4, 2, 2, 2)]
shapes = pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


# -- instance and group norm


def grouped(x, groups, eps=1e-5):
    y = torch.empty_like(x)
    size = x.shape[1] // groups
    for n in range(len(x)):
        for g in range(groups):
            part = x[n, g * size : (g + 1) * size]
            y[n, g * size : (g + 1) * size] = (part - part.mean()) / (part.var(unbiased=False) + eps).sqrt()
    return y


@shapes
def test_instance_norm(shape):
    layer, x = make("in"), data(shape)
    close(layer(x), affine(layer, grouped(x, 4)))
    close(layer.eval()(x), affine(layer, grouped(x, 4)))
    assert dict(layer.named_buffers()) == {}


@every_shape
@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm(shape, groups):
    layer, x = make("gn", groups=groups), data(shape)
    close(layer(x), affine(layer, grouped(x, groups)))


def test_group_norm_counting_channels_as_the_released_code():
    layer = make("gn", channels=8, channels_per_group=2)
    assert layer.num_groups == 4
    released = tbbn.convert(nn.BatchNorm2d(32, affine=False), "gn", channels_per_group=16)
    assert released.num_groups == 2 and released.weight is None
    assert make("gn", channels=32).num_groups == 16


# -- continual norm


@shapes
def test_continual_norm(shape):
    layer, x = make("cn", groups=2), data(shape)
    grouped_x = grouped(x, 2)
    plain = nn.BatchNorm1d(4).double()
    plain.weight, plain.bias = layer.weight, layer.bias
    close(layer(x), plain(grouped_x.flatten(2)).view(shape))
    close(layer.running_mean, plain.running_mean)
    close(layer.running_var, plain.running_var)
    close(layer.eval()(x), plain.eval()(grouped_x.flatten(2)).view(shape))  # groups are normalised in eval mode too
    assert "groups=2" in repr(layer)


def test_the_groups_of_continual_norm_are_normalised_with_the_layers_eps():
    layer, x = make("cn", groups=2), data((12, 4, 3, 2))
    layer.eps = 0.5
    plain = nn.BatchNorm1d(4, eps=0.5).double()
    plain.weight, plain.bias = layer.weight, layer.bias
    close(layer(x), plain(grouped(x, 2, 0.5).flatten(2)).view(x.shape))


# -- switchable norm


def switchable(layer, x, unbiased=False, running=None):
    rows, y = x.flatten(2), torch.empty_like(x.flatten(2))
    wm, wv = (
        layer.mean_weight.exp() / layer.mean_weight.exp().sum(),
        layer.var_weight.exp() / layer.var_weight.exp().sum(),
    )
    correction = rows.shape[2] / (rows.shape[2] - 1) if unbiased else 1.0
    batch = rows.transpose(0, 1).flatten(1)
    within = rows.var(2, unbiased=False) * (correction - 1)  # what unbiased instance variances add to the others
    for n in range(len(rows)):
        for c in range(rows.shape[1]):
            var_in, mean_in = rows[n, c].var(unbiased=False) * correction, rows[n, c].mean()
            var_ln, mean_ln = rows[n].var(unbiased=False) + within[n].mean(), rows[n].mean()
            var_bn, mean_bn = batch[c].var(unbiased=False) + within[:, c].mean(), batch[c].mean()
            if running is not None:
                mean_bn, var_bn = running[0][c], running[1][c]
            mean = wm[0] * mean_in + wm[1] * mean_ln + wm[2] * mean_bn
            var = wv[0] * var_in + wv[1] * var_ln + wv[2] * var_bn
            y[n, c] = (rows[n, c] - mean) / (var + layer.eps).sqrt()
    return affine(layer, y).view(x.shape)


@shapes
@pytest.mark.parametrize("unbiased", [False, True])
def test_switchable_norm(shape, unbiased):
    layer, x = make("sn", unbiased=unbiased), data(shape)
    layer.mean_weight.data = torch.tensor([0.5, 1.0, -1.0]).double()
    layer.var_weight.data = torch.tensor([1.0, 0.0, 2.0]).double()
    close(layer(x), switchable(layer, x, unbiased))
    if not unbiased:
        plain = nn.BatchNorm1d(4).double()
        plain(x.flatten(2))
        close(layer.running_mean, plain.running_mean)
        close(layer.running_var, plain.running_var)
    running = layer.running_mean.clone(), layer.running_var.clone()
    close(layer.eval()(x), switchable(layer, x, unbiased, running))
    close(layer.running_mean, running[0])


def test_switchable_norm_starts_with_equal_parts_and_learns_them():
    layer, x = make("sn"), data((12, 4, 3, 2))
    assert layer.mean_weight.tolist() == layer.var_weight.tolist() == [1, 1, 1]
    layer(x).pow(3).sum().backward()
    assert layer.mean_weight.grad.abs().sum() > 0 and layer.var_weight.grad.abs().sum() > 0


def test_switchable_norm_without_running_statistics():
    layer = tbbn.convert(nn.BatchNorm2d(4, track_running_stats=False).double(), "sn").eval()
    x = data((12, 4, 3, 2))
    close(layer(x), switchable(layer, x))


def test_the_running_variance_of_switchable_norm_starts_at_zero_if_asked():
    plain, x = nn.BatchNorm2d(4).double(), data((12, 4, 3, 2))
    made = tbbn.SwitchableNorm(4, zero_variance=True, dtype=torch.float64)
    converted = tbbn.convert(plain, "sn", zero_variance=True)
    assert tbbn.SwitchableNorm(4).running_var.tolist() == [1] * 4 == tbbn.convert(plain, "sn").running_var.tolist()
    for layer in (made, converted):
        assert layer.running_var.tolist() == [0] * 4 == layer.running_mean.tolist()
        layer(x)
        # 12 x 6 values a channel; a tenth of their unbiased variance is new.
        close(layer.running_var, 0.1 * x.transpose(0, 1).flatten(1).var(1))
        layer.reset_running_stats()
        assert layer.running_var.tolist() == [0] * 4
    assert tbbn.SwitchableNorm(4, zero_variance=True, track_running_stats=False).running_var is None


def test_a_layer_that_has_seen_batches_keeps_its_variance():
    plain, x = nn.BatchNorm2d(4).double(), data((12, 4, 3, 2))
    plain(x)
    seen = plain.running_var.clone()
    layer = tbbn.convert(plain, "sn", zero_variance=True)
    assert torch.equal(layer.running_var, seen) and layer.running_var is plain.running_var
    for statistic in ("running_mean", "running_var"):  # a state dict may have them without their count
        loaded = nn.BatchNorm2d(4)
        getattr(loaded, statistic)[2] = 0.5
        wanted = loaded.running_var.tolist()
        assert tbbn.convert(loaded, "sn", zero_variance=True).running_var.tolist() == wanted
    from_group_norm = tbbn.convert(tbbn.GroupNorm(4, groups=2), "sn", zero_variance=True)  # which counts no batches
    assert from_group_norm.running_var.tolist() == [0] * 4
    meta = tbbn.convert(nn.BatchNorm2d(4, device="meta"), "sn", zero_variance=True)
    assert meta.running_var.is_meta


def test_switchable_norm_keeps_its_digits_off_centre():
    layer, x = tbbn.convert(nn.BatchNorm2d(4), "sn"), data((12, 4, 8, 8)).float() + 1e3
    assert (layer(x) - switchable(layer.double(), x.double())).abs().max() < 1e-3


# -- batch renormalisation


def renormalised(layer, x, mean, sigma, step, eps=1e-5, on_std=False):
    """One training step of Ioffe (2017), sections 3 and 4; returns the output and the new moving averages."""
    r_max = min(max(1 + 2 * (step - 5000) / 35000, 1), 3)
    d_max = min(max(5 * (step - 5000) / 20000, 0), 5)
    y, means, sigmas = torch.empty_like(x), [], []
    for c in range(x.shape[1]):
        part = x[:, c]
        var = part.var(unbiased=False)
        sigma_b = var.sqrt() + eps if on_std else (var + eps).sqrt()
        r = (sigma_b / sigma[c]).clamp(1 / r_max, r_max).item()
        d = ((part.mean() - mean[c]) / sigma[c]).clamp(-d_max, d_max).item()
        y[:, c] = (part - part.mean()) / sigma_b * r + d
        means.append(mean[c] + 0.01 * (part.mean() - mean[c]))
        sigmas.append(sigma[c] + 0.01 * (sigma_b - sigma[c]))
    return affine(layer, y), torch.stack(means), torch.stack(sigmas)


@every_shape
@pytest.mark.parametrize("step", [0, 5000, 9000, 20000, 25000, 40000, 90000])
@pytest.mark.parametrize("on_std", [False, True])
def test_batch_renorm(shape, step, on_std):
    eps = 1e-3 if on_std else 1e-5
    layer, x = make("brn", eps_on_std=on_std, eps=eps), data(shape)
    layer.running_mean += 0.2
    layer.num_batches_tracked.fill_(step)
    sigma = layer.running_var.sqrt() + eps if on_std else (layer.running_var + eps).sqrt()
    wanted, mean, sigma = renormalised(layer, x, layer.running_mean.clone(), sigma, step, eps, on_std)
    close(layer(x), wanted, 1e-6)  # the limits are computed in float32
    close(layer.running_mean, mean)
    close(layer.running_var, (sigma - eps).square() if on_std else sigma.square() - eps)
    assert layer.num_batches_tracked == step + 1
    shape = (1, -1) + (1,) * (x.dim() - 2)
    close(layer.eval()(x), affine(layer, (x - mean.view(shape)) / sigma.view(shape)))


@pytest.mark.parametrize("step", [0, 6000, 20000, 90000])
@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_the_corrections_of_batch_renorm_stay_within_their_limits(step, scale):
    layer, x = make("brn"), data((12, 4, 3, 2)) * scale + 20
    layer.num_batches_tracked.fill_(step)
    sigma = (layer.running_var + 1e-5).sqrt()
    wanted = renormalised(layer, x, layer.running_mean.clone(), sigma, step)[0]
    close(layer(x), wanted, 1e-5)
    narrow = make("brn", r_max=1.5, d_max=0.25)
    narrow.num_batches_tracked.fill_(90000)
    y = narrow(x)
    for c in range(4):
        part, (var, mean) = x[:, c], torch.var_mean(x[:, c], unbiased=False)
        r, d = (1.5 if scale > 1 else 1 / 1.5), 0.25
        close(y[:, c], ((part - mean) / (var + 1e-5).sqrt() * r + d) * narrow.weight[c] + narrow.bias[c], 1e-5)


def test_batch_renorm_starts_as_batch_norm_and_treats_r_and_d_as_constants():
    layer, plain, x = tbbn.convert(nn.BatchNorm2d(4), "brn"), nn.BatchNorm2d(4), data((12, 4, 3, 2)).float()
    torch.testing.assert_close(layer(x), plain(x))
    layer, x = make("brn"), data((12, 4, 3, 2)).requires_grad_()
    layer.num_batches_tracked.fill_(90000)
    layer.running_mean += 0.5
    frozen = layer.running_mean.clone(), (layer.running_var + 1e-5).sqrt()
    (got,) = torch.autograd.grad(layer(x).pow(2).sum(), x)
    (wanted,) = torch.autograd.grad(renormalised(layer, x, *frozen, 90000)[0].pow(2).sum(), x)
    close(got, wanted, 1e-6)


def test_batch_renorm_needs_more_than_one_value():
    with pytest.raises(
        ValueError, match=r"BatchRenorm: expected more than 1 value per channel in training, got \(1, 4, 1, 1\)"
    ):
        make("brn")(data((1, 4, 1, 1)))


def test_any_dims_norms_refuse_vectors():
    for norm in ("sn", "brn", "adab2n"):
        with pytest.raises(ValueError, match=r"expected input of shape \(N, C, ...\), got \(4,\)"):
            make(norm)(data((4,)))


# -- the steps for a kernel: a normaliser from the moments of each channel of each sample

STEPS = {
    "in": {},
    "gn": {"groups": 2},
    "cn": {"groups": 2},
    "sn": {},
    "sn, unbiased": {"unbiased": True},
    "brn": {},
    "brn, eps on std": {"eps_on_std": True, "eps": 1e-3},
}


@shapes
@pytest.mark.parametrize("settings", ["affine", "no bias", "no weight", "cumulative", "untracked", "frozen", "lost"])
@pytest.mark.parametrize("name", STEPS)
def test_a_normaliser_is_the_forward(name, settings, shape):
    norm = name.split(",")[0]
    layer, x = make(norm, **STEPS[name]), data(shape)
    if norm == "brn" and settings not in ("affine", "no bias", "no weight"):
        return  # it needs running statistics and a momentum
    if settings != "affine":
        layer.bias = None
    if settings == "no weight":
        layer.weight = None
    if settings == "cumulative":
        layer.momentum = None
    if settings == "frozen":
        layer.track_running_stats = False
    if settings in ("untracked", "lost"):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        layer.track_running_stats = settings == "lost"  # as where somebody has taken the buffers away
    if getattr(layer, "running_mean", None) is not None:
        layer.running_mean += 0.5
        layer.running_var *= 1.5
        layer.num_batches_tracked.fill_(12_000 if norm == "brn" else 3)
    if norm == "sn":
        layer.mean_weight.data = torch.tensor([0.5, 1.0, -1.0]).double()
        layer.var_weight.data = torch.tensor([1.0, 0.0, 2.0]).double()
    var, mean = torch.var_mean(x.flatten(2), 2, unbiased=False)
    for training in (True, False, True):
        twin = copy.deepcopy(layer.train(training))
        wanted = twin(x)
        state = layer.snapshot(x) if hasattr(layer, "snapshot") else ()
        center, scale, shift = (
            t.broadcast_to(12, 4).view(12, 4, *[1] * (len(shape) - 2)) for t in layer.normaliser(x, mean, var, *state)
        )
        close((x - center) * scale + shift, wanted, 1e-6 if norm == "brn" else 1e-9)  # its limits are float32
        for ours, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
            close(ours, theirs, 1e-6 if norm == "brn" else 1e-9)


@pytest.mark.parametrize("norm", ["sn", "cn"])
def test_statistics_that_are_frozen_or_cumulative_are_batch_norms(norm):
    for momentum, tracked in ((0.1, False), (None, True), (0.3, True)):
        layer, plain, x = make(norm, **STEPS[norm]), nn.BatchNorm2d(4).double(), data((12, 4, 3, 2))
        for one in (layer, plain):
            one.momentum, one.track_running_stats = momentum, tracked
        seen = grouped(x, 2) if norm == "cn" else x
        for _ in range(3):
            layer(x)
            plain(seen)
            if norm == "sn":
                var, mean = torch.var_mean(x.flatten(2), 2, unbiased=False)
                layer.normaliser(x, mean, var)
                plain(seen)
        for ours, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("training", [True, False])
def test_batch_renorm_without_a_snapshot_reads_its_own_statistics(training):
    layer, x = make("brn").train(training), data((12, 4, 3, 2))
    layer.running_mean += 0.5
    layer.num_batches_tracked.fill_(12_000)
    twin = copy.deepcopy(layer)
    var, mean = torch.var_mean(x.flatten(2), 2, unbiased=False)
    for ours, theirs in zip(
        layer.normaliser(x, mean, var), twin.normaliser(x, mean, var, *twin.snapshot(x)), strict=True
    ):
        close(ours, theirs)


def test_statistics_of_the_output_need_running_statistics_to_move():
    layer = tbbn.TaskBalancedBatchNorm2d(4, case=2, output_statistics=True, track_running_stats=False).double()
    x = data((64, 4, 3, 3), seed=5)
    close(run(layer, x), reshape_repeat(x, None, None, layer.weight, layer.bias, 48, 8))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_running_variance_of_a_few_values_is_unbiased_and_never_infinite(n):
    layer, x = make("sn"), data((n, 4))
    layer(x)
    var = x.var(0, unbiased=False) * n / max(1, n - 1)  # of one value it is 0
    close(layer.running_var, 0.9 + 0.1 * var)
    close(layer.running_mean, 0.1 * x.mean(0))


def test_a_snapshot_of_batch_renorm_is_of_before_the_step():
    layer, x = make("brn"), data((12, 4, 3, 2))
    before = [t.clone() for t in (layer.running_mean, layer.running_var, layer.num_batches_tracked)]
    kept = layer.snapshot(x)
    layer(x)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert not torch.equal(layer.running_mean, before[0])


def test_which_normalisers_compile():
    found = {
        norm: make(norm, **STEPS.get(norm, {})).compiles_normaliser
        for norm in ("in", "gn", "cn", "sn", "brn", "adab2n")
    }
    assert found == dict.fromkeys(found, True)
    for norm in ("cn", "sn"):
        layer = make(norm, **STEPS[norm])
        layer.momentum = None  # a cumulative average reads its counter
        assert not layer.compiles_normaliser
    for norm in ("in", "gn"):
        assert make(norm, **STEPS[norm]).per_sample


# -- one set of statistics with exact task weights


@every_shape
def test_weighted_batch_norm_is_batch_norm_of_repeated_memory_rows(shape):
    x = data(shape).requires_grad_()
    # A third of the weight on 8 current rows, two thirds on 4 memory rows: each memory row counts as four current ones.
    layer = make("weighted") if len(shape) == 4 else None
    if layer is None:
        cls = {2: tbbn.WeightedBatchNorm1d, 3: tbbn.WeightedBatchNorm1d, 5: tbbn.WeightedBatchNorm3d}[len(shape)]
        layer = cls(4).double()
    with tbbn.balance(layer, **EIGHT):
        y = layer(x)
    many = torch.cat([x[:8], *[x[8:]] * 4])
    dims = [0, *range(2, len(shape))]
    mean, var = many.mean(dims, keepdim=True), many.var(dims, unbiased=False, keepdim=True)
    wanted = affine(layer, (x - mean) / (var + 1e-5).sqrt())
    close(y, wanted)
    n = x.numel() // 4
    close(layer.running_mean, 0.1 * mean.flatten())
    close(layer.running_var, 0.9 + 0.1 * var.flatten() * n / (n - 1))
    (got,), (slow,) = torch.autograd.grad(y.pow(3).sum(), x), torch.autograd.grad(wanted.pow(3).sum(), x)
    close(got, slow)


# -- the paper's ablations


@pytest.fixture
def batch():
    return data((64, 4, 3, 3), seed=5).requires_grad_()


def balanced_running(x, r=8):
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    reshape_repeat(x.detach(), mean, var, None, None, 48, r)
    return mean, var


def run(layer, x, past=3):
    with tbbn.balance(layer, current=48, memory=16, past_tasks=past):
        return layer(x)


def test_case_1_trains_as_batch_norm_and_runs_with_balanced_statistics(batch):
    layer, plain = make("tbbn", case=1), nn.BatchNorm2d(4).double()
    plain.weight, plain.bias = layer.weight, layer.bias
    y, wanted = run(layer, batch), plain(batch)
    close(y, wanted)
    close(*(torch.autograd.grad(t.pow(3).sum(), batch)[0] for t in (y, wanted)))
    mean, var = balanced_running(batch)
    close(layer.running_mean, mean)
    close(layer.running_var, var)


def test_case_2_trains_balanced_and_runs_with_batch_statistics(batch):
    layer, plain = make("tbbn", case=2), nn.BatchNorm2d(4).double()
    y, wanted = run(layer, batch), reshape_repeat(batch, None, None, layer.weight, layer.bias, 48, 8)
    plain(batch)
    close(y, wanted)
    close(*(torch.autograd.grad(t.pow(3).sum(), batch)[0] for t in (y, wanted)))
    close(layer.running_mean, plain.running_mean)
    close(layer.running_var, plain.running_var)


def test_case_2_of_the_released_code_runs_with_statistics_of_the_output(batch):
    layer, plain = make("tbbn", case=2, output_statistics=True), nn.BatchNorm2d(4).double()
    y = run(layer, batch)
    close(y, reshape_repeat(batch, None, None, layer.weight, layer.bias, 48, 8))
    plain(y.detach())
    close(layer.running_mean, plain.running_mean)
    close(layer.running_var, plain.running_var)
    assert layer.num_batches_tracked == 1


def test_case_3_normalises_every_row_with_the_averaged_statistics(batch):
    layer = make("tbbn", case=3)
    y = run(layer, batch)
    parts = [torch.cat([batch[:48][j::8], batch[48:]]) for j in range(8)]
    mean = torch.stack([p.mean((0, 2, 3)) for p in parts]).mean(0)
    var = torch.stack([p.var((0, 2, 3), unbiased=False) for p in parts]).mean(0)
    wanted = affine(layer, (batch - mean.view(1, 4, 1, 1)) / (var.view(1, 4, 1, 1) + 1e-5).sqrt())
    close(y, wanted)
    leaves = [batch, layer.weight, layer.bias]
    for a, b in zip(
        torch.autograd.grad(y.pow(3).sum(), leaves), torch.autograd.grad(wanted.pow(3).sum(), leaves), strict=True
    ):
        close(a, b)
    running = balanced_running(batch)
    close(layer.running_mean, running[0])
    close(layer.running_var, running[1])


def test_case_4_is_batch_norm_but_for_the_counted_rows(batch):
    layer, plain = make("tbbn", case=4), nn.BatchNorm2d(4).double()
    plain.weight, plain.bias = layer.weight, layer.bias
    y, wanted = run(layer, batch), plain(batch)
    close(y, wanted)
    close(*(torch.autograd.grad(t.pow(3).sum(), batch)[0] for t in (y, wanted)))
    close(layer.running_mean, plain.running_mean)
    var, n, all_rows = batch.detach().var((0, 2, 3), unbiased=False), 22 * 9, 64 * 9
    close(layer.running_var, 0.9 + 0.1 * var * n / (n - 1))
    close(plain.running_var, 0.9 + 0.1 * var * all_rows / (all_rows - 1))


def test_memory_rows_normalised_with_their_own_split_only(batch):
    layer = make("tbbn", memory="own")
    is_memory = torch.arange(64) >= 48
    running = torch.zeros(4).double(), torch.ones(4).double()
    y = run(layer, batch)
    wanted = split_by_split(batch, *running, layer.weight, layer.bias, is_memory, 8, memory="own")
    close(y, wanted)
    close(y[:48], reshape_repeat(batch, None, None, layer.weight, layer.bias, 48, 8)[:48])
    close(layer.running_var, running[1])


def test_total_variance_adds_what_lies_between_the_splits(batch):
    plain, layer = make("tbbn"), make("tbbn", total_variance=True)
    close(run(layer, batch), run(plain, batch))
    means = torch.stack([torch.cat([batch[:48][j::8], batch[48:]]).mean((0, 2, 3)) for j in range(8)]).detach()
    close(layer.running_mean, plain.running_mean)
    close(layer.running_var, plain.running_var + 0.1 * means.var(0, unbiased=False))
    # With equal weights this is the variance of the batch in which each memory row counts eight times.
    many = torch.cat([batch[:48], *[batch[48:]] * 8]).detach()
    n = 22 * 9
    within = plain.running_var - 0.9
    biased = within / 0.1 * (n - 1) / n + means.var(0, unbiased=False)
    close(biased, many.var((0, 2, 3), unbiased=False))


def test_rule_current_gives_its_own_splits(batch):
    layer = make("tbbn", rule="current")
    close(run(layer, batch, past=4), reshape_repeat(batch, None, None, layer.weight, layer.bias, 48, 12))
