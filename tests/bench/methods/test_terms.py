from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tbbn.bench.methods import terms


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def randn(*shape: int, value: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seed(value))


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    exps = [math.exp(v / temperature) for v in row]
    return [e / sum(exps) for e in exps]


S, T = randn(5, 4, value=1), randn(5, 4, value=2)


def slow(formula: str, temperature: float) -> float:
    total = 0.0
    for s, t in zip(S.tolist(), T.tolist(), strict=True):
        q, p = softmax(s, temperature), softmax(t, temperature)
        for a, b in zip(p, q, strict=True):
            if formula == "ce":
                total -= a * math.log(b) / 5
            elif formula == "kl":
                total += temperature**2 * a * math.log(a / b) / 5
            else:
                total -= (a * math.log(b) + (1 - a) * math.log(1 - b)) / 20
    return total


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(
    ("formula", "term"),
    [("ce", terms.soft_cross_entropy), ("kl", terms.soft_kl), ("bce", terms.soft_binary_cross_entropy)],
)
def test_distillation_terms_follow_their_formulas(formula: str, term: object, temperature: float) -> None:
    assert term(S, T, temperature).item() == pytest.approx(slow(formula, temperature), rel=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("term", [terms.soft_kl, terms.soft_binary_cross_entropy])
@pytest.mark.parametrize("sizes", [(3,), (2, 2, 2), (4, 2, 1), (2, 2)], ids=str)
def test_a_sum_over_heads_is_that_of_each_head(term: Any, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64).unbind()
    calls = []

    def counted(*given: Any) -> Tensor:
        calls.append(1)
        return term(*given)

    student.requires_grad_()
    got = terms.over_heads(counted, student, teacher, sizes, 2.0)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    want = sum(term(student[:, e - n : e], teacher[:, e - n : e], 2.0) for n, e in zip(sizes, ends, strict=True))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, student)[0] for value in (got, want)))
    assert len(calls) == (1 if len(set(sizes)) == 1 else len(sizes))


def test_soft_kl_of_equal_logits_is_zero() -> None:
    assert terms.soft_kl(S, S, 2.0).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("logits", [torch.zeros(3, 1), torch.tensor([[60.0, -60.0]]), torch.tensor([[-200.0, 200.0]])])
def test_soft_binary_cross_entropy_stays_finite_where_a_probability_is_one(logits: Tensor) -> None:
    student = logits.clone().requires_grad_()
    value = terms.soft_binary_cross_entropy(student, torch.zeros_like(logits), 1.0)
    value.backward()
    assert value.isfinite() and student.grad is not None and student.grad.isfinite().all()


def test_soft_binary_cross_entropy_counts_a_probability_of_one_as_a_little_less() -> None:
    value = terms.soft_binary_cross_entropy(torch.tensor([[60.0, -60.0]]), torch.zeros(1, 2), 1.0).item()
    log_q = [0.0, -120.0]
    log_not_q = [math.log(-math.expm1(-1e-7)), 0.0]
    assert value == pytest.approx(-sum(0.5 * a + 0.5 * b for a, b in zip(log_q, log_not_q, strict=True)) / 2, rel=1e-6)


def test_shared_distillation_weighs_by_the_share_of_old_classes() -> None:
    logits, labels = randn(3, 5, value=3), torch.tensor([0, 4, 2])
    got = terms.shared_distillation(logits, labels, T[:3], 2.0)
    ce = -sum(math.log(softmax(row)[y]) for row, y in zip(logits.tolist(), labels.tolist(), strict=True)) / 3
    kd = 0.0
    for row, old in zip(logits.tolist(), T[:3].tolist(), strict=True):
        kd -= sum(a * math.log(b) for a, b in zip(softmax(old, 2.0), softmax(row[:4], 2.0), strict=True)) / 3
    assert got["ce"].item() == pytest.approx(0.2 * ce, rel=1e-5)
    assert got["kd"].item() == pytest.approx(0.8 * kd, rel=1e-5)


