"""The training loop; there is only this one.

A run learns its tasks one after the other. A task has one or more phases, stages of training with their own rows, epochs,
learning rate and loss::

    for task in tasks:
        grow the head; method.before_task
        for phase in method.phases:
            for epoch in epochs:
                draw the epoch; train one step per batch; read the losses
        method.after_training; choose exemplars; method.after_task
        evaluate every task so far

The values it passes around:

    Position        the next step to train: task, phase, epoch and step, all from 0
    TaskContext     the task being learnt, with its rows, memory, network and previous network; methods get it too
    PhaseRows       the training rows of a phase, chosen when it begins
    EpochBlock      consecutive batches of an epoch with the same spec, drawn in advance: rows and augmentation parameters
    BatchSpec       the numbers of current and memory rows of a batch; full and short batches have different specs
    Step            trains on a batch of one spec; on a GPU it is captured once as a CUDA graph and replayed

A run is a generator: it yields an event after every step that it enqueued, and whenever it is about to wait for the device.
Between events the caller may show progress, save, stop, or advance another run on the same device.

Every random choice is a function of the seed, the task, the phase and the epoch. So the state of a run consists of its position,
the weights, the optimiser's state, the best epoch so far, the memory and the record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tbbn.bench import seeds
from tbbn.bench.config import RunConfig
from tbbn.bench.data.batches import BatchSpec, EpochBlock
from tbbn.bench.data.scenario import Task
from tbbn.bench.engine import setup, validate
from tbbn.bench.engine.evaluate import evaluate
from tbbn.bench.engine.events import Diverged, EpochEnded, Event, Loading, Position, Stepped, TaskEnded, Waiting
from tbbn.bench.engine.phase import OptimizerState, PhaseSettings, all_finite, make_optimizer, set_lr
from tbbn.bench.engine.ranks import ALONE, Ranks
from tbbn.bench.engine.record import Record, digest
from tbbn.bench.engine.step import SavedTotals, Step, describe_divergence, read_totals
from tbbn.bench.engine.task import EngineTaskContext, PhaseRows
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.methods import Method, Phase
from tbbn.bench.methods.contract import checked_phases
from tbbn.bench.models import Network
from tbbn.bench.models.base import MissingStages
from tbbn.errors import UserError
from tbbn.registry import METHODS

Stop = Callable[[], bool]
LONG_LOADING = 2.0  # seconds of decoding after which events report its progress
MIN_CAPTURED_STEPS = 8  # a block of fewer steps is not worth a CUDA graph


class BestEpoch(NamedTuple):
    """The epoch of a phase with the lowest validation loss so far."""

    loss: float
    weights: dict[str, Tensor]


class Run:
    """A run in progress: ``events`` advances it. Between two events its complete state is in its attributes.

    The constructor loads the data and reports the progress to ``on_event``.
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks = ALONE, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.config, self.ranks = validate.check(config), ranks
        config = self.config
        self.method = setup.method_of(config)
        self.device = setup.device_of(config)
        self.source = setup.load_source(config, on_progress=_tell_loading(on_event))
        self.scenario = setup.scenario_of(config, self.source)
        self.memory = setup.memory_of(config)
        validate.check_data(config, self.method, self.memory, self.scenario, self.source)
        self.train_data = setup.on_device(config, self.source, self.scenario, "train", self.device)
        self.test_data = setup.on_device(config, self.source, self.scenario, "test", self.device)
        self.maker = setup.batch_maker(config, self.train_data)
        self.network = self.make_network()
        # The network after the previous task, frozen. None in the first task, and for methods that do not need it.
        self.previous: Network | None = None
        self.record = setup.record_of(config, self.source, self.scenario, self.network, self.device, self.ranks.size)
        self.position = Position()
        # State of the phase being trained:
        self.rows: PhaseRows | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps: dict[BatchSpec, Step] = {}
        self.best: BestEpoch | None = None  # with train.keep = "best"
        # Read from a checkpoint, and used when the interrupted phase continues:
        self.restored_optimizer: OptimizerState = {}
        self.restored_totals: dict[BatchSpec, SavedTotals] = {}  # loss sums of the interrupted epoch

    def make_network(self) -> Network:
        """A new network on the device."""
        return setup.make_network(self.config, self.method, self.source, self.device, sync=self.ranks.size > 1)

    def events(self, stop: Stop | None = None) -> Iterator[Event]:
        """Do the rest of the run. The record's status says how it ended: finished, diverged or interrupted.

        ``stop`` is called after each event; once it returns True, the run ends as "interrupted".
        """
        self.record.status, self.record.message = "interrupted", ""  # status on disk if the process is killed
        try:
            for event in self._learn_tasks():
                # All ranks have the same events, except that one may wait where another need not.
                stopping = not isinstance(event, Waiting) and self.ranks.any(stop is not None and stop())
                yield event
                if stopping:
                    return
        except MissingStages as error:
            raise UserError(f"{METHODS.place(self.config.method.name, error)}: {error}") from error
        except FrozenInstanceError as error:
            if not _is_raised_by(self.method, error):
                raise
            raise UserError(
                f"{METHODS.place(self.config.method.name, error)}: {error}; a method keeps no state in attributes, which a "
                "resumed run would lack; store a tensor with context.network.remember(name, tensor)."
            ) from error
        except Diverged as error:
            self.record.status, self.record.message = "diverged", str(error)
        else:
            self.record.status = "finished"

    def _learn_tasks(self) -> Iterator[Event]:
        with torch_settings(self.config, self.device):
            while self.position.task < len(self.scenario.tasks):
                yield from self._learn(self.scenario.tasks[self.position.task])

    def _learn(self, task: Task) -> Iterator[Event]:
        started = time.perf_counter()
        context = self.context(task)
        is_resumed = self.position != Position(task.number)
        if not is_resumed:
            self.network.grow(len(task.classes), seeds.generator(self.config.seed, "head", task.number))
            context.hook("before_task")
        phases = checked_phases(self.config.method.name, self.method, context.hook("phases"))
        if is_resumed and self.config.data.online:
            # Draw the pass over the stream again, because the draw decides which rows are stored in the memory.
            context.draw(context.phase_rows("replay"), phases[0].name, 0)
        while self.position.phase < len(phases):
            yield from self._train_phase(context, phases[self.position.phase])
            self.position = Position(task.number, self.position.phase + 1)
        context.hook("after_training")
        if self.method.uses_memory:
            self.memory = context.memory = context.updated_memory()
        context.hook("after_task")
        # Ranks on different hardware may have rounded differently.
        self.ranks.copy_first([*self.network.state_dict().values(), self.memory.index, self.memory.labels])
        result = evaluate(task, self.config, self.scenario, self.method, self.network, self.test_data, self.ranks)
        entries = {
            "accuracy": result.accuracy,
            "task_il": result.task_il,
            "calibrated": result.calibrated,
            "errors": result.errors,
            "splits": setup.full_batch(self.config, self.method, task.number).splits,
            "exemplars": len(self.memory),
            "weights": digest(self.network.state_dict()),
        }
        # A single assignment, so that an exception or a signal leaves the record either with the whole task or without it.
        self.record = self.record.with_task(task.number, entries, result.predictions, time.perf_counter() - started)
        self.previous = self.network.teacher() if self.method.needs_previous else None
        self.position = Position(task.number + 1)
        yield TaskEnded(task.number, self.record.accuracy[-1], len(self.memory))

    def context(self, task: Task) -> EngineTaskContext:
        """The task as a method sees it, with the current network and memory."""
        return EngineTaskContext(
            task=task,
            network=self.network,
            previous=self.previous,
            memory=self.memory,
            config=self.config,
            scenario=self.scenario,
            method=self.method,
            maker=self.maker,
            training_forward=setup.training_forward(self.config, self.network, self.scenario, task, self.device),
            ranks=self.ranks,
        )

    def _train_phase(self, context: EngineTaskContext, phase: Phase) -> Iterator[Event]:
        settings = PhaseSettings.of(self.config, phase, context.number)
        parameters = self._trainable(phase)
        if (self.position.epoch, self.position.step) == (0, 0):
            self.rows, self.best = context.phase_rows(phase.rows), None
        assert self.rows is not None  # chosen above, or restored from the checkpoint
        self.optimizer, self.restored_optimizer = make_optimizer(parameters, settings, self.restored_optimizer), {}
        self.steps = {}
        blocks: list[EpochBlock] = []
        if self.position.epoch < settings.epochs:
            blocks = context.draw(self.rows, phase.name, self.position.epoch)
        while self.position.epoch < settings.epochs:
            epoch, lr = self.position.epoch, settings.lr_at(self.position.epoch)
            set_lr(self.optimizer, lr)
            self.network.train(not phase.eval_mode)
            yield from self._train_epoch(context, phase, settings, blocks, parameters)
            # Before waiting for the device, enqueue all remaining work of this epoch and draw the next one.
            is_finite = all_finite(parameters)
            validation_loss = context.validation_loss() if settings.keep == "best" else None
            if epoch + 1 < settings.epochs:
                blocks = context.draw(self.rows, phase.name, epoch + 1)
            if self.device.type == "cuda":
                marker = torch.cuda.Event()
                marker.record()
                yield Waiting(marker.query)  # advance another lane until the device has reached the marker
            losses = read_totals(self.steps.values())
            if not all(math.isfinite(value) for value in losses.values()) or not is_finite.item():
                where = f"task {context.number + 1}, phase {phase.name!r}, epoch {epoch + 1}"
                details = describe_divergence(self.network, self.steps.values(), losses)
                raise Diverged(f"the loss or a weight is not finite in {where}, {details}")
            validation = None if validation_loss is None else validation_loss.item()
            self._keep_if_best(validation)
            self.record.history.append(
                {"task": context.number, "phase": phase.name, "epoch": epoch, "lr": lr, **losses}
                | ({} if validation is None else {"validation": validation})
            )
            ended, self.position = self.position, replace(self.position, epoch=epoch + 1, step=0)
            yield EpochEnded(ended, phase.name, settings.epochs, losses, validation)
        if self.best is not None:
            self.network.load_state_dict(self.best.weights)
        self.network.eval()
        self.rows, self.optimizer, self.steps, self.best = None, None, {}, None

    def _trainable(self, phase: Phase) -> list[nn.Parameter]:
        """Freeze all parameters except those that the phase trains, and return these."""
        parameters = self.method.parameters(self.network, phase.trainable)
        chosen = {id(parameter) for parameter in parameters}
        for parameter in self.network.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        return parameters

    def _keep_if_best(self, validation: float | None) -> None:
        if validation is not None and (self.best is None or validation < self.best.loss):
            weights = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
            self.best = BestEpoch(validation, weights)

    def _train_epoch(
        self,
        context: EngineTaskContext,
        phase: Phase,
        settings: PhaseSettings,
        blocks: list[EpochBlock],
        parameters: list[nn.Parameter],
    ) -> Iterator[Event]:
        done, total = 0, sum(block.steps for block in blocks)
        # Data that does not fit on the device is prefetched batch by batch; otherwise prefetching does nothing.
        shares = (self.ranks.share(block.spec.layout, torch.device("cpu")) for block in blocks)
        batches = (rows for block, share in zip(blocks, shares, strict=True) for rows in share.take(block.index.cpu()))
        prefetch = self.train_data.prefetch(islice(batches, self.position.step, None))
        for block in blocks:
            if block.spec not in self.steps:
                self.steps[block.spec] = self._make_step(context, phase, block, parameters)
            step = self.steps[block.spec]
            for i in range(block.steps):
                done += 1
                if done <= self.position.step:
                    continue  # trained before the run was interrupted
                if not prefetch.ready():
                    yield Waiting(prefetch.ready)
                try:
                    step(block.index[i], [*(values[i] for values in block.parameters), *next(prefetch)])
                except ValueError as error:
                    if "more than 1 value per channel" not in str(error):  # torch's error for a norm with one value
                        raise
                    raise UserError(
                        f"task {context.number + 1}, phase {phase.name!r}: {_one_image_error(self.config)}"
                    ) from None
                self.position = replace(self.position, step=done)
                yield Stepped(self.position, phase.name, settings.epochs, done, total)

    def _make_step(
        self, context: EngineTaskContext, phase: Phase, block: EpochBlock, parameters: list[nn.Parameter]
    ) -> Step:
        assert self.optimizer is not None
        loss = getattr(self.method, phase.loss)
        step = Step(
            maker=self.maker,
            network=self.network,
            previous=self.previous if phase.uses_previous else None,
            loss=loss,
            penalty=self.method.penalty,
            optimizer=self.optimizer,
            parameters=parameters,
            spec=block.spec,
            forward=context.training_forward,
            clip_norm=self.config.train.clip_norm,
            clip_value=self.config.train.clip_value,
            precision=self.config.precision,
            captured=self.device.type == "cuda" and block.steps >= MIN_CAPTURED_STEPS and self.ranks.size == 1,
            ranks=self.ranks,
            needs_stages=self.method.needs_stages,
            place=partial(METHODS.place, self.config.method.name),
        )
        if block.spec in self.restored_totals:
            step.restore_totals(self.restored_totals.pop(block.spec))
        return step


def _is_raised_by(method: Method, error: FrozenInstanceError) -> bool:
    """Whether the attribute set was one of the method, and not of a batch or an output."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_locals.get("self") is method


def _tell_loading(on_event: Callable[[Event], None] | None) -> Callable[[int, int], None]:
    began = time.perf_counter()

    def tell(done: int, images: int) -> None:
        if on_event is not None and time.perf_counter() - began >= LONG_LOADING:
            on_event(Loading(done, images))

    return tell


def _one_image_error(config: RunConfig) -> str:
    return (
        "a batch of one image has no variance to normalise by where maps are 1x1; "
        f"use another batch.size than {config.batch.size}, or batch.last = 'drop'."
    )


def run(
    config: RunConfig,
    *,
    on_event: Callable[[Event], None] | None = None,
    drive: Callable[[Run], Iterator[Event]] = Run.events,
    ranks: Ranks = ALONE,
) -> Record:
    """Train and evaluate one config without writing files. ``drive`` may do more between the events, such as saving."""
    device = setup.device_of(config)
    # CUDA creates streams and graphs on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        current = Run(config, ranks, on_event)
        for event in drive(current):
            if on_event is not None:
                on_event(event)
    return current.record
