"""A run measured against the truth while it goes on: of every array only its relative error is kept."""

import numpy as np

from flax_tf.parity import tolerances
from flax_tf.parity.events import GRADIENT, GRADIENTS, INPUT, OUTPUT, call_of, kind_of
from flax_tf.parity.tolerances import relative_error
from flax_tf.parity.truth import Truth


class Measure:
    """A listener: `errors` by name, and the names that the truth hasn't.

    A layer that keeps its channels last, as Flax's convolutions do, is compared with PyTorch's, which has them second,
    after a move of the axis. What the model itself takes and returns is moved only if `channels_last` says so.
    """

    def __init__(self, truth: Truth, *, channels_last: bool = False):
        self.errors: dict[str, float] = {}
        self.unknown: list[str] = []
        self.dtypes: dict[str, np.dtype] = {}
        self._truth, self._channels_last = truth, channels_last

    def __call__(self, name: str, array: np.ndarray) -> None:
        if name not in self._truth.arrays:
            self.unknown.append(name)
            return
        truth = self._truth.arrays[name]
        kind = kind_of(name)
        if kind == GRADIENT:
            self.errors[name] = self._gradient_error(array, truth, self._truth.gradient_norm)
            return
        path = call_of(name)[0].path
        root = path == ""
        if kind == INPUT:
            # PyTorch's attention has True for "hide".
            either = self._truth.layers.get(path) == "MultiheadAttention"
            self.errors[name] = 0.0 if root else _input_error(array, truth, either_polarity=either)
            return
        placed = self._moved(array, truth) if root else _either_layout(array, truth)
        if kind == OUTPUT:
            self.errors[name] = relative_error(placed, truth)
            self.dtypes[name] = array.dtype
        else:
            self.errors[name] = self._gradient_error(placed, truth, self._truth.call_gradient_norm)

    def close(self) -> None:
        """The run is over: a gradient that no operation passed on is zero, and a mask that was not given is missed."""
        calls = {call_of(name)[0] for name in self.errors if kind_of(name) == OUTPUT}
        for name, truth in self._truth.arrays.items():
            kind = kind_of(name)
            if name in self.errors or kind == GRADIENT or call_of(name)[0] not in calls:
                continue
            if kind in GRADIENTS:
                zero = np.zeros_like(truth)
                self.errors[name] = self._gradient_error(zero, truth, self._truth.call_gradient_norm)
            elif kind == INPUT and truth.dtype == bool:
                self.errors[name] = float("inf")

    def _moved(self, array: np.ndarray, truth: np.ndarray) -> np.ndarray:
        return np.moveaxis(array, -1, 1) if self._channels_last and truth.ndim > 2 else array

    def _gradient_error(self, gradient: np.ndarray, truth: np.ndarray, whole: float) -> float:
        """Relative to the truth, or to a small part of all gradients where that is larger."""

        def zero(gradient: np.ndarray) -> bool:
            rounding = tolerances.ZERO_ROUNDINGS * tolerances.eps(gradient.dtype) * whole
            return tolerances.norm(gradient) <= rounding

        if zero(truth) and zero(gradient):
            return 0.0
        small = tolerances.SMALL_GRADIENT_FLOAT64 if gradient.dtype == np.float64 else tolerances.SMALL_GRADIENT
        return relative_error(gradient, truth) * min(1.0, tolerances.norm(truth) / whole / small)


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
    return moved if relative_error(array, truth) > 1e-1 > relative_error(moved, truth) else array


def _input_error(array: np.ndarray, truth: np.ndarray, *, either_polarity: bool) -> float:
    """The error of a submodule's input; a mask is right or wrong."""
    if truth.dtype == bool:
        if array.dtype != bool or array.shape != truth.shape:
            return 0.0 if either_polarity else float("inf")
        return 0.0 if (array == truth).all() or (either_polarity and (array != truth).all()) else float("inf")
    return relative_error(_either_layout(array, truth), truth)
