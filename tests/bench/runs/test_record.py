"""Records on disk: read back equal, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tbbn.bench.config import read_toml, resolve, to_dict
from tbbn.bench.engine.record import SCHEMA, Record, new_record
from tbbn.bench.files import NO_SEAL, seal
from tbbn.bench.runs import record as rec
from tbbn.bench.runs import schema
from tbbn.bench.runs.record import RECORD, DamagedRecord, load_record, save_record
from tbbn.bench.runs.saved import run_saved
from tbbn.errors import UserError

TINY = {"data.name": "synthetic:4x12x4x8", "data.tasks": 2, "train.epochs": 1, "memory.budget": 8}


def made() -> Record:
    record = new_record(resolve(("test", {**TINY, "norm.name": "gn", "norm.groups": 8})))
    record.status, record.message, record.seconds = "diverged", 'a "quoted" é', 1.5
    record.class_order, record.task_sizes = [3, 1, 0, 2], [2, 2]
    record.accuracy, record.task_il = [[0.5], [1 / 3, 0.1]], [[0.5], [0.75, 0.2]]
    record.calibrated = [[0.5], [0.7, 0.1]]
    record.errors, record.exemplars, record.splits = [{"C->C": 4}, {"C->C": 1}], [8, 8], [1, 2]
    record.weights = ["0" * 64, "1" * 64]
    record.history = [{"task": 0, "phase": "train", "epoch": 0, "lr": 0.1, "total": 0.1 + 0.2}]
    return record


def test_a_record_saved_is_read_back_equal(tmp_path: Path) -> None:
    record = made()
    save_record(record, tmp_path)
    assert load_record(tmp_path) == record
    assert load_record(tmp_path / "record.json") == record
    assert load_record(tmp_path).run_config == record.run_config


def test_the_config_file_equals_the_config_of_the_record(tmp_path: Path) -> None:
    record = made()
    save_record(record, tmp_path)
    assert resolve(("file", read_toml(tmp_path / "config.toml"))) == record.run_config


def test_the_file_holds_the_metrics_and_no_tensors(tmp_path: Path) -> None:
    record = made()
    record.predictions = {"task0": torch.zeros(3, dtype=torch.int16)}
    save_record(record, tmp_path)
    tree = json.loads((tmp_path / "record.json").read_text())
    assert tree["schema"] == SCHEMA and "predictions" not in tree
    assert tree["metrics"]["final_accuracy"] == pytest.approx((1 / 3 + 0.1) / 2)
    assert tree["metrics"]["learning_accuracy"] == pytest.approx((0.5 + 0.1) / 2)
    assert {"tbbn", "torch", "python"} <= set(tree["environment"])


def test_before_the_first_task_there_are_no_metrics() -> None:
    record = new_record(resolve())
    assert record.metrics == {} and json.loads(record.to_json())["metrics"] == {}


def test_an_interrupted_save_leaves_the_previous_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = made()
    save_record(record, tmp_path)
    record.status = "finished"
    monkeypatch.setattr(rec, "write_atomic", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save_record(record, tmp_path)
    assert load_record(tmp_path).status == "diverged"


def test_what_is_not_a_record_is_refused_in_one_line(tmp_path: Path) -> None:
    tree = json.loads(made().to_json())
    file = tmp_path / "record.json"
    for change, line in (
        ({"schema": SCHEMA + 1}, rf"written by a newer version \(schema {SCHEMA + 1}; this version reads {SCHEMA}\)"),
        ({"schema": 0}, rf"written by an older version \(schema 0; this version reads {SCHEMA}\)"),
        ({"schema": "1"}, r"not a record: it has no schema number\."),
        ({"config": None}, r"not a record: it has no config\."),
        ({"config": [1]}, r"not a record: it has no config\."),
        ({"colour": "red"}, r"not a record: .*colour"),
        ({"splits": [1]}, r"not a record: splits must have one entry for each of the 2 tasks learnt, has 1\."),
        (
            {"accuracy": [[1.5]]},
            r"not a record: accuracy must be rows of 1, 2, 3, \.\.\. numbers from 0 to 1, got \[\[1\.5",
        ),
    ):
        file.write_bytes(seal(json.dumps({**tree, **change, "sha256": NO_SEAL}).encode()))
        with pytest.raises(UserError, match=line) as caught:
            load_record(tmp_path)
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    for content, line in (
        (b"", r"not a record: empty\. To restore it"),
        (b"{", r"not a record: cut off, or not JSON\. To restore it from the checkpoint: tbbn resume "),
        (b"[1, 2]", r"not a record: it has no schema number\."),
        (b"\xff\xff", r"not a record"),
        (
            json.dumps(tree).encode(),
            r"damaged: its checksum is missing\. To restore it from the checkpoint: tbbn resume ",
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=line):
            load_record(tmp_path)


def test_a_folder_without_a_record_names_the_runs_inside(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run here; the folder of a run holds a record\.json\."):
        load_record(tmp_path)
    with pytest.raises(UserError, match=r"no run here"):
        load_record(tmp_path / "missing")
    for name in "ab":
        save_record(made(), tmp_path / name)
    with pytest.raises(UserError, match=r"holds 2 runs; name one of them, such as .*a\."):
        load_record(tmp_path)


def test_predictions_in_the_file_give_the_accuracies_of_the_record(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tbbn.bench.data.loading import load

    record = run_saved(resolve(("test", TINY)), tmp_path)
    found = load_file(tmp_path / "predictions.safetensors")
    source = load(TINY["data.name"])
    order = record.class_order
    for t, row in enumerate(record.accuracy):
        rows: list[list[int]] = []  # test images of each task, in the order of the source
        for task in range(t + 1):
            classes = order[2 * task : 2 * task + 2]
            rows.append([i for i, label in enumerate(source.test.labels.tolist()) if label in classes])
        predicted = iter(found[f"task{t}"].tolist())
        shares = []
        for mine in rows:
            right = [order[next(predicted)] == int(source.test.labels[i]) for i in mine]
            shares.append(sum(right) / len(right))
        assert shares == pytest.approx(row)
        assert next(predicted, None) is None


def test_the_config_of_a_record_is_complete() -> None:
    config = resolve(("test", TINY))
    assert new_record(config).config == to_dict(config)


# Earlier schemas.

EARLIER = Path(__file__).parent / "earlier_version"


def test_every_earlier_schema_has_a_migration() -> None:
    assert sorted(schema.MIGRATIONS) == list(range(1, SCHEMA))


def test_a_record_of_schema_1_is_read(tmp_path: Path) -> None:
    now = load_record(EARLIER)
    tree = json.loads((EARLIER / RECORD).read_text())
    for name in ("sha256", "config_sha256", "weights", "skipped", "resumed"):
        del tree[name]
    (tmp_path / RECORD).write_text(json.dumps(tree | {"schema": 1}))
    read = load_record(tmp_path)
    assert read.schema == SCHEMA and read.weights == [""] * len(read.accuracy)
    assert (read.run_config, read.metrics) == (now.run_config, now.metrics)
    save_record(read, tmp_path)
    assert load_record(tmp_path) == read


def test_a_damaged_schema_number_is_not_taken_for_an_earlier_schema(tmp_path: Path) -> None:
    text = (EARLIER / RECORD).read_text().replace('"schema": 2', '"schema": 1')
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(DamagedRecord, match="does not match its checksum"):
        load_record(tmp_path)
