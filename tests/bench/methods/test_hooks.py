"""What methods do before and after the training, and how they predict."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tbbn.bench.methods import Method, method
from tbbn.bench.models import BiasCorrectedHead
from tbbn.registry import METHODS


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


# BiC. ----------------------------------------------------------------------------------------------------------------


def bic_network(world: Any) -> Any:
    net = world.context(method("bic"), number=1).network
    head = net.head
    with torch.no_grad():
        for parameter, value in zip([*head.alphas, *head.betas], (0.5, 2.0, -1.0, 3.0), strict=True):
            parameter.fill_(value)
    return net


def test_bias_corrected_logits_are_scaled_and_shifted_task_by_task(world: Any) -> None:
    net = bic_network(world)
    head, x = net.head, torch.randn(3, 64, generator=seed())
    logits, scaled = head.scores(x)
    for row in range(3):
        for c in range(5):
            task, column = (0, c) if c < 2 else (1, c - 2)
            raw = (head.weights[task][column] @ x[row] + head.biases[task][column]).item()
            alpha, beta = head.alphas[task].item(), head.betas[task].item()
            assert logits[row, c].item() == pytest.approx(alpha * raw + beta, abs=1e-4)
            assert scaled[row, c].item() == pytest.approx(alpha * raw, abs=1e-4)


def test_a_fresh_correction_changes_nothing_and_is_saved(world: Any) -> None:
    head = BiasCorrectedHead(4)
    head.grow(2, seed())
    head.grow(3, seed(1))
    logits, scaled = head.scores(torch.randn(2, 4, generator=seed(2)))
    assert torch.equal(logits, scaled)
    assert {"alphas.0", "alphas.1", "betas.0", "betas.1"} <= set(head.state_dict())
    assert len(head.block(1)) == 4


def test_the_teacher_of_bic_gives_corrected_logits(world: Any) -> None:
    net = bic_network(world).eval()
    out = net.teacher()(world.images[:4])
    plain = F.linear(out.features, net.head.joined_weights(), torch.cat(list(net.head.biases)))
    torch.testing.assert_close(out.logits[:, 2:], 2 * plain[:, 2:] + 3)


def test_bic_s_correction_loss_punishes_the_offset_and_no_other_parameter(world: Any) -> None:
    bic, net = method("bic"), bic_network(world).eval()
    batch = world.batch([0, 3, 4, 1], n_old=2, n=5)
    out = net(world.images[:4])
    losses = bic.correction_loss(batch, out, None)  # type: ignore[attr-defined]
    expected = F.cross_entropy(out.logits, batch.labels).item()
    assert losses["ce"].item() == pytest.approx(expected, rel=1e-6)
    assert losses["offset"].item() == pytest.approx(0.05 * 9, rel=1e-5)
    losses["offset"].backward()
    assert net.head.betas[1].grad.item() == pytest.approx(0.1 * 3, rel=1e-4)
    assert net.head.alphas[1].grad.item() == pytest.approx(0.0, abs=1e-6)
    assert net.head.weights[1].grad.abs().max().item() == pytest.approx(0.0, abs=1e-6)


# WA. -----------------------------------------------------------------------------------------------------------------


def test_wa_makes_new_weights_as_long_as_old_ones_on_average(world: Any) -> None:
    wa = method("wa")
    context = world.context(wa, number=2)
    before = [w.detach().clone() for w in context.network.head.weights]
    biases = [b.detach().clone() for b in context.network.head.biases]
    wa.after_training(context)
    old = [math.hypot(*row) for block in before[:2] for row in block.tolist()]
    new = [math.hypot(*row) for row in before[2].tolist()]
    gamma = (sum(old) / 5) / (sum(new) / 2)
    after = list(context.network.head.weights)
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    torch.testing.assert_close(after[2].detach(), before[2] * gamma)
    assert all(torch.equal(a, b) for a, b in zip(context.network.head.biases, biases, strict=True))


def test_wa_leaves_the_first_task_alone(world: Any) -> None:
    wa = method("wa")
    context = world.context(wa)
    before = context.network.head.weights[0].detach().clone()
    wa.after_training(context)
    assert torch.equal(context.network.head.weights[0], before)


# iCaRL. --------------------------------------------------------------------------------------------------------------


def test_icarl_predicts_the_nearest_mean_of_exemplars(world: Any) -> None:
    icarl = method("icarl")
    context = world.context(icarl, number=1)
    world.finish(icarl, context)
    out = context.network.eval()(world.images[::5])
    means = []
    for c in range(5):
        rows = context.memory.index[context.memory.labels == c]
        units = [F.normalize(context.outputs(row[None]).features[0], dim=0) for row in rows]
        means.append(F.normalize(torch.stack(units).mean(0), dim=0).tolist())
    scores = icarl.predict(out)
    for row, feature in zip(scores.tolist(), out.features.tolist(), strict=True):
        unit = [v / math.hypot(*feature) for v in feature]
        assert row == pytest.approx([-(math.dist(unit, m) ** 2) for m in means], abs=1e-5)


def test_icarl_never_chooses_a_class_without_exemplars(world: Any) -> None:
    icarl = method("icarl")
    context = world.context(icarl, number=1)
    world.finish(icarl, context)
    keep = context.memory.labels != 3
    context.memory.index, context.memory.labels = context.memory.index[keep], context.memory.labels[keep]
    icarl.after_task(context)
    scores = icarl.predict(context.network.eval()(world.images))
    assert scores[:, 3].eq(-math.inf).all() and scores[:, [0, 1, 2, 4]].isfinite().all()


def test_icarl_falls_back_to_logits_without_means_for_all_classes(world: Any) -> None:
    icarl = method("icarl")
    in_the_middle = world.context(icarl, number=1).network.eval()(world.images[:3])
    assert torch.equal(icarl.predict(in_the_middle), in_the_middle.logits)
    context = world.context(icarl, budget=0)
    world.finish(icarl, context)
    out = context.network.eval()(world.images[:3])
    assert torch.equal(icarl.predict(out), out.logits)


# IL2M. ---------------------------------------------------------------------------------------------------------------


def il2m_scores(context: Any, rows: torch.Tensor) -> dict[int, list[tuple[float, float]]]:
    """For each class the (own logit, largest logit) of its rows."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows.tolist():
        p = context.outputs(torch.tensor([row])).logits[0].tolist()
        label = int(context.all_labels[row])
        found.setdefault(label, []).append((p[label], max(p)))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_il2m_rectifies_past_scores_where_the_best_class_is_new(world: Any) -> None:
    il2m = method("il2m")
    learnt: dict[int, float] = {}
    confidence: dict[int, float] = {}
    first = world.context(il2m)
    found = il2m_scores(first, first.task.train)
    for c, pairs in found.items():
        learnt[c] = mean([own for own, _ in pairs])
        confidence[c] = mean([best for pairs in found.values() for _, best in pairs])

    context = world.context(il2m, number=1)
    il2m.after_training(context)
    found = il2m_scores(context, context.task.train)
    now_confidence = mean([best for pairs in found.values() for _, best in pairs])
    now = {c: mean([own for own, _ in pairs]) for c, pairs in il2m_scores(context, context.memory.index).items()}
    out = context.network.eval()(world.images[: 5 * 12])
    scores = il2m.predict(out)
    seen = set()
    for row, logits in zip(scores.tolist(), out.logits.tolist(), strict=True):
        is_new = logits.index(max(logits)) >= 2
        seen.add(is_new)
        if is_new:
            rectified = [logits[c] * learnt[c] / now[c] * now_confidence / confidence[c] for c in range(2)]
            logits = rectified + logits[2:]
        assert row == pytest.approx(logits, rel=1e-3, abs=1e-5)
    assert seen == {True, False}


