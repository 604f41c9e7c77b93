"""The training loop, the only one. A run is a generator: it yields after every step it has enqueued.

One seed expands into named streams (class order, weights, batches, augmentation, exemplars), each a pure function of the
task, the phase and the epoch. What a run is at any epoch's end is therefore: the weights, the optimiser's momentum, the best
epoch so far, the memory, the record and its position.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbbn import metrics, seeds
from tbbn.config import RunConfig, to_toml
from tbbn.data import sources
from tbbn.data.augment import augmentation
from tbbn.data.batches import parts
from tbbn.data.scenario import Scenario, Task, make_scenario
from tbbn.engine import check, checkpoint
from tbbn.engine.stage import Drawn, LearningStage, Rows, evaluated
from tbbn.engine.step import Captured, Images, Shape, Step
from tbbn.errors import UserError
from tbbn.methods import Phase
from tbbn.models import Network, Output, backbone
from tbbn.norm import convert, splits
from tbbn.record import Record, new_record, record_from


@dataclass(frozen=True)
class Position:
    """The next step to train: of which epoch, phase and task."""

    task: int = 0
    phase: int = 0
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Stepped:
    """A step has been enqueued; nothing has been waited for."""

    position: Position
    phase: str
    epochs: int
    step: int  # done in this epoch
    steps: int


@dataclass(frozen=True)
class EpochEnded:
    position: Position
    phase: str
    epochs: int
    losses: dict[str, float]
    validation: float | None


@dataclass(frozen=True)
class TaskEnded:
    task: int
    accuracy: list[float]  # of each task so far
    exemplars: int


@dataclass(frozen=True)
class Waiting:
    """The run is about to read a result: whoever has other work may do it until ``done()``."""

    done: Callable[[], bool]


Event = Stepped | EpochEnded | TaskEnded | Waiting


class Diverged(Exception):
    """The loss is no longer a number."""


def run(
    config: RunConfig,
    *,
    on_event: Callable[[Event], None] | None = None,
    directory: str | Path | None = None,
    every: float = 60.0,
    stop: Callable[[], bool] | None = None,
) -> Record:
    """Train and evaluate; the record says how it ended.

    With a directory the run is kept there: saved at the end of an epoch if the last time was ``every`` seconds ago, and after
    each task. A directory that holds an unfinished run of the same config is continued where it was saved. ``stop`` is asked
    after each step: once it says yes, the run saves itself and ends as "interrupted".
    """
    if directory is None:
        return _drive(Run(config), None, on_event, every, stop)
    with checkpoint.locked(Path(directory)):
        return _drive(Run(config), Path(directory), on_event, every, stop)


def _drive(
    job: Run,
    directory: Path | None,
    on_event: Callable[[Event], None] | None,
    every: float,
    stop: Callable[[], bool] | None,
) -> Record:
    for event in job.recorded(directory, every, stop):
        if on_event is not None:
            on_event(event)
    return job.record


class Run:
    """A run in progress. ``work`` advances it; between two of its events everything lies in the attributes."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.method = check.check(config)
        self.device = check.device(config)
        # Channels last pays on a CPU and for bf16; cuDNN's float32 convolutions are 1.6 times slower in it.
        on_gpu = self.device.type == "cuda" and config.precision != "bf16"
        self.memory_format = torch.contiguous_format if on_gpu else torch.channels_last
        data = config.data
        self.source = sources.load(data.name, data.root, download=data.download, size=data.size or None)
        self.scenario = scenario_of(config, self.source)
        self.augment = augmentation(config.batch.augment, crop=data.crop or None)
        self.strong = augmentation("strong", crop=data.crop or None)
        self.train_data, self.test_data = self._images("train"), self._images("test")
        self.memory = check.make_memory(config)
        if self.method.uses_memory:
            self.memory.quota(
                self.scenario.n_classes
            )  # a budget too small for the classes is an error now, not at the end
        self.network = self._network()
        self.previous: Network | None = None
        self.record = new_record(config)
        self.record.class_order = list(self.scenario.class_order)
        self.record.task_sizes = list(self.scenario.task_sizes)
        self.position = Position()
        self.optimizer: torch.optim.Optimizer | None = None
        self.rows: Rows | None = None  # of the phase being trained
        self.best: tuple[float, dict[str, Tensor]] | None = None  # loss and weights of the phase's best epoch
        self.steps: dict[Shape, Step | Captured] = {}  # of the phase being trained
        # What a loaded checkpoint leaves to the phase it was saved in.
        self.momentum: dict[str, Tensor] = {}
        self.totals: dict[Shape, tuple[list[str], Tensor, int]] = {}

    def _images(self, split: str) -> Images:
        part, labels = getattr(self.source, split), getattr(self.scenario, f"{split}_labels")
        mean, std = torch.tensor(self.source.mean), torch.tensor(self.source.std)
        images, labels, mean, std = (t.to(self.device) for t in (part.images, labels, mean, std))
        return Images(images, labels, mean, std, self.config.data.crop or None, self.memory_format)

    def _network(self) -> Network:
        body = backbone(
            self.config.backbone,
            in_channels=self.source.train.images.shape[1],
            last_relu=self.method.last_relu,
            generator=seeds.generator(self.config.seed, "weights"),
        )
        convert(body, self.config.norm.name, **self.config.norm.dict())
        network = Network(body, self.method.make_head(body.n_features))
        return network.to(self.device).to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def recorded(
        self, directory: Path | None, every: float = 60.0, stop: Callable[[], bool] | None = None
    ) -> Iterator[Event]:
        """``work``, with its directory kept true: state and record are saved on the way and at the end, whatever that is."""
        if directory is not None:
            self.load(directory)
        self.record.status, self.record.message = "interrupted", ""  # what to believe if this process disappears
        saved = time.monotonic()
        try:
            for event in self.work():
                asked = stop is not None and stop()
                due = isinstance(event, TaskEnded) or (
                    isinstance(event, EpochEnded) and time.monotonic() - saved >= every
                )
                if directory is not None and (due or (asked and not isinstance(event, Waiting))):
                    self.save(directory)
                    saved = time.monotonic()
                yield event
                if asked and not isinstance(event, Waiting):
                    return
            self.record.status = "finished"
        except Diverged as error:
            self.record.status, self.record.message = "diverged", str(error)
        finally:
            if directory is not None:
                self.record.save(directory)

    def save(self, directory: Path) -> None:
        """Everything the run is, between two steps."""
        tensors = checkpoint.join("network", self.network.state_dict()) | checkpoint.join(
            "memory", self.memory.state_dict()
        )
        tensors |= checkpoint.join("predictions", self.record.predictions)
        if self.previous is not None:
            tensors |= checkpoint.join("previous", self.previous.state_dict())
        if self.best is not None:
            tensors |= checkpoint.join("best", self.best[1])
        if self.rows is not None:
            tensors |= {"rows.current": self.rows.current, "rows.memory": self.rows.memory}
        if self.optimizer is not None:
            moved = [self.optimizer.state[p].get("momentum_buffer") for p in self.optimizer.param_groups[0]["params"]]
            tensors |= {f"momentum.{i}": m for i, m in enumerate(moved) if m is not None}
        totals = {shape: _eager(step) for shape, step in self.steps.items()}
        tensors |= {f"totals.{i}": step.totals for i, step in enumerate(totals.values())}
        state = {
            "config": to_toml(self.config),
            "position": asdict(self.position),
            "record": json.loads(self.record.to_json()),
            "task_sizes": self.network.task_sizes,
            "previous_task_sizes": None if self.previous is None else self.previous.task_sizes,
            "best": None if self.best is None else self.best[0],
            "rows": None
            if self.rows is None
            else {"kind": self.rows.kind, "ratio": self.rows.ratio, "layout": self.rows.layout},
            "totals": [
                {"shape": asdict(shape), "names": step.names, "count": step.count} for shape, step in totals.items()
            ],
        }
        checkpoint.save(directory, state, tensors)
        self.record.save(directory)

    def load(self, directory: Path) -> bool:
        """Take up the state saved in a directory, if there is one; a run of another config there is an error."""
        found = checkpoint.load(directory)
        if found is None:
            return False
        state, tensors = found
        if state["config"] != to_toml(self.config):
            raise UserError(f"{directory}: holds a run of another config; use another directory, or --overwrite.")
        self.position = Position(**state["position"])
        self.record = record_from(state["record"], str(directory))
        self.record.predictions = checkpoint.split(tensors, "predictions")
        self.network.restore(self._here(tensors, "network"), state["task_sizes"])
        if state["previous_task_sizes"] is not None:
            previous = self._network()
            previous.restore(self._here(tensors, "previous"), state["previous_task_sizes"])
            self.previous = previous.teacher()
        self.memory.load_state_dict(checkpoint.split(tensors, "memory"))
        if state["best"] is not None:
            self.best = state["best"], self._here(tensors, "best")
        if state["rows"] is not None:
            rows = state["rows"]
            current, memory = tensors["rows.current"], tensors["rows.memory"]
            self.rows = Rows(rows["kind"], current, memory, (rows["ratio"][0], rows["ratio"][1]), rows["layout"])
        self.momentum = self._here(tensors, "momentum")
        self.totals = {
            Shape(**entry["shape"]): (entry["names"], tensors[f"totals.{i}"].to(self.device), entry["count"])
            for i, entry in enumerate(state["totals"])
        }
        return True

    def _here(self, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in checkpoint.split(tensors, prefix).items()}

    def work(self) -> Iterator[Event]:
        """Everything that is left to do."""
        with settings(self.config):
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
            ratio=check.ratio(self.config),
            length=batch.length,
            last=batch.last,
            from_union=batch.current_from == "union",
            online=self.config.data.online,
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
        self._evaluate(task)
        self.record.exemplars.append(len(self.memory))
        self.record.seconds += time.perf_counter() - started
        self.previous = self.network.teacher() if self.method.needs_previous else None
        self.position = Position(task.number + 1)
        yield TaskEnded(task.number, self.record.accuracy[-1], len(self.memory))

    # Training. -------------------------------------------------------------------------------------------------------

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
        while self.position.epoch < hyper.epochs:
            epoch = self.position.epoch
            _set_lr(self.optimizer, hyper.lr_at(epoch))
            drawn = stage.draw(self.rows, phase.name, epoch)
            self.network.train(phase.network_mode == "train")
            yield from self._epoch(stage, phase, hyper, drawn, trained)
            if self.device.type == "cuda":
                marker = torch.cuda.Event()
                marker.record()
                yield Waiting(marker.query)
            losses = _read(self.steps)
            if not all(math.isfinite(v) for v in losses.values()) or not _finite(trained):
                raise Diverged(self._divergence(stage, phase, epoch, losses))
            validation = stage.validation_loss() if hyper.keep == "best" else None
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
        bad = [int(_eager(step).first_bad) for step in self.steps.values()]
        at = f"step {min(b for b in bad if b >= 0)} of its kind of batch" if max(bad) >= 0 else "a step"
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
        for block in drawn:
            if block.shape not in self.steps:
                self.steps[block.shape] = self._make_step(stage, phase, block, trained)
            step = self.steps[block.shape]
            for i in range(block.steps):
                done += 1
                if done <= self.position.step:
                    continue  # trained before the run was interrupted
                step(block.index[i], [p[i] for p in block.parameters])
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
            class_task=_task_of_class(self.scenario, self.device) if by_task else None,
        )
        if block.shape in self.totals:
            step.names, step.totals, step.count = self.totals.pop(block.shape)
        # Short blocks would be captured for a step or two an epoch: not worth a graph.
        return Captured(step) if self.device.type == "cuda" and block.steps >= 8 else step

    # Evaluation. -----------------------------------------------------------------------------------------------------

    def _evaluate(self, task: Task) -> None:
        """Predict every test image of the tasks so far: with all classes to choose from, and with its own task's alone."""
        rows = torch.cat([evaluated_rows(self.config, t) for t in self.scenario.tasks[: task.number + 1]])
        labels = self.scenario.test_labels[rows]
        tasks = _task_of_class(self.scenario, torch.device("cpu"))
        own = tasks[labels].to(self.device)
        seen = tasks[: task.classes.stop].to(self.device)
        done = 0

        def predict(output: Output) -> Tensor:
            nonlocal done
            scores = self.method.predict(output)
            others = own[done : done + len(scores)].unsqueeze(1) != seen
            done += len(scores)
            return torch.stack([scores.argmax(1), scores.masked_fill(others, -math.inf).argmax(1)])

        size, precision = self.config.batch.evaluation, self.config.precision
        parts_ = list(evaluated(self.network, self.test_data, rows, size, precision, predict))
        free, known = torch.cat(parts_, 1).cpu()
        by_task = [tasks[labels] == t for t in range(task.number + 1)]
        self.record.accuracy.append([(free == labels)[m].float().mean().item() for m in by_task])
        self.record.task_il.append([(known == labels)[m].float().mean().item() for m in by_task])
        confusion = confusion_of(labels, free, task.classes.stop)
        self.record.errors.append(metrics.confusion_error_types(confusion, task.classes.start))
        self.record.predictions[f"task{task.number}"] = free.to(torch.int16)
        self.record.splits.append(self.whole_batch(task.number)[2])

    def whole_batch(self, task: int) -> tuple[int, int, int]:
        """Current rows, memory rows and splits of a whole batch of a task."""
        if not task or not self.memory.budget or not self.method.uses_memory:
            return self.config.batch.size, 0, 1
        current, memory = parts(self.config.batch.size, check.ratio(self.config))
        memory *= self.method.memory_views(task)
        rule = self.config.norm.dict().get("rule", "paper")
        return current, memory, splits(current, memory, task, rule)


