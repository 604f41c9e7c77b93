from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tbbn.bench import seeds
from tbbn.bench.data.memory import Reservoir
from tbbn.bench.data.sampling import (
    EPOCH_LENGTHS,
    LAST_BATCHES,
    IndexBlock,
    balanced_rows,
    batch_layout,
    epoch_blocks,
    online_blocks,
    steps_per_epoch,
)
from tbbn.errors import UserError

NONE = torch.empty(0, dtype=torch.int64)


def gen(*names):
    return seeds.generator(0, *names)


def sets(n_current, n_memory):
    return torch.arange(n_current), 10_000 + torch.arange(n_memory)


def blocks_of(n_current, n_memory, **options):
    current, memory = sets(n_current, n_memory)
    return epoch_blocks(current, memory, generator=gen("epoch"), **{"batch_size": 64, **options})


def layouts(blocks):
    return [(block.steps, block.n_current, block.n_memory) for block in blocks]


def slow_steps(n_current, n_memory, n_c, n_m, length, last):
    """Two lists of batch widths, one cycled by itertools, step by step: the loop of the released code."""

    def widths(n, part):
        return [len(range(n)[i : i + part]) for i in range(0, n, part)]

    current, memory = widths(n_current, n_c), [n_m] if n_memory < n_m else widths(n_memory, n_m)
    steps = {"longer": max(len(current), len(memory)), "current": len(current), "memory": len(memory)}[length]
    pairs = list(itertools.islice(zip(itertools.cycle(current), itertools.cycle(memory), strict=False), steps))
    full = (min(n_c, n_current), n_m)
    return [pair for pair in pairs if last == "short" or pair == full]


def test_papers_iterations_per_epoch_on_cifar():
    sizes = [2000, 2000, 2010, 2000, 2000, 2040, 2030, 2000, 2070]
    expected = [124, 124, 124, 124, 124, 126, 125, 124, 128]
    assert [sum(b.steps for b in blocks_of(4500, m, last="drop")) for m in sizes] == expected
    assert [steps_per_epoch(4500, m, batch_size=64, last="drop") for m in sizes] == expected
    assert (
        steps_per_epoch(4500, 0, batch_size=64, last="drop")
        == sum(b.steps for b in blocks_of(4500, 0, last="drop"))
        == 70
    )


def test_papers_other_epoch_lengths():
    assert steps_per_epoch(2250, 2000, batch_size=64, last="drop") == 123  # CIFAR in 20 tasks
    assert steps_per_epoch(11_700, 2000, batch_size=64, last="drop") == 243  # ImageNet-100
    assert steps_per_epoch(6500, 2000, batch_size=64, last="drop") == 135  # current rows joined with the memory
    assert steps_per_epoch(6510, 2010, batch_size=64, last="drop") == 134


def test_a_whole_epoch_is_one_block_of_the_papers_layout():
    (block,) = blocks_of(4500, 2000, last="drop")
    assert (block.steps, block.n_current, block.n_memory) == (124, 48, 16)
    assert block.index.shape == (124, 64)
    assert (block.index[:, :48] < 10_000).all()
    assert (block.index[:, 48:] >= 10_000).all()


def test_short_batches_are_kept_in_their_place():
    assert layouts(blocks_of(4500, 2000, last="short")) == [(93, 48, 16), (1, 36, 16), (31, 48, 16)]
    assert layouts(blocks_of(4500, 2010, last="short")) == [(93, 48, 16), (1, 36, 16), (31, 48, 16), (1, 48, 10)]
    assert layouts(blocks_of(200, 0)) == [(3, 64, 0), (1, 8, 0)]
    assert layouts(blocks_of(192, 0)) == [(3, 64, 0)]


def test_each_pass_holds_every_row_once_and_is_shuffled_anew():
    blocks = blocks_of(100, 320, batch_size=64, last="short")  # 3 and 20 batches
    steps = [row for block in blocks for row in block.index]
    current = torch.cat([row[row < 10_000] for row in steps])
    memory = torch.cat([row[row >= 10_000] for row in steps])
    passes = current[:600].view(6, 100)
    assert all(sorted(p.tolist()) == list(range(100)) for p in passes)
    assert len({tuple(p.tolist()) for p in passes}) == 6
    assert sorted(memory.tolist()) == list(range(10_000, 10_320))


def test_length_follows_the_set_it_names():
    assert layouts(blocks_of(480, 2000, length="current", last="short")) == [(10, 48, 16)]
    assert layouts(blocks_of(480, 48, length="memory", last="short")) == [(3, 48, 16)]
    assert layouts(blocks_of(480, 48, length="longer", last="short")) == [(10, 48, 16)]


