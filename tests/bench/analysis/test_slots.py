"""Whether predictions follow the slot of an image, against the same batches forwarded one after the other."""

from __future__ import annotations

import torch
from tinyrun import finish, tiny

import tbbn
from tbbn.bench.analysis.slots import Seen, exchange, last_task, slots, slots_table
from tbbn.bench.engine.loop import Run


def by_hand(run: Run, batches: int) -> dict[str, list[int]]:
    """Images, right and past of every kind, from plain forwards inside ``tbbn.balance``."""
    task = run.scenario.tasks[-1]
    context, old = run.context(task), task.classes.start
    labels = run.train_data.labels
    run.memory.index = run.memory.index[labels[run.memory.index] < old]
    state = {name: tensor.clone() for name, tensor in run.network.state_dict().items()}
    found = {key: [0, 0, 0] for key in ("new_in_current", "new_in_memory", "past_in_memory", "past_in_current")}
    for batch in list(context.batches("slots"))[:batches]:
        n, m = batch.n_current, batch.n_memory
        for order in ([*range(n + m)], [*range(n, n + m), *range(m, n), *range(m)]):  # m rows change places
            run.network.load_state_dict(state)
            run.network.train()
            with torch.no_grad(), tbbn.balance(run.network, current=n, memory=m, past_tasks=2):
                predicted = run.network(batch.images[order]).logits.argmax(1).tolist()
            for slot, row in enumerate(order):
                if order != [*range(n + m)] and m <= slot < n:
                    continue  # it kept its place
                kind = ("new" if row < n else "past") + ("_in_current" if slot < n else "_in_memory")
                found[kind][0] += 1
                found[kind][1] += predicted[slot] == int(batch.labels[row])
                found[kind][2] += predicted[slot] < old
    run.network.load_state_dict(state)
    return found


def test_counts_are_those_of_plain_forwards_and_the_network_stays() -> None:
    run = finish(tiny(norm="tbbn", train__lr=0.2, batch__size=12, data__name="synthetic:6x24x5x8"))
    before = {name: tensor.clone() for name, tensor in run.network.state_dict().items()}
    found = slots(run, batches=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.network.state_dict().items())
    for key, counts in by_hand(run, batches=2).items():
        seen: Seen = getattr(found, key)
        assert [seen.images, seen.right, seen.past] == counts, key
    assert len(slots_table(["a"], [found]).rows) == 6


def test_with_batch_norm_the_slot_does_not_matter() -> None:
    run = finish(tiny(norm="bn", batch__ratio="1:1"))
    found = slots(run, batches=3)
    assert found.new_in_memory == found.new_in_current and found.past_in_current == found.past_in_memory
    assert found.new_eval.images == found.new_in_current.images


def test_rows_change_places() -> None:
    run = finish(tiny(norm="bn", train__epochs=1))
    batch = next(iter(run.context(run.scenario.tasks[-1]).batches("slots")))
    n, m = batch.n_current, batch.n_memory
    swapped = exchange(batch, m)
    assert torch.equal(swapped.images[:m], batch.images[n:]) and torch.equal(swapped.labels[n:], batch.labels[:m])
    assert torch.equal(swapped.images[m:n], batch.images[m:n])


def test_an_online_run_is_tried_with_past_rows_only() -> None:
    run = finish(
        tiny(norm="tbbn", data__online=True, memory__budget=8, data__name="synthetic:6x24x5x8", batch__size=12)
    )
    stored, old = run.memory.index.clone(), run.scenario.tasks[-1].classes.start
    past = int((run.train_data.labels[stored] < old).sum())
    assert 0 < past < len(stored) == run.memory.budget  # the reservoir is full, and holds new rows too
    found = slots(run, batches=2)
    assert found.past_in_memory.images > 0 and found.new_in_current.images > 0
    assert run.memory.index.equal(stored) and run.config.data.online
    for batch in last_task(run).batches("slots"):
        assert bool((batch.labels[batch.memory] < old).all()) and bool((batch.labels[batch.current] >= old).all())