def test_cosine_distance() -> None:
    x, y = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert terms.cosine_distance(x, y).item() == pytest.approx(0.5)


def pod_by_hand(stages: list[Tensor], old: list[Tensor]) -> float:
    total = 0.0
    for x, y in zip(stages, old, strict=True):
        for a, b in zip(x, y, strict=True):
            pooled = []
            for maps in (a, b):
                c, h, w = maps.shape
                v = [sum(maps[k, i, j].item() ** 2 for j in range(w)) for k in range(c) for i in range(h)]
                v += [sum(maps[k, i, j].item() ** 2 for i in range(h)) for k in range(c) for j in range(w)]
                length = math.sqrt(sum(e * e for e in v))
                pooled.append([e / length for e in v])
            total += math.dist(*pooled) / len(x)
    return total / len(stages)


def channels_by_hand(stages: list[Tensor], old: list[Tensor], importance: list[Tensor]) -> float:
    total = 0.0
    for x, y, weights in zip(stages, old, importance, strict=True):
        n, c = x.shape[:2]
        for row in range(n):
            for k in range(c):
                units = []
                for maps in (x, y):
                    v = [e.item() ** 2 for e in maps[row, k].flatten()]
                    units.append([e / math.sqrt(sum(u * u for u in v)) for e in v])
                total += weights[k].item() * math.dist(*units) / (n * c)
    return total / len(stages)


STAGES = [randn(3, 2, 3, 4, value=4), randn(3, 5, 2, 2, value=5)]
OLD = [randn(3, 2, 3, 4, value=6), randn(3, 5, 2, 2, value=7)]


def test_pod_spatial_pools_squares_over_width_and_height() -> None:
    assert terms.pod_spatial(STAGES, OLD).item() == pytest.approx(pod_by_hand(STAGES, OLD), rel=1e-5)


def test_channel_distance_weighs_channels_by_importance() -> None:
    importance = [torch.tensor([0.5, 1.5]), torch.tensor([0.1, 2.0, 0.0, 1.0, 1.9])]
    got = terms.channel_distance(STAGES, OLD, importance).item()
    assert got == pytest.approx(channels_by_hand(STAGES, OLD, importance), rel=1e-5)


@pytest.mark.parametrize("term", [terms.pod_spatial, lambda x, y: terms.channel_distance(x, y, [torch.ones(2)])])
def test_map_distances_have_a_finite_gradient_where_student_and_teacher_agree(term: object) -> None:
    maps = STAGES[0].clone().requires_grad_()
    term([maps], [STAGES[0]]).backward()  # type: ignore[operator]
    assert maps.grad is not None and maps.grad.isfinite().all()


def test_nca_puts_one_for_the_own_class_and_knows_no_margin() -> None:
    logits, labels, eta, margin = randn(6, 4, value=9), [0, 1, 2, 3, 0, 1], 1.3, 0.6
    total = 0.0
    for row, y in zip(logits.tolist(), labels, strict=True):
        s = [eta * (v - margin) for v in row]
        s = [v - max(s) for v in s]
        total += (math.log(1 + sum(math.exp(v) for c, v in enumerate(s) if c != y)) - s[y]) / 6
    assert terms.nca(eta * logits, torch.tensor(labels)).item() == pytest.approx(total, rel=1e-5)


def test_nca_of_a_single_class_is_zero_with_zero_gradient() -> None:
    logits = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    value = terms.nca(logits, torch.tensor([0, 0]))
    value.backward()
    assert value.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 1))


def test_class_means_counts_rows_and_leaves_zero_for_an_empty_class() -> None:
    values, labels = randn(5, 2, value=10), torch.tensor([0, 2, 2, 0, 2])
    means, counts = terms.class_means(values, labels, 4)
    assert counts.tolist() == [2, 0, 3, 0]
    torch.testing.assert_close(means[0], values[[0, 3]].mean(0))
    torch.testing.assert_close(means[2], values[[1, 2, 4]].mean(0))
    assert not means[[1, 3]].any()


