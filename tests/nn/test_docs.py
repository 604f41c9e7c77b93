"""The examples in the documentation say what the code does, and every option is in it."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import tbbn
from tbbn.plugins import temporary
from tbbn.registry import NORMS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def _registered():
    """What a page registers is gone afterwards."""
    with temporary():
        yield


@pytest.mark.parametrize("page", ["loaders.md", "method.md", "norms.md"])
def test_pages(page):
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 3 and result.failed == 0


@pytest.mark.parametrize(
    "name", ["tbbn.nn.plan", "tbbn.nn.modules", "tbbn.nn.convert", "tbbn.nn.sampler", "tbbn.errors"]
)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), extraglobs={"tbbn": tbbn, "torch": torch})
    assert result.attempted > 0 and result.failed == 0


def test_every_norm_and_option_is_in_the_table():
    lines = (DOCS / "norms.md").read_text().splitlines()
    table = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert table.keys() == set(NORMS)
    for norm, line in table.items():
        for option in NORMS.options(norm).keys() - NORMS.options("bn").keys():
            assert f"`{option}`" in line, f"{norm}: {option}"
