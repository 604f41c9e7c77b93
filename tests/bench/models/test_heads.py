from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tbbn.bench.models import CosineHead, Head, LinearHead, ProxyHead
from tbbn.errors import UserError

HEADS = [LinearHead, CosineHead, ProxyHead]


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def grown(kind: type[Head], sizes: list[int], n_features: int = 6, value: int = 0) -> Head:
    head = kind(n_features)
    generator = seed(value)
    for n in sizes:
        head.grow(n, generator)
    return head


def features(n: int = 5, n_features: int = 6) -> Tensor:
    return torch.randn(n, n_features, generator=seed(3))


@pytest.mark.parametrize("kind", HEADS)
def test_head_starts_empty_and_counts_classes_by_task(kind: type[Head]) -> None:
    head = kind(6)
    assert (head.n_classes, head.task_sizes) == (0, [])
    with pytest.raises(UserError, match=r"Head: the head has no classes yet; call grow\(n\) first"):
        head(features())
    head = grown(kind, [2, 3, 1])
    assert (head.n_classes, head.task_sizes) == (6, [2, 3, 1])
    assert head(features()).shape == (5, 6)
    assert "task_sizes=[2, 3, 1]" in repr(head)


@pytest.mark.parametrize("kind", HEADS)
def test_growth_keeps_parameters_and_logits_of_old_classes(kind: type[Head]) -> None:
    head = grown(kind, [2, 3])
    old = list(head.parameters())
    before = head(features())
    head.grow(4, seed(8))
    assert {id(p) for p in old} < {id(p) for p in head.parameters()}
    torch.testing.assert_close(head(features())[:, :5], before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_growth_follows_device_and_type_of_the_head(kind: type[Head]) -> None:
    empty = kind(6).to(torch.float64)
    empty.grow(2, seed())
    assert {p.dtype for p in empty.parameters()} == {torch.float64}
    empty = kind(6).to("meta")
    empty.grow(2, seed())
    assert {p.device.type for p in empty.parameters()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", HEADS)
def test_weights_are_the_same_on_every_device(kind: type[Head]) -> None:
    here, there = kind(6), kind(6).to("cuda")
    here.grow(2, seed())
    there.grow(2, seed())
    assert all(
        q.is_cuda and torch.equal(p, q.cpu()) for p, q in zip(here.parameters(), there.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", HEADS)
def test_weights_come_from_the_generator_alone(kind: type[Head]) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = grown(kind, [3, 2], value=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    two = grown(kind, [3, 2], value=4)
    three = grown(kind, [3, 2], value=5)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.weights[0], three.weights[0])
    assert not torch.equal(one.weights[0][:2], one.weights[1])


@pytest.mark.parametrize("kind", HEADS)
def test_a_task_needs_a_class(kind: type[Head]) -> None:
    with pytest.raises(UserError, match=r"\.grow: a task needs at least 1 class, got 0"):
        kind(6).grow(0, seed())


@pytest.mark.parametrize("kind", HEADS)
def test_growing_again_restores_a_state_dict_strictly(kind: type[Head]) -> None:
    head = grown(kind, [2, 3])
    other = grown(kind, [2, 3], value=9)
    other.load_state_dict(dict(head.state_dict()))
    assert torch.equal(head(features()), other(features()))


def test_linear_head_is_one_linear_layer_a_task() -> None:
    head = grown(LinearHead, [2, 3])
    assert isinstance(head, LinearHead)
    x = features()
    expected = torch.cat([x @ w.T + b for w, b in zip(head.weights, head.biases, strict=True)], dim=1)
    logits, similarity = head.scores(x)
    torch.testing.assert_close(logits, expected)
    assert similarity is None
    bound = 1 / math.sqrt(6)
    assert all(p.abs().max() <= bound for p in head.parameters())


def test_cosine_head_matches_a_loop_over_images_and_classes() -> None:
    head = grown(CosineHead, [2, 3]).double()
    assert isinstance(head, CosineHead)
    assert head.eta.item() == 1
    assert all(w.abs().max() <= 1 / math.sqrt(6) for w in head.weights)
    with torch.no_grad():
        head.eta.fill_(2.5)
    x = features().double()
    weights = [row for block in head.weights for row in block.tolist()]
    logits, similarity = head.scores(x)
    assert similarity is not None
    for n, f in enumerate(x.tolist()):
        for c, w in enumerate(weights):
            cosine = sum(a * b for a, b in zip(f, w, strict=True)) / math.hypot(*f) / math.hypot(*w)
            assert similarity[n, c].item() == pytest.approx(cosine)
            assert logits[n, c].item() == pytest.approx(2.5 * cosine)


def test_proxy_head_matches_a_loop_over_images_classes_and_proxies() -> None:
    head = ProxyHead(6, n_proxies=4).double()
    head.grow(2, seed(1))
    head.grow(3, seed(2))
    assert [tuple(w.shape) for w in head.weights] == [(2, 4, 6), (3, 4, 6)]
    assert head.eta.item() == 1
    with torch.no_grad():
        head.eta.fill_(0.5)
    x = features().double()
    classes = [proxies for block in head.weights for proxies in block.tolist()]
    logits, similarity = head.scores(x)
    assert similarity is not None
    for n, f in enumerate(x.tolist()):
        for c, proxies in enumerate(classes):
            near = []
            for w in proxies:
                pairs = zip(f, w, strict=True)
                near.append(-sum((a / math.hypot(*f) - b / math.hypot(*w)) ** 2 for a, b in pairs))
            share = [math.exp(s) for s in near]
            expected = sum(s * e for s, e in zip(near, share, strict=True)) / sum(share)
            assert similarity[n, c].item() == pytest.approx(expected)
            assert logits[n, c].item() == pytest.approx(0.5 * expected)


def test_proxy_head_has_ten_proxies_of_about_unit_length() -> None:
    head = grown(ProxyHead, [50], n_features=64)
    assert head.weights[0].shape == (50, 10, 64)
    assert head.weights[0].norm(dim=2).mean().item() == pytest.approx(1, abs=0.05)


def test_proxies_are_set_in_place() -> None:
    head = ProxyHead(6, n_proxies=2)
    head.grow(3, seed())
    head.grow(1, seed())
    held = head.weights[1]
    centres = torch.arange(12.0).reshape(1, 2, 6)
    head.set_proxies(1, centres)
    assert head.weights[1] is held
    assert torch.equal(held, centres)
    with pytest.raises(UserError, match=r"task 0 takes centres of shape \(3, 2, 6\), got \(1, 2, 6\)"):
        head.set_proxies(0, centres)


@pytest.mark.parametrize("kind", [CosineHead, ProxyHead])
def test_a_zero_feature_gives_finite_logits_and_gradients(kind: type[Head]) -> None:
    head = grown(kind, [2])
    x = torch.zeros(2, 6, requires_grad=True)
    head(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None)


def test_base_class_leaves_the_map_to_its_kinds() -> None:
    with pytest.raises(NotImplementedError):
        Head(3).grow(1)
    with pytest.raises(NotImplementedError):
        Head(3)(torch.zeros(1, 3))
