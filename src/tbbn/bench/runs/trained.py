"""A trained network as a classifier of images, from a run's folder or from memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tbbn.bench.data.augment import evaluation_view, normalise
from tbbn.bench.engine.plugins import require_plugins
from tbbn.bench.engine.record import Record, digest
from tbbn.bench.engine.setup import build_network, data_facts, image_shape, load_source, method_of
from tbbn.bench.methods import Method
from tbbn.bench.models import Network
from tbbn.bench.runs import checkpoint
from tbbn.errors import UserError
from tbbn.nn import revert


class TrainedNetwork(nn.Module):
    """Maps images (N, C, H, W), uint8 or floats in [0, 1], to scores (N, classes); column ``j`` is for ``classes[j]``.

    Images are cropped and normalised as in the run's evaluation, and the method computes the scores, so that the largest is the
    run's prediction. ``network`` is the network itself, with plain batch norm if its norm can be reverted to it.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: Network, method: Method, classes: Sequence[str], mean: Tensor, std: Tensor, crop: int | None
    ) -> None:
        super().__init__()
        self.network, self.method, self.classes, self.crop = network, method, tuple(classes), crop
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        images = self._tensor(images)
        view = evaluation_view(images.to(self.mean.device), crop=self.crop)
        return self.method.predict(self.network(normalise(view, self.mean, self.std)))

    def _tensor(self, images: Any) -> Tensor:
        """Convert images, which may be a NumPy array, to a tensor. Raises if the network cannot take its shape or dtype."""
        if type(images).__module__ == "numpy" and hasattr(images, "ndim"):
            images = torch.as_tensor(images)
        channels = len(self.mean)
        if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] != channels:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise UserError(f"network(): images must be a tensor or an array (N, {channels}, H, W), got {got}.")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise UserError(f"network(): images must be uint8, or floats in [0, 1], got {images.dtype}.")
        return images

    @torch.no_grad()
    def predict(self, images: Tensor) -> list[str]:
        """The names of the predicted classes."""
        return [self.classes[i] for i in self(images).argmax(1).tolist()]


def trained(record: Record, network: Network) -> TrainedNetwork:
    """A copy of a run's network on the CPU, ready to classify."""
    config = record.run_config
    facts = record.data
    if not facts:  # the record is from a version that did not write them
        facts = data_facts(config, load_source(config, download=False))
    plain = copy.deepcopy(network).cpu().requires_grad_(False)
    with suppress(UserError):  # a norm that is not batch norm in eval mode is kept
        revert(plain)
    classes = [facts["classes"][i] for i in record.class_order[: plain.n_classes]]
    mean, std = torch.tensor(facts["mean"]), torch.tensor(facts["std"])
    return TrainedNetwork(plain, method_of(config), classes, mean, std, config.data.crop or None).eval()


def load_trained(record: Record, directory: Path, after: int | None = None) -> TrainedNetwork:
    """The network in a run's newest checkpoint, or the one saved after the first ``after`` tasks."""
    config = record.run_config
    require_plugins(config, record.plugins, str(directory))
    found = checkpoint.load(directory) if after is None else checkpoint.after_task(directory, after)
    if found is None:
        raise UserError(f"{directory}: no checkpoint here, so there is no network to load.")
    state, tensors = found
    shape = record.data.get("shape") or image_shape(config, load_source(config, download=False))
    network = build_network(config, method_of(config), (shape[0], shape[1], shape[2]))
    weights = checkpoint.section(tensors, "network")
    if after is not None and digest(weights) != record.weights[after - 1]:
        raise UserError(
            f"{directory}: the saved weights are not those of the record after task {after}; see tbbn verify."
        )
    network.restore(weights, state["task_sizes"])
    return trained(record, network)