def test_norm_ratio_compares_mean_lengths() -> None:
    old, new = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[6.0, 8.0]])
    assert terms.norm_ratio(old, new).item() == pytest.approx(0.3)


def test_k_means_finds_clusters_that_lie_apart() -> None:
    truth = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    points = truth.repeat(20, 1) + 0.1 * randn(80, 2, value=11)
    centres = terms.k_means(points, 4, seed(3))
    nearest = torch.cdist(truth, centres).argmin(1)
    assert sorted(nearest.tolist()) == [0, 1, 2, 3]
    for k in range(4):
        torch.testing.assert_close(centres[nearest[k]], points[k::4].mean(0))


def test_k_means_ends_where_every_centre_is_the_mean_of_its_points() -> None:
    points = randn(60, 3, value=12)
    centres = terms.k_means(points, 5, seed(1), n_iterations=100)
    nearest = torch.tensor([min(range(5), key=lambda k: math.dist(p, centres[k].tolist())) for p in points.tolist()])
    for k in range(5):
        torch.testing.assert_close(centres[k], points[nearest == k].mean(0))


def test_k_means_depends_on_its_generator_alone() -> None:
    points = randn(60, 3, value=12)
    first = terms.k_means(points, 5, seed(1))
    torch.manual_seed(99)
    assert torch.equal(first, terms.k_means(points, 5, seed(1)))
    assert not torch.equal(first, terms.k_means(points, 5, seed(2)))


@pytest.mark.parametrize("n_points", [1, 3])
def test_k_means_with_fewer_points_than_centres_repeats_them(n_points: int) -> None:
    points = randn(n_points, 2, value=13)
    centres = terms.k_means(points, 5, seed())
    assert centres.shape == (5, 2)
    assert {tuple(c) for c in centres.tolist()} == {tuple(p) for p in points.tolist()}


def test_k_means_never_draws_a_point_at_distance_zero_from_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.tensor([[1.0, 2.0], [1.0, 2.0], [5.0, 2.0], [1.0, 2.0]])
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.zeros(n, dtype=torch.float64))
    assert terms.k_means(points, 2, seed(), n_iterations=0).tolist() == [[1.0, 2.0], [5.0, 2.0]]


def slow_seeds(points: list[list[float]], draws: list[float]) -> list[list[float]]:
    """k-means++ (Arthur & Vassilvitskii, 2007): a point's chance is its squared distance from the nearest seed so far."""
    seeds: list[list[float]] = []
    for draw in draws:
        weights = [min((math.dist(p, s) ** 2 for s in seeds), default=1.0) for p in points]
        reach = 0.0
        for p, weight in zip(points, weights, strict=True):
            reach += weight
            if reach > draw * sum(weights):
                seeds.append(p)
                break
    return seeds


def test_the_seeds_of_k_means_are_drawn_by_their_distance_from_all_seeds_before() -> None:
    points = randn(40, 3, value=20)
    draws = torch.rand(8, generator=seed(21), dtype=torch.float64).tolist()
    found = terms.k_means(points, 8, seed(21), n_iterations=0)
    assert found.tolist() == slow_seeds(points.tolist(), draws)


def test_a_draw_beyond_the_last_point_takes_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.ones(n, dtype=torch.float64))  # rounding may bring it there
    points = torch.tensor([[0.0], [2.0], [3.0]])
    assert terms.k_means(points, 2, seed(), n_iterations=0).tolist() == [[3.0], [3.0]]


def test_weights_of_points_are_summed_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.tensor([[0.0], [1e4], [1.0], [1.001], [1.002]])
    total = 1e8 + 1 + 1.001**2 + 1.002**2
    draws = torch.tensor([0.0, (1e8 + 1.5) / total], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda n, **_: draws)
    assert terms.k_means(points, 2, seed(), n_iterations=0).tolist() == points[[0, 3]].tolist()


