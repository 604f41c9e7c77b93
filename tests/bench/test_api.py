"""What a notebook calls: tbbn.run, tbbn.sweep and tbbn.load."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tbbn
from tbbn.bench.cli.main import main
from tbbn.bench.config import resolve
from tbbn.bench.data.loading import load as load_data
from tbbn.bench.engine import run as run_engine
from tbbn.errors import UserError
from tbbn.plugins import temporary

TINY: dict[str, Any] = {
    "data": "synthetic:4x12x5x8",
    "device": "cpu",
    "threads": 1,
    "train.epochs": 1,
    "memory.budget": 8,
    "data.tasks": 2,
    "quiet": True,
}
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (48, 8, 8), dtype=np.uint8), np.arange(48) % 4
ARRAYS = {**TINY, "data": (IMAGES, LABELS)}


class Flat(nn.Module):
    """A backbone that takes images of one size only."""

    def __init__(self, in_channels: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.layer = nn.Linear(in_channels * image_size[0] * image_size[1], 10)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(images.flatten(1))).relu()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with temporary():
        yield


def test_a_run_in_memory_is_the_engines_and_writes_nothing(tmp_path: Path) -> None:
    (result,) = tbbn.run("er", "tbbn", **TINY)
    settings = {k: v for k, v in TINY.items() if k != "quiet"}
    record = run_engine(resolve({**settings, "method": "er", "norm": "tbbn"}))
    assert result.accuracy == record.accuracy and result.metrics == record.metrics
    assert result.record.weights == record.weights
    assert result.config == record.run_config and result.status == "finished"
    assert [entry["task"] for entry in result.history] == [0, 1]
    assert [len(predicted) for predicted in result.predictions] == [10, 20]
    assert os.listdir(tmp_path) == [] and result.directory is None


def test_seeds_are_a_number_or_a_list() -> None:
    assert [r.config.seed for r in tbbn.run(seeds=2, **TINY)] == [0, 1]
    assert [r.config.seed for r in tbbn.run(seeds=[3, 1], **TINY)] == [3, 1]
    assert [r.config.seed for r in tbbn.run(seed=5, **TINY)] == [5]


def test_settings_are_dotted_or_nested_and_choices_have_options() -> None:
    nested = {k: v for k, v in TINY.items() if "." not in k and k != "data"}
    nested |= {"train": {"epochs": 1}, "memory": {"budget": 8}, "data": {"name": TINY["data"], "tasks": 2}}
    (first,) = tbbn.run({"name": "lucir", "top_k": 1}, "gn(groups=8)", **nested)
    (second,) = tbbn.run("lucir(top_k=1)", {"name": "gn", "groups": 8}, **TINY)
    (third,) = tbbn.run("lucir", "gn", **TINY, **{"method.top_k": 1, "norm.groups": 8})
    assert first.config == second.config == third.config and first.accuracy == second.accuracy == third.accuracy
    assert first.config.method.dict()["top_k"] == 1


@pytest.mark.parametrize(
    ("method", "norm"), [("lucir", "tbbn"), ("icarl", "bn"), ("ft", "gn(groups=8)"), ("bic", "cn")]
)
def test_the_network_predicts_what_the_run_predicted(method: str, norm: str, tmp_path: Path) -> None:
    (result,) = tbbn.run(method, norm, **TINY)
    net = result.network()
    source = load_data(TINY["data"])
    assert isinstance(source.test.images, torch.Tensor)
    expected = {cls: i for i, cls in enumerate(net.classes)}
    order = result.record.class_order
    assert net.classes == tuple(source.classes[i] for i in order)
    # The run evaluates task by task, in arrival order of the classes.
    rows = torch.cat(
        [torch.where((source.test.labels[:, None] == torch.tensor(order[t : t + 2])).any(1))[0] for t in (0, 2)]
    )
    predicted = [expected[name] for name in net.predict(source.test.images[rows])]
    assert predicted == result.predictions[-1].tolist()
    floats = net(source.test.images[rows].float() / 255)
    assert floats.shape == (20, 4) and floats.argmax(1).tolist() == predicted
    assert not net.training and not any(p.requires_grad for p in net.parameters())
    norms = {type(m) for m in net.modules() if "Norm" in type(m).__name__}
    if norm in ("tbbn", "bn"):
        assert norms == {nn.BatchNorm2d}
    assert result.network() is not net  # a copy: what is done to one does not change the run

    (kept,) = tbbn.run(method, norm, **TINY, out=tmp_path / "kept")
    for other in (kept, *tbbn.load(tmp_path)):
        assert other.directory == tmp_path / "kept"
        assert torch.equal(other.network()(source.test.images), net(source.test.images))
        assert [p.tolist() for p in other.predictions] == [p.tolist() for p in result.predictions]


def test_with_out_runs_are_kept_and_resumed_as_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tbbn.run(["ft", "er"], "bn", **TINY, seeds=2, out="mine")
    assert sorted(p.name for p in Path("mine").iterdir() if p.is_dir()) == ["er-bn-0", "er-bn-1", "ft-bn-0", "ft-bn-1"]
    monkeypatch.setattr("tbbn.bench.runs.sweep.run_saved", None)  # nothing is trained any more
    again = tbbn.run(["ft", "er"], "bn", **TINY, seeds=2, out="mine")
    assert [r.accuracy for r in again] == [r.accuracy for r in first]
    assert main(["report", "mine"]) == 0 and main(["verify", "mine"]) == 0 and main(["resume", "mine", "--quiet"]) == 0
    capsys.readouterr()
    assert {(r.config.method.name, r.config.seed) for r in tbbn.load("mine")} == {
        (m, s) for m in ("ft", "er") for s in (0, 1)
    }
    with pytest.raises(UserError, match="holds a run with another config"):
        tbbn.run(["ft", "er"], "bn", **{**TINY, "train.epochs": 2}, seeds=2, out="mine")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (other,) = tbbn.run(**{**TINY, "train.epochs": 2}, out="mine/ft-bn-0", overwrite=True)
    assert other.config.train.epochs == 2


def test_a_sweep_is_a_run_of_many() -> None:
    results = tbbn.sweep(["ft", "er"], ["bn", "tbbn"], **TINY)
    assert [str(r.config.method) + str(r.config.norm) for r in results] == ["ftbn", "fttbbn", "erbn", "ertbbn"]
    assert isinstance(results, list) and all(r.status == "finished" and r.network() for r in results)
    assert re.search(r"^ft \+ bn +1", repr(results), re.MULTILINE)
    assert re.match(
        r"<Result ft \+ bn, synthetic:4x12x5x8, seed 0: finished, final accuracy \d+\.\d %>", repr(results[0])
    )


def test_data_may_be_arrays_or_datasets(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = tbbn.run(**ARRAYS, out="kept")
    assert re.fullmatch(r"arrays:[0-9a-f]{16}", result.config.data.name)
    held_out = [i for i in range(48) if (i // 4) % 5 == 4]
    train = [i for i in range(48) if i not in held_out]
    tensors = [torch.from_numpy(array) for array in (IMAGES, LABELS)]
    parts = [tuple(tensor[torch.tensor(rows)] for tensor in tensors) for rows in (train, held_out)]
    for same in (TensorDataset(*tensors), parts, tuple(TensorDataset(*part) for part in parts)):
        (other,) = tbbn.run(**{**ARRAYS, "data": same})
        assert other.config.data.name == result.config.data.name and other.accuracy == result.accuracy
    assert result.network()(torch.from_numpy(IMAGES)[:, None]).shape == (48, 4)
    assert main(["verify", "kept"]) == 0 and main(["show", "kept"]) == 0
    assert "OK" in capsys.readouterr().out
    assert main(["verify", "kept", "--json"]) == 0  # the data is still there: its labels are compared
    subjects = [finding["subject"] for finding in json.loads(capsys.readouterr().out)[0]["findings"]]
    assert "accuracy after task 2" in subjects
    name = result.config.data.name
    del result, other
    gc.collect()
    assert main(["verify", "kept", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)[0]["findings"]
    assert any(finding["not_checked"].startswith("the data was passed in memory") for finding in findings)
    (loaded,) = tbbn.load("kept")
    assert loaded.network()(torch.from_numpy(IMAGES)[:, None]).shape == (48, 4)  # needs no data
    with pytest.raises(
        UserError, match=f"'{name}' was passed in memory and is no longer available; pass the same data"
    ):
        tbbn.run(**{**ARRAYS, "data": name})
    assert tbbn.run(**ARRAYS, out="kept")[0].accuracy == loaded.accuracy


def test_a_backbone_may_be_a_function() -> None:
    (result,) = tbbn.run("er", "tbbn", **TINY, backbone=Flat, out="kept")
    name = result.config.backbone
    assert name.endswith("test_api.Flat")
    (plugin,) = result.record.plugins
    assert plugin["brings"] == [f"backbone {name}"] and plugin["name"].endswith(("test_api", "test_api.py"))
    images = torch.rand(3, 3, 8, 8)
    scores = result.network()(images)
    assert isinstance(result.network().network.backbone.module.norm, nn.BatchNorm1d)  # type: ignore[union-attr]
    (same,) = tbbn.run("er", "tbbn", **TINY, backbone=lambda in_channels, image_size: Flat(in_channels, image_size))
    assert same.accuracy == result.accuracy and torch.equal(same.network()(images), scores)
    with temporary(fresh=True):
        (loaded,) = tbbn.load("kept")
        assert loaded.accuracy == result.accuracy
        with pytest.raises(UserError, match=f"kept: backbone '{name}' is not registered here; .* tbbn.load"):
            loaded.network()
        assert torch.equal(tbbn.load("kept", backbone=Flat)[0].network()(images), scores)


def test_frames_need_pandas_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    results = tbbn.run(**TINY, seeds=2)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for made in (results, results[0]):
        with pytest.raises(UserError, match=r"^to_frame needs pandas; pip install pandas\.$"):
            made.to_frame()
    fake = types.SimpleNamespace(DataFrame=lambda rows, columns=None: (rows, columns))
    monkeypatch.setitem(sys.modules, "pandas", fake)  # type: ignore[arg-type]
    rows, _ = results.to_frame()
    assert [(row["method"], row["norm"], row["data"], row["seed"], row["status"]) for row in rows] == [
        ("ft", "bn", "synthetic:4x12x5x8", seed, "finished") for seed in (0, 1)
    ]
    assert rows[0]["final_accuracy"] == results[0].metrics["final_accuracy"]
    ((a,), (b, c)) = results[0].accuracy
    assert results[0].to_frame() == ([(1, 1, a), (2, 1, b), (2, 2, c)], ["after_task", "task", "accuracy"])


def test_frames_of_pandas() -> None:
    pytest.importorskip("pandas")
    results = tbbn.run(**TINY, seeds=2)
    frame = results.to_frame()
    assert list(frame["seed"]) == [0, 1] and set(frame["norm"]) == {"bn"} and frame["final_accuracy"].dtype == float
    one = results[0].to_frame().pivot(index="after_task", columns="task", values="accuracy")
    assert one.loc[2].tolist() == results[0].accuracy[1]


def test_plots_are_figures(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    results = tbbn.run(**TINY)
    figure = results.plot(tmp_path / "curves.png")
    assert isinstance(figure, figures.Figure) and (tmp_path / "curves.png").stat().st_size > 1000
    assert isinstance(results[0].plot(kind="matrix"), figures.Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows


def test_progress_is_shown_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    tbbn.run(**TINY)
    assert capsys.readouterr() == ("", "")
    tbbn.run(**{**TINY, "quiet": False})
    said = capsys.readouterr()
    assert said.out == "" and "ft + bn, seed 0: task 2/2, mean accuracy" in said.err


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"method": "lucri"}, r"unknown method 'lucri'; .*Did you mean 'lucir'\?"),
        ({"norm": "tbn"}, r"unknown norm 'tbn'; .*Did you mean 'tbbn'\?"),
        ({"data": "digit"}, r"unknown dataset 'digit'; .*Did you mean 'digits'\?"),
        ({"backbone": "resnet31"}, r"unknown backbone 'resnet31'; .*Did you mean 'resnet"),
        ({"batch.augment": "flop"}, r"unknown augmentation 'flop'; .*Did you mean 'flip'\?"),
        ({"method": 3}, "tbbn.run: method must be a name, a list of names or a dict with a name, got 3"),
        ({"norm": ["bn", 3]}, "tbbn.run: norm must be a name, a list of names"),
        ({"seeds": 0}, "tbbn.run: seeds must be a number of seeds, or distinct seeds of at least 0, got 0"),
        ({"seeds": "3"}, "seeds must be a number"),
        ({"seeds": [1, 1]}, "seeds must be a number"),
        ({"seeds": 2, "seed": 1}, "tbbn.run: use either seed or seeds"),
        ({"train.epoch": 2}, r"tbbn.run: \[train\] has no option 'epoch'; .*Did you mean 'epochs'\?"),
        ({"train": {"epochs": "two"}}, "tbbn.run: train.epochs must be a whole number"),
        ({"epochs": 2}, "tbbn.run: unknown setting 'epochs'"),
        ({"data": 3}, r"data: must be \(images, labels\), .* got 3"),
        ({"data": (IMAGES, LABELS[:3])}, "data, train: 48 images but 3 labels"),
        ({"backbone": nn.Identity()}, "backbone must be a name, or a function that returns a new module, got Identity"),
        ({"backbone": 3}, "backbone must be a name, or a function that returns a new module, got int"),
        ({"backbone": lambda: 3}, r"must return a torch\.nn\.Module, got int"),
        ({"method": "podnet", "backbone": Flat}, "method 'podnet' needs a backbone that returns its stages"),
        ({"norm": "gn(groups=7)"}, "gn: groups=7 does not divide 32 channels"),
        ({"plugins": ["nothing.py"], "method": "lwf"}, r"plugin nothing.py: no such file in .*\."),
        ({"plugins": ["nothing.py"]}, r"plugin nothing.py: no such file in .*\."),
        ({"seeds": [[1]]}, r"seeds must be a number of seeds, .* got \[\[1\]\]"),
        ({"seeds": np.array([0.5])}, "seeds must be a number"),
        ({"seeds": {"a": 1}}, "seeds must be a number"),
        (
            {"method": "ft", "method.name": "lucir"},
            "tbbn.run: method is given twice, as method and as method.name; leave",
        ),
        ({"norm": {"name": "bn"}, "norm.name": "gn"}, "tbbn.run: norm is given twice"),
        ({"data.name": "digits"}, "tbbn.run: data is given twice"),
        (
            {"train.optimizer": "adam", "train.momentum": 0.9},
            r"train\.momentum has no effect with train\.optimizer = 'adam'",
        ),
        ({"plugins": [""]}, "plugin '': must be a module's name or a Python file"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    for out in (None, "kept"):
        with pytest.raises(UserError, match=wanted) as error:
            tbbn.run(**{**TINY, **given}, out=out)
        assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [3, b"kept", ["kept"]])
def test_a_folder_must_be_a_path(path: Any) -> None:
    with pytest.raises(UserError, match=r"^tbbn\.run: out must be a path, got"):
        tbbn.run(**TINY, out=path)
    for wrong in (path, None):
        with pytest.raises(UserError, match=r"^tbbn\.load: the folder must be a path, got"):
            tbbn.load(wrong)


def test_a_sweep_takes_plurals() -> None:
    with pytest.raises(
        UserError, match=r"^tbbn\.sweep: takes methods, not method: tbbn\.sweep\(methods=\['ft', 'er'\]\)"
    ):
        tbbn.sweep(method=["ft", "er"])
    with pytest.raises(UserError, match=r"^tbbn\.sweep: takes norms, not norm"):
        tbbn.sweep("ft", norm="bn")


def test_numbers_and_arrays_may_be_of_numpy() -> None:
    of_numpy = {
        "train.epochs": np.int64(1),
        "memory.budget": np.uint8(8),
        "data.tasks": np.int32(2),
        "train.milestones": np.array([0.5, 0.75]),
        "train.nesterov": np.bool_(False),
        "norm.groups": np.int64(8),
        "train.lr": np.float32(0.5),
        "lanes": np.int64(1),
    }
    results = tbbn.run("ft", "gn", **{**TINY, **of_numpy}, seeds=np.arange(2), out="kept")
    assert [(r.config.seed, r.config.train.lr, r.config.train.milestones) for r in results] == [
        (seed, 0.5, (0.5, 0.75)) for seed in (0, 1)
    ]
    assert results[0].record.config["norm"]["groups"] == 8 and Path("kept/runs.toml").exists()
    assert len(tbbn.run(**TINY, seeds=np.int64(1))) == 1


def test_the_network_takes_arrays_and_says_what_it_does_not_take() -> None:
    net = tbbn.run(**TINY)[0].network()
    images = RNG.integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)
    assert torch.equal(net(images), net(torch.from_numpy(images)))
    assert net.predict(images) == net.predict(torch.from_numpy(images))
    for wrong, got in ((images[0], r"\(3, 8, 8\)"), (images[:, :1], r"\(5, 1, 8, 8\)"), ([1], "list"), ("x", "str")):
        with pytest.raises(
            UserError, match=rf"^network\(\): images must be a tensor or an array \(N, 3, H, W\), got {got}"
        ):
            net(wrong)
    with pytest.raises(UserError, match=r"images must be uint8, or floats in \[0, 1\], got torch\.int64"):
        net(images.astype(np.int64))


def test_loading_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run here; the folder of a run holds a record\.json"):
        tbbn.load(tmp_path)
    with pytest.raises(UserError, match="nothing: no run here"):
        tbbn.load("nothing")


def test_a_run_without_a_checkpoint_has_no_network() -> None:
    tbbn.run(**TINY, out="kept")
    for file in Path("kept").glob("*.safetensors"):
        file.unlink()
    assert json.loads(Path("kept/record.json").read_text())["data"]["shape"] == [3, 8, 8]
    with pytest.raises(UserError, match="kept: no checkpoint here, so there is no network to load"):
        tbbn.load("kept")[0].network()


@pytest.mark.parametrize("lanes", [0, -1, 1.5, True, "many"])
def test_a_wrong_number_of_lanes_is_one_line(lanes: Any) -> None:
    with pytest.raises(UserError, match="lanes must be a whole number of at least 1, or 'auto'"):
        tbbn.run("ft", "bn", "synthetic:4x6x2x8", lanes=lanes, quiet=True)


class NoBatchNorm(nn.Module):
    """A network with group norm only."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        layers = (nn.Conv2d(in_channels, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def test_a_network_without_batch_norm_trains_as_it_is_and_takes_no_other_norm() -> None:
    settings = {"data": "synthetic:4x6x2x8", "data.tasks": 2, "train.epochs": 1, "memory.budget": 4}
    result = tbbn.run(backbone=NoBatchNorm, quiet=True, **settings)[0]
    assert any(isinstance(layer, nn.GroupNorm) for layer in result.network().modules())
    line = r"norm 'tbbn' replaces batch norms, and backbone '.*NoBatchNorm' has none; norm 'bn' trains it as it is\.$"
    with pytest.raises(UserError, match=line):
        tbbn.run(norm="tbbn", backbone=NoBatchNorm, quiet=True, **settings)


def test_a_single_run_in_the_folder_of_a_sweep_gets_one_of_its_own(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": "synthetic:4x12x4x8", "quiet": True, "out": tmp_path, "threads": 1}
    given |= {"data.tasks": 2, "memory.budget": 8, "train.epochs": 1}
    tbbn.run(seeds=2, **given)
    (joined,) = tbbn.run(seeds=[5], **given)
    assert joined.directory == tmp_path / "ft-bn-5" and len(tbbn.load(tmp_path)) == 3
