"""Train one run in several processes (ranks): how rows are divided, and what the ranks exchange.

Every rank has all data, the same weights and the same random draws. In a training step:

    the batch       is drawn as in a single process; each rank takes its share of the current and of the memory rows
    the norms       compute their statistics over the rows of all ranks (``tbbn.convert(..., sync=True)``)
    the outputs     are gathered, so that each rank has the loss of the whole batch, whatever the method computes from it
    the gradients   of that loss, each rank's from its own rows, are summed over the ranks

So the weights stay equal on all ranks and, up to rounding, equal to those of a single process. Evaluation, herding and all other
passes in eval mode are also divided and gathered. :class:`Ranks` is for a single process, :class:`ProcessRanks` for several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tbbn.bench.data.types import Batch
from tbbn.bench.models import Output
from tbbn.nn.sync import Counts


class Share:
    """A rank's share of the batches of one layout. This class is for a single process, which has everything."""

    rows: Tensor | None = None  # positions in the whole batch; None: all
    counts: Counts | None = None  # of all ranks; None: a single process

    def take(self, index: Tensor) -> Tensor:
        """The entries of this rank's rows from ``index`` (..., rows)."""
        return index

    def of(self, batch: Batch) -> Batch:
        """This rank's part of a batch whose images are already only this rank's."""
        return batch

    def whole(self, output: Output, *, stages: bool) -> Output:
        """The output on the whole batch, gathered from all ranks; with ``stages``, also the maps of the stages."""
        return output


class Ranks:
    """The processes that train a run together, as one of them sees it. This class is for a single process."""

    rank, size = 0, 1

    def share(self, layout: tuple[int, int], device: torch.device) -> Share:
        """This rank's share of batches on a device with ``layout`` = (current rows, memory rows)."""
        return Share()

    def part(self, rows: Tensor) -> Tensor:
        """This rank's part of the rows for a pass in eval mode."""
        return rows

    def gather(self, values: Tensor, n_rows: int) -> Tensor:
        """The values (n_rows, ...) of all rows, gathered from the values of each rank's ``part``."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over the ranks."""

    def once(self, term: Tensor) -> Tensor:
        """A loss term that every rank computes in full, scaled so that gradients summed over ranks count it once."""
        return term

    def any(self, value: bool) -> bool:
        """Whether the value is true on any rank."""
        return value

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values to all ranks, in place."""

    @contextmanager
    def alone(self, network: nn.Module) -> Iterator[None]:
        """Turn off synchronisation of the norms inside the block, where every rank forwards the same whole batch."""
        yield

    def announce(self, state: bytes) -> None:
        """Send the other ranks the state in which a run starts; from here on they take part in it."""

    def ended(self) -> None:
        """Mark the announced run as over, on all ranks at the same event."""


ALONE = Ranks()


class ProcessRanks(Ranks):
    """Several processes, joined by ``torch.distributed``."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_running = False  # whether the other ranks take part in a run, or wait for an announcement

    def share(self, layout: tuple[int, int], device: torch.device) -> Share:
        return ProcessShare(self.rank, self.size, layout, device)

    def part(self, rows: Tensor) -> Tensor:
        return _piece(rows, self.rank, self.size)

    def gather(self, values: Tensor, n_rows: int) -> Tensor:
        return _gather_rows(values, [len(_piece(torch.arange(n_rows), k, self.size)) for k in range(self.size)])

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def once(self, term: Tensor) -> Tensor:
        return term.detach() + (term - term.detach()) / self.size

    def any(self, value: bool) -> bool:
        flag = torch.tensor(int(value))  # on the CPU: the host needs the result, and the device may lag far behind
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, 0)
            tensor.detach().copy_(dense)

    @contextmanager
    def alone(self, network: nn.Module) -> Iterator[None]:
        synced = [layer for layer in network.modules() if getattr(layer, "sync", False)]
        for layer in synced:
            layer.sync = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for layer in synced:
                layer.sync = True  # type: ignore[assignment]

    def announce(self, state: bytes) -> None:
        self._broadcast(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self.is_running = True

    def ended(self) -> None:
        self.is_running = False

    def receive(self) -> bytes:
        """Wait for rank 0's next announcement; empty means that there is nothing more to do."""
        content = self._broadcast(None).numpy().tobytes()
        self.is_running = bool(content)
        return content

    def dismiss(self) -> None:
        """End the other ranks, if they wait for an announcement."""
        if not self.is_running:
            self._broadcast(torch.empty(0, dtype=torch.uint8))

    def _broadcast(self, content: Tensor | None) -> Tensor:
        size = torch.tensor(0 if content is None else len(content))
        dist.broadcast(size, 0)
        content = torch.empty(int(size), dtype=torch.uint8) if content is None else content
        if len(content):
            dist.broadcast(content, 0)
        return content


class ProcessShare(Share):
    """The share of one of several ranks: a piece of the current rows and a piece of the memory rows, each consecutive."""

    rows: Tensor
    counts: Counts

    def __init__(self, rank: int, size: int, layout: tuple[int, int], device: torch.device) -> None:
        current, memory = torch.arange(sum(layout)).split(layout)
        pieces = [torch.cat([_piece(current, k, size), _piece(memory, k, size)]) for k in range(size)]
        self.counts = [(len(_piece(current, k, size)), len(_piece(memory, k, size))) for k in range(size)]
        self.own_counts = self.counts[rank]
        self.rows = pieces[rank].to(device)
        # The position of each row of the whole batch in the concatenated outputs of rank 0, 1, ...
        self.order = torch.cat(pieces).argsort().to(device)

    def take(self, index: Tensor) -> Tensor:
        return index[..., self.rows.to(index.device)]

    def of(self, batch: Batch) -> Batch:
        current, memory = self.own_counts
        labels, index = self.take(batch.labels), self.take(batch.index)
        return replace(batch, labels=labels, index=index, n_current=current, n_memory=memory)

    def whole(self, output: Output, *, stages: bool) -> Output:
        return replace(
            output,
            logits=_Whole.apply(output.logits, self),
            features=_Whole.apply(output.features, self),
            stages=tuple(_Whole.apply(maps, self) for maps in output.stages) if stages else (),
            similarity=None if output.similarity is None else _Whole.apply(output.similarity, self),
        )


class _Whole(torch.autograd.Function):
    """Gathers the rows of all ranks in the order of the whole batch. Backward keeps only this rank's rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: ProcessShare) -> Tensor:
        ctx.share = share
        gathered = _gather_rows(values, [sum(count) for count in share.counts])
        return gathered[share.order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.share.rows], None


def _piece(rows: Tensor, rank: int, size: int) -> Tensor:
    return rows[len(rows) * rank // size : len(rows) * (rank + 1) // size]


def _gather_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Concatenate the rows of rank 0, 1, ... All ranks must send the same size, so shorter parts are padded."""
    padded = values.new_zeros(max(lengths), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])
