"""On Ctrl-C, SIGTERM or a closed terminal, save the runs before the process ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stop_on_signal(*, tell: bool = True) -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether to stop. The first Ctrl-C, SIGTERM or SIGHUP sets it; the second interrupts at once.

    A closing terminal may send SIGHUP several times, so that never interrupts at once. Under nohup it is ignored.
    ``tell``: say on standard error that a signal has arrived.
    """
    asked = False

    def ask(number: int, _: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGHUP:
            return
        if asked:
            raise KeyboardInterrupt
        asked = True
        if not tell:
            return
        # Not print: the signal may have arrived in the middle of one.
        with suppress(OSError):  # nobody may be reading
            os.write(2, b"tbbn: stopping after this step and saving; press Ctrl-C again to quit now.\n")

    if threading.current_thread() is not threading.main_thread():  # Python handles signals there only
        yield lambda: False
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
