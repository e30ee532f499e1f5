"""From the errors of all runs to a report: a row for each submodule, gradient and tensor, and what has no partner."""

from collections.abc import Mapping

import flax
import jax
import numpy as np
from flax import nnx

from flax_tf.parity.events import (
    BUFFER,
    GRADIENT,
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Call,
    call_name,
    call_of,
    key_name,
    key_of,
    kind_of,
)
from flax_tf.parity.locate import (
    around_first_wrong_output,
    by_call,
    first_wrong_output,
    last_wrong_gradient,
    outside_float64,
    outside_low,
)
from flax_tf.parity.measure import Measure, is_mask
from flax_tf.parity.report import ROOT, Low, Report, Row
from flax_tf.parity.tolerances import relative_error
from flax_tf.parity.truth import Truth
from flax_tf.porting.tree import Tree

TorchErrors = Mapping[str, Mapping[str, float]]


def judge(
    truth: Truth,
    tree: Tree,
    tensors: list[Row],
    measures: Mapping[str, Measure],
    differences: list[str],
    torch_errors: TorchErrors,
) -> Report:
    """The report on a Flax module.

    Args:
        tree: of the Flax module.
        tensors: the rows of its weights, from `tensor_rows`.
        measures: of its runs, by precision.
        differences: how its dropout differs.
        torch_errors: PyTorch's, by precision below float64 and then by name.
    """
    layers = {path: (own, type(module).__name__) for path, own, module in tree.modules}
    errors = {precision: measure.errors for precision, measure in measures.items()}

    def row(kind, name: str, flax: str, layer: str, names: list[str]) -> Row:
        """The worst over the names: which of many calls has bad luck with its roundings differs between frameworks."""
        missing = float("inf")  # a call that a precision does not make
        low = {
            precision: Low(
                max(errors[precision].get(n, missing) for n in names), max(theirs.get(n, missing) for n in names)
            )
            for precision, theirs in torch_errors.items()
        }
        return Row(kind, name, flax, layer, max(errors["float64"][n] for n in names), low)

    outputs: dict[str, list[str]] = {}
    for name in truth.arrays:
        if kind_of(name) == OUTPUT and name in errors["float64"]:
            outputs.setdefault(call_of(name)[0].path, []).append(name)
    rows = [
        row("output", path or ROOT, layers[path][0] or ROOT, layers[path][1], names) for path, names in outputs.items()
    ]
    for key in truth.trained:
        if (name := key_name(GRADIENT, key)) in errors["float64"]:
            rows.append(row("gradient", key, tree.slots[key].paths[0], "", [name]))
    for name in truth.arrays:
        if kind_of(name) == INPUT_GRADIENT and call_of(name)[0] == Call("", 0) and name in errors["float64"]:
            title = f"input {int(call_of(name)[1]) + 1}"
            rows.append(row("gradient", title, title, "", [name]))
    for name in truth.arrays:
        if kind_of(name) == BUFFER and name in errors["float64"]:
            key = key_of(name)
            rows.append(row("buffer", key, tree.slots[key].paths[0], "", [name]))
    rows += tensors
    unpaired = [*_unpaired_keys(truth, tree), *_unpaired_results(truth, measures["float64"]), *differences]
    rows, within = _visible(rows, unpaired)
    culprit = _culprit(truth, errors, torch_errors, rows)
    return Report(
        rows=tuple(rows),
        unpaired=tuple(unpaired),
        notes=tuple(_notes(truth, measures["float64"], layers) + within),
        culprit=culprit,
        settings={
            "jax": jax.__version__,
            "flax": flax.__version__,
            "on": jax.default_backend(),
            "matrix products": "highest",
            **truth.settings,
        },
    )


def _visible(rows: list[Row], unpaired: list[str]) -> tuple[list[Row], list[str]]:
    """The rows, without outputs within the model that differ where all that comes of them agrees; and notes on these.

    Such are time-major layers, heads on another axis, and calls in another order: the same function in another form.
    """
    inner = [row for row in rows if row.kind == "output" and row.name != ROOT and row.float64 > row.limit64]
    failed = [row for row in rows if not row.ok]
    if unpaired or any(row not in inner for row in failed):
        return rows, []
    notes = [
        f"output of {row.name} ({row.layer}) has another form or order; all that comes of it agrees" for row in inner
    ]
    return [row for row in rows if row not in inner], notes


def tensor_rows(truth: Truth, tree: Tree) -> list[Row]:
    """The weights themselves: few ids of a large vocabulary are looked up in a run, and a NaN may hide in another."""
    return [
        Row("tensor", key, tree.slots[key].paths[0], "", relative_error(tree.slots[key].to_torch(), np.asarray(array)))
        for key, array in truth.weights.items()
        if key in tree.slots
    ]


