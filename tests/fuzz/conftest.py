"""Tests here share ``fuzzing.py``: how many cases are drawn, and what may come of one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
