"""The paper's toy figure: how batch norm, continual norm and TBBN estimate the statistics of four tasks.

The four tasks are four 2-d Gaussians, repeated to 20 channels. Training batches are those of replay in task 4: 48 rows of task 4
and 16 rows of tasks 1 to 3. The test set, and the population that a norm should describe, contain every task in equal parts.
Nothing is learnt here: the layers only see batches and update their running statistics. The paper does not give the Gaussians,
the batch size or the groups; these are our choice. Batch norm's statistics are those of the batch, 3/4 task 4; TBBN's give task 4
the weight that r* = 8 allows, 0.27.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import tbbn
from tbbn.bench.report.figures import new_figure
from tbbn.bench.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANS = torch.tensor([[-4.0, -2.0], [0.0, 3.0], [4.0, -2.0], [9.0, 7.0]])  # of tasks 1 to 4
SPREADS = torch.tensor([[1.0, 0.6], [0.8, 1.0], [0.7, 0.9], [1.6, 1.8]])
COPIES = 10  # repeats of the two dimensions: 20 channels
CURRENT, MEMORY = 48, 16
GROUPS = 4  # of continual norm
STEPS, TEST_ROWS = 400, 200  # test rows per task


@dataclass(frozen=True)
class Outcome:
    """A norm after training: its test output, and how far its statistics are from the balanced population's."""

    name: str
    output: Tensor  # (4, n, 2): the first two channels of each task's test rows
    mean_error: float  # mean over channels, in standard deviations of the population
    std_error: float  # mean over channels of |std / population's std - 1|


def draw(tasks: Tensor, generator: torch.Generator) -> Tensor:
    """Rows (n, 20) of these tasks (n,)."""
    noise = torch.randn(len(tasks), COPIES, 2, generator=generator, dtype=torch.float64)
    return (MEANS[tasks].unsqueeze(1) + SPREADS[tasks].unsqueeze(1) * noise).flatten(1)


def population() -> tuple[Tensor, Tensor]:
    """Mean and variance (20,) of the mixture of all tasks in equal parts."""
    mean = MEANS.double().mean(0)
    var = SPREADS.double().square().mean(0) + (MEANS - mean).square().mean(0)
    return mean.repeat(COPIES), var.repeat(COPIES)


def toy() -> list[Outcome]:
    """Run batch norm, continual norm and TBBN on the toy data; takes a second on a CPU."""
    generator = torch.Generator().manual_seed(0)
    channels = 2 * COPIES
    norms = {
        "batch norm": nn.BatchNorm1d(channels),
        "continual norm": tbbn.ContinualNorm(channels, groups=GROUPS),
        "TBBN": tbbn.TaskBalancedBatchNorm1d(channels),
    }
    layers = nn.ModuleDict(norms).double().train()
    current = torch.full((CURRENT,), 3)
    means: dict[str, list[Tensor]] = {name: [] for name in norms}
    variances: dict[str, list[Tensor]] = {name: [] for name in norms}
    for step in range(STEPS):
        batch = draw(torch.cat([current, torch.randint(3, (MEMORY,), generator=generator)]), generator)
        with tbbn.balance(layers, current=CURRENT, memory=MEMORY, past_tasks=3), torch.no_grad():
            for name, layer in norms.items():
                layer(batch)
                if step >= STEPS // 2:
                    means[name].append(layer.get_buffer("running_mean").clone())
                    variances[name].append(layer.get_buffer("running_var").clone())
    layers.eval()
    test = torch.arange(4).repeat_interleave(TEST_ROWS)
    rows = draw(test, generator)
    outcomes = []
    for name, layer in norms.items():
        # Averaged over the second half of the training: with momentum 0.1 a running statistic is noisy.
        layer.running_mean, layer.running_var = torch.stack(means[name]).mean(0), torch.stack(variances[name]).mean(0)
        wanted_mean, wanted_var = population()
        if name == "continual norm":  # its batch norm sees the output of a group norm: compare with that population
            many = nn.functional.group_norm(draw(torch.arange(4).repeat_interleave(20_000), generator), GROUPS)
            wanted_mean, wanted_var = many.mean(0), many.var(0, unbiased=False)
        off = (layer.running_mean - wanted_mean).abs() / wanted_var.sqrt()
        wide = (layer.running_var / wanted_var).sqrt() - 1
        output = layer(rows).detach()[:, :2].unflatten(0, (4, -1))
        outcomes.append(Outcome(name, output, float(off.mean()), float(wide.abs().mean())))
    return outcomes


def figure(outcomes: list[Outcome]) -> Figure:
    """The test rows as each norm outputs them, one panel per norm; the cross marks their mean."""
    picture = new_figure(3.2 * len(outcomes), 3.4)
    for axes, outcome in zip(
        picture.subplots(1, len(outcomes), sharex=True, sharey=True, squeeze=False)[0], outcomes, strict=True
    ):
        for task, rows in enumerate(outcome.output):
            axes.scatter(rows[:, 0], rows[:, 1], s=6, alpha=0.6, label=f"task {task + 1}")
        axes.axhline(0, color="grey", linewidth=0.6, zorder=0)
        axes.axvline(0, color="grey", linewidth=0.6, zorder=0)
        centre = outcome.output.flatten(0, 1).mean(0)
        axes.plot(*centre, marker="x", color="black", markersize=9)
        axes.set_title(f"{outcome.name}\nmean off by {outcome.mean_error:.2f} sd", fontsize=10)
    axes.legend(fontsize=7, loc="upper left")
    return picture


def table(outcomes: list[Outcome]) -> Table:
    rows = tuple((o.name, f"{o.mean_error:.2f}", f"{100 * o.std_error:.1f}") for o in outcomes)
    header = ("statistics at test time", "mean off, sd", "std off, %")
    return Table(
        header, rows, caption="Toy data: error of the statistics relative to those of the four tasks weighted equally."
    )
