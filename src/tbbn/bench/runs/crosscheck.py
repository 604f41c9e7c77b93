"""Check a record against the checkpoints of its run and the networks in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tbbn.bench.config import RunConfig, without_place
from tbbn.bench.data.scenario import Scenario
from tbbn.bench.data.types import Source
from tbbn.bench.engine import setup
from tbbn.bench.engine.evaluate import evaluate
from tbbn.bench.engine.events import Position
from tbbn.bench.engine.plugins import without_plugins
from tbbn.bench.engine.record import Record, digest, environment
from tbbn.bench.engine.torch_settings import torch_settings
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.finding import Finding
from tbbn.bench.runs.record import record_from
from tbbn.bench.runs.state import is_of
from tbbn.errors import UserError

State = tuple[dict[str, Any], dict[str, Tensor]]  # the result of checkpoint.read

# The parts of the environment that affect the rounding of floating-point sums.
ENVIRONMENT = ("device", "gpu", "torch", "cuda", "cudnn", "machine", "cpu", "threads", "ranks", "tbbn")
_KERNEL = "cpu_kernel"  # affects training only: in eval mode the norms that use it are plain batch norm
ROUNDING = 0.01  # the fraction of predictions that rounding may change in another environment

_SAME = ("data", "class_order", "task_sizes", "skipped", "environment", "plugins")
_GROWING = ("accuracy", "task_il", "calibrated", "errors", "exemplars", "splits", "weights", "history", "resumed")


def compared(record: Record, predictions: Mapping[str, Tensor], states: Mapping[str, State]) -> Iterator[Finding]:
    """Check every checkpoint against the record and the predictions, and for consistency."""
    for name, (values, tensors) in states.items():
        try:
            problem = _problem(name, record, predictions, values, tensors)
        except Exception as error:  # a file with a valid checksum may still contain anything
            problem = f"does not fit this run ({type(error).__name__}: {error})."
        yield Finding(name, problem)
    if not states:
        yield Finding("checkpoints", not_checked="there are none")


def _problem(
    name: str, record: Record, predictions: Mapping[str, Tensor], values: dict[str, Any], tensors: dict[str, Tensor]
) -> str:
    if not is_of(values, record.run_config):
        return "is of a run with another config."
    own, position = record_from(values["record"], name), Position(**values["position"])
    n, is_between = position.task, position == Position(position.task)
    if name not in (checkpoint.NEWEST, checkpoint.PREVIOUS) and (not is_between or name != checkpoint.task_file(n)):
        return f"is not the state at the start of its task, but that at {position}."
    if n != len(own.accuracy):
        return f"is at task {n + 1}, but its record has {len(own.accuracy)} tasks."
    # The checkpoint is written before the record, so if the run was killed in between it is one task ahead.
    if n > len(record.accuracy) + (record.status != "finished"):
        return f"has learnt {n} tasks, the record {len(record.accuracy)}."
    if without_place(own.config) != without_place(record.config):
        return "its config differs from the record's."
    for key in _SAME:
        if getattr(own, key) != getattr(record, key):
            return f"its {key} differs from the record's."
    for key in _GROWING:
        pairs = zip(getattr(own, key), getattr(record, key), strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            return f"its {key} differs from the record's, first in entry {first + 1}."
    if problem := _position_problem(position, own, values["totals"]):
        return problem
    for key, tensor in checkpoint.section(tensors, "predictions").items():
        if key in predictions and not torch.equal(tensor, predictions[key]):
            return f"its predictions differ from those of the run, in {key}."
    if list(values["task_sizes"]) != own.task_sizes[: n if is_between else n + 1]:
        return f"its network has tasks of {values['task_sizes']} classes, the record of {own.task_sizes}."
    if len(tensors["memory.index"]) != (own.exemplars[n - 1] if n else 0):
        return f"its memory has {len(tensors['memory.index'])} rows, the record {own.exemplars[n - 1] if n else 0}."
    weights = checkpoint.section(tensors, "network" if is_between else "previous")
    if n and weights and digest(weights) != own.weights[n - 1]:
        return f"its weights are not those of the record after task {n}."
    return ""


def _position_problem(position: Position, own: Record, totals: list[dict[str, Any]]) -> str:
    """The problem if the epochs and steps counted so far contradict the position; empty if they agree."""
    epochs = max((entry["epoch"] + 1 for entry in own.history[-1:] if entry["task"] == position.task), default=0)
    begins_phase = position.epoch == 0 and position.phase > 0
    if epochs != position.epoch and not begins_phase:
        return f"its history has {epochs} epochs of the phase, but it is at epoch {position.epoch + 1}."
    steps = sum(entry["count"] for entry in totals)
    return "" if steps == position.step else f"it counted {steps} steps of the epoch, but is at step {position.step}."


def same_place(record: Record, root: str | None = None) -> RunConfig:
    """The run's config with its number of threads, on its device if this machine has it; downloads nothing.

    ``root`` is the folder of the data sets, if they have moved since the run.
    """
    config = record.run_config.at(root)
    threads = config.threads or int(record.environment.get("threads", 0))
    config = replace(config, threads=threads, data=replace(config.data, download=False))
    try:
        setup.device_of(config)
    except UserError:
        return replace(config, device="auto")
    return config


def explanation(record: Record, here: Mapping[str, Any]) -> str:
    """The change in the environment or in the code that may explain a difference; empty if there is none."""
    there, said = record.environment, ""
    names = (*ENVIRONMENT, _KERNEL) if _KERNEL in there and _KERNEL in here else ENVIRONMENT
    if changed := _changed(there, here, names):
        named = ", ".join(f"{name} was {there.get(name)}, is {here.get(name)}" for name in changed)
        said = f"results are bit-identical only in the same environment; here {named}."
    elif any(_changed(there, other, names) for other in record.resumed):
        said = "the run was resumed in another environment, which may explain it."
    trained = [env["source"] for env in (there, *record.resumed) if "source" in env]
    was = list(dict.fromkeys(source for source in trained if source != here.get("source")))
    if was and "source" in here:
        said += f" The code has changed: source was {', then '.join(was)}, is {here['source']}."
    return said.strip()


def is_elsewhere(record: Record, here: Mapping[str, Any]) -> bool:
    """Whether rounding may differ from the run's: it was made, or continued, in another environment."""
    return any(_changed(record.environment, other) for other in (here, *record.resumed))


