"""Benchmarks of this machine: one norm layer against batch norm, whole training steps, and runs in parallel lanes.

``tbbn speed`` prints the three tables. See :mod:`tbbn.bench.timing` for how times are measured.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tbbn
from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.engine import Event, run_lanes
from tbbn.bench.engine.events import EpochEnded, Stepped
from tbbn.bench.engine.forecast import forecast
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.models import backbone
from tbbn.bench.timing import Work, captured, copy_bandwidth, device_clock, median_ratio, peak_memory, time_interleaved
from tbbn.nn import convert
from tbbn.registry import NORMS

SHAPES = ((64, 16, 32, 32), (64, 32, 16, 16), (64, 64, 8, 8), (64, 64, 56, 56), (64, 512, 7, 7))
LAYOUT = {"current": 48, "memory": 16, "past_tasks": 9}  # the paper's batch in its last task: r = 16
FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMAGENET = (  # backbones that are timed at 224 px, the others at 32
    "resnet18", "resnet34", "resnet18-small", "resnet18-podnet", "resnet18-lucir", "shufflenet-v2", "mobilenet-v2",
    "mnasnet-0.5",
)  # fmt: skip
LANE_DATA, LANE_TASKS = "synthetic:100x500x1x32", 10  # CIFAR's size
LAYER_SECONDS = 1.0  # duration of a row of the layer table, including warm-up
STEP_ROUNDS, STEP_WARM_UP = 9, 5  # minimum number of timed and warm-up steps per norm in a row of the step table
PASSES = 5  # minimum memory traffic: forward reads x and writes y; backward reads g and x and writes dx

Report = Callable[[str], None]


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "tbbn": tbbn.__version__,
        "python": platform.python_version(),
    }


@contextmanager
def balanced(module: nn.Module) -> Iterator[None]:
    """Enter the benchmark's layout, if the module's norms need one."""
    with tbbn.balance(module, **LAYOUT) if tbbn.nn.is_balanced(module) else nullcontext():  # type: ignore[arg-type]
        yield


def _relative(norm: str, times: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, float]:
    """Time and peak memory relative to batch norm."""
    if norm == "bn":
        return {}
    return {"ratio": median_ratio(times, norm)} | ({"peak_ratio": peaks[norm] / peaks["bn"]} if peaks["bn"] else {})


# -- One layer --------------------------------------------------------------------------------------------------------


def layer_work(norm: str, data: Sequence[tuple[Tensor, Tensor]]) -> tuple[nn.Module, Work]:
    """One layer per input, and a function that runs the forward and backward of all."""
    layers = nn.ModuleList(nn.BatchNorm2d(x.shape[1], device=x.device) for x, _ in data)
    convert(layers, norm)

    def work() -> list[Any]:
        out = []
        for layer, (x, g) in zip(layers, data, strict=True):
            y = layer(x)
            out.append((y, torch.autograd.grad(y, (x, *layer.parameters()), g)))
        return out

    return layers, work


def time_layer(
    shape: tuple[int, ...],
    dtype: str,
    fmt: str,
    device: torch.device,
    bandwidth: float,
    norms: Sequence[str] = ("tbbn",),
) -> dict[str, Any]:
    """One row of the layer table: time, ratio to batch norm, the lower bound at ``bandwidth`` (bytes/s), peak memory."""
    copies = 8 if device.type == "cuda" else 1
    data = []
    for _ in range(copies):
        x = torch.randn(shape, device=device) * 2 + torch.randn(1, shape[1], 1, 1, device=device)
        x, g = (t.to(DTYPES[dtype]).to(memory_format=FORMATS[fmt]) for t in (x, torch.randn(shape, device=device)))
        data.append((x.requires_grad_(), g))
    works, peaks = {}, {}
    for norm in ("bn", *norms):
        layers, work = layer_work(norm, data)
        with balanced(layers):
            works[norm] = captured(work, device)
            one, single = layer_work(norm, data[:1])
        with balanced(one):
            peaks[norm] = peak_memory(single, device)
        if device.type != "cuda":
            works[norm] = _inside_balance(layers, work)
    times = time_interleaved(works, device)
    floor = PASSES * data[0][0].numel() * data[0][0].element_size() / bandwidth
    row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "dtype": dtype, "format": fmt, "floor_us": 1e6 * floor}
    for norm, seconds in times.items():
        row[norm] = {"us": 1e6 * median(seconds) / copies} | _relative(norm, times, peaks)
    return row


def _inside_balance(module: nn.Module, work: Work) -> Work:
    def inside() -> Any:
        with balanced(module):
            return work()

    return inside


# -- Training steps ---------------------------------------------------------------------------------------------------


def step_work(name: str, norm: str, precision: str, size: int, device: torch.device) -> Work:
    """Forward, cross-entropy, backward and SGD on a batch of 64 that is already on the device."""
    fmt = torch.contiguous_format if device.type == "cuda" and precision == "fp32" else torch.channels_last
    body = convert(backbone(name), norm).to(device, memory_format=fmt)  # type: ignore[call-overload]
    head = nn.Linear(body.n_features, 100).to(device)
    x = torch.randn(64, 3, size, size, device=device).contiguous(memory_format=fmt)
    labels = torch.randint(100, (64,), device=device)
    sgd = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01, momentum=0.9, fused=True)

    def work() -> Tensor:
        sgd.zero_grad(set_to_none=True)
        with (
            balanced(body),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False),
        ):
            loss = F.cross_entropy(head(body(x).pooled).float(), labels)
        loss.backward()
        sgd.step()
        return loss.detach()

    return work


def time_step(name: str, norms: Sequence[str], precision: str, size: int, device: torch.device) -> dict[str, Any]:
    """One row of the step table: milliseconds, ratio to batch norm and peak memory of each norm."""
    known = [norm for norm in dict.fromkeys(("bn", *norms)) if norm in NORMS]
    works, peaks = {}, {}
    config = resolve(("speed", {"precision": precision, "device": device.type}))
    with torch_settings(config, device):  # float32 as in a run, which is not torch's default
        for norm in known:
            work = step_work(name, norm, precision, size, device)
            peaks[norm] = peak_memory(work, device)
            works[norm] = captured(work, device)
        times = time_interleaved(works, device, seconds=_step_seconds(device))
    row: dict[str, Any] = {"backbone": name, "size": size, "precision": precision}
    for norm, seconds in times.items():
        row[norm] = {"ms": 1e3 * median(seconds)} | _relative(norm, times, peaks)
    return row


def step_seconds(name: str, norm: str, precision: str, size: int, device: torch.device, limit: float = 2.0) -> float:
    """The time of a step, from about ``limit`` seconds of steps, but at least one after a warm-up step."""
    clock = device_clock(device)
    with torch_settings(resolve(("speed", {"precision": precision, "device": device.type})), device):
        work = captured(step_work(name, norm, precision, size, device), device)
        first = clock(work, 1)
        return clock(work, min(50, max(1, int(limit / first))))


# -- Runs in parallel lanes -------------------------------------------------------------------------------------------


def lane_configs(
    n: int, norms: Sequence[str], name: str, precision: str, device: torch.device, epochs: int, data: str, tasks: int
) -> list[RunConfig]:
    """The configs of the runs in a row of the lane table."""
    settings = {
        "device": device.type,
        "protocol": "paper",
        "precision": precision,
        "backbone": name,
        "batch.augment": "padded-resized",
        "data.name": data,
        "data.tasks": tasks,
        "data.stop_after": 2,
        "train.epochs": epochs,
    }
    return [
        resolve(("speed", {**settings, "norm.name": norms[i % len(norms)], "seed": i // len(norms)})) for i in range(n)
    ]


def time_lanes(
    n: int,
    norms: Sequence[str],
    name: str,
    precision: str,
    device: torch.device,
    epochs: int,
    data: str = LANE_DATA,
    tasks: int = LANE_TASKS,
    on_share: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """One row of the lane table: ``n`` whole runs in parallel on synthetic images of CIFAR's size.

    Timed in the runs' second task, from epoch end to epoch end. That includes all work of a run: drawing the epoch,
    augmentation, the captured step, validation. ``on_share`` is called after each step with the fraction of all steps done.
    """
    configs = lane_configs(n, norms, name, precision, device, epochs, data, tasks)
    done, all_steps = 0, n * forecast(configs[0]).all_steps
    steps: dict[int, int] = {}
    ends: dict[int, list[tuple[float, int]]] = {i: [] for i in range(n)}

    def on_event(lane: int, event: Event) -> None:
        nonlocal done
        if isinstance(event, Stepped):
            done += 1
            on_share(done / all_steps)
        if isinstance(event, Stepped) and event.position.task == 1:
            steps[lane] = steps.get(lane, 0) + 1
        elif isinstance(event, EpochEnded) and event.position.task == 1:
            ends[lane].append((time.perf_counter(), steps[lane]))

    records = run_lanes(configs, n, on_event=on_event)
    # The window in which all lanes train: from the latest first epoch end to the earliest last epoch end.
    begin, end = max(e[0][0] for e in ends.values()), min(e[-1][0] for e in ends.values())
    seconds = max(end - begin, 1e-9)
    within = [steps_between(ends[i], begin, end) for i in range(n)]
    rate = sum(within) / seconds
    own = {
        norm: [seconds / d for d, c in zip(within, configs, strict=True) if c.norm.name == norm and d] for norm in norms
    }
    return {
        "lanes": n,
        "norms": ",".join(norms),
        "precision": precision,
        "steps_per_second": rate,
        "ms_per_step_and_run": 1e3 / rate,
        "ms_per_step_of_a_lane": {norm: 1e3 * mean(times) for norm, times in own.items() if times},
        "finished": sum(r.status == "finished" for r in records),
    }


def steps_between(ends: list[tuple[float, int]], begin: float, end: float) -> float:
    """Steps done from ``begin`` to ``end``; ``ends`` has the time and the step count at each epoch end.

    An epoch that is partly inside the interval counts in proportion.

    >>> steps_between([(0.0, 0), (10.0, 100)], 0.0, 5.0)
    50.0
    """
    total = 0.0
    for (a, n), (b, m) in pairwise(ends):
        total += (m - n) * max(0.0, min(b, end) - max(a, begin)) / (b - a)
    return total


# -- All three --------------------------------------------------------------------------------------------------------


def _step_seconds(device: torch.device) -> float:
    """Seconds for which a row of the step table is timed, if its steps are fast."""
    return 2.0 if device.type == "cuda" else 6.0


def _layer_rows(device: torch.device) -> list[tuple[tuple[int, ...], str, str]]:
    on_gpu = device.type == "cuda"
    kinds = [("fp32", "nchw"), ("fp32", "channels_last"), *([("bf16", "channels_last")] if on_gpu else [])]
    return [(shape, dtype, fmt) for dtype, fmt in kinds for shape in (SHAPES if on_gpu else SHAPES[:3])]


def _size(name: str) -> int:
    """The side of the images for timing a backbone."""
    return 224 if name in IMAGENET else 32


def estimate_seconds(
    device: torch.device,
    *,
    backbones: Sequence[str],
    norms: Sequence[str],
    precisions: Sequence[str],
    n_lanes: Sequence[int],
    epochs: int,
) -> float:
    """Estimate the duration of :func:`measure_speed` from a few steps of each backbone. On a GPU lanes overlap and take less."""
    total = LAYER_SECONDS * len(_layer_rows(device))
    n_norms = len(dict.fromkeys(("bn", *norms)))
    for name in backbones:
        for precision in precisions:
            try:
                step = step_seconds(name, "bn", precision, _size(name), device, limit=0.5)
            except torch.OutOfMemoryError:  # the row will report it
                continue
            total += n_norms * step * STEP_WARM_UP + max(_step_seconds(device), n_norms * step * STEP_ROUNDS)
            if name == backbones[0] and n_lanes:
                (config,) = lane_configs(1, norms, name, precision, device, epochs, LANE_DATA, LANE_TASKS)
                total += sum(n_lanes) * step * forecast(config).all_steps
    return total


def measure_speed(
    device: torch.device,
    *,
    backbones: Sequence[str] = ("resnet32",),
    norms: Sequence[str] = ("bn", "tbbn"),
    precisions: Sequence[str] = ("fp32",),
    n_lanes: Sequence[int] = (1,),
    epochs: int = 4,
    on_row: Report = lambda text: None,
    on_share: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Measure all tables. A row that runs out of memory says so; the others are still measured.

    ``on_row`` is called with the name of the next row, ``on_share`` with the fraction done of a row of parallel runs.
    """
    found: dict[str, Any] = {"machine": machine(device), "layers": [], "steps": [], "lanes": []}
    bandwidth = copy_bandwidth(device)
    found["machine"]["copy_gb_per_second"] = f"{bandwidth / 1e9:.0f}"
    others = [norm for norm in norms if norm != "bn"]
    layer_rows = _layer_rows(device)
    n_rows, row = len(layer_rows) + (len(backbones) + len(n_lanes)) * len(precisions), 0

    def attempt(table: str, what: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        nonlocal row
        row += 1
        on_row(f"{row}/{n_rows} {table}: {what}")
        try:
            found[table].append(measure(*arguments))
        except torch.OutOfMemoryError:
            found[table].append({"what": what, "failed": "out of memory"})
        if device.type == "cuda":
            torch.cuda.empty_cache()

    for shape, dtype, fmt in layer_rows:
        what = f"{'x'.join(map(str, shape))} {dtype} {fmt}"
        attempt("layers", what, time_layer, shape, dtype, fmt, device, bandwidth, others)
    for name in backbones:
        for precision in precisions:
            attempt("steps", f"{name} {precision}", time_step, name, norms, precision, _size(name), device)
    lanes = partial(time_lanes, on_share=on_share)
    for n in n_lanes:
        for precision in precisions:
            attempt("lanes", f"{n} x {precision}", lanes, n, norms, backbones[0], precision, device, epochs)
    return found