def test_distances_of_many_points_keep_their_digits() -> None:
    points = 1000 + 0.01 * torch.arange(60.0)[:, None]  # differences of squares would have none left
    exact = (points.double() - points.double().T).abs()
    assert (terms._distances(points, points) - exact).abs().max() < 1e-6


def test_k_means_stops_after_fifty_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = terms.class_means
    monkeypatch.setattr(terms, "class_means", lambda *given: calls.append(1) or real(*given))
    terms.k_means(randn(9, 2), 3, seed())
    assert len(calls) == 50


def test_a_centre_without_points_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.tensor([[1.0], [1.0], [4.0]])
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.zeros(n, dtype=torch.float64))
    # The third seed falls on the second, whose point is nearest to the first of equals.
    assert terms.k_means(points, 3, seed(), n_iterations=2).tolist() == [[1.0], [4.0], [4.0]]


def test_devices_without_float64_leave_sums_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    values, labels, points = randn(5, 2, value=10), torch.tensor([0, 2, 2, 0, 1]), randn(30, 2, value=22)
    wanted, centres = terms.class_means(values, labels, 4), terms.k_means(points, 3, seed(4), n_iterations=3)
    asked: list[str] = []

    def has_float64(device: torch.device) -> bool:
        asked.append(device.type)
        return len(asked) != 1

    monkeypatch.setattr(terms, "_has_float64", has_float64)
    means, counts = terms.class_means(values, labels, 4)
    assert torch.equal(means, wanted[0]) and torch.equal(counts, wanted[1].float()) and counts.dtype == torch.float32
    assert asked == ["cpu", "cpu"]
    asked.clear()
    assert torch.equal(terms.k_means(points, 3, seed(4), n_iterations=3), centres)
    assert asked == ["cpu"] * 5  # itself twice, and the means of three iterations


def test_only_a_cpu_and_cuda_are_known_to_have_float64() -> None:
    found = {name for name in ("cpu", "cuda", "mps", "xpu") if terms._has_float64(torch.device(name))}
    assert found == {"cpu", "cuda"}


def test_the_mean_of_a_class_of_one_row_is_the_row() -> None:
    values = randn(3, 2, value=23)
    means, counts = terms.class_means(values, torch.tensor([2, 0, 2]), 3)
    assert torch.equal(means[0], values[1]) and counts.tolist() == [1, 0, 2]


HALF_LABELS = torch.tensor([0, 1, 2, 3, 1])
IN_FLOAT32 = {
    "cross_entropy": lambda cast: terms.cross_entropy(cast(S), HALF_LABELS),
    "soft_cross_entropy": lambda cast: terms.soft_cross_entropy(cast(S), cast(T), 2.0),
    "soft_kl": lambda cast: terms.soft_kl(cast(S), cast(T), 2.0),
    "soft_binary_cross_entropy": lambda cast: terms.soft_binary_cross_entropy(cast(S), cast(T), 2.0),
    "cosine_distance": lambda cast: terms.cosine_distance(cast(S), cast(T)),
    "nca": lambda cast: terms.nca(cast(S), HALF_LABELS),
    "pod_spatial": lambda cast: terms.pod_spatial([cast(randn(2, 3, 4, 5))], [cast(randn(2, 3, 4, 5, value=1))]),
    "channel_distance": lambda cast: terms.channel_distance(
        [cast(randn(2, 3, 4, 5))], [cast(randn(2, 3, 4, 5, value=1))], [torch.ones(3)]
    ),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_term_of_half_precision_outputs_is_computed_in_float32(name: str) -> None:
    half = IN_FLOAT32[name](lambda x: x.bfloat16())
    single = IN_FLOAT32[name](lambda x: x.bfloat16().float())
    assert half.dtype == torch.float32 and torch.equal(half, single)
