"""A run whose images are read while it trains is the run whose images lie in memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from tinyrun import finish, tiny

from tbbn.bench.data import crop
from tbbn.bench.data.augment import normalise
from tbbn.bench.data.loading import load
from tbbn.bench.data.packed.pack import pack
from tbbn.bench.data.packed.stream import Prefetcher, StreamedImages
from tbbn.bench.engine import Stepped
from tbbn.bench.engine.loop import Run
from tbbn.bench.runs.saved import saved


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed set of six classes, twelve images of 8x8 each and five to test, in many small shards."""
    root = tmp_path_factory.mktemp("packed")
    made = load("synthetic:6x12x5x8")
    for part in ("train", "test"):
        stored = getattr(made, part)
        for row, (image, label) in enumerate(zip(stored.images, stored.labels.tolist(), strict=True)):
            file = root / "set" / part / f"{label}" / f"{row:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    pack(root / "set", root / "out", workers=1, shard_bytes=10 * 192)
    return root


CASES: dict[str, dict[str, Any]] = {
    "ft": {"norm__name": "tbbn", "batch__augment": "padded-resized"},
    "afc": {"method__name": "afc", "backbone": "small"},  # a pass over batches between tasks
    "balaug": {"method__name": "balaug", "batch__augment": "resized", "data__crop": 6},  # further views of memory rows
    "bic": {"method__name": "bic", "data__validation": 0.2, "train__keep": "best"},  # phases, and validation
    "online": {"method__name": "er", "data__online": True, "train__epochs": 1, "memory__selection": "reservoir"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_run_equals_a_resident_one(place: Path, case: str) -> None:
    settings = {"data__stop_after": 2, "train__epochs": 1, **CASES[case]}
    resident = finish(tiny(data__name=f"folder:{place / 'set'}", **settings))
    streamed = finish(tiny(data__name=f"packed:{place / 'out'}", data__stream="yes", **settings))
    assert isinstance(streamed.train_data.images, StreamedImages) and isinstance(
        streamed.test_data.images, StreamedImages
    )
    same(streamed, resident)


def same(one: Run, other: Run) -> None:
    assert one.record.history == other.record.history and one.record.accuracy == other.record.accuracy
    assert torch.equal(one.memory.index, other.memory.index)
    weights = other.network.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in one.network.state_dict().items())


def test_a_packed_set_held_in_memory_gives_the_same_run(place: Path) -> None:
    streamed, resident = (finish(tiny(data__name=f"packed:{place / 'out'}", data__stream=how)) for how in ("yes", "no"))
    assert isinstance(resident.train_data.images, torch.Tensor)
    same(streamed, resident)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", ["bn", "tbbn"])
def test_a_streamed_run_equals_a_resident_one_on_a_gpu(place: Path, norm: str) -> None:
    """Blocks of eight steps and more are captured: the graph reads a buffer that each batch is copied into."""
    settings = {"device": "cuda", "batch__size": 4, "train__epochs": 2, "norm__name": norm, "batch__augment": "resized"}
    streamed, resident = (
        finish(tiny(data__name=f"packed:{place / 'out'}", data__stream=how, **settings)) for how in ("yes", "no")
    )
    same(streamed, resident)


def test_streamed_images_are_cropped_as_those_held(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a kernel for the crop, both go through it: its bits are not those of tensor operations."""
    asked = []

    def cropped(augment: Any, images: Any, rows: Any, parameters: Any, mean: Any, std: Any, memory_format: Any) -> Any:
        asked.append(rows is None)
        raw = images if rows is None else images[rows]
        return normalise(augment.apply(raw, parameters), mean, std) * (1 + 2**-20)

    monkeypatch.setattr(crop, "supports", lambda augment, images: isinstance(images, torch.Tensor))
    monkeypatch.setattr(crop, "fused_crop", cropped)
    runs = [finish(tiny(data__name=f"packed:{place / 'out'}", data__stream=how)) for how in ("yes", "no")]
    same(*runs)
    assert asked == [True] * (len(asked) // 2) + [False] * (len(asked) // 2) != []


def test_a_streamed_run_goes_on_in_the_middle_of_an_epoch(place: Path, tmp_path: Path) -> None:
    config = tiny(data__name=f"packed:{place / 'out'}", data__stream="yes")
    whole = finish(config)
    steps = 0

    def stop() -> bool:
        return steps >= 5

    first = Run(config)
    for event in saved(first, tmp_path, stop=stop):
        steps += isinstance(event, Stepped)
    assert first.record.status == "interrupted" and first.position.step
    second = Run(config)
    for _ in saved(second, tmp_path):
        pass
    assert second.record.status == "finished"
    same(second, whole)


def test_a_run_that_waits_for_its_images_lets_others_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(data__name=f"packed:{place / 'out'}", data__stream="yes", data__stop_after=1, train__epochs=1)
    answers = iter([False, True] * 1000)
    monkeypatch.setattr(Prefetcher, "ready", lambda self: next(answers))
    events: list[str] = []
    run = finish(config, lambda _, event: events.append(type(event).__name__))
    assert run.record.status == "finished"
    assert events[:4] == ["Waiting", "Stepped", "Stepped", "Waiting"]
