"""Where a training step went apart: dropout, the model and its loss, the running statistics, or the update rule."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flax_tf.parity.tolerances import SMALL_GRADIENT, STEPS_FLOAT64, relative_error

Arrays = Mapping[str, np.ndarray]

# Two right updates agree to about 1e-13, but Adam divides what little is left of some gradients by its own size, and so
# magnifies its rounding. A wrong epsilon, decay or clipping changes the whole update by more than this.
UPDATE = 1e-7

# Updates are differences of parameters, whose own rounding they have: a half on each side and in each of two states.
UPDATE_ROUNDINGS = 4

# An explanation of a difference must leave less than this part of it.
EXPLAINED = 1e-4

# Whether Flax gets the same update from twice the gradient. Adam's epsilon alone would change it by 1e-9 and more.
SAME_UPDATE = 1e-12

# With parameters that differ by e, gradients may differ by a multiple of e and the model still be right. Beyond this
# multiple it is the model's own fault.
AMPLIFICATION = 1e3


@dataclass(frozen=True, kw_only=True)
class Side:
    """One step of one framework, in PyTorch's names and layout."""

    loss: float
    before: Arrays
    """Parameters and buffers before the step."""
    gradients: Arrays
    """By parameter, before clipping."""
    after: Arrays

    def updates(self) -> dict[str, np.ndarray]:
        """What the step added to every parameter."""
        return {name: self.after[name] - self.before[name] for name in self.gradients}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """PyTorch's settings of one step, and Flax's rule to try explanations with."""

    clipping: float
    """What PyTorch multiplied the gradients by; 1 where it did not clip."""
    decay: Mapping[str, float]
    """Weight decay by parameter; 0 for one that got no gradient, which PyTorch leaves as it is."""
    rates: Mapping[str, float]
    """The learning rate by parameter."""
    flax_updates: Callable[[Arrays], Arrays]
    """What Flax would have added to every parameter in this step for other gradients."""


def gradient_error(value: np.ndarray, truth: np.ndarray, whole: float) -> float:
    """The relative error of a parameter's gradient, or of its part in the `whole` gradient's norm if that is small."""
    part = float(np.linalg.norm(truth)) / whole if whole else 1.0
    return relative_error(value, truth) * min(1.0, part / SMALL_GRADIENT)


def norm(arrays: Iterable[np.ndarray]) -> float:
    """The Euclidean norm over all arrays."""
    return float(np.sqrt(sum(np.linalg.norm(array) ** 2 for array in arrays)))


def diagnose(number: int, theirs: Side, ours: Side, rule: Rule) -> str | None:
    """What made step `number` (from 1) leave the contract, in one line; None if it is within the contract."""
    drift = max(relative_error(ours.before[name], theirs.before[name]) for name in theirs.before)
    limit = max(STEPS_FLOAT64, AMPLIFICATION * drift)
    whole = norm(theirs.gradients.values())
    loss = relative_error(np.asarray(ours.loss), np.asarray(theirs.loss))
    gradients = [
        name for name, truth in theirs.gradients.items() if gradient_error(ours.gradients[name], truth, whole) > limit
    ]
    after = [n for n, truth in theirs.after.items() if relative_error(ours.after[n], truth) > STEPS_FLOAT64]
    buffers = [name for name in after if name not in theirs.gradients]
    start = f"at step {number}"
    if loss > limit or gradients:
        return (
            f"the model or the loss: {start}, with equal parameters, {_forward(loss, limit, gradients, theirs, ours)}"
        )
    if buffers:
        return f"the running statistics: {start}, with equal parameters and gradients, {_list(buffers)} differ"
    wanted, found = theirs.updates(), ours.updates()
    if not after and _left(found, wanted) > UPDATE * norm(wanted.values()) + _rounding(theirs):
        after = [n for n in wanted if _left({n: found[n]}, {n: wanted[n]}) > _rounding(theirs, n)]
    if after:
        return f"{_update(number, after, theirs, ours, rule)} ({start}, with equal parameters and gradients)"
    return None


def _rounding(theirs: Side, *names: str) -> float:
    """The norm of an update's rounding, of all parameters or those named."""
    arrays = [theirs.after[name] for name in names or theirs.gradients]
    return UPDATE_ROUNDINGS * float(np.finfo(np.float64).eps) * norm(arrays)


def _left(values: Arrays, truths: Arrays) -> float:
    """The norm of the difference."""
    return norm(values[name] - truth for name, truth in truths.items())


def _forward(loss: float, limit: float, names: Sequence[str], theirs: Side, ours: Side) -> str:
    losses = f"the loss is {ours.loss:.9g}, PyTorch's {theirs.loss:.9g}" if loss > limit else "the loss agrees"
    if not names:
        return f"{losses}, and all gradients agree"
    factor = _factor(ours.gradients, theirs.gradients, EXPLAINED * _left(ours.gradients, theirs.gradients))
    if factor is not None:
        return f"{losses}, and every gradient is {factor:.9g} times PyTorch's"
    return f"{losses}, and gradients differ: those of {_group(names, theirs.gradients)}"


