"""What task-balanced batch norm costs beside `nn.BatchNorm2d`, on a CPU: time and memory, as ratios.

    python benchmarks/norm.py [--quick] [--json] [--threads 2]

Forward and backward of one layer at r = 16, a whole training step of ResNet-32, and the activations kept for backward.
Every round times each candidate once, in alternating order. A figure is the median over rounds of the candidate's time divided
by batch norm's in the same round, so a busy machine disturbs both alike. `pytorch` is the layer without its compiled kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tbbn
from tbbn.accelerators import eager
from tbbn.accelerators.backend import only
from tbbn.accelerators.native import binding as native
from tbbn.bench.models import backbone

SHAPES = [(64, 16, 32, 32), (64, 32, 16, 16), (64, 64, 8, 8)]
FORMATS = {"channels_last": torch.channels_last, "NCHW": torch.contiguous_format}
LAYOUT = {"current": 48, "memory": 16, "past_tasks": 6}  # r = 16
TARGETS = {"layer channels_last": 1.0, "layer NCHW": 1.2, "resnet32": 1.03, "memory": 1.05}


class Literal(nn.BatchNorm2d):
    """The layer as the paper writes it: splits as extra channels, memory rows copied into every split."""

    def forward(self, x: Tensor) -> Tensor:
        current, r, rows = LAYOUT["current"], 16, LAYOUT["current"] // 16
        mean, var, weight, bias = (t.repeat(r) for t in (self.running_mean, self.running_var, self.weight, self.bias))
        splits = torch.cat([x[:current].reshape(rows, -1, *x.shape[2:]), x[current:].repeat(1, r, 1, 1)])
        y = F.batch_norm(splits, mean, var, weight, bias, True, self.momentum, self.eps)
        self.running_mean.copy_(mean.view(r, -1).mean(0))
        self.running_var.copy_(var.view(r, -1).mean(0))
        memory = y[rows:].reshape(-1, r, *x.shape[1:]).mean(1)
        return torch.cat([y[:rows].reshape(current, *x.shape[1:]), memory])


def times(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every candidate in every round."""
    for call in candidates.values():
        for _ in range(3):
            call()
    seen: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds):
        for name, call in list(candidates.items())[:: 1 if i % 2 else -1]:
            start = perf_counter()
            call()
            seen[name].append(1e3 * (perf_counter() - start))
    return seen


def ratio(seen: dict[str, list[float]], name: str) -> float:
    return median(a / b for a, b in zip(seen[name], seen["bn"], strict=True))


