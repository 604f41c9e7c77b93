"""The common base of PODNet and AFC: several proxies per class, the NCA loss, and a phase that trains only the classifier.

The main phase trains the backbone, the scale eta and the new proxies with L = NCA + the method's own distillation. New proxies
start at the k-means centres of their class's features, scaled to the mean length of the old proxies. From the second task on,
a second phase trains the proxies of all classes on the class-balanced exemplars.

Images are classified by the proxies, or with ``classifier = "nme"`` by the nearest mean of exemplars and their mirror images.
The authors' configurations for "nme" also fix the scale (``scale = 3``); PODNet's sets ``pod_spatial = 5``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tbbn.bench.data.types import Batch
from tbbn.bench.methods.base import Losses, Method, Phase, TaskContext
from tbbn.bench.methods.nme import nearest_mean_scores, remember_means
from tbbn.bench.methods.terms import k_means, nca
from tbbn.bench.models import Head, Network, Output, ProxyHead
from tbbn.options import option


@dataclass(frozen=True)
class ProxyMethod(Method):
    needs_previous = True
    needs_stages = True
    last_relu = False  # features may be negative

    n_proxies: int = option(10, "proxies per class", least=1)
    finetune_epochs: int = option(20, "epochs of the phase that trains only the classifier; 0 skips it", least=0)
    finetune_lr: float = option(0.05, "learning rate of that phase", above=0)
    classifier: str = option(
        "proxies", "predict by proxies, or by nme: the nearest mean of exemplars", choices=("proxies", "nme")
    )
    scale: float = option(
        0.0, "fixed norm of features and proxies in the similarity; 0 learns a scale eta instead", least=0
    )

    def make_head(self, n_features: int) -> Head:
        return ProxyHead(n_features, self.n_proxies, scale=self.scale)

    def phases(self, context: TaskContext) -> tuple[Phase, ...]:
        main = Phase(trainable="newest")
        if not context.number or not context.memory.budget or not self.finetune_epochs:
            return (main,)
        finetune = Phase(
            "finetune",
            rows="exemplars",
            loss="finetune_loss",
            trainable="head",
            epochs=self.finetune_epochs,
            lr=self.finetune_lr,
            schedule="constant",
            keep="last",  # validation rows belong to the current task only and would select the least balanced epoch
            uses_previous=False,
        )
        return main, finetune

    def parameters(self, network: Network, trainable: str) -> list[nn.Parameter]:
        """As in the base class, but "head" means only the proxies: the second phase does not train the scale eta."""
        head = network.head
        assert isinstance(head, ProxyHead)
        if trainable == "head":
            return list(head.weights)
        chosen = super().parameters(network, trainable)
        return [p for p in chosen if p is not head.eta] if self.scale else chosen

    def before_task(self, context: TaskContext) -> None:
        if not context.number:
            return
        head = context.network.head
        assert isinstance(head, ProxyHead)
        rows = context.task.train
        features, labels = F.normalize(context.outputs(rows).features.float()), context.labels(rows)
        generator = context.generator("proxies")
        centres = [k_means(features[labels == c], self.n_proxies, generator) for c in context.task.classes]
        length = torch.cat([old.detach().flatten(0, 1) for old in head.weights[:-1]]).norm(dim=1).mean()
        head.set_proxies(context.number, torch.stack(centres) * length)

    def loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        losses = self.finetune_loss(batch, output, previous)
        if previous is None:
            return losses
        # Distillation grows with the ratio of all classes to new ones.
        factor = math.sqrt(batch.n_classes / (batch.n_classes - batch.n_old_classes))
        return losses | {name: factor * term for name, term in self.distillation(output, previous).items()}

    def finetune_loss(self, batch: Batch, output: Output, previous: Output | None) -> Losses:
        return {"nca": nca(output.logits, batch.labels)}

    def after_task(self, context: TaskContext) -> None:
        if self.classifier == "nme":
            remember_means(context, flipped=True)

    def predict(self, output: Output) -> Tensor:
        return nearest_mean_scores(output) if self.classifier == "nme" else output.logits

    def distillation(self, output: Output, previous: Output) -> Losses:
        raise NotImplementedError
