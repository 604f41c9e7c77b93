from __future__ import annotations

import pytest
import torch
from slow_herding import slow_herding

from tbbn.bench import seeds
from tbbn.bench.data import selection
from tbbn.bench.data.selection import select
from tbbn.errors import UserError


def gen(*names):
    return seeds.generator(0, *names)


def herding(features, n):
    """Herding of one class."""
    return select("herding", features, torch.zeros(len(features), dtype=torch.int64), n)


@pytest.mark.parametrize("gram_side", [2048, 1])
@pytest.mark.parametrize("n", [1, 7, 30, 99])
def test_herding_is_the_greedy_definition(n, gram_side, monkeypatch):
    monkeypatch.setattr(selection, "_GRAM_SIDE", gram_side)
    features = torch.randn(30, 8, generator=gen("herding")) + 1
    features[4] = 0
    assert herding(features, n).tolist() == slow_herding(features, n)


@pytest.mark.parametrize("elements", [2**24, 1])
def test_herding_of_unequal_classes_side_by_side_is_herding_of_each(elements, monkeypatch):
    monkeypatch.setattr(selection, "_GRAM_ELEMENTS", elements)
    features = torch.randn(60, 5, generator=gen("features"))
    labels = torch.tensor([3] * 31 + [7] * 4 + [5] * 25)[torch.randperm(60, generator=gen("labels"))]
    expected = []
    for c in (3, 5, 7):
        rows = (labels == c).nonzero()[:, 0]
        expected += rows[slow_herding(features[rows], 6)].tolist()
    assert select("herding", features, labels, 6).tolist() == expected


def test_herding_of_rows_that_are_not_finite_still_picks_distinct_rows():
    features = torch.randn(12, 4, generator=gen("bad"))
    features[3] = torch.nan
    features[5, 1] = torch.inf
    assert sorted(herding(features, 12).tolist()) == list(range(12))
    picks = select("herding", torch.full((12, 4), torch.nan), torch.tensor([0] * 9 + [1] * 3), 5)
    assert len(set(picks.tolist())) == 8


def test_entropy_takes_the_least_certain_rows_first():
    logits = torch.tensor([[9.0, 0.0, -torch.inf], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    assert select("entropy", logits, torch.tensor([0, 0, 0, 0, 1]), 3).tolist() == [2, 1, 3, 4]


def test_distance_takes_the_smallest_logit_of_the_own_class_first():
    logits = torch.tensor([[5.0, 0.0], [2.0, 9.0], [3.0, -4.0], [0.0, 1.0], [0.0, -1.0]])
    assert select("distance", logits, torch.tensor([0, 0, 0, 1, 1]), 2).tolist() == [1, 2, 4, 3]


def test_random_selection_is_uniform_and_per_class():
    labels = torch.tensor([1, 0] * 10)
    hits = torch.zeros(20)
    for trial in range(400):
        picks = select("random", None, labels, 5, gen("trial", trial))
        assert labels[picks].tolist() == [0] * 5 + [1] * 5
        assert len(set(picks.tolist())) == 10
        hits[picks] += 1
    assert (hits / 400 - 0.5).abs().max() < 0.13  # five standard deviations


def test_selection_of_nothing_is_nothing():
    none = torch.empty(0, dtype=torch.int64)
    assert len(select("herding", torch.empty(0, 3), none, 4)) == 0
    assert len(select("random", None, none, 4, gen())) == 0


def test_unknown_selection_names_the_known_ones():
    with pytest.raises(UserError, match=r"unknown selection 'herd'; .*Did you mean 'herding'"):
        select("herd", None, torch.zeros(1, dtype=torch.int64), 1)


def test_a_reservoir_is_no_selection():
    with pytest.raises(
        UserError, match=r"unknown selection 'reservoir'; choose one of: distance, entropy, herding, random"
    ):
        select("reservoir", None, torch.zeros(1, dtype=torch.int64), 1)


@pytest.mark.parametrize("strategy", ["herding", "random", "entropy", "distance"])
def test_no_row_is_selected_where_none_is_wanted(strategy):
    found = select(strategy, torch.randn(4, 3), torch.tensor([0, 1, 2, 1]), 0, gen())
    assert found.tolist() == [] and found.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_rows_of_equal_keys_keep_their_order(dtype):
    labels = torch.randint(0, 4, (300,), generator=gen("many labels"))
    own = labels.tolist()
    for keys in (torch.zeros(300), torch.randint(0, 3, (300,), generator=gen("few keys"))):
        order, rank = selection.rank_in_class(keys.to(dtype), labels)
        values = keys.tolist()
        slow = sorted(range(300), key=lambda i: (own[i], values[i], i))
        assert order.tolist() == slow
        assert rank.tolist() == [sum(own[j] == own[i] for j in slow[:n]) for n, i in enumerate(slow)]


def test_entropy_and_herding_are_computed_in_double_precision():
    close = torch.tensor([[0.0078125, 0.0], [0.0, 0.0]]).bfloat16()  # in bf16 their entropy is the same
    assert select("entropy", close, torch.tensor([0, 0]), 2).tolist() == [1, 0]
    features = (torch.randn(40, 8, generator=gen("half")) + 1).bfloat16()
    assert herding(features, 40).tolist() == slow_herding(features.double(), 40)


def test_as_many_classes_are_herded_at_once_as_inner_products_may_be_held(monkeypatch):
    labels = torch.arange(5).repeat_interleave(4)
    features, real, sizes = torch.randn(20, 3, generator=gen("chunks")), selection._herd_padded, []
    monkeypatch.setattr(selection, "_herd_padded", lambda x, *more: sizes.append(len(x)) or real(x, *more))
    for elements, wanted in ((2 * 16, [2, 2, 1]), (2 * 16 - 1, [1] * 5), (1, [1] * 5), (5 * 16, [5])):
        monkeypatch.setattr(selection, "_GRAM_ELEMENTS", elements)
        sizes.clear()
        select("herding", features, labels, 2)
        assert sizes == wanted


@pytest.mark.parametrize("strategy", ["herding", "entropy", "distance"])
def test_a_selection_is_made_where_its_rows_are(strategy):
    """Whatever torch's default device is."""
    scores, labels = torch.randn(40, 5, generator=gen("where")), torch.arange(40) % 5
    wanted = select(strategy, scores, labels, 3)
    with torch.device("meta"):
        found, none = select(strategy, scores, labels, 3), select(strategy, scores[:0], labels[:0], 3)
    assert torch.equal(found, wanted) and none.device.type == "cpu"
