"""One training step and one evaluation step: functions of arrays, compiled once for a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

Batch = dict[str, Array]
# (model, batch, rngs=...) -> (summed loss, number of tokens)
LossFunction = Callable[..., tuple[Float[Array, ""], Float[Array, ""]]]


class TrainState(NamedTuple):
    """All that training changes, and all that a checkpoint holds of it."""

    step: Int[Array, ""]
    """Steps done; also the position in the data."""
    params: Any
    """The `nnx.State` of the model's parameters."""
    opt_state: optax.OptState
    key: UInt32[Array, "2"]
    """Data of the key that dropout's come from: step k uses fold_in(key, k)."""
    loss_sum: Float[Array, ""]
    """The summed loss of the tokens since the last look, and below their number: nothing is fetched for each step."""
    token_count: Float[Array, ""]
    finite: Bool[Array, ""]
    """Whether every loss was finite so far. A gradient that was not shows in the parameters: see `all_finite`."""


class Steps(NamedTuple):
    """The compiled functions of a run."""

    train: jax.stages.Wrapped
    """(TrainState, Batch) -> TrainState. The old state is donated: use the new one."""
    evaluate: jax.stages.Wrapped
    """(params, Batch) -> (summed loss, number of tokens), without dropout."""


def forget_loss(state: TrainState) -> TrainState:
    """The state with the sums of the loss back at zero."""
    return state._replace(loss_sum=jnp.zeros_like(state.loss_sum), token_count=jnp.zeros_like(state.token_count))


@jax.jit
def all_finite(state: TrainState) -> Bool[Array, ""]:
    """Whether every loss so far and every parameter is finite: at the looks at a run, for it reads all parameters."""
    return state.finite & jnp.isfinite(optax.tree.norm(state.params))


def start(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    loss: LossFunction,
    seed: int,
    valid_loss: LossFunction | None = None,
) -> tuple[TrainState, Steps]:
    """Splits the model once. The state starts from its parameters; buffers are constants of the compiled functions.

    `valid_loss` is what evaluation computes, if not the loss that is trained on.
    """
    model.train()
    graph, params, buffers = nnx.split(model, nnx.Param, ...)
    model.eval()
    eval_graph, *_ = nnx.split(model, nnx.Param, ...)

    def train(state: TrainState, batch: Batch) -> TrainState:
        def mean_loss(params):
            model = nnx.merge(graph, params, buffers)
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
            total, tokens = loss(model, batch, rngs=nnx.Rngs(dropout=key))
            return total / tokens, (total, tokens)

        grads, (total, tokens) = jax.grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            key=state.key,
            loss_sum=state.loss_sum + total,
            token_count=state.token_count + tokens,
            finite=state.finite & jnp.isfinite(total),
        )

    def evaluate(params: nnx.State, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return (valid_loss or loss)(nnx.merge(eval_graph, params, buffers), batch)

    # A copy of the parameters: the caller's model must outlive the donation of the state.
    params = jax.tree.map(jnp.copy, params)
    dtype = jnp.promote_types(jnp.float32, jax.tree.leaves(params)[0].dtype)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key_data(jax.random.key(seed)),
        loss_sum=jnp.zeros((), dtype),
        token_count=jnp.zeros((), dtype),
        finite=jnp.array(True),
    )
    return state, Steps(jax.jit(train, donate_argnums=0), jax.jit(evaluate))
