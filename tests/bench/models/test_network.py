from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tbbn.bench.models import CosineHead, Head, LinearHead, Network, ProxyHead, backbone
from tbbn.bench.models.adapter import adapt
from tbbn.errors import UserError

HEADS = [LinearHead, CosineHead, ProxyHead]


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def network(kind: type[Head] = LinearHead, sizes: tuple[int, ...] = (2, 3), value: int = 0) -> Network:
    generator = seed(value)
    net = Network(backbone("small", in_channels=1, generator=generator), kind(64))
    for n in sizes:
        net.grow(n, generator)
    return net


def images(n: int = 6, value: int = 1) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=seed(value))


@pytest.mark.parametrize("kind", HEADS)
def test_output_carries_logits_features_stages_and_similarity(kind: type[Head]) -> None:
    net = network(kind).eval()
    assert (net.n_classes, net.task_sizes) == (5, (2, 3))
    out = net(images())
    features = net.backbone(images())
    torch.testing.assert_close(out.features, features.pooled)
    assert len(out.stages) == 3
    torch.testing.assert_close(out.logits, net.head(features.pooled))
    assert (out.similarity is None) == (kind is LinearHead)
    if out.similarity is not None:
        torch.testing.assert_close(out.similarity, out.logits)  # the scale starts at 1
    assert out.task_sizes == (2, 3)
    assert out.state == {}


def test_heads_are_the_logits_split_by_task() -> None:
    out = network(sizes=(2, 3, 1))(images())
    heads = out.heads()
    assert [tuple(h.shape) for h in heads] == [(6, 2), (6, 3), (6, 1)]
    assert torch.equal(heads[1], out.logits[:, 2:5])


def test_an_output_stays_as_it_was_when_the_network_grows() -> None:
    net = network()
    out = net(images())
    net.grow(4, seed())
    assert out.task_sizes == (2, 3)
    assert len(out.heads()) == 2


def test_head_and_backbone_must_agree_on_the_features() -> None:
    with pytest.raises(UserError, match="the backbone gives 64 features but the head takes 10"):
        Network(backbone("small"), LinearHead(10))


@pytest.mark.parametrize("name", ["mean", "importance.stage.0", "training", "a%2Eb", "%25.", "@x", "with space/ü"])
def test_any_name_can_be_remembered(name: str) -> None:
    net = network()
    tensor = torch.arange(3.0)
    net.remember(name, tensor)
    assert torch.equal(net.recall(name), tensor)
    assert list(net.state) == [name]
    assert net(images()).state[name] is net.recall(name)
    other = network(sizes=(), value=1)
    other.restore(dict(net.state_dict()), [2, 3])
    assert torch.equal(other.recall(name), tensor)
    net.forget(name)
    net.forget(name)
    assert net.state == {}


def test_remembered_names_do_not_collide() -> None:
    net = network()
    for i, name in enumerate(["a.b", "a%2Eb", "a/b", "a%b"]):
        net.remember(name, torch.tensor(i))
    assert [net.recall(name).item() for name in ["a.b", "a%2Eb", "a/b", "a%b"]] == [0, 1, 2, 3]


def test_remembering_copies_and_reuses_the_storage() -> None:
    net = network()
    tensor = torch.zeros(3, requires_grad=True)
    net.remember("x", tensor)
    held = net.recall("x")
    assert not held.requires_grad
    assert held.data_ptr() != tensor.data_ptr()
    net.remember("x", torch.ones(3))
    assert net.recall("x") is held
    assert held.tolist() == [1, 1, 1]
    net.remember("x", torch.ones(2, dtype=torch.int64))
    assert net.recall("x").tolist() == [1, 1]
    assert net.recall("x").dtype == torch.int64


def test_recalling_an_unknown_name_lists_the_known_ones() -> None:
    net = network()
    net.remember("means", torch.ones(1))
    with pytest.raises(UserError, match="unknown remembered tensor 'mean'; choose one of: means"):
        net.recall("mean")


@pytest.mark.parametrize("kind", HEADS)
def test_teacher_is_frozen_and_unmoved_by_training(kind: type[Head]) -> None:
    net = network(kind)
    net.remember("x", torch.zeros(2))
    teacher = net.teacher()
    before = copy.deepcopy(teacher.state_dict())
    assert not teacher.training
    assert net.training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert all(p.requires_grad for p in net.parameters())
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        loss = (net(images()).logits - teacher(images()).logits + 1).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    net.remember("x", torch.ones(2))
    net.grow(2, seed())
    assert all(torch.equal(teacher.state_dict()[key], before[key]) for key in before)
    assert any(not torch.equal(net.state_dict()[key], before[key]) for key in before)
    assert teacher.task_sizes == (2, 3)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("kind", HEADS)
def test_state_round_trip_is_strict_and_exact(kind: type[Head]) -> None:
    net = network(kind, sizes=(2, 3, 4))
    net(images())  # moves the running statistics
    net.remember("class.means", torch.randn(9, 4, generator=seed(2)))
    net.remember("count", torch.tensor(3))
    other = network(kind, sizes=(2,), value=5)
    other.remember("stale", torch.ones(1))
    other.restore(dict(net.state_dict()), [2, 3, 4])
    assert other.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), net.state_dict().values(), strict=True))
    assert other.task_sizes == (2, 3, 4)
    assert torch.equal(net.eval()(images()).logits, other.eval()(images()).logits)


def test_restore_refuses_other_tasks() -> None:
    net = network(sizes=(4,))
    with pytest.raises(UserError, match=r"the head has tasks of \[4\] classes, the state has \[2, 3\]"):
        net.restore(network().state_dict(), [2, 3])


def test_restore_refuses_a_state_that_does_not_fit() -> None:
    state = dict(network().state_dict())
    state.pop("head.weights.1")
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weights\.1"):
        network(sizes=()).restore(state, [2, 3])


@pytest.mark.parametrize("kind", HEADS)
def test_the_whole_forward_is_one_graph(kind: type[Head]) -> None:
    net = network(kind).eval()
    net.remember("a.b", torch.ones(2))
    traced = torch.compile(net, backend="eager", fullgraph=True)
    out, expected = traced(images()), net(images())
    torch.testing.assert_close(out.logits, expected.logits)
    assert list(out.state) == ["a.b"]


def test_the_whole_forward_of_a_backbone_without_stages_is_one_graph() -> None:
    body = adapt("flat", nn.Sequential(nn.Flatten(), nn.Linear(images()[0].numel(), 4)), tuple(images().shape[1:]))
    net = Network(body, LinearHead(4)).eval()
    net.grow(2)
    out = torch.compile(net, backend="eager", fullgraph=True)(images())
    torch.testing.assert_close(out.logits, net(images()).logits)
    with pytest.raises(UserError, match=r"^stages are used, but the backbone returns features only; choose one that"):
        list(out.stages)
