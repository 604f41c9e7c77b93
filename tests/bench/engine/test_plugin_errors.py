"""What goes wrong in a plugin's code is one line that names the plugin and what it registered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import Capture, mistake
from plugin import CODE, WORDS

from tbbn.bench.cli.main import main
from tbbn.bench.methods import Method, method
from tbbn.bench.methods.contract import check_names, check_signatures
from tbbn.bench.runs.record import load_record
from tbbn.errors import UserError
from tbbn.plugins import load_plugin, temporary
from tbbn.registry import METHODS, register_method

DRAW = "return 0.5 + 0.5 * torch.rand(n, 1, generator=generator)"
APPLY = "return images.float().div(255) * parameters.view(-1, 1, 1, 1)"
TINY = "def tiny(in_channels):\n    return nn.Sequential("
MINE = r"of mine\.py \w{12}, mine\.py line \d+"


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
        (DRAW, "return torch.rand(n, 1)", "draw must use only its generator for random numbers; two generators"),
        (DRAW, "return [0.5] * n", "draw must return a float32 tensor .*, got list"),
        (APPLY, "return images", r"apply must return a float32 tensor \(3, 3, 8, 8\) on the CPU, got uint8"),
        (APPLY, "return images.float()", r"apply must return images in \[0, 1\], got 0 to 255"),
        (APPLY, "return images[..., :4].float() / 255", r"apply must return .*, got float32 \(3, 3, 8, 4\)"),
        (APPLY, "return images[1:].float() / 255", r"apply must return .*, got float32 \(2, 3, 8, 8\)"),
        (APPLY, "return images.float() / 0", r"apply must return images in \[0, 1\], got (nan|inf)"),
        (APPLY, "return images @ parameters", "RuntimeError: "),
    ],
)
def test_an_augmentation_is_tried_before_it_is_used(old: str, new: str, wanted: str, capsys: Capture) -> None:
    write(old, new)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(rf"tbbn: augmentation 'dim' {MINE}: {wanted}", error), error


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("    side = int(argument)", "    side = int(argument) / 0", f"dataset 'stripes' {MINE}: ZeroDivisionError: div"),
        ("return part(12, 0), part(5, 1)", "part(12, 0), part(5, 1)",
         rf"dataset 'stripes' {MINE}: must be \(images, labels\), .* got No"),
        ("return (noise + waves[:, None, None, :]).to(torch.uint8), labels", "return noise.long() + 256, labels",
         rf"dataset 'stripes' {MINE}, train: images must be uint8, or floats in \[0, 1\], got torch.int64 from 256 to "),
        (TINY, TINY.replace("return", "return wrong or"), f"backbone 'tiny' {MINE}: NameError: name 'wrong'"),
        ("nn.Conv2d(in_channels, 8", "nn.Conv2d(4, 8", f"backbone 'tiny' {MINE}: cannot take an image of 3x8x8: .*4 channels"),
        ("nn.Flatten()", "nn.Unflatten(0, (1, 1)), nn.Flatten()", f"backbone 'tiny' {MINE}: RuntimeError: unflatten"),
        ("nn.Flatten()", "nn.Flatten(), nn.Unflatten(1, (2, 4)), nn.Flatten(0, 1)",
         f"backbone 'tiny' {MINE}: must return features"),
        ("nn.Flatten()", "nn.Flatten(), nn.Unflatten(0, (1, -1)), nn.Flatten()", r"backbone 'tiny' .*\(2, 8\) for two images"),
        ("super().__init__()\n        self.num", "super().__init__()\n        self.gone.num", f"norm 'rms' {MINE}: Attri"),
        ("scale = (x.square()", "scale = (x[:, :3].square() + x", f"norm 'rms' {MINE}: RuntimeError"),
        ('help": "softens the logits"})', 'help": "x"})\n    def __post_init__(self):\n        raise KeyError("a\\nb")',
         f"method 'tempered' {MINE}: KeyError: "),
    ],
)  # fmt: skip
def test_what_fails_before_training_is_a_mistake_that_names_it(
    old: str, new: str, wanted: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(old, new)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(f"tbbn: ({wanted})", error), error
    if "Error: " in error:
        monkeypatch.setenv("TBBN_TRACEBACK", "1")
        with pytest.raises(ValueError, match="Error: ") as raised:
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
        assert re.match(
            rf"tbbn: method 'tempered' {MINE}: loss must return a dict of scalar tensors, such as ", error
        ), error


LOSS = "def loss(self, batch, output, previous):"
RETURN = 'return {"ce": nn.functional.cross_entropy(output.logits / self.temperature, batch.labels)}'
FORWARD = "return x * scale * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)"
INIT = "def __init__(self, num_features, eps=1e-5, affine=True, device=None, dtype=None, *, power: float = 0.5):"
BIAS = "self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))"
PHASES = "def phases(self, context):\n        from tbbn.bench.methods import Phase\n        return {}\n    " + LOSS


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (LOSS, LOSS.replace("loss", "los"), "nothing uses 'los'; did you mean 'loss'"),
        (LOSS, LOSS.replace("loss", "minimise"), r"needs a function loss\(self, batch, output, previous\), which returns"),
        (LOSS, "def loss(self, batch, output):", r"must be loss\(self, batch, output, previous\), got loss\(self, b"),
        (LOSS, f"def after_taks(self, context): ...\n    {LOSS}", "nothing uses 'after_taks'; did you mean 'after_task'"),
        (LOSS, f"def after_task(self): ...\n    {LOSS}", r"must be after_task\(self, context\), got after_task\(self\)\."),
        (LOSS, f"holdout = 0.5\n    {LOSS}", r"must be holdout\(self\), got 0.5\."),
        (LOSS, f"need_previous = True\n    {LOSS}", "nothing uses 'need_previous'; did you mean 'needs_previous'"),
        (LOSS, f"uses_memory = 'no'\n    {LOSS}", "uses_memory must be True or False, got 'no'"),
        (LOSS, PHASES.format("Phase()"), r"phases must return Phases, such as \(Phase\(\),\), got Phase\("),
        (LOSS, PHASES.format("(Phase(loss='los'),)"), "phase 'train' minimises 'los', which the method lacks"),
        (LOSS, f"def make_head(self, n): ...\n    {LOSS}", "make_head must return a tbbn.bench.models.Head, got NoneType"),
        (RETURN, f"{RETURN}\n    def predict(self, output):\n        return output.logits.argmax(1)",
         r"predict must return scores \(10, 2\), a column for each class, got \(10,\)"),
        (RETURN, RETURN.replace("output.logits", "output.logits.detach()"), "loss has no term with a gradient"),
        (RETURN, "return {}", "loss has no term with a gradient"),
        (RETURN, f"kd = 0 if previous is None else previous.logits.sum()\n        {RETURN}",
         r"loss reads previous\.logits, which needs the line needs_previous = True in the class"),
        (RETURN, f"kd = previous and sum(x.sum() for x in [0] if previous.features is x)\n        {RETURN}",
         r"loss reads previous\.features, which needs"),
        (RETURN, f"{RETURN} | {{'s': sum(x.mean() for x in output.stages)}}",
         r"loss reads output\.stages, which needs the line needs_stages = True in the class"),
        (RETURN, f"rows = torch.randperm(len(batch.labels))\n        {RETURN}",
         "loss draws random numbers, so the run could not be repeated or resumed with the same results; the rows of a batch"),
        (RETURN, RETURN.replace('"ce"', '"total"'), "loss must name its terms with other texts than .*total, .*'total'"),
        (RETURN, f"{RETURN}\n    def __init__(self): ...", "its fields are its options, so it takes no __init__ of its own"),
        ('= field(default=2.0, metadata={"help": "softens the logits"})', "", "its option 'temperature' needs a default"),
    ],
)  # fmt: skip
def test_a_method_that_breaks_the_contract_is_told_what_is_expected(
    old: str, new: str, wanted: str, capsys: Capture
) -> None:
    write(old, new)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(f"tbbn: method 'tempered' {MINE}: {wanted}", error), error


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("def forward(self, x):", "def foward(self, x):", r"has no function forward\(self, x\)"),
        ("def forward(self, x):", "def forward(self, x, mask):", r"must take forward\(self, x\); .* Got forward\(.*mask\)"),
        (INIT, "def __init__(self, *, power=0.4, num_features=8, eps=1):", r"must take __init__\(self, num_features\)"),
        ("class RootMeanSquare(nn.Module)", "class RootMeanSquare", "must be derived from torch.nn.Module, got RootMeanSquare"),
        (FORWARD, "return x.mean(0)", r"forward must return a tensor \(2, 8, 8, 8\), as it got, not \(8, 8, 8\)"),
        (BIAS, BIAS.replace("num_features,", "1, num_features, 1, 1,"),
         r"its bias has shape \(1, 8, 1, 1\), but the replaced layer's, which it takes, has \(8,\): use "),
        (FORWARD, "pass", r"forward must return a tensor \(2, 8, 8, 8\), as it got, not NoneType"),
    ],
)  # fmt: skip
def test_a_norm_that_cannot_replace_batch_norm_is_told_why(old: str, new: str, wanted: str, capsys: Capture) -> None:
    write(old, new)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(f"tbbn: norm 'rms' {MINE}: {wanted}", error), error


def test_a_norm_may_require_arguments_of_batch_norm(capsys: Capture) -> None:
    write(INIT, "def __init__(self, num_features, eps, affine, *, device, dtype, power: float = 0.5):")
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 0


def test_helpers_that_a_method_uses_may_have_any_name(capsys: Capture) -> None:
    lines = (
        "def phases(self, context):",
        "    from tbbn.bench.methods import Phase",
        "    return (Phase(loss='loss2'), Phase('again', loss='loss3'))",
        "def losses(self): ...",
        "def loss2(self, *given):",
        "    self.losses()",
        "    return self.loss(*given)",
        "from functools import partialmethod",
        "loss3 = partialmethod(loss2)",
    )
    write(f"    {LOSS}", "".join(f"    {line}\n" for line in lines) + f"    {LOSS}")
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 0


@pytest.mark.parametrize(
    "user",
    [
        wraps(Method.loss)(lambda self, *given: self.losses()),
        property(lambda self: self.losses()),
        staticmethod(lambda method: method.losses()),
        classmethod(lambda kind: kind.losses),
        cached_property(lambda self: self.losses()),
    ],
    ids=["decorated", "property", "static", "class", "cached"],
)
def test_a_helper_may_be_used_by_any_kind_of_function(user: Any) -> None:
    with temporary():
        alone = {"losses": lambda self: {}, "__module__": "elsewhere"}
        for more, used in (({}, False), ({"user": user}, True)):
            kind = register_method(f"own{used}")(dataclass(frozen=True)(type("Own", (Method,), {**alone, **more})))
            with (
                nullcontext() if used else pytest.raises(UserError, match="nothing uses 'losses'; did you mean 'loss'")
            ):
                check_names(f"own{used}", kind)


def test_a_helper_may_be_used_by_a_function_of_the_module(capsys: Capture) -> None:
    lines = (
        "def losses(self): ...",
        "def phases(self, context):",
        "    helped(self)",
        "    return super().phases(context)",
    )
    write(f"    {LOSS}", "".join(f"    {line}\n" for line in lines) + f"    {LOSS}")
    assert "nothing uses 'losses'" in mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    Path("mine.py").write_text(Path("mine.py").read_text() + "\n\ndef helped(method): method.losses()\n")
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 0


def test_a_helper_may_be_used_by_a_class_of_the_module(capsys: Capture) -> None:
    write(f"    {LOSS}", f"    def losses(self): ...\n    {LOSS}")
    text = Path("mine.py").read_text()
    mixin = "\n\nclass Helper:\n    def helped(self, method): method.losses()\n"
    Path("mine.py").write_text(text + mixin)
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 0


def test_a_helper_may_be_used_by_a_base_from_elsewhere() -> None:
    used = {"helped": lambda self: self.losses(), "__module__": "elsewhere"}
    own = {"losses": lambda self: {}, "__module__": "here"}
    with temporary():
        for bases in ((Method,), (type("Mixin", (), used), Method)):
            kind = register_method(f"mixed{len(bases)}")(dataclass(frozen=True)(type("Own", bases, own)))
            with nullcontext() if bases[1:] else pytest.raises(UserError, match="nothing uses 'losses'"):
                check_names(f"mixed{len(bases)}", kind)


def test_a_function_in_c_cannot_be_compared_with_the_contract() -> None:
    """It does not tell its arguments."""
    with temporary():
        own = {"predict": staticmethod(torch.relu), "__module__": "elsewhere"}
        kind = register_method("c")(dataclass(frozen=True)(type("Own", (Method,), own)))
        check_signatures("c", kind())


def test_a_method_without_a_mistake_needs_no_look_at_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding a line takes tens of milliseconds, and a sweep of a thousand runs asks for thousands of methods."""
    Path("mine.py").write_text(CODE)
    load_plugin("mine.py")
    monkeypatch.setattr("tbbn.plugins.line_of", None)
    assert method("tempered", {"temperature": 3.0}).temperature == 3.0