def step(module: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    def call() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        module(x).backward(grad)

    return call


def without_kernel(call: Callable[[], None]) -> Callable[[], None]:
    """The same call on the eager backend."""

    def run() -> None:
        with only(eager):
            call()

    return run


def layer_rows(rounds: int) -> list[dict[str, object]]:
    rows = []
    for shape in SHAPES:
        for name, memory_format in FORMATS.items():
            x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
            grad = torch.randn(shape).to(memory_format=memory_format)
            ours, literal = tbbn.TaskBalancedBatchNorm2d(shape[1]), Literal(shape[1])
            with tbbn.balance(ours, **LAYOUT):
                torch.testing.assert_close(literal(x), ours(x), rtol=1e-4, atol=1e-4)
                plain, mine = step(nn.BatchNorm2d(shape[1]), x, grad), step(ours, x, grad)
                seen = times({"bn": plain, "tbbn": mine}, rounds)
                slow = times({"bn": plain, "pytorch": without_kernel(mine)}, max(3, rounds // 3))
                slowest = times({"bn": plain, "literal": step(literal, x, grad)}, max(3, rounds // 20))
            rows.append(
                {
                    "what": f"layer {name}",
                    "shape": str(shape),
                    "bn_ms": median(seen["bn"]),
                    "tbbn": ratio(seen, "tbbn"),
                    "pytorch": ratio(slow, "pytorch"),
                    "literal": ratio(slowest, "literal"),
                }
            )
    return rows


def networks(memory_format: torch.memory_format) -> dict[str, nn.Module]:
    return {
        norm: tbbn.convert(backbone("resnet32"), norm).to(memory_format=memory_format).train()
        for norm in ("bn", "tbbn")
    }


def network_rows(rounds: int) -> list[dict[str, object]]:
    rows = []
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(64, (64,))
    for name, memory_format in FORMATS.items():
        models, x = networks(memory_format), images.to(memory_format=memory_format)

        def call(model: nn.Module, x: Tensor = x) -> Callable[[], None]:
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

            def train() -> None:
                optimizer.zero_grad()
                if tbbn.nn.is_balanced(model):
                    with tbbn.balance(model, **LAYOUT):
                        pooled = model(x).pooled
                else:
                    pooled = model(x).pooled
                nn.functional.cross_entropy(pooled, labels).backward()
                optimizer.step()

            return train

        seen = times({norm: call(model) for norm, model in models.items()}, rounds)
        rows.append(
            {
                "what": "resnet32",
                "shape": f"(64, 3, 32, 32) {name}",
                "bn_ms": median(seen["bn"]),
                "tbbn": ratio(seen, "tbbn"),
            }
        )
    return rows


def kept(forward: Callable[[], object], parameters: set[int]) -> int:
    """Bytes of activations and statistics that a forward keeps for its backward, each storage once."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward()  # kept alive until counted: a freed storage's address is used again
    del result
    return sum(storages.values())


def memory_rows() -> list[dict[str, object]]:
    rows = []
    images = torch.randn(64, 3, 32, 32)
    sizes = {}
    for norm, model in networks(torch.channels_last).items():
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        if norm == "bn":
            sizes[norm] = kept(lambda model=model: model(images), own)
        else:
            with tbbn.balance(model, **LAYOUT):
                sizes[norm] = kept(lambda model=model: model(images), own)
    rows.append({"what": "memory", "shape": "resnet32, batch 64", "bn_mib": sizes["bn"] / 2**20})
    rows[-1]["tbbn"] = sizes["tbbn"] / sizes["bn"]
    for shape in SHAPES:
        x = torch.randn(shape, requires_grad=True)
        plain, ours = nn.BatchNorm2d(shape[1]), tbbn.TaskBalancedBatchNorm2d(shape[1])
        bn = kept(lambda x=x, plain=plain: plain(x), set())
        with tbbn.balance(ours, **LAYOUT):
            mine = kept(lambda x=x, ours=ours: ours(x), set())
        rows.append({"what": "memory", "shape": f"layer {shape}", "bn_mib": bn / 2**20, "tbbn": mine / bn})
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print(f"CPU kernel: {native.status()}")
    print(f"{'what':20} {'shape':28} {'batch norm':>12} {'tbbn':>7} {'pytorch':>8} {'literal':>8} {'target':>7}")
    for row in rows:
        base = f"{row['bn_ms']:.2f} ms" if "bn_ms" in row else f"{row['bn_mib']:.1f} MiB"
        pytorch = f"{row['pytorch']:.2f}x" if "pytorch" in row else ""
        literal = f"{row['literal']:.1f}x" if "literal" in row else ""
        target = TARGETS[str(row["what"])]
        print(
            f"{row['what']:20} {row['shape']:28} {base:>12} {row['tbbn']:6.2f}x {pytorch:>8} {literal:>8} {target:6.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds: seconds instead of a minute")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    layer_rounds, network_rounds = (20, 2) if arguments.quick else (300, 20)
    rows = [*layer_rows(layer_rounds), *network_rows(network_rounds), *memory_rows()]
    if arguments.json:
        print(
            json.dumps(
                {"torch": torch.__version__, "threads": arguments.threads, "kernel": native.status(), "rows": rows},
                indent=1,
            )
        )
    else:
        show(rows)


if __name__ == "__main__":
    main()