def test_il2m_s_rectification_by_hand(world: Any) -> None:
    """Two tasks of one class each; the score of the past class is doubled where the new class is predicted."""
    il2m = method("il2m")

    def scores(factor: float, logits: list[float]) -> list[float]:
        state = {"factors": torch.tensor([factor, 1.0])}
        out = replace(world.output(1, sizes=(1, 1)), logits=torch.tensor([logits]), state=state)
        return il2m.predict(out)[0].tolist()

    assert scores(2.0, [1.5, 2.0]) == [3.0, 2.0], "the past class wins"
    assert scores(2.0, [2.5, 2.0]) == [2.5, 2.0], "a past class was predicted: nothing is rectified"
    assert scores(2.0, [-1.0, 2.0]) == [-2.0, 2.0], "raw outputs may be negative"


@pytest.mark.parametrize(("logits", "wanted"), [([1.0, 1.5, 2.0], [2.0, 4.5, 2.0]), ([1.0, 3.0, 2.0], [1.0, 3.0, 2.0])])
def test_il2m_tells_the_newest_task_from_all_before(logits: list[float], wanted: list[float], world: Any) -> None:
    state = {"factors": torch.tensor([2.0, 3.0, 1.0])}
    out = replace(world.output(1, sizes=(1, 1, 1)), logits=torch.tensor([logits]), state=state)
    assert method("il2m").predict(out)[0].tolist() == wanted


