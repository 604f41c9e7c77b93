"""The recipes that come with the package: found by name, described, and fit to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tbbn.bench.config import read_toml, resolve
from tbbn.bench.engine.validate import check
from tbbn.bench.runs.recipe import parse_choice
from tbbn.errors import UserError
from tbbn.paper import describe, find_recipe, is_recipe, recipes


@pytest.mark.parametrize("name", recipes())
def test_every_run_of_a_recipe_has_a_valid_config(name: str) -> None:
    values = read_toml(recipes()[name])
    sweep = {key: values.pop(key) for key in list(values) if key.startswith("sweep.")}
    for method in sweep.get("sweep.methods", ["ft"]):
        for norm in sweep.get("sweep.norms", ["bn"]):
            check(resolve((name, values), ("axes", parse_choice("method", method) | parse_choice("norm", norm))))


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_describes_itself_without_its_command(name: str) -> None:
    text = describe(recipes()[name])
    assert text and "#" not in text and "tbbn run" not in text


def test_a_recipe_is_found_by_its_name_or_as_a_file(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    assert is_recipe("demo") and find_recipe("demo") == recipes()["demo"]
    assert is_recipe(str(own)) and find_recipe(str(own)) == own  # whoever reads it says that it is not there
    own.write_text("seed = 1\n")
    assert find_recipe(str(own)) == own


def test_an_unknown_recipe_is_an_error_that_names_the_nearest() -> None:
    assert not is_recipe("demp")
    with pytest.raises(UserError, match=r"unknown recipe 'demp'.*demo"):
        find_recipe("demp")
