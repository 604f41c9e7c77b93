"""Task-balanced batch norm in a Hugging Face Trainer: a small ResNet, five tasks of two digits. Its lines are marked TBBN.

pip install "tbbn[bench,huggingface]"
python examples/huggingface_trainer.py
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import tbbn
from tbbn.bench.vision import torchvision

torchvision()  # transformers imports it; this helps where it does not fit the installed torch

from transformers import PrinterCallback, ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments  # noqa: E402
from transformers.utils import logging  # noqa: E402

from tbbn.integrations.huggingface import BalancedTrainer  # noqa: E402

TASKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def train(balanced: bool, epochs: int, folder: str) -> float:
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(data.target)
    x = torch.nn.functional.interpolate(x, scale_factor=2)
    test = torch.arange(len(y)) % 4 == 0
    model = ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
        )
    )
    if balanced:
        model = tbbn.convert(model)  # TBBN, 1
    settings = TrainingArguments(
        folder, per_device_train_batch_size=64, num_train_epochs=epochs, learning_rate=5e-3, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_strategy="no",
    )  # fmt: skip
    memory = torch.tensor([], dtype=torch.int64)
    for task, classes in enumerate(TASKS):
        rows = torch.where(torch.isin(y, torch.tensor(classes)) & ~test)[0]
        examples: list[dict[str, Tensor]] = [{"pixel_values": x[r], "labels": y[r]} for r in torch.cat([rows, memory])]
        if balanced:
            trainer = BalancedTrainer(model, settings, train_dataset=examples, tasks=TASKS, task=task)  # TBBN, 2
        else:
            trainer = Trainer(model, settings, train_dataset=examples)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        memory = torch.cat([memory, *(rows[y[rows] == label][:10] for label in classes)])
    model.eval()
    with torch.no_grad():
        return (model(x[test]).logits.argmax(1) == y[test]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # images this small gain nothing from more
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        for name, balanced in (("batch norm", False), ("task-balanced batch norm", True)):
            print(f"{name:26} {100 * train(balanced, arguments.epochs, folder):5.1f} %")


if __name__ == "__main__":
    main()
