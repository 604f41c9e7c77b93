"""The recipes that come with the package: found by name, described, and fit to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tbbn.bench.config import flatten, read_toml, resolve, to_dict
from tbbn.bench.engine.validate import check
from tbbn.bench.runs.recipe import parse_choice, read_recipe
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
    assert text and "#" not in text and not any(f"tbbn {command}" in text for command in ("run", "sweep", "reproduce"))


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_opens_with_a_command_that_runs_it(name: str) -> None:
    _, program, command, wanted, *_ = recipes()[name].read_text().splitlines()[0].split()
    assert program == "tbbn" and command in ("run", "sweep", "reproduce")
    if command == "sweep":
        assert wanted == name


def rows(name: str, **settings: object) -> list[dict[str, object]]:
    """The config of each method and norm of a recipe, with these settings on top."""
    values, axes = read_recipe(recipes()[name])
    pairs = [(method, norm) for method in axes.methods or ("ft",) for norm in axes.norms]
    layers = [(name, values), ("test", {key.replace("__", "."): value for key, value in settings.items()})]
    axis = [("axes", parse_choice("method", method) | parse_choice("norm", norm)) for method, norm in pairs]
    return [flatten(to_dict(resolve(*layers, row))) for row in axis]


def test_other_forms_of_the_layer_keep_the_last_epoch_and_differ_in_one_option_each() -> None:
    made = rows("beyond-cifar100")
    assert {(row["protocol"], row["train.keep"], row["data.name"]) for row in made} == {("paper", "last", "cifar100")}
    options = {"rule": "paper", "case": 0, "memory": "averaged", "total_variance": False}
    forms = [
        {name: row[f"norm.{name}"] for name, usual in options.items() if row[f"norm.{name}"] != usual}
        for row in made
        if (row["method.name"], row["norm.name"]) == ("ssil", "tbbn")
    ]
    assert forms == [{}, {"rule": "current"}, {"rule": "uneven"}, {"memory": "own"}, {"total_variance": True}]
    assert {row["norm.name"] for row in made} == {"bn", "tbbn", "weighted"}
    assert {row["method.name"] for row in made} == {"ft", "ssil"}


def test_a_part_of_the_dissimilar_sequence_is_trained_like_the_whole() -> None:
    whole, part = rows("table4-dissimilar"), rows("table4-dissimilar", data__name="mnist+svhn", data__tasks=4)
    for one, other in zip(whole, part, strict=True):
        assert {key for key in one if one[key] != other[key]} == {"data.name", "data.tasks"}


@pytest.mark.parametrize("table", ["table1", "table2"])
def test_tiny_imagenet_is_trained_like_imagenet100(table: str) -> None:
    tiny = {
        (row["method.name"], row["norm.name"], row.get("norm.groups")): row for row in rows(f"{table}-tiny-imagenet")
    }
    theirs = {
        key: row
        for row in rows(f"{table}-imagenet100")
        if (key := (row["method.name"], row["norm.name"], row.get("norm.groups")))[0] not in ("podnet", "afc")
    }
    assert tiny.keys() == theirs.keys()
    for key, row in tiny.items():
        differ = {name for name in row if row[name] != theirs[key][name]}
        assert differ == {"data.name", "data.class_order", "data.crop", "backbone"}


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
