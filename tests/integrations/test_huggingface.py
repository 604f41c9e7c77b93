"""The mixin in a real Hugging Face Trainer, with a real model that has batch norm."""

import pytest
import torch
from package import package
from torch import nn

import tbbn
from tbbn.errors import UserError

package("transformers")
package("accelerate")

from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments  # noqa: E402

from tbbn.integrations.huggingface import BalancedTrainer, BalanceMixin  # noqa: E402

TASKS = [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=6
    )
    return tbbn.convert(ResNetForImageClassification(config))


class Rows(torch.utils.data.Dataset):
    def __init__(self, data, task, n_memory=16):
        x, y = data
        rows = torch.cat([torch.where(y // 2 == task)[0], torch.where(y // 2 < task)[0][:n_memory]])
        self.rows = [{"pixel_values": x[r], "labels": y[r]} for r in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def arguments(folder, **options):
    settings = {
        "per_device_train_batch_size": 24, "num_train_epochs": 1, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **settings | options)


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}], ids=["fp32", "bf16"])
def test_every_training_forward_is_balanced(options, model, data, watch, tmp_path):
    bodies = watch(model.resnet)
    label_of = {row.numpy().tobytes(): int(y) for row, y in zip(*data, strict=True)}
    for task in range(3):
        bodies.seen.clear()
        trainer = BalancedTrainer(
            model, arguments(tmp_path, **options), train_dataset=Rows(data, task), eval_dataset=Rows(data, task),
            tasks=TASKS, task=task,
        )  # fmt: skip
        trainer.train()
        assert len(bodies.seen) == 4
        for twin, x, output in bodies.seen:
            is_memory = torch.tensor([label_of[row.numpy().tobytes()] < 2 * task for row in x])
            with (
                tbbn.balance(twin, is_memory=is_memory, past_tasks=task),
                torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options),
            ):
                torch.testing.assert_close(output, twin(x).pooler_output.detach())
        assert trainer.evaluate()["eval_loss"] > 0


def test_a_trainer_of_ones_own_takes_the_mixin_and_resumes(model, data, tmp_path, layouts):
    class Smoothed(BalanceMixin, Trainer):
        def task_ids(self, inputs):
            return inputs["labels"] // 2

    trainer = Smoothed(
        model, arguments(tmp_path, num_train_epochs=2, save_strategy="epoch", label_smoothing_factor=0.1),
        train_dataset=Rows(data, 1), tasks=TASKS, task=0,
    )  # fmt: skip
    trainer.task = 1
    trainer.train()
    assert len(layouts) == 8 and {past for _, _, past in layouts} == {1}
    assert sum(memory for _, memory, _ in layouts) == 2 * 16
    trainer.train(resume_from_checkpoint=str(next(tmp_path.glob("checkpoint-4"))))
    assert len(layouts) == 12


def test_mistakes_are_named(model, data, tmp_path):
    def trainer(model, task, rows):
        return BalancedTrainer(model, arguments(tmp_path), train_dataset=Rows(data, rows), tasks=TASKS, task=task)

    with pytest.raises(UserError, match=r"class [23] belongs to no task up to task 0"):
        trainer(model, 0, 1).train()
    with pytest.raises(UserError, match=r"nn\.DataParallel divides the batch; start one process per GPU"):
        trainer(model, 0, 0).compute_loss(nn.DataParallel(model), {})
    with pytest.raises(UserError, match=r"call tbbn\.convert"):
        trainer(tbbn.revert(model), 0, 0).train()
