"""A run measured against the truth while it goes on: of every array only its relative error is kept."""

import numpy as np

from flax_tf.parity import tolerances
from flax_tf.parity.events import (
    BUFFER,
    GRADIENT,
    GRADIENTS,
    INPUT,
    OUTPUT,
    OUTPUT_GRADIENT,
    call_name,
    call_of,
    kind_of,
)
from flax_tf.parity.tolerances import output_error, relative_error
from flax_tf.parity.truth import Truth


class Measure:
    """A listener: `errors` by name, and the names that the truth hasn't.

    A layer that keeps its channels last, as Flax's convolutions do, is compared with PyTorch's, which has them second,
    after a move of the axis. What the model itself takes and returns is moved only if `channels_last` says
    that it may be.
    """

    def __init__(self, truth: Truth, precision: str, *, channels_last: bool = False):
        self.errors: dict[str, float] = {}
        self.unknown: list[str] = []
        self.dtypes: dict[str, np.dtype] = {}
        self._truth, self._precision, self._channels_last = truth, precision, channels_last

    def __call__(self, name: str, array: np.ndarray) -> None:
        kind = kind_of(name)
        truth = self._truth.arrays.get(name)
        if truth is None and self._without_gradient(name, kind):
            truth = np.zeros_like(array)  # PyTorch stops the gradient there
        if truth is None:
            self.unknown.append(name)
        elif kind == GRADIENT:
            self.errors[name] = self._gradient_error(array, truth, self._truth.gradient_norm)
        elif kind == BUFFER:
            self.errors[name] = relative_error(array, truth)
        else:
            self._measure(name, kind, array, truth)

    def _measure(self, name: str, kind: str, array: np.ndarray, truth: np.ndarray) -> None:
        """What goes into or comes out of a call."""
        path = call_of(name)[0].path
        if kind == INPUT:
            if path == "":
                self.errors[name] = 0.0
                return
            # PyTorch's attention has True for "hide", and another shape.
            if truth.dtype == bool and self._truth.layers.get(path) == "MultiheadAttention":
                same = array.shape != truth.shape or np.array_equal(array, truth) or np.array_equal(array, ~truth)
                self.errors[name] = 0.0 if same else float("inf")
            else:
                self.errors[name] = output_error(_either_layout(array, truth), truth)
            return
        placed = self._moved(array, truth) if path == "" else _either_layout(array, truth)
        if kind == OUTPUT:
            # Integers follow from roundings, such as the place of a maximum: float64 decides on them.
            rounded = self._precision != "float64" and truth.dtype.kind in "biu"
            self.errors[name] = 0.0 if rounded else output_error(placed, truth)
            self.dtypes[name] = array.dtype
        elif kind == OUTPUT_GRADIENT and path == "":
            self.errors[name] = 0.0  # the cotangents, which are given
        else:
            self.errors[name] = self._gradient_error(placed, truth, self._truth.call_gradient_norm)

    def close(self) -> None:
        """The run is over: a gradient that no operation passed on is zero, and a mask that was not given is missed."""
        calls = {call_of(name)[0] for name in self.errors if kind_of(name) == OUTPUT}
        for name, truth in self._truth.arrays.items():
            kind = kind_of(name)
            if name in self.errors or kind in (GRADIENT, BUFFER) or call_of(name)[0] not in calls:
                continue
            if kind in GRADIENTS:
                zero = np.zeros_like(truth)
                self.errors[name] = self._gradient_error(zero, truth, self._truth.call_gradient_norm)
            elif kind == INPUT and is_mask(truth):
                self.errors[name] = float("inf")

    def keep_least(self, other: "Measure") -> None:
        """Of every error the smaller of this run's and another's."""
        self.errors = {name: min(error, other.errors.get(name, error)) for name, error in self.errors.items()}

    def _without_gradient(self, name: str, kind: str) -> bool:
        """Whether it is the gradient of an output that PyTorch has, and has no gradient of."""
        return kind == OUTPUT_GRADIENT and call_name(OUTPUT, *call_of(name)) in self._truth.arrays

    def _moved(self, array: np.ndarray, truth: np.ndarray) -> np.ndarray:
        return _either_layout(array, truth) if self._channels_last else array

    def _gradient_error(self, gradient: np.ndarray, truth: np.ndarray, whole: float) -> float:
        """Relative to the truth, or to a small part of all gradients where that is larger."""

        def zero(gradient: np.ndarray) -> bool:
            rounding = tolerances.ZERO_ROUNDINGS * tolerances.eps(gradient.dtype) * whole
            return tolerances.norm(gradient) <= rounding

        if zero(truth) and zero(gradient):
            return 0.0
        error, size = relative_error(gradient, truth), tolerances.norm(truth)
        small = tolerances.SMALL_GRADIENT_FLOAT64 if gradient.dtype == np.float64 else tolerances.SMALL_GRADIENT
        return error * size / (small * whole) if 0 < size < small * whole else error


def is_mask(array: np.ndarray) -> bool:
    """Whether it says what attention may see: truth values, or numbers of which some are minus infinity."""
    return array.dtype == bool or bool(np.isneginf(array.astype(np.float64)).any())


def channels_last_array(array: np.ndarray) -> np.ndarray:
    """[B, C, ...] as [B, ..., C]; arrays with fewer axes, or without floating-point numbers, as they are."""
    return np.moveaxis(array, 1, -1) if array.ndim > 2 and array.dtype.kind not in "biu" else array


def _either_layout(array: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The array as it is, or with its last axis as the second where only so, or better so, it is the truth."""
    if array.ndim < 3 or array.ndim != truth.ndim:
        return array
    moved = np.moveaxis(array, -1, 1)
    if array.shape != truth.shape:
        return moved
    # A wrong layout is wrong by about 1, so the other one need not be tried below that.
    return moved if output_error(array, truth) > 1e-1 > output_error(moved, truth) else array