@pytest.mark.parametrize("text", ["class Tempered(:", "x = (", ""])
def test_a_file_that_is_edited_meanwhile_costs_the_line_only(text: str) -> None:
    """The error to be reported is another one, and the run may have trained for hours."""
    Path("mine.py").write_text(CODE)
    load_plugin("mine.py")
    assert re.fullmatch(f"method 'tempered' {MINE}", METHODS.place("tempered"))
    Path("mine.py").write_text(text)
    assert re.fullmatch(r"method 'tempered' of mine\.py \w{12}", METHODS.place("tempered"))


def test_a_plugin_that_cannot_be_loaded_names_the_line(capsys: Capture) -> None:
    write("import torch\n", "import torch\n\n1 / 0\n")
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py")
    assert error == "tbbn: plugin mine.py cannot be loaded: ZeroDivisionError: division by zero (mine.py line 8)"


def test_every_method_of_the_package_keeps_the_contract() -> None:
    for name, entry in METHODS.describe().items():
        check_names(name, entry.value)
        check_signatures(name, entry.value())


@pytest.mark.parametrize(
    "flag", ["needs_previous = True", "needs_previous = False", "needs_previous = property(_needs)"]
)
def test_a_method_that_says_whether_it_needs_the_previous_network_may_read_it(flag: str, capsys: Capture) -> None:
    read = f"kd = {{}} if previous is None else {{'kd': previous.logits.mean()}}\n        {RETURN} | kd"
    write(RETURN, read)
    text = (
        Path("mine.py").read_text().replace(f"    {LOSS}", f"    _needs = lambda self: True\n    {flag}\n\n    {LOSS}")
    )
    Path("mine.py").write_text(text)
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert ("kd" in load_record(Path(run["directory"])).history[-1]) is ("False" not in flag)