def test_il2m_leaves_classes_without_exemplars_and_runs_without_memory_alone(world: Any) -> None:
    il2m = method("il2m")
    context = world.context(il2m, number=1)
    keep = context.memory.labels != 0
    context.memory.index, context.memory.labels = context.memory.index[keep], context.memory.labels[keep]
    il2m.after_training(context)
    factors = context.network.recall("factors")
    assert factors[0] == 1 and factors[1] != 1 and factors[2:].eq(1).all()
    bare = world.context(il2m, number=1, budget=0)
    il2m.after_training(bare)
    assert bare.network.recall("factors").eq(1).all()


def test_il2m_in_the_middle_of_a_task_predicts_plain_outputs(world: Any) -> None:
    il2m = method("il2m")
    out = world.context(il2m, number=1).network.eval()(world.images[:3])
    assert torch.equal(il2m.predict(out), out.logits)


# DER++. --------------------------------------------------------------------------------------------------------------


def test_derpp_stores_logits_when_a_row_is_stored_and_keeps_them(world: Any) -> None:
    derpp = method("derpp")
    first = world.context(derpp)
    world.finish(derpp, first)
    then = {row: first.outputs(torch.tensor([row])).logits[0] for row in first.memory.index.tolist()}

    context = world.context(derpp, number=1)  # the same first task, then other weights
    world.finish(derpp, context)
    state = context.network.state
    assert state["dark_rows"].tolist() == sorted(context.memory.index.tolist())
    kept = 0
    for row, logits, width in zip(*(state[f"dark_{k}"] for k in ("rows", "logits", "widths")), strict=True):
        if world.labels[row] < 2:
            kept += 1
            assert width == 2 and not logits[2:].any()
            torch.testing.assert_close(logits[:2], then[int(row)])
        else:
            assert width == 5
            torch.testing.assert_close(logits, context.outputs(row[None]).logits[0])
    assert kept == 4


def test_derpp_without_memory_stores_nothing(world: Any) -> None:
    derpp = method("derpp")
    context = world.context(derpp, budget=0)
    world.finish(derpp, context)
    assert context.network.state == {}


# PODNet and AFC. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_new_proxies_start_at_cluster_centres_of_the_length_of_old_ones(name: str, number: int, world: Any) -> None:
    chosen = method(name, {"n_proxies": 12})  # as many as images of a class: every image is a centre
    context = world.context(chosen, number=number)
    with torch.no_grad():
        context.network.head.weights[0].mul_(3.0)  # the tasks have proxies of other lengths
    old = [weight.detach().clone() for weight in context.network.head.weights[:number]]
    chosen.before_task(context)
    assert context.asked == ["proxies"]
    assert all(torch.equal(a, b) for a, b in zip(context.network.head.weights, old, strict=False))
    length = mean([math.hypot(*proxy) for weight in old for cls in weight.tolist() for proxy in cls])
    for i, c in enumerate(context.task.classes):
        rows = context.task.train[world.labels[context.task.train] == c]
        features = F.normalize(context.outputs(rows).features, dim=1) * length
        distances = torch.cdist(context.network.head.weights[number][i].detach(), features)
        assert distances.min(0).values.max() < 1e-3


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_proxies_of_the_first_task_are_left_as_drawn(name: str, world: Any) -> None:
    chosen = method(name)
    context = world.context(chosen)
    before = context.network.head.weights[0].detach().clone()
    chosen.before_task(context)
    assert torch.equal(context.network.head.weights[0], before) and not context.asked


