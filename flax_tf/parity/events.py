"""What a run of a model tells: each array under a name that is the same for both frameworks.

A name has four parts: what the array is, the PyTorch path of the submodule ("" for the root), the number of its call
from 0, and the label of the array among the call's inputs or outputs. Of a parameter's gradient, and of a buffer
after a step in training mode, there are two: what it is, and the key.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

INPUT, OUTPUT, INPUT_GRADIENT, OUTPUT_GRADIENT = "input", "output", "input gradient", "output gradient"
GRADIENT, BUFFER = "gradient", "buffer"
GRADIENTS = (GRADIENT, INPUT_GRADIENT, OUTPUT_GRADIENT)
_SEPARATOR = "|"

Listener = Callable[[str, np.ndarray], None]


class Call(NamedTuple):
    """One call of a submodule."""

    path: str
    number: int


def call_name(what: str, call: Call, label: str) -> str:
    return _SEPARATOR.join((what, call.path, str(call.number), label.replace(_SEPARATOR, "/")))


def key_name(what: str, key: str) -> str:
    return f"{what}{_SEPARATOR}{key}"


def kind_of(name: str) -> str:
    """What the array of this name is."""
    return name.split(_SEPARATOR, 1)[0]


def call_of(name: str) -> tuple[Call, str]:
    """The call that an input, an output or a gradient of these belongs to, and its label."""
    path, number, label = name.split(_SEPARATOR, 1)[1].rsplit(_SEPARATOR, 2)
    return Call(path, int(number)), label


def key_of(name: str) -> str:
    """The key of a parameter's gradient."""
    return name.split(_SEPARATOR, 1)[1]
