"""Muon, the optimizer for matrices, with the arithmetic of `torch.optim.Muon`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


class MuonState(NamedTuple):
    """The averages of the gradients."""

    momentum: optax.Updates


def orthogonalize(matrix: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """About UVᵀ for a matrix USVᵀ, by five quintic Newton-Schulz iterations (Jordan et al. 2024).

    Singular values end between about 0.5 and 1.5. PyTorch iterates in bfloat16, this in the dtype of the matrix.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller Gram matrix
    x = x / jnp.maximum(jnp.linalg.norm(x), EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalized, at the size of Adam's steps; every parameter must be a matrix.

    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`: steps of 0.2·sqrt(max(m, n)) times the orthogonal matrix suit
    the learning rates of AdamW (Liu et al. 2025, section 2.2). optax's own starts its averages in another way.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        average = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        ahead = optax.tree.update_moment(updates, average, momentum, 1)
        return jax.tree.map(lambda x: 0.2 * math.sqrt(max(x.shape)) * orthogonalize(x), ahead), MuonState(average)

    return optax.GradientTransformation(init, update)
