"""Task-balanced batch norm in your own training loop. The three lines it takes are marked TBBN.

Five tasks of two digits each arrive one after another. Ten images of every past class are kept and replayed. The same plain
PyTorch loop runs twice: with batch norm, then with task-balanced batch norm. It shows how to use the layer, not how much the
layer gains: on data this small the difference depends on the settings, and batch norm can be ahead. The digits come from
scikit-learn; the layer itself needs torch alone.

    python examples/own_loop.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tbbn

N_CURRENT, N_MEMORY, KEPT = 48, 16, 10


def digits() -> tuple[torch.Tensor, ...]:
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8)
    y = torch.tensor(data.target)
    test = torch.arange(len(y)) % 4 == 0
    return x[~test], y[~test], x[test], y[test]


def network() -> nn.Module:
    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    body = [*block(1, 32), nn.MaxPool2d(2), *block(32, 32), *block(32, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(balanced: bool, epochs: int, seed: int) -> float:
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = network()
    if balanced:
        # TBBN, 1: once, after the model is made. The last batch of an epoch is short, and the paper's rule suits fixed counts.
        model = tbbn.convert(model, rule="uneven")

    memory = torch.tensor([], dtype=torch.int64)
    for task in range(5):
        current = torch.where(y // 2 == task)[0]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.train()
        for _ in range(epochs):
            for rows in current[torch.randperm(len(current))].split(N_CURRENT):
                replayed = memory[torch.randint(len(memory), (N_MEMORY,))] if task else memory
                batch = torch.cat([rows, replayed])  # the new task's rows first
                if balanced:
                    # TBBN, 2: around the training forward, say what the batch is made of
                    with tbbn.balance(model, current=len(rows), memory=len(replayed), past_tasks=task):
                        loss = cross_entropy(model(x[batch]), y[batch])
                else:
                    loss = cross_entropy(model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for label in (2 * task, 2 * task + 1):
            memory = torch.cat([memory, torch.where(y == label)[0][:KEPT]])

    if balanced:
        model = tbbn.revert(model)  # TBBN, 3: plain batch norm again, to deploy
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # images this small gain nothing from more
    for name, balanced in (("batch norm", False), ("task-balanced batch norm", True)):
        seen = [train(balanced, arguments.epochs, seed) for seed in range(arguments.seeds)]
        print(f"{name:26} {100 * sum(seen) / len(seen):5.1f} %  (each: {', '.join(f'{100 * a:.1f}' for a in seen)})")


if __name__ == "__main__":
    main()
