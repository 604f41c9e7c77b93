"""The loss of every method against its formula, written out sample by sample."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tbbn.bench.data.types import Batch
from tbbn.bench.methods import Losses, method
from tbbn.bench.models import Output
from tbbn.registry import METHODS

OLD, NEW = (2, 3), (2, 3, 2)
LABELS = [5, 6, 6, 5, 6, 5, 0, 3, 4]  # six rows of the new task, three of the memory
MIXED = [5, 0, 6, 2, 6, 5, 6, 3, 5]  # old classes among the current rows and new ones in the memory


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    exps = [math.exp(v / temperature) for v in row]
    return [e / sum(exps) for e in exps]


def ce(rows: list[list[float]], labels: list[int]) -> float:
    return -sum(math.log(softmax(row)[y]) for row, y in zip(rows, labels, strict=True)) / len(rows)


def cosine(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)


def numbers(losses: Losses) -> dict[str, float]:
    return {name: term.item() for name, term in losses.items()}


def close(value: dict[str, float]) -> Any:
    return pytest.approx(value, rel=1e-5, abs=1e-7)


@pytest.fixture(params=[LABELS, MIXED], ids=["labels by position", "labels anywhere"])
def batch(request: pytest.FixtureRequest, world: Any) -> Batch:
    return world.batch(request.param, n_memory=3)


@pytest.fixture
def output(world: Any) -> Output:
    return world.output(9, NEW)


@pytest.fixture
def previous(world: Any) -> Output:
    return world.output(9, OLD, value=1)


@pytest.mark.parametrize("name", ["ft", "joint", "il2m", "balaug"])
def test_fine_tuning_is_one_mean_over_the_batch(name: str, batch: Batch, output: Output) -> None:
    got = numbers(method(name).loss(batch, output, None))
    assert got == close({"ce": ce(output.logits.tolist(), batch.labels.tolist())})


@pytest.mark.parametrize("name", ["eeil", "lucir", "ssil", "icarl", "bic", "wa", "er", "derpp"])
def test_the_first_task_is_plain_cross_entropy(name: str, world: Any) -> None:
    labels, out = [0, 1, 1], world.output(3, (2,))
    got = numbers(method(name).loss(world.batch(labels, n_old=0, n=2), out, None))
    assert got == close({"ce": ce(out.logits.tolist(), labels)})


def eeil_kd(output: Output, previous: Output, heads: list[tuple[int, int]], temperature: float) -> float:
    total = 0.0
    for start, stop in heads:
        for row, old in zip(output.logits.tolist(), previous.logits.tolist(), strict=True):
            q, p = softmax(row[start:stop], temperature), softmax(old[start:stop], temperature)
            for a, b in zip(p, q, strict=True):
                total -= (a * math.log(b) + (1 - a) * math.log(1 - b)) / (9 * (stop - start))
    return total


def test_eeil_distils_every_past_head(batch: Batch, output: Output, previous: Output) -> None:
    eeil = method("eeil", {"kd": 0.7, "temperature": 3})
    expected = {
        "ce": ce(output.logits.tolist(), batch.labels.tolist()),
        "kd": 0.7 * eeil_kd(output, previous, [(0, 2), (2, 5)], 3.0),
    }
    assert numbers(eeil.loss(batch, output, previous)) == close(expected)
    assert numbers(eeil.balanced_loss(batch, output, previous)) == close(expected)


def test_eeil_can_skip_the_newest_past_head_in_the_first_phase(batch: Batch, output: Output, previous: Output) -> None:
    eeil = method("eeil", {"skip_newest_head": True})
    assert numbers(eeil.loss(batch, output, previous))["kd"] == pytest.approx(
        eeil_kd(output, previous, [(0, 2)], 2.0), rel=1e-5
    )
    assert numbers(eeil.balanced_loss(batch, output, previous))["kd"] == pytest.approx(
        eeil_kd(output, previous, [(0, 2), (2, 5)], 2.0), rel=1e-5
    )


def test_eeil_that_skips_the_newest_head_has_no_distillation_at_the_second_task(world: Any) -> None:
    batch, out, old = world.batch([2, 3, 0], 1, n_old=2, n=5), world.output(3, (2, 3)), world.output(3, (2,), value=1)
    assert set(method("eeil", {"skip_newest_head": True}).loss(batch, out, old)) == {"ce"}


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_lucir(top_k: int, batch: Batch, world: Any) -> None:
    output, previous = world.output(9, NEW, cosine=True), world.output(9, OLD, value=1, cosine=True)
    got = numbers(method("lucir", {"top_k": top_k, "ranking": 2}).loss(batch, output, previous))
    pairs = zip(output.features.tolist(), previous.features.tolist(), strict=True)
    assert output.similarity is not None
    hinges = []
    for row, y in zip(output.similarity.tolist(), batch.labels.tolist(), strict=True):
        if y < 5:
            hinges += [max(0.0, 0.5 - row[y] + v) for v in sorted(row[5:], reverse=True)[:top_k]]
    expected = {
        "ce": ce(output.logits.tolist(), batch.labels.tolist()),
        "less_forget": 5 * math.sqrt(5 / 2) * sum(1 - cosine(x, y) for x, y in pairs) / 9,
        "ranking": 2 * sum(hinges) / len(hinges),
    }
    assert got == close(expected)


def test_lucir_ranks_a_single_row_of_an_old_class(world: Any) -> None:
    output, previous = world.output(3, NEW, cosine=True), world.output(3, OLD, value=1, cosine=True)
    got = method("lucir", {"top_k": 1}).loss(world.batch([5, 0, 6]), output, previous)["ranking"].item()
    row = output.similarity[1].tolist()
    assert got == pytest.approx(max(0.0, 0.5 - row[0] + max(row[5:])), rel=1e-5) and got > 0


def test_lucir_without_rows_of_old_classes_has_no_ranking(world: Any) -> None:
    output, previous = world.output(2, NEW, cosine=True), world.output(2, OLD, value=1, cosine=True)
    assert method("lucir").loss(world.batch([5, 6]), output, previous)["ranking"].item() == 0


@pytest.mark.parametrize("last_only", [False, True])
def test_ssil(last_only: bool, batch: Batch, output: Output, previous: Output) -> None:
    total = 0.0
    for row, y in zip(output.logits.tolist(), batch.labels.tolist(), strict=True):
        total -= math.log(softmax(row[:5])[y] if y < 5 else softmax(row[5:])[y - 5]) / 9
    kd = 0.0
    for start, stop in [(2, 5)] if last_only else [(0, 2), (2, 5)]:
        for row, old in zip(output.logits.tolist(), previous.logits.tolist(), strict=True):
            q, p = softmax(row[start:stop], 2.0), softmax(old[start:stop], 2.0)
            kd += 4 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 9
    got = numbers(method("ssil", {"kd_last_task_only": last_only}).loss(batch, output, previous))
    assert got == close({"ce": total, "kd": kd})


def test_ssil_gives_new_logits_no_gradient_from_old_rows(world: Any) -> None:
    out = world.output(2, NEW)
    logits = out.logits.clone().requires_grad_()
    batch = world.batch([6, 1], n_memory=1)
    method("ssil").loss(batch, replace(out, logits=logits), None)["ce"].backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert not logits.grad[0, :5].any() and not logits.grad[1, 5:].any()
    assert logits.grad[0, 5:].all() and logits.grad[1, :5].all()


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_proxy_methods_minimise_nca(name: str, batch: Batch, output: Output) -> None:
    total = 0.0
    for row, y in zip(output.logits.tolist(), batch.labels.tolist(), strict=True):
        s = [v - max(row) for v in row]
        total += (math.log(1 + sum(math.exp(v) for c, v in enumerate(s) if c != y)) - s[y]) / 9
    assert numbers(method(name).loss(batch, output, None)) == close({"nca": total})
    assert numbers(method(name).finetune_loss(batch, output, output)) == close({"nca": total})


def test_podnet_distils_features_and_pooled_maps(batch: Batch, output: Output, previous: Output) -> None:
    got = numbers(method("podnet", {"pod_flat": 2, "pod_spatial": 5}).loss(batch, output, previous))
    factor = math.sqrt(7 / 2)
    pairs = zip(output.features.tolist(), previous.features.tolist(), strict=True)
    spatial = 0.0
    for x, y in zip(output.stages, previous.stages, strict=True):
        for a, b in zip(x.square(), y.square(), strict=True):
            units = []
            for maps in (a, b):
                v = [e for channel in maps.tolist() for e in map(sum, channel)]
                v += [e for channel in maps.tolist() for e in map(sum, zip(*channel, strict=True))]
                units.append([e / math.hypot(*v) for e in v])
            spatial += math.dist(*units) / 9 / 2
    assert got["pod_flat"] == pytest.approx(factor * 2 * sum(1 - cosine(x, y) for x, y in pairs) / 9, rel=1e-5)
    assert got["pod_spatial"] == pytest.approx(factor * 5 * spatial, rel=1e-5)


def test_afc_weighs_channels_by_the_previous_network_s_importance(
    batch: Batch, output: Output, previous: Output
) -> None:
    importance = [[0.5, 2.0, 0.5], [1.0, 0.0, 3.0, 0.0]]
    state = {f"importance_{i}": torch.tensor(v) for i, v in enumerate(importance)}
    got = numbers(method("afc").loss(batch, output, replace(previous, state=state)))
    total = 0.0
    for x, y, weights in zip(output.stages, previous.stages, importance, strict=True):
        for row in range(9):
            for c, weight in enumerate(weights):
                u, v = (maps[row, c].square().flatten().tolist() for maps in (x, y))
                u, v = [e / math.hypot(*u) for e in u], [e / math.hypot(*v) for e in v]
                total += weight * math.dist(u, v) / (9 * len(weights)) / 2
    assert set(got) == {"nca", "consolidation"}
    assert got["consolidation"] == pytest.approx(4 * math.sqrt(7 / 2) * total, rel=1e-5)


def test_icarl(batch: Batch, output: Output, previous: Output) -> None:
    kd = 0.0
    for row, old in zip(output.logits.tolist(), previous.logits.tolist(), strict=True):
        for z, z_old in zip(row[:5], old, strict=True):
            p, q = 1 / (1 + math.exp(-z_old)), 1 / (1 + math.exp(-z))
            kd -= (p * math.log(q) + (1 - p) * math.log(1 - q)) / 9
    got = numbers(method("icarl", {"kd": 0.5}).loss(batch, output, previous))
    assert got == close({"ce": ce(output.logits.tolist(), batch.labels.tolist()), "kd": 0.5 * kd})


@pytest.mark.parametrize("name", ["bic", "wa"])
def test_bic_and_wa_weigh_distillation_by_the_share_of_old_classes(
    name: str, batch: Batch, output: Output, previous: Output
) -> None:
    kd = 0.0
    for row, old in zip(output.logits.tolist(), previous.logits.tolist(), strict=True):
        q, p = softmax(row[:5], 2.0), softmax(old, 2.0)
        kd -= sum(a * math.log(b) for a, b in zip(p, q, strict=True)) / 9
    expected = {"ce": 2 / 7 * ce(output.logits.tolist(), batch.labels.tolist()), "kd": 5 / 7 * kd}
    assert numbers(method(name).loss(batch, output, previous)) == close(expected)


def test_er_is_the_sum_of_two_means(batch: Batch, output: Output) -> None:
    rows, labels = output.logits.tolist(), batch.labels.tolist()
    expected = {"ce": ce(rows[:6], labels[:6]), "replay": ce(rows[6:], labels[6:])}
    assert numbers(method("er").loss(batch, output, None)) == close(expected)


def dark_state() -> dict[str, torch.Tensor]:
    """Rows 107 (all five classes known) and 108 (two) of the batch's memory rows 106, 107, 108, beside others."""
    g = torch.Generator().manual_seed(7)
    rows, widths = torch.tensor([3, 107, 108, 500]), torch.tensor([2, 5, 2, 5])
    return {"dark_rows": rows, "dark_logits": torch.randn(4, 5, generator=g), "dark_widths": widths}