def test_fewer_memory_rows_than_their_part_repeat_evenly():
    (block,) = blocks_of(48 * 10, 5)
    assert (block.n_current, block.n_memory) == (48, 16)
    counts = torch.bincount(block.index[:, 48:].flatten() - 10_000)
    assert counts.tolist() == [32] * 5
    assert all(len(set(row.tolist())) == 5 for row in block.index[:, 48:])


@pytest.mark.parametrize("last", LAST_BATCHES)
def test_fewer_current_rows_than_their_part_make_smaller_batches(last):
    assert layouts(blocks_of(20, 64, last=last)) == [(4, 20, 16)]
    assert layouts(blocks_of(20, 0, last=last)) == [(1, 20, 0)]


@settings(deadline=None)
@given(
    n_current=st.integers(1, 150),
    n_memory=st.integers(0, 150),
    batch_size=st.integers(2, 24),
    ratio=st.sampled_from([(3, 1), (1, 1), (2, 3), (7, 1)]),
    length=st.sampled_from(EPOCH_LENGTHS),
    last=st.sampled_from(LAST_BATCHES),
)
def test_blocks_and_step_count_follow_the_loop_written_out(n_current, n_memory, batch_size, ratio, length, last):
    if batch_size * ratio[0] // sum(ratio) == 0:
        return
    options = {"batch_size": batch_size, "ratio": ratio, "length": length, "last": last}
    current, memory = sets(n_current, n_memory)
    blocks = epoch_blocks(current, memory, generator=gen("property"), **options)
    pairs = [(b.n_current, b.n_memory) for b in blocks for _ in range(b.steps)]
    if n_memory:
        n_c = batch_size * ratio[0] // sum(ratio)
        expected = slow_steps(n_current, n_memory, n_c, batch_size - n_c, length, last)
    else:
        whole, tail = divmod(n_current, min(batch_size, n_current))
        expected = [(min(batch_size, n_current), 0)] * whole + [(tail, 0)] * (tail > 0 and last == "short")
    assert pairs == expected
    assert pairs
    assert steps_per_epoch(n_current, n_memory, **options) == len(pairs)
    assert all(a != b for a, b in itertools.pairwise([(b.n_current, b.n_memory) for b in blocks]))
    for block in blocks:
        assert set(block.index[:, : block.n_current].flatten().tolist()) <= set(current.tolist())
        assert set(block.index[:, block.n_current :].flatten().tolist()) <= set(memory.tolist())
        assert all(len(set(row.tolist())) == block.n_current for row in block.index[:, : block.n_current])


def test_an_epoch_is_a_function_of_the_generator_alone():
    torch.manual_seed(0)
    first = blocks_of(300, 100)
    torch.manual_seed(1)
    again = blocks_of(300, 100)
    assert all(torch.equal(a.index, b.index) for a, b in zip(first, again, strict=True))
    other = epoch_blocks(*sets(300, 100), batch_size=64, generator=gen("other"))
    assert not torch.equal(first[0].index, other[0].index)


