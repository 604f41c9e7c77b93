"""Build the objects of a run from its config: method, device, data, scenario, memory, network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tbbn.accelerators.fused import accelerate
from tbbn.accelerators.native import binding as native
from tbbn.bench import seeds
from tbbn.bench.config import RunConfig
from tbbn.bench.data import loading
from tbbn.bench.data.augment import augmentation
from tbbn.bench.data.batches import BatchMaker
from tbbn.bench.data.device import DeviceDataset, place_on_device
from tbbn.bench.data.memory import ExemplarMemory
from tbbn.bench.data.outline import Outline, outline
from tbbn.bench.data.sampling import batch_layout
from tbbn.bench.data.scenario import Scenario, Task, make_scenario, task_of_class
from tbbn.bench.data.types import Progress, Source
from tbbn.bench.engine.forward import TrainingForward
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.methods import Method, method
from tbbn.bench.methods.contract import checked_head
from tbbn.bench.models import Network, backbone
from tbbn.errors import UserError
from tbbn.nn import convert, is_balanced, splits, wants_task_ids
from tbbn.nn.plan import RULES
from tbbn.registry import NORMS


def method_of(config: RunConfig) -> Method:
    return method(config.method.name, config.method.dict())


def device_of(config: RunConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(config.device)
    except RuntimeError:
        raise UserError(f"unknown device {config.device!r}; use 'cuda' for a GPU, 'cpu' or 'auto'.") from None
    try:
        if found.type == "meta":
            raise RuntimeError("its tensors hold no data")
        torch.empty(0, device=found)
    except Exception as error:  # a device that this build of torch lacks may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"device {config.device!r} cannot be used here: {reason}. Use 'cpu' or 'auto'.") from None
    return found


def memory_format_of(config: RunConfig, device: torch.device) -> torch.memory_format:
    """Channels last is faster on a CPU and on tensor cores, and slower with cuDNN in plain float32 (docs/speed.md)."""
    plain_cudnn = device.type == "cuda" and config.precision == "fp32"
    return torch.contiguous_format if plain_cudnn else torch.channels_last


def load_source(config: RunConfig, *, download: bool | None = None, on_progress: Progress | None = None) -> Source:
    """The data set of a config, with images of the configured size."""
    data = config.data
    try:
        source = loading.load(
            data.name,
            data.root,
            download=data.download if download is None else download,
            size=data.size or None,
            unreadable=data.unreadable,
            split=data.split,
            on_progress=on_progress,
        )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise UserError(f"{data.name}: its images do not fit in memory; set a smaller data.size.") from error
    _check_crop(config, source)
    return source


def outline_source(config: RunConfig) -> Outline:
    """The data set of a config without its images, and a note on what is estimated. Downloads nothing."""
    data = config.data
    found = outline(data.name, data.root, size=data.size or None, unreadable=data.unreadable, split=data.split)
    _check_crop(config, found.source)
    return found


def _check_crop(config: RunConfig, source: Source) -> None:
    height, width = source.train.images.shape[2:]
    if config.data.crop > min(height, width):
        raise UserError(
            f"data.crop must be at most {min(height, width)} for images of {height}x{width}, got {config.data.crop}."
        )


def scenario_of(config: RunConfig, source: Source) -> Scenario:
    """The tasks of a config: all of them, or only the first ``data.stop_after``."""
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


def memory_of(config: RunConfig) -> ExemplarMemory:
    m = config.memory
    return ExemplarMemory(m.budget, m.per_class, m.rounding, m.selection, m.shrink)


def ratio_of(config: RunConfig) -> tuple[int, int]:
    """``batch.ratio`` as two numbers."""
    try:
        current, memory = (int(part) for part in config.batch.ratio.split(":"))
    except ValueError:
        raise UserError(f"batch.ratio must be two whole numbers such as '3:1', got {config.batch.ratio!r}.") from None
    return current, memory


class FullBatch(NamedTuple):
    """A full batch of a task: its current rows, its memory rows and its number of splits r*."""

    current: int
    memory: int
    splits: int


def full_batch(config: RunConfig, method: Method, task: int) -> FullBatch:
    """The full batch of a task (0-based)."""
    is_stream = config.data.online and not method.all_data
    has_memory = method.uses_memory and config.memory.budget > 0
    # An online run also replays rows of its own task, unless batch.memory_from = "past".
    replays = has_memory and (task > 0 or (is_stream and config.batch.memory_from == "all"))
    if not replays and not is_stream:
        return FullBatch(config.batch.size, 0, 1)
    current, memory = batch_layout(config.batch.size, ratio_of(config))
    if not replays:  # an online batch leaves room for memory rows from the first step on
        return FullBatch(current, 0, 1)
    memory *= method.memory_views(task)
    rule = config.norm.dict().get("rule")
    # A plugin's norm may use an option named "rule" for something else.
    return FullBatch(current, memory, splits(current, memory, task, rule if rule in RULES else "paper"))


def image_shape(config: RunConfig, source: Source) -> tuple[int, int, int]:
    """Channels, height and width of the network's input."""
    channels, height, width = source.train.images.shape[1:]
    return channels, config.data.crop or height, config.data.crop or width


