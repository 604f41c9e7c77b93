"""What this machine makes of it: the layer beside batch norm, training steps, and runs side by side.

Candidates are timed in interleaved rounds, to and fro, and compared within a round: a busy machine disturbs all alike. On a GPU
work is captured as a graph first, and several inputs are used in turn: one used again and again would measure the cache.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tbbn
from tbbn.bench.config import resolve
from tbbn.bench.engine import Event, run_lanes
from tbbn.bench.engine.events import EpochEnded, Stepped
from tbbn.bench.engine.phase import settings as as_run
from tbbn.bench.models import backbone
from tbbn.nn import NORMS, convert

SHAPES = ((64, 16, 32, 32), (64, 32, 16, 16), (64, 64, 8, 8), (64, 64, 56, 56), (64, 512, 7, 7))
LAYOUT = {"current": 48, "memory": 16, "past_tasks": 9}  # the paper's batch at its last task: r = 16
FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5
PASSES = 5  # forward reads x and writes y, backward reads g and x and writes dx: no layer moves less

Work = Callable[[], Any]
Say = Callable[[str], None]


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "tbbn": tbbn.__version__,
        "python": platform.python_version(),
    }


def bandwidth(device: torch.device, megabytes: int | None = None) -> float:
    """Bytes a second of a large copy, read and written: what a pass over memory can reach."""
    megabytes = megabytes or (2048 if device.type == "cuda" else 256)
    source = torch.randn(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = race({"copy": lambda: target.copy_(source)}, device, seconds=0.5)["copy"]
    return 2 * 4 * source.numel() / median(seconds)


def race(
    candidates: dict[str, Work], device: torch.device, *, seconds: float = 0.6, rounds: int = 9
) -> dict[str, list[float]]:
    """Seconds a call of each candidate takes, in every round; about ``seconds`` in all."""
    clock = _clock(device)
    once = {name: (clock(work, 2), clock(work, 3))[1] for name, work in candidates.items()}
    calls = {name: min(200, max(1, int(seconds / rounds / len(once) / t))) for name, t in once.items()}
    seen: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds):
        for name, work in list(candidates.items())[:: 1 if i % 2 else -1]:
            seen[name].append(clock(work, calls[name]))
    return seen


def _clock(device: torch.device) -> Callable[[Work, int], float]:
    def on_cpu(work: Work, n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - start) / n

    def on_gpu(work: Work, n: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(n):
            work()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end), 1e-4) / n / 1e3

    return on_gpu if device.type == "cuda" else on_cpu


def ratio(seen: dict[str, list[float]], name: str, to: str = "bn") -> float:
    return median(a / b for a, b in zip(seen[name], seen[to], strict=True))


def captured(work: Work, device: torch.device) -> Work:
    """``work`` as a CUDA graph; on a CPU, itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay(_: Any = (kept, work)) -> None:  # what the graph reads and writes must outlive it
        graph.replay()

    return replay


def peak(work: Work, device: torch.device) -> int:
    """Bytes a call takes at its height, above what was there before; 0 where the device does not count."""
    if device.type != "cuda":
        return 0
    for _ in range(2):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = work()
        most = torch.cuda.max_memory_allocated(device) - before
        del kept
    return most


# -- The layer --------------------------------------------------------------------------------------------------------


@contextmanager
def balanced(module: nn.Module) -> Iterator[None]:
    with tbbn.balance(module, **LAYOUT) if tbbn.nn.is_balanced(module) else nullcontext():  # type: ignore[arg-type]
        yield


def layer_work(norm: str, data: Sequence[tuple[Tensor, Tensor]]) -> tuple[nn.Module, Work]:
    """Forward and backward of one layer for each input; each has a layer of its own."""
    layers = nn.ModuleList(nn.BatchNorm2d(x.shape[1], device=x.device) for x, _ in data)
    convert(layers, norm)

    def work() -> list[Any]:
        out = []
        for layer, (x, g) in zip(layers, data, strict=True):
            y = layer(x)
            out.append((y, torch.autograd.grad(y, (x, *layer.parameters()), g)))
        return out

    return layers, work


def layer(
    shape: tuple[int, ...], dtype: str, fmt: str, device: torch.device, speed: float, norms: Sequence[str] = ("tbbn",)
) -> dict[str, Any]:
    """One row of the table of layers: time beside batch norm's and the floor of ``speed`` bytes a second; peak memory."""
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
            peaks[norm] = peak(single, device)
        if device.type != "cuda":
            works[norm] = _inside(layers, work)
    seen = race(works, device)
    floor = PASSES * data[0][0].numel() * data[0][0].element_size() / speed
    row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "dtype": dtype, "format": fmt, "floor_us": 1e6 * floor}
    for norm, times in seen.items():
        row[norm] = {"us": 1e6 * median(times) / copies} | _beside(norm, seen, peaks)
    return row


def _beside(norm: str, seen: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, float]:
    """Time and peak memory as multiples of batch norm's."""
    if norm == "bn":
        return {}
    return {"ratio": ratio(seen, norm)} | ({"peak_ratio": peaks[norm] / peaks["bn"]} if peaks["bn"] else {})


def _inside(module: nn.Module, work: Work) -> Work:
    def inside() -> Any:
        with balanced(module):
            return work()

    return inside