def test_a_loss_may_pass_the_previous_output_on(capsys: Capture) -> None:
    write(
        RETURN, f"super().loss if previous is not None else None\n        {RETURN} | self.more(batch, output, previous)"
    )
    text = (
        Path("mine.py")
        .read_text()
        .replace(f"    {LOSS}", f"    def more(self, *given):\n        return {{}}\n\n    {LOSS}")
    )
    Path("mine.py").write_text(text)
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 0


@pytest.mark.parametrize(
    "use",
    [
        "sum(x.mean() for x in {})",
        "list(zip({0}, {0}))",
        "[*{}]",
        "{}[0]",
        "{}[:2]",
        "len({})",
        "0 if {} else 1",
        "{} + ()",
    ],
)
@pytest.mark.parametrize("backbone", ["tiny", "small"])
def test_a_loss_that_passes_its_output_on_may_not_use_stages_without_saying_so(
    use: str, backbone: str, capsys: Capture
) -> None:
    write(RETURN, f"_use(output)\n        {RETURN}")
    text = Path("mine.py").read_text() + f"\n\ndef _use(output):\n    return {use.format('output.stages')}\n"
    Path("mine.py").write_text(text)
    words = [word if word != "tiny" else backbone for word in WORDS]
    error = mistake(capsys, "run", *words, "--plugin", "mine.py", "--quiet")
    line = len(text.splitlines())
    assert re.match(
        rf"tbbn: method 'tempered' of mine\.py \w{{12}}, mine\.py line {line}: loss uses stages, which needs the line ",
        error,
    ), error
    if backbone == "small":
        Path("mine.py").write_text(text.replace(f"    {LOSS}", f"    needs_stages = True\n\n    {LOSS}"))
        assert main(["run", *words, "--plugin", "mine.py", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (
            "after_task(self, context):\n        [*context.outputs(context.task.train).stages]",
            "the output of context.outp",
        ),
        (
            "predict(self, output):\n        return output.logits + len(output.stages)",
            "stages are used, but the backbone",
        ),
    ],
)
def test_stages_that_are_not_there_are_an_error_in_every_function(function: str, wanted: str, capsys: Capture) -> None:
    write(f"    {LOSS}", f"    def {function}\n\n    {LOSS}")
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert re.match(f"tbbn: method 'tempered' {MINE}: {wanted}", error), error