def _update(number: int, names: Sequence[str], theirs: Side, ours: Side, rule: Rule) -> str:
    wanted, found = theirs.updates(), ours.updates()
    allowed = EXPLAINED * _left(found, wanted) + _rounding(theirs)
    scaled, doubled = ({n: c * gradient for n, gradient in ours.gradients.items()} for c in (rule.clipping, 2.0))
    if rule.clipping < 1:
        own = rule.flax_updates(ours.gradients)
        by_norm = _left(rule.flax_updates(doubled), own) <= SAME_UPDATE * norm(own.values())
        # The 1e-6 changes this step's gradient by this part, and those of earlier steps, in the averages, by another.
        part = 1e-6 / norm(theirs.gradients.values())
        if by_norm and _left(found, wanted) <= 10 * part * norm(wanted.values()) + _rounding(theirs):
            return (
                "clipping: Flax divides by the norm, PyTorch by the norm + 1e-6: "
                "use flax_tf.training.optimizer.clip_by_global_norm"
            )
        if _left(rule.flax_updates(scaled), wanted) <= allowed:
            return f"clipping: PyTorch multiplied all gradients by {rule.clipping:.6g}, Flax did not"
    factor = _factor(found, wanted, allowed)
    if factor is not None:
        averages = ", or its averages start otherwise (momentum, bias correction)" if number == 1 else ""
        return f"the learning rate or its schedule: every update is {factor:.9g} times PyTorch's{averages}"
    decayed = _group(names, {name: theirs.before[name] for name in theirs.gradients})
    change, weights = {n: wanted[n] - found[n] for n in names}, {n: theirs.before[n] for n in names}
    decay = _factor(change, weights, allowed)
    rate = float(np.mean([rule.rates[name] for name in names]))
    if decay is not None and rate > 0:
        apart = ", ".join(sorted({f"{rule.decay[name]:g}" for name in names}))
        own = " and ".join(sorted({f"{round(decay / rate + rule.decay[name], 9) + 0.0:g}" for name in names}))
        return f"weight decay of {decayed}: Flax decays by {own}, PyTorch by {apart}"
    for sign, said in (
        (1, "Flax adds it to the gradient, PyTorch does not"),
        (-1, "PyTorch adds it to the gradient, Flax does not"),
    ):
        change = {n: sign * rule.decay[n] * theirs.before[n] for n in wanted}
        other = rule.flax_updates({n: ours.gradients[n] - change[n] for n in wanted})
        moved = {n: other[n] - rule.rates[n] * change[n] for n in wanted}
        if any(rule.decay.values()) and _left(moved, wanted) <= allowed:
            return f"weight decay of {decayed}: {said}"
    hint = ", most where gradients are small: its epsilon" if _small_differ(names, theirs, ours) else ""
    group = _group(names, theirs.gradients)
    return f"the update rule of {group}: neither one factor nor a decay makes the updates PyTorch's{hint}"


def _factor(values: Arrays, truths: Arrays, allowed: float) -> float | None:
    """The number c for which all values are c times the truths, but for a difference of that norm; None if none is."""
    scale = norm(truths.values()) ** 2
    if not 0 < scale < float("inf"):
        return None
    factor = sum(float(np.vdot(truth, values[name])) for name, truth in truths.items()) / scale
    return factor if _left(values, {n: factor * truth for n, truth in truths.items()}) <= allowed else None


def _small_differ(names: Sequence[str], theirs: Side, ours: Side) -> bool:
    """Whether updates differ (in the median) a hundred times less at the largest gradients than at the smallest."""
    wanted, found = theirs.updates(), ours.updates()
    gradient, truth, value = (
        np.concatenate([arrays[name].ravel() for name in names]) for arrays in (theirs.gradients, wanted, found)
    )
    moved = (gradient != 0) & (truth != 0)
    error = np.abs(value - truth)[moved] / np.abs(truth[moved])
    error = error[np.argsort(np.abs(gradient[moved]))]
    quarter = len(error) // 4
    return quarter > 0 and bool(np.median(error[-quarter:]) <= 1e-2 * np.median(error[:quarter]))


def _group(names: Sequence[str], shows: Arrays) -> str:
    """The names, or the words for all of their kind: of the parameters whose array is not zero; no other shows it."""
    able = {name: array for name, array in shows.items() if name in names or array.any()}
    vectors = {name for name, array in able.items() if array.ndim < 2}
    for kind, members in (
        ("all parameters", set(able)),
        ("all parameters with one axis (biases and norms) alone", vectors),
        ("all parameters with two axes or more alone", set(able) - vectors),
    ):
        if set(names) == members:
            return kind
    return f"{len(names)} of {len(shows)} parameters ({_list(names)})"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
