"""Check that a record is true: the checksum of every file, and the results recomputed from the stored predictions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tbbn.bench import metrics
from tbbn.bench.config import read_toml, resolve, to_dict
from tbbn.bench.engine.evaluate import confusion_of, evaluated_rows
from tbbn.bench.engine.plugins import without_data
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.setup import load_source, scenario_of
from tbbn.bench.files import file_sha256, seal_problem
from tbbn.bench.runs import checkpoint
from tbbn.bench.runs.record import CONFIG, PREDICTIONS, RECORD, load_predictions, record_from
from tbbn.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One check: its subject, and the problem found; no problem if empty."""

    subject: str
    problem: str = ""


def verify(directory: Path) -> list[Finding]:
    """Check everything in the folder of a run. Needs the data set for its labels; trains nothing."""
    findings = [_sealed(directory / RECORD), *_checkpoints(directory)]
    try:
        tree = json.loads((directory / RECORD).read_text())
        record = record_from(tree, RECORD)
        findings.append(_config(directory / CONFIG, record, tree.get("config_sha256", "")))
        if (directory / PREDICTIONS).exists():
            findings.append(_sealed(directory / PREDICTIONS))
        return findings + _recomputed(directory, record, tree.get("metrics", {}))
    except Exception as error:
        if isinstance(error, UserError) and not any(finding.problem for finding in findings):
            raise
        # The content of a damaged file, or of one with a forged checksum, may fail in any way.
        return [*findings, Finding("contents", f"cannot be recomputed: {error}")]


def _sealed(file: Path) -> Finding:
    return Finding(file.name, seal_problem(file.read_bytes()))


def _checkpoints(directory: Path) -> list[Finding]:
    names = [checkpoint.NEWEST, checkpoint.PREVIOUS, *sorted(f.name for f in directory.glob(checkpoint.TASKS))]
    findings = []
    for name in names:
        if (directory / name).exists():
            try:
                checkpoint.read(directory / name)
            except UserError as error:
                findings.append(Finding(name, str(error)))
            else:
                findings.append(Finding(name))
    return findings


def _config(file: Path, record: Record, digest: str) -> Finding:
    try:
        found = to_dict(resolve((str(file), read_toml(file))))
    except UserError as error:
        return Finding(CONFIG, str(error))
    finding = _compare(CONFIG, to_dict(record.run_config), found)
    if not finding.problem and file_sha256(file) != digest:
        return Finding(CONFIG, "damaged: its content does not match the checksum in the record.")
    return finding


def _recomputed(directory: Path, record: Record, stored: dict[str, Any]) -> list[Finding]:
    """Compare the record with what its predictions and the data set's labels give."""
    config = record.run_config
    findings = [_compare("metrics", stored, record.metrics)]
    predictions = load_predictions(directory)
    wanted = {f"task{t}" for t in range(len(record.accuracy))}
    # Predictions are written before the record: a run killed in between has more of them than the record counts.
    if wanted - predictions.keys() or (record.status == "finished" and predictions.keys() - wanted):
        names = ", ".join(sorted(predictions)) or "none"
        problem = f"the record has {len(record.accuracy)} tasks, but there are predictions for: {names}."
        return [*findings, Finding("predictions", problem)]
    if reason := without_data(config):
        return [*findings, Finding(f"predictions (not compared with the labels: {reason})")]
    scenario = scenario_of(config, load_source(config, download=False))
    findings.append(_compare("class order", record.class_order, list(scenario.class_order)))
    for t in range(len(record.accuracy)):
        rows = [evaluated_rows(config, task) for task in scenario.tasks[: t + 1]]
        labels, predicted = scenario.test_labels[torch.cat(rows)], predictions[f"task{t}"].long()
        if len(labels) != len(predicted):
            problem = f"{len(predicted)} predictions for {len(labels)} test images."
            findings.append(Finding(f"accuracy after task {t + 1}", problem))
            continue
        hits = (predicted == labels).split([len(part) for part in rows])
        accuracy = [h.double().mean().item() for h in hits]
        findings.append(_compare(f"accuracy after task {t + 1}", record.accuracy[t], accuracy))
        classes = scenario.tasks[t].classes
        errors = metrics.confusion_error_types(confusion_of(labels, predicted, classes.stop), classes.start)
        findings.append(_compare(f"error types after task {t + 1}", record.errors[t], errors))
    return findings


def _compare(subject: str, stored: object, computed: object) -> Finding:
    return Finding(subject, "" if stored == computed else f"the record says {stored}, recomputed: {computed}.")
