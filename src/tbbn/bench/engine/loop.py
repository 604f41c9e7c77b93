"""The training loop, the only one. A run is a generator: it yields after every step it has enqueued.

One seed expands into named streams (class order, weights, batches, augmentation, exemplars), each a pure function of the
task, the phase and the epoch. What a run is at any epoch's end is therefore: the weights, the optimiser's momentum, the best
epoch so far, the memory, the record and its position.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from tbbn.accelerators.native import binding as native
from tbbn.bench import seeds
from tbbn.bench.config import RunConfig
from tbbn.bench.data.augment import augmentation
from tbbn.bench.data.scenario import Task
from tbbn.bench.engine import setup, validate
from tbbn.bench.engine.evaluate import evaluate, task_of_class
from tbbn.bench.engine.events import Diverged, EpochEnded, Event, Position, Stepped, TaskEnded, Waiting
from tbbn.bench.engine.phase import Hyper, settings
from tbbn.bench.engine.record import Record, digest, new_record
from tbbn.bench.engine.step import Captured, Shape, Step, eager, read_totals
from tbbn.bench.engine.task import Drawn, LearningStage, Rows
from tbbn.bench.methods import Phase
from tbbn.bench.models import Network
from tbbn.errors import UserError
from tbbn.nn import is_balanced

Stop = Callable[[], bool]


class Run:
    """A run in progress: ``events`` advances it, and between two events everything it is lies in its attributes."""

    def __init__(self, config: RunConfig) -> None:
        validate.check(config)
        self.config = config
        self.method = setup.method_of(config)
        self.device = setup.device_of(config)
        self.source = setup.load_source(config)
        self.scenario = setup.scenario_of(config, self.source)
        self.memory = setup.memory_of(config)
        validate.check_data(config, self.method, self.memory, self.scenario, self.source)
        self.augment = augmentation(config.batch.augment, crop=config.data.crop or None)
        self.strong = augmentation("strong", crop=config.data.crop or None)
        self.train_data = setup.on_device(config, self.source, self.scenario, "train", self.device)
        self.test_data = setup.on_device(config, self.source, self.scenario, "test", self.device)
        self.network = self.make_network()
        self.previous: Network | None = None
        self.record = new_record(config)
        self.record.environment["device"] = self.device.type
        if self.device.type == "cpu" and is_balanced(self.network):  # its last bits depend on it
            self.record.environment["cpu_kernel"] = native.status()
        self.record.class_order = list(self.scenario.class_order)
        self.record.task_sizes = list(self.scenario.task_sizes)
        self.record.skipped = list(self.source.skipped)
        self.position = Position()
        self.optimizer: torch.optim.Optimizer | None = None
        self.rows: Rows | None = None  # of the phase being trained
        self.best: tuple[float, dict[str, Tensor]] | None = None  # loss and weights of the phase's best epoch
        self.steps: dict[Shape, Step | Captured] = {}  # of the phase being trained
        # What a loaded checkpoint leaves to the phase it was saved in.
        self.momentum: dict[str, Tensor] = {}
        self.totals: dict[Shape, tuple[list[str], Tensor, int, int]] = {}

    def make_network(self) -> Network:
        return setup.make_network(self.config, self.method, self.source, self.device)

    def events(self, stop: Stop | None = None) -> Iterator[Event]:
        """Do all that is left to do. The record's status says how it ended: finished, diverged or interrupted.

        ``stop`` is asked after each event; once it says yes, the run ends as "interrupted".
        """
        self.record.status, self.record.message = "interrupted", ""  # status on disk if the process is killed
        try:
            for event in self._work():
                stopping = stop is not None and stop() and not isinstance(event, Waiting)
                yield event
                if stopping:
                    return
        except Diverged as error:
            self.record.status, self.record.message = "diverged", str(error)
        else:
            self.record.status = "finished"

    def _work(self) -> Iterator[Event]:
        with settings(self.config, self.device):
            while self.position.task < len(self.scenario.tasks):
                yield from self._learn(self.scenario.tasks[self.position.task])

    def _stage(self, task: Task) -> LearningStage:
        batch = self.config.batch
        return LearningStage(
            number=task.number,
            task=task,
            network=self.network,
            previous=self.previous,
            memory=self.memory,
            scenario=self.scenario,
            method=self.method,
            data=self.train_data,
            augment=self.augment,
            strong=self.strong,
            seed=self.config.seed,
            batch_size=batch.size,
            ratio=setup.ratio_of(self.config),
            length=batch.length,
            last=batch.last,
            from_union=batch.current_from == "union",
            online=self.config.data.online,
            past_only=batch.memory_from == "past",
            evaluation_size=batch.evaluation,
            precision=self.config.precision,
        )

    def _learn(self, task: Task) -> Iterator[Event]:
        started = time.perf_counter()
        stage = self._stage(task)
        if self.position == Position(task.number):
            self.network.grow(len(task.classes), seeds.generator(self.config.seed, "head", task.number))
            self.method.before_task(stage)
        phases = self.method.phases(stage)
        if self.config.data.online and self.position != Position(task.number):
            stage.draw(stage.phase_rows("replay"), phases[0].name, 0)  # what the stream leaves in the reservoir
        while self.position.phase < len(phases):
            yield from self._train(stage, phases[self.position.phase])
            self.position = Position(task.number, self.position.phase + 1)
        self.method.after_training(stage)
        if self.method.uses_memory:
            self.memory = stage.memory = stage.updated_memory()
        self.method.after_task(stage)
        evaluate(self.record, task, self.config, self.scenario, self.method, self.network, self.test_data)
        self.record.splits.append(setup.full_batch(self.config, self.method, task.number)[2])
        self.record.exemplars.append(len(self.memory))
        self.record.weights.append(digest(self.network.state_dict()))
        self.record.seconds += time.perf_counter() - started
        self.previous = self.network.teacher() if self.method.needs_previous else None
        self.position = Position(task.number + 1)
        yield TaskEnded(task.number, self.record.accuracy[-1], len(self.memory))

    def _train(self, stage: LearningStage, phase: Phase) -> Iterator[Event]:
        hyper = Hyper.of(self.config, phase)
        trained = self.method.parameters(self.network, phase.trainable)
        chosen = {id(p) for p in trained}
        for parameter in self.network.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        if (self.position.epoch, self.position.step) == (0, 0):
            self.rows, self.best = stage.phase_rows(phase.rows), None
        assert self.rows is not None
        self.optimizer = self._optimizer(trained, hyper)
        self.steps = {}
        drawn = stage.draw(self.rows, phase.name, self.position.epoch) if self.position.epoch < hyper.epochs else []
        while self.position.epoch < hyper.epochs:
            epoch = self.position.epoch
            _set_lr(self.optimizer, hyper.lr_at(epoch))
            self.network.train(phase.network_mode == "train")
            yield from self._epoch(stage, phase, hyper, drawn, trained)
            # All that is asked of this epoch and drawn for the next is enqueued before anybody waits.
            sound = _finite(trained)
            loss = stage.validation_loss() if hyper.keep == "best" else None
            if epoch + 1 < hyper.epochs:
                drawn = stage.draw(self.rows, phase.name, epoch + 1)
            if self.device.type == "cuda":
                marker = torch.cuda.Event()
                marker.record()
                yield Waiting(marker.query)
            losses = read_totals(self.steps.values())
            if not all(math.isfinite(v) for v in losses.values()) or not sound.item():
                raise Diverged(self._divergence(stage, phase, epoch, losses))
            validation = None if loss is None else loss.item()
            if validation is not None and (self.best is None or validation < self.best[0]):
                self.best = validation, {k: v.clone() for k, v in self.network.state_dict().items()}
            self.record.history.append(
                {"task": stage.number, "phase": phase.name, "epoch": epoch, "lr": hyper.lr_at(epoch), **losses}
                | ({} if validation is None else {"validation": validation})
            )
            ended, self.position = self.position, replace(self.position, epoch=epoch + 1, step=0)
            yield EpochEnded(ended, phase.name, hyper.epochs, losses, validation)
        if self.best is not None:
            self.network.load_state_dict(self.best[1])
        self.network.eval()
        self.optimizer, self.rows, self.best, self.steps = None, None, None, {}

    def _optimizer(self, trained: list[torch.nn.Parameter], hyper: Hyper) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(
            trained,
            lr=torch.tensor(hyper.lr, device=self.device) if self.device.type == "cuda" else hyper.lr,
            momentum=hyper.momentum,
            weight_decay=hyper.weight_decay,
            nesterov=self.config.train.nesterov and hyper.momentum > 0,
            fused=True,
        )
        for i, momentum in self.momentum.items():
            # In the parameter's own memory format: a fused step walks both as they lie.
            parameter = trained[int(i)]
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum).detach()
        self.momentum = {}
        return optimizer

    def _divergence(self, stage: LearningStage, phase: Phase, epoch: int, losses: dict[str, float]) -> str:
        bad = [int(step.sound) + 1 for step in map(eager, self.steps.values()) if not step.totals.isfinite().all()]
        at = f"step {min(bad)} of its kind of batch" if bad else "a step"
        norms = [(n, p.grad.norm().item()) for n, p in self.network.named_parameters() if p.grad is not None]
        largest = max(norms, key=lambda entry: entry[1] if math.isfinite(entry[1]) else math.inf, default=("none", 0.0))
        return (
            f"the loss or a weight is not finite in task {stage.number + 1}, phase {phase.name!r}, epoch {epoch + 1}, "
            f"since {at}; loss {losses}; largest gradient in {largest[0]} ({largest[1]:.3g})"
        )

    def _epoch(
        self,
        stage: LearningStage,
        phase: Phase,
        hyper: Hyper,
        drawn: list[Drawn],
        trained: list[torch.nn.Parameter],
    ) -> Iterator[Event]:
        done, total = 0, sum(block.steps for block in drawn)
        batches = (rows for block in drawn for rows in block.index.cpu())
        prefetch = self.train_data.prefetch(islice(batches, self.position.step, None))
        for block in drawn:
            if block.shape not in self.steps:
                self.steps[block.shape] = self._make_step(stage, phase, block, trained)
            step = self.steps[block.shape]
            for i in range(block.steps):
                done += 1
                if done <= self.position.step:
                    continue  # trained before the run was interrupted
                if not prefetch.ready():
                    yield Waiting(prefetch.ready)
                try:
                    step(block.index[i], [*(p[i] for p in block.parameters), *next(prefetch)])
                except ValueError as error:
                    if "more than 1 value per channel" not in str(error):
                        raise
                    raise UserError(
                        f"task {stage.number + 1}, phase {phase.name!r}: a batch of one image has no variance to normalise "
                        f"by where maps are 1x1; use another batch.size than {self.config.batch.size}, or batch.last = 'drop'."
                    ) from error
                self.position = replace(self.position, step=done)
                yield Stepped(self.position, phase.name, hyper.epochs, done, total)

    def _make_step(
        self, stage: LearningStage, phase: Phase, block: Drawn, trained: list[torch.nn.Parameter]
    ) -> Step | Captured:
        assert self.optimizer is not None
        by_task = self.config.norm.name == "adab2n" and self.device.type == "cpu"
        step = Step(
            data=self.train_data,
            augment=self.augment,
            strong=self.strong,
            network=self.network,
            previous=self.previous if phase.uses_previous else None,
            loss=getattr(self.method, phase.loss),
            optimizer=self.optimizer,
            parameters=trained,
            shape=block.shape,
            clip_norm=self.config.train.clip_norm,
            clip_value=self.config.train.clip_value,
            separate=self.config.batch.forward == "separate",
            precision=self.config.precision,
            told=self.config.norm.name != "bn",
            class_task=task_of_class(self.scenario).to(self.device) if by_task else None,
        )
        if block.shape in self.totals:
            step.names, step.totals, step.count, sound = self.totals.pop(block.shape)
            step.sound.fill_(sound)
        # Short blocks would be captured for a step or two an epoch: not worth a graph.
        return Captured(step) if self.device.type == "cuda" and block.steps >= 8 else step


def run(
    config: RunConfig,
    *,
    on_event: Callable[[Event], None] | None = None,
    drive: Callable[[Run], Iterator[Event]] = Run.events,
) -> Record:
    """Train and evaluate one config, in memory. ``drive`` may do more around the run's events, such as saving."""
    device = setup.device_of(config)
    # Streams and graphs are made on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        job = Run(config)
        for event in drive(job):
            if on_event is not None:
                on_event(event)
    return job.record


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads it
        else:
            group["lr"] = lr


def _finite(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Whether every weight is, as a value still to be computed; a sum of absolute values passes on what is not."""
    with torch.no_grad():
        return torch.stack(torch._foreach_norm(tuple(parameters), 1)).isfinite().all()
