"""Usage: random_cifar.py FOLDER. Random images in CIFAR-100's layout, 40 + 10 of each class."""

import pickle
import sys
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
rng = np.random.default_rng(0)
for split, rows in (("train", 40), ("test", 10)):
    images = rng.integers(0, 256, (100 * rows, 3 * 32 * 32), dtype=np.uint8)
    labels = [label for label in range(100) for _ in range(rows)]
    names = [f"{label}_{row}.png".encode() for label in range(100) for row in range(rows)]
    with (folder / split).open("wb") as file:
        pickle.dump({b"data": images, b"fine_labels": labels, b"filenames": names}, file)
with (folder / "meta").open("wb") as file:
    pickle.dump({b"fine_label_names": [f"class{label}".encode() for label in range(100)]}, file)
