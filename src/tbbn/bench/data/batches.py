"""Assemble training batches [current ; memory]: gather rows, augment and normalise them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tbbn.bench.data import crop
from tbbn.bench.data.augment import Augment
from tbbn.bench.data.device import DeviceDataset, to_device
from tbbn.bench.data.sampling import IndexBlock
from tbbn.bench.data.types import Batch


@dataclass(frozen=True)
class BatchSpec:
    """Properties common to all batches of a block: their layout, and the number of past tasks and of classes."""

    n_current: int
    n_memory: int  # stored rows; each is seen in `views` views
    views: int  # the first view is augmented like a current row, the others strongly
    past_tasks: int
    n_old_classes: int
    n_classes: int
    has_layout: bool  # rows are [current ; memory]; False for mixed batches

    @property
    def layout(self) -> tuple[int, int]:
        """The current and memory rows that are forwarded, all views counted."""
        return (self.n_current, self.n_memory * self.views) if self.has_layout else (self.base_rows, 0)

    @property
    def base_rows(self) -> int:
        """Current rows, and memory rows in their first view."""
        return self.n_current + self.n_memory

    @property
    def extra_rows(self) -> int:
        """Memory rows in their further views; they follow the base rows."""
        return self.n_memory * (self.views - 1)


@dataclass(frozen=True, eq=False)
class EpochBlock:
    """Consecutive batches of one spec: their rows and augmentation parameters, drawn in advance, on the device."""

    spec: BatchSpec
    index: Tensor  # (steps, base_rows + extra_rows) int64 rows of source.train
    parameters: list[Tensor]  # augmentation (steps, base_rows, k), then strong augmentation (steps, extra_rows, k)

    @property
    def steps(self) -> int:
        return len(self.index)


@dataclass(frozen=True, eq=False)
class BatchMaker:
    """Turns training rows into batches. `draw` makes every random choice; `make_batch` makes none and never waits."""

    data: DeviceDataset
    augment: Augment
    strong: Augment  # of the further views of memory rows

    def draw(self, block: IndexBlock, spec: BatchSpec, generator: torch.Generator) -> EpochBlock:
        """Draw the augmentation parameters of a block on the CPU, and send rows and parameters to the device."""
        index, steps, device = block.index, block.steps, self.data.labels.device
        size = (self.data.images.shape[2], self.data.images.shape[3])
        drawn = [self.augment.draw(steps * spec.base_rows, generator, size)]
        if spec.extra_rows:
            index = torch.cat([index, index[:, spec.n_current :].repeat(1, spec.views - 1)], dim=1)
            drawn.append(self.strong.draw(steps * spec.extra_rows, generator, size))
        parameters = [to_device(values.unflatten(0, (steps, -1)), device) for values in drawn]
        return EpochBlock(spec, to_device(index, device), parameters)

    def make_batch(self, spec: BatchSpec, index: Tensor, inputs: Sequence[Tensor], rows: Tensor | None = None) -> Batch:
        """Gather, augment and normalise the rows `index` on the device.

        `inputs` are the step's parameters as in `EpochBlock`, followed by the prefetched images if the data is streamed. `rows`,
        ascending positions in the batch, restricts the batch's images to these; only these were prefetched.
        """
        mine, n_base = index, spec.base_rows
        if rows is not None:
            # Without extra views there is no host sync.
            mine, n_base = index[rows], int((rows < n_base).sum()) if spec.extra_rows else len(rows)
            drawn = [inputs[0][rows[:n_base]]]
            if spec.extra_rows:
                drawn.append(inputs[1][rows[n_base:] - spec.base_rows])
            inputs = [*drawn, *inputs[len(drawn) :]]
        return Batch(
            images=self._images(mine, inputs, n_base),
            labels=self.data.labels[index],
            index=index,
            n_current=spec.layout[0],
            n_memory=spec.layout[1],
            n_old_classes=spec.n_old_classes,
            n_classes=spec.n_classes,
        )

    def _images(self, index: Tensor, inputs: Sequence[Tensor], n: int) -> Tensor:
        """The images of the rows `index`; those from the `n`-th on are strongly augmented."""
        data, has_extra = self.data, n < len(index)
        stored, rows = data.locate(index, inputs)
        if not has_extra and crop.supports(self.augment, stored):
            return crop.fused_crop(self.augment, stored, rows, inputs[0], data.mean, data.std, data.memory_format)
        raw = data.gather(index, inputs)
        if not has_extra:
            return data.normalised(self.augment.apply(raw, inputs[0]))
        views = [self.augment.apply(raw[:n], inputs[0]), self.strong.apply(raw[n:], inputs[1])]
        return data.normalised(torch.cat(views))