def _changed(there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str] = ENVIRONMENT) -> list[str]:
    changed = [name for name in names if there.get(name) != here.get(name)]
    # What a run on a GPU leaves to the CPU does not depend on its model.
    return [name for name in changed if name != "cpu" or "cpu" in (there.get("device"), here.get("device"))]


def evaluated(
    record: Record,
    source: Source,
    scenario: Scenario,
    predictions: Mapping[str, Tensor],
    states: Mapping[str, State],
    is_wanted: bool,
) -> Iterator[Finding]:
    """Evaluate every saved network again and compare predictions and task-IL accuracy."""
    networks: dict[int, State] = {}  # by the number of tasks learnt
    for values, tensors in states.values():
        position = Position(**values["position"])
        if position == Position(position.task):
            networks[position.task] = values, tensors
    why = without_plugins(record.run_config) or ("" if is_wanted else "--no-evaluation")
    config = same_place(record)
    for t in range(len(record.accuracy)):
        subject = f"evaluation after task {t + 1}"
        if why or t + 1 not in networks:
            yield Finding(subject, not_checked=why or "the network after this task is not saved")
        else:
            problem = _evaluation_problem(t, record, config, source, scenario, predictions[f"task{t}"], networks[t + 1])
            yield Finding(subject, problem)


def _evaluation_problem(
    t: int, record: Record, config: RunConfig, source: Source, scenario: Scenario, predictions: Tensor, state: State
) -> str:
    device, method = setup.device_of(config), setup.method_of(config)
    with torch_settings(config, device):
        here = {**environment(), "device": device.type}
        test_data = setup.on_device(config, source, scenario, "test", device)
        network = setup.make_network(config, method, source, device)
        weights = {name: tensor.to(device) for name, tensor in checkpoint.section(state[1], "network").items()}
        network.restore(weights, state[0]["task_sizes"])
        result = evaluate(scenario.tasks[t], config, scenario, method, network, test_data)
    why = explanation(record, here)
    tolerated = ROUNDING if is_elsewhere(record, here) else 0.0
    again = result.predictions
    differing = (again != predictions).double().mean().item() if len(again) == len(predictions) else 1.0
    if differing > tolerated:
        return f"{100 * differing:.3g} % of the saved network's predictions differ from the stored ones. {why}".rstrip()
    for name, again_too, there in (
        ("task-IL", result.task_il, record.task_il[t]),
        ("calibrated", result.calibrated, record.calibrated[t] or result.calibrated),
    ):
        if max(abs(a - b) for a, b in zip(again_too, there, strict=True)) > tolerated:
            return f"{name} accuracy: the record says {there}, the saved network gives {again_too}. {why}".rstrip()
    return ""