@pytest.mark.parametrize(
    "function", ["before_task(self, context)", "after_task(self, context)", "predict(self, output)"]
)
def test_a_method_that_keeps_state_in_attributes_is_told_where_to_keep_it(function: str, capsys: Capture) -> None:
    write(f"    {LOSS}", f"    def {function}:\n        self.kept = 3\n\n    {LOSS}")
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    wanted = "cannot assign to field 'kept'; a method keeps no state in attributes, .* store a tensor with context.network.rem"
    assert re.match(f"tbbn: method 'tempered' {MINE}: {wanted}", error), error


def test_a_frozen_batch_is_not_taken_for_the_method(capsys: Capture) -> None:
    write(RETURN, f"batch.n_memory = 3\n        {RETURN}")
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "cannot assign to field 'n_memory'" in error and "remember" not in error


def test_previous_read_in_the_first_task_is_said_to_be_none(capsys: Capture) -> None:
    write(RETURN, f"kd = previous.logits.mean()\n        {RETURN}")
    text = Path("mine.py").read_text().replace(f"    {LOSS}", f"    needs_previous = True\n\n    {LOSS}")
    Path("mine.py").write_text(text)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    wanted = "reads logits of previous, which is None in the first task; read it under: if previous is not None."
    assert re.fullmatch(f"tbbn: method 'tempered' {MINE}: {wanted}", error), error


