"""The parity contract: what "identical" means, as numbers with reasons."""

import numpy as np

# Two correct float64 evaluations of one formula differ by a few roundings (2e-16) per operation and by the order of
# their sums; over the depth of a transformer that stays below 1e-13. A wrong epsilon or formula shows at 1e-8 and up.
OUTPUT_FLOAT64 = 1e-12

# A gradient passes through the network twice and sums over batch and time, so rounding is larger by one to two digits.
GRADIENT_FLOAT64 = 1e-10

# In float32 both frameworks are measured against the same float64 result: as accurate as PyTorch, not "close enough".
# The factor 2 allows for another order of summation.
FLOAT32_RATIO = 2.0

# Below 4 units in the last place the two errors are rounding luck, and their ratio says nothing.
OUTPUT_FLOAT32_FLOOR = 4 * float(np.finfo(np.float32).eps)

# In a gradient the same luck is magnified by the sums over batch and time and by the cancellation in them, so the floor
# is a digit higher. In 35 honest pairs of small random models, gradients went up to 14 units at four times PyTorch's
# error. What float32 alone can get wrong (bf16 or TF32 products, a one-pass variance)
# is off by hundreds of units.
GRADIENT_FLOAT32_FLOOR = 10 * OUTPUT_FLOAT32_FLOOR

# A gradient that is small beside the others is what is left after cancellation, such as that of a query's projection in
# additive attention, whose shift of all scores the softmax nearly takes out: 2e-4 of the whole gradient's norm, with 7
# times PyTorch's float32 error on the one set of weights and less than PyTorch's on the next. So in float32 an error is
# taken relative to at least this part of the whole.
SMALL_GRADIENT = 1e-2

# Some gradients are zero in exact arithmetic (a key's bias shifts every score of a query alike, and the softmax takes
# the shift out). What is computed is noise, without a relative error. Both sides at most this many roundings of the
# whole gradient's norm count as zero.
ZERO_ROUNDINGS = 64


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    """‖value - truth‖ / ‖truth‖ over the tensor; inf for another shape, and if either side holds NaN or inf."""
    if value.shape != truth.shape or not (np.isfinite(value).all() and np.isfinite(truth).all()):
        return float("inf")
    value, truth = value.astype(np.float64), truth.astype(np.float64)
    difference, scale = np.linalg.norm(value - truth), np.linalg.norm(truth)
    if difference == 0:
        return 0.0
    return float(difference / scale) if scale else float("inf")


def float32_passes(error: float, torch_error: float, floor: float) -> bool:
    """Whether a float32 error against the float64 truth is within the contract, given PyTorch's own."""
    return error <= max(FLOAT32_RATIO * torch_error, floor) < float("inf")
