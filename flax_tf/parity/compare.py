"""Comparing a PyTorch module with a Flax module, submodule by submodule, by the contract in `tolerances`."""

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from flax_tf.parity import tolerances
from flax_tf.parity.capture import Call, Capture, capture_flax, capture_torch, cast_array, cast_module
from flax_tf.parity.report import Report, Row
from flax_tf.parity.tolerances import relative_error
from flax_tf.porting.convert import torch_modules
from flax_tf.porting.files import torch_to_numpy

if TYPE_CHECKING:
    import torch

ROOT = "(model)"


def compare(torch_module: "torch.nn.Module", flax_module: nnx.Module, *inputs: np.ndarray) -> Report:
    """Runs both modules on the same inputs, in float64 and float32, and compares all they compute.

    Args:
        torch_module: the reference. It is copied, put in evaluation mode and cast; weights of any precision.
        flax_module: its twin, with the same names; copied and cast likewise.
        inputs: arrays as both modules take them: integer ids, or floating-point numbers of any precision.

    Compared are the output of every submodule's every call, and the gradient of every parameter for a random
    cotangent of the output. Matrix products run at full precision, whatever the process has set; that is put back.
    """
    with full_precision():
        torch64, torch32 = (capture_torch(torch_module, inputs, dtype) for dtype in ("float64", "float32"))
        flax64, flax32 = (capture_flax(flax_module, inputs, dtype) for dtype in ("float64", "float32"))
        layers = {path: type(module).__name__ for path, module in torch_modules(flax_module)}
        outputs = _output_rows(torch64, torch32, flax64, flax32, layers)
        gradients = _gradient_rows(torch64, torch32, flax64, flax32)
        failed = {row.name for row in outputs if not row.ok}
        culprit = _first_wrong(flax_module, torch64, failed) if failed else None
    return Report(tuple(outputs + gradients), tuple(_unpaired(torch64, flax64)), culprit)


@contextlib.contextmanager
def full_precision() -> Generator[None]:
    """float64 on and no reduced-precision matrix products (TF32, bf16 passes) in either framework, for the block."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _output_rows(
    torch64: Capture, torch32: Capture, flax64: Capture, flax32: Capture, layers: dict[str, str]
) -> list[Row]:
    """One row per submodule, in PyTorch's order of execution: the worst of its outputs.

    Where it is called more than once, as in a decoder that goes step by step, each side is taken by its worst call:
    which call has bad luck with its float32 roundings differs between them.
    """
    calls: dict[tuple[str, int], list[Call]] = {}
    for path, number, index in (call for call in torch64.outputs if call in flax64.outputs):
        calls.setdefault((path, index), []).append((path, number, index))
    rows: dict[str, Row] = {}
    for (path, _), same in calls.items():
        errors = (
            max(relative_error(side.outputs[call], torch64.outputs[call]) for call in same)
            for side in (flax64, flax32, torch32)
        )
        row = Row("output", path or ROOT, layers[path], *errors)
        rows[path] = rows[path].merged(row) if path in rows else row
    return list(rows.values())


def _gradient_rows(torch64: Capture, torch32: Capture, flax64: Capture, flax32: Capture) -> list[Row]:
    """One row per parameter that both sides have, in PyTorch's order."""
    whole = float(np.sqrt(sum(np.linalg.norm(gradient) ** 2 for gradient in torch64.gradients.values())))

    def zero(gradient: np.ndarray) -> bool:
        rounding = tolerances.ZERO_ROUNDINGS * float(np.finfo(gradient.dtype).eps) * whole
        return float(np.linalg.norm(gradient)) <= rounding

    def error(gradient: np.ndarray, truth: np.ndarray) -> float:
        if zero(truth) and zero(gradient):
            return 0.0
        part = float(np.linalg.norm(truth)) / whole if gradient.dtype == np.float32 else 1.0
        return relative_error(gradient, truth) * min(1.0, part / tolerances.SMALL_GRADIENT)

    return [
        Row("gradient", name, "", *(error(side.gradients[name], truth) for side in (flax64, flax32, torch32)))
        for name, truth in torch64.gradients.items()
        if name in flax64.gradients
    ]


def _first_wrong(flax_module: nnx.Module, torch64: Capture, failed: set[str]) -> str:
    """The first failed submodule that goes wrong by itself, given PyTorch's own inputs to it.

    A submodule that only passes on what it was given wrongly is right by itself, so the first failed output in
    order is not enough: a wrong scale of the scores would be laid on the dropout that follows it.
    """
    submodules: dict[str, Any] = dict(torch_modules(cast_module(flax_module, "float64")))
    for path, number in torch64.inputs:
        if (path or ROOT) in failed:
            submodules[path].eval()
            arguments = (_to_jax(argument) for argument in torch64.inputs[path, number])
            for index, leaf in enumerate(jax.tree.leaves(submodules[path](*arguments))):
                truth = torch64.outputs[path, number, index]
                if relative_error(np.asarray(leaf), truth) > tolerances.OUTPUT_FLOAT64:
                    return path or ROOT
    return next(path or ROOT for path, _ in torch64.inputs if (path or ROOT) in failed)


def _to_jax(argument: Any) -> Any:
    import torch

    return cast_array(torch_to_numpy(argument), "float64") if isinstance(argument, torch.Tensor) else argument


def _unpaired(torch64: Capture, flax64: Capture) -> list[str]:
    """Calls of submodules, and parameters, that one side alone has."""
    lines = []
    for what, ours, theirs in (
        ("call", {_call_name(*call) for call in flax64.outputs}, {_call_name(*call) for call in torch64.outputs}),
        ("parameter", set(flax64.gradients), set(torch64.gradients)),
    ):
        lines += [f"{what} {name} is in PyTorch alone" for name in sorted(theirs - ours)]
        lines += [f"{what} {name} is in Flax alone" for name in sorted(ours - theirs)]
    return lines


def _call_name(path: str, number: int, index: int) -> str:
    return (path or ROOT) + (f", call {number + 1}" if number else "") + (f", output {index + 1}" if index else "")
