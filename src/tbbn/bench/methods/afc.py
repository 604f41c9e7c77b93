"""Adaptive feature consolidation (Kang et al., 2022): PODNet with distillation weighted by the importance of each channel.

L = NCA + sqrt(C_seen / C_new) * importance_weight * D. D is the mean, over stages, rows and channels, of the channel's
importance times the distance between student and teacher. After a task, one pass over augmented batches gives channel c the
importance I_c = sum over batches of mean_n sum_hw (dNCA / dx_nchw)^2, divided by the mean over the channels of its stage.

The pass runs in train mode, inside ``balance``. In the authors' program it runs the network itself, so the running statistics
change before exemplars are chosen and the task is evaluated, and the next teacher has the changed ones. With
``importance_moves_statistics`` the pass does the same here; otherwise it runs a copy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from tbbn.bench.methods.base import Losses, TaskContext
from tbbn.bench.methods.proxy import ProxyMethod
from tbbn.bench.methods.terms import channel_distance, nca
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method


def _name(stage: int) -> str:
    return f"importance_{stage}"


@register_method("afc", "distillation of feature maps weighted by channel importance, PODNet's classifier")
@dataclass(frozen=True)
class Afc(ProxyMethod):
    importance_weight: float = option(
        4.0, "weight of the distillation (the authors use 4 for CIFAR-100, 10 for ImageNet)", least=0
    )
    importance_moves_statistics: bool = option(
        False, "the importance pass updates the running statistics, as in the authors' code"
    )

    def distillation(self, output: Output, previous: Output) -> Losses:
        importance = [previous.state[_name(i)] for i in range(len(output.stages))]
        return {"consolidation": self.importance_weight * channel_distance(output.stages, previous.stages, importance)}

    def after_training(self, context: TaskContext) -> None:
        network = context.network if self.importance_moves_statistics else copy.deepcopy(context.network)
        # Gradients of the maps need an autograd graph; the next phase sets requires_grad again.
        network.train().requires_grad_(True)
        sums: list[Tensor] = []
        for batch in context.batches("importance"):
            output = context.forward(network, batch)
            gradients = torch.autograd.grad(nca(output.logits, batch.labels), output.stages)
            energy = [gradient.float().square().sum((2, 3)).mean(0) for gradient in gradients]
            sums = [total + new for total, new in zip(sums, energy, strict=True)] if sums else energy
        network.eval()
        for i, total in enumerate(sums):
            mean = total.mean()
            # If every gradient is zero, all channels get the same importance.
            importance = torch.where(mean > 0, total / mean, torch.ones_like(total))
            context.network.remember(_name(i), importance)