@dataclass(frozen=True)
class Hyper:
    """The settings of a phase, all filled in."""

    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    schedule: str
    milestones: tuple[float, ...]
    gamma: float
    keep: str

    @classmethod
    def of(cls, config: RunConfig, phase: Phase) -> Hyper:
        train = config.train

        def pick(name: str) -> Any:
            own = getattr(phase, name)
            return getattr(train, name) if own is None else own

        return cls(
            epochs=pick("epochs"),
            lr=pick("lr") * phase.lr_factor,
            momentum=pick("momentum"),
            weight_decay=pick("weight_decay"),
            schedule=pick("schedule"),
            milestones=train.milestones,
            gamma=train.gamma,
            keep=pick("keep"),
        )

    def lr_at(self, epoch: int) -> float:
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        if self.schedule == "multistep":
            return self.lr * self.gamma ** sum(epoch >= round(m * self.epochs) for m in self.milestones)
        return self.lr


def scenario_of(config: RunConfig, source: sources.Source) -> Scenario:
    data = config.data
    order: str | list[int] = data.class_order
    if "," in data.class_order:
        try:
            order = [int(part) for part in data.class_order.split(",")]
        except ValueError:
            raise UserError(f"data.class_order must be a name or whole numbers with commas, got {order!r}.") from None
    scenario = make_scenario(
        source,
        n_tasks=data.tasks,
        base_classes=data.base_classes,
        class_order=order,
        class_order_seed=config.seed if data.class_order_seed < 0 else data.class_order_seed,
        validation=data.validation,
        seed=config.seed,
    )
    return replace(scenario, tasks=scenario.tasks[: data.stop_after or None])


