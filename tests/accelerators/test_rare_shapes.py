"""Cases that are marked nightly in the files that test kernels, on the interpreter: shapes that cost it many seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter import here, interpret


@here
@pytest.mark.nightly
@pytest.mark.parametrize("file", ["test_convolution.py", "test_kernel_passes.py", "test_kernels.py"])
def test_rare_shapes_pass_on_the_interpreter(file: str) -> None:
    interpret(str(Path(__file__).with_name(file)), "nightly")
