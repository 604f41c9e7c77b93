"""What goes wrong in a plugin's code is one line that names the plugin and what it registered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import Capture, mistake
from plugin import CODE, WORDS

from tbbn.bench.cli.main import main
from tbbn.bench.runs.record import load_record
from tbbn.plugins import temporary

DRAW = "return 0.5 + 0.5 * torch.rand(n, 1, generator=generator)"
APPLY = "return images.float().div(255) * parameters.view(-1, 1, 1, 1)"
TINY = "def tiny(in_channels):\n    return nn.Sequential("
MINE = r"of mine\.py \w{12}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with temporary(fresh=True):
        yield


def write(old: str, new: str) -> None:
    assert CODE.count(old) == 1
    Path("mine.py").write_text(CODE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            DRAW,
            "return torch.rand(n, 2, generator=generator)",
            r"draw must return a float32 tensor \(3, 1\) on the CPU, got f",
        ),
        (DRAW, "return torch.rand(n - 1, 1, generator=generator)", r"draw must return .*, got float32 \(2, 1\) on cpu"),
        (DRAW, "return torch.ones(n, 1).double()", r"draw must return a float32 .*, got float64 \(3, 1\)"),
        (DRAW, "return torch.rand(n, 1)", "draw must use its generator alone; two with the same seed differ"),
        (DRAW, "return [0.5] * n", "draw must return a float32 tensor .*, got list"),
        (APPLY, "return images", r"apply must return a float32 tensor \(3, 3, 8, 8\) on the CPU, got uint8"),
        (APPLY, "return images.float()", r"apply must return images in \[0, 1\], got 0 to 255"),
        (APPLY, "return images[..., :4].float() / 255", r"apply must return .*, got float32 \(3, 3, 8, 4\)"),
        (APPLY, "return images[1:].float() / 255", r"apply must return .*, got float32 \(2, 3, 8, 8\)"),
        (APPLY, "return images.float() / 0", r"apply must return images in \[0, 1\], got (nan|inf)"),
        (APPLY, "return images @ parameters", f"{MINE} failed: RuntimeError: "),
    ],
)
def test_an_augmentation_is_tried_before_it_is_used(old: str, new: str, wanted: str, capsys: Capture) -> None:
    write(old, new)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(rf"tbbn: augmentation 'dim'(: | ){wanted}", error), error


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("    side = int(argument)", "    side = int(argument) / 0", f"dataset 'stripes' {MINE} failed: ZeroDivisionError: div"),
        (TINY, TINY.replace("return", "return wrong or"), f"backbone 'tiny' {MINE} failed: NameError: name 'wrong'"),
        ("nn.Conv2d(in_channels, 8", "nn.Conv2d(4, 8", "backbone 'tiny' cannot take an image of 3x8x8: .*4 channels"),
        ("nn.Flatten()", "nn.Unflatten(0, (1, 1)), nn.Flatten()", f"backbone 'tiny' {MINE} failed: RuntimeError: unflatten"),
        ("nn.Flatten()", "nn.Flatten(), nn.Unflatten(1, (2, 4)), nn.Flatten(0, 1)", "backbone 'tiny' must return features"),
        ("nn.Flatten()", "nn.Flatten(), nn.Unflatten(0, (1, -1)), nn.Flatten()", r"backbone 'tiny' .*\(2, 8\) for two images"),
        ("super().__init__()\n        self.num", "super().__init__()\n        self.gone.num", f"norm 'rms' {MINE} failed: Attri"),
        ("scale = (x.square()", "scale = (x[:, :3].square() + x", f"norm 'rms' {MINE} failed: RuntimeError"),
        ('help": "softens the logits"})', 'help": "x"})\n    def __post_init__(self):\n        raise KeyError("a\\nb")',
         f"method 'tempered' {MINE} failed: KeyError: "),
    ],
)  # fmt: skip
def test_what_fails_before_training_is_a_mistake_that_names_it(
    old: str, new: str, wanted: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(old, new)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(f"tbbn: ({wanted})", error), error
    if " failed: " in error:
        monkeypatch.setenv("TBBN_TRACEBACK", "1")
        with pytest.raises(ValueError, match="failed") as raised:
            main(["run", *WORDS, "--plugin", "mine.py", "--quiet"])
        assert raised.value.__cause__ is not None


def test_what_fails_in_training_names_the_line_and_the_record_keeps_it(capsys: Capture) -> None:
    write("        return {", "        batch.labels.nothing\n        return {")
    words = ["run", *WORDS, "--plugin", "mine.py", "--quiet", "--name", "mine"]
    assert main(words) == 1
    line = (
        "method 'tempered' of mine.py {}, mine.py line 19: AttributeError: 'Tensor' object has no attribute 'nothing'"
    )
    (said,) = capsys.readouterr().err.splitlines()
    message = load_record("runs/mine").message
    assert said == f"tbbn: {message}; set TBBN_TRACEBACK=1 to see the traceback."
    assert message == line.format(re.findall(r"mine\.py (\w{12}),", message)[0])
    assert main([*words, "--name", "two", "--seeds", "2"]) == 1
    assert load_record("runs/two/tempered-rms_power=0.4_-1").message == message, "a sweep goes on"


def test_losses_that_are_no_dict_of_scalars_are_refused(capsys: Capture) -> None:
    write('return {"ce": nn.functional.cross_entropy(', "return nn.functional.cross_entropy(")
    text = Path("mine.py").read_text().replace("batch.labels)}", "batch.labels)")
    for made in (text, text.replace("return nn.f", "return {'ce': [0]} or nn.f")):
        Path("mine.py").write_text(made)
        with temporary(fresh=True):
            error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
        assert re.match(r"tbbn: a loss must be a dict of scalar tensors, such as {'ce': \.\.\.}, got ", error), error
