"""On Ctrl-C or SIGTERM, save the runs before the process ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether to stop. The first Ctrl-C or SIGTERM sets it; the second interrupts at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # Not print: the signal may have arrived in the middle of one.
        with suppress(OSError):  # nobody may be reading
            os.write(2, b"tbbn: stopping after this step and saving; press Ctrl-C again to quit now.\n")

    if threading.current_thread() is not threading.main_thread():  # Python handles signals there only
        yield lambda: False
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
