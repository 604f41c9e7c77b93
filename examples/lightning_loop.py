"""Task-balanced batch norm in Lightning: five tasks of two digits with replay. The three lines it takes are marked TBBN.

pip install "tbbn[bench,lightning]"
python examples/lightning_loop.py
"""

import argparse
import logging
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tbbn
from tbbn.bench.vision import torchvision

torchvision()  # torchmetrics imports it; this helps where it does not fit the installed torch

from lightning.pytorch import LightningModule, Trainer  # noqa: E402

from tbbn.integrations.lightning import BalanceCallback  # noqa: E402

TASKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


class Classifier(LightningModule):
    def __init__(self, balanced: bool) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        if balanced:
            self.model = tbbn.convert(self.model)  # TBBN, 1

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(balanced: bool, epochs: int) -> float:
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(data.target)
    test = torch.arange(len(y)) % 4 == 0
    module, callback, memory = Classifier(balanced), BalanceCallback(TASKS), torch.tensor([], dtype=torch.int64)
    for task, classes in enumerate(TASKS):
        rows = torch.where(torch.isin(y, torch.tensor(classes)) & ~test)[0]
        callback.task = task  # TBBN, 2
        both = torch.cat([rows, memory])
        loader = DataLoader(TensorDataset(x[both], y[both]), 64, shuffle=True)
        Trainer(
            max_epochs=epochs,
            callbacks=[callback] if balanced else [],  # TBBN, 3
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)
        memory = torch.cat([memory, *(rows[y[rows] == label][:10] for label in classes)])
    module.eval()
    with torch.no_grad():
        return (module.model(x[test]).argmax(1) == y[test]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # images this small gain nothing from more
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    for name, balanced in (("batch norm", False), ("task-balanced batch norm", True)):
        print(f"{name:26} {100 * train(balanced, arguments.epochs):5.1f} %")


if __name__ == "__main__":
    main()
