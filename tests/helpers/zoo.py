"""Take a network of another package through convert, a training step and revert."""

import copy

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import tbbn
from tbbn.nn.modules import BalancedNorm

# Parameters times pixels of the input: VGG has 129 million and takes 64 x 64. A step above it is made on the meta device, where
# nothing is computed.
LARGE = 9e11
ROWS = 6  # of a step: rows 0 to 3 are current, 4 and 5 memory of one past task, so 4 / 2 * 1 = 2 splits
SPLITS = [[0, 2, 4, 5], [1, 3, 4, 5]]


def has_batch_norm(model):
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def is_large(model, size):
    return sum(p.numel() for p in model.parameters()) * size**2 > LARGE


def there_and_back(model):
    """Convert and revert: every batch norm is replaced, and classes and state are as before."""
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    tbbn.convert(model)
    assert all(isinstance(m, BalancedNorm) for m in model.modules() if isinstance(m, _BatchNorm))
    assert list(model.state_dict()) == keys
    tbbn.revert(model)
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys


def train_a_step(model, x, **options):
    """One balanced step: finite, with the statistics of the splits; convert and revert change no output in eval mode.

    Returns whether a batch norm got several rows a sample.
    """
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    before = predict(model, x[:2])
    there_and_back(model)
    assert_same(predict(model, x[:2]), before)
    tbbn.convert(model)
    watch = RunningStatistics(model)
    loss = step(model, x, **options)
    watch.check()
    assert loss.isfinite(), loss
    wrong = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert not wrong, wrong
    assert watch.used and all(m.weight is None or m.weight.grad is not None for m in watch.used)
    torch.optim.SGD(model.parameters(), 1e-3).step()
    after, state = predict(model, x[:2]), copy.deepcopy(model.state_dict())
    tbbn.revert(model)
    # Running statistics after one step are those of no batch: with them a deep network may overflow, plain or converted.
    assert_same(predict(model, x[:2]), after, equal_nan=True)
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys
    assert_same(dict(model.state_dict()), dict(state))
    return watch.tokens


def step_on_meta(model, x, **options):
    """What can be said without computing: the converted network trains, and every gradient has its parameter's shape."""
    tbbn.convert(model)
    assert step(model, x, **options).shape == ()
    norms = [m for m in model.modules() if isinstance(m, BalancedNorm) and m.weight is not None]
    shapes = [m.weight.grad.shape == m.weight.shape for m in norms if m.weight.grad is not None]
    assert shapes and all(shapes)
    tbbn.revert(model)


def step(model, x, **options):
    with tbbn.balance(model.train(), current=ROWS - 2, memory=2, past_tasks=1, **options):
        output = model(x)
    loss = sum(part.square().mean() for part in (output if isinstance(output, tuple | list) else [output]))
    loss.backward()
    return loss


def predict(model, x):
    with torch.no_grad():
        return model.eval()(x)


def assert_same(got, wanted, **options):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, **options)


class RunningStatistics:
    """What they should be after a step: of the splits' rows, taken one split at a time from each norm's input."""

    def __init__(self, model):
        self.wanted, self.tokens = {}, False
        self.norms = {m: name for name, m in model.named_modules() if isinstance(m, BalancedNorm)}
        self.handles = [m.register_forward_pre_hook(self.see) for m in self.norms]

    @property
    def used(self):
        return list(self.wanted)

    def see(self, norm, args):
        x = args[0].detach().double()
        self.tokens |= len(x) != ROWS
        x = x.reshape(ROWS, len(x) // ROWS, x.shape[1], -1).transpose(1, 2).flatten(2)  # rows, channels, the rest
        splits = [x[rows].transpose(0, 1).flatten(1) for rows in SPLITS]
        new = [torch.stack([f(split) for split in splits]).mean(0) for f in (lambda s: s.mean(1), lambda s: s.var(1))]
        old = self.wanted.get(norm, (norm.running_mean.double(), norm.running_var.double(), 0))
        mean, var = ((1 - norm.momentum) * o + norm.momentum * n for o, n in zip(old, new, strict=False))
        self.wanted[norm] = mean, var, old[2] + x.square().mean((0, 2))

    def check(self):
        for handle in self.handles:
            handle.remove()
        for norm, name in self.norms.items():
            assert bool(norm.num_batches_tracked) == (norm in self.wanted), name
        for norm, (mean, var, square) in self.wanted.items():  # a sum's rounding error has the size of its terms
            for got, wanted, size in ((norm.running_mean, mean, square.sqrt()), (norm.running_var, var, square)):
                error, limit = (got - wanted).abs(), 1e-5 * size + 1e-6 * wanted.abs()
                assert (error <= limit).all(), (self.norms[norm], (error / limit).max())
