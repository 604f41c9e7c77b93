"""Names of methods, norms, data sets, backbones and augmentations: who may take them, and where plugins come from."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tbbn.errors import UserError
from tbbn.options import Option, option, options_of
from tbbn.plugins import SESSION, load_plugin, origin_of, temporary
from tbbn.registry import (
    BUILT_IN,
    LOGGERS,
    METHODS,
    NORMS,
    REGISTRIES,
    Origin,
    register_augmentation,
    register_method,
    register_norm,
)

NORM = """
import tbbn
@tbbn.register_norm("{name}", "a norm from a file")
class Norm: ...
"""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with temporary():
        yield


def plugin(path: Path, text: str = NORM, name: str = "filed") -> Path:
    path.write_text(text.format(name=name))
    return path


def test_the_registry_needs_neither_torch_nor_the_bench() -> None:
    code = """
import sys, tbbn, tbbn.registry
tbbn.register_method
assert "torch" not in sys.modules and "tbbn.bench" not in sys.modules
assert tbbn.registry.NORMS.options("gn")["groups"].default == 16
assert "torch" in sys.modules and "tbbn.bench" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_what_is_built_in_has_a_line_and_says_where_it_comes_from(registry: Any) -> None:
    entries = registry.describe()
    assert entries
    for entry in entries.values():
        assert entry.description and entry.origin == BUILT_IN


def test_options_have_their_defaults() -> None:
    assert {name: option.default for name, option in METHODS.options("lucir").items()} == {
        "less_forget": 5.0,
        "ranking": 1.0,
        "margin": 0.5,
        "top_k": 2,
        "imprint": False,
    }
    groups = NORMS.options("gn")
    assert (groups["groups"].default, groups["channels_per_group"].default) == (16, 0)
    assert groups["eps"].default is None  # that of the layer it replaces
    assert NORMS.options("brn")["momentum"].default == 0.01
    with pytest.raises(UserError, match=r"unknown norm 'gm'.*Did you mean 'gn'"):
        NORMS.options("gm")


def test_options_are_a_dataclass_s_fields_or_a_constructor_s_keywords() -> None:
    @dataclass
    class Fields:
        a: float = option(1.0, "weight of a", above=0)
        b: int = 2

    class Layer:
        def __init__(self, n: int, size: int = 3, eps: float = 1.0, *, depth: int = 4, width: int) -> None: ...

    class Deeper(Layer):
        def __init__(self, *args: int, depth: int = 5, **kwargs: int) -> None: ...

    assert options_of(Fields) == {"a": Option(1.0, "weight of a", above=0), "b": Option(2)}
    eps = Option(help="as in the layer it replaces", least=1e-30, most=1e30, kind=float)
    assert options_of(Layer) == {"size": Option(3), "eps": eps, "depth": Option(4), "width": Option(None)}
    assert options_of(Deeper) == {**options_of(Layer), "depth": Option(5)}
    assert options_of(3) == options_of(lambda x, *, y=1: None) == {}


@pytest.mark.parametrize("value", [lambda x: x, 3, None, (object, 3)])
def test_a_method_or_a_norm_must_be_a_class(value: Any) -> None:
    for register, kind in ((register_method, "method"), (register_norm, "norm")):
        with pytest.raises(UserError, match=rf"^{kind} 'mine' must be a class, got .*; decorate the class itself\.$"):
            register("mine")(value)


def test_anything_else_must_be_a_function() -> None:
    with pytest.raises(
        UserError, match=r"^augmentation 'mine' must be a function that returns an augmentation, got 3\.$"
    ):
        register_augmentation("mine")(3)


@temporary()
def test_what_is_called_without_arguments_says_so() -> None:
    LOGGERS.register("mine", lambda path: None)
    with pytest.raises(
        UserError, match=r"logger 'mine' of .*: is called without arguments; its 'path' needs a default"
    ):
        LOGGERS.make("mine")


def test_a_name_is_taken_once_and_both_sides_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method 'ft' is already registered by tbbn; .* must use another name"):
        register_method("ft")(object)
    load_plugin(str(plugin(tmp_path / "one.py")))
    two = plugin(tmp_path / "two.py", NORM + "x = 1")
    taken = rf"norm 'filed' is already registered by {tmp_path}/one.py \w{{12}}; {two} \w{{12}} must use another"
    wanted = f"^plugin {two} cannot be loaded: {taken}"
    with pytest.raises(UserError, match=wanted):
        load_plugin(str(two))


def test_a_definition_that_is_run_again_replaces_the_old_one() -> None:
    def define() -> Any:
        @register_norm("mine")
        class Norm:
            """Divide by two.

            And more."""

        return Norm

    first, second = define(), define()
    assert NORMS.get("mine") is second is not first
    assert NORMS.entry("mine").description == "Divide by two"

    class Other: ...

    with pytest.raises(UserError, match="already registered"):
        register_norm("mine")(Other)


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a+b", "a:b", "a(b)", "a=1"])
def test_a_name_must_fit_on_the_command_line(name: str) -> None:
    with pytest.raises(UserError, match="a name is text without"):
        register_norm(name)(object)


def test_a_decorator_without_brackets_is_one_line() -> None:
    with pytest.raises(UserError, match=r'needs a name: @tbbn\.register_norm\("my-norm"\)'):
        register_norm(object)  # type: ignore[arg-type]


def test_a_file_is_a_plugin_known_by_its_hash(tmp_path: Path) -> None:
    file = plugin(tmp_path / "mine.py")
    origin = load_plugin(str(file))
    assert len(origin.sha256) == 64 and origin == NORMS.entry("filed").origin == Origin(str(file), "", origin.sha256)
    norm = NORMS.get("filed")
    load_plugin(str(file))
    assert NORMS.get("filed") is norm  # loaded once
    plugin(file, NORM + "x = 1")
    assert load_plugin(str(file)).sha256 != origin.sha256
    assert NORMS.get("filed") is not norm  # it has changed


def test_what_a_script_registers_comes_from_its_file(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("x = 1\n")
    found = origin_of({"__name__": "__main__", "__file__": str(script)})
    assert found == Origin(str(script), sha256=hashlib.sha256(b"x = 1\n").hexdigest())
    assert origin_of({"__name__": "__main__"}) == SESSION, "typed, or in a notebook"


def test_a_module_is_a_plugin_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path / "mine_as_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    origin = load_plugin("mine_as_module")
    assert origin.name == "mine_as_module" and len(origin.sha256) == 64 and NORMS.entry("filed").origin == origin


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def f(:", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (NORM.format(name="half") + "raise ValueError('first\\nsecond')", r"ValueError: first \(broken\.py line 5\)$"),
    ],
)
def test_a_plugin_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, text: str, wanted: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"^plugin {file} cannot be loaded: {wanted}"):
        load_plugin(str(file))
    assert "half" not in NORMS and "bn" in NORMS


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^plugin nothing_here: no such module; install it, or give a file such as "):
        load_plugin("nothing_here")
    with pytest.raises(UserError, match=r"/nothing\.py: no such file\.$"):
        load_plugin(str(tmp_path / "nothing.py"))


@pytest.mark.parametrize("registry", [METHODS, NORMS], ids=["methods", "norms"])
def test_every_option_that_is_built_in_is_explained(registry: Any) -> None:
    for name, entry in registry.describe().items():
        for own, known in entry.options.items():
            assert known.help, f"{name}.{own}"
            assert known.default is None or not known.problem(known.default), f"{name}.{own}"
            assert known.default is not None or known.help == "as in the layer it replaces"
