"""Where a difference starts: forwards in the outputs, or on the way back in the gradients."""

from collections.abc import Callable, Mapping

from flax_tf.parity import tolerances
from flax_tf.parity.events import (
    GRADIENT,
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Call,
    call_of,
    key_of,
    kind_of,
)

Errors = Mapping[str, float]
Fails = Callable[[str], bool]


def first_wrong_output(calls: list[Call], fails: Fails, names: Mapping[Call, list[str]]) -> str | None:
    """The path of the first call, in the order in which they ended, that goes wrong on inputs that were right.

    A submodule that only passes on what it was given wrongly is right by itself, so the first failed output is not
    enough: a wrong scale of attention's scores would be laid on the dropout that follows it.

    Args:
        calls: in the order of the reference.
        fails: whether the array of a name is outside the contract.
        names: those of the arrays of every call that both sides have.
    """
    for call in calls:
        wrong = {kind_of(name) for name in names[call] if fails(name)}
        if OUTPUT in wrong and INPUT not in wrong:
            return call.path
    return None


def last_wrong_gradient(
    calls: list[Call], fails: Fails, names: Mapping[Call, list[str]], keys: list[str]
) -> str | None:
    """The path of the call where right gradients turn wrong on the way back, as deep in the tree as can be told.

    Args:
        keys: the names of the gradients of parameters.
    """
    own = {}
    for name in keys:
        own.setdefault(key_of(name).rpartition(".")[0], []).append(name)
    turning: list[str] = []
    for call in reversed(calls):
        wrong = {kind_of(name) for name in names[call] if fails(name)}
        below = INPUT_GRADIENT in wrong or any(fails(name) for name in own.get(call.path, []))
        if below and OUTPUT_GRADIENT not in wrong:
            turning.append(call.path)
    for path in turning:
        if not any(_inside(other, path) for other in turning):
            return path
    return None


def _inside(path: str, parent: str) -> bool:
    return path != parent and (parent == "" or path.startswith(f"{parent}."))


def by_call(names: Errors) -> dict[Call, list[str]]:
    """The names of inputs, outputs and their gradients, by call."""
    groups: dict[Call, list[str]] = {}
    for name in names:
        if kind_of(name) != GRADIENT:
            groups.setdefault(call_of(name)[0], []).append(name)
    return groups


def outside_float64(errors: Errors) -> Fails:
    """Whether an array is outside the contract of float64."""

    def fails(name: str) -> bool:
        limit = tolerances.OUTPUT_FLOAT64 if kind_of(name) in (INPUT, OUTPUT) else tolerances.GRADIENT_FLOAT64
        return errors[name] > limit

    return fails


def outside_low(errors: Errors, torch_errors: Errors, precision: str) -> Fails:
    """Whether an array is outside the contract of a precision below float64; one without an error is not."""

    def fails(name: str) -> bool:
        if name not in errors:
            return False
        floor = tolerances.OUTPUT_FLOOR if kind_of(name) in (INPUT, OUTPUT) else tolerances.GRADIENT_FLOOR
        return not errors[name] <= tolerances.low_limit(torch_errors.get(name, 0.0), precision, floor) < float("inf")

    return fails
