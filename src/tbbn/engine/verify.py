"""Is a record true? Recompute what it says from the predictions it kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tbbn import metrics
from tbbn.config import read_toml, resolve, to_dict
from tbbn.data import sources
from tbbn.engine import checkpoint
from tbbn.engine.evaluate import confusion_of, evaluated_rows
from tbbn.engine.run import scenario_of
from tbbn.errors import UserError
from tbbn.record import load_record


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what is wrong with it; nothing, if ``problem`` is empty."""

    subject: str
    problem: str = ""


def verify(directory: Path) -> list[Finding]:
    """Look at everything a run's folder holds. Needs the data set, for its labels; trains nothing."""
    record = load_record(directory)
    config = record.run_config
    findings = [_config(directory, to_dict(config)), _checkpoint(directory)]
    stored = json.loads((directory / "record.json").read_text()).get("metrics", {})
    findings.append(_compare("metrics", stored, record.metrics))
    predictions = _predictions(directory)
    if set(predictions) != {f"task{t}" for t in range(len(record.accuracy))}:
        names = ", ".join(sorted(predictions)) or "none"
        return [
            *findings,
            Finding("predictions", f"there are {len(record.accuracy)} tasks but predictions for: {names}."),
        ]
    source = sources.load(config.data.name, config.data.root, download=False, size=config.data.size or None)
    scenario = scenario_of(config, source)
    findings.append(_compare("class order", record.class_order, list(scenario.class_order)))
    for t in range(len(record.accuracy)):
        rows = [evaluated_rows(config, task) for task in scenario.tasks[: t + 1]]
        labels, predicted = scenario.test_labels[torch.cat(rows)], predictions[f"task{t}"].long()
        if len(labels) != len(predicted):
            problem = f"{len(predicted)} predictions for {len(labels)} test images."
            findings.append(Finding(f"accuracy after task {t + 1}", problem))
            continue
        hits = (predicted == labels).split([len(part) for part in rows])
        findings.append(
            _compare(f"accuracy after task {t + 1}", record.accuracy[t], [h.double().mean().item() for h in hits])
        )
        classes = scenario.tasks[t].classes
        errors = metrics.confusion_error_types(confusion_of(labels, predicted, classes.stop), classes.start)
        findings.append(_compare(f"error types after task {t + 1}", record.errors[t], errors))
    return findings


def _config(directory: Path, expected: dict[str, object]) -> Finding:
    file = directory / "config.toml"
    try:
        found = to_dict(resolve((str(file), read_toml(file))))
    except UserError as error:
        return Finding("config.toml", str(error))
    return _compare("config.toml", found, expected)


def _checkpoint(directory: Path) -> Finding:
    try:
        found = checkpoint.load(directory)
    except UserError as error:
        return Finding("checkpoint", str(error))
    return Finding("checkpoint" if found is not None else "checkpoint (none)")


def _predictions(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = directory / "predictions.safetensors"
    try:
        return load_file(file) if file.exists() else {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged ({error}).") from None


def _compare(subject: str, stored: object, computed: object) -> Finding:
    return Finding(subject, "" if stored == computed else f"the record says {stored}, recomputed it is {computed}.")
