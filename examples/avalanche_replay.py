"""Task-balanced batch norm in Avalanche: replay, ER-ACE or DER on digits. The two lines it takes are marked TBBN.

pip install "tbbn[bench,avalanche]"
python examples/avalanche_replay.py --strategy Replay
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import tbbn
from tbbn.bench.vision import torchvision

torchvision()  # Avalanche imports it; this helps where it does not fit the installed torch

from avalanche.benchmarks import nc_benchmark  # noqa: E402
from avalanche.training import supervised  # noqa: E402

from tbbn.integrations.avalanche import BalancePlugin  # noqa: E402


class Digits(TensorDataset):
    def __init__(self, test: bool) -> None:
        data = load_digits()
        rows = (torch.arange(len(data.target)) % 4 == 0) == test
        x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        y = torch.tensor(data.target)
        super().__init__(x[rows], y[rows])
        self.targets = y[rows].tolist()


def network() -> nn.Module:
    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    body = [*block(1, 32), nn.MaxPool2d(2), *block(32, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(strategy: str, balanced: bool, epochs: int) -> float:
    torch.manual_seed(0)
    test = Digits(test=True)
    benchmark = nc_benchmark(Digits(test=False), test, n_experiences=5, task_labels=False, shuffle=False)
    model = network()
    plugins = []
    if balanced:
        model = tbbn.convert(model)  # TBBN, 1
        plugins = [BalancePlugin()]  # TBBN, 2
    sizes = {"mem_size": 100} | ({} if strategy == "Replay" else {"batch_size_mem": 16})
    trainer = getattr(supervised, strategy)(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=epochs,
        evaluator=None,
        plugins=plugins,
        **sizes,
    )
    for experience in benchmark.train_stream:
        trainer.train(experience)
    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["Replay", "ER_ACE", "DER"], default="Replay")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # images this small gain nothing from more
    for name, balanced in (("batch norm", False), ("task-balanced batch norm", True)):
        print(f"{name:26} {100 * train(arguments.strategy, balanced, arguments.epochs):5.1f} %")


if __name__ == "__main__":
    main()
