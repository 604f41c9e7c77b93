"""Save the runs before the process ends on Ctrl-C, SIGTERM or a closed terminal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_QUITS = {
    signal.SIGINT: b"press Ctrl-C again to quit",
    signal.SIGTERM: b"a second SIGTERM quits",
    signal.SIGHUP: b"SIGTERM quits",
}


@contextmanager
def stop_on_signal(*, tell: bool = True) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to stop: True after a Ctrl-C, SIGTERM or SIGHUP. A second one interrupts at once.

    A closing terminal may send SIGHUP several times, so a second SIGHUP has no effect. Under nohup SIGHUP is ignored.
    ``tell`` reports the first signal on standard error.
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
        # os.write, because the signal may have arrived in the middle of a print.
        with suppress(OSError):  # nobody may be reading
            os.write(2, b"tbbn: stopping after this step and saving; %s now.\n" % _QUITS[signal.Signals(number)])

    if threading.current_thread() is not threading.main_thread():  # Python handles signals only in the main thread
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
