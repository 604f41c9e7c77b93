"""Tests here share ``literal.py``, the layer written out word for word."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("norm", deadline=None)  # the first case of a test pays for what torch loads lazily
settings.load_profile("norm")
