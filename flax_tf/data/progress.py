"""A sign of life on stderr for work that takes longer than expected."""

import contextlib
import threading
from collections.abc import Generator

from rich.console import Console
from rich.status import Status


@contextlib.contextmanager
def waiting(label: str, after_seconds: float = 1.0) -> Generator[Status]:
    """A spinner with the label (`update` it as you like) while the block runs; none for a block that ends sooner."""
    status = Console(stderr=True).status(label)
    timer = threading.Timer(after_seconds, status.start)
    timer.start()
    try:
        yield status
    finally:
        timer.cancel()
        timer.join()  # it may be starting the spinner just now
        status.stop()
