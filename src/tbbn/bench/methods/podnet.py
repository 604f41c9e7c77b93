"""PODNet (Douillard et al., 2020): distillation of every stage's pooled outputs, and several proxies per class.

L = NCA + sqrt(C_seen / C_new) [pod_flat * mean_n (1 - cos(f_n, f_n^old)) + pod_spatial * POD]. The classifier, its NCA loss and
the second phase are in :mod:`tbbn.bench.methods.proxy`. The defaults are the authors' values for CIFAR-100; for ImageNet they
use pod_flat = 10, pod_spatial = 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbbn.bench.methods.base import Losses
from tbbn.bench.methods.proxy import ProxyMethod
from tbbn.bench.methods.terms import cosine_distance, pod_spatial
from tbbn.bench.models import Output
from tbbn.options import option
from tbbn.registry import register_method


@register_method("podnet", "distillation of pooled feature maps, classifier with several proxies per class")
@dataclass(frozen=True)
class PodNet(ProxyMethod):
    pod_flat: float = option(1.0, "weight of the distillation of the features (ImageNet: 10)", least=0)
    pod_spatial: float = option(3.0, "weight of the distillation of the stages (ImageNet: 8)", least=0)

    def distillation(self, output: Output, previous: Output) -> Losses:
        return {
            "pod_flat": self.pod_flat * cosine_distance(output.features, previous.features),
            "pod_spatial": self.pod_spatial * pod_spatial(output.stages, previous.stages),
        }
