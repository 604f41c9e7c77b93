"""Your own images in the bench: from a folder, or from arrays.

A folder has one sub-folder for each class, inside `train` and `test`. Here six classes of small striped images are
drawn and saved, then learnt two classes at a time. On the command line the same is

    tbbn run --data folder:PATH --data.tasks 3 --data.size 16 --norm bn,tbbn

Run it with

    python examples/own_data.py
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import tbbn

CLASSES = ("calm", "fine", "wide", "steep", "flat", "dense")
SIZE = 16


def stripes(kind: int, count: int, seed: int) -> np.ndarray:
    """Images (count, 16, 16, 3) of stripes; the class sets their direction and width."""
    noise = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    angle = np.pi * kind / len(CLASSES)
    waves = np.sin((rows * np.sin(angle) + columns * np.cos(angle)) * (0.6 + 0.2 * (kind % 3)))
    images = 128 + 60 * waves[None, :, :, None] + noise.normal(0, 30, (count, SIZE, SIZE, 3))
    return images.clip(0, 255).astype(np.uint8)


def save(root: Path) -> None:
    """A folder of images, as a camera or a script of yours may have left it."""
    for part, count, seed in (("train", 40, 0), ("test", 10, 1)):
        for kind, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i, image in enumerate(stripes(kind, count, seed)):
                Image.fromarray(image).save(folder / f"{i:03}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    settings = {"data.tasks": 3, "memory.budget": 30, "train.epochs": epochs, "backbone": "small"}

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        results = tbbn.run(norm=["bn", "tbbn"], data=f"folder:{folder}", quiet=True, **settings, **{"data.size": SIZE})
    print(results)

    # The same from arrays: images and labels for training, then for testing.
    labels = np.arange(len(CLASSES))
    train = np.concatenate([stripes(kind, 40, 0) for kind in labels]), labels.repeat(40)
    test = np.concatenate([stripes(kind, 10, 1) for kind in labels]), labels.repeat(10)
    (result,) = tbbn.run(norm="tbbn", data=(train, test), quiet=True, **settings)
    print(f"from arrays: {100 * result.metrics['final_accuracy']:.1f} %")


if __name__ == "__main__":
    main()
