"""The split rule, layouts and plans."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal import splits_by_trial

from tbbn.errors import UserError
from tbbn.nn import plan as plan_module
from tbbn.nn.plan import Layout, PlanOptions, make_layout, one_group, splits
from tbbn.nn.sync import RankLayout, RankPlan

CPU, DOUBLE = torch.device("cpu"), torch.float64
counts = st.integers(0, 70)


def plan_of(layout, **options):
    return layout.plan(PlanOptions(**options), CPU, DOUBLE)


def test_splits_of_the_paper():
    assert [splits(48, 16, past) for past in range(10)] == [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    assert {splits(48, 16, past) for past in range(9, 20)} == {16}


def test_splits_by_divisors_of_the_current_rows_alone():
    assert [splits(48, 16, past, "current") for past in range(1, 10)] == [3, 6, 8, 12, 12, 16, 16, 24, 24]


def test_uneven_splits_are_the_wanted_number_rounded():
    assert [splits(48, 16, past, "uneven") for past in range(1, 10)] == [3, 6, 9, 12, 15, 18, 21, 24, 27]
    assert splits(10, 1, 50, "uneven") == 10  # never more splits than current rows


def test_large_counts_take_no_time_and_larger_ones_are_refused():
    assert splits(2**30, 2**30, 3) == 2
    assert splits(2**30, 2**29, 3, "current") == 4
    for numbers in ((10**12, 16, 3), (48, 10**12, 3), (48, 16, 10**12)):
        with pytest.raises(UserError, match=r"splits: \w+ must be below 2147483648, got 1000000000000\."):
            splits(*numbers)
        with pytest.raises(UserError, match=r"balance: \w+ must be below 2147483648, got 1000000000000\."):
            make_layout(numbers[0], numbers[1], None, numbers[2], None)


def test_share_of_the_current_task_under_the_paper_rule():
    shares = [48 / r / (48 / r + 16) for r in (splits(48, 16, past) for past in range(1, 10))]
    assert [round(s, 2) for s in shares] == [0.6, 0.43, 0.27, 0.27, 0.27, 0.16, 0.16, 0.16, 0.16]


@given(counts, counts, st.integers(0, 30), st.sampled_from(["paper", "current", "uneven"]))
def test_splits_follow_their_rule(n_current, n_memory, past, rule):
    assert splits(n_current, n_memory, past, rule) == splits_by_trial(n_current, n_memory, past, rule)


def test_short_last_batch_is_balanced_by_uneven_splits():
    assert splits(47, 16, 3) == 9  # 47 is prime: no common divisor, 8.8 wanted
    assert splits(47, 16, 3, "current") == 9
    plan = plan_of(Layout(47, 16, 3))
    sizes = plan.sizes.tolist()
    assert sum(sizes) == 47 + 9 * 16 and max(sizes) - min(sizes) == 1


@pytest.mark.parametrize(("n_current", "n_memory", "past"), [(48, 0, 3), (0, 16, 3), (48, 16, 0), (48, 16, 1)])
def test_nothing_to_balance_is_one_split(n_current, n_memory, past):
    assert splits(n_current, n_memory, past) == (2 if past == 1 else 1)


@pytest.mark.parametrize("name", ["current", "memory", "past_tasks"])
def test_splits_reject_negative_and_fractional_numbers(name):
    good = {"current": 48, "memory": 16, "past_tasks": 2}
    with pytest.raises(UserError, match=f"splits: {name} must not be negative, got -1"):
        splits(**good | {name: -1})
    for bad in (2.0, True, "3"):
        with pytest.raises(TypeError, match=f"splits: {name} must be a whole number, got {bad!r}"):
            splits(**good | {name: bad})


def test_unknown_rule_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown split rule 'papr'; choose one of: .*Did you mean 'paper'"):
        splits(48, 16, 2, "papr")
    with pytest.raises(UserError, match="unknown split rule"):
        PlanOptions(rule="all")


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 12), st.sampled_from(["paper", "current", "uneven"]))
def test_plan_rows_sum_to_one_and_every_row_is_placed(n_current, n_memory, past, rule):
    plan = plan_of(Layout(n_current, n_memory, past), rule=rule)
    r = splits(n_current, n_memory, past, rule)
    if r == 1:
        assert plan is None
        return
    assert plan.gather.shape == (r, n_current + n_memory)
    for matrix in (plan.gather, plan.scatter):
        torch.testing.assert_close(matrix.sum(1), torch.ones(len(matrix), dtype=DOUBLE))
    assert torch.equal((plan.gather > 0).sum(1).double(), plan.sizes)
    for row in range(n_current):
        assert plan.scatter[row, row % r] == 1
    assert torch.all(plan.scatter[n_current:] == 1 / r)


def test_masked_layout_is_the_counted_one_with_its_rows_moved():
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    is_memory = (torch.arange(64) >= 48)[order]
    straight, shuffled = plan_of(Layout(48, 16, 4)), plan_of(make_layout(None, None, is_memory, 4, None, "paper"))
    # The i-th current row of the shuffled batch takes the i-th current place, whatever it held before.
    place = torch.where(is_memory, 47 + is_memory.cumsum(0), (~is_memory).cumsum(0) - 1)
    assert torch.equal(shuffled.gather, straight.gather[:, place])
    assert torch.equal(shuffled.scatter, straight.scatter[place])


def test_a_plan_is_made_once_for_equal_counts_and_shared_by_layers():
    layout = make_layout(48, 16, None, 3, None)
    assert make_layout(48, 16, None, 3, None) is layout
    assert plan_of(layout) is plan_of(layout)
    masked = make_layout(None, None, torch.arange(64) >= 48, 3, None)
    assert plan_of(masked) is plan_of(masked)
    assert plan_of(layout, rule="current") is not plan_of(layout)
    single = layout.plan(PlanOptions(), CPU, torch.float32)
    assert single.gather.dtype == torch.float32 and single.to(CPU, torch.float32) is single


@pytest.mark.parametrize("options", [{}, {"kind": "weighted"}, *({"case": i} for i in (1, 2, 3, 4))], ids=str)
def test_default_device_does_not_reach_the_plan(options):
    ids = torch.tensor([3] * 12 + [0, 1, 2, 0])
    try:
        torch.set_default_device("meta")
        plans = [plan_of(Layout(12, 4, 3), **options), one_group(5)]
        members = [Layout(12, 4, 3, task_ids=given).membership(CPU, DOUBLE) for given in (None, ids)]
    finally:
        torch.set_default_device(None)
    tensors = [value for plan in plans for value in vars(plan).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 10 and all(tensor.is_cpu for tensor in (*tensors, *members))


def test_weighted_plan_gives_each_task_the_same_weight():
    plan = plan_of(Layout(48, 16, 4), kind="weighted")
    weights = plan.gather[0]
    assert math.isclose(weights[:48].sum(), 1 / 5) and math.isclose(weights[48:].sum(), 4 / 5)
    assert len(set(weights[:48].tolist())) == 1 and len(set(weights[48:].tolist())) == 1


def test_membership_spreads_memory_rows_of_unknown_task():
    member = Layout(2, 2, 2).membership(CPU, DOUBLE)
    assert member.tolist() == [[0, 0, 1], [0, 0, 1], [0.5, 0.5, 0], [0.5, 0.5, 0]]
    member = Layout(2, 2, 2, task_ids=torch.tensor([2, 2, 1, 0])).membership(CPU, DOUBLE)
    assert member.tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    member = make_layout(None, None, torch.tensor([True, False]), 2, None).membership(CPU, DOUBLE)
    assert member.tolist() == [[0.5, 0.5, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"case": 5}, "case must be 0 .* or an ablation 1 to 4, got 5"),
        ({"memory": "mean"}, "unknown treatment of memory rows 'mean'"),
        ({"kind": "weighted", "case": 2}, "weighted: it has no splits, so rule, case"),
        ({"rule": "curent"}, "Did you mean 'current'"),
    ],
)
def test_wrong_options_are_one_clear_line(options, message):
    with pytest.raises(UserError, match=message):
        PlanOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((48, None, None, 2, None), UserError, "give both current and memory"),
        ((48, 16, torch.ones(64, dtype=torch.bool), 2, None), UserError, "either current and memory, or is_memory"),
        ((48, -1, None, 2, None), UserError, "memory must not be negative, got -1"),
        ((48, 16, None, -1, None), UserError, "past_tasks must not be negative, got -1"),
        ((48.0, 16, None, 2, None), TypeError, "current must be a whole number, got 48.0"),
        ((None, None, torch.ones(64), 2, None), TypeError, r"1-d with one bool per row, got torch.float32 \(64,\)"),
        (
            (None, None, [0, 1], 2, None),
            TypeError,
            r"got torch.int64 \(2,\); if these are 0 and 1 for each row: .bool\(\)",
        ),
        ((None, None, torch.ones(8, 8, dtype=torch.bool), 2, None), TypeError, r"got torch.bool \(8, 8\)"),
        ((None, None, ["a", "b"], 2, None), TypeError, r"one bool per row, got \['a', 'b'\]"),
        ((48, 16, None, 2, None, "even"), UserError, "split rule"),
        ((48, 16, None, 2, torch.zeros(60, dtype=torch.int64)), UserError, "60 entries but the layout covers 64 rows"),
    ],
)
def test_wrong_layouts_are_one_clear_line(arguments, kind, message):
    with pytest.raises(kind, match=message):
        make_layout(*arguments)


def test_a_layout_of_counts_is_never_freed():
    """A captured CUDA graph reads its plan as long as it is replayed, although nobody else keeps it."""
    layout = weakref.ref(make_layout(48, 16, None, 9, None))
    for n in range(65, 600):
        make_layout(n, 16, None, 9, None)
    gc.collect()
    assert layout() is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tasks_of_rows_have_the_type_that_is_asked_for(dtype):
    found = Layout(2, 1, 2).membership(CPU, dtype)
    assert found.dtype == dtype
    assert found.tolist() == [[0, 0, 1], [0, 0, 1], [0.5, 0.5, 0]]  # a memory row is of both past tasks
    known = Layout(1, 2, 2, task_ids=torch.tensor([2, 0, 1])).membership(CPU, dtype)
    assert known.dtype == dtype and known.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("options", [{}, {"memory": "own"}, *({"case": i} for i in (1, 2, 3, 4))], ids=str)
@pytest.mark.parametrize(
    "mask", [None, [False, True, False, False, True, False, True, False, False]], ids=["counts", "mask"]
)
def test_the_matrices_of_every_plan_entry_by_entry(options, mask):
    """Six current rows in two splits, three memory rows in both."""
    layout = Layout(6, 3, 1) if mask is None else make_layout(None, None, torch.tensor(mask), 1, None, "uneven")
    plan, is_memory = plan_of(layout, rule="uneven", **options), mask or [False] * 6 + [True] * 3
    b, r, case = 9, 2, options.get("case", 0)
    place = [sum(is_memory[i] == is_memory[row] for i in range(row)) % r for row in range(b)]  # in its kind
    gather = [[1 / 6 if is_memory[row] or place[row] == j else 0.0 for row in range(b)] for j in range(r)]
    scatter = [[0.0] * r for _ in range(b)]
    for row in range(b):
        for j in range(r):
            if is_memory[row] and "memory" not in options:
                scatter[row][j] = 1 / r
            else:
                scatter[row][j] = float(place[row] == j)
    running, sizes, blend = [0.5, 0.5], [6.0, 6.0], None
    whole, everyone = [1 / b] * b, [[1.0]] * b
    if case == 1:
        gather, sizes, running = [*gather, whole], [6.0, 6.0, 9.0], [0.5, 0.5, 0.0]
        scatter = [[0.0, 0.0, 1.0]] * b
    if case == 2:
        gather, sizes, running = [*gather, whole], [6.0, 6.0, 9.0], [0.0, 0.0, 1.0]
        scatter = [[*row, 0.0] for row in scatter]
    if case == 3:
        scatter, blend = everyone, [[0.5, 0.5]]
    if case == 4:
        gather, scatter, running, sizes = [whole], everyone, [1.0], [6.0]
    assert torch.equal(plan.gather, torch.tensor(gather, dtype=DOUBLE))
    assert torch.equal(plan.scatter, torch.tensor(scatter, dtype=DOUBLE))
    assert (plan.running.tolist(), plan.sizes.tolist()) == (running, sizes)
    assert (plan.blend if plan.blend is None else plan.blend.tolist()) == blend
    assert (plan.rows, plan.anchor.tolist(), plan.total_variance) == (9, [is_memory.index(True)], False)
    assert plan_of(layout, rule="uneven", **options, total_variance=True).total_variance


def test_the_matrices_of_a_weighted_plan():
    plan = plan_of(Layout(4, 2, 3), kind="weighted")
    assert torch.equal(plan.gather, torch.tensor([[1 / 16] * 4 + [3 / 8] * 2], dtype=DOUBLE))
    assert plan.scatter.tolist() == [[1.0]] * 6 and plan.running.tolist() == [1.0] and plan.sizes.tolist() == [6.0]
    assert (plan.rows, plan.anchor.tolist(), plan.blend, plan.total_variance) == (6, [4], None, False)


@pytest.mark.parametrize("kind", ["tbbn", "weighted"])
@pytest.mark.parametrize("counts", [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0), (0, 0, 3), (4, 0, 0)], ids=str)
def test_without_current_rows_memory_or_a_past_there_is_nothing_to_balance(counts, kind):
    assert plan_of(Layout(*counts), kind=kind) is None
    assert [splits(*counts, rule) for rule in ("paper", "current", "uneven")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["current", "memory", "past_tasks"])
def test_the_largest_number_is_one_below_the_limit(name):
    good = {"current": 48, "memory": 16, "past_tasks": 2, "rule": "uneven"}
    assert splits(**good | {name: 2**31 - 1}) >= 1
    with pytest.raises(UserError, match=f"splits: {name} must be below 2147483648, got 2147483648"):
        splits(**good | {name: 2**31})


def test_the_plans_of_a_layout_are_its_own():
    assert "_cache" not in repr(Layout(2, 1, 1))
    with pytest.raises(TypeError):
        Layout(2, 1, 1, _cache={})
    first, second = (RankLayout(2, 1, 1, counts={None: ((2, 1), (n, 1))}) for n in (2, 3))
    assert first.key() == first.key() != second.key() and Layout(2, 1, 1).key() not in (first.key(), second.key())
    plan = one_group(3)
    assert not plan.total_variance
    tensors = (plan.gather, plan.scatter, plan.running, plan.sizes, plan.anchor)
    assert RankPlan(3, *tensors).ranks == 1


def test_a_plan_is_moved_once_and_leaves_numbers_of_rows_as_they_are():
    plan = plan_of(Layout(48, 16, 3), case=3)
    single = plan.to(CPU, torch.float32)
    assert plan.to(CPU, torch.float32) is single and plan.to(CPU, DOUBLE) is plan
    floats = ("gather", "scatter", "running", "sizes", "blend")
    assert {getattr(single, name).dtype for name in floats} == {torch.float32} and single.anchor.dtype == torch.int64
    assert {getattr(plan, name).dtype for name in floats} == {DOUBLE}
    elsewhere = plan.to(torch.device("meta"), DOUBLE)
    assert {getattr(elsewhere, name).device.type for name in (*floats, "anchor")} == {"meta"}
    assert (elsewhere.rows, elsewhere.total_variance) == (64, False)
    assert plan.to(torch.device("meta"), DOUBLE) is elsewhere is not plan.to(torch.device("meta"), torch.float32)


@pytest.mark.parametrize("where", ["compiled code", "a dispatch mode", "a transform"])
def test_a_plan_that_is_moved_inside_a_transform_is_not_kept(where, monkeypatch):
    """Its tensors end with the transform, or are no real ones."""
    plan = plan_of(Layout(48, 16, 3))
    with monkeypatch.context() as patch:
        if where == "compiled code":
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        else:
            patch.setattr(plan_module, "dispatch_modes" if "mode" in where else "functorch_active", lambda: 1)
        inside = plan.to(CPU, torch.float32)
        assert plan.to(CPU, torch.float32) is not inside
    outside = plan.to(CPU, torch.float32)
    assert outside is not inside and plan.to(CPU, torch.float32) is outside


@pytest.mark.parametrize("where", ["compiled code", "a dispatch mode", "a transform"])
def test_a_plan_that_is_made_inside_a_transform_is_not_kept(where, monkeypatch):
    layout = Layout(48, 16, 3)
    with monkeypatch.context() as patch:
        if where == "compiled code":
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        else:
            patch.setattr(plan_module, "dispatch_modes" if "mode" in where else "functorch_active", lambda: 1)
        inside = layout.plan()
        assert layout.plan() is not inside and layout._cache == {}
    assert layout.plan() is layout.plan() is not inside


def test_a_layout_says_its_plan_in_double_precision_on_the_cpu_unless_it_is_asked_otherwise():
    layout = Layout(48, 16, 3)
    plan = layout.plan()
    assert plan is layout.plan(PlanOptions(), CPU, DOUBLE)
    assert plan.gather.dtype == DOUBLE and plan.gather.is_cpu and plan.gather.shape == (8, 64)


@pytest.mark.parametrize("case", [0, 1, 2, 3, 4])
def test_the_first_memory_row_is_the_anchor_of_all_groups(case):
    counted, masked = Layout(48, 16, 3), make_layout(None, None, torch.arange(64) % 4 == 2, 3, None, "paper")
    for layout, anchor in ((counted, 48), (masked, 2)):
        plan = plan_of(layout, case=case)
        assert plan.anchor.tolist() == [anchor]
        assert (plan.gather[:, anchor] > 0).all()
    assert plan_of(counted, kind="weighted").anchor.tolist() == [48]


def test_batch_norm_as_a_plan():
    plan = one_group(5)
    assert plan.gather.tolist() == [[0.2] * 5] and plan.scatter.tolist() == [[1.0]] * 5
    assert (plan.rows, plan.running.tolist(), plan.sizes.tolist(), plan.anchor.tolist()) == (5, [1.0], [5.0], [0])
    assert one_group(0).gather.shape == (1, 0)


def test_a_plain_layer_has_nothing_to_balance():
    assert plan_of(Layout(48, 16, 3), kind="plain") is None
    with pytest.raises(UserError, match="plain: it has no splits, so rule, case"):
        PlanOptions("plain", total_variance=True)
