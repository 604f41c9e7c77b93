"""How fast images arrive: packed sets held in memory, packed sets read while training, and files decoded on the way.

    python benchmarks/data.py tiny-imagenet-200            # packs it with one process and with all, then reads it
    python benchmarks/data.py --made 20000 --side 256      # random images, no decoding; --train times training steps too

Rounds alternate between the candidates; the median, the lowest and the highest of them are printed, as JSON with --json.
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


def made(folder: Path, n: int, side: int) -> None:
    """A packed set of random images in ten classes, a tenth as many to test, in shards of about 256 MiB."""
    folder.mkdir(parents=True)
    shards: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    each = max(1, (1 << 28) // (3 * side * side))
    for part, total in (("train", n), ("test", n // 10)):
        for number, start in enumerate(range(0, total, each)):
            count = min(each, total - start)
            content = os.urandom(count * 3 * side * side)
            file = f"{part}-{number:05}.u8"
            (folder / file).write_bytes(content)
            labels = [[(start + i) % 10, 1] for i in range(count)]
            shards[part].append(asdict(Shard(file, count, hashlib.sha256(content).hexdigest(), "", labels, [])))
    index = {"kind": KIND, "schema": SCHEMA, "shape": [3, side, side], "classes": list("0123456789"), "shards": shards}
    (folder / INDEX).write_text(json.dumps({**index, "sha256": index_digest(index)}))


def packing(source: Path, folder: Path) -> dict[str, Any]:
    """Seconds and images a second of a pack, by the number of processes."""
    from tbbn.bench.data.packed.pack import pack

    found: dict[str, Any] = {}
    for workers in sorted({1, os.cpu_count() or 1}):
        began, cpu = time.perf_counter(), time.process_time()
        outcome = pack(source, folder / f"packed{workers}", workers=workers)
        seconds = time.perf_counter() - began
        found[f"pack, {workers} processes"] = {
            "seconds": round(seconds, 1),
            "images/s": round(outcome.decoded / seconds),
            "parent's CPU seconds": round(time.process_time() - cpu, 1),
            "GiB": round(outcome.packed.n_bytes / 2**30, 2),
        }
    return found


def epochs(
    stored: PackedImages, device: torch.device, files: Path | None, steps: int
) -> dict[str, Callable[[], Iterator[Any]]]:
    """For each candidate: batches of uint8 images on the device, in random order."""
    whole = stored.to(device)
    gathered = DeviceDataset(whole, *[torch.zeros(3)] * 3, None, torch.contiguous_format).gather
    streamed = StreamedImages(stored, device)
    generator = torch.Generator().manual_seed(0)

    def rows() -> list[Tensor]:
        return list(torch.randint(0, stored.shape[0], (steps, BATCH), generator=generator))

    found: dict[str, Callable[[], Iterator[Any]]] = {
        "in memory": lambda: (gathered(part, []) for part in torch.stack(rows()).to(device)),
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


def arriving(candidates: dict[str, Callable[[], Iterator[Any]]], device: torch.device, steps: int, rounds: int) -> dict:
    """Images a second of each candidate; the first batch is not counted, for what begins with it."""
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, batches in candidates.items():
            epoch = batches()
            next(epoch)
            began = time.perf_counter()
            for _ in epoch:
                pass
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates[name].append((steps - 1) * BATCH / (time.perf_counter() - began))
    return {name: _summary(values, "images/s") for name, values in rates.items()}


def _summary(values: list[float], unit: str) -> dict[str, Any]:
    return {unit: round(statistics.median(values)), "range": [round(min(values)), round(max(values))]}


def training(folder: Path, device: str, crop: int, rounds: int) -> dict[str, Any]:
    """Images a second of whole training steps of ResNet-18, with random resized crops; later epochs of one task."""
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
    for how in ("no", "yes", "no", "yes"):
        times: list[float] = []
        job = Run(resolve(("benchmark", {**settings, "data.stream": how})))
        for event in job.events():
            if isinstance(event, Stepped) and event.step in (8, event.steps - 1):
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
                steps = event.steps - 9
            if len(times) == 2 * (rounds + 1):
                break
        spans = [last - first for first, last in zip(times[2::2], times[3::2], strict=True)]
        name = f"training, {'streamed' if how == 'yes' else 'in memory'}"
        found.setdefault(name, []).extend(steps * BATCH / span for span in spans)
    return {name: _summary(values, "images/s") for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, help="a tree of images: train/<class>/*, val/<class>/*")
    parser.add_argument("--made", type=int, default=10000, help="images to make up where no tree is given")
    parser.add_argument("--side", type=int, default=256, help="side of the images made up")
    parser.add_argument("--steps", type=int, default=300, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="time training steps too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as place:
        folder, found = Path(place) / "made", {}
        if chosen.source is not None:
            found = packing(chosen.source, Path(place))
            folder = Path(place) / "packed1"
        else:
            made(folder, chosen.made, chosen.side)
        device = torch.device(chosen.device)
        candidates = epochs(open_packed(folder).images[0], device, chosen.source, chosen.steps)
        found |= arriving(candidates, device, chosen.steps, chosen.rounds)
        if chosen.train:
            del candidates
            found |= training(folder, chosen.device, 224, chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    for name, numbers in found.items():
        print(f"{name.ljust(46)}", ", ".join(f"{key} {value}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
