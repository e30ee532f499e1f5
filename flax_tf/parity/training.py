"""Training a PyTorch model and its Flax twin side by side, with every parameter compared after every step."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.parity.casting import cast_array, cast_module, compiler_options, computing_in
from flax_tf.parity.compare import full_precision
from flax_tf.parity.diagnosis import Arrays, Rule, Side, diagnose, gradient_error, norm
from flax_tf.parity.dropout import Masks, recording_dropout, replaying_dropout
from flax_tf.parity.tolerances import STEPS_FLOAT64, ZERO_ROUNDINGS, relative_error
from flax_tf.parity.training_report import TrainingReport, TrainingRow
from flax_tf.porting.convert import Renames
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy
from flax_tf.porting.tree import Tree
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    import torch


def same_optimizer(config: OptimizerConfig, steps: int) -> dict[str, Any]:
    """The arguments of `compare_training` for one setting of both optimizers: `**same_optimizer(config, steps)`.

    "adamw", "adam" and "sgd", with clipping, what decays, and the schedule of a run of `steps` steps.
    """
    from torch_ref import optimizer

    return {
        "torch_optimizer": partial(optimizer.build_optimizer, config),
        "torch_scheduler": lambda built: optimizer.build_scheduler(config, built, steps),
        "clip_norm": config.clip_norm,
        "flax_optimizer": build_optimizer(config, steps),
    }


def compare_training(
    torch_module: "torch.nn.Module",
    flax_module: nnx.Module,
    batches: Sequence[Any],
    *,
    torch_loss: Callable[..., "torch.Tensor"],
    flax_loss: Callable[..., jax.Array],
    torch_optimizer: Callable[["torch.nn.Module"], "torch.optim.Optimizer"],
    flax_optimizer: optax.GradientTransformation,
    torch_scheduler: Callable[..., "torch.optim.lr_scheduler.LRScheduler"] | None = None,
    clip_norm: float | None = None,
    rename: Renames = None,
    seed: int = 0,
) -> TrainingReport:
    """Trains copies of both models in float64 on the same batches, and compares them after every step.

    Args:
        torch_module: the reference.
        flax_module: its twin, with its weights.
        batches: one for each step: trees of arrays, which the losses get as tensors and as JAX arrays.
        torch_loss: (model, batch) -> scalar.
        flax_loss: (model, batch) -> scalar. It needs no `rngs`. It gets the batch with the axes as PyTorch's loss does:
            for a model with its channels last, it moves the axis itself.
        torch_optimizer: makes the optimizer of the copied module, once.
        flax_optimizer: its counterpart, with clipping and schedule.
        torch_scheduler: makes a scheduler of that optimizer; it steps after every step.
        clip_norm: PyTorch's gradients are clipped to this norm by `torch.nn.utils.clip_grad_norm_`.
        rename: {PyTorch path: Flax path} for names that differ.
        seed: of the masks of dropout. Both models are in training mode, and Flax drops what PyTorch dropped.

    A gradient's element that exact arithmetic would make zero, such as in a key's bias, whose shift the softmax takes
    out, is rounding noise of about 1e-17. Adam divides it by its own size and moves the parameter by it, in either
    framework by another. So elements that are noise on both sides are made zero on both sides before the update.

    A parameter that PyTorch has frozen gets no gradient on either side. That Flax would train it is reported.

    Raises InputError for no batch at all, for models without a common parameter, for random numbers that cannot be
    recorded, such as dropout that is computed again backwards, and for a `rename` that does not fit the Flax model.
    """
    if not batches:
        raise InputError("there is no batch to train on: give one for each step")
    with full_precision():
        theirs = _TorchSide(torch_module, torch_loss, torch_optimizer, torch_scheduler, clip_norm)
        ours = _FlaxSide(flax_module, flax_loss, flax_optimizer, rename)
        names = [name for name in theirs.parameters if name in ours.trained]
        if not names:
            raise InputError("the models have no parameter in common: give rename={PyTorch path: Flax path}")
        unpaired = [f"parameter {name} is in PyTorch alone" for name in theirs.parameters if not ours.expects(name)]
        unpaired += [f"parameter {name} is in Flax alone" for name in ours.trained if name not in theirs.parameters]
        before = _common(theirs.state(), ours.state())
        rows = [TrainingRow("parameter" if n in names else "buffer", n, 0.0, 0.0, None) for n in before[0]]
        rows = [_worse(row, 0, before, {}) for row in rows]
        wrong = [row.name for row in rows if not row.ok]
        diagnosis = f"the models start from other weights: {', '.join(wrong)}" if wrong else None
        losses, trained = [], []
        for number, batch in enumerate(batches, start=1):
            their_loss, their_gradients, masks = theirs.gradients(batch, seed + number)
            our_loss, our_gradients = ours.gradients(batch, masks)
            losses.append((their_loss, our_loss))
            # A parameter that is frozen in PyTorch has no gradient to compare.
            frozen = {n: our_gradients[n] for n in names if not theirs.parameters[n].requires_grad}
            our_gradients = {n: our_gradients[n] * (n not in frozen) for n in names}
            gradients = _without_noise({n: their_gradients[n] for n in names}, our_gradients)
            whole = norm(gradients[0].values())
            errors = {n: gradient_error(gradients[1][n], gradients[0][n], whole) for n in names}
            clipping, flax_updates = theirs.update(gradients[0]), ours.update(gradients[1])
            held, let_go = (flax_updates({**gradients[1], **other}) for other in ({}, frozen)) if frozen else ({}, {})
            trained += [n for n in frozen if not np.array_equal(held[n], let_go[n])]
            after = _common(theirs.state(), ours.state())
            rows = [_worse(row, number, after, errors) for row in rows]
            if diagnosis is None:
                sides = zip(losses[-1], before, gradients, after, strict=True)
                pair = (Side(loss=loss, before=b, gradients=g, after=a) for loss, b, g, a in sides)
                rates, decay = theirs.settings()
                rule = Rule(clipping=clipping, rates=rates, decay=decay, flax_updates=flax_updates)
                diagnosis = diagnose(number, *pair, rule)
            theirs.schedule()
            before = after
    unpaired += [f"parameter {name} is frozen in PyTorch and trained in Flax" for name in dict.fromkeys(trained)]
    torch_losses, flax_losses = zip(*losses, strict=True)
    return TrainingReport(
        tuple(rows), torch_losses, flax_losses, tuple(unpaired), tuple(dict.fromkeys(ours.dropout)), diagnosis
    )


class _TorchSide:
    """A copy of the module in float64 and training mode, and what trains it."""

    def __init__(self, module: Any, loss: Callable, optimizer: Callable, scheduler: Any, clip_norm: float | None):
        self.module = copy.deepcopy(module).double().train()
        self.parameters = dict(self.module.named_parameters(remove_duplicate=False))
        self._loss, self._clip_norm = loss, clip_norm
        self._optimizer = optimizer(self.module)
        self._scheduler = scheduler(self._optimizer) if scheduler else None

    def gradients(self, batch: Any, seed: int) -> tuple[float, Arrays, Masks]:
        """The loss, the gradient of every parameter, and the masks of dropout."""
        import torch

        def tensor(array: Any) -> torch.Tensor:
            found = numpy_to_torch(np.asarray(array))
            return found.double() if found.is_floating_point() else found

        self.module.zero_grad()
        with recording_dropout(self.module, seed) as masks:
            loss = self._loss(self.module, jax.tree.map(tensor, batch))
            loss.backward()
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}
        return loss.item(), {name: torch_to_numpy(gradient.clone()) for name, gradient in found.items()}, masks

    def update(self, gradients: Arrays) -> float:
        """A step with these gradients; what clipping multiplied them by."""
        import torch

        for name, gradient in gradients.items():
            own = self.parameters[name].grad
            if own is not None:
                own.copy_(numpy_to_torch(gradient))
        factor = 1.0
        if self._clip_norm is not None:
            before = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip_norm).item()
            factor = min(1.0, self._clip_norm / (before + 1e-6))
        self._optimizer.step()
        return factor

    def settings(self) -> tuple[dict[str, float], dict[str, float]]:
        """Learning rate and weight decay of the last step, by parameter; no decay for one that was not moved."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        own = {name: groups.get(id(p), self._optimizer.param_groups[0]) for name, p in self.parameters.items()}
        moved = {name for name, p in self.parameters.items() if p.grad is not None and id(p) in groups}
        rates = {name: float(group["lr"]) for name, group in own.items()}
        return rates, {n: float(group.get("weight_decay", 0.0)) if n in moved else 0.0 for n, group in own.items()}

    def schedule(self) -> None:
        """Goes on to the learning rate of the next step."""
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> dict[str, np.ndarray]:
        """All parameters and buffers."""
        return {name: torch_to_numpy(tensor.clone()) for name, tensor in self.module.state_dict().items()}


