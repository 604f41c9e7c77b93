"""``--engine``: what is refused before anything is sent to a cluster. Real clusters: tests/integrations."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import TINY, mistake

from tbbn.bench.cli import engines


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return ("sweep", *TINY, "--out", str(tmp_path))


def test_a_missing_package(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert "--engine ray needs ray; pip install 'tbbn[ray]'" in mistake(capsys, *words, "--engine", "ray")
    assert "--engine slurm needs submitit; pip install 'tbbn[slurm]'" in mistake(capsys, *words, "--engine", "slurm")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--overwrite",), "--overwrite works only on this machine; with --engine ray use another --name"),
        (("--workers", "0"), "--workers must be at least 1, got 0"),
    ],
    ids=["overwrite", "workers"],
)
def test_options_that_do_not_fit(
    more: tuple[str, ...],
    said: str,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: "there")
    assert said in mistake(capsys, *words, "--engine", "ray", *more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--workers", "2"), "--workers needs --engine ray or slurm, got --engine local"),
        (("--address", "auto"), "--address needs --engine ray, got --engine local"),
        (("--job", "partition=gpu"), "--job needs --engine slurm, got --engine local"),
        (("--engine", "ray", "--job", "partition=gpu"), "--job needs --engine slurm, got --engine ray"),
        (("--engine", "slurm", "--address", "auto"), "--address needs --engine ray, got --engine slurm"),
    ],
)
def test_options_of_another_engine(
    more: tuple[str, ...], said: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in mistake(capsys, *words, *more)


def test_job_options() -> None:
    from tbbn.errors import UserError

    with pytest.raises(UserError, match=r"--job takes KEY=VALUE, such as partition=gpu, got 'gpu'"):
        engines._options(["gpu"])
