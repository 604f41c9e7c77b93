"""A method of your own in the bench: write its loss, and compare it with any norm.

Balanced softmax: the new task has most rows of a batch, so a network learns to answer with new classes. Adding the
logarithm of each class's share of the batch to the logits, in training only, takes this away. The engine does the
rest: tasks, memory, batches, evaluation, checkpoints and tables.

    python examples/own_method.py
    tbbn run --plugin examples/own_method.py --method ft,balanced --norm bn,tbbn
"""

import argparse
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import tbbn
from tbbn.bench.data.types import Batch
from tbbn.bench.methods import Losses, Method
from tbbn.bench.models import Output
from tbbn.options import option


@tbbn.register_method("balanced", "cross-entropy with the share of each class in the batch added to the logits")
@dataclass(frozen=True)
class BalancedSoftmax(Method):
    strength: float = option(1.0, "weight of the shares; 0 is fine-tuning", least=0)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        n_classes = output.logits.shape[1]
        counts = F.one_hot(batch.labels, n_classes).sum(0) + 1  # no class has share 0
        shares = torch.log(counts / counts.sum())
        return {"ce": F.cross_entropy(output.logits + self.strength * shares, batch.labels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    settings = {"train.epochs": parser.parse_args().epochs}
    print(
        tbbn.run(
            method=["ft", "balanced", "balanced(strength=0.5)"], norm="tbbn", data="digits", quiet=True, **settings
        )
    )


if __name__ == "__main__":
    main()