def test_derpp_compares_only_the_logits_that_were_stored(batch: Batch, output: Output) -> None:
    state = dark_state()
    rows, labels, stored = output.logits.tolist(), batch.labels.tolist(), state["dark_logits"].tolist()
    squares = [(a - b) ** 2 for a, b in zip(rows[7][:5], stored[1], strict=True)]
    squares += [(a - b) ** 2 for a, b in zip(rows[8][:2], stored[2][:2], strict=True)]
    expected = {
        "ce": ce(rows[:6], labels[:6]),
        "dark": 0.3 * sum(squares) / 7,
        "replay": 0.8 * ce(rows[6:], labels[6:]),
    }
    derpp = method("derpp", {"alpha": 0.3, "beta": 0.8})
    assert numbers(derpp.loss(batch, replace(output, state=state), None)) == close(expected)


def test_derpp_compares_a_single_stored_logit(batch: Batch, output: Output) -> None:
    state = {**dark_state(), "dark_widths": torch.tensor([1, 1, 0, 1])}
    dark = method("derpp", {"alpha": 1.0}).loss(batch, replace(output, state=state), None)["dark"].item()
    assert dark == pytest.approx((output.logits[7, 0] - state["dark_logits"][1, 0]).item() ** 2, rel=1e-5)


def test_derpp_without_stored_logits_replays_labels_alone(batch: Batch, output: Output) -> None:
    assert set(method("derpp").loss(batch, output, None)) == {"ce", "replay"}