def evaluated_rows(config: RunConfig, task: Task) -> Tensor:
    """The test images of a task that are evaluated: all of them, but for a quirk."""
    whole = len(task.test) // config.batch.size * config.batch.size
    return task.test if config.data.test == "all" else task.test[:whole]


def confusion_of(labels: Tensor, predicted: Tensor, n_classes: int) -> list[list[int]]:
    """How often each class (row) was taken for each (column)."""
    counts = torch.bincount(labels * n_classes + predicted, minlength=n_classes * n_classes)
    return counts.view(n_classes, n_classes).tolist()


class settings:
    """Torch's process-wide settings as a run wants them. Runs side by side share them; the last one out puts them back."""

    inside = 0
    before: tuple[int, str, bool, bool]

    def __init__(self, config: RunConfig) -> None:
        self.threads = config.threads
        self.tf32 = config.precision != "fp32"

    def __enter__(self) -> None:
        cudnn = torch.backends.cudnn
        if not settings.inside:
            precision = torch.get_float32_matmul_precision()
            settings.before = torch.get_num_threads(), precision, cudnn.allow_tf32, cudnn.deterministic
        settings.inside += 1
        if self.threads:
            torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        cudnn.allow_tf32, cudnn.deterministic = self.tf32, True

    def __exit__(self, *_: object) -> None:
        settings.inside -= 1
        if not settings.inside:
            threads, precision, tf32, deterministic = settings.before
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = tf32, deterministic


def _task_of_class(scenario: Scenario, device: torch.device) -> Tensor:
    sizes = torch.tensor(scenario.task_sizes)
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(device)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured step reads it
        else:
            group["lr"] = lr


def _eager(step: Step | Captured) -> Step:
    return step.step if isinstance(step, Captured) else step


def _finite(parameters: list[torch.nn.Parameter]) -> bool:
    return all(torch.stack([p.detach().isfinite().all() for p in parameters]).tolist())


def _read(steps: dict[Shape, Step | Captured]) -> dict[str, float]:
    """The mean of each loss term over the epoch's steps; the totals begin again."""
    sums: dict[str, float] = {}
    count = 0
    for step in map(_eager, steps.values()):
        for name, value in zip(step.names, step.totals.tolist(), strict=True):
            sums[name] = sums.get(name, 0.0) + value
        step.totals.zero_()
        count += step.count
        step.count = 0
    return {name: value / max(count, 1) for name, value in sums.items()}
