"""The paper's oracle experiment: how much fine-tuning would gain if its batch norms had seen the data of all tasks.

It compares four procedures after the last task. *joint* trains on all data; *ft* is fine-tuning; *update mu, sigma* recomputes
the running statistics of the fine-tuned network from all training data; *update mu, sigma, gamma, beta* also trains the affine
parameters of its norms on that data, with everything else frozen. The paper gives neither the epochs nor the learning rate of the
last one; here they are those of the run. New statistics are cumulative averages over one epoch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from tbbn.bench.analysis.loading import run_after
from tbbn.bench.config import MethodChoice, RunConfig
from tbbn.bench.data.types import Batch
from tbbn.bench.engine.evaluate import evaluate
from tbbn.bench.engine.forward import autocast
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.phase import PhaseSettings, make_optimizer, set_lr
from tbbn.bench.engine.task import EngineTaskContext
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.files import write_atomic
from tbbn.bench.methods import Phase
from tbbn.bench.models import Output
from tbbn.bench.report.figures import COLOURS, new_figure, wrapped
from tbbn.bench.report.groups import stamp, without_seed
from tbbn.bench.report.tables import Table, percent
from tbbn.bench.runs.record import load_record
from tbbn.errors import UserError
from tbbn.nn.private import AnyBatchNorm
from tbbn.paper.published import PaperTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROCEDURES = ("joint", "ft", "update mu, sigma", "update mu, sigma, gamma, beta")
DATA = {"cifar100": "CIFAR-100, ResNet-32", "imagenet100": "ImageNet-100, ResNet-18"}  # the paper uses ImageNet-100
Watch = Callable[[str], None]
Accuracies = dict[str, list[float]]  # by procedure: the accuracy on each task after the last task


def oracle_table(data: str | None) -> PaperTable:
    """The runs that the experiment needs, as a table without printed numbers: the paper shows a bar chart."""
    name = data or next(iter(DATA))
    if name not in DATA:
        raise UserError(f"fig-oracle: there are recipes for {' and '.join(DATA)}, not for {name!r}.")
    return PaperTable("oracle", name, f"Oracle experiment: batch norm, {DATA[name]}, 10 tasks", (), {})


def title(folder: Path) -> str:
    """The title of the experiment, from one of its runs."""
    return title_of(load_record(folder).run_config)


def title_of(config: RunConfig) -> str:
    return f"{stamp([config])}Oracle experiment: {config.norm}, {config.data.name}, {config.backbone}, {config.data.tasks} tasks"


def pairs(folders: Iterable[Path]) -> dict[int, tuple[Path, Path]]:
    """The folders of fine-tuning and joint training, by seed. Their settings differ only in the method."""
    found: dict[RunConfig, dict[tuple[str, int], Path]] = {}
    for folder in folders:
        record = load_record(folder)
        if record.status == "finished":
            config = record.run_config
            alike = replace(without_seed(config), method=MethodChoice(""))
            alike = replace(alike, data=replace(alike.data, class_order_seed=config.data.class_order_seed))
            runs = found.setdefault(alike, {})
            runs.setdefault((str(config.method), config.seed), folder)
    both = []
    for runs in found.values():
        seeds = sorted(seed for method, seed in runs if method == "ft" and ("joint", seed) in runs)
        both.append({seed: (runs["ft", seed], runs["joint", seed]) for seed in seeds})
    both = [paired for paired in both if paired]
    if not both:
        raise UserError("fig-oracle: needs a finished run of ft and one of joint with the same settings and seed.")
    if len(both) > 1:
        first, second = (next(iter(paired.values()))[0] for paired in both[:2])
        raise UserError(f"fig-oracle: draws one experiment, but {first} and {second} differ in more than their seed.")
    return both[0]


def outcome(
    fine_tuned: Path, joint: Path, out: Path, watch: Watch = lambda where: None, root: str | None = None
) -> Accuracies:
    """The result of :func:`oracle`, cached under ``out`` for each pair of networks."""
    networks = [load_record(folder).weights[-1] for folder in (fine_tuned, joint)]
    path = out / "fig-oracle" / f"{networks[0][:16]}-{networks[1][:16]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # missing or damaged: compute it again
        found = json.loads(path.read_text())
        if found["networks"] == networks and set(found["accuracy"]) == set(PROCEDURES):
            return dict(found["accuracy"])
    accuracy = oracle(fine_tuned, joint, watch, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"networks": networks, "accuracy": accuracy}).encode())
    return accuracy


def oracle(fine_tuned: Path, joint: Path, watch: Watch = lambda where: None, root: str | None = None) -> Accuracies:
    """The accuracies of the four procedures. Both folders hold a finished run with its last network.

    ``watch`` is called before the new statistics and before every epoch with a description; it may raise to end the experiment.
    ``root`` is the folder of the data sets, if they have moved since the runs.
    """
    watch("new statistics from all training data")
    run = run_after(joint, root=root)
    task = run.scenario.tasks[-1]
    found = {"joint": run.record.accuracy[-1], "ft": load_record(fine_tuned).accuracy[-1]}
    context = run.context(task)  # joint training draws its batches from all data
    with torch_settings(run.config, run.device):
        run.network.load_state_dict(run_after(fine_tuned, root=root).network.state_dict())
        refresh_statistics(context)
        found["update mu, sigma"] = _accuracy(run)
        retrain_affine(context, PhaseSettings.of(run.config, Phase(), task.number), watch)
        refresh_statistics(context)
        found["update mu, sigma, gamma, beta"] = _accuracy(run)
    return found


def norms_of(network: nn.Module) -> list[AnyBatchNorm]:
    return [layer for layer in network.modules() if isinstance(layer, AnyBatchNorm)]


@torch.no_grad()
def refresh_statistics(context: EngineTaskContext) -> None:
    """Replace the network's running statistics with averages over one epoch of all data."""
    layers = norms_of(context.network)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # cumulative average
    context.network.train()
    for batch in context.batches("oracle statistics"):
        _forward(context, batch)
    context.network.eval()
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def retrain_affine(context: EngineTaskContext, settings: PhaseSettings, watch: Watch = lambda where: None) -> None:
    """Train the affine parameters of the norms on all data, with every other parameter frozen."""
    network = context.network
    affine = [parameter for layer in norms_of(network) for parameter in (layer.weight, layer.bias)]
    network.requires_grad_(False)
    for parameter in affine:
        parameter.requires_grad_(True)
    optimizer = make_optimizer(affine, settings, {})
    network.train()
    for epoch in range(settings.epochs):
        watch(f"new affine parameters from all training data, epoch {epoch + 1}/{settings.epochs}")
        set_lr(optimizer, settings.lr_at(epoch))
        for batch in context.batches(f"oracle epoch {epoch}"):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(_forward(context, batch).logits.float(), batch.labels).backward()
            optimizer.step()
    network.eval()


