"""The documentation is true: its Python runs, its commands parse, and the package's doctests hold."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import pkgutil
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import tbbn
from tbbn.bench import config
from tbbn.plugins import temporary

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LIBRARY = "tbbn.accelerators.native.libtbbn"  # the C kernel, which is no Python module
MODULES = sorted({m.name for m in pkgutil.walk_packages(tbbn.__path__, "tbbn.")} - {LIBRARY})


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_place_still_to_be_filled(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^[A-Z0-9_]{5,}$|\b(?:TODO|FIXME|TBD)\b", prose, re.MULTILINE) == []


@pytest.fixture
def registries() -> Any:
    """What the examples register is gone afterwards."""
    with temporary():
        yield


@pytest.fixture
def extended(registries: None) -> Any:
    """A module with the code of docs/extending.md, run as it stands."""
    page = ROOT / "docs" / "extending.md"
    module = types.ModuleType("extending")
    sys.modules["extending"] = module  # a dataclass looks its module up
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), module.__dict__)
    module.printed = printed.getvalue()  # type: ignore[attr-defined]
    yield module
    del sys.modules["extending"]


def test_the_examples_of_extending_run_as_they_stand(extended: Any) -> None:
    first, table = extended.printed.split("\n", 1)
    accuracy, final, kd = re.fullmatch(r"(\[\[.*\]\]) (\S+) (\S+)", first).groups()  # type: ignore[union-attr]
    assert len(json.loads(accuracy)) == 2 and 0 <= float(final) <= 1 and float(kd) > 0
    assert extended.result.config.method.dict()["kd"] == 2
    config = extended.own.config
    assert (config.method.name, config.norm.name, config.data.name) == ("lwf", "frn", "stripes")
    assert (config.backbone, config.batch.augment) == ("pyramid", "dim") and config.norm.dict()["threshold"] is True
    assert re.search(r"^lwf \+ tbbn +2 ", table, re.MULTILINE) and extended.curves is not None


def test_what_the_examples_register_is_listed_and_runs_from_the_command_line(
    extended: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tbbn.bench.cli.main import main

    brought = {"methods": "lwf", "norms": "frn", "datasets": "stripes", "backbones": "pyramid", "augmentations": "dim"}
    for what, name in brought.items():
        assert main(["list", what]) == 0
        assert re.search(rf"^extending:\n  {name} +\w", capsys.readouterr().out, re.MULTILINE)
    tiny = ["--data", "synthetic:4x12x4x8", "--data.tasks", "2", "--train.epochs", "1", "--memory.budget", "8"]
    words = ["run", *tiny, "--method", "lwf(kd=2)", "--norm", "bn,frn(threshold=true)", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "lwf(kd=2) + frn(threshold=True)" in capsys.readouterr().out
    assert main([*words, "--method.temprature", "1"]) == 2
    assert "Did you mean 'temperature'?" in capsys.readouterr().err
    assert main([*words, "--method.temperature", "0"]) == 2
    assert "method 'lwf': temperature must be positive" in capsys.readouterr().err


def test_the_recipe_of_recipes_runs_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tbbn.bench.cli.main import main

    page = ROOT / "docs" / "recipes.md"
    (recipe,) = blocks(page, "toml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(recipe)
    assert main(["run", "mine.toml", "--json", "--quiet"]) == 0
    entries = json.loads(capsys.readouterr().out)
    methods, norms = ("ft", "eeil(kd=2)"), ("bn", "tbbn(rule=uneven)")
    expected = [(method, norm, seed) for method in methods for norm in norms for seed in (0, 1)]
    assert [(e["method"], e["norm"], e["seed"]) for e in entries] == expected
    assert {e["status"] for e in entries} == {"finished"}
    folder = re.findall(r"such as `([^`]+)`", page.read_text())[0]
    assert Path(entries[-1]["directory"]) == Path("runs/mine") / folder
    assert main(["report", "runs/mine"]) == 0 and main(["run", "runs/mine/runs.toml", "--dry-run", "--json"]) == 0
    assert main(["resume", "runs/mine", "--quiet"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_every_page_compiles_and_its_sessions_hold(page: Path, registries: None) -> None:
    names: dict[str, Any] = {"tbbn": tbbn, "torch": torch}  # one session a page
    for block in blocks(page, "python"):
        if not block.startswith(">>>"):
            compile(block, str(page), "exec")
            continue
        session = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0)
        output = io.StringIO()
        assert not doctest.DocTestRunner().run(session, out=output.write, clear_globs=False).failed, output.getvalue()
        names |= session.globs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_every_page_name_settings_that_exist(page: Path) -> None:
    from tbbn.bench.cli.main import build_parser

    commands_known = build_parser()[1]

    text = page.read_text()
    commands = re.findall(r"`(tbbn [^`\n]+)`", text)
    for block in blocks(page, "(?:sh|bash|console|text)?"):
        commands += re.findall(r"^(?:\$ )?(tbbn .+?)(?:\s+#.*)?$", block, re.MULTILINE)
    for command in commands:
        words = shlex.split(command)[1:]
        if not words or words[0].startswith("{"):
            continue
        assert words[0].startswith("-") or words[0] in commands_known, command
        for word in words[1:] if words[0] in ("run", "sweep") else ():
            option = word.partition("=")[0]
            key = option.removeprefix("--")
            if not word.startswith("--") or option in commands_known[words[0]].options:
                continue
            if not key.startswith(("norm.", "method.")):
                assert key in config.SETTINGS, f"{page.name}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("name", MODULES)
def test_the_doctests_of_the_package_hold(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name in ("triton", "ray") or name.startswith("tbbn.integrations."):
            pytest.skip(f"{name} needs {error.name}")
        raise
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        failed, _ = doctest.testmod(module, extraglobs={"tbbn": tbbn, "torch": torch})
    assert not failed, output.getvalue()


# The site.


def test_links_between_files_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_lists_pages_that_exist_and_all_examples() -> None:
    listed = re.findall(r": (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    scripts = {f"examples/{path.stem}" for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in listed if name.startswith("examples/")} == scripts
    assert {name for name in listed if "/" not in name} <= {page.stem for page in (ROOT / "docs").glob("*.md")}


def test_the_numbers_and_pictures_of_the_idea_are_computed() -> None:
    from tbbn.paper import toy

    page = (ROOT / "docs" / "idea.md").read_text()
    assert toy.table(toy.toy()).render("text") in page
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "tools" / "docs_figures.py")
    assert spec is not None and spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert (figures.FOLDER / "four-rows.svg").read_text() == figures.four_rows(), "run tools/docs_figures.py"
    for value in (*figures.normalised(False), *figures.normalised(True)):
        assert f"{value:.2f}" in page


def test_the_reference_names_everything_public() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    named = {line.split(".")[-1] for line in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    by_2d = {name for name in tbbn.__all__ if name.endswith(("1d", "3d"))} | {
        "functional"
    }  # described with the 2-d layer
    assert set(tbbn.__all__) - by_2d <= named
    for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)