def test_afc_s_importance_is_the_energy_of_the_gradient_by_channel(world: Any) -> None:
    afc = method("afc")
    context = world.context(afc, number=1)
    context.network.requires_grad_(False)  # as after a phase that trained the head alone
    before = {key: tensor.clone() for key, tensor in context.network.state_dict().items() if "importance" not in key}
    afc.after_training(context)
    assert context.asked == ["importance"]
    after = context.network.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())

    sums: list[list[float]] = [[0.0] * c for c in (32, 64, 64)]
    net = context.network.requires_grad_(True).train()
    for batch in context.batches("importance"):
        out = net(batch.images)
        for maps in out.stages:
            maps.retain_grad()
        terms = []
        for row, y in enumerate(batch.labels.tolist()):
            s = out.logits[row] - out.logits[row].max()
            terms.append(torch.log(1 + s.exp().sum() - s[y].exp()) - s[y])
        torch.stack(terms).mean().backward()
        for total, maps in zip(sums, out.stages, strict=True):
            for c in range(len(total)):
                total[c] += maps.grad[:, c].square().sum().item() / len(batch.labels)
    for i, total in enumerate(sums):
        importance = context.network.recall(f"importance_{i}")
        assert importance.mean().item() == pytest.approx(1.0, rel=1e-4)
        assert importance.tolist() == pytest.approx([v / mean(total) for v in total], rel=1e-3, abs=1e-5)


def test_afc_s_importance_pass_can_move_the_running_statistics(world: Any) -> None:
    """As in the authors' program: the network itself is forwarded, batch after batch, in train mode."""
    plain, moving = method("afc"), method("afc", {"importance_moves_statistics": True})
    copied, context = world.context(plain, number=1), world.context(plain, number=1)
    for each in (copied, context):
        each.network.requires_grad_(False)  # as after a phase that trained the head alone
    want = copy.deepcopy(context.network).train()
    with torch.no_grad():
        for batch in context.batches("importance"):
            want(batch.images)
    before = context.network.state_dict()["backbone.norms.0.running_mean"].clone()
    moving.after_training(context)
    plain.after_training(copied)
    after = context.network.state_dict()
    assert not torch.equal(after["backbone.norms.0.running_mean"], before) and not context.network.training
    for key, tensor in want.state_dict().items():
        assert "importance" in key or torch.equal(after[key], tensor), key
    for i in range(3):  # train mode does not read the running statistics, so the importances are the same
        assert torch.equal(context.network.recall(f"importance_{i}"), copied.network.recall(f"importance_{i}"))


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_proxy_methods_can_predict_by_the_nearest_mean_of_exemplars_and_their_mirror_images(
    name: str, world: Any
) -> None:
    nme = method(name, {"classifier": "nme"})
    context = world.context(nme, number=1)
    world.finish(nme, context)
    out = context.network.eval()(world.images[::5])
    means = []
    for c in range(5):
        images = world.images[context.memory.index[context.memory.labels == c]]
        features = context.network(torch.cat([images, images.flip(3)])).features
        units = [[v / math.hypot(*f) for v in f] for f in features.tolist()]
        middle = [mean(list(column)) for column in zip(*units, strict=True)]
        means.append([v / math.hypot(*middle) for v in middle])
    for row, feature in zip(nme.predict(out).tolist(), out.features.tolist(), strict=True):
        unit = [v / math.hypot(*feature) for v in feature]
        assert row == pytest.approx([-(math.dist(unit, m) ** 2) for m in means], abs=1e-5)
    by_proxies = method(name)
    assert (
        torch.equal(by_proxies.predict(out), out.logits)
        and "exemplar_means" not in world.context(by_proxies).network.state
    )


