"""Tests of kernels share ``interpreter.py``: how a kernel is run where there is no GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
