"""A method with state: what it measures on one task is kept for all later ones, saved and resumed with the weights.

Elastic weight consolidation (Kirkpatrick et al., 2017). After each task it keeps the parameters, and how important each one is:
the squared gradient of the loss on the task's batches (an estimate of the diagonal of the Fisher information, summed over
tasks). Later it pulls important parameters back: L = CE + strength / 2 * sum_i F_i (p_i - old_i)^2. SGD diverges where
lr * strength * F_i exceeds 2.

    python examples/own_state.py
    tbbn run --plugin examples/own_state.py --method ft,ewc --norm bn,tbbn
"""

import argparse
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import tbbn
from tbbn.bench.data.types import Batch
from tbbn.bench.methods import Losses, Method, TaskContext
from tbbn.bench.models import Network, Output
from tbbn.options import option


@tbbn.register_method("ewc", "parameters that are important for old tasks are held where they were")
@dataclass(frozen=True)
class ElasticWeights(Method):
    strength: float = option(1.0, "weight of the penalty; 0 is fine-tuning", least=0)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        return {"ce": F.cross_entropy(output.logits, batch.labels)}

    def penalty(self, network: Network) -> Losses:
        state, terms = network.state, []
        for name, parameter in network.named_parameters():
            if f"old {name}" in state:  # the classes of the new task have no past
                terms.append((state[f"importance {name}"] * (parameter - state[f"old {name}"]).square()).sum())
        return {"ewc": self.strength / 2 * torch.stack(terms).sum()} if terms else {}

    def after_task(self, context: TaskContext) -> None:
        network = context.network  # in eval mode: running statistics stay as they are
        parameters = dict(network.named_parameters())
        squares, n_batches = [torch.zeros_like(parameter) for parameter in parameters.values()], 0
        for batch in context.batches("importance"):
            loss = F.cross_entropy(context.forward(network, batch).logits, batch.labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)  # 0 if not used
            for square, gradient in zip(squares, gradients, strict=True):
                square += len(batch.labels) * gradient.square()  # the gradient is a mean over the batch's rows
            n_batches += 1
        for (name, parameter), square in zip(parameters.items(), squares, strict=True):
            before = network.state.get(f"importance {name}", 0)
            network.remember(f"importance {name}", before + square / n_batches)
            network.remember(f"old {name}", parameter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    settings = {"train.epochs": parser.parse_args().epochs}
    print(tbbn.run(method=["ft", "ewc"], norm="tbbn", data="digits", quiet=True, **settings))


if __name__ == "__main__":
    main()