def test_a_fixed_scale_multiplies_lengths_and_is_not_trained(world: Any) -> None:
    """Features and proxies of length 3: squared distances are nine times as large, within the softmax over proxies too."""
    fixed = method("podnet", {"scale": 3.0, "n_proxies": 2})
    context = world.context(fixed, number=1)
    head = context.network.head
    assert not any(p is head.eta for p in fixed.parameters(context.network, "newest"))
    assert any(p is head.eta for p in method("podnet").parameters(context.network, "newest"))
    out = context.network.eval()(world.images[:2])
    for row, feature in zip(out.similarity.tolist(), out.features.tolist(), strict=True):
        f = [3 * v / math.hypot(*feature) for v in feature]
        want = []
        for proxies in torch.cat(list(head.weights)).tolist():
            s = [-(math.dist(f, [3 * v / math.hypot(*w) for v in w]) ** 2) for w in proxies]
            weights = [math.exp(v) for v in s]
            want.append(sum(v * w for v, w in zip(s, weights, strict=True)) / sum(weights))
        assert row == pytest.approx(want, rel=1e-3)


# LUCIR. --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_lucir_can_imprint_the_weights_of_new_classes(number: int, world: Any) -> None:
    plain, imprinting = method("lucir"), method("lucir", {"imprint": True})
    context = world.context(imprinting, number=number)
    with torch.no_grad():
        context.network.head.weights[0].mul_(3.0)  # the tasks have weights of other lengths
    *old, drawn = (w.detach().clone() for w in context.network.head.weights)
    plain.before_task(context)
    assert torch.equal(context.network.head.weights[number], drawn)
    imprinting.before_task(context)
    assert all(torch.equal(a, b) for a, b in zip(context.network.head.weights, old, strict=False))
    length = mean([math.hypot(*w) for weight in old for w in weight.tolist()])
    for i, c in enumerate(context.task.classes):
        rows = context.task.train[world.labels[context.task.train] == c]
        units = [[v / math.hypot(*f) for v in f] for f in context.outputs(rows).features.tolist()]
        middle = [mean(list(column)) for column in zip(*units, strict=True)]
        want = [length * v / math.hypot(*middle) for v in middle]
        assert context.network.head.weights[number][i].tolist() == pytest.approx(want, abs=1e-5)
    first = world.context(imprinting)
    before = first.network.head.weights[0].detach().clone()
    imprinting.before_task(first)
    assert torch.equal(first.network.head.weights[0], before), "there is nothing to take the length from"


def test_afc_without_any_gradient_takes_all_channels_as_equal(world: Any) -> None:
    afc = method("afc")
    context = world.context(afc)
    context.task = replace(context.task, classes=range(1), train=context.task.train[:12])
    context.network.head.task_sizes = [1]
    context.network.head.weights[0] = nn.Parameter(context.network.head.weights[0][:1].detach())
    afc.after_training(context)
    assert all(context.network.recall(f"importance_{i}").eq(1).all() for i in range(3))


# All of them. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("budget", [0, 12])
def test_every_method_walks_through_three_tasks_and_scores_all_classes(name: str, budget: int, world: Any) -> None:
    chosen = method(name)
    context = world.context(chosen, number=2, budget=budget)
    world.finish(chosen, context)
    out = context.network.eval()(world.images[:4])
    scores = chosen.predict(out)
    assert scores.shape == (4, 7) and not scores.isnan().any()


@pytest.mark.parametrize("name", list(METHODS))
def test_what_a_method_remembers_is_restored_with_the_weights(name: str, world: Any) -> None:
    chosen: Method = method(name)
    context = world.context(chosen, number=1)
    world.finish(chosen, context)
    fresh = world.context(chosen).network
    fresh.restore(context.network.state_dict(), context.network.task_sizes)
    images = world.images[:4]
    assert torch.equal(chosen.predict(fresh.eval()(images)), chosen.predict(context.network.eval()(images)))
    assert fresh.state.keys() == context.network.state.keys()
