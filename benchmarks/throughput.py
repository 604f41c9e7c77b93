"""What the bench costs beyond the network: its training step and evaluation against bare forward and backward passes.

python benchmarks/throughput.py [--quick] [--json] [--threads N]

The bench's step is timed as a run does it, through the engine's generator: drawing the epoch, gathering rows, augmentation
(padded random-resized crop), normalisation, forward, loss, backward, SGD, summing the losses. The bare step is forward,
cross-entropy, backward and SGD of the same network on a tensor that is already there. Rounds of the two alternate, so that
a change in the machine's speed affects both; numbers are medians over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tbbn.bench.config import RunConfig, resolve
from tbbn.bench.data import loading
from tbbn.bench.data.types import Part, Source
from tbbn.bench.engine import Stepped
from tbbn.bench.engine.forward import evaluation_pass
from tbbn.bench.engine.loop import Run
from tbbn.bench.models import LinearHead, Network, backbone

BATCH, CLASSES, EVALUATION = 64, 100, 500
TARGET = 1.15


def fake_cifar(n_train: int, n_test: int) -> Source:
    """Random images of CIFAR-100's shape; the time does not depend on their content."""
    generator = torch.Generator().manual_seed(0)

    def part(n: int) -> Part:
        images = torch.randint(256, (n, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return Part(images, torch.arange(n) % CLASSES)

    stats = (0.5, 0.5, 0.5)
    return Source("fake", part(n_train), part(n_test), tuple(map(str, range(CLASSES))), stats, stats)


def config(threads: int) -> RunConfig:
    return resolve(
        (
            "benchmark",
            {
                "device": "cpu",
                "threads": threads,
                "backbone": "resnet32",
                "data.name": "cifar100",
                "data.tasks": 1,
                "train.epochs": 10**6,
                "batch.size": BATCH,
                "batch.evaluation": EVALUATION,
                "batch.augment": "padded-resized",
                "batch.last": "drop",
            },
        )
    )


def steps_of(run: Run) -> Iterator[None]:
    """One item per training step; the start and end of an epoch count for the step next to them."""
    return (None for event in run.events() if isinstance(event, Stepped))


def bare_network() -> tuple[Network, torch.optim.Optimizer]:
    body = backbone("resnet32", generator=torch.Generator().manual_seed(0))
    network = Network(body, LinearHead(body.n_features))
    network.grow(CLASSES, torch.Generator().manual_seed(0))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)


def bare_steps(images: Tensor, labels: Tensor) -> Iterator[None]:
    network, optimizer = bare_network()
    network.train()
    while True:
        loss = F.cross_entropy(network(images).logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(ours: Callable[[], Any], bare: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Median seconds of both and their median ratio; they take turns going first."""
    pairs = []
    for i in range(rounds):
        if i % 2:
            theirs, mine = seconds(bare), seconds(ours)
        else:
            mine, theirs = seconds(ours), seconds(bare)
        pairs.append((mine, theirs))
    return {
        "bench_s": statistics.median(mine for mine, _ in pairs),
        "bare_s": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
    }


def training(run: Run, rounds: int, n_steps: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    ours, bare = steps_of(run), bare_steps(images, torch.arange(BATCH) % CLASSES)
    for steps in (ours, bare):  # a warm-up
        next(itertools.islice(steps, 2, None))
    found = compare(
        lambda: next(itertools.islice(ours, n_steps - 1, None)),
        lambda: next(itertools.islice(bare, n_steps - 1, None)),
        rounds,
    )
    return {
        "bench_ms": 1e3 * found["bench_s"] / n_steps,
        "bare_ms": 1e3 * found["bare_s"] / n_steps,
        "ratio": found["ratio"],
        "target": TARGET,
    }


def evaluation(run: Run, rounds: int) -> dict[str, float]:
    """All test images through the engine's evaluation, against forward passes over tensors that are already there."""
    rows = torch.arange(len(run.test_data.images))
    ready = [run.test_data.evaluation_images(part, []) for part in rows.split(EVALUATION)]

    @torch.no_grad()
    def bare() -> Tensor:
        network = run.network.eval()
        return torch.cat([network(images).logits.argmax(1) for images in ready])

    def ours() -> Tensor:
        keep = evaluation_pass(run.network, run.test_data, rows, EVALUATION, "fp32", lambda out: out.logits.argmax(1))
        return torch.cat(list(keep))

    found = compare(ours, bare, rounds)
    n = len(rows)
    return {
        "images": n,
        "bench_images_per_s": n / found["bench_s"],
        "bare_images_per_s": n / found["bare_s"],
        "ratio": found["ratio"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and images: rough numbers in half a minute")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = fake_cifar(5000, 2000 if args.quick else 10000)
    loading.load = lambda *_, **__: source
    run = Run(config(args.threads))
    result = {
        "torch": torch.__version__,
        "threads": args.threads,
        "training": training(run, rounds=4 if args.quick else 12, n_steps=5 if args.quick else 10),
        "evaluation": evaluation(run, rounds=4),
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    step, test = result["training"], result["evaluation"]
    print(f"ResNet-32, batch norm, 32x32, torch {result['torch']}, {result['threads']} threads")
    print(f"training step, batch {BATCH}: bench {step['bench_ms']:.1f} ms, bare {step['bare_ms']:.1f} ms", end="")
    print(f", ratio {step['ratio']:.3f} (target at most {TARGET})")
    print(f"evaluation, {test['images']} images: bench {test['bench_images_per_s']:.0f} images/s", end="")
    print(f", bare {test['bare_images_per_s']:.0f} images/s, ratio {test['ratio']:.3f}")


if __name__ == "__main__":
    main()
