"""Comparing a PyTorch module with a Flax module, submodule by submodule, by the contract in `tolerances`."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.parity import tolerances
from flax_tf.parity.dropout import Masks, recording_dropout, replaying_dropout_torch
from flax_tf.parity.flax_side import run_flax
from flax_tf.parity.measure import Measure, channels_last_array
from flax_tf.parity.report import Report
from flax_tf.parity.torch_side import run_torch
from flax_tf.parity.tree import all_to_numpy, map_arrays
from flax_tf.parity.truth import Spool, Truth, check_suffix, read_truth, write_truth
from flax_tf.parity.verdict import judge, tensor_rows
from flax_tf.porting.convert import Renames
from flax_tf.porting.files import torch_to_numpy
from flax_tf.porting.tree import Tree

if TYPE_CHECKING:
    import torch

LOW_PRECISIONS = ("float32", "bfloat16")
# A comparison changes what the whole process has: precisions, and functions that it watches.
_ONE_AT_A_TIME = threading.RLock()


def compare(
    torch_module: "torch.nn.Module",
    flax_module: nnx.Module,
    *inputs: Any,
    rename: Renames = None,
    train: bool = False,
    channels_last: bool = False,
    precisions: str | Sequence[str] = ("float32",),
    seed: int = 0,
    **kwargs: Any,
) -> Report:
    """Runs both modules on the same inputs, forwards and backwards, and compares all they compute.

    Args:
        torch_module: the reference. It is copied and cast; weights of any precision.
        flax_module: its twin; copied and cast likewise. Modules are paired by their paths.
        inputs: the arguments of both: arrays of NumPy, JAX or PyTorch, in any tuples, lists and dicts. Integer ids are
            taken as they are, floating-point numbers in each precision.
        rename: {PyTorch path: Flax path} where these differ, or None for what Flax lacks on purpose; `*` stands for one
            component (see `porting.torch_to_flax`).
        train: in training mode, with dropout: PyTorch draws the masks (from `seed`), and Flax drops by the same.
        channels_last: Flax takes and returns arrays of three axes and more with the channels last, as images are for
            `nnx.Conv`; `inputs` are PyTorch's. Within the model the layouts of layers are told apart in any case.
        precisions: what is compared besides float64: "float32", "bfloat16", or several.
        kwargs: the keyword arguments of both.

    Compared are the output of every submodule's every call, the gradient of every parameter and input for a random
    cotangent of the outputs, and the weights. In float64 Flax must agree with PyTorch; below, it must be as near to
    PyTorch's float64 result as PyTorch itself. One submodule's arrays are in memory at a time: PyTorch's float64
    results go to a temporary file. Matrix products run at full precision, whatever the process has set; that is put
    back.
    Raises InputError if an argument can't be used.
    """
    precisions = _named(precisions)
    with full_precision(), tempfile.TemporaryFile() as file:
        truth, low_run = _run_reference(torch_module, inputs, kwargs, train, precisions, seed, Spool(file))
        return _compare(truth, flax_module, rename, channels_last, low_run)


def record(
    torch_module: "torch.nn.Module",
    inputs: Any,
    path: str | os.PathLike,
    *,
    train: bool = False,
    precisions: str | Sequence[str] = ("float32",),
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Writes what `compare_recorded` needs where PyTorch is not installed, to one `.safetensors` file.

    `inputs` is an array, or a tuple of the arguments; the rest is as of `compare`. The file holds the weights, the
    inputs, what goes into and comes out of every submodule in float64, forwards and backwards, and PyTorch's own errors
    in the lower precisions.
    Raises InputError for an argument that is neither array, number, string nor a container of these, and if the file
    can't be written, and OSError if the disk has no room for the temporary file; what was at `path` is replaced when
    the new file is complete.
    """
    precisions = _named(precisions)
    check_suffix(path)
    with full_precision(), tempfile.TemporaryFile() as file:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        truth, low_run = _run_reference(torch_module, args, kwargs, train, precisions, seed, Spool(file))
        for precision in precisions:
            for nudge in range(tolerances.NUDGES):
                low_run(precision, nudge)
        write_truth(truth, path)


def compare_recorded(
    path: str | os.PathLike, flax_module: nnx.Module, *, rename: Renames = None, channels_last: bool = False
) -> Report:
    """`compare` against what `record` wrote, without PyTorch. The weights of `flax_module` are compared as they are.

    To fill it from the file: `torch_to_flax(parity.recorded_weights(path), flax_module)`.
    Raises InputError if the file is of another kind or not whole.
    """
    truth = read_truth(path)
    with full_precision():
        return _compare(truth, flax_module, rename, channels_last, None)


def recorded_weights(path: str | os.PathLike) -> Mapping[str, np.ndarray]:
    """The state dict in a recorded file, mapped into memory. Raises InputError as `compare_recorded`."""
    return read_truth(path).weights


