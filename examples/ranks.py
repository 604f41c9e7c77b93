"""Task-balanced batch norm on several ranks, with statistics over the rows of all of them. What it takes is marked TBBN.

Every rank draws its own rows of the current task and of the memory. The layers normalise as if one process had them all.

    torchrun --nproc-per-node 2 examples/ranks.py
"""

import argparse

import torch
from own_loop import KEPT, digits, network
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tbbn

N_CURRENT, N_MEMORY = 24, 8  # of each rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks draw the same and take their part of it
    x, y, x_test, y_test = digits()
    model = tbbn.convert(network(), sync=True)  # TBBN, 1: before DDP
    ddp = DistributedDataParallel(model)

    memory = torch.tensor([], dtype=torch.int64)
    for task in range(5):
        current = torch.where(y // 2 == task)[0]
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for _ in range(epochs):
            for step in current[torch.randperm(len(current))].split(N_CURRENT * ranks)[:-1]:  # the last is short
                replayed = memory[torch.randint(len(memory), (N_MEMORY * ranks,))] if task else memory
                rows = step[rank::ranks]
                batch = torch.cat([rows, replayed[rank::ranks]])
                with tbbn.balance(model, current=len(rows), memory=len(batch) - len(rows), past_tasks=task):  # TBBN, 2
                    loss = cross_entropy(ddp(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for label in (2 * task, 2 * task + 1):
            memory = torch.cat([memory, torch.where(y == label)[0][:KEPT]])

    model = tbbn.revert(model).eval()  # TBBN, 3: plain batch norm again, to deploy
    if rank == 0:
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        print(f"{ranks} ranks: {100 * accuracy:.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
