from __future__ import annotations

import pytest
import torch
from slow_herding import slow_herding

from tbbn.bench import seeds
from tbbn.bench.data.memory import ExemplarMemory, Reservoir
from tbbn.bench.data.selection import SELECTIONS
from tbbn.errors import UserError


def gen(*names):
    return seeds.generator(0, *names)


def test_quota_is_the_papers_table():
    ceil = ExemplarMemory(2000, rounding="ceil")
    assert [ceil.quota(10 * t) for t in range(1, 11)] == [200, 100, 67, 50, 40, 34, 29, 25, 23, 20]
    floor = ExemplarMemory(2000)
    assert [floor.quota(10 * t) for t in range(1, 11)] == [200, 100, 66, 50, 40, 33, 28, 25, 22, 20]
    assert [ExemplarMemory(20, per_class=True).quota(n) for n in (10, 100)] == [20, 20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": -1}, "budget must not be negative, got -1; 0 keeps no exemplars"),
        ({"budget": 1, "rounding": "round"}, "unknown rounding 'round'; choose one of: ceil, floor"),
        ({"budget": 1, "selection": "hering"}, "unknown selection 'hering'.*'herding'"),
        ({"budget": 1, "shrink": "reslect"}, "unknown shrink 'reslect'.*'reselect'"),
        ({"budget": 1, "selection": "reservoir", "per_class": True}, "a reservoir has a total budget"),
    ],
)
def test_impossible_memories_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ExemplarMemory(**options)


def test_a_budget_below_the_number_of_classes_is_refused_unless_rounded_up():
    with pytest.raises(UserError, match="a budget of 7 gives none of the 10 classes an exemplar; use at least 10, or"):
        ExemplarMemory(7).quota(10)
    assert ExemplarMemory(7, rounding="ceil").quota(10) == 1


# Rows of task t are 100 t .. 100 t + 39, of classes 2 t and 2 t + 1 in turn; features belong to a row for good.
FEATURES = torch.randn(400, 6, generator=gen("rows")) + 0.5


def task_rows(t):
    rows = torch.arange(100 * t, 100 * t + 40)
    return rows, 2 * t + rows % 2


