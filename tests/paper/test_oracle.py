"""The oracle experiment: new statistics and new affine parameters for a trained network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyrun import finish, tiny
from torch import Tensor

from tbbn.bench.engine.phase import PhaseSettings
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.engine.task import EngineTaskContext
from tbbn.bench.methods import Phase
from tbbn.bench.runs.record import save_record
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError
from tbbn.paper import oracle


@pytest.fixture(scope="module")
def context() -> EngineTaskContext:
    """The last task of joint training with batch norm."""
    run = finish(tiny(method="joint", norm="bn", train__epochs=1))
    return run.context(run.scenario.tasks[-1])


def test_new_statistics_are_averages_over_all_data(context: EngineTaskContext) -> None:
    layer = oracle.norms_of(context.network)[0]
    before = {name: tensor.clone() for name, tensor in context.network.named_parameters()}
    momentum, seen = layer.momentum, list[Tensor]()
    layer.running_mean.fill_(100.0)  # type: ignore[union-attr]
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().double()))
    oracle.refresh_statistics(context)
    handle.remove()
    rows = sum(len(task.train) for task in context.scenario.tasks)
    assert rows - context.config.batch.size < sum(len(x) for x in seen) <= rows  # every task's, once
    mean = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    var = torch.stack([x.var((0, 2, 3), unbiased=True) for x in seen]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.running_var, var.float(), rtol=1e-4, atol=1e-5)
    assert layer.momentum == momentum and not context.network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in context.network.named_parameters())


def test_only_affine_parameters_are_trained(context: EngineTaskContext) -> None:
    before = {name: tensor.clone() for name, tensor in context.network.named_parameters()}
    affine = {id(p) for layer in oracle.norms_of(context.network) for p in (layer.weight, layer.bias)}
    oracle.retrain_affine(context, replace(PhaseSettings.of(context.config, Phase(), context.number), epochs=1))
    for name, tensor in context.network.named_parameters():
        assert torch.equal(tensor, before[name]) == (id(tensor) not in affine), name


def finished(**settings: Any) -> Record:
    record = new_record(tiny(**{"train__epochs": 1, **settings}))
    record.status = "finished"
    return record


def test_the_four_procedures_of_two_runs(tmp_path: Path) -> None:
    folders = []
    for method in ("ft", "joint"):
        folders.append(tmp_path / method)
        run_saved(tiny(method=method, norm="bn", train__epochs=1), folders[-1])
    with pytest.raises(UserError, match="needs a finished run of ft and one of joint"):
        oracle.pairs(folders[:1])
    for name, settings in (("other", {"norm": "tbbn"}), ("third", {"norm": "bn", "train__lr": 0.01})):
        save_record(finished(method="joint", **settings), tmp_path / name)
    assert oracle.pairs([tmp_path / "other", *folders, tmp_path / "third"]) == {0: tuple(folders)}
    save_record(finished(method="ft", norm="tbbn"), tmp_path / "fourth")
    with pytest.raises(UserError, match=r"draws one experiment, but .*fourth and .*ft differ in more than their seed"):
        oracle.pairs([tmp_path / "fourth", tmp_path / "other", *folders])
    found = oracle.oracle(*oracle.pairs(folders)[0])
    assert tuple(sorted(found)) == tuple(sorted(oracle.PROCEDURES))
    assert all(len(row) == 3 and all(0 <= value <= 1 for value in row) for row in found.values())
    table = oracle.accuracy_table([found], oracle.title(folders[0]))
    assert [row[0] for row in table.rows] == list(oracle.PROCEDURES)
    bars = [bar.get_height() for bar in oracle.figure([found], "title").axes[0].patches]
    means = [sum(found[name]) / 3 for name in oracle.PROCEDURES]
    wanted = [100 * v for name, mean in zip(oracle.PROCEDURES, means, strict=True) for v in (*found[name], mean)]
    assert bars == pytest.approx(wanted)


def test_an_outcome_is_computed_once_for_the_same_networks_and_not_kept_if_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for method, seed in (("ft", 0), ("joint", 0), ("joint", 1)):
        folders.append(tmp_path / f"{method}{seed}")
        run_saved(tiny(method=method, norm="bn", train__epochs=2, seed=seed), folders[-1])
    ft, joint, other = folders
    told: list[str] = []

    def stop(where: str) -> None:
        if "epoch 2/2" in where:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oracle.outcome(ft, joint, tmp_path, stop)
    found = oracle.outcome(ft, joint, tmp_path, told.append)
    line = "new affine parameters from all training data, epoch"
    assert told == ["new statistics from all training data", f"{line} 1/2", f"{line} 2/2"]
    monkeypatch.setattr(oracle, "oracle", lambda *given: pytest.fail("computed again"))
    assert oracle.outcome(ft, joint, tmp_path) == found
    (file,) = tmp_path.glob("fig-oracle/*.json")
    file.write_text(file.read_text().replace('"networks": ["', '"networks": ["0'))
    whole = file.read_text()
    monkeypatch.setattr(oracle, "oracle", lambda *given: {"of": [given[1].name]})
    for damaged in (whole[:-9], "[]", "{}", '{"networks": 1}'):
        file.write_text(damaged)
        assert oracle.outcome(ft, joint, tmp_path) == {"of": ["joint0"]}, damaged
    file.write_text(whole)
    assert oracle.outcome(ft, joint, tmp_path) == {"of": ["joint0"]}, "of other networks"
    assert oracle.outcome(ft, other, tmp_path) == {"of": ["joint1"]}


def test_pairs_are_finished_runs_of_the_same_seed_the_first_of_each(tmp_path: Path) -> None:
    def made(name: str, status: str = "finished", **settings: Any) -> Path:
        save_record(replace(finished(**settings), status=status), tmp_path / name)
        return tmp_path / name

    cut, ft, again = (
        made("cut", "interrupted", method="ft"),
        made("ft", method="ft"),
        made("again", method="ft", threads=2),
    )
    other, joint = made("other", method="ft", seed=3), made("joint", method="joint", device="cuda")
    joint3 = made("joint3", method="joint", seed=3)
    assert list(oracle.pairs([joint3, other, cut, ft, again, joint]).items()) == [
        (0, (ft, joint)),
        (3, (other, joint3)),
    ]
    shuffled = made("shuffled", method="joint", data__class_order_seed=5)
    with pytest.raises(UserError, match="with the same settings and seed"):
        oracle.pairs([ft, shuffled])
