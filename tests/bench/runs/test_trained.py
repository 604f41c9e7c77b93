"""A trained network from a run's folder: which weights, which classes, and what a record of an earlier version lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinyrun import finish, tiny

from tbbn.bench.runs import checkpoint, trained
from tbbn.bench.runs.record import load_record, save_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.trained import load_trained
from tbbn.errors import UserError

CONFIG: dict[str, Any] = {"train__epochs": 1, "norm__name": "tbbn"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("done")
    run_saved(tiny(**CONFIG), directory)
    return directory


@pytest.mark.parametrize("after", [1, 2, 3, None])
def test_the_network_after_any_task_has_the_classes_and_the_weights_of_that_moment(
    after: int | None, done: Path
) -> None:
    record = load_record(done)
    net = load_trained(record, done, after)
    run = finish(tiny(**CONFIG, data__stop_after=after or 3))
    assert net.classes == tuple(record.data["classes"][i] for i in record.class_order[: 2 * (after or 3)])
    weights, mine = net.network.state_dict(), run.network.state_dict()
    assert weights.keys() == mine.keys() and all(torch.equal(weights[name], mine[name]) for name in mine)
    images = run.source.test.images
    assert isinstance(images, torch.Tensor)
    assert net(images[:3]).shape == (3, 2 * (after or 3))
    assert not any(module.training for module in net.modules()) and run.network is not net.network


def test_saved_weights_that_are_not_those_of_the_record_are_refused(done: Path) -> None:
    record = load_record(done)
    record.weights[1] = "0" * 64
    assert load_trained(record, done, 1) and load_trained(record, done, 3) and load_trained(record, done)
    with pytest.raises(
        UserError, match=r"the saved weights are not those of the record after task 2; see tbbn verify\.$"
    ):
        load_trained(record, done, 2)


def test_a_record_that_does_not_know_its_data_is_completed_from_the_data_set_without_a_download(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = load_record(done)
    wanted = load_trained(record, done)
    real, asked = trained.load_source, []

    def watched(config: Any, **options: Any) -> Any:
        asked.append(options)
        return real(config)

    monkeypatch.setattr(trained, "load_source", watched)
    load_trained(record, done)
    assert asked == [], "a record that knows them needs no data"
    record.data = {}
    net = load_trained(record, done)
    assert asked == [{"download": False}] * 2
    assert net.classes == wanted.classes and torch.equal(net.mean, wanted.mean) and torch.equal(net.std, wanted.std)


def test_a_network_is_made_for_images_of_the_recorded_shape(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def ask(config: Any, method: Any, shape: tuple[int, ...]) -> None:
        raise Asked(shape)

    record = load_record(done)
    record.data["shape"] = [3, 10, 12]
    monkeypatch.setattr(trained, "build_network", ask)
    with pytest.raises(Asked) as asked:
        load_trained(record, done)
    assert asked.value.args == ((3, 10, 12),)


def test_images_are_cropped_as_in_the_evaluation_of_the_run() -> None:
    run = finish(tiny(data__crop=6, data__stop_after=1, train__epochs=1))
    net = trained.trained(run.record, run.network)
    images = run.source.test.images
    assert isinstance(images, torch.Tensor) and net.crop == 6
    assert torch.equal(net(images), net(images[:, :, 1:7, 1:7]))
    rows = run.scenario.tasks[0].test
    assert net(images[rows]).argmax(1).tolist() == run.record.predictions["task0"].tolist()
    plain = finish(tiny(data__stop_after=1, train__epochs=1))
    assert trained.trained(plain.record, plain.network).crop is None


def test_the_plugins_of_a_run_are_asked_for_before_its_network_is_made(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise UserError(repr(given))

    record = load_record(done)
    monkeypatch.setattr(trained, "require_plugins", refuse)
    with pytest.raises(UserError) as caught:
        load_trained(record, done)
    assert str(caught.value) == repr((record.run_config, record.plugins, str(done)))


def test_without_a_checkpoint_there_is_no_network(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "run")
    record = load_record(done)
    for file in (tmp_path / "run").glob("checkpoint*"):
        file.unlink()
    with pytest.raises(UserError, match=r"run: no checkpoint here, so there is no network to load\.$"):
        load_trained(record, tmp_path / "run")
    assert load_trained(record, tmp_path / "run", 1).network.n_classes == 2, "those of tasks are still there"
    with pytest.raises(UserError, match="the network after task 3 is not saved"):
        load_trained(record, tmp_path / "run", 3)
    save_record(record, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run") is None


def test_only_tensors_and_arrays_are_images(done: Path) -> None:
    class Odd:
        ndim = 4

    net = load_trained(load_record(done), done)
    images = np.zeros((2, 3, 8, 8), dtype=np.uint8)
    assert torch.equal(net(images), net(torch.from_numpy(images)))
    for wrong, got in (
        (Odd(), "Odd"),
        (np.add, "ufunc"),
        (images.tolist(), "list"),
        (None, "NoneType"),
    ):
        with pytest.raises(UserError, match=rf"images must be a tensor or an array \(N, 3, H, W\), got {got}\.$"):
            net(wrong)
