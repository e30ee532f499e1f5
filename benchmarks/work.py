"""What a side gives to the worker to be measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """Prepared and ready to run."""

    run: Callable[[], Any]
    """Does it, and returns when it is done, with something that shows it."""
    steps: int = 1
    """How many steps that is."""
    once: bool = False
    """What is measured is the first time, as nobody does it twice."""