class _FlaxSide:
    """The same in Flax; a step is compiled once, with the masks as arguments."""

    def __init__(self, module: nnx.Module, loss: Callable, optimizer: optax.GradientTransformation, rename: Renames):
        model = cast_module(module, "float64")
        model.train()
        graph, self._params, self._rest = nnx.split(model, nnx.Param, ...)
        self._opt_state = optimizer.init(self._params)
        # Two more models, to read and write by name: one holds the weights, and one gradients or updates.
        self._model, self._carrier = nnx.clone(model), nnx.clone(model)
        self._tree = Tree(self._model, rename)
        slots = Tree(self._carrier, rename).slots
        self._carried = {
            name: slot for name, slot in slots.items() if all(isinstance(v, nnx.Param) for v in slot.variables)
        }
        self.trained = self._carried.keys()
        self.dropout: list[str] = []
        """How dropout differs from PyTorch's; filled when a step is compiled."""

        def gradients(params: nnx.State, rest: nnx.State, batch: Any, masks: Masks) -> Any:
            def scalar(params: nnx.State) -> Any:
                model = nnx.merge(graph, params, rest, copy=True)  # a buffer changes in its own trace
                with computing_in("float64"), replaying_dropout(model, masks, rename) as differences:
                    value = loss(model, batch)
                self.dropout += differences
                return value, nnx.split(model, nnx.Param, ...)[2]

            return jax.value_and_grad(scalar, has_aux=True)(params)

        def update(gradients: nnx.State, opt_state: optax.OptState, params: nnx.State) -> Any:
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return updates, opt_state, optax.apply_updates(params, updates)

        jit = partial(jax.jit, compiler_options=compiler_options())
        self._compute_gradients, self._compute_update = jit(gradients), jit(update)

    def expects(self, name: str) -> bool:
        """Whether Flax has PyTorch's parameter, or lacks it on purpose."""
        return name in self.trained or name in self._tree.ignored or self._tree.rename.leaves_out(name)

    def gradients(self, batch: Any, masks: Masks) -> tuple[float, Arrays]:
        """The loss, and the gradient of every parameter. Running statistics move on."""
        batch = jax.tree.map(partial(cast_array, dtype="float64"), batch)
        (loss, self._rest), gradients = self._compute_gradients(self._params, self._rest, batch, masks)
        return float(loss), self._by_name(gradients)

    def update(self, gradients: Arrays) -> Callable[[Arrays], Arrays]:
        """A step with these gradients; a function from other gradients to the updates of the same step."""
        params, opt_state = self._params, self._opt_state

        def step(gradients: Arrays) -> Any:
            for name, gradient in gradients.items():
                self._carried[name].fill(gradient)
            return self._compute_update(nnx.state(self._carrier, nnx.Param), opt_state, params)

        _, self._opt_state, self._params = step(gradients)
        return lambda other: self._by_name(step(other)[0])

    def state(self) -> dict[str, np.ndarray]:
        """All parameters and buffers."""
        nnx.update(self._model, self._params, self._rest)
        return {name: slot.to_torch() for name, slot in self._tree.slots.items()}

    def _by_name(self, params: nnx.State) -> dict[str, np.ndarray]:
        nnx.update(self._carrier, params)
        return {name: slot.to_torch() for name, slot in self._carried.items()}


