"""Errors without a message, and with several lines: the line that a user sees has a reason all the same."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from tinyrun import tiny
from torch import Tensor, nn

import tbbn
from tbbn.bench.data.sources import archives, decoding, formats
from tbbn.bench.engine import setup, validate
from tbbn.bench.engine.loop import Run
from tbbn.bench.models import backbone
from tbbn.bench.runs import state
from tbbn.errors import UserError
from tbbn.plugins import temporary
from tbbn.registry import register_backbone


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with temporary(fresh=True):
        yield


def failing(text: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError(text)

    return fail


def of_backbone(text: str, *_: Any) -> None:
    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError(text)

    register_backbone("odd")(Failing)
    backbone("odd")


def of_norm(text: str, *_: Any) -> None:
    @tbbn.register_norm("odd", "a norm that fails")
    class Failing(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(text)

    validate.check(tiny(norm__name="odd"))


def of_device(text: str, _: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", failing(text))
    setup.device_of(tiny())


def of_checkpoint(text: str, _: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "record_from", failing(text))
    run = Run(tiny())
    state.restore(run, {"position": {}, "record": {}}, {}, "here")


def of_image(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PIL.Image.new("RGB", (4, 4)).save(folder / "a.png")
    monkeypatch.setattr(decoding, "_plain", failing(text))
    decoding.open_image(folder / "a.png", 3, None)


def of_array_file(text: str, folder: Path, _: Any) -> None:
    raise formats._unreadable(folder / "a.npz", ValueError(text))


CASES: dict[str, tuple[Callable[..., None], str, str]] = {  # what fails, and the words around the reason
    "backbone": (of_backbone, r"^backbone 'odd' of .*: cannot take an image of 3x32x32: ", r"\.$"),
    "device": (of_device, r"^device 'cpu' cannot be used here: ", r"\. Use 'cpu' or 'auto'\.$"),
    "image": (of_image, r"a\.png: is not a readable image \(", r"\)$"),
    "array file": (of_array_file, r"a\.npz: cannot be read \(", r"\); delete it and try again$"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("text", "reason"), [("", "ValueError"), ("  one  \nmore\n", "one *"), ("only", "only")])
def test_the_reason_is_the_first_line_or_the_type(
    case: str, text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, before, after = CASES[case]
    if case == "device":
        text = text.strip()  # its text comes from torch and has no blanks around it
    with pytest.raises(Exception, match=before + reason + after):
        fails(text, tmp_path, monkeypatch)


def test_a_norm_that_fails_without_a_word_is_named_with_the_type() -> None:
    with pytest.raises(UserError, match=r"norm 'odd' .*: RuntimeError") as caught:
        of_norm("")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "reason"), [("", ""), ("one\ntwo", "one"), ("x" * 500, "x" * 120)])
def test_a_checkpoint_that_does_not_fit_says_the_type_and_at_most_120_letters(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rf"^here: its checkpoint does not fit this run \(ValueError: {reason}\); delete it to start again\.$"
    with pytest.raises(UserError, match=said):
        of_checkpoint(text, tmp_path, monkeypatch)


@pytest.mark.parametrize(("text", "reason"), [("", "ValueError"), ("one\ntwo", "one")])
def test_an_archive_that_cannot_be_unpacked(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("a/x", "content")
    monkeypatch.setattr(archives.shutil, "copyfileobj", failing(text))
    with pytest.raises(UserError, match=rf"a\.zip: cannot be unpacked \({reason}\); delete it and try again$"):
        archives.unpack(tmp_path / "a.zip", tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"], "what was unpacked is removed"