def _culprit(
    truth: Truth, errors: Mapping[str, Mapping[str, float]], torch_errors: TorchErrors, rows: list[Row]
) -> str | None:
    """The path of the submodule where the first difference starts; None if there is none, or it can't be told."""
    failed = [row for row in rows if not row.ok]
    if not failed:
        return None
    names = by_call(errors["float64"])
    calls = [call for call in truth.calls if call in names]
    gradients = [name for name in errors["float64"] if kind_of(name) == GRADIENT]

    masks = {name for name, truth in truth.arrays.items() if kind_of(name) == INPUT and is_mask(truth)}
    outside = outside_float64(errors["float64"])
    low = [
        outside_low(errors[precision], theirs, precision)
        for precision, theirs in torch_errors.items()
        if any(not row.ok_in(precision) for row in failed if precision in row.low)
    ]

    def first_output() -> str | None:
        found = first_wrong_output(calls, outside, names, masks)
        below = (around_first_wrong_output(calls, fails, names) for fails in low)
        return found if found is not None else next((path for path in below if path is not None), None)

    def last_gradient() -> str | None:
        found = (last_wrong_gradient(calls, fails, names, gradients) for fails in (outside, *low))
        return next((path for path in found if path is not None), None)

    kinds = {row.kind for row in failed}
    found = first_output() if "output" in kinds else None
    if found is None and "tensor" in kinds:
        found = next(row.name for row in failed if row.kind == "tensor").rpartition(".")[0]
    if found is None and "output" not in kinds:
        found = last_gradient()
    if found is None:
        row = failed[0]
        found = row.name if row.kind == "output" else row.name.rpartition(".")[0]
    return found or ROOT


def _unpaired_keys(truth: Truth, tree: Tree) -> list[str]:
    lines = []
    for key in truth.weights:
        if key not in tree.slots and key not in tree.ignored and not tree.rename.leaves_out(key):
            lines.append(f"{'parameter' if key in truth.trained else 'buffer'} {key} is in PyTorch alone")
    trained = set(truth.trained)
    for key, slot in tree.slots.items():
        is_parameter = any(isinstance(variable, nnx.Param) for variable in slot.variables)
        if key not in truth.weights:
            place = "" if slot.paths[0] == key else f" ({slot.paths[0]})"
            lines.append(f"{'parameter' if is_parameter else 'buffer'} {key}{place} is in Flax alone")
        elif key in trained and not is_parameter:
            lines.append(f"parameter {key} is trained in PyTorch alone")
        elif is_parameter and key not in trained and key not in truth.frozen:
            lines.append(f"buffer {key} is trained in Flax alone")
    return lines


def _unpaired_results(truth: Truth, measure: Measure) -> list[str]:
    """Outputs of the whole model that one side alone returns."""
    theirs = {call_of(name)[1] for name in truth.arrays if kind_of(name) == OUTPUT and call_of(name)[0].path == ""}
    ours = {call_of(name)[1] for name in measure.unknown if kind_of(name) == OUTPUT and call_of(name)[0].path == ""}
    both = {label for label in theirs if call_name(OUTPUT, Call("", 0), label) in measure.errors}
    if not theirs:
        return ["no result is an array, and nothing could be compared"]
    return [f"result {label} is in PyTorch alone" for label in sorted(theirs - both)] + [
        f"result {label} is in Flax alone" for label in sorted(ours)
    ]


def _notes(truth: Truth, measure: Measure, layers: Mapping[str, tuple[str, str]]) -> list[str]:
    """Outputs that could not be compared, and those that were not computed in float64."""
    lines = []
    for name in truth.arrays:
        if kind_of(name) == OUTPUT and name not in measure.errors and (call := call_of(name)[0]).path:
            lines.append(f"{_output(name)} ({truth.layers.get(call.path, '')}) is in PyTorch alone")
    for name in measure.unknown:
        if kind_of(name) == OUTPUT and call_of(name)[0].path:
            lines.append(f"{_output(name)} ({layers[call_of(name)[0].path][1]}) is in Flax alone")
    for name, dtype in measure.dtypes.items():  # where it starts; all that follows is so too
        if dtype.kind not in "biuc" and dtype != np.float64:
            lines.append(f"{_output(name)} is {dtype} in the float64 run: the code of the Flax module fixes its dtype")
            break
    if truth.frozen:
        lines.append(f"frozen in PyTorch, so that gradients are not compared: {', '.join(truth.frozen)}")
    if not any(kind_of(name) == OUTPUT_GRADIENT for name in truth.arrays):
        lines.append("no output has a gradient in PyTorch: only what the models return was compared")
    return list(dict.fromkeys(lines))


def _output(name: str) -> str:
    call, label = call_of(name)
    number = f", call {call.number + 1}" if call.number else ""
    return (
        f"output {label} of {call.path or ROOT}{number}" if label != "0" else f"output of {call.path or ROOT}{number}"
    )
