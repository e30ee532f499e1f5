"""Where a difference starts: forwards in the outputs, or on the way back in the gradients."""

from collections.abc import Callable, Mapping, Set

from flax_tf.parity import tolerances
from flax_tf.parity.events import (
    BUFFER,
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


def first_wrong_output(calls: list[Call], fails: Fails, names: Mapping[Call, list[str]], masks: Set[str]) -> str | None:
    """The path of the first call, in the order in which they ended, that goes wrong on inputs that were right.

    A submodule that only passes on what it was given wrongly is right by itself, so the first failed output is not
    enough: a wrong scale of attention's scores would be laid on the dropout that follows it.

    Args:
        calls: in the order of the reference.
        fails: whether the array of a name is outside the contract.
        names: those of the arrays of every call that both sides have.
        masks: those of inputs that are masks. Frameworks write them in different ways: if a call with another mask than
            PyTorch's is right, no mask is held against any.
    """
    wrong = {call: {name for name in names[call] if fails(name)} for call in calls}
    kinds = {call: {kind_of(name) for name in wrong[call] - masks} for call in calls}
    if not any(wrong[call] & masks and not kinds[call] & {INPUT, OUTPUT} for call in calls):
        kinds = {call: {kind_of(name) for name in wrong[call]} for call in calls}
    return next((call.path for call in calls if OUTPUT in kinds[call] and INPUT not in kinds[call]), None)


def around_first_wrong_output(calls: list[Call], fails: Fails, names: Mapping[Call, list[str]]) -> str | None:
    """The path of the first call whose output fails, or of the module around it if it was given wrong inputs.

    For precisions below float64, where errors grow little by little.
    """
    for call in calls:
        wrong = {kind_of(name) for name in names[call] if fails(name)}
        if OUTPUT in wrong:
            return call.path.rpartition(".")[0] if INPUT in wrong else call.path
    return None


def last_wrong_gradient(
    calls: list[Call], fails: Fails, names: Mapping[Call, list[str]], keys: list[str]
) -> str | None:
    """The path of the call where right gradients turn wrong on the way back, as deep in the tree as can be told.

    Args:
        keys: the names of the gradients of parameters.
    """
    own: dict[str, list[str]] = {}
    for name in keys:
        own.setdefault(key_of(name).rpartition(".")[0], []).append(name)
    wrong = {call: {kind_of(name) for name in names[call] if fails(name)} for call in calls}
    given = {call.path for call in calls if OUTPUT_GRADIENT in wrong[call]}  # wrong gradients, in some call
    turning: list[str] = []
    for call in reversed(calls):
        # A parameter's gradient is the sum over the calls, and the fault of one that was given none that is wrong.
        parameters = call.path not in given and any(fails(name) for name in own.get(call.path, []))
        if OUTPUT_GRADIENT not in wrong[call] and (INPUT_GRADIENT in wrong[call] or parameters):
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
        if kind_of(name) not in (GRADIENT, BUFFER):
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