def _forward(context: EngineTaskContext, batch: Batch) -> Output:
    with autocast(context.config.precision, batch.images.device):
        return context.forward(context.network, batch)


def _accuracy(run: Run) -> list[float]:
    task = run.scenario.tasks[-1]
    return evaluate(task, run.config, run.scenario, run.method, run.network, run.test_data).accuracy


def accuracy_table(seeds: Sequence[Accuracies], title: str) -> Table:
    """One row per procedure: the accuracy on every task after the last one, and the mean."""
    tasks = range(len(seeds[0]["ft"]))
    rows = []
    for name in PROCEDURES:
        cells = [percent([seed[name][task] for seed in seeds]) for task in tasks]
        rows.append((name, *cells, percent([statistics.fmean(seed[name]) for seed in seeds])))
    header = ("procedure", *(f"task {task + 1} %" for task in tasks), "mean %")
    notes = (
        f"Accuracy on each task after the last one, mean ± standard deviation over seeds; seeds: {len(seeds)}.",
        "update ...: the network of ft with statistics, or statistics and affine parameters, from all training data.",
    )
    return Table(header, tuple(rows), notes, caption=title)


def figure(seeds: Sequence[Accuracies], title: str) -> Figure:
    """Bar chart of the accuracy on every task after the last one, and the mean; one bar per procedure."""
    picture = new_figure(9.0, 3.6)
    axes = picture.subplots()
    tasks = len(seeds[0]["ft"])
    width = 0.8 / len(PROCEDURES)
    for i, name in enumerate(PROCEDURES):
        means = [statistics.fmean(values) for values in zip(*(seed[name] for seed in seeds), strict=True)]
        heights = [100 * value for value in (*means, statistics.fmean(means))]
        places = [number + (i - (len(PROCEDURES) - 1) / 2) * width for number in range(tasks + 1)]
        axes.bar(places, heights, width, label=name, color=COLOURS[i])
    axes.set_xticks(range(tasks + 1), [*(f"task {task + 1}" for task in range(tasks)), "mean"])
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("accuracy after the last task (%)")
    axes.set_title(wrapped(title, 90), fontsize=10)
    axes.grid(alpha=0.3, axis="y")
    picture.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return picture
