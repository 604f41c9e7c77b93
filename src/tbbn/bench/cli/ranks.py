"""Commands under torchrun: rank 0 does the command, the other ranks only take part in its training runs."""

from __future__ import annotations

import argparse
from contextlib import suppress

from tbbn.bench.engine.joining import is_launched, joined
from tbbn.bench.engine.ranks import ALONE
from tbbn.bench.runs.interrupt import stop_on_signal
from tbbn.bench.runs.leading import follow


def lead_or_follow(args: argparse.Namespace) -> int:
    """Do a command that trains; return the exit code."""
    args.ranks = ALONE
    if not is_launched():
        return args.call(args)
    with joined() as ranks:
        if ranks.rank:
            with stop_on_signal(tell=False) as stop:
                follow(ranks, stop)
            return 0
        args.ranks = ranks
        try:
            return args.call(args)
        finally:
            with suppress(RuntimeError):  # another rank is gone
                ranks.dismiss()
