"""Tests share what lies in ``helpers/``."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
settings.register_profile("tbbn", deadline=None)  # the first case of a test pays for what torch loads lazily
settings.load_profile("tbbn")