@pytest.mark.parametrize(
    ("batch_size", "ratio", "expected"),
    [
        (64, (3, 1), (48, 16)),
        (20, (1, 1), (10, 10)),
        (128, (3, 1), (96, 32)),
        (2, (3, 1), (1, 1)),
        (10, (3, 1), (7, 3)),
    ],
)
def test_layout_of_a_full_batch(batch_size, ratio, expected):
    assert batch_layout(batch_size, ratio) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1}, "batch_size 1 at ratio 3:1 leaves no current rows; use a batch_size of at least 2"),
        ({"batch_size": 4, "ratio": (1, 7)}, "batch_size 4 at ratio 1:7 .* at least 8"),
        ({"ratio": (3, 0)}, "both parts of the ratio must be at least 1, got 3:0"),
        ({"length": "longest"}, "unknown epoch length 'longest'.*'longer'"),
        ({"last": "drp"}, "unknown last batch 'drp'.*'drop'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_impossible_batches_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        blocks_of(100, 100, **options)
    with pytest.raises(UserError, match=message):
        steps_per_epoch(100, 100, **{"batch_size": 64, **options})


def test_an_epoch_without_current_rows_is_refused():
    with pytest.raises(UserError, match="an epoch needs current rows, got none"):
        blocks_of(0, 100)


def test_balanced_rows_are_a_random_subset_of_each_class():
    rows, labels = 100 + torch.arange(40), torch.arange(40) % 4
    chosen = balanced_rows(rows, labels, 3, gen("balanced"))
    assert labels[chosen - 100].tolist() == [c for c in range(4) for _ in range(3)]
    assert len(set(chosen.tolist())) == 12
    assert not torch.equal(chosen, balanced_rows(rows, labels, 3, gen("other")))
    assert sorted(balanced_rows(rows, labels, 99, gen()).tolist()) == rows.tolist()


def test_block_width_must_be_its_layout():
    with pytest.raises(AssertionError, match="as wide as its layout"):
        IndexBlock(torch.zeros(3, 5, dtype=torch.int64), 3, 1)


def online(n, reservoir, name="stream", **options):
    options = {"batch_size": 20, "ratio": (1, 1), **options}
    return online_blocks(torch.arange(n), reservoir, generator=gen(name), **options)


def test_an_online_pass_sees_each_row_once_and_replays_what_has_passed():
    blocks, after = online(205, Reservoir(50, NONE, 0))
    assert layouts(blocks) == [(1, 10, 0), (19, 10, 10), (1, 5, 10)]
    assert steps_per_epoch(205, 0, batch_size=20, ratio=(1, 1), online=True) == 21
    passed = []
    for block in blocks:
        for row in block.index.tolist():
            assert set(row[block.n_current :]) <= set(passed)
            assert len(set(row[block.n_current :])) == block.n_memory
            passed += row[: block.n_current]
    assert sorted(passed) == list(range(205))
    assert after.seen == 205
    assert len(set(after.index.tolist())) == 50


def test_an_online_pass_drops_a_short_batch_on_demand():
    blocks, after = online(205, Reservoir(50, NONE, 0), last="drop")
    assert layouts(blocks) == [(1, 10, 0), (19, 10, 10)]
    assert steps_per_epoch(205, 0, batch_size=20, ratio=(1, 1), last="drop", online=True) == 20
    assert after.seen == 200


def test_an_online_pass_replays_only_past_rows_on_demand():
    past = Reservoir(50, 1000 + torch.arange(50), 300)
    blocks, after = online(205, past, past_only=True)
    assert layouts(blocks) == [(20, 10, 10), (1, 5, 10)]
    assert all((block.index[:, block.n_current :] >= 1000).all() for block in blocks)
    mixed, same = online(205, past)
    assert any((block.index[:, block.n_current :] < 1000).any() for block in mixed)
    assert after.seen == same.seen == 505
    assert (after.index < 1000).any()
    first, _ = online(205, Reservoir(50, NONE, 0), past_only=True)
    assert layouts(first) == [(20, 10, 0), (1, 5, 0)]


def test_a_past_row_is_replayed_only_while_it_is_stored(monkeypatch):
    past = Reservoir(20, 1000 + torch.arange(20), 20)
    stored = [past]
    real = Reservoir.update
    monkeypatch.setattr(Reservoir, "update", lambda *arguments: stored.append(real(*arguments)) or stored[-1])
    blocks, after = online(100, past, past_only=True)
    replayed = [row[block.n_current :] for block in blocks for row in block.index]
    assert len(stored) == len(replayed) + 1 and after.index.tolist() == stored[-1].index.tolist()
    assert (stored[-2].index < 1000).sum() > 10  # most have been replaced
    for rows, before in zip(replayed, stored, strict=False):
        assert set(rows.tolist()) <= {row for row in before.index.tolist() if row >= 1000}


def test_an_online_pass_stores_but_does_not_replay_rows_left_out():
    past = Reservoir(50, 1000 + torch.arange(50), 10**12)
    blocks, after = online(205, past, without=1000 + torch.arange(45))
    assert layouts(blocks) == [(20, 10, 10), (1, 5, 10)]
    assert all((block.index[:, block.n_current :] >= 1045).all() for block in blocks)
    assert torch.equal(after.index, past.index)


def test_an_online_pass_draws_every_stored_row_equally_often():
    past = Reservoir(40, 1000 + torch.arange(40), 10**12)  # so long a stream that nothing new enters
    blocks, after = online(4000, past)
    assert torch.equal(after.index, past.index)
    counts = torch.bincount(blocks[0].index[:, 10:].flatten() - 1000, minlength=40).float()
    assert counts.sum() == 4000
    assert (counts - 100).abs().max() < 5 * (400 * 0.25 * 0.75) ** 0.5


@settings(deadline=None)
@given(
    n=st.integers(1, 80), stored=st.integers(0, 30), batch_size=st.integers(2, 30), last=st.sampled_from(LAST_BATCHES)
)
def test_the_steps_of_an_online_pass_need_no_draw(n, stored, batch_size, last):
    past = Reservoir(30, 1000 + torch.arange(stored), stored)
    blocks, _ = online(n, past, batch_size=batch_size, last=last)
    assert steps_per_epoch(n, 0, batch_size=batch_size, ratio=(1, 1), last=last, online=True) == sum(
        b.steps for b in blocks
    )