@contextlib.contextmanager
def full_precision() -> Generator[None]:
    """float64 on and no reduced-precision matrix products (TF32, bf16 passes) in either framework, for the block."""
    with _ONE_AT_A_TIME, contextlib.ExitStack() as restored:
        if torch := sys.modules.get("torch"):  # or nothing of it will run
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            restored.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
        # For the process too: what leaves a compiled program passes through another thread.
        restored.callback(jax.config.update, "jax_enable_x64", jax.config.read("jax_enable_x64"))
        jax.config.update("jax_enable_x64", True)
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            yield


# (precision, number of the nudge) -> None: another run of PyTorch, whose errors join the truth's.
_LowRun = Callable[[str, int], None]


def _run_reference(
    module: "torch.nn.Module",
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
    precisions: Sequence[str],
    seed: int,
    spool: Spool,
) -> tuple[Truth, _LowRun]:
    """PyTorch's float64 results and its errors below, and what measures more of these."""
    import torch

    module = _unwrapped(module)
    wide = [name for name, tensor in module.state_dict().items() if tensor.is_complex()]
    if wide:
        raise InputError(f"{wide[0]} is complex: comparisons are of real numbers")
    args, kwargs = all_to_numpy((inputs, dict(kwargs)))
    masks: Masks = {}

    @contextlib.contextmanager
    def recording(module: torch.nn.Module) -> Generator[None]:
        with recording_dropout(module, seed) as drawn:
            yield
        masks.update(drawn)

    def replaying(module: torch.nn.Module) -> contextlib.AbstractContextManager:
        return replaying_dropout_torch(module, masks)

    cotangents = run_torch(module, args, kwargs, "float64", spool.put, dropout=recording if train else None)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    truth = Truth(
        arrays=spool,
        weights={name: torch_to_numpy(tensor) for name, tensor in module.state_dict().items()},
        arguments={"args": args, "kwargs": kwargs},
        cotangents=cotangents,
        layers={path: type(submodule).__name__ for path, submodule in module.named_modules()},
        trained=[name for name, parameter in parameters.items() if parameter.requires_grad],
        frozen=[name for name, parameter in parameters.items() if not parameter.requires_grad],
        masks=masks if train else None,
        settings={"torch": torch.__version__, "its matrix products": torch.get_float32_matmul_precision()},
    )

    def low_run(precision: str, nudge: int | None = None) -> None:
        measure = Measure(truth, precision)
        run_torch(module, args, kwargs, precision, measure, dropout=replaying if train else None, nudge=nudge)
        measure.close()
        if nudge is None:
            truth.errors[precision], truth.nudged[precision] = measure.errors, dict(measure.errors)
        else:
            nudged = truth.nudged[precision]
            nudged.update({name: max(error, measure.errors[name]) for name, error in nudged.items()})

    for precision in precisions:
        low_run(precision)
    return truth, low_run


def _unwrapped(module: Any) -> Any:
    """The module itself, within what `torch.compile` and data parallelism put around it."""
    import torch

    while True:
        if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def _compare(
    truth: Truth, flax_module: nnx.Module, rename: Renames, channels_last: bool, low_run: _LowRun | None
) -> Report:
    args, kwargs = truth.arguments["args"], truth.arguments["kwargs"]
    if channels_last:
        args, kwargs = map_arrays(lambda _, array: channels_last_array(array), (args, kwargs))
    differences: list[str] = []

    def run(precision: str, nudge: int | None = None) -> Measure:
        measure = Measure(truth, precision, channels_last=channels_last)
        differences[:] = run_flax(
            flax_module, args, kwargs, precision, measure, truth.cotangents,
            masks=truth.masks, rename=rename, nudge=nudge,
        )  # fmt: skip
        measure.close()
        return measure

    measures = {precision: run(precision) for precision in ("float64", *truth.errors)}
    tree = Tree(flax_module, rename)
    judged = partial(judge, truth, tree, tensor_rows(truth, tree), measures, differences)
    report = judged(truth.errors)
    # What fails in low precision alone is judged by PyTorch's worst run; a recorded truth has that already.
    for nudge in range(tolerances.NUDGES if low_run else 1):
        if not report.in_low_alone:
            break
        if low_run:
            for precision in report.precisions:
                low_run(precision, nudge)
        report = judged(truth.nudged)
    for nudge in range(tolerances.OWN_NUDGES):
        if not report.in_low_alone:
            break
        for precision in report.precisions:
            measures[precision].keep_least(run(precision, nudge))
        report = judged(truth.nudged)
    return report


def _named(precisions: str | Sequence[str]) -> Sequence[str]:
    precisions = [precisions] if isinstance(precisions, str) else precisions
    wrong = [precision for precision in precisions if precision not in LOW_PRECISIONS]
    if wrong:
        raise InputError(f"precision {wrong[0]!r}: besides float64, choose from {', '.join(LOW_PRECISIONS)}")
    return precisions
