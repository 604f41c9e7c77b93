"""The callback in a real Lightning Trainer."""

import copy

import pytest
import torch
from package import package
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tbbn
from tbbn.errors import UserError

package("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402

from tbbn.integrations.lightning import BalanceCallback  # noqa: E402

TASKS = [[0, 1], [2, 3], [4, 5]]


class Module(LightningModule):
    def __init__(self, model, fail_at=None):
        super().__init__()
        self.model, self.fail_at = model, fail_at

    def training_step(self, batch, number):
        if self.global_step == self.fail_at:
            raise KeyboardInterrupt
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def trainer(folder, callback, epochs=1, **options):
    return Trainer(
        max_epochs=epochs, callbacks=[callback], logger=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", default_root_dir=folder, **{"enable_checkpointing": False, "devices": 1, **options},
    )  # fmt: skip


def loader(data, task, past=8):
    """Batches of 24 current and ``past`` memory rows, shuffled."""
    x, y = data
    current, memory = torch.where(y // 2 == task)[0], torch.where(y // 2 < task)[0]
    rows = []
    for part in current.split(24):
        batch = torch.cat([part, memory[:past]]) if task else part
        rows.append(batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))])
    return DataLoader(TensorDataset(x, y), batch_sampler=[r.tolist() for r in rows])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_training_forward_is_balanced(precision, network, data, watch, tmp_path):
    forwards = watch(network)
    callback, module = BalanceCallback(TASKS), Module(network)
    for task in range(3):
        callback.task = task
        forwards.seen.clear()
        trainer(tmp_path, callback, precision=precision).fit(module, loader(data, task), loader(data, task))
        assert len(forwards.seen) == 4
        label_of = {row.numpy().tobytes(): int(y) for row, y in zip(*data, strict=True)}
        for twin, x, output in forwards.seen:
            is_memory = torch.tensor([label_of[row.numpy().tobytes()] < 2 * task for row in x])
            assert int(is_memory.sum()) == (8 if task else 0)
            with (
                tbbn.balance(twin, is_memory=is_memory, past_tasks=task),
                torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"),
            ):
                torch.testing.assert_close(output, twin(x).detach())


def test_an_interrupted_fit_leaves_no_layout_and_resumes_its_task(network, data, tmp_path, layouts):
    callback, module = BalanceCallback(TASKS, task=2), Module(network)
    first = trainer(tmp_path, callback, epochs=1)
    first.fit(module, loader(data, 2))
    first.save_checkpoint(tmp_path / "a.ckpt")
    module.fail_at = 5
    with pytest.raises(BaseException):  # noqa: PT011  Lightning turns it into an exit
        trainer(tmp_path, callback, epochs=3).fit(module, loader(data, 2), ckpt_path=tmp_path / "a.ckpt")
    assert network.train()(torch.randn(3, 1, 8, 8)).shape == (3, 6)  # a layout left behind would not fit

    module.fail_at = None
    layouts.clear()
    resumed = BalanceCallback(TASKS)  # the checkpoint knows the task
    trainer(tmp_path, resumed, epochs=2).fit(module, loader(data, 2), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.task == 2 and layouts == [(24, 8, 2)] * 3 + [(8, 8, 2)]
    given = BalanceCallback(TASKS, task=1)  # a task that was asked for stays
    trainer(tmp_path, given, epochs=2).fit(module, loader(data, 1), ckpt_path=tmp_path / "a.ckpt")
    assert given.task == 1


def test_labels_elsewhere_in_the_batch(network, data, tmp_path, layouts):
    class Mine(BalanceCallback):
        def task_ids(self, batch):
            return batch[1] // 2

    trainer(tmp_path, Mine(TASKS, task=1)).fit(Module(network), loader(data, 1))
    assert layouts[0] == (24, 8, 1)


def test_a_model_that_was_not_converted_is_refused(network, data, tmp_path):
    with pytest.raises(UserError, match=r"call tbbn\.convert"):
        trainer(tmp_path, BalanceCallback(TASKS)).fit(Module(tbbn.revert(network)), loader(data, 0))


class Checked(Module):
    """Compares each forward, in whichever process, with one that is told by hand which rows are memory."""

    def training_step(self, batch, number):
        x, y = batch
        twin = copy.deepcopy(self.model)
        with tbbn.balance(twin, is_memory=y < 2, past_tasks=1):
            wanted = twin(x)
        torch.testing.assert_close(self.model(x), wanted)
        assert not torch.allclose(wanted, copy.deepcopy(self.model)(x))  # batch norm would differ
        return super().training_step(batch, number)


def test_two_processes_balance_their_own_rows(network, data, tmp_path):
    x, y = data
    current, memory = torch.where(y // 2 == 1)[0][:64], torch.where(y < 2)[0][:16]
    rows = torch.cat([current.view(16, 4), memory.view(16, 1)], 1).flatten()
    batches = DataLoader(TensorDataset(x[rows], y[rows]), 20)  # Lightning gives each process every second row: 16 + 4
    before = network.body[1].running_mean.clone()
    options = {"devices": 2, "strategy": "ddp_fork"}
    trainer(tmp_path, BalanceCallback(TASKS, task=1), **options).fit(Checked(network), batches)
    assert not torch.equal(network.body[1].running_mean, before)
