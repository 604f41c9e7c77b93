"""One run over two processes: the results of a single one, one record, and a restart after a rank was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from launched import TINY, assert_same_results, launch, torchrun
from tinyrun import tiny

from tbbn.bench.cli.main import main
from tbbn.bench.data.loading import load
from tbbn.bench.data.packed.pack import pack
from tbbn.bench.engine import setup
from tbbn.bench.engine.ranks import Ranks
from tbbn.bench.runs.record import load_record
from tbbn.bench.runs.sweep import run_all
from tbbn.errors import UserError
from tbbn.plugins import temporary

ROUNDING = 2e-5  # float32 sums in another order, over some dozen steps

# A teacher, its maps, a second phase and a pass over whole batches; more views of memory rows than one.
METHODS = "afc(finetune_epochs=1),balaug"
PENALTY = str(
    Path(__file__).parents[3] / "examples/own_state.py"
)  # ewc: a term of the loss that every rank has in full
RARE = "ft,eeil(balanced_epochs=1),derpp,er,icarl,il2m,joint,lucir,podnet(finetune_epochs=1),ssil,wa,bic(correction_epochs=2)"


def compare(tmp_path: Path, *words: str) -> list[tuple[int, str, str]]:
    """Do the runs with two ranks and with one process."""
    said = launch("run", *TINY, *words, "--out", str(tmp_path / "ranks"), "--name", "x")
    assert [code for code, _, _ in said] == [0, 0], said
    with temporary():
        assert main(["run", *TINY, *words, "--out", str(tmp_path / "single"), "--name", "x", "--quiet"]) == 0
    assert_same_results(tmp_path / "ranks", tmp_path / "single", ROUNDING)
    return said


def test_two_ranks_give_the_results_of_one_process(tmp_path: Path) -> None:
    said = compare(tmp_path, "--method", METHODS, "--norm", "tbbn")
    (_, table, progress), (_, *silent) = said
    assert "balaug + tbbn" in table and "run 2/2" in progress
    assert silent == ["", ""]  # one table, one display
    record = load_record(tmp_path / "ranks" / "x" / "balaug-tbbn-0")
    assert record.environment["ranks"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ("--method", METHODS, "--norm", "bn,weighted,gn(groups=8)"),
        ("--method", RARE, "--norm", "bn,tbbn"),
        (
            "--method",
            "ft,lucir",
            "--norm",
            "tbbn,gn(groups=8)",
            "--batch.size",
            "4",
            "--seed",
            "1",
        ),  # a rank without memory rows
        ("--norm", "tbbn(memory=own),tbbn(case=2),tbbn(total_variance=true)", "--train.epochs", "2"),
        ("--batch.forward", "separate", "--norm", "bn", "--batch.size", "5"),
        ("--train.keep", "best", "--data.validation", "0.2", "--train.epochs", "3", "--norm", "bn,tbbn"),
        ("--data.online", "--memory.selection", "reservoir", "--norm", "bn,tbbn", "--method", "ft,er"),
        ("--plugin", PENALTY, "--method", "ewc(strength=3)", "--norm", "tbbn"),
        ("--train.clip_norm", "0.5", "--memory.selection", "entropy", "--norm", "tbbn", "--seeds", "2"),
    ],
    ids=lambda words: " ".join(words),
)
def test_ranks_are_right_in_every_setting(words: tuple[str, ...], tmp_path: Path) -> None:
    compare(tmp_path, *words)


@pytest.mark.nightly
def test_ranks_read_streamed_images_of_their_own_rows(tmp_path: Path) -> None:
    made = load("synthetic:4x14x4x8")
    for part in ("train", "test"):
        stored = getattr(made, part)
        for row, (image, label) in enumerate(zip(stored.images, stored.labels.tolist(), strict=True)):
            file = tmp_path / "set" / part / f"{label}" / f"{row:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    pack(tmp_path / "set", tmp_path / "out", workers=1, shard_bytes=10 * 192)
    words = ("--data", f"packed:{tmp_path / 'out'}", "--data.stream", "yes", "--method", METHODS, "--norm", "tbbn")
    compare(tmp_path, *words)


KILLED = """
import os, signal
from dataclasses import dataclass
import tbbn
from tbbn.bench.methods.ft import FineTune

@tbbn.register_method("mortal", "fine-tuning whose second rank dies in the second task, before torchrun has restarted it")
@dataclass(frozen=True)
class Mortal(FineTune):
    def loss(self, batch, output, previous):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "1"
        if first and batch.n_old_classes and os.environ.get("KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch, output, previous)
"""


@pytest.mark.nightly
def test_after_a_killed_rank_torchrun_resumes_the_run_with_the_same_result(tmp_path: Path) -> None:
    plugin = tmp_path / "mortal.py"
    plugin.write_text(KILLED)
    words = ("run", *TINY, "--plugin", str(plugin), "--method", "mortal", "--norm", "tbbn", "--out", str(tmp_path))
    whole = torchrun(*words, "--name", "whole")
    assert whole.returncode == 0, whole.stderr
    killed = torchrun(*words, "--name", "killed", restarts=1, KILL="1")
    assert killed.returncode == 0, killed.stderr
    assert "Signal 9" in killed.stderr or "exitcode: -9" in killed.stderr, killed.stderr
    one, other = load_record(tmp_path / "killed"), load_record(tmp_path / "whole")
    assert one.status == "finished" and one.weights == other.weights and one.accuracy == other.accuracy


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"norm__name": "brn"}, "norm 'brn' does not take its statistics over ranks"),
        ({"norm__name": "tbbn", "norm__output_statistics": True}, "output_statistics is not synchronised over ranks"),
        ({"device": "cuda:1"}, r"each rank uses its own GPU, got device = 'cuda:1'; use 'cuda' or 'auto'"),
    ],
    ids=["norm", "option", "device"],
)
def test_what_ranks_cannot_train_is_refused_before_any_run(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        setup.check_ranks(tiny(**settings))


def test_several_ranks_share_one_run_at_a_time() -> None:
    class Two(Ranks):
        size = 2

    with pytest.raises(UserError, match=r"several ranks share one run at a time, got --lanes 3; leave --lanes out"):
        run_all([], lanes=3, ranks=Two())
