"""Running a PyTorch module in one precision and telling every submodule's inputs, outputs and gradients."""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_tf.errors import InputError
from flax_tf.parity.events import (
    BUFFER,
    GRADIENT,
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Call,
    Listener,
    call_name,
    key_name,
)
from flax_tf.parity.tree import arrays_of, map_arrays, results_of
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy

if TYPE_CHECKING:
    import torch


def cotangent(shape: Sequence[int]) -> np.ndarray:
    """The fixed random weights that make a scalar of an output: every entry counts, each differently."""
    return np.random.default_rng(0).standard_normal(shape)


def run_torch(
    module: "torch.nn.Module",
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: str,
    listener: Listener,
    *,
    dropout: "Callable[[torch.nn.Module], AbstractContextManager] | None" = None,
    nudge: int | None = None,
) -> dict[str, np.ndarray]:
    """Runs a copy of a PyTorch module forwards and backwards. Returns the cotangent of each output, by its label.

    Floating-point arrays of the arguments (NumPy's, in any containers) and weights are cast to `dtype`. The gradients
    are those of the scalar Σ output · cotangent. The module is in evaluation mode, or, if `dropout` is given, in
    training mode within `dropout(module)`, which says what is dropped. `nudge` is a seed: every parameter is moved by
    one rounding, up or down.
    """
    import torch

    precision = getattr(torch, dtype)
    try:
        module = copy.deepcopy(module)
    except Exception as error:
        raise InputError(
            f"the PyTorch module can't be copied ({error}): compare one that has not run, without locks and the like"
        ) from error
    for submodule in module.modules():
        if isinstance(submodule, torch.nn.RMSNorm) and submodule.eps is None:
            # That of the precision it computes in: of the model's own, which must not change with this run's.
            weight = submodule.weight if submodule.weight is not None else torch.empty(0)
            submodule.eps = torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps
    module.to("cpu", precision).train(dropout is not None)
    if nudge is not None:
        _nudge(module, nudge)
    calls: Counter[str] = Counter()
    running: dict[str, list[Call]] = {}

    def tapped(tree: Any, values: str, gradients: str, call: Call) -> Any:
        """Tells the arrays of the tree, and puts in place of each an alias whose gradient will be told."""
        indices, aliases = count(), {}

        def tap(label: str, tensor: torch.Tensor) -> torch.Tensor:
            if values == INPUT:  # by its place among the arrays: one framework's argument is the other's keyword
                label = str(next(indices))
            listener(call_name(values, call, label), torch_to_numpy(tensor))
            if not tensor.requires_grad:
                return tensor
            # One alias for a tensor that comes twice: attention asks whether its query *is* its key.
            if id(tensor) not in aliases:
                alias = tensor.view_as(tensor)
                name = call_name(gradients, call, label)
                alias.register_hook(lambda gradient: listener(name, torch_to_numpy(gradient)))
                aliases[id(tensor)] = alias
            return aliases[id(tensor)]

        return map_arrays(tap, tree)

    def before(path: str):
        def hook(_module, args, kwargs):
            call = Call(path, calls[path])
            calls[path] += 1
            running.setdefault(path, []).append(call)
            return tapped((args, kwargs), INPUT, INPUT_GRADIENT, call)

        return hook

    def after(path: str):
        def hook(_module, _args, output):
            call = running[path].pop()
            for label, number in results_of(output).items():
                if isinstance(number, np.ndarray):  # one of Python's own
                    listener(call_name(OUTPUT, call, label), number)
            return tapped(output, OUTPUT, OUTPUT_GRADIENT, call)

        return hook

    for path, submodule in module.named_modules():
        submodule.register_forward_pre_hook(before(path), with_kwargs=True)
        submodule.register_forward_hook(after(path))
    # Whatever the process has switched off.
    with torch.inference_mode(False), torch.enable_grad(), _gradients_told(module, listener):
        arguments = map_arrays(lambda _, array: _leaf(array, precision), (args, dict(kwargs)))
        with nullcontext() if dropout is None else dropout(module):
            outputs = arrays_of(module(*arguments[0], **arguments[1]))
            if dropout is not None:
                for name, buffer in module.named_buffers():
                    listener(key_name(BUFFER, name), torch_to_numpy(buffer))
            told = {label: output for label, output in outputs.items() if output.requires_grad}
            # One of several that PyTorch has detached has a weight all the same: in Flax nothing may depend on it.
            weights = {label: cotangent(x.shape) for label, x in outputs.items() if told and x.is_floating_point()}
            torch.autograd.backward(
                list(told.values()), [numpy_to_torch(weights[label]).to(output) for label, output in told.items()]
            )
    return weights


def _leaf(array: np.ndarray, precision: "torch.dtype") -> "torch.Tensor":
    tensor = numpy_to_torch(array)
    # A clone, because a module may change its input in place, which autograd forbids on a leaf.
    return tensor.to(precision).requires_grad_().clone() if tensor.is_floating_point() else tensor


@contextmanager
def _gradients_told(module: "torch.nn.Module", listener: Listener) -> Generator[None]:
    """Tells each parameter's gradient when it is whole, and lets go of it: they are never all held."""
    import torch

    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    unused = dict(names)

    def tell(parameter: torch.Tensor, gradient: Any) -> None:
        for name in names[id(parameter)]:
            listener(key_name(GRADIENT, name), torch_to_numpy(gradient))

    def hook(parameter: torch.Tensor) -> None:
        tell(parameter, parameter.grad)
        unused.pop(id(parameter), None)
        parameter.grad = None

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    yield
    for parameter in parameters:
        if id(parameter) in unused:
            tell(parameter, torch.zeros_like(parameter))


def _nudge(module: "torch.nn.Module", seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter *= 1 + signs * torch.finfo(parameter.dtype).eps
