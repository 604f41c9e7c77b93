"""Export a trained network for other programs: safetensors and ONNX, both checked against the network, and a model card."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tbbn.bench.config import RunConfig, resolve, without_place
from tbbn.bench.data.augment import evaluation_view, normalise
from tbbn.bench.engine.plugins import require_plugins
from tbbn.bench.engine.record import Record, digest
from tbbn.bench.engine.setup import build_network, load_source, method_of, outline_source
from tbbn.bench.files import file_sha256, folder_writer, read_limited
from tbbn.bench.interchange.card import model_card
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.trained import TrainedNetwork, load_trained
from tbbn.errors import UserError
from tbbn.nn import revert

WEIGHTS, ONNX, ABOUT, CARD = "model.safetensors", "model.onnx", "model.json", "README.md"
_KIND = "tbbn export"  # the "kind" in ABOUT
_LARGEST = 2**24  # bytes of ABOUT
_IMAGES = 256  # number of images to compare predictions on
_DATA_BYTES = 2**30  # larger data sets are not loaded for the comparison


@dataclass(frozen=True)
class Exported:
    """The checks that an export made, and those that it could not make."""

    checked: tuple[str, ...]
    not_checked: tuple[str, ...]


class _Scores(nn.Module):
    """The module in the ONNX file: images (N, C, H, W) in [0, 1], of the network's input size, to scores (N, classes)."""

    mean: Tensor
    std: Tensor

    def __init__(self, trained: TrainedNetwork) -> None:
        super().__init__()
        self.network, self.method = trained.network, trained.method
        self.register_buffer("mean", trained.mean)
        self.register_buffer("std", trained.std)

    def forward(self, images: Tensor) -> Tensor:
        return self.method.predict(self.network(normalise(images, self.mean, self.std)))


def export(
    run: Path, out: Path, *, task: int | None = None, overwrite: bool = False, root: str | None = None
) -> Exported:
    """Write the network of a run, after its last task or after ``task`` (1-based), into the folder ``out``.

    An existing export of the same run is replaced, one of another run only with ``overwrite``, any other folder never. A kill
    leaves either the old folder or the new one. ``root`` is the folder of the data sets, if they have moved since the run.
    """
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise UserError(f"tbbn export needs {' and '.join(missing)}; pip install 'tbbn[export]'.")
    record = load_record(run)
    n_learnt = len(record.accuracy)
    n_tasks = n_learnt if task is None else task
    if not n_learnt:
        raise UserError(f"{run}: no task is learnt yet, so there is no network to export.")
    if not 1 <= n_tasks <= n_learnt:
        raise UserError(f"{run}: --task must be from 1 to {n_learnt}, the tasks learnt, got {n_tasks}.")
    trained = load_trained(record, run, after=n_tasks)
    about = _about(record, trained, n_tasks)
    _check_place(out, about, overwrite)
    images, what = _images(record.run_config.at(root), record.data["shape"], trained)
    scores = _Scores(trained).eval()
    with torch.no_grad():
        wanted = scores(images)
    checked, not_checked = [], []
    with folder_writer(out) as folder:
        _write_weights(trained, folder / WEIGHTS)
        _write_onnx(scores, images[:2], folder / ONNX)
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        with torch.no_grad():
            again = _Scores(load_export(folder))(images)
        checked.append(_compared(WEIGHTS, again, wanted, 0.0, what))
        if find_spec("onnxruntime") is None:
            not_checked.append(f"{ONNX}: onnxruntime is not installed; pip install 'tbbn[export]'")
        else:
            checked.append(
                _compared(f"{ONNX} in ONNX Runtime", _in_onnxruntime(folder / ONNX, images), wanted, 1e-3, what)
            )
        sums = {name: file_sha256(folder / name) for name in (WEIGHTS, ONNX, ABOUT)}
        (folder / CARD).write_text(model_card(record, about, checked, not_checked, sums))
    return Exported(tuple(checked), tuple(not_checked))


def load_export(folder: str | Path) -> TrainedNetwork:
    """The network in the folder of an export: ``net(images)`` gives scores, ``net.predict(images)`` class names."""
    from safetensors.torch import load_file

    about = _read_about(Path(folder))
    config = resolve(("model.json", about["config"]))
    require_plugins(config, about["plugins"], str(folder))
    shape = about["shape"]
    network = build_network(config, method_of(config), (shape[0], shape[1], shape[2]))
    with suppress(UserError):  # a norm that is not batch norm in eval mode is kept
        revert(network)
    network.restore(load_file(Path(folder) / WEIGHTS), about["task_sizes"])
    mean, std = torch.tensor(about["mean"]), torch.tensor(about["std"])
    network.eval().requires_grad_(False)
    return TrainedNetwork(network, method_of(config), about["classes"], mean, std, about["crop"] or None).eval()


