"""Ctrl-C at a moment of the run's own choosing."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator


@contextlib.contextmanager
def putting_off_interrupts() -> Generator[Callable[[], bool]]:
    """Ctrl-C only sets a flag, which the yielded function reads, until the block ends; the second time it acts at once.

    An exception in the midst of a save leaves threads of the storage library that never end, and within a library's
    callback it is lost. Outside the main thread, where there are no signals, nothing changes.
    """
    pressed = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def press(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)
        sys.stderr.write("\ninterrupted: stopping after this step (again to stop at once)\n")

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
