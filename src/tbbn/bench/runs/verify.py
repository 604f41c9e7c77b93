"""Verify a record: its checksums, and everything that can be recomputed without training.

Three sources must agree with the record: the config and the data set (:mod:`.recompute`), the stored predictions (there too),
and the checkpoints with their networks (:mod:`.crosscheck`). Everything else is listed as not checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tbbn.bench.config import read_toml, resolve, to_dict, to_toml
from tbbn.bench.engine.plugins import without_data
from tbbn.bench.engine.record import Record
from tbbn.bench.engine.setup import load_source, scenario_of
from tbbn.bench.files import file_sha256, read_limited, seal_problem
from tbbn.bench.runs import checkpoint, crosscheck, recompute, schema
from tbbn.bench.runs.finding import Finding, compare
from tbbn.bench.runs.record import CONFIG, LARGEST, PREDICTIONS, RECORD, load_predictions, record_from
from tbbn.errors import UserError

# Fields that only retraining, or nothing at all, can check.
LOSSES = "losses in the history"
NOT_CHECKED = (
    Finding(LOSSES, not_checked="--retrain-task N trains task N again and compares"),
    Finding("environment, seconds and message", not_checked="cannot be recomputed"),
)

RESULTS = "results against the labels"  # subject of the check that needs the data set


def verify(directory: Path, *, evaluate: bool = True, root: str | None = None) -> list[Finding]:
    """Check everything in the folder of a run, without training. Uses the data set, which may now be in another ``root``.

    ``evaluate`` also evaluates the saved networks on the test set, which takes as long as the run's own evaluations.
    """
    files = _read(directory)
    findings = [Finding(RECORD, seal_problem(files.record)), *files.findings]
    try:
        tree = json.loads(files.record)
        record = record_from(tree, RECORD)
        findings.append(_config(directory / CONFIG, record, tree.get("config_sha256")))
        findings += _contents(record, files, schema.migrate(tree).get("metrics", {}), evaluate, root)
    except Exception as error:
        if isinstance(error, UserError) and not any(finding.problem for finding in findings):
            raise
        # A damaged file, or one with a forged checksum, may contain anything and raise any error.
        findings.append(Finding("contents", f"cannot be recomputed: {error}"))
    return findings


@dataclass
class _Files:
    """A consistent snapshot of a run's files, and the problems found in reading them."""

    record: bytes
    predictions: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, crosscheck.State] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def _read(directory: Path) -> _Files:
    """Read the files, and repeat this if the record changed meanwhile, because another process may be training."""
    while True:
        files = _Files(read_limited(directory / RECORD, LARGEST))
        for name in (checkpoint.NEWEST, checkpoint.PREVIOUS, *sorted(f.name for f in directory.glob(checkpoint.TASKS))):
            if (directory / name).exists():
                try:
                    files.states[name] = checkpoint.read(directory / name)
                except UserError as error:
                    files.findings.append(Finding(name, str(error)))
        if (directory / PREDICTIONS).exists():
            files.findings.append(
                Finding(PREDICTIONS, seal_problem(read_limited(directory / PREDICTIONS, checkpoint.LARGEST)))
            )
            try:
                files.predictions = load_predictions(directory)
            except UserError as error:
                files.findings[-1] = Finding(PREDICTIONS, files.findings[-1].problem or str(error))
        if read_limited(directory / RECORD, LARGEST) == files.record:
            return files


def _config(file: Path, record: Record, digest: Any) -> Finding:
    try:
        found = to_dict(resolve((str(file), read_toml(file))))
    except UserError as error:
        return Finding(CONFIG, str(error))
    # A resume with the data in another place writes this file, then the record, and may be killed between them.
    own, place = record.run_config, {key: found["data"][key] for key in ("root", "download")}
    placed = replace(own, data=replace(own.data, **place))
    finding = compare(CONFIG, to_dict(placed), found)
    moved = placed != own and file.read_bytes() == to_toml(placed).encode()
    if not finding.problem and file_sha256(file) != digest and not moved:
        return Finding(CONFIG, "damaged: its content does not match the checksum in the record.")
    return finding


def _contents(
    record: Record, files: _Files, metrics: dict[str, Any], evaluate: bool, root: str | None
) -> Iterator[Finding]:
    config = record.run_config
    # A record of an earlier version may have fewer metrics; those that it has must be right.
    stored = metrics if isinstance(metrics, dict) and metrics else record.metrics
    computed = {name: value for name, value in record.metrics.items() if name in stored}
    yield compare("metrics", metrics, computed)
    yield recompute.status(record)
    fitting: dict[str, crosscheck.State] = {}
    for finding in crosscheck.compared(record, files.predictions, files.states):
        yield finding
        if not finding.problem and finding.subject in files.states:
            fitting[finding.subject] = files.states[finding.subject]
    complete = recompute.predictions_present(record, files.predictions)
    yield complete
    if record.status == "failed" and not record.task_sizes:
        return  # the run failed before it began, so there is nothing to compare
    reason, source = without_data(config), None
    if not reason:
        try:
            source = load_source(config.at(root), download=False)
        except UserError as error:  # without the data set, the rest can still be checked
            reason = str(error).rstrip(".")
    if source is None:
        yield Finding(RESULTS, not_checked=reason)
    else:
        scenario = scenario_of(config, source)
        yield from recompute.known_before_training(record, source, scenario)
        if not complete.problem:
            yield from recompute.results(record, scenario, files.predictions)
            yield from crosscheck.evaluated(record, source, scenario, files.predictions, fitting, evaluate)
    yield from NOT_CHECKED
