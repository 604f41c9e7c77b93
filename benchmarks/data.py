"""Images per second from packed sets in memory, from packed sets streamed from disk, and from files decoded on the fly.

    python benchmarks/data.py tiny-imagenet-200            # pack it with one process and with all, then read it
    python benchmarks/data.py --generate 20000 --side 256  # random images, no decoding; --train times training steps too

Rounds alternate between the candidates. Prints the median, the lowest and the highest of them; --json prints JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbbn.bench.config import resolve
from tbbn.bench.data.device import DeviceDataset
from tbbn.bench.data.packed.index import INDEX, KIND, SCHEMA, PackedImages, index_digest, open_packed
from tbbn.bench.data.packed.shards import Shard
from tbbn.bench.data.packed.stream import StreamedImages
from tbbn.bench.engine import Stepped
from tbbn.bench.engine.loop import Run

BATCH = 64


def generate(folder: Path, n: int, side: int) -> None:
    """Write a packed set of random images of ten classes, with n / 10 test images, in shards of about 256 MiB."""
    folder.mkdir(parents=True)
    shards: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    per_shard = max(1, (1 << 28) // (3 * side * side))
    for part, total in (("train", n), ("test", n // 10)):
        for number, start in enumerate(range(0, total, per_shard)):
            count = min(per_shard, total - start)
            content = os.urandom(count * 3 * side * side)
            file = f"{part}-{number:05}.u8"
            (folder / file).write_bytes(content)
            labels = [[(start + i) % 10, 1] for i in range(count)]
            shards[part].append(asdict(Shard(file, count, hashlib.sha256(content).hexdigest(), "", labels, [])))
    index = {"kind": KIND, "schema": SCHEMA, "shape": [3, side, side], "classes": list("0123456789"), "shards": shards}
    (folder / INDEX).write_text(json.dumps({**index, "sha256": index_digest(index)}))


def time_packing(source: Path, folder: Path) -> dict[str, Any]:
    """Packing speed, by the number of processes."""
    from tbbn.bench.data.packed.pack import pack

    found: dict[str, Any] = {}
    for workers in sorted({1, os.cpu_count() or 1}):
        start, cpu = time.perf_counter(), time.process_time()
        result = pack(source, folder / f"packed{workers}", workers=workers)
        seconds = time.perf_counter() - start
        found[f"pack, {workers} processes"] = {
            "seconds": round(seconds, 1),
            "images/s": round(result.decoded / seconds),
            "parent's CPU seconds": round(time.process_time() - cpu, 1),
            "GiB": round(result.packed.n_bytes / 2**30, 2),
        }
    return found


def candidates_of(
    images: PackedImages, device: torch.device, files: Path | None, steps: int
) -> dict[str, Callable[[], Iterator[Any]]]:
    """For each candidate a function that starts an epoch of uint8 batches on the device, in random order."""
    data = DeviceDataset(images.to(device), *[torch.zeros(3)] * 3, None, torch.contiguous_format)
    streamed = StreamedImages(images, device)
    generator = torch.Generator().manual_seed(0)

    def rows() -> list[Tensor]:
        return list(torch.randint(0, images.shape[0], (steps, BATCH), generator=generator))

    found: dict[str, Callable[[], Iterator[Any]]] = {
        "in memory": lambda: (data.gather(batch, []) for batch in torch.stack(rows()).to(device)),
        "streamed": lambda: (batch for (batch,) in streamed.prefetch(rows())),
    }
    if files is not None:
        found["files, decoded by a DataLoader of 2 processes"] = lambda: _decoded(files, device, steps)
    return found


def _decoded(files: Path, device: torch.device, steps: int) -> Iterator[Any]:
    from tbbn.bench.vision import torchvision

    torchvision()
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.v2 import PILToTensor

    images = ImageFolder(str(files / "train"), PILToTensor())
    sampler = RandomSampler(images, num_samples=steps * BATCH)
    for batch, _ in DataLoader(images, BATCH, sampler=sampler, num_workers=2, pin_memory=device.type == "cuda"):
        yield batch.to(device, non_blocking=True)


def time_epochs(
    candidates: dict[str, Callable[[], Iterator[Any]]], device: torch.device, steps: int, rounds: int
) -> dict:
    """Images per second of each candidate, without the first batch, which starts threads or processes."""
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, batches in candidates.items():
            epoch = batches()
            next(epoch)
            start = time.perf_counter()
            for _ in epoch:
                pass
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates[name].append((steps - 1) * BATCH / (time.perf_counter() - start))
    return {name: _summary(values, "images/s") for name, values in rates.items()}


def _summary(values: list[float], unit: str) -> dict[str, Any]:
    return {unit: round(statistics.median(values)), "range": [round(min(values)), round(max(values))]}


def time_training(folder: Path, device: str, crop: int, rounds: int) -> dict[str, Any]:
    """Images per second of training ResNet-18 with random resized crops, in all epochs of a task but the first."""
    settings = {
        "data.name": f"packed:{folder}",
        "data.tasks": 1,
        "data.crop": crop,
        "batch.augment": "resized",
        "batch.size": BATCH,
        "backbone": "resnet18",
        "train.epochs": rounds + 1,
        "train.lr": 0.01,
        "memory.budget": 0,
        "device": device,
        "precision": "bf16" if device == "cuda" else "fp32",
    }
    found = {}
    for stream in ("no", "yes", "no", "yes"):
        times: list[float] = []
        job = Run(resolve(("benchmark", {**settings, "data.stream": stream})))
        for event in job.events():
            if isinstance(event, Stepped) and event.step in (8, event.steps - 1):
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
                steps = event.steps - 9
            if len(times) == 2 * (rounds + 1):
                break
        spans = [last - first for first, last in zip(times[2::2], times[3::2], strict=True)]
        name = f"training, {'streamed' if stream == 'yes' else 'in memory'}"
        found.setdefault(name, []).extend(steps * BATCH / span for span in spans)
    return {name: _summary(values, "images/s") for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, help="a folder of images: train/<class>/*, val/<class>/*")
    parser.add_argument("--generate", type=int, default=10000, help="images to generate if no folder is given")
    parser.add_argument("--side", type=int, default=256, help="side of the generated images")
    parser.add_argument("--steps", type=int, default=300, help="batches per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="time training steps too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as place:
        folder, found = Path(place) / "generated", {}
        if args.source is not None:
            found = time_packing(args.source, Path(place))
            folder = Path(place) / "packed1"
        else:
            generate(folder, args.generate, args.side)
        device = torch.device(args.device)
        candidates = candidates_of(open_packed(folder).images[0], device, args.source, args.steps)
        found |= time_epochs(candidates, device, args.steps, args.rounds)
        if args.train:
            del candidates
            found |= time_training(folder, args.device, 224, args.rounds)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, numbers in found.items():
        print(f"{name.ljust(46)}", ", ".join(f"{key} {value}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