def _about(record: Record, trained: TrainedNetwork, n_tasks: int) -> dict[str, Any]:
    """The content of ``model.json``: everything needed to use the network."""
    config = record.run_config
    return {
        "kind": _KIND,
        "classes": list(trained.classes),
        "shape": list(record.data["shape"]),
        "mean": trained.mean.tolist(),
        "std": trained.std.tolist(),
        "crop": config.data.crop,
        "tasks": n_tasks,
        "task_sizes": list(trained.network.task_sizes),
        "plain_batch_norm": _is_plain(trained.network),
        "weights": digest(trained.network.state_dict()),
        "plugins": record.plugins,
        "environment": record.environment,
        "config": record.config,
    }


def _is_plain(network: nn.Module) -> bool:
    """Whether no converted norms are left: `revert` raises for those that are not batch norm in eval mode."""
    try:
        revert(copy.deepcopy(network))
    except UserError:
        return False
    return True


def _check_place(out: Path, about: dict[str, Any], overwrite: bool) -> None:
    if not out.exists():
        return
    try:
        there = _read_about(out)
    except UserError:
        raise UserError(f"{out}: is not an export; choose another folder with --out.") from None
    if without_place(there["config"]) != without_place(about["config"]) and not overwrite:
        raise UserError(
            f"{out}: holds the export of another run; choose another folder with --out, or add --overwrite."
        )


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads(read_limited(folder / ABOUT, _LARGEST))
    except (OSError, ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("kind") != _KIND:
        raise UserError(f"{folder}: not the folder of an export; it must hold a {ABOUT}.")
    return about


def _images(config: RunConfig, shape: Sequence[int], trained: TrainedNetwork) -> tuple[Tensor, str]:
    """Images in [0, 1] to compare predictions on: test images if available and not too large, otherwise random ones."""
    with suppress(UserError):
        size = outline_source(config).source
        if sum(math.prod(part.images.shape) for part in (size.train, size.test)) <= _DATA_BYTES:
            stored = load_source(config, download=False).test.images
            if isinstance(stored, Tensor):
                rows = torch.linspace(0, len(stored) - 1, min(_IMAGES, len(stored))).long()
                return evaluation_view(stored[rows], crop=trained.crop), f"{len(rows)} test images"
    noise = torch.rand(64, *shape, generator=torch.Generator().manual_seed(0))
    return noise, "64 random images (its data is not here)"


def _write_weights(trained: TrainedNetwork, file: Path) -> None:
    from safetensors.torch import save  # not save_file, whose files only their owner may read

    tensors = {name: tensor.contiguous().clone() for name, tensor in trained.network.state_dict().items()}
    file.write_bytes(save(tensors, metadata={"format": "pt"}))


def _write_onnx(scores: nn.Module, images: Tensor, file: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's warnings about itself
            program = torch.onnx.export(
                scores,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["scores"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            )
            assert program is not None
            program.save(str(file))
    except Exception as error:  # a plugin's network may use anything that ONNX does not support
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"this network cannot be written as ONNX: {reason}") from error


def _in_onnxruntime(file: Path, images: Tensor) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _compared(name: str, found: Tensor, wanted: Tensor, tolerance: float, what: str) -> str:
    """Raise unless predictions are the same, else say so. Classes whose scores differ by less than rounding count as ties."""
    apart = (found - wanted).abs().max().item()
    allowed = tolerance * max(1.0, wanted.abs().max().item())
    same = int((found.argmax(1) == wanted.argmax(1)).sum())
    best = wanted.topk(min(2, wanted.shape[1]), dim=1).values
    is_tie = best[:, 0] - best[:, -1] <= 2 * allowed
    differs = (found.argmax(1) != wanted.argmax(1)) & ~is_tie
    if not apart <= allowed or bool(differs.any()):
        raise UserError(
            f"{name}: {same} of {len(wanted)} predictions are those of the network, scores differ by {apart:.2g}."
        )
    return f"{name}: the same predictions as the network on {what}; scores differ by at most {apart:.1g}"
