"""Import a package that only the integrations need, or skip the tests of the module that asks for it."""

import warnings

import pytest

from tbbn.bench.vision import torchvision


def package(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports may warn
        torchvision()  # these packages import it, and it may not fit the installed torch
        return pytest.importorskip(name)