# -- Steps ------------------------------------------------------------------------------------------------------------


def step_work(name: str, norm: str, precision: str, size: int, device: torch.device) -> Work:
    """Forward, cross-entropy, backward and SGD on a batch of 64 that lies on the device."""
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


def step(name: str, norms: Sequence[str], precision: str, size: int, device: torch.device) -> dict[str, Any]:
    """One row of the table of steps: milliseconds and ratio to batch norm of each norm; peak memory."""
    known = [norm for norm in dict.fromkeys(("bn", *norms)) if norm in NORMS]
    works, peaks = {}, {}
    run = resolve(("bench", {"precision": precision, "device": device.type}))
    with as_run(run, device):  # float32 as a run has it, which is not torch's default
        for norm in known:
            work = step_work(name, norm, precision, size, device)
            peaks[norm] = peak(work, device)
            works[norm] = captured(work, device)
        seen = race(works, device, seconds=2.0 if device.type == "cuda" else 6.0)
    row: dict[str, Any] = {"backbone": name, "size": size, "precision": precision}
    for norm, times in seen.items():
        row[norm] = {"ms": 1e3 * median(times)} | _beside(norm, seen, peaks)
    return row


# -- Lanes ------------------------------------------------------------------------------------------------------------


def lanes(
    n: int,
    norms: Sequence[str],
    name: str,
    precision: str,
    device: torch.device,
    epochs: int,
    data: str = "synthetic:100x500x1x32",
    tasks: int = 10,
) -> dict[str, Any]:
    """``n`` whole runs at a time on made-up images of CIFAR's size, timed in their second task from epoch to epoch.

    All is counted that a run does there: drawing, augmentation, the captured step, validation.
    """
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
    configs = [
        resolve(("bench", {**settings, "norm.name": norms[i % len(norms)], "seed": i // len(norms)})) for i in range(n)
    ]
    steps: dict[int, int] = {}
    ends: dict[int, list[tuple[float, int]]] = {i: [] for i in range(n)}

    def on_event(lane: int, event: Event) -> None:
        if isinstance(event, Stepped) and event.position.task == 1:
            steps[lane] = steps.get(lane, 0) + 1
        elif isinstance(event, EpochEnded) and event.position.task == 1:
            ends[lane].append((time.perf_counter(), steps[lane]))

    records = run_lanes(configs, n, on_event=on_event)
    # While all are at it: from the last lane's first epoch's end to the first lane's last.
    begin, end = max(e[0][0] for e in ends.values()), min(e[-1][0] for e in ends.values())
    seconds = max(end - begin, 1e-9)
    done = [_between(ends[i], begin, end) for i in range(n)]
    rate = sum(done) / seconds
    own = {
        norm: [seconds / d for d, c in zip(done, configs, strict=True) if c.norm.name == norm and d] for norm in norms
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


def _between(ends: list[tuple[float, int]], begin: float, end: float) -> float:
    """Steps done from ``begin`` to ``end``, epochs cut in proportion."""
    total = 0.0
    for (a, n), (b, m) in pairwise(ends):
        total += (m - n) * max(0.0, min(b, end) - max(a, begin)) / (b - a)
    return total


# -- All of it --------------------------------------------------------------------------------------------------------


def bench(
    device: torch.device,
    *,
    backbones: Sequence[str] = ("resnet32",),
    norms: Sequence[str] = ("bn", "tbbn"),
    precisions: Sequence[str] = ("fp32",),
    n_lanes: Sequence[int] = (1,),
    epochs: int = 4,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Every table; what fails is named in its row, and the others are made all the same."""
    found: dict[str, Any] = {"machine": machine(device), "layers": [], "steps": [], "lanes": []}
    speed = bandwidth(device)
    found["machine"]["copy_gb_per_second"] = f"{speed / 1e9:.0f}"
    others = [norm for norm in norms if norm != "bn"]
    kinds = [("fp32", "nchw"), ("fp32", "channels_last")]
    kinds += [("bf16", "channels_last")] if device.type == "cuda" else []
    shapes = SHAPES if device.type == "cuda" else SHAPES[:3]

    def attempt(table: str, what: str, make: Work) -> None:
        say(f"{table}: {what}")
        try:
            found[table].append(make())
        except torch.OutOfMemoryError:
            found[table].append({"what": what, "failed": "out of memory"})
        if device.type == "cuda":
            torch.cuda.empty_cache()

    for dtype, fmt in kinds:
        for shape in shapes:
            what = f"{'x'.join(map(str, shape))} {dtype} {fmt}"
            attempt(
                "layers", what, lambda s=shape, d=dtype, f=fmt: layer(s, d, f, device, speed, others)  # type: ignore[misc]
            )  # fmt: skip
    for name in backbones:
        size = 224 if name.startswith(("resnet18", "resnet34")) else 32
        for precision in precisions:
            attempt(
                "steps", f"{name} {precision}", lambda n=name, p=precision, s=size: step(n, norms, p, s, device)  # type: ignore[misc]
            )  # fmt: skip
    for n in n_lanes:
        for precision in precisions:
            attempt(
                "lanes",
                f"{n} with {precision}",
                lambda n=n, p=precision: lanes(n, norms, backbones[0], p, device, epochs),  # type: ignore[misc]
            )
    return found