def test_derpp_with_none_of_the_rows_stored_has_a_dark_term_of_zero(batch: Batch, output: Output) -> None:
    state = {**dark_state(), "dark_rows": torch.tensor([1, 2, 3, 4])}
    assert method("derpp").loss(batch, replace(output, state=state), None)["dark"].item() == 0


@pytest.mark.parametrize("name", list(METHODS))
def test_the_teacher_gets_no_gradient_and_keeps_its_buffers(name: str, world: Any) -> None:
    chosen = method(name)
    context = world.context(chosen, number=1)
    chosen.before_task(context)
    teacher, net = context.previous, context.network.train()
    before = {key: tensor.clone() for key, tensor in teacher.state_dict().items()}
    batch = context.batch(
        torch.cat([context.task.train[::4], context.memory.index[::3]]), len(context.memory.index[::3])
    )
    losses = chosen.loss(batch, net(batch.images), teacher(batch.images) if chosen.needs_previous else None)
    torch.stack(list(losses.values())).sum().backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert not teacher.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in teacher.state_dict().items())
    trained = chosen.parameters(net, chosen.phases(context)[0].trainable)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)


@pytest.mark.parametrize("name", list(METHODS))
def test_losses_read_no_value_back_and_have_no_shape_that_depends_on_values(name: str, world: Any) -> None:
    """On the meta device tensors have no values: whatever a captured step could not do fails there."""
    chosen = method(name)
    context = world.context(chosen, number=1)
    batch = context.batch(
        torch.cat([context.task.train[::4], context.memory.index[::3]]), len(context.memory.index[::3])
    )
    batch = replace(batch, **{key: getattr(batch, key).to("meta") for key in ("images", "labels", "index")})
    net, teacher = context.network.to("meta").train(), context.previous.to("meta")
    for phase in chosen.phases(context):
        losses = getattr(chosen, phase.loss)(batch, net(batch.images), teacher(batch.images))
        assert all(term.shape == () for term in losses.values())
        torch.stack(list(losses.values())).sum().backward()
