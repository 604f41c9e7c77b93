"""Take a network of another package through convert, a training step and revert."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import tbbn
from tbbn.nn.modules import BalancedNorm

LARGE = 15_000_000  # parameters; a network above it is converted on the meta device, without a step


def has_batch_norm(model):
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def there_and_back(model):
    """Convert and revert: every batch norm is replaced, and classes and state are as before."""
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    tbbn.convert(model)
    assert all(isinstance(m, BalancedNorm) for m in model.modules() if isinstance(m, _BatchNorm))
    assert list(model.state_dict()) == keys
    tbbn.revert(model)
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys


def train_a_step(model, x, **options):
    """One balanced step; the reverted network gives the same outputs in eval mode."""
    classes = [type(m) for m in model.modules()]
    tbbn.convert(model)
    with tbbn.balance(model.train(), current=len(x) - 2, memory=2, past_tasks=1, **options):
        output = model(x)
    outputs = output if isinstance(output, tuple | list) else [output]
    sum(part.square().mean() for part in outputs).backward()
    norms = [m for m in model.modules() if isinstance(m, BalancedNorm)]
    used = [m for m in norms if m.num_batches_tracked]
    assert used and all(m.weight is None or m.weight.grad is not None for m in used)
    torch.optim.SGD(model.parameters(), 1e-3).step()
    with torch.no_grad():
        wanted = model.eval()(x)
        tbbn.revert(model)
        assert [type(m) for m in model.modules()] == classes
        got = model(x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
