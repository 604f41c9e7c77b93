"""One training step as a function of device tensors: rows and augmentation parameters in, updated weights out.

All random numbers are drawn before the epoch, all inputs of the step are on the device, and it has no host sync. So a step can
run eagerly, or be captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tbbn.accelerators.graphs import CapturedFunction
from tbbn.bench.data.batches import BatchMaker, BatchSpec
from tbbn.bench.data.types import Batch
from tbbn.bench.engine.forward import TrainingForward, WorkingCopies, autocast
from tbbn.bench.engine.ranks import Ranks
from tbbn.bench.methods import Losses
from tbbn.bench.models import Network, Output
from tbbn.bench.models.base import no_stages
from tbbn.errors import UserError
from tbbn.nn.adab2n import penalties

# Reserved names: the other keys of an epoch's entry in the history, and the engine's own terms.
_TAKEN = ("task", "phase", "epoch", "lr", "validation", "norm", "total")

_UNDECLARED = no_stages("loss uses stages, which needs the line needs_stages = True in the class.")
_OF_AN_OUTPUT = (*Output.__dataclass_fields__, "heads")

LossFunction = Callable[[Batch, Output, Output | None], Losses]


@dataclass(frozen=True, eq=False)
class SavedTotals:
    """The loss sums of an unfinished epoch, from a checkpoint; the fields are those of :class:`Step`."""

    names: list[str]
    totals: Tensor
    count: int
    finite_steps: int


@dataclass(eq=False)
class Step:
    """Trains on batches of one spec. ``totals`` sums the loss terms, in the order of ``names``, until they are read."""

    maker: BatchMaker
    network: Network
    previous: Network | None
    loss: LossFunction
    penalty: Callable[[Network], Losses]
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    spec: BatchSpec
    forward: TrainingForward
    clip_norm: float  # 0: no limit
    clip_value: float  # 0: no limit
    precision: str
    captured: bool  # capture the step as a CUDA graph
    ranks: Ranks
    needs_stages: bool  # whether the loss uses the maps of the stages
    place: Callable[[Any], str]  # of one of the method's functions, for errors

    def __post_init__(self) -> None:
        device = self.maker.data.labels.device
        self.names: list[str] = []
        self.count = 0  # steps since the totals were read
        self.totals = torch.zeros(0, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)  # steps before the first non-finite loss
        self.share = self.ranks.share(self.spec.layout, device)
        self.has_penalty = self.forward.takes_layout and self.spec.has_layout
        half = self.precision == "bf16" and device.type == "cuda"
        self.working = WorkingCopies(self.network) if half else None
        # The previous network is not trained, so its copies are made once.
        self.teacher = WorkingCopies(self.previous) if half and self.previous is not None else self.previous
        self.graph = CapturedFunction(self.train) if self.captured else None

    def restore_totals(self, saved: SavedTotals) -> None:
        self.names, self.totals, self.count = saved.names, saved.totals, saved.count
        self.finite_steps.fill_(saved.finite_steps)

    def __call__(self, index: Tensor, inputs: list[Tensor]) -> None:
        """Train on one batch, given its rows and the inputs that :meth:`BatchMaker.make_batch` takes with them."""
        self.count += 1
        (self.train if self.graph is None else self.graph)(index, *inputs)

    def train(self, index: Tensor, *inputs: Tensor) -> None:
        terms = self.losses(self.maker.make_batch(self.spec, index, inputs, self.share.rows))
        names = [*terms, "total"]
        if names != self.names:
            self.names, self.totals = names, torch.zeros(len(names), device=self.totals.device)
        total = reduce(torch.add, terms.values())
        self.optimizer.zero_grad()
        total.backward()
        if self.working is not None:
            self.working.copy_gradients_back()
        self.ranks.sum_gradients(self.parameters)
        if self.clip_value:
            nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.totals += torch.stack([*terms.values(), total]).detach()
        # Once the sum of losses is non-finite it stays so. x - x == 0 tests this with two launches; isfinite takes four.
        sum_of_losses = self.totals[-1]
        self.finite_steps += sum_of_losses - sum_of_losses == 0

    def losses(self, batch: Batch) -> Losses:
        """The loss terms of a batch, with their autograd graph."""
        with autocast(self.precision, batch.images.device):
            previous = None
            if self.teacher is not None:
                with torch.no_grad():
                    previous = self._whole(self.teacher(batch.images))
            output = self._whole(self._output(self.share.of(batch)))
            random_state = torch.default_generator.get_state() if self.count == 1 else None
            try:
                made = self.loss(batch, output, previous)
            except AttributeError as error:
                if previous is not None or error.obj is not None or error.name not in _OF_AN_OUTPUT:
                    raise
                raise UserError(
                    f"{self.place(error)}: reads {error.name} of previous, which is None in the first task"
                    f"{'' if self.spec.past_tasks == 0 else ' and in this phase'}; read it under: if previous is not None."
                ) from error
            if random_state is not None and not torch.equal(random_state, torch.default_generator.get_state()):
                raise UserError(
                    f"{self._named(self.loss)} draws random numbers, so the run could not be repeated or resumed with the same "
                    "results; the rows of a batch are already in random order."
                )
            terms = self._checked(self.loss, made)
            of_norms = penalties(self.network) if self.has_penalty else []
            extra = torch.stack(of_norms).sum() if of_norms else None
        if not any(term.requires_grad for term in terms.values()):
            named = self._named(self.loss)
            raise UserError(f"{named} has no term with a gradient, so there is nothing to train; got {terms!r:.60}.")
        own = self._checked(self.penalty, self.penalty(self.network))
        if twice := terms.keys() & own.keys():
            raise UserError(
                f"{self.place(self.penalty)}: loss and penalty both have a term {min(twice)!r}; rename one."
            )
        own = {name: self.ranks.once(term) for name, term in own.items()}
        return {**terms, **own} if extra is None else {**terms, **own, "norm": extra}

    def _output(self, batch: Batch) -> Output:
        call: Callable[[Tensor], Output] = self.network
        if self.working is not None:
            self.working.refresh()
            call = self.working
        forward = self.forward if self.spec.has_layout else self.forward.mixed
        return forward(self.network, batch, call, self.share.counts)

    def _whole(self, output: Output) -> Output:
        """The output on the batches of all ranks, as the loss sees it."""
        output = self.share.whole(output, stages=self.needs_stages)
        # A single process has the stages anyway, but a loss that several ranks would refuse is refused there, too.
        return output if self.needs_stages else replace(output, stages=_UNDECLARED)

    def _checked(self, function: Callable[..., Losses], terms: object) -> Losses:
        """What a function of the method returned, if it is what it should be."""
        if not isinstance(terms, dict) or not all(isinstance(t, Tensor) and t.dim() == 0 for t in terms.values()):
            raise UserError(
                f"{self._named(function)} must return a dict of scalar tensors, such as {{'ce': ...}}, got {terms!r:.60}."
            )
        if any(not isinstance(name, str) or name in _TAKEN for name in terms):
            raise UserError(
                f"{self._named(function)} must name its terms with other texts than {', '.join(_TAKEN)}, which the history has "
                f"already; got {', '.join(map(repr, terms))}."
            )
        return terms

    def _named(self, function: Callable[..., Losses]) -> str:
        return f"{self.place(function)}: {getattr(function, '__name__', 'loss')}"  # a partial has no name


def read_totals(steps: Iterable[Step]) -> dict[str, float]:
    """The mean of each loss term over the steps since the last reading. A host sync; resets finite totals."""
    sums: dict[str, float] = {}
    count = 0
    for step in steps:
        values = step.totals.tolist()
        for name, value in zip(step.names, values, strict=True):
            sums[name] = sums.get(name, 0.0) + value
        count += step.count
        if all(map(math.isfinite, values)):
            step.totals.zero_()
            step.finite_steps.zero_()
            step.count = 0
    return {name: value / max(count, 1) for name, value in sums.items()}


def describe_divergence(network: Network, steps: Iterable[Step], losses: dict[str, float]) -> str:
    """A description: the step since which the loss is not finite, its terms, and the largest gradient."""
    failed = [(int(step.finite_steps) + 1, step) for step in steps if not step.totals.isfinite().all()]
    bad = [first for first, _ in failed]
    since = f"step {min(bad)} of its batch layout" if bad else "a step"
    norms = {name: p.grad.norm().item() for name, p in network.named_parameters() if p.grad is not None}
    largest = max(norms, key=lambda name: norms[name] if math.isfinite(norms[name]) else math.inf, default="none")
    found = f"since {since}; loss {losses}; largest gradient in {largest} ({norms.get(largest, 0.0):.3g})"
    # With weights that are still finite, the likely cause is a mean over no rows, which is nan.
    empty = [step for first, step in failed if first == 1 and not step.spec.n_memory and step.totals.isnan().any()]
    if empty:
        where = "here" if empty[0].spec.past_tasks else "in the first task"
        found += f"; if the loss takes a mean over batch.memory: it is empty {where}, and a mean over no rows is nan"
    return found
