"""Drift of running statistics: how far each layer's are from the statistics of all tasks in equal parts.

The population of a layer is its input over the training images of every task so far, with the network in eval mode. Every task
has equal weight. Images are augmented as in training ("train") or as in testing ("test"): random crops with a dark border, for
example, change the statistics more than an imbalance of tasks does. ``newest`` is the weight of the newest task in a layer's
mean: 1/t if the mean is balanced, 1 if it is the newest task's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tbbn.bench.data.device import to_device
from tbbn.bench.data.scenario import Task
from tbbn.bench.engine.forward import evaluation_forward
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.report.tables import Table
from tbbn.errors import UserError, unknown_name
from tbbn.nn.comparison import ContinualNorm


@dataclass(frozen=True)
class LayerDrift:
    """A layer's running statistics against the population's."""

    layer: str
    mean: float  # mean over channels of |running mean - population's|, in standard deviations of the population
    std: float  # mean over channels of |running std / population's std - 1|
    newest: float  # the best-fitting weight of the newest task in the running mean; past tasks share the rest


@dataclass
class Moments:
    """Sums over the values of each channel, in float64."""

    count: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, x: Tensor) -> None:
        values = x.detach().double().transpose(0, 1).flatten(1)  # (C, values)
        self.count += values.shape[1]
        self.total = self.total.to(values.device) + values.sum(1)
        self.squares = self.squares.to(values.device) + values.square().sum(1)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def second(self) -> Tensor:
        return self.squares / self.count


VIEWS = ("train", "test")


def drift(run: Run, images: int = 0, view: str = "train") -> list[LayerDrift]:
    """The drift of every layer of a run's network, over the tasks that it has learnt.

    ``images`` limits the number of training images per task; 0 takes all.
    """
    if view not in VIEWS:
        raise unknown_name("view", view, VIEWS)
    names = [n for n, layer in run.network.named_modules() if isinstance(getattr(layer, "running_mean", None), Tensor)]
    if not names:
        raise UserError(f"drift: {run.config.label} has no running statistics; leave its runs out.")
    found: dict[str, list[Moments]] = {name: [] for name in names}
    show = _augmented if view == "train" else _plain
    run.network.eval()
    with torch_settings(run.config, run.device):
        for task in run.scenario.tasks[: len(run.network.task_sizes)]:
            for moments in found.values():
                moments.append(Moments())
            with _watched(run.network, {name: moments[-1] for name, moments in found.items()}):
                for batch in show(run, task, images or len(task.train)):
                    evaluation_forward(run.network, batch, run.config.precision)
    layers = dict(run.network.named_modules())
    return [_compare(name, layers[name], moments) for name, moments in found.items()]


def _plain(run: Run, task: Task, images: int) -> Iterator[Tensor]:
    """Images of the task's training rows, evenly spaced, without augmentation."""
    rows = task.train[:: -(-len(task.train) // images)]
    size = run.config.batch.evaluation
    prefetch = run.train_data.prefetch(rows.split(size))
    for part, prefetched in zip(to_device(rows, run.device).split(size), prefetch, strict=False):
        yield run.train_data.evaluation_images(part, prefetched)


def _augmented(run: Run, task: Task, images: int) -> Iterator[Tensor]:
    """The task's own images from the batches of one training epoch, without a memory."""
    empty = copy.copy(run.memory)
    empty.index = empty.index[:0]
    for batch in replace(run.context(task), memory=empty).batches("drift"):
        own = (batch.labels >= task.classes.start) & (batch.labels < task.classes.stop)
        found = batch.images[own][:images]
        images -= len(found)
        if len(found):
            yield found
        if not images:
            return


@contextmanager
def _watched(network: nn.Module, found: dict[str, Moments]) -> Iterator[None]:
    """Inside the block, add each layer's input to its moments."""
    layers = dict(network.named_modules())

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def see(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            if isinstance(layer, ContinualNorm):  # its running statistics are those of the group norm's output
                x = F.group_norm(x, layer.groups, eps=layer.eps)
            found[name].add(x)

        return layers[name].register_forward_pre_hook(see)

    handles = [watch(name) for name in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(name: str, layer: nn.Module, tasks: Sequence[Moments]) -> LayerDrift:
    running_mean, running_var = layer.get_buffer("running_mean").double(), layer.get_buffer("running_var").double()
    means = torch.stack([moments.mean for moments in tasks])
    mean = means.mean(0)
    var = torch.stack([moments.second for moments in tasks]).mean(0) - mean.square()
    std = var.clamp_min(torch.finfo(var.dtype).eps).sqrt()
    newest = 1.0
    if len(tasks) > 1:
        past = means[:-1].mean(0)
        towards, moved = (means[-1] - past) / std, (running_mean - past) / std
        newest = float((towards * moved).sum() / towards.square().sum())
    off = ((running_mean - mean).abs() / std).mean()
    wide = (running_var.sqrt() / std - 1).abs().mean()
    return LayerDrift(name, float(off), float(wide), newest)


_SIDE_BY_SIDE = 2  # with more runs, columns per layer do not fit a terminal
_NOTES = (
    "mean off, std off: running statistics against those of all tasks weighted equally, mean over channels.",
    "newest task: its weight in the running mean; the past tasks share the rest.",
)


def drift_table(labels: Sequence[str], drifts: Sequence[Sequence[LayerDrift]]) -> Table:
    """One row per layer with three columns per run. For more than two runs, one row per run with the mean over its layers."""
    names = ("mean off, sd", "std off, %", "newest task, %")
    averages = [
        LayerDrift("all layers", *(fmean(getattr(d, key) for d in layers) for key in ("mean", "std", "newest")))
        for layers in drifts
    ]
    if len(drifts) > _SIDE_BY_SIDE:
        rows = [(label, *_cells(average)) for label, average in zip(labels, averages, strict=True)]
        return Table(
            ("run", *names), tuple(rows), (*_NOTES, "Means over layers; one or two runs are shown layer by layer.")
        )
    layers = [*zip(*drifts, strict=True), averages]
    header = ("layer", *(cell for label in labels for cell in (f"{label}: {names[0]}", *names[1:])))
    return Table(header, tuple((same[0].layer, *(cell for d in same for cell in _cells(d))) for same in layers), _NOTES)


def _cells(drift: LayerDrift) -> tuple[str, str, str]:
    return f"{drift.mean:.3f}", f"{100 * drift.std:.1f}", f"{100 * drift.newest:.1f}"