@pytest.mark.parametrize("read", ["(None).logits_of_old", "(None if previous is None else batch.labels).bias"])
def test_another_missing_attribute_in_the_first_task_stays_what_it_is(read: str, capsys: Capture) -> None:
    write(RETURN, f"{read}\n        {RETURN}")
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 1
    assert "AttributeError: 'NoneType' object has no attribute" in capsys.readouterr().err


def test_a_mean_over_no_memory_rows_is_explained(capsys: Capture) -> None:
    write(RETURN, f"{RETURN} | {{'mem': output.logits[batch.memory].mean()}}")
    words = ["run", *WORDS, "--plugin", "mine.py", "--quiet", "--name"]
    assert main([*words, "mine"]) == 3
    wanted = (
        "; if the loss takes a mean over batch.memory: it is empty in the first task, and a mean over no rows is nan"
    )
    assert load_record("runs/mine").message.endswith(wanted)
    # The same in a later task, where a method without a memory gets none either.
    text = Path("mine.py").read_text().replace(f"    {LOSS}", f"    uses_memory = False\n\n    {LOSS}")
    Path("mine.py").write_text(text.replace("batch.memory]", "batch.memory if batch.n_old_classes else batch.current]"))
    assert main([*words, "without"]) == 3
    message = load_record("runs/without").message
    assert "task 2" in message and "if the loss takes a mean over batch.memory: it is empty here, and" in message
    # Weights that overflow make the loss nan, too, but not in the first step.
    Path("mine.py").write_text(CODE)
    assert main([*words, "overflow", "--train.lr", "1e30"]) == 3
    message = load_record("runs/overflow").message
    assert "nan" in message and "batch.memory" not in message


def test_an_option_of_a_norm_that_has_no_default_must_be_given(capsys: Capture) -> None:
    write(INIT, INIT.replace(" = 0.5", ""))
    without = [word if word != "rms(power=0.4)" else "rms" for word in WORDS]
    error = mistake(capsys, "run", *without, "--plugin", "mine.py", "--quiet")
    wanted = r"must take __init__\(self, num_features\), and .*; any other argument needs a default\."
    assert re.match(f"tbbn: norm 'rms' {MINE}: {wanted}", error), error
    assert main(["run", *WORDS, "--plugin", "mine.py", "--quiet"]) == 0


def test_a_mistake_in_a_penalty_names_its_line(capsys: Capture) -> None:
    write(f"    {LOSS}", f"    def penalty(self, network):\n        return 3\n\n    {LOSS}")
    line = next(n for n, text in enumerate(Path("mine.py").read_text().splitlines(), 1) if "def penalty" in text)
    error = mistake(capsys, "run", *WORDS, "--plugin", "mine.py", "--quiet")
    assert f"mine.py line {line}: penalty must return a dict of scalar tensors" in error


def test_an_error_names_the_class_that_runs_not_its_base(capsys: Capture) -> None:
    write(f"    {LOSS}", f"    {LOSS}\n        1 / self.temperature_of_derived")
    more = """

@tbbn.register_method("derived", "as its base")
@dataclass(frozen=True)
class Derived(Tempered):
    pass
"""
    Path("mine.py").write_text(Path("mine.py").read_text() + more)
    words = [word if word != "tempered" else "derived" for word in WORDS]
    assert main(["run", *words, "--plugin", "mine.py", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "method 'derived' of mine.py" in error and "temperature_of_derived" in error
