"""The parity contract: what "identical" means, as numbers with reasons."""

from typing import Any

import ml_dtypes
import numpy as np

# Two correct float64 evaluations of one formula differ by a few roundings (2e-16) per operation and by the order of
# their sums; over the depth of a transformer that stays below 1e-13. A wrong epsilon or formula shows at 1e-8 and up.
OUTPUT_FLOAT64 = 1e-12

# A gradient passes through the network twice and sums over batch and time, so rounding is larger by one to two digits.
GRADIENT_FLOAT64 = 1e-10

# In training a rounding of the parameters (1e-16) moves the next gradient, and optimizers divide gradients by their own
# size, so errors grow with the steps: to 1e-14 in 100 steps of small models. A wrong epsilon, decay or rate shows at
# 1e-8 and up after one.
STEPS_FLOAT64 = 1e-9

# In float32 and bfloat16 both frameworks are measured against the same float64 result: as accurate as PyTorch, not
# "close enough". The factor 2 allows for another order of summation.
LOW_RATIO = 2.0

# Below 4 units in the last place the two errors are rounding luck, and their ratio says nothing.
OUTPUT_FLOOR = 4

# In a gradient the same luck is magnified by the sums over batch and time and by the cancellation in them, so the floor
# is a digit higher. In 35 honest pairs of small random models, gradients went up to 14 units at four times PyTorch's
# error. What float32 alone can get wrong (bf16 or TF32 products, a one-pass variance)
# is off by hundreds of units.
GRADIENT_FLOOR = 40

# One run of PyTorch can be lucky: where a model magnifies roundings (a sharp softmax, a norm over few numbers) another
# that is as good is ten times less accurate. And a ReLU whose input is within a rounding of zero takes its other side,
# so that the gradients of all layers before it jump by 1e-4, in PyTorch as in Flax, but not at the same inputs. So what
# fails in low precision alone is held against PyTorch's worst error over this many more runs, each with every
# parameter moved by one rounding. What Flax gets wrong by itself (bf16 or TF32 products, a one-pass variance) is
# beyond that.
NUDGES = 8

# And one run of Flax can be unlucky in the same way: of 500 honest pairs, one gradient of nine numbers had 2.4 times
# PyTorch's worst error. So what still fails is held against the least of Flax's errors over this many more runs, with
# its parameters moved likewise: luck does not hit the same array every time, and a fault does.
OWN_NUDGES = 4

# A gradient that is small beside the others is what is left after cancellation, such as that of a query's projection in
# additive attention, whose shift of all scores the softmax nearly takes out: 2e-4 of the whole gradient's norm, with 7
# times PyTorch's float32 error on the one set of weights and less than PyTorch's on the next. So below float64 an error
# is taken relative to at least this part of the whole.
SMALL_GRADIENT = 1e-2

# The same in float64, whose contract is six digits above its roundings. Gradients that pass a norm over two numbers,
# which is ±1 whatever they are, were a millionth of the whole, with an error of 2e-10 of themselves.
SMALL_GRADIENT_FLOAT64 = 1e-4

# Some gradients are zero in exact arithmetic (a key's bias shifts every score of a query alike, and the softmax takes
# the shift out). What is computed is noise, without a relative error. Both sides at most this many roundings of the
# whole gradient's norm count as zero.
ZERO_ROUNDINGS = 64


# What is larger than this is no activation but what fills masked places, such as -1e9. Beside it all else would be
# below the roundings of the tensor's norm, so it is measured by itself.
FILL = 1e6
# And this large is the lowest number of a dtype, which is another one in another precision.
EXTREME = 1e30


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    """‖value - truth‖ / ‖truth‖ over the tensor; inf for another shape, and if either side holds NaN or inf."""
    if value.shape != truth.shape or not (np.isfinite(value).all() and np.isfinite(truth).all()):
        return float("inf")
    difference, scale = norm(_wide(value) - _wide(truth)), norm(truth)
    if difference == 0:
        return 0.0
    return difference / scale if scale and difference < float("inf") else float("inf")


def output_error(value: np.ndarray, truth: np.ndarray) -> float:
    """The relative error of what a module returns or is given.

    Integers and truth values are equal or not. Places that the truth fills with huge numbers are measured apart, and
    the same infinity on both sides, which a mask may have left, is equal.
    """
    if value.shape != truth.shape:
        return float("inf")
    exact = [array.dtype.kind in "biu" for array in (value, truth)]
    if any(exact):
        return 0.0 if all(exact) and np.array_equal(value, truth) else float("inf")
    magnitude = np.abs(_wide(truth))
    if not np.isnan(magnitude).any() and magnitude.max(initial=0.0) < FILL:
        return relative_error(value, truth)
    extreme = ~(magnitude < EXTREME)
    filled = (magnitude >= FILL) & ~extreme
    groups = (~(filled | extreme), filled)
    errors = [relative_error(np.where(group, value, 0), np.where(group, truth, 0)) for group in groups]
    ours, theirs = _wide(value)[extreme], _wide(truth)[extreme]
    infinite = np.isinf(theirs)
    if np.isnan(ours).any() or np.isnan(theirs).any():
        errors.append(float("inf"))
    elif value.dtype == np.float64:
        errors.append(0.0 if (ours[infinite] == theirs[infinite]).all() else float("inf"))
        errors.append(relative_error(ours[~infinite] / EXTREME, theirs[~infinite] / EXTREME))
    return max(errors)


def norm(array: np.ndarray) -> float:
    """The Euclidean norm over all numbers, in float64.

    Summed in pairs. `np.linalg.norm` is a BLAS product, whose threads get in the way of those that run the model.
    """
    magnitudes = np.abs(_wide(array))
    largest = float(magnitudes.max(initial=0.0))
    if 1e150 < largest < float("inf"):  # its square would be infinite
        return largest * norm(magnitudes / largest)
    return float(np.sqrt(np.square(magnitudes).sum()))


def _wide(array: np.ndarray) -> np.ndarray:
    return array if np.iscomplexobj(array) else array.astype(np.float64, copy=False)


def low_limit(torch_error: float, precision: str, floor: int) -> float:
    """The largest error in a precision below float64, against the float64 truth, given PyTorch's own error.

    `floor` is in units of the last place of that precision.
    """
    return max(LOW_RATIO * torch_error, floor * eps(precision))


def eps(dtype: Any) -> float:
    """The unit in the last place of 1 in this precision."""
    return float(ml_dtypes.finfo(dtype).eps)
