"""``tools/away``: the scripts that run the bench on a lent machine, with a stub in place of tbbn."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("setsid", "git"))), reason="the scripts are for Linux")
SCRIPTS = Path(__file__).parents[1] / "tools" / "away"
# Notes its arguments; a run of tbbn lasts until the test ends it.
STUB = """#!/bin/sh
echo "$@" >> "$AWAY/calls"
case "$*" in *tbbn*) exec sleep 60 ;; esac
"""


class Machine:
    """A folder in place of the lent machine, after ``first.sh``."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.away, self.out = folder / "tree", folder / "away", folder / "out"
        for made in (self.tree / "local/away/part1", self.away / "parts/part0", self.away / "work/data", self.out):
            made.mkdir(parents=True)
        (self.away / "tools").mkdir()
        (self.away / "tools/away").symlink_to(SCRIPTS)
        (self.away / "warm.pid").write_text("999999999\n")
        (self.away / "warm.log").write_text("warm\n")
        stub = folder / "bin/python"
        stub.parent.mkdir()
        stub.write_text(STUB)
        stub.chmod(0o755)
        self.env = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "AWAY": str(self.away), "OUT": str(self.out)}

    def call(self, script: str, *arguments: str) -> str:
        command = ["sh", str(SCRIPTS / script), *arguments]
        done = subprocess.run(command, cwd=self.tree, env=self.env, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run_of(self, name: str, status: str, size: int = 10) -> None:
        folder = self.away / "work/runs/sweep" / name
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(f'{{\n "status": "{status}"\n}}\n')
        (folder / "checkpoint.safetensors").write_bytes(os.urandom(size))


@pytest.fixture
def machine(tmp_path: Path):
    made = Machine(tmp_path)
    yield made
    for pid in (made.away / "pids").read_text().split() if (made.away / "pids").exists() else []:
        subprocess.run(["kill", pid], stderr=subprocess.DEVNULL, check=False)


def test_second_runs_a_table_or_a_sweep_one_after_the_other(machine: Machine) -> None:
    shown = machine.call("second.sh", "0", "table2", "--seeds", "1,2")  # nothing is written yet, in so short a time
    assert "still running" in shown
    assert "tbbn reproduce table2 --seeds 1,2" in (machine.out / "log.txt").read_text()
    machine.call("second.sh", "0", "sweep", "table1-cifar100", "--norm", "tbbn(memory=own)", "--precision", "fp32")
    machine.call("second.sh", "0", "resume", "--lanes", "12")
    _, first, _, second, _, third = (machine.away / "calls").read_text().splitlines()
    assert first == "-m tbbn.bench.cli.main reproduce --precision bf16 --out runs table2 --seeds 1,2"
    assert second.endswith("sweep --precision bf16 --out runs table1-cifar100 --norm tbbn(memory=own) --precision fp32")
    assert third == "-m tbbn.bench.cli.main resume runs --lanes 12"


def test_wait_waits_for_every_command(machine: Machine) -> None:
    (machine.away / "log").write_text("")
    with subprocess.Popen(["sleep", "60"]) as first:
        (machine.away / "pids").write_text(f"{first.pid}\n999999999\n")
        shown = machine.call("wait.sh", "0")
        first.kill()
    assert shown.startswith("still running")
    assert machine.call("wait.sh", "30").startswith("ended")


def test_checkpoints_of_unfinished_runs_come_back_whole_and_once(machine: Machine) -> None:
    (machine.away / "log").write_text("")
    (machine.away / "pids").write_text("999999999\n")
    machine.run_of("ft-bn-0", "finished")
    machine.run_of("ft-bn-1", "running", size=16 << 20)  # larger than a file that the machine gives back
    machine.run_of("ft-bn-2", "interrupted")
    assert machine.call("wait.sh", "0").count("unfinished: sweep/") == 2
    assert sorted(file.name for file in machine.out.iterdir()) == ["log.txt", "records.tgz"]
    for _ in range(2):  # as when the last call is made again
        for file in machine.out.iterdir():
            file.unlink()
        machine.call("wait.sh", "0", "checkpoints")
    pieces = sorted(machine.out.glob("unfinished.tar.*"))
    assert len(pieces) == 2
    assert all(piece.stat().st_size < 16 << 20 for piece in pieces)
    (machine.out / "all.tar").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(machine.out / "all.tar") as archive:
        names = archive.getnames()
    assert names == [f"./sweep/{name}/checkpoint.safetensors" for name in ("ft-bn-1", "ft-bn-2")]


def test_second_says_that_this_is_another_machine(machine: Machine) -> None:
    (machine.away / "parts/part0").rmdir()
    with pytest.raises(AssertionError, match=r"another machine than first\.sh's"):
        machine.call("second.sh", "0", "table2")


def test_first_takes_any_norm_and_further_settings(machine: Machine) -> None:
    for name in ("local/away/part0", "local/away/pkgs", "src", "tools"):
        (machine.tree / name).mkdir(parents=True)
    machine.call("first.sh", "ft", "tbbn(memory=own)", "--backbone", "resnet18")
    (machine.away / "pids").write_text((machine.away / "warm.pid").read_text())
    call = (machine.away / "calls").read_text().splitlines()[-1]
    assert "sweep table2-cifar100 --method ft --norm tbbn(memory=own)" in call
    assert call.endswith("--backbone resnet18")


class Repository:
    """A repository for ``collect.sh``, and an archive of records."""

    def __init__(self, folder: Path) -> None:
        self.root, self.runs, self.archive = folder / "repository", folder / "runs", folder / "records.tgz"
        (self.root / "tools").mkdir(parents=True)
        (self.root / "tools/away").mkdir()
        (self.root / "tools/away/collect.sh").write_bytes((SCRIPTS / "collect.sh").read_bytes())
        (self.root / "results").mkdir()
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *own, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def run_of(self, folder: str, name: str, status: str = "finished", text: str = "") -> None:
        run = self.runs / folder / name
        run.mkdir(parents=True, exist_ok=True)
        (run / "record.json").write_text(f'{{\n "status": "{status}",\n "message": "{text}"\n}}\n')

    def collect(self, *arguments: str, **options: str) -> tuple[int, str]:
        with tarfile.open(self.archive, "w:gz") as archive:
            archive.add(self.runs, ".")
        names = ("AUTHOR", "COMMITTER")
        env = os.environ | {f"GIT_{n}_{k}": v for n in names for k, v in (("NAME", "a"), ("EMAIL", "a@b"))} | options
        script = self.root / "tools/away/collect.sh"
        command = ["sh", str(script), str(self.archive), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def collected(self) -> list[str]:
        return self.git("ls-files", "results").split()


def test_collect_takes_the_finished_runs_of_one_command(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.run_of("best", "ft-bn-0", "running")
    assert repository.collect("table") == (0, "not finished: ft-bn-0\nno finished run yet\n")
    repository.run_of("best", "ft-bn-0")
    repository.run_of("last", "ft-bn-0", text="another")
    code, shown = repository.collect("table")  # both are named ft-bn-0
    assert code == 1
    assert "best\nlast\n" in shown
    assert repository.collect("table", "best")[0] == 0
    assert repository.collected() == ["results/table/ft-bn-0/record.json"]
    code, shown = repository.collect("table", "last")
    assert "not collected: results/table/ft-bn-0 is there, and is another run" in shown
    assert "another" not in (repository.root / "results/table/ft-bn-0/record.json").read_text()
    assert repository.collect("table-last", "last")[0] == 0
    assert len(repository.collected()) == 2


def test_collect_takes_some_of_the_runs_and_replaces_older_ones(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    for name in ("ft-bn-0", "ft-bn-1", "eeil-bn-0"):
        repository.run_of("table2", name)
    assert repository.collect("table1", ONLY="ft-*")[0] == 0
    assert repository.collected() == [f"results/table1/ft-bn-{seed}/record.json" for seed in (0, 1)]
    repository.run_of("table2", "ft-bn-0", text="again")
    code, shown = repository.collect("table1", ONLY="ft-*", REPLACE="yes")
    assert code == 0 and "not collected" not in shown
    assert "again" in repository.git("show", "HEAD:results/table1/ft-bn-0/record.json")