def label_of(rows):
    return 2 * (rows // 100) + rows % 2


def learn(memory, n_tasks, features=FEATURES):
    for t in range(n_tasks):
        rows = memory.candidates(task_rows(t)[0])
        memory.update(rows, label_of(rows), n_seen=2 * t + 2, scores=features[rows], generator=gen("select", t))
    return memory


def test_truncation_keeps_the_first_of_the_herding_order():
    memory = learn(ExemplarMemory(30, rounding="ceil"), 3)
    expected = []
    for c in range(6):
        rows = task_rows(c // 2)[0][c % 2 :: 2]
        expected += rows[slow_herding(FEATURES[rows], 5)].tolist()
    assert memory.index.tolist() == expected
    assert memory.labels.tolist() == [c for c in range(6) for _ in range(5)]


def test_truncation_scores_the_new_rows_alone():
    memory = learn(ExemplarMemory(30), 1)
    assert torch.equal(memory.candidates(task_rows(1)[0]), task_rows(1)[0])


def test_reselection_herds_stored_rows_again():
    memory = learn(ExemplarMemory(30, shrink="reselect"), 2)
    stored = {c: memory.index[memory.labels == c] for c in range(4)}
    changed = FEATURES.flip(0)
    rows = memory.candidates(task_rows(2)[0])
    assert torch.equal(rows, torch.cat([memory.index, task_rows(2)[0]]))
    memory.update(rows, label_of(rows), n_seen=6, scores=changed[rows], generator=gen())
    expected = []
    for c in range(6):
        pool = stored[c] if c < 4 else task_rows(2)[0][c % 2 :: 2]
        expected += pool[slow_herding(changed[pool], 5)].tolist()
    assert memory.index.tolist() == expected


@pytest.mark.parametrize("shrink", ["truncate", "reselect"])
@pytest.mark.parametrize("selection", ["herding", "random", "entropy", "distance"])
@pytest.mark.parametrize("per_class", [False, True])
def test_memory_stays_grouped_distinct_and_within_its_quota(selection, shrink, per_class):
    memory = ExemplarMemory(7 if per_class else 28, per_class=per_class, selection=selection, shrink=shrink)
    learn(memory, 4, FEATURES.repeat(1, 2))
    quota = 7 if per_class else 3
    assert memory.labels.tolist() == [c for c in range(8) for _ in range(quota)]
    assert torch.equal(label_of(memory.index), memory.labels)
    assert len(set(memory.index.tolist())) == len(memory) == 8 * quota


def test_memory_keeps_all_rows_of_a_class_smaller_than_its_quota():
    memory = learn(ExemplarMemory(1000, shrink="reselect"), 2)
    assert sorted(memory.index.tolist()) == [*range(40), *range(100, 140)]


def test_many_rows_of_a_class_keep_the_order_of_their_selection():
    memory = ExemplarMemory(80, selection="distance")
    scores = torch.zeros(400, 8)
    learn(memory, 2, scores)  # all are as good as each other: the first come first
    assert memory.index.tolist() == [*range(0, 40, 2), *range(1, 40, 2), *range(100, 140, 2), *range(101, 140, 2)]


def test_a_memory_is_updated_where_its_rows_are():
    """Whatever torch's default device is."""
    wanted, memory = learn(ExemplarMemory(30), 3), ExemplarMemory(30)
    tasks = [task_rows(t) for t in range(3)]
    labels = [label_of(rows) for rows, _ in tasks]
    for t, (rows, _) in enumerate(tasks):
        with torch.device("meta"):
            memory.update(rows, labels[t], n_seen=2 * t + 2, scores=FEATURES[rows], generator=gen("select", t))
    assert torch.equal(memory.index, wanted.index) and torch.equal(memory.labels, wanted.labels)


def test_a_task_without_rows_changes_nothing():
    memory = learn(ExemplarMemory(30), 2)
    before = memory.index.tolist()
    none = torch.empty(0, dtype=torch.int64)
    memory.update(none, none, n_seen=30, scores=FEATURES[:0], generator=gen())
    assert memory.index.tolist() == before
    assert ExemplarMemory(0).quota(5) == 0


def test_memory_without_budget_stays_empty_and_needs_no_scores():
    memory = ExemplarMemory(0)
    assert memory.scores is None
    memory.update(*task_rows(0), n_seen=2, generator=gen())
    assert len(memory) == 0


def test_memory_says_what_it_needs_of_its_candidates():
    needs = {name: ExemplarMemory(1, selection=name).scores for name in SELECTIONS}
    assert needs == {
        "herding": "features",
        "random": None,
        "entropy": "logits",
        "distance": "logits",
        "reservoir": None,
    }


def test_state_is_tensors_and_comes_back():
    memory = learn(ExemplarMemory(30, selection="reservoir"), 2)
    state = memory.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = ExemplarMemory(30, selection="reservoir")
    other.load_state_dict(state)
    rows, labels = task_rows(2)
    for copy in (memory, other):
        copy.update(rows, labels, n_seen=6, generator=gen("again"))
    assert torch.equal(memory.index, other.index)
    assert other.seen == 120


def test_reservoir_memory_holds_rows_with_their_labels():
    memory = learn(ExemplarMemory(30, selection="reservoir", shrink="reselect"), 3)
    assert len(set(memory.index.tolist())) == 30
    assert torch.equal(memory.labels, label_of(memory.index))
    assert memory.seen == 120


def slow_reservoir(index, rows, seen, budget, draws):
    index = list(index)
    for i, (row, u) in enumerate(zip(rows, draws, strict=True), start=seen):
        if i < budget:
            index.append(row)
        elif (j := int(u * (i + 1))) < budget:
            index[j] = row
    return index


@pytest.mark.parametrize("batch", [1, 3, 10, 64])
def test_reservoir_by_batches_is_the_classic_algorithm_row_by_row(batch):
    reservoir, slow = Reservoir(8, torch.empty(0, dtype=torch.int64), 0), []
    for seen in range(0, 192, batch):
        rows = torch.arange(seen, min(seen + batch, 192))
        draws = torch.rand(len(rows), generator=gen("r", seen), dtype=torch.float64).tolist()
        slow = slow_reservoir(slow, rows.tolist(), seen, 8, draws)
        reservoir = reservoir.update(rows, gen("r", seen))
        assert reservoir.index.tolist() == slow


def test_reservoir_includes_every_row_with_equal_probability():
    trials, budget, n = 2000, 10, 40
    hits = torch.zeros(n)
    for trial in range(trials):
        generator = gen("uniform", trial)
        reservoir = Reservoir(budget, torch.empty(0, dtype=torch.int64), 0)
        for rows in torch.arange(n).split(7):
            reservoir = reservoir.update(rows, generator)
        assert reservoir.seen == n
        hits[reservoir.index] += 1
    assert hits.sum() == trials * budget
    assert (hits / trials - budget / n).abs().max() < 5 * (0.25 * 0.75 / trials) ** 0.5


def test_reservoir_is_unchanged_by_an_empty_batch():
    index = torch.tensor([4, 2])
    after = Reservoir(2, index, 9).update(index[:0], gen())
    assert torch.equal(after.index, index) and after.seen == 9


def test_a_reservoir_without_budget_stays_empty():
    reservoir = Reservoir(0, torch.empty(0, dtype=torch.int64), 0).update(torch.arange(5), gen())
    assert (len(reservoir.index), reservoir.seen) == (0, 5)