def make_network(
    config: RunConfig, method: Method, source: Source, device: torch.device, *, sync: bool = False
) -> Network:
    """A new network on the device: the config's backbone with its norm, and the method's head without classes.

    With ``sync``, norms compute their statistics over all ranks; raises if the config's norm cannot.
    """
    weights = seeds.generator(config.seed, "weights")
    network = build_network(config, method, image_shape(config, source), weights, sync=sync)
    accelerate(network.backbone, device)
    return network.to(device).to(memory_format=memory_format_of(config, device))  # type: ignore[call-overload]


def build_network(
    config: RunConfig,
    method: Method,
    shape: tuple[int, int, int],
    generator: torch.Generator | None = None,
    *,
    sync: bool = False,
) -> Network:
    """The config's backbone with its norm for images of this shape, and the method's head without classes."""
    body = backbone(
        config.backbone,
        in_channels=shape[0],
        last_relu=method.last_relu,
        generator=generator,
        image_size=shape[1:],
    )
    _convert(body, config, sync)
    return Network(body, checked_head(config.method.name, method, method.make_head(body.n_features)))


def _convert(module: nn.Module, config: RunConfig, sync: bool) -> None:
    convert(module, config.norm.name, sync=sync and not _is_per_sample(config), **config.norm.dict())


def _norm_class(config: RunConfig) -> Any:
    """The class that replaces ``nn.BatchNorm2d``, or the only one."""
    found = NORMS.get(config.norm.name)
    return found[1] if isinstance(found, tuple) else found


def _is_per_sample(config: RunConfig) -> bool:
    return getattr(_norm_class(config), "per_sample", False)


def has_splits(config: RunConfig) -> bool:
    """Whether the config's norm divides a batch into r* splits."""
    return getattr(_norm_class(config), "kind", "") == "tbbn"


def check_ranks(config: RunConfig) -> None:
    """Raise if several ranks cannot train the config: its norm cannot synchronise, or it names a single GPU."""
    if config.device.startswith("cuda:"):
        raise UserError(f"each rank uses its own GPU, got device = {config.device!r}; use 'cuda' or 'auto'.")
    if not _is_per_sample(config):
        _convert(nn.Sequential(nn.BatchNorm2d(64)), config, sync=True)


def training_forward(
    config: RunConfig, network: Network, scenario: Scenario, task: Task, device: torch.device
) -> TrainingForward:
    """The training forward for the batches of a task."""
    return TrainingForward(
        past_tasks=task.number,
        takes_layout=is_balanced(network),
        class_task=task_of_class(scenario).to(device) if wants_task_ids(network) else None,
        separate=config.batch.forward == "separate",
    )


def on_device(config: RunConfig, source: Source, scenario: Scenario, part: str, device: torch.device) -> DeviceDataset:
    """The "train" or "test" part of the data, on the device or streamed to it."""
    stored, labels = getattr(source, part), getattr(scenario, f"{part}_labels")
    labels, mean, std = (t.to(device) for t in (labels, torch.tensor(source.mean), torch.tensor(source.std)))
    images = place_on_device(stored.images, device, config.data.stream)
    return DeviceDataset(images, labels, mean, std, config.data.crop or None, memory_format_of(config, device))


def batch_maker(config: RunConfig, data: DeviceDataset) -> BatchMaker:
    crop = config.data.crop or None
    return BatchMaker(data, augmentation(config.batch.augment, crop=crop), augmentation("strong", crop=crop))


def record_of(
    config: RunConfig, source: Source, scenario: Scenario, network: Network, device: torch.device, ranks: int
) -> Record:
    """An empty record with everything that is known before training."""
    record = new_record(config)
    record.environment |= {"ranks": ranks} if ranks > 1 else {}
    record.environment["device"] = device.type
    if device.type == "cpu" and is_balanced(network):  # the last bits of results depend on the kernel
        record.environment["cpu_kernel"] = native.status()
    record.class_order = list(scenario.class_order)
    record.task_sizes = list(scenario.task_sizes)
    record.skipped = list(source.skipped)
    record.data = data_facts(config, source)
    return record


def data_facts(config: RunConfig, source: Source) -> dict[str, Any]:
    """The data's entry in a record: class names, shape of the network's input, channel mean and std."""
    stats = {"mean": list(source.mean), "std": list(source.std)}
    return {"classes": list(source.classes), "shape": list(image_shape(config, source)), **stats}