def _common(theirs: Arrays, ours: Arrays) -> tuple[Arrays, Arrays]:
    """Both, with the names alone that both have."""
    names = [name for name in theirs if name in ours]
    return {name: theirs[name] for name in names}, {name: ours[name] for name in names}


def _worse(row: TrainingRow, number: int, state: tuple[Arrays, Arrays], gradients: Mapping[str, float]) -> TrainingRow:
    """The row after another step."""
    theirs, ours = state
    error = relative_error(ours[row.name], theirs[row.name])
    step = number if row.step is None and error > STEPS_FLOAT64 else row.step
    gradient = max(row.gradient, gradients.get(row.name, 0.0))
    return replace(row, error=max(row.error, error), gradient=gradient, step=step)


def _without_noise(theirs: Arrays, ours: Arrays) -> tuple[Arrays, Arrays]:
    """Both gradients, with the elements zero that on both sides are rounding noise beside the whole gradient."""
    noise = ZERO_ROUNDINGS * float(np.finfo(np.float64).eps) * norm(theirs.values())
    kept = {
        name: (np.abs(truth) > noise) | (np.abs(ours[name]) > noise)
        for name, truth in theirs.items()
        if truth.shape == ours[name].shape
    }
    cleaned = ({n: np.where(kept.get(n, True), side[n], 0.0) for n in theirs} for side in (theirs, ours))
    return next(cleaned), next(cleaned)
