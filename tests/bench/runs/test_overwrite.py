"""``--overwrite``: the old run is gone only when the new one has its first record."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tinyrun import tiny

from tbbn.bench.engine import Event
from tbbn.bench.engine.events import Stepped
from tbbn.bench.files import LOCK, locked
from tbbn.bench.runs import saved
from tbbn.bench.runs.pending import PendingRun
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.saved import run_saved
from tbbn.bench.runs.sweep import run_all
from tbbn.bench.runs.verify import verify
from tbbn.errors import UserError


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != LOCK}


def no_problem(folder: Path) -> bool:
    return not any(finding.problem for finding in verify(folder))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    run_saved(tiny(), tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_another_process_works_on_is_not_overwritten(old: Path) -> None:
    before = contents(old)
    pending = PendingRun(tiny(seed=1), old)
    with locked(old):
        with pytest.raises(UserError, match="another process is working on it"):
            run_all([pending], overwrite=True)
        (record,) = run_all([pending], lanes=2, overwrite=True)
        assert record.status == "failed" and "another process is working on it" in record.message
        assert contents(old) == before


@pytest.mark.parametrize("error", [UserError("no"), RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_a_run_that_fails_before_its_first_record_leaves_the_old_one(error: BaseException, old: Path) -> None:
    def fail(_: PendingRun, event: Event) -> None:
        if isinstance(event, Stepped):
            assert contents(old) == before, "nothing is deleted while the new run has nothing to show"
            raise error

    before = contents(old)
    with pytest.raises(type(error)):
        run_all([PendingRun(tiny(seed=1), old)], overwrite=True, on_event=fail)
    assert contents(old) == before


def test_a_full_disk_at_the_first_save_leaves_the_old_run(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = contents(old)
    monkeypatch.setattr(saved, "save_record", full)  # the checkpoint is written, the record is not
    with pytest.raises(OSError, match="No space left"):
        run_saved(tiny(seed=1), old, overwrite=True)
    assert contents(old) == before


def test_the_old_run_is_replaced_completely(old: Path, tmp_path: Path) -> None:
    run_saved(tiny(data__tasks=2, seed=1), old, overwrite=True)
    run_saved(tiny(data__tasks=2, seed=1), tmp_path / "fresh")
    assert contents(old).keys() == contents(tmp_path / "fresh").keys()
    assert load_record(old).accuracy == load_record(tmp_path / "fresh").accuracy
    assert no_problem(old)


# For each folder: die before the call number N of os.replace. One process imports torch and forks, so a kill costs no import.
KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from tinyrun import tiny
from tbbn.bench.runs.saved import run_saved

def overwrite(folder, call):
    real, calls = os.replace, 0

    def replace(*arguments):
        nonlocal calls
        if calls == call:
            os._exit(9)
        calls += 1
        real(*arguments)

    os.replace = replace
    run_saved(tiny(seed=1), folder, overwrite=True)

torch.set_num_threads(1)
run_saved(tiny(), sys.argv[2])  # loads what is imported at the first use
for folder, call in zip(sys.argv[3::2], sys.argv[4::2]):
    if (child := os.fork()) == 0:
        overwrite(folder, int(call))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_kill_while_overwriting_leaves_the_old_run_or_the_new_one(old: Path, tmp_path: Path) -> None:
    accuracy, before = load_record(old).accuracy, contents(old)
    folders = {call: tmp_path / f"killed-{call}" for call in (0, 1, 3, 6, 8, 9, 10, 11, 12, 13)}
    for folder in folders.values():
        shutil.copytree(old, folder)
    pairs = [str(word) for call, folder in folders.items() for word in (folder, call)]
    helpers = str(Path(__file__).parents[2] / "helpers")
    program = [sys.executable, "-c", KILLED, helpers, str(tmp_path / "first"), *pairs]
    done = subprocess.run(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.stdout.split() == ["9"] * len(folders), done.stderr
    for call, folder in folders.items():
        if load_record(folder).run_config.seed == 0:
            assert run_saved(tiny(), folder).accuracy == accuracy, call
            after = contents(folder)
            assert after.keys() == before.keys(), call
            assert {n for n in after if after[n] != before[n]} <= {"record.json"}, call
        else:
            record = run_saved(tiny(seed=1), folder)
            assert record.status == "finished" and len(record.accuracy) == 3, call
        assert no_problem(folder) and not list(folder.glob(".overwritten*")), call


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"files": 3, "record": ""}', '{"files": ["../../mine"], "record": ""}', '{"files": [1], "record": ""}'],
)
def test_a_damaged_or_forged_list_of_files_is_refused_and_touches_nothing(text: str, old: Path) -> None:
    (old.parent / "mine").write_text("mine")
    (old / ".overwritten...").mkdir()  # with it, the forged name leads out of the folder
    (old / ".overwritten.json").write_text(text)
    before = contents(old.parent)
    with pytest.raises(UserError, match=r"\.overwritten\.json: damaged; delete it"):
        run_saved(tiny(), old)
    assert contents(old.parent) == before
